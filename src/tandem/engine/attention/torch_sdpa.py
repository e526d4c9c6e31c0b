"""Attention in plain torch: gather the pages that are seen, then scaled dot product.

    chunks         One call each. Without earlier keys: plain causal, on what was just computed.
    decoding rows  Groups whose padded context fits into the cache of a core; a group is one call.
    deterministic  One page of queries at a time, the token at `position % page_size`, and whole pages of keys: the
                   shape of a call follows from the position alone. A decoding row is a chunk of one token.

A window leaves out the pages that no query of a call sees, and masks the rest; layers with the same window share their
calls. Scores with a soft cap are computed here step by step, in fp32 and some queries at a time; others by one call.

Every call first writes the batch's own keys and values into their pages, so a query finds all keys up to its own
position there. Gathered pages go through two buffers that are kept: fresh ones of that size would cost a page fault
per 4 KiB, more than the attention itself.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.engine.attention.base import AttentionRules
from tandem.engine.batch import Batch, Chunk, DecodingRows
from tandem.engine.kv_memory import KvMemory, from_int8, to_int8
from tandem.engine.rows import UNDIVIDED_ELEMENTS

SCORE_ELEMENTS = 1 << 24  # with a soft cap: scores that are in memory at a time
MAX_CACHED_MASKS = 64  # deterministic: one per number of pages; the largest are a few hundred KiB
GROUP_BYTES = 512 << 10  # gathered keys of one decode group: keys and values together stay in a core's L2 cache


@dataclass(frozen=True, slots=True)
class PromptCall:
    """Tokens [first, last) of the batch are one chunk. `mask` is None when all keys are in it: plain causal."""

    first: int
    last: int
    num_pages: int
    page_rows: Tensor | None  # [num_kv_heads * num_pages] int64: rows of KvMemory.page_rows, layer 0, key
    mask: Tensor | None  # [1, 1, last - first, num_pages * page_size], added to scores


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Tokens [first, last) of the batch are decoding rows, padded to the same number of pages."""

    first: int
    last: int
    num_pages: int
    page_rows: Tensor  # [n * num_kv_heads * num_pages] int64
    mask: Tensor  # [n, 1, 1, num_pages * page_size], added to scores


@dataclass(frozen=True, slots=True)
class TileCall:
    """Deterministic: tokens [first, last) of the batch lie in one page, from `slot` on."""

    first: int
    last: int
    slot: int
    num_pages: int
    page_rows: Tensor  # [num_kv_heads * num_pages] int64
    mask: Tensor  # [1, 1, page_size, num_pages * page_size], added to scores


Call = PromptCall | DecodeCall | TileCall


