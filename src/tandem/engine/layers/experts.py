"""An MLP of many experts, of which each token goes to a few: those that the router gives the largest shares.

Every shard has its part of the inner features of every expert, as of a dense MLP, and the whole router: so all shards
choose alike, and one sum over the group is all that they say to each other.

Tokens are grouped by expert, and each expert computes its group at once. A token's parts are added in order of the
experts, in fp32, so that nothing of it depends on the other tokens, as long as a product does not. The native kernels'
do not. Those of torch do, and keep a row's bits only for one number of rows (`rows.py`); so up to a tile of rows go
through a chosen expert all together, and who did not choose it takes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.layers.activation import silu_and_mul
from tandem.engine.layers.linear import ColumnParallelLinear, GateUpLinear
from tandem.engine.layers.product import product
from tandem.engine.layers.quantized import LinearWeight
from tandem.engine.layers.weights import Weights
from tandem.engine.native import library
from tandem.engine.parallel import MlpGroup
from tandem.engine.rows import TILE_ROWS


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: GateUpLinear
    down: LinearWeight  # [hidden, this shard's features]

    @classmethod
    def load(
        cls, weights: Weights, name: str, hidden: int, inner: int, *, part: slice, kinds: tuple[str, str, str]
    ) -> "Expert":
        """inner: features of the whole expert, of which `part` are this shard's. kinds: names of gate, up and down."""
        gate, up = (
            ColumnParallelLinear.load(weights, f"{name}.{kind}", inner, hidden, part=part, bias=False)
            for kind in kinds[:2]
        )
        return cls(GateUpLinear(gate, up), weights.linear(f"{name}.{kinds[2]}", hidden, inner, columns=part))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to this shard's part of each sum, [n, hidden]"""
        return product(silu_and_mul(*self.gate_up(x)), self.down)


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
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for index in is_chosen.any(dim=0).nonzero().flatten().tolist():
            expert, who, share = self.experts[index], is_chosen[:, index], shares[:, index, None]
            if library.fitting(x) is None and x.shape[0] <= TILE_ROWS:
                mixed += torch.where(who[:, None], expert(x).float() * share, 0.0)
            else:
                rows = who.nonzero().flatten()
                mixed.index_add_(0, rows, expert(x[rows]).float() * share[rows])
        return self.group.sums(mixed.to(x.dtype))

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
