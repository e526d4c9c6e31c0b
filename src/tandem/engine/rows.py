"""In which rows of a forward pass its tokens stand.

packed   A row per token. All rows go through a layer together.
tiles    Deterministic: tiles of 16 rows, padded. A token stands in row `position % 16` of its tile, so everything
         that is computed by rows has one shape, and a token one place in it, whatever else is in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, overload

import numpy as np
import torch
from torch import Tensor

TILE_ROWS = 16
UNDIVIDED_ELEMENTS = 1 << 15  # torch computes so many elements of a tensor in one thread


@dataclass(frozen=True, slots=True)
class Rows:
    place: Tensor | None = None  # tiles: [t] int64, row of each token; None: packed

    @overload
    def apply(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor: ...

    @overload
    def apply(self, function: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> tuple[Tensor, ...]: ...

    def apply(
        self, function: Callable[..., Tensor | tuple[Tensor, ...]], *values: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """`function` of rows: all at once, or tile by tile. Dimension 0 of every value and result is the row."""
        if self.place is None:
            return function(*values)
        tiles = [function(*tile) for tile in zip(*(value.split(TILE_ROWS) for value in values), strict=True)]
        if isinstance(tiles[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))
        return torch.cat(cast(list[Tensor], tiles))

    def tokens(self, rows: Tensor) -> Tensor:
        """[n, ...] to [t, ...]: without padding, in the order of the batch's tokens."""
        return rows if self.place is None else rows[self.place]

    def padded(self, tokens: Tensor, *, num_rows: int) -> Tensor:
        """[t, ...] to [num_rows, ...]: the inverse of `tokens`; padding is zeros."""
        if self.place is None:
            return tokens
        return tokens.new_zeros(num_rows, *tokens.shape[1:]).index_copy_(0, self.place, tokens)


def tile_places(positions: np.ndarray) -> tuple[np.ndarray, int]:
    """Row of each token: `position % TILE_ROWS` in the first tile where that row is still free; and the row count."""
    slots = positions % TILE_ROWS
    order = np.argsort(slots, kind="stable")
    counts = np.bincount(slots, minlength=TILE_ROWS)
    starts = np.cumsum(counts) - counts
    tiles = np.empty(len(positions), dtype=np.int64)
    tiles[order] = np.arange(len(positions)) - starts[slots[order]]
    num_tiles = int(counts.max()) if len(positions) else 0
    return tiles * TILE_ROWS + slots, num_tiles * TILE_ROWS