class TorchSdpa:
    """An `AttentionBackend`."""

    def __init__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> None:
        self.needs_tiles = deterministic
        self._kv = kv
        self._page_size = kv.page_size
        self._windows = rules.windows[: kv.num_cells]
        self._rules = rules
        self._deterministic = deterministic
        self._device = kv.tensor.device
        self._heads = np.arange(kv.num_kv_heads, dtype=np.int64)
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._keys = kv.tensor.new_empty(0)
        self._values = kv.tensor.new_empty(0)
        self._writes = torch.empty(
            0, dtype=torch.int64
        )  # [t * num_kv_heads]: rows of KvMemory.token_rows, layer 0, key
        self._calls: dict[int | None, list[Call]] = {}  # by window

    # --- once per batch -----------------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> None:
        self._writes = self._token_rows(batch.slots)
        self._calls = {window: self._calls_of(batch, window) for window in dict.fromkeys(self._windows)}

    def _calls_of(self, batch: Batch, window: int | None) -> list[Call]:
        if self._deterministic:
            assert batch.decoding is None, "deterministic: a decoding row is a chunk"
            return [call for chunk in batch.chunks for call in self._tile_calls(chunk, window)]
        calls: list[Call] = [self._prompt_call(chunk, window) for chunk in batch.chunks]
        return calls if batch.decoding is None else calls + self._decode_calls(batch.decoding, window)

    def _prompt_call(self, chunk: Chunk, window: int | None) -> PromptCall:
        is_causal = chunk.start == 0 and (window is None or chunk.stop <= window)
        if is_causal and self._rules.soft_cap is None and not self._kv.is_int8:
            return PromptCall(chunk.first, chunk.last, len(chunk.pages), None, None)
        unseen = self._unseen_pages(chunk.start, window)
        pages = chunk.pages[unseen:]
        keys = torch.arange(unseen * self._page_size, len(chunk.pages) * self._page_size, device=self._device)
        queries = torch.arange(chunk.start, chunk.stop, device=self._device)
        mask = self._mask(keys, queries, window)
        return PromptCall(chunk.first, chunk.last, len(pages), self._page_rows(pages[None, :]), mask)

    def _decode_calls(self, rows: DecodingRows, window: int | None) -> list[Call]:
        """Cut rows, longest first, where a group would outgrow the cache or pad more than it holds."""
        ends, tables = rows.lengths - 1, rows.tables
        if window is not None:
            ends, tables = self._within_window(ends, tables, window=window)
        num_pages = np.maximum.accumulate((ends // self._page_size + 1)[::-1])[::-1]  # sorted even behind a window
        bytes_per_page = self._kv.page_bytes // (2 * self._kv.num_cells)
        calls: list[Call] = []
        begin = 0
        while begin < len(ends):
            width = int(num_pages[begin])
            room = max(1, GROUP_BYTES // (width * bytes_per_page))
            stop = min(begin + room, int(np.searchsorted(-num_pages, -(width // 2), side="left")))
            stop = max(stop, begin + 1)
            calls.append(self._decode_call(tables[begin:stop, :width], ends[begin:stop], rows.first + begin, window))
            begin = stop
        return calls

    def _decode_call(self, tables: np.ndarray, ends: np.ndarray, first: int, window: int | None) -> DecodeCall:
        count, width = tables.shape
        owned = np.arange(width) <= (ends // self._page_size)[:, None]
        tables = np.where(owned, tables, tables[:, :1])  # padding reads the row's own first page, never a stranger's
        keys = np.arange(width * self._page_size)
        masked = keys > ends[:, None]
        if window is not None:
            masked |= keys <= ends[:, None] - window
        mask = self._additive(self._tensor(masked))
        return DecodeCall(first, first + count, width, self._page_rows(tables), mask[:, None, None, :])

    def _tile_calls(self, chunk: Chunk, window: int | None) -> list[TileCall]:
        """One per page that the chunk touches."""
        calls = []
        at = chunk.start
        while at < chunk.stop:
            page = at // self._page_size
            stop = min(chunk.stop, (page + 1) * self._page_size)
            pages = chunk.pages[self._unseen_pages(page * self._page_size, window) : page + 1]
            first = chunk.first + at - chunk.start
            mask = self._tile_mask(len(pages), window)
            rows = self._page_rows(pages[None, :])
            calls.append(TileCall(first, first + stop - at, at % self._page_size, len(pages), rows, mask))
            at = stop
        return calls

    def _tile_mask(self, num_pages: int, window: int | None) -> Tensor:
        """[1, 1, page_size, num_pages * page_size]: the last page is causal, those before it are within the window."""
        if (window, num_pages) not in self._masks:
            queries = torch.arange(self._page_size, device=self._device) + (num_pages - 1) * self._page_size
            keys = torch.arange(num_pages * self._page_size, device=self._device)
            if len(self._masks) >= MAX_CACHED_MASKS:
                self._masks.clear()
            self._masks[window, num_pages] = self._mask(keys, queries, window)
        return self._masks[window, num_pages]

    def _mask(self, keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
        """[1, 1, queries, keys] for keys and queries at these positions."""
        masked = keys[None, :] > queries[:, None]
        if window is not None:
            masked |= keys[None, :] <= queries[:, None] - window
        return self._additive(masked)[None, None]

    def _unseen_pages(self, position: int, window: int | None) -> int:
        """How many pages lie wholly before the window of a query at this position."""
        return 0 if window is None else max(0, position + 1 - window) // self._page_size

    def _within_window(self, ends: np.ndarray, tables: np.ndarray, *, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions counted from the first page that is seen, and tables that begin with it."""
        unseen = np.maximum(0, ends + 1 - window) // self._page_size
        columns = np.minimum(unseen[:, None] + np.arange(tables.shape[1]), tables.shape[1] - 1)
        return ends - unseen * self._page_size, np.take_along_axis(tables, columns, axis=1)

    def _token_rows(self, slots: np.ndarray) -> Tensor:
        rows = (slots[:, None] // self._page_size * self._kv.num_kv_heads + self._heads) * (2 * self._kv.num_cells)
        return self._tensor((rows * self._page_size + slots[:, None] % self._page_size).reshape(-1))

    def _page_rows(self, tables: np.ndarray) -> Tensor:
        """tables: [n, pages]; returns [n * num_kv_heads * pages]"""
        rows = (tables[:, None, :] * self._kv.num_kv_heads + self._heads[:, None]) * (2 * self._kv.num_cells)
        return self._tensor(rows.reshape(-1))

    def _additive(self, masked: Tensor) -> Tensor:
        zeros = torch.zeros(masked.shape, dtype=self._kv.dtype, device=self._device)
        return zeros.masked_fill_(masked, float("-inf"))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # --- once per layer -----------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        self._write(k, v, layer=layer)
        out = torch.empty_like(q)
        for call in self._calls[self._windows[layer]]:
            match call:
                case PromptCall():
                    self._prompt(q, k, v, out, call=call, layer=layer)
                case DecodeCall():
                    self._decode(q, out, call=call, layer=layer)
                case TileCall():
                    self._tile(q, out, call=call, layer=layer)
        return out

    def _write(self, k: Tensor, v: Tensor, *, layer: int) -> None:
        rows = self._writes + 2 * layer * self._page_size
        keys, values = k.reshape(-1, self._kv.head_dim), v.reshape(-1, self._kv.head_dim)
        if self._kv.is_int8:
            keys, values = to_int8(keys), to_int8(values)
        self._kv.token_rows.index_copy_(0, rows, keys)
        self._kv.token_rows.index_copy_(0, rows + self._page_size, values)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, call: PromptCall, layer: int) -> None:
        rows = slice(call.first, call.last)
        queries = q[rows].transpose(0, 1).unsqueeze(0)
        if call.page_rows is None:
            keys, values = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
            mixed = self._attend(queries, keys, values, None)
        else:
            keys, values = self._gather(call.page_rows, layer=layer, count=1, num_pages=call.num_pages)
            mixed = self._attend(queries, keys, values, call.mask)
        out[rows] = mixed.squeeze(0).transpose(0, 1)

    def _decode(self, q: Tensor, out: Tensor, *, call: DecodeCall, layer: int) -> None:
        count = call.last - call.first
        rows = slice(call.first, call.last)
        keys, values = self._gather(call.page_rows, layer=layer, count=count, num_pages=call.num_pages)
        # Query heads that share a KV head stand where several query positions would: no key is repeated.
        queries = q[rows].view(count, self._kv.num_kv_heads, -1, self._kv.head_dim)
        out[rows] = self._attend(queries, keys, values, call.mask).reshape(out[rows].shape)

    def _tile(self, q: Tensor, out: Tensor, *, call: TileCall, layer: int) -> None:
        rows = slice(call.first, call.last)
        slots = slice(call.slot, call.slot + call.last - call.first)
        queries = q.new_zeros(self._page_size, *q.shape[1:])
        queries[slots] = q[rows]
        keys, values = self._gather(call.page_rows, layer=layer, count=1, num_pages=call.num_pages)
        queries = queries.transpose(0, 1).unsqueeze(0)
        mixed = self._attend(queries, keys, values, call.mask)
        out[rows] = mixed.squeeze(0).transpose(0, 1)[slots]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: [n, heads, queries, head_dim], k, v: [n, kv_heads, keys, head_dim]; mask: added to scores, [n or 1, 1,
        queries or 1, keys], None: causal, of as many keys as queries. Returns what q has.
        """
        rules = self._rules
        if rules.soft_cap is None:
            has_groups = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=rules.scale, enable_gqa=has_groups
            )
        assert mask is not None, "a call that is capped has a mask"
        step = max(1, SCORE_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2]))
        masks = mask.expand(-1, -1, q.shape[2], -1).split(step, dim=2)
        parts = zip(q.split(step, dim=2), masks, strict=True)
        return torch.cat([self._capped(some, k, v, mask=part, cap=rules.soft_cap) for some, part in parts], dim=2)

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, cap: float) -> Tensor:
        count, heads, queries, dim = q.shape
        kv_heads, keys = k.shape[1:3]
        scores = q.reshape(count, kv_heads, -1, dim).float() * self._rules.scale @ k.transpose(2, 3).float()
        # Deterministic: in pieces that torch does not divide among threads, see `layers/activation.py`.
        for piece in scores.view(-1).split(UNDIVIDED_ELEMENTS) if self._deterministic else (scores,):
            piece.div_(cap).tanh_().mul_(cap)
        shares = (scores.view(count, heads, queries, keys) + mask).softmax(dim=-1)
        return (shares.view(count, kv_heads, -1, keys) @ v.float()).view(q.shape).to(q.dtype)

    def _gather(self, page_rows: Tensor, *, layer: int, count: int, num_pages: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [count, num_kv_heads, num_pages * page_size, head_dim], valid until the next call."""
        source = self._kv.page_rows
        elements = page_rows.shape[0] * source.shape[1]
        if self._keys.shape[0] < elements:
            self._keys, self._values = source.new_empty(elements), source.new_empty(elements)
        shape = (count, self._kv.num_kv_heads, num_pages * self._page_size, self._kv.head_dim)
        rows = page_rows + 2 * layer
        keys, values = (
            self._keys[:elements].view(-1, source.shape[1]),
            self._values[:elements].view(-1, source.shape[1]),
        )
        torch.index_select(source, 0, rows, out=keys)
        torch.index_select(source, 0, rows.add_(1), out=values)
        if self._kv.is_int8:
            width = self._kv.token_rows.shape[1]
            keys, values = (from_int8(each.reshape(-1, width), self._kv.dtype) for each in (keys, values))
        return keys.view(shape), values.view(shape)
