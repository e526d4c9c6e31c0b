"""Where layers take their tensors from."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.layers.quantized import LinearWeight, Table

WHOLE = slice(None)


class Weights(Protocol):
    """A checkpoint, for one shard. Tensors are in the type and on the device that the model computes with."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> str: ...

    def take(self, name: str, *shape: int, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """The tensor of this name, or the part that the slices of its first and second dimension cut out.

        shape: of the whole tensor in the file. Raises ModelError for one that is missing or has another shape.
        """
        ...

    def linear(
        self, name: str, outputs: int, inputs: int, *, rows: slice = WHOLE, columns: slice = WHOLE
    ) -> LinearWeight:
        """The weight of the linear layer of this name, or that part of it: plain, or of few bits.

        outputs, inputs: of the whole layer. Raises ModelError as `take` does, and where columns cut a group of inputs.
        """
        ...

    def table(self, name: str, outputs: int, inputs: int, *, rows: slice = WHOLE) -> Table:
        """The same of the embedding or the head: of few bits if they are stored so, and not made so here."""
        ...

    def packed(self, weight: Table) -> LinearWeight:
        """The same weight, as its products take the least time."""
        ...

    def everything(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint by name, as stored: for a model that finds their places itself."""
        ...

    def elsewhere(self) -> "Weights":
        """The same checks, and no data: for the layers of other stages, which hold the model together all the same."""
        ...
