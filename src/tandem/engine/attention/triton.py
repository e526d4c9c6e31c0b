"""Attention by kernels of Triton, on NVIDIA devices: keys and values are read in place from their pages.

A call is a list of *tiles*: a run of queries of one request, all query heads of one KV head together, so that a key is
fetched once for all of them. A chunk of a prompt is cut into tiles of `TILE_ROWS` rows; a decoding row is a tile by
itself, whose keys are spread over several programs where there are too few rows to keep a device busy, and their parts
put together by a second kernel (`parts`: each with the logarithm of the sum of its exponentials).

A slot that no query of a tile sees is not read, so nothing there is masked away by a product. Sums are fp32.

With TRITON_INTERPRET=1 in the environment the kernels are interpreted on the CPU, which is for tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # an extra
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tandem.engine.attention.base import AttentionRules
from tandem.engine.batch import Batch, Chunk, DecodingRows
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory

TILE_ROWS = 64  # of a prompt's tile: queries times query heads of a KV head
LEAST_ROWS = 16  # that a product of tensor cores takes
KEY_BYTES = 16 << 10  # of keys in a step of a tile: with the values, and the next step's, within a multiprocessor
MOST_KEYS = 64
ENOUGH_PROGRAMS = 512  # a few for each multiprocessor
MOST_PARTS = 16  # a power of two
WRITTEN_ROWS = 16  # tokens of one program that writes


def jit(kernel: Callable[..., Any]) -> Any:
    """A kernel. It takes plain numbers where it says constexpr, and serves all layers and lengths."""
    made: Any = triton.jit
    return made(kernel, do_not_specialize=["layer_at", "num_tokens"])


@jit
def write_kernel(
    k,
    v,
    memory,
    slots,
    num_tokens,
    layer_at,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Keys and values of tokens to their slots. Program (block of tokens, KV head). Names as in `tile_kernel`."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    is_token = token < num_tokens
    slot = tl.load(slots + token, mask=is_token, other=0)
    row = (slot // PAGE_SIZE * KV_HEADS + head) * HEAD_STRIDE + layer_at + slot % PAGE_SIZE * HEAD_DIM
    there = is_token[:, None] & (dim < HEAD_DIM)[None, :]
    source = (token * KV_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    target = memory + row[:, None] + dim[None, :]
    tl.store(target, tl.load(k + source, mask=there, other=0.0), mask=there)
    tl.store(target + PAGE_SIZE * HEAD_DIM, tl.load(v + source, mask=there, other=0.0), mask=there)


@jit
def seen_keys(start, count, part, WINDOW: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr):
    """Positions [begin, stop) of the keys that any query of a tile sees, or of this part of them."""
    begin, stop = start * 0, start + count
    if WINDOW > 0:
        begin = tl.maximum(begin, start + 1 - WINDOW)
    if PARTS > 1:
        share = tl.cdiv(tl.cdiv(stop - begin, PARTS), KEYS) * KEYS
        begin += part * share
        stop = tl.minimum(stop, begin + share)
    return begin, stop


@jit
def scored(queries, keys, scale, cap, IS_CAPPED: tl.constexpr):
    """queries: [rows, dim], keys: [keys, dim]"""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if IS_CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))  # cap * tanh(scores / cap)
    return scores


@jit
def fold(scores, values, peak, total, mixed):
    """Some more keys of the softmax. scores: [rows, keys], minus infinity: not seen; values: [keys, dim].

    Of each row so far, peak: highest score, total: sum of exponentials, mixed: [rows, dim] sum of values, each as heavy
    as its exponential; both divided by that of the peak.
    """
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shares, kept = tl.exp(scores - base[:, None]), tl.exp(peak - base)
    total = total * kept + tl.sum(shares, 1)
    mixed = mixed * kept[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
    return higher, total, mixed


@jit
def tile_kernel(
    q,
    memory,
    tiles,
    pages,
    out,
    parts,
    logs,
    layer_at,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    """Program (tile, KV head, part of the keys); row r of a tile is query r // GROUP and query head r % GROUP.

    q, out: [t, KV_HEADS * GROUP, HEAD_DIM]. tiles: [n, 4] int64: first token, number of tokens, position of the first,
    where the request's pages begin in `pages` (int32). memory: of KvMemory; HEAD_STRIDE: elements of a head of a page;
    layer_at: where the keys of the layer begin in it, behind them its values. parts: [t, heads, PARTS, DIM] fp32 and
    logs [t, heads, PARTS] instead of `out` where PARTS > 1. WINDOW 0: none. IS_WIDENED: products are of fp32.
    """
    tile = tiles + 4 * tl.program_id(0)
    head, part = tl.program_id(1), tl.program_id(2)
    first, count, start, table = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, dim, lane = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    is_row, is_dim = row // GROUP < count, dim < HEAD_DIM
    position = start + row // GROUP
    at_row = ((first + row // GROUP) * KV_HEADS + head) * GROUP + row % GROUP
    is_there = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + at_row[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)
    if IS_WIDENED:
        queries = queries.to(tl.float32)

    begin, stop = seen_keys(start, count, part, WINDOW, PARTS, KEYS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(begin, stop, KEYS):
        key = at + lane
        page = tl.load(pages + table + key // PAGE_SIZE, mask=key < stop, other=0).to(tl.int64)
        where = (page * KV_HEADS + head) * HEAD_STRIDE + layer_at + key % PAGE_SIZE * HEAD_DIM
        is_read = (key < stop)[:, None] & is_dim[None, :]
        cells = memory + where[:, None] + dim[None, :]
        keys = tl.load(cells, mask=is_read, other=0.0)
        values = tl.load(cells + PAGE_SIZE * HEAD_DIM, mask=is_read, other=0.0)
        if IS_WIDENED:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = scored(queries, keys, scale, cap, IS_CAPPED)
        seen = (key < stop)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        peak, total, mixed = fold(tl.where(seen, scores, float("-inf")), values, peak, total, mixed)

    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    if PARTS == 1:
        target = out + at_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_there)
    else:
        at_part = at_row * PARTS + part
        tl.store(parts + at_part[:, None] * DIM + dim[None, :], mixed, mask=is_row[:, None])
        log = tl.where(total > 0.0, peak + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(logs + at_part, log, mask=is_row)


@jit
def join_kernel(parts, logs, out, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Program (token and query head): the mean of its parts, each as heavy as its sum. Names as in `tile_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    log = tl.load(logs + row * PARTS + part)
    weight = tl.exp(log - tl.max(log, 0))
    mixed = tl.load(parts + (row * PARTS + part)[:, None] * DIM + dim[None, :])
    weight = weight / tl.sum(weight, 0)  # one part at least has keys
    mean = tl.sum(mixed * weight[:, None], 0)
    tl.store(out + row * HEAD_DIM + dim, mean.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


IS_INTERPRETED = not isinstance(tile_kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Tiles:
    """One launch for each layer, of the batch's tokens [first, last)."""

    first: int
    last: int
    tiles: Tensor  # [n, 4] int64, see `tile_kernel`; tokens are counted from `first` on
    pages: Tensor  # int32
    num_queries: int  # of a tile, at most
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class Planned:
    slots: Tensor  # [t] int64
    calls: tuple[Tiles, ...]


