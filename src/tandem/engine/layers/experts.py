"""An MLP of many experts, of which each token goes to a few: those that the router gives the largest shares.

Every shard has its part of the inner features of every expert, as of a dense MLP, and the whole router: so all shards
choose alike, and one sum over the group is all that they say to each other. In an exact group (`linear.py`) a shard has
its part of the outputs of every expert instead, and gathers what goes into them.

Tokens are grouped by expert, and each expert computes its group at once. A token's parts are added in order of the
experts, in fp32, so that nothing of it depends on the other tokens, as long as a product does not. The native kernels'
do not. Those of torch do, and keep a row's bits only for one number of rows (`rows.py`); so up to a tile of rows go
through a chosen expert all together, and who did not choose it takes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.layers.activation import silu_and_mul
from tandem.engine.layers.linear import ColumnParallelLinear, GateUpLinear, gathers
from tandem.engine.layers.product import product
from tandem.engine.layers.quantized import LinearWeight
from tandem.engine.layers.weights import Weights
from tandem.engine.native import library
from tandem.engine.parallel import MlpGroup
from tandem.engine.rows import TILE_ROWS


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: GateUpLinear
    down: LinearWeight  # [hidden, this shard's features]; of an exact group [this shard's part of hidden, features]
    group: MlpGroup
    inner: Sequence[int]  # features of every shard

    @classmethod
    def load(
        cls, weights: Weights, name: str, hidden: int, inner: int, *, group: MlpGroup, kinds: tuple[str, str, str]
    ) -> "Expert":
        """inner: features of the whole expert. kinds: names of gate, up and down."""
        part = group.shard.part(inner)
        own = {"rows": group.shard.part(hidden)} if gathers(group) else {"columns": part}
        parts = [one.part(inner) for one in group.shard.all]
        gate, up = (
            ColumnParallelLinear.load(weights, f"{name}.{kind}", inner, hidden, part=part, bias=False)
            for kind in kinds[:2]
        )
        down = weights.linear(f"{name}.{kinds[2]}", hidden, inner, **own)
        return cls(GateUpLinear(gate, up), down, group, [one.stop - one.start for one in parts])

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to this shard's part of each sum, [n, hidden]; of an exact group, to its part of hidden"""
        features = silu_and_mul(*self.gate_up(x))
        return product(self.group.all_gather(features, self.inner) if gathers(self.group) else features, self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    router: Tensor  # [num_experts, hidden]
    experts: tuple[Expert, ...]
    per_token: int
    shares_sum_to_one: bool  # of the chosen experts; else they are what the softmax over all experts says
    group: MlpGroup

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden], the same on every shard"""
        x = self.group.rows(x)
        shares = self._shares(x)
        is_chosen = shares != 0  # a share that is NaN is one: it has to show
        mixed = x.new_zeros(x.shape[0], self.experts[0].down.shape[0], dtype=torch.float32)
        for index in is_chosen.any(dim=0).nonzero().flatten().tolist():
            expert, who, share = self.experts[index], is_chosen[:, index], shares[:, index, None]
            if library.fitting(x) is None and x.shape[0] <= TILE_ROWS:
                mixed += torch.where(who[:, None], expert(x).float() * share, 0.0)
            else:
                rows = who.nonzero().flatten()
                mixed.index_add_(0, rows, expert(x[rows]).float() * share[rows])
        return self._whole(mixed.to(x.dtype), x.shape[1])

    def _whole(self, mixed: Tensor, hidden: int) -> Tensor:
        if not gathers(self.group):
            return self.group.sums(mixed)
        parts = [one.part(hidden) for one in self.group.shard.all]
        return self.group.all_gather(mixed, [part.stop - part.start for part in parts])

    def _shares(self, x: Tensor) -> Tensor:
        """[n, num_experts] fp32: zero for those that a token does not go to"""
        all_shares = product(x, self.router).float().softmax(dim=-1)
        largest, ids = all_shares.topk(self.per_token, dim=-1)
        if self.shares_sum_to_one:
            largest = largest / largest.sum(dim=-1, keepdim=True)
        return torch.zeros_like(all_shares).scatter_(1, ids, largest)

    def product_shapes(self) -> list[tuple[int, int]]:
        first = self.experts[0]
        weights = (self.router, first.gate_up.gate_proj.weight, first.gate_up.up_proj.weight, first.down)
        return [(weight.shape[0], weight.shape[1]) for weight in weights]
