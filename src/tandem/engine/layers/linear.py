"""Linear layers that know their shard. With one shard they are plain.

    ColumnParallelLinear   cut along its outputs: each shard computes some of them from the whole input
    RowParallelLinear      cut along its inputs: each shard computes a part of every sum, and the group adds them up
    QkvLinear              three of the first kind, cut by heads
    GateUpLinear           two of the first kind

With `--deterministic` a group is exact: a sum has to have the bits that it has in one worker. There a layer of the
second kind is cut along its outputs, too, gets the whole input from the group, and gives its part of the outputs back:

    GatheringLinear

Weights keep their layout in the file, [out_features, in_features], because they are mapped, not loaded. So q, k and v,
and gate and up, stay tensors of their own: joining them would copy them. Where the file has joined them (`fused`), each
is some of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.engine.layers.product import product
from tandem.engine.layers.quantized import LinearWeight
from tandem.engine.layers.weights import Weights
from tandem.engine.parallel import HeadShard, MlpGroup


def gathers(group: MlpGroup) -> bool:
    """Whether sums are whole on one shard each, so that inputs are gathered."""
    return group.is_exact and group.shard.size > 1


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    weight: LinearWeight  # [this shard's out_features, in_features]
    bias: Tensor | None  # [this shard's out_features]

    @classmethod
    def load(
        cls, weights: Weights, name: str, outputs: int, inputs: int, *, part: slice, bias: bool
    ) -> "ColumnParallelLinear":
        """outputs, inputs: of the whole layer; part: this shard's outputs."""
        return cls(
            weights.linear(name, outputs, inputs, rows=part),
            weights.take(f"{name}.bias", outputs, rows=part) if bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in_features] to [n, this shard's out_features]"""
        return product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    weight: LinearWeight  # [out_features, this shard's in_features]
    bias: Tensor | None  # [out_features]; only the first shard adds it
    group: MlpGroup

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        outputs: int,
        inputs: int,
        *,
        parts: Sequence[slice],
        bias: bool,
        group: MlpGroup,
    ) -> "RowParallelLinear | GatheringLinear":
        """outputs, inputs: of the whole layer; parts: every shard's inputs."""
        if gathers(group):
            own = [shard.part(outputs) for shard in group.shard.all]
            rows = own[group.shard.rank]
            return GatheringLinear(
                weights.linear(name, outputs, inputs, rows=rows),
                weights.take(f"{name}.bias", outputs, rows=rows) if bias else None,
                group,
                [part.stop - part.start for part in parts],
                [part.stop - part.start for part in own],
            )
        part = parts[group.shard.rank]
        weight = weights.linear(name, outputs, inputs, columns=part)
        added = weights.take(f"{name}.bias", outputs) if bias else None
        return cls(weight, added if group.shard.rank == 0 else None, group)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, this shard's in_features] to [own rows, out_features]: all n, unless DP ranks share the rows"""
        return self.group.sums(product(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class GatheringLinear:
    """What `RowParallelLinear.load` gives an exact group: the same in and out, and every sum is one worker's, whole."""

    weight: LinearWeight  # [this shard's out_features, in_features]
    bias: Tensor | None  # [this shard's out_features]
    group: MlpGroup
    inputs: Sequence[int]  # of every shard
    outputs: Sequence[int]

    def __call__(self, x: Tensor) -> Tensor:
        """[n, this shard's in_features] to [n, out_features]"""
        return self.group.all_gather(
            product(self.group.all_gather(x, self.inputs), self.weight, self.bias), self.outputs
        )


@dataclass(frozen=True, slots=True)
class QkvLinear:
    q_proj: ColumnParallelLinear
    k_proj: ColumnParallelLinear
    v_proj: ColumnParallelLinear
    head_dim: int

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        inputs: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        heads: HeadShard,
        bias: bool,
        fused: bool = False,
    ) -> "QkvLinear":
        """num_heads, num_kv_heads: of the whole layer. Shards that look at the same KV head each load it.

        fused: the file has one tensor `qkv_proj`, all queries before all keys before all values.
        """

        def proj(kind: str, first: int, count: int, own: slice) -> ColumnParallelLinear:
            """first: head, counted over queries, keys and values"""
            begin, outputs = (first, num_heads + 2 * num_kv_heads) if fused else (0, count)
            part = slice((begin + own.start) * head_dim, (begin + own.stop) * head_dim)
            tensor = f"{name}.qkv_proj" if fused else f"{name}.{kind}_proj"
            return ColumnParallelLinear.load(weights, tensor, outputs * head_dim, inputs, part=part, bias=bias)

        return cls(
            q_proj=proj("q", 0, num_heads, heads.query),
            k_proj=proj("k", num_heads, num_kv_heads, heads.kv),
            v_proj=proj("v", num_heads + num_kv_heads, num_kv_heads, heads.kv),
            head_dim=head_dim,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, in_features] to q [n, heads, head_dim], k and v [n, kv_heads, head_dim]: those of this shard"""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        n = x.shape[0]
        return q.view(n, -1, self.head_dim), k.view(n, -1, self.head_dim), v.view(n, -1, self.head_dim)


@dataclass(frozen=True, slots=True)
class GateUpLinear:
    gate_proj: ColumnParallelLinear
    up_proj: ColumnParallelLinear

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        outputs: int,
        inputs: int,
        *,
        part: slice,
        bias: bool,
        kinds: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> "GateUpLinear":
        """outputs: of either. kinds: names of gate and up; one and the same where the file has them in one tensor."""
        parts = (part, part)
        if kinds[0] == kinds[1]:
            parts, outputs = (part, slice(outputs + part.start, outputs + part.stop)), 2 * outputs
        gate, up = (
            ColumnParallelLinear.load(weights, f"{name}.{kind}", outputs, inputs, part=own, bias=bias)
            for kind, own in zip(kinds, parts, strict=True)
        )
        return cls(gate, up)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, in_features] to gate and up, each [n, this shard's features]"""
        return self.gate_proj(x), self.up_proj(x)
