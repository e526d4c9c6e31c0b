"""The only place where plans become tensors.

Two arrangements of the tokens of a batch:

    default        Spans of known tokens one after another, then one row per decoding request, longest context first.
                   Decoding rows form groups whose padded context fits into the cache; groups are contiguous.
    deterministic  Tiles of 16 rows, padded; a token sits in row `position % 16` of its tile, so everything computed
                   by rows has one shape, and a token one place in it, whatever else is in the batch. Attention sees
                   one page of queries at a time, the token at `position % page_size`, and whole pages of keys. A
                   decoding row is a span of one token.

`sampled` brings the rows back into the order of outcomes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast, overload

import numpy as np
import torch
from torch import Tensor

from tandem.core.values import ceil_div
from tandem.engine.decode_set import DecodeSet
from tandem.engine.kv_memory import KvMemory
from tandem.engine.sequence import Sequence

TILE_ROWS = 16
MAX_CACHED_MASKS = 64  # deterministic: one per number of pages; the largest are a few hundred KiB
GROUP_BYTES = 512 << 10  # gathered keys of one decode group: keys and values together stay in a core's L2 cache


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a request, whose KV this batch writes."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens [first, last) of the batch are one span. `mask` is None when it begins at position 0: plain causal."""

    first: int
    last: int
    num_pages: int
    page_rows: Tensor | None  # [num_kv_heads * num_pages] int64: rows of KvMemory.page_rows, layer 0, key
    mask: Tensor | None  # [1, 1, last - first, num_pages * page_size], added to scores


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Tokens [first, last) of the batch are decoding rows, padded to the same number of pages."""

    first: int
    last: int
    num_pages: int
    page_rows: Tensor  # [n * num_kv_heads * num_pages] int64
    mask: Tensor  # [n, 1, 1, num_pages * page_size], added to scores


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Deterministic: tokens [first, last) of the batch lie in one page, from `slot` on."""

    first: int
    last: int
    slot: int
    num_pages: int
    page_rows: Tensor  # [num_kv_heads * num_pages] int64
    mask: Tensor  # [1, 1, page_size, num_pages * page_size], added to scores


