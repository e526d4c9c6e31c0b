"""Mamba 2: a layer that keeps a state instead of keys and values, cut into shards by heads.

    in        gate z, and x, B, C, dt
    convolve  x, B and C of a token with those of the few before it, feature by feature
    scan      S = exp(dt * A) * S + dt * x B^T; y = S C + D * x, a state S [head_dim, state_size] for each head
    out       norm of y * silu(z), back to hidden states

The native kernels scan token by token, with the state in the cache of a core. Without them torch scans prompts in
blocks: within one by matrix products over pairs of tokens, from one to the next by the state. That sums in another
order than token by token, so how a prompt is cut shows in the last bits.

The vectors B and C belong to a group of heads and not to one, and every shard computes all of them. Source: Dao and Gu,
"Transformers are SSMs", 2024; names as in the checkpoints.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.layers.linear import ColumnParallelLinear, GatheringLinear, RowParallelLinear
from tandem.engine.layers.weights import Weights
from tandem.engine.native import library
from tandem.engine.native.library import ScanView, StatesView
from tandem.engine.parallel import Group
from tandem.engine.recurrent_states import RecurrentState, RecurrentStates, StatefulChunk, StatefulRows
from tandem.engine.state_space_config import StateSpaceConfig

BLOCK = 64  # tokens


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm of y * silu(gate), each group of heads for itself; groups may be cut, then the group adds up squares."""

    weight: Tensor  # [own features]
    eps: float
    groups: Tensor  # [own heads] int64: of each head
    head_features: int
    group_features: int  # of a whole group of the layer
    num_groups: int
    group: Group

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        """y: [n, own features] fp32, gate: [n, own features]; returns what gate is."""
        gated = y * functional.silu(gate.float())
        by_head = gated.unflatten(1, (-1, self.head_features)).square().sum(dim=2)
        squares = by_head.new_zeros(by_head.shape[0], self.num_groups).index_add_(1, self.groups, by_head)
        scale = torch.rsqrt(self.group.all_reduce(squares) / self.group_features + self.eps)
        scaled = gated.unflatten(1, (-1, self.head_features)) * scale[:, self.groups, None]
        return scaled.flatten(1).to(gate.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One layer's, of one shard's heads. What the scan computes with is fp32."""

    gate_proj: ColumnParallelLinear
    x_proj: ColumnParallelLinear
    group_proj: ColumnParallelLinear  # B and C of all groups
    dt_proj: ColumnParallelLinear
    conv_weight: Tensor  # [conv_width, own features + group features]
    conv_bias: Tensor | None  # [the same]
    decay: Tensor  # [own heads]: A, negative
    dt_bias: Tensor  # [own heads]
    skip: Tensor  # [own heads]: D
    groups: Tensor  # [own heads] int64: of each head
    norm: GatedNorm
    out_proj: RowParallelLinear | GatheringLinear
    sizes: StateSpaceConfig
    heads_per_kv: int  # of the state's heads, with one KV head
    view: ScanView = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes, bias = self.sizes, self.conv_bias
        numbers = (
            len(self.skip),
            self.heads_per_kv,
            sizes.head_dim,
            sizes.state_size,
            sizes.num_groups,
            sizes.conv_width,
        )
        tensors = (self.decay, self.dt_bias, self.skip, self.groups)
        at_bias = bias.data_ptr() if bias is not None else None
        view = ScanView(*numbers, self.conv_weight.data_ptr(), at_bias, *(each.data_ptr() for each in tensors))
        object.__setattr__(self, "view", view)

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        hidden: int,
        sizes: StateSpaceConfig,
        *,
        own_heads: slice,
        heads_per_kv: int,
        heads_of_all: list[slice],
        norm_eps: float,
        group: Group,
    ) -> "Mamba2":
        """own_heads: this shard's. Raises ModelError as `Weights` does."""
        inner, shared, dim = sizes.inner_size, sizes.group_features, sizes.head_dim
        total = 2 * inner + shared + sizes.num_heads
        own = slice(own_heads.start * dim, own_heads.stop * dim)

        def part_of_in(first: int, rows: slice) -> ColumnParallelLinear:
            part = slice(first + rows.start, first + rows.stop)
            return ColumnParallelLinear.load(weights, f"{name}.in_proj", total, hidden, part=part, bias=sizes.bias)

        def by_head(kind: str) -> Tensor:
            return weights.take(f"{name}.{kind}", sizes.num_heads, rows=own_heads).float()

        def of_conv(kind: str, *shape: int) -> Tensor:
            parts = (own, slice(inner, inner + shared))
            return torch.cat(
                [weights.take(f"{name}.conv1d.{kind}", inner + shared, *shape, rows=p) for p in parts]
            ).float()

        groups = torch.arange(sizes.num_heads, device=weights.device)[own_heads] // (
            sizes.num_heads // sizes.num_groups
        )
        return cls(
            gate_proj=part_of_in(0, own),
            x_proj=part_of_in(inner, own),
            group_proj=part_of_in(2 * inner, slice(0, shared)),
            dt_proj=part_of_in(2 * inner + shared, own_heads),
            conv_weight=of_conv("weight", 1, sizes.conv_width).reshape(-1, sizes.conv_width).T.contiguous(),
            conv_bias=of_conv("bias") if sizes.conv_bias else None,
            decay=-by_head("A_log").exp(),
            dt_bias=by_head("dt_bias"),
            skip=by_head("D"),
            groups=groups,
            norm=GatedNorm(
                weights.take(f"{name}.norm.weight", inner, rows=own),
                norm_eps,
                groups,
                dim,
                inner // sizes.num_groups,
                sizes.num_groups,
                group,
            ),
            out_proj=RowParallelLinear.load(
                weights,
                f"{name}.out_proj",
                hidden,
                inner,
                parts=[slice(heads.start * dim, heads.stop * dim) for heads in heads_of_all],
                bias=sizes.bias,
                group=group,
            ),
            sizes=sizes,
            heads_per_kv=heads_per_kv,
        )

    def __call__(self, x: Tensor, states: RecurrentStates, *, layer: int) -> Tensor:
        """x: [n, hidden], the rows that `states` has planned. layer: among those with a state."""
        own, shared, dt = self.x_proj(x), self.group_proj(x), self.dt_proj(x)
        kernels = library.fitting(own)
        if kernels is not None:
            at = StatesView(*states.place(layer))
            y = kernels.scan(self.view, at, states.stretches, states.begins, own, shared, dt)
        else:
            y = self._scan(torch.cat((own, shared), dim=1).float(), dt.float(), states, layer)
        return self.out_proj(self.norm(y, self.gate_proj(x)))

    # --- in torch ---------------------------------------------------------------------------------------------------

    def _scan(self, seen: Tensor, dt: Tensor, states: RecurrentStates, layer: int) -> Tensor:
        """seen: [n, own features + group features], dt: [n, heads]; returns [n, own features]."""
        dt = functional.softplus(dt + self.dt_bias)
        out = seen.new_empty(seen.shape[0], *self._by_head)
        for chunk in states.chunks:
            self._scan_chunk(out, seen, dt, chunk, states, layer)
        if states.rows is not None:
            self._scan_rows(out, seen, dt, states.rows, states, layer)
        return out.flatten(1)

    def product_shapes(self) -> list[tuple[int, int]]:
        linears = (self.gate_proj, self.x_proj, self.group_proj, self.dt_proj, self.out_proj)
        return [(linear.weight.shape[0], linear.weight.shape[1]) for linear in linears]

    @property
    def _by_head(self) -> tuple[int, int]:
        return len(self.skip), self.sizes.head_dim

    def _scan_chunk(
        self, out: Tensor, seen: Tensor, dt: Tensor, chunk: StatefulChunk, states: RecurrentStates, layer: int
    ) -> None:
        """seen: [n, own features + group features], dt: [n, heads]; writes the chunk's rows of out [n, heads, head_dim]
        and the state of every page on the way.
        """
        is_first = chunk.source < 0
        state = states.beginning() if is_first else states.behind(chunk.source, layer=layer)
        for stretch in chunk.stretches:
            rows = slice(stretch.first, stretch.last)
            window = torch.cat((torch.cat((state.heads_before, state.groups_before), dim=2)[0], seen[rows]))
            x, b, c = self._split(self._convolve(window))
            scanned = state.scanned[0]
            for at in range(0, x.shape[0], BLOCK):
                part = slice(at, at + BLOCK)
                y, scanned = self._scan_block(x[part], b[part], c[part], dt[rows][part], scanned)
                out[rows][part] = y
            state = self._state(scanned[None], window[None, stretch.last - stretch.first :])
            states.leave(stretch.page, state, layer=layer)

    def _scan_block(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x: [t, heads, head_dim], b, c: [t, groups, state_size], dt: [t, heads], state: [heads, head_dim, state_size]

        Returns y, as x, and the state behind the last token.
        """
        decay = (dt * self.decay).cumsum(0).transpose(0, 1)  # [heads, t]: the logarithm, from before the first token
        between = decay[:, :, None] - decay[:, None, :]
        is_later = torch.ones(between.shape[1:], dtype=torch.bool, device=x.device).triu(1)
        pairs = between.masked_fill_(is_later, float("-inf")).exp_()  # [heads, t, t]: what is left of s at t
        pairs *= torch.bmm(c.transpose(0, 1), b.permute(1, 2, 0))[self.groups]
        written = (x * dt[..., None]).transpose(0, 1)  # [heads, t, head_dim]
        read = c.transpose(0, 1)[self.groups] * decay.exp()[..., None]  # [heads, t, state_size]
        y = torch.bmm(pairs, written) + torch.bmm(read, state.transpose(1, 2))
        left = (decay[:, -1:] - decay).exp()  # [heads, t]: what is left of each at the end
        added = torch.bmm((written * left[..., None]).transpose(1, 2), b.transpose(0, 1)[self.groups])
        state = state * decay[:, -1].exp()[:, None, None] + added
        return y.transpose(0, 1) + x * self.skip[:, None], state

    def _scan_rows(
        self, out: Tensor, seen: Tensor, dt: Tensor, rows: StatefulRows, states: RecurrentStates, layer: int
    ) -> None:
        """One token of each of n requests; in and out as of a chunk."""
        state, own = states.load(rows.sources, layer=layer), slice(rows.first, None)
        before = torch.cat((state.heads_before, state.groups_before), dim=2)
        window = torch.cat((before, seen[own, None]), dim=1)  # [n, conv_width, features]
        x, b, c = self._split(self._activated((window * self.conv_weight).sum(dim=1)))
        step = dt[own]
        scanned = state.scanned.mul_((step * self.decay).exp()[..., None, None])
        scanned += (x * step[..., None])[..., None] * b[:, self.groups, None, :]
        y = torch.einsum("nhps,nhs->nhp", scanned, c[:, self.groups])
        out[own] = y.add_(x * self.skip[:, None])
        states.store(rows.targets, self._state(scanned, window[:, 1:]), layer=layer)

    def _convolve(self, window: Tensor) -> Tensor:
        """[conv_width - 1 + t, features] to [t, features]"""
        num_tokens = window.shape[0] - self.sizes.conv_width + 1
        convolved = torch.zeros_like(window[:num_tokens])
        for at, tap in enumerate(self.conv_weight):
            convolved.addcmul_(window[at : at + num_tokens], tap)
        return self._activated(convolved)

    def _activated(self, convolved: Tensor) -> Tensor:
        return functional.silu(convolved if self.conv_bias is None else convolved + self.conv_bias)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, features] to x [t, heads, head_dim], b and c [t, groups, state_size]"""
        own = convolved.shape[1] - self.sizes.group_features
        b, c = convolved[:, own:].unflatten(1, (2, self.sizes.num_groups, -1)).unbind(1)
        return convolved[:, :own].unflatten(1, self._by_head), b, c

    def _state(self, scanned: Tensor, before: Tensor) -> RecurrentState:
        """before: [n, conv_width - 1, features]"""
        own = before.shape[2] - self.sizes.group_features
        return RecurrentState(scanned, before[..., :own], before[..., own:])