class TritonAttention:
    """A `ReservingBackend`."""

    needs_tiles = False

    def __init__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> None:
        reason = complaint(kv, deterministic=deterministic)
        if reason:
            raise ModelError(f"--attention-backend triton {reason}; use --attention-backend torch_native")
        self._kv = kv
        self._rules = rules
        self._device = kv.tensor.device
        self._dim = max(LEAST_ROWS, triton.next_power_of_2(kv.head_dim))
        self._keys = max(LEAST_ROWS, min(MOST_KEYS, KEY_BYTES // (self._dim * kv.dtype.itemsize)))
        self._layout = {
            "KV_HEADS": kv.num_kv_heads,
            "HEAD_DIM": kv.head_dim,
            "DIM": self._dim,
            "PAGE_SIZE": kv.page_size,
            "HEAD_STRIDE": kv.num_cells * 2 * kv.page_size * kv.head_dim,
        }
        self._batch: Batch | None = None
        self._planned: Planned | None = None  # of the batch; made with its first queries, which say how many heads ask

    # --- once per batch -----------------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> None:
        self._batch, self._planned = batch, None

    def reserve(self, rows: int, *, width: int) -> Planned:
        tiles, pages, slots = (
            torch.zeros(shape, dtype=dtype, device=self._device)
            for shape, dtype in (((rows, 4), torch.int64), ((rows, width), torch.int32), ((rows,), torch.int64))
        )
        return Planned(slots, (self._rows_call(0, tiles, pages),))

    def plan_into(self, reserved: Planned, batch: Batch) -> None:
        rows, (call,) = batch.decoding, reserved.calls
        assert rows is not None, "decoding rows are planned into what is reserved"
        assert not batch.chunks, "and nothing else"
        width = call.pages.shape[1]
        call.tiles.copy_(self._tensor(_row_tiles(rows, width=width)))
        call.pages[:, : rows.tables.shape[1]] = self._tensor(rows.tables.astype(np.int32))
        reserved.slots.copy_(self._tensor(batch.slots))
        self._planned = reserved

    def _plan_of(self, batch: Batch, group: int) -> Planned:
        calls = []
        if batch.chunks:
            queries = max(1, TILE_ROWS // group)
            starts = np.cumsum([0, *(len(chunk.pages) for chunk in batch.chunks)])
            tiles = [
                tile
                for chunk, at in zip(batch.chunks, starts, strict=False)
                for tile in _chunk_tiles(chunk, pages_at=int(at), queries=queries)
            ]
            pages = np.concatenate([chunk.pages for chunk in batch.chunks]).astype(np.int32)
            made = self._tensor(np.array(tiles, dtype=np.int64))
            calls.append(Tiles(0, batch.chunks[-1].last, made, self._tensor(pages), queries))
        if (rows := batch.decoding) is not None:
            tiles = self._tensor(_row_tiles(rows, width=rows.tables.shape[1]))
            calls.append(self._rows_call(rows.first, tiles, self._tensor(rows.tables.astype(np.int32))))
        return Planned(self._tensor(batch.slots), tuple(calls))

    def _rows_call(self, first: int, tiles: Tensor, pages: Tensor) -> Tiles:
        count = tiles.shape[0]
        wanted = triton.next_power_of_2(triton.cdiv(ENOUGH_PROGRAMS, count * self._kv.num_kv_heads))
        return Tiles(first, first + count, tiles, pages, 1, min(MOST_PARTS, wanted))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # --- once per layer -----------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        group = q.shape[1] // k.shape[1]
        assert group * k.shape[1] == q.shape[1], "every KV head has as many query heads"
        if self._planned is None:
            assert self._batch is not None, "a batch is planned before its layers"
            self._planned = self._plan_of(self._batch, group)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        layer_at = layer * 2 * self._kv.page_size * self._kv.head_dim
        blocks = (triton.cdiv(k.shape[0], WRITTEN_ROWS), k.shape[1])
        memory, slots = self._kv.tensor, self._planned.slots
        write_kernel[blocks](k, v, memory, slots, k.shape[0], layer_at, ROWS=WRITTEN_ROWS, **self._layout)
        out = torch.empty_like(q)
        for call in self._planned.calls:
            self._attend(q[call.first : call.last], out[call.first : call.last], call, layer=layer, group=group)
        return out

    def _attend(self, q: Tensor, out: Tensor, call: Tiles, *, layer: int, group: int) -> None:
        """q, out: [tokens of the call, heads, head_dim]"""
        parts = logs = out  # not looked at where there is one part
        if call.num_parts > 1:
            parts = torch.empty(*q.shape[:2], call.num_parts, self._dim, dtype=torch.float32, device=self._device)
            logs = torch.empty(*q.shape[:2], call.num_parts, dtype=torch.float32, device=self._device)
        tile_kernel[call.tiles.shape[0], self._kv.num_kv_heads, call.num_parts](
            *(q, self._kv.tensor, call.tiles, call.pages, out, parts, logs),
            layer * 2 * self._kv.page_size * self._kv.head_dim,
            self._rules.scale,
            self._rules.soft_cap or 1.0,
            GROUP=group,
            WINDOW=self._rules.windows[layer] or 0,
            IS_CAPPED=self._rules.soft_cap is not None,
            PARTS=call.num_parts,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(call.num_queries * group)),
            KEYS=self._keys,
            IS_WIDENED=IS_INTERPRETED,  # the interpreter takes bf16 for integers there
            num_stages=2,
            **self._layout,
        )
        if call.num_parts > 1:
            sizes = {"HEAD_DIM": self._kv.head_dim, "DIM": self._dim, "PARTS": call.num_parts}
            join_kernel[(q.shape[0] * q.shape[1],)](parts, logs, out, **sizes)


def _chunk_tiles(chunk: Chunk, *, pages_at: int, queries: int) -> Iterator[tuple[int, int, int, int]]:
    for start in range(chunk.start, chunk.stop, queries):
        yield chunk.first + start - chunk.start, min(queries, chunk.stop - start), start, pages_at


def _row_tiles(rows: DecodingRows, *, width: int) -> np.ndarray:
    """[d, 4]; width: of the table of pages"""
    order = np.arange(len(rows.lengths))
    return np.stack((order, np.ones_like(order), rows.lengths - 1, order * width), axis=1)


def complaint(kv: KvMemory, *, deterministic: bool) -> str:
    """Why these kernels cannot serve this memory; empty: they can."""
    if kv.is_int8:
        return "reads keys and values as they are computed: leave --kv-cache-dtype out"
    if deterministic:
        return "promises no bits: how keys are spread over a device depends on how many rows there are"
    if kv.tensor.device.type != "cuda" and not IS_INTERPRETED:
        return "needs an NVIDIA device: give --device cuda"
    return ""