@dataclass(slots=True)
class Inputs:
    """One batch. `n` rows go through the layers, `t <= n` of them are tokens (`t == n` unless deterministic)."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    last_position: int
    writes: Tensor  # [t * num_kv_heads] int64: rows of KvMemory.token_rows, layer 0, key
    sampled: Tensor  # [s] int64: rows whose next token is wanted; deterministic: arranged in tiles again
    pages_to_clear: list[int]
    prompts: list[PromptSpan] = field(default_factory=list)
    decodes: list[DecodeGroup] = field(default_factory=list)
    query_tiles: list[QueryTile] = field(default_factory=list)
    place: Tensor | None = None  # deterministic: [t] int64, row of each token
    sampled_place: Tensor | None = None  # deterministic: [outcome rows] int64, index into `sampled`

    @overload
    def by_rows(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor: ...

    @overload
    def by_rows(self, function: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> tuple[Tensor, ...]: ...

    def by_rows(
        self, function: Callable[..., Tensor | tuple[Tensor, ...]], *values: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """`function` of rows: all at once, or tile by tile. Dimension 0 of every value and result is the row."""
        if self.place is None:
            return function(*values)
        tiles = [function(*tile) for tile in zip(*(value.split(TILE_ROWS) for value in values), strict=True)]
        if isinstance(tiles[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))
        return torch.cat(cast(list[Tensor], tiles))


class InputBuilder:
    """Turns spans and the decode set into `Inputs` for one KV memory."""

    def __init__(self, kv: KvMemory, *, deterministic: bool) -> None:
        self._kv = kv
        self._page_size = kv.page_size
        self._deterministic = deterministic
        self._device = kv.tensor.device
        self._heads = np.arange(kv.num_kv_heads, dtype=np.int64)
        self._masks: dict[int, Tensor] = {}

    def build(self, spans: list[Span], decode_set: DecodeSet | None) -> Inputs:
        """Rows of outcomes: spans that sample, in order, then the members of the decode set, in join order."""
        if self._deterministic:
            members = decode_set.members if decode_set is not None else []
            ends = [Span(m, len(m.tokens) - 1, len(m.tokens), True) for m in members]
            return self._tiled(spans + ends)
        return self._packed(spans, decode_set if decode_set is not None and len(decode_set) else None)

    # --- default ----------------------------------------------------------------------------------------------------

    def _packed(self, spans: list[Span], decode_set: DecodeSet | None) -> Inputs:
        tokens, positions, pages, sampled = [], [], [], []
        prompts: list[PromptSpan] = []
        clear: list[int] = []
        first = 0
        for span in spans:
            last = first + span.stop - span.start
            tokens.append(_tokens(span))
            positions.append(np.arange(span.start, span.stop))
            pages.append(self._pages_of(span)[positions[-1] // self._page_size])
            prompts.append(self._prompt_span(span, first, last))
            clear += self._page_to_clear(span)
            if span.samples:
                sampled.append(last - 1)
            first = last
        decodes: list[DecodeGroup] = []
        if decode_set is not None:
            lengths = decode_set.lengths
            order = np.argsort(-lengths, kind="stable")
            ends = lengths[order] - 1
            tables = decode_set.tables
            # Without this a missing Grow would write into a page that belongs to somebody else by now.
            assert (ends // self._page_size < decode_set.num_pages[order]).all(), "every decoding token has a page"
            written = tables[order, ends // self._page_size]
            tokens.append(decode_set.last_tokens[order])
            positions.append(ends)
            pages.append(written)
            clear += written[ends % self._page_size == 0].tolist() if self._page_size > 1 else []
            decodes = self._groups(tables, order, ends, first)
            rows = np.empty(len(order), dtype=np.int64)
            rows[order] = np.arange(first, first + len(order))
            sampled += rows.tolist()
        at = np.concatenate(positions)
        return Inputs(
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(at),
            last_position=int(at.max()),
            writes=self._writes(np.concatenate(pages), at),
            sampled=self._tensor(np.array(sampled, dtype=np.int64)),
            pages_to_clear=clear,
            prompts=prompts,
            decodes=decodes,
        )

    def _prompt_span(self, span: Span, first: int, last: int) -> PromptSpan:
        num_pages = ceil_div(span.stop, self._page_size)
        if span.start == 0:
            return PromptSpan(first, last, num_pages, None, None)
        keys = torch.arange(num_pages * self._page_size, device=self._device)
        queries = torch.arange(span.start, span.stop, device=self._device)
        mask = self._additive(keys[None, :] > queries[:, None])
        rows = self._page_rows(self._pages_of(span)[None, :num_pages])
        return PromptSpan(first, last, num_pages, rows, mask[None, None])

    def _groups(self, tables: np.ndarray, order: np.ndarray, ends: np.ndarray, first: int) -> list[DecodeGroup]:
        """Cut rows, longest first, where a group would outgrow the cache or pad more than it holds."""
        num_pages = ends // self._page_size + 1
        bytes_per_page = self._kv.page_bytes // (2 * self._kv.num_layers)
        groups = []
        begin = 0
        while begin < len(order):
            width = int(num_pages[begin])
            room = max(1, GROUP_BYTES // (width * bytes_per_page))
            stop = min(begin + room, int(np.searchsorted(-num_pages, -(width // 2), side="left")))
            stop = max(stop, begin + 1)
            groups.append(self._group(tables[order[begin:stop], :width], ends[begin:stop], first + begin))
            begin = stop
        return groups

    def _group(self, tables: np.ndarray, ends: np.ndarray, first: int) -> DecodeGroup:
        count, width = tables.shape
        owned = np.arange(width) <= (ends // self._page_size)[:, None]
        tables = np.where(owned, tables, tables[:, :1])  # padding reads the row's own first page, never a stranger's
        masked = np.arange(width * self._page_size) > ends[:, None]
        mask = self._additive(self._tensor(masked))
        return DecodeGroup(first, first + count, width, self._page_rows(tables), mask[:, None, None, :])

    # --- deterministic ----------------------------------------------------------------------------------------------

    def _tiled(self, spans: list[Span]) -> Inputs:
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        pages = np.concatenate(
            [self._pages_of(s)[np.arange(s.start, s.stop) // self._page_size] for s in spans],
        )
        place, num_rows = tile_places(positions)
        token_ids, row_positions = np.zeros((2, num_rows), dtype=np.int64)
        token_ids[place] = np.concatenate([_tokens(span) for span in spans])
        row_positions[place] = positions
        tiles: list[QueryTile] = []
        ends, clear, first = [], [], 0
        for span in spans:
            tiles += self._query_tiles(span, first)
            clear += self._page_to_clear(span)
            first += span.stop - span.start
            if span.samples:
                ends.append(first - 1)
        sampled_place, num_sampled = tile_places(positions[ends])
        sampled = np.zeros(num_sampled, dtype=np.int64)
        sampled[sampled_place] = place[ends]
        return Inputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(row_positions),
            last_position=int(positions.max()),
            writes=self._writes(pages, positions),
            sampled=self._tensor(sampled),
            pages_to_clear=clear,
            query_tiles=tiles,
            place=self._tensor(place),
            sampled_place=self._tensor(sampled_place),
        )

    def _query_tiles(self, span: Span, first: int) -> list[QueryTile]:
        """One per page that the span touches."""
        tiles = []
        table = self._pages_of(span)
        at = span.start
        while at < span.stop:
            stop = min(span.stop, (at // self._page_size + 1) * self._page_size)
            num_pages = at // self._page_size + 1
            begin = first + at - span.start
            rows = self._page_rows(table[None, :num_pages])
            mask = self._tile_mask(num_pages)
            tiles.append(QueryTile(begin, begin + stop - at, at % self._page_size, num_pages, rows, mask))
            at = stop
        return tiles

    def _tile_mask(self, num_pages: int) -> Tensor:
        """[1, 1, page_size, num_pages * page_size]: the last page is causal, those before it are seen whole."""
        if num_pages not in self._masks:
            queries = torch.arange(self._page_size, device=self._device) + (num_pages - 1) * self._page_size
            keys = torch.arange(num_pages * self._page_size, device=self._device)
            if len(self._masks) >= MAX_CACHED_MASKS:
                self._masks.clear()
            self._masks[num_pages] = self._additive(keys[None, :] > queries[:, None])[None, None]
        return self._masks[num_pages]

    # --- shared -----------------------------------------------------------------------------------------------------

    def _pages_of(self, span: Span) -> np.ndarray:
        assert span.start < span.stop <= len(span.sequence.tokens), "a span holds known tokens"
        num_pages = ceil_div(span.stop, self._page_size)
        assert num_pages <= len(span.sequence.pages), "every token of a span has a page"
        return np.array(span.sequence.pages[:num_pages], dtype=np.int64)

    def _page_to_clear(self, span: Span) -> list[int]:
        """The page whose first slot the span writes and whose last one it does not."""
        page_index, filled = divmod(span.stop, self._page_size)
        return [span.sequence.pages[page_index]] if filled and page_index * self._page_size >= span.start else []

    def _writes(self, pages: np.ndarray, positions: np.ndarray) -> Tensor:
        rows = (pages[:, None] * self._kv.num_kv_heads + self._heads) * (2 * self._kv.num_layers)
        return self._tensor((rows * self._page_size + (positions % self._page_size)[:, None]).reshape(-1))

    def _page_rows(self, tables: np.ndarray) -> Tensor:
        """tables: [n, pages]; returns [n * num_kv_heads * pages]"""
        rows = (tables[:, None, :] * self._kv.num_kv_heads + self._heads[:, None]) * (2 * self._kv.num_layers)
        return self._tensor(rows.reshape(-1))

    def _additive(self, masked: Tensor) -> Tensor:
        zeros = torch.zeros(masked.shape, dtype=self._kv.tensor.dtype, device=self._device)
        return zeros.masked_fill_(masked, float("-inf"))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _tokens(span: Span) -> np.ndarray:
    return np.array(span.sequence.tokens[span.start : span.stop], dtype=np.int64)


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
