"""Graphs without a device: attention that plans into what it has reserved, and a graph that computes again."""

from collections.abc import Callable

from torch import Tensor

from tandem.engine.attention.torch_sdpa import TorchSdpa
from tandem.engine.batch import Batch

NAME = "torch, reserving"
WHERE = "repeated_graphs:ReservingTorch"  # as a value of `ATTENTION_BACKENDS`


class ReservingTorch(TorchSdpa):
    """A `ReservingBackend`."""

    def reserve(self, rows: int, *, width: int) -> tuple[int, int]:
        return rows, width

    def plan_into(self, reserved: tuple[int, int], batch: Batch) -> None:
        assert batch.decoding is not None
        assert not batch.chunks
        rows, width = batch.decoding.tables.shape
        assert rows == reserved[0] == len(batch.slots) == len(batch.decoding.lengths), "a graph has one number of rows"
        assert width <= reserved[1]
        self.plan(batch)


class RepeatedGraph:
    """A `Graph`: what was computed into its result is computed there again."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        self._compute = compute
        self._result = compute().clone()
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._compute())
