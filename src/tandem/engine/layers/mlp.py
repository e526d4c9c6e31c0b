"""The dense MLP of a block: cut along its inner features, one sum over the group."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.layers.activation import Activation, silu_and_mul
from tandem.engine.layers.linear import GateUpLinear, GatheringLinear, RowParallelLinear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: GateUpLinear
    down_proj: RowParallelLinear | GatheringLinear
    activation: Activation = silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden], the same on every shard"""
        x = self.down_proj.group.rows(x)
        return self.down_proj(self.activation(*self.gate_up(x)))

    def product_shapes(self) -> list[tuple[int, int]]:
        linears = (self.gate_up.gate_proj, self.gate_up.up_proj, self.down_proj)
        return [(linear.weight.shape[0], linear.weight.shape[1]) for linear in linears]
