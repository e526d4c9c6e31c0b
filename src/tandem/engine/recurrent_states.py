"""The states of state-space layers between steps. They are where the KV is: in the page of the last token they know.

So nobody else keeps, counts or moves them. A row reads the state behind the token before its first one, in that token's
page, and leaves one in every page that it comes through: in one that it fills, what is known at its end, from where
whoever has the same beginning goes on; in its last one, what the request's next row goes on from.

A cached page is full, and one on offer belongs to a prompt that is whole, so neither's state is written again. A token
that is computed twice makes another state: who computes again begins at the border of a page, as everybody here does.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.engine.batch import Batch, Chunk, DecodingRows
from tandem.engine.kv_memory import KvMemory, StateShape

NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Of one layer and n rows, of this shard's heads. Copies."""

    scanned: Tensor  # [n, heads, head_dim, state_size]
    heads_before: Tensor  # [n, conv_width - 1, heads * head_dim]: what the convolution saw of the last tokens
    groups_before: Tensor  # [n, conv_width - 1, group_features]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [first, last) of the batch are tokens of one request, in one page."""

    first: int
    last: int
    page: int  # that gets the state behind the last one


@dataclass(frozen=True, slots=True)
class StatefulChunk:
    """Of one request; each of its stretches goes on behind the one before it."""

    source: int  # the page of the token before its first one, or NO_PAGE
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class StatefulRows:
    """Rows from `first` on are the newest tokens of n requests."""

    first: int
    sources: Tensor  # [n] int64 pages
    targets: Tensor  # [n] int64 pages


class RecurrentStates:
    """Of the layers of one stage. Each step: `plan` once, then `load` and `store` once per layer and piece of work."""

    def __init__(self, kv: KvMemory, shape: StateShape) -> None:
        self._page_size = kv.page_size
        self._numbers = kv.states
        self._shape = shape
        self._kv_heads = kv.num_kv_heads
        self.chunks: list[StatefulChunk] = []
        self.rows: StatefulRows | None = None
        self.stretches, self.begins = self._for_kernels()

    def plan(self, batch: Batch) -> None:
        assert batch.rows.place is None, "tiles cut no sequence in order"
        self.chunks = [self._chunk(chunk) for chunk in batch.chunks]
        self.rows = self._decoding(batch.decoding) if batch.decoding is not None else None
        self.stretches, self.begins = self._for_kernels()

    def _chunk(self, chunk: Chunk) -> StatefulChunk:
        size, stretches, at = self._page_size, list[Stretch](), chunk.start
        while at < chunk.stop:
            stop = min(chunk.stop, (at // size + 1) * size)
            first = chunk.first + at - chunk.start
            stretches.append(Stretch(first, first + stop - at, int(chunk.pages[at // size])))
            at = stop
        source = int(chunk.pages[(chunk.start - 1) // size]) if chunk.start else NO_PAGE
        return StatefulChunk(source, tuple(stretches))

    def _decoding(self, rows: DecodingRows) -> StatefulRows:
        ends = rows.lengths - 1
        # There is a token before a row, unless its prompt of one failed with its batch: then nobody reads the result.
        before = np.maximum(ends - 1, 0)
        places = np.arange(len(ends))
        sources, targets = (rows.tables[places, at // self._page_size] for at in (before, ends))
        device = self._numbers.device
        return StatefulRows(rows.first, *(torch.from_numpy(pages).to(device) for pages in (sources, targets)))

    def _for_kernels(self) -> tuple[np.ndarray, np.ndarray]:
        """[s, 4] int64, each with its source, and [r + 1]: those of request i are [begins[i], begins[i + 1])."""
        found: list[tuple[int, int, int, int]] = []
        begins = [0]
        for chunk in self.chunks:
            source = chunk.source
            for at in chunk.stretches:
                found.append((at.first, at.last, source, at.page))
                source = at.page
            begins.append(len(found))
        if self.rows is not None:
            pages = zip(self.rows.sources.tolist(), self.rows.targets.tolist(), strict=True)
            found += [(row, row + 1, *pair) for row, pair in enumerate(pages, self.rows.first)]
            begins += range(begins[-1] + 1, len(found) + 1)
        return np.array(found, dtype=np.int64), np.array(begins, dtype=np.int64)

    def place(self, layer: int) -> tuple[int, int, int, int, int]:
        """Of one layer, for the native kernels: the address of all states; how many numbers there are from one page,
        and KV head, to the next; where in a KV head's this layer's are, and those of them for the convolution.
        """
        scanned, convolved = self._places(layer)
        page_stride, head_stride, _ = self._numbers.stride()
        return self._numbers.data_ptr(), page_stride, head_stride, scanned.start, convolved.start

    def beginning(self) -> RecurrentState:
        """Of one row, before its first token."""
        shape, heads = self._shape, self._kv_heads * self._shape.num_heads
        new, before = self._numbers.new_zeros, shape.conv_width - 1
        return RecurrentState(
            new(1, heads, shape.head_dim, shape.state_size),
            new(1, before, heads * shape.head_dim),
            new(1, before, shape.group_features),
        )

    def behind(self, page: int, *, layer: int) -> RecurrentState:
        """Of one row, behind the last token in this page."""
        return self.load(torch.tensor([page], device=self._numbers.device), layer=layer)

    def load(self, pages: Tensor, *, layer: int) -> RecurrentState:
        """pages: [n] int64"""
        shape, heads, n = self._shape, self._kv_heads, pages.shape[0]
        scanned, convolved = self._places(layer)
        kept = self._numbers[..., convolved].index_select(0, pages).unflatten(2, (shape.conv_width - 1, -1))
        own = shape.num_heads * shape.head_dim
        return RecurrentState(
            self._numbers[..., scanned]
            .index_select(0, pages)
            .view(n, heads * shape.num_heads, shape.head_dim, shape.state_size),
            kept[..., :own].transpose(1, 2).reshape(n, shape.conv_width - 1, heads * own),
            kept[:, 0, :, own:],
        )

    def store(self, pages: Tensor, state: RecurrentState, *, layer: int) -> None:
        """pages: [n] int64, each once"""
        shape, heads, n = self._shape, self._kv_heads, pages.shape[0]
        scanned, convolved = self._places(layer)
        self._numbers[..., scanned].index_copy_(0, pages, state.scanned.view(n, heads, shape.scanned))
        by_head = state.heads_before.unflatten(2, (heads, -1)).transpose(1, 2)
        groups = state.groups_before[:, None].expand(-1, heads, -1, -1)
        kept = torch.cat((by_head, groups), dim=3)
        self._numbers[..., convolved].index_copy_(0, pages, kept.flatten(2))

    def leave(self, page: int, state: RecurrentState, *, layer: int) -> None:
        """One row's."""
        self.store(torch.tensor([page], device=self._numbers.device), state, layer=layer)

    def _places(self, layer: int) -> tuple[slice, slice]:
        shape = self._shape
        first = layer * (shape.scanned + shape.convolved)
        border = first + shape.scanned
        return slice(first, border), slice(border, border + shape.convolved)
