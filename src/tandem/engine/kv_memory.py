"""Where the KV of all pages lives: one allocation that torch computes in and other processes can read.

On CPU it is a memfd: the transfer side maps or sends its bytes, no copy in between. A page is one contiguous block;
in it heads come before layers, so a split by heads is one contiguous run per page (`core/kv_parts.py`).

On another device it is a plain tensor there: `fd` and `buffer` are None and a transfer copies through the host
(`copies`).

Rule: slots of a page that were never written hold zeros. Attention masks them, but 0 x NaN is NaN, and what another
request left there must not reach this one. So a page is cleared when its first slot is written (`clear`).

Behind the layers of attention, each head has the state of the state-space layers that go with it, as fp32: what they
know after the last token that was written into the page. So a page is all that it takes to go on behind it, and whoever
keeps, sends or drops pages need not know that there is a state (decision 029).

Layers with a window: what they have in a page may be given back by itself (`free_windows`). It is memory of the file
that is punched out, and there again, as zeros, when it is written or read.

int8: a row of a token and head is `head_dim` codes and the four bytes of its fp32 scale, so wherever pages go the
scales go with them. Zeros are zeros there, too.
"""

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.values import ceil_div
from tandem.engine.device_pages import DevicePages

SCALE_BYTES = 4
SYSTEM_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class StateShape:
    """What state-space layers (Mamba 2) know of all tokens so far, on one shard: of each layer and KV head."""

    num_layers: int
    num_heads: int  # of the state, with one KV head
    head_dim: int
    state_size: int
    conv_width: int
    group_features: int  # of the vectors that all heads of a layer share; each KV head has a copy

    @property
    def scanned(self) -> int:
        """Numbers of one layer that the scan goes on from."""
        return self.num_heads * self.head_dim * self.state_size

    @property
    def convolved(self) -> int:
        """Numbers of one layer that the convolution goes on from."""
        return (self.conv_width - 1) * (self.num_heads * self.head_dim + self.group_features)

    @property
    def numbers(self) -> int:
        """Of all layers, fp32."""
        return self.num_layers * (self.scanned + self.convolved)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a page holds on one shard. An encoder's tokens leave nothing behind: no layers."""

    num_layers: int  # of attention
    num_kv_heads: int
    head_dim: int
    is_int8: bool = False  # whatever type is computed with
    state: StateShape | None = None
    windowed: tuple[int, ...] = ()  # those of the layers that have a window, in order

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Of one token and head, key or value. dtype: that is computed with."""
        return self.head_dim + SCALE_BYTES if self.is_int8 else self.head_dim * dtype.itemsize

    def cell_bytes(self, *, page_size: int, dtype: torch.dtype) -> int:
        """Of one page, head and layer: keys and values."""
        return 2 * page_size * self.row_bytes(dtype)

    def window_runs(self, *, page_size: int, dtype: torch.dtype) -> list[range]:
        """The bytes of a page that layers with a window have, in runs that are as long as can be."""
        cell = self.cell_bytes(page_size=page_size, dtype=dtype)
        of_head = self.num_cells(page_size=page_size, dtype=dtype) * cell
        runs: list[range] = []
        for head in range(self.num_kv_heads):
            for layer in self.windowed:
                start = head * of_head + layer * cell
                if runs and runs[-1].stop == start:
                    start = runs.pop().start
                runs.append(range(start, head * of_head + (layer + 1) * cell))
        return runs

    def num_cells(self, *, page_size: int, dtype: torch.dtype) -> int:
        """Of one page and head: one for each layer of attention, and as many as the state takes."""
        state_bytes = 4 * self.state.numbers if self.state is not None else 0
        return self.num_layers + ceil_div(state_bytes, self.cell_bytes(page_size=page_size, dtype=dtype))


class KvMemory:
    """tensor: [num_pages, num_kv_heads, num_cells, 2 (key, value), page_size, elements of a row]: a cell for each layer
    of attention, and those that the state takes
    states: [num_pages, num_kv_heads, numbers] fp32, in the cells behind those of attention; no numbers without a state
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
        device: str = "cpu",
        is_mapped: bool = True,
    ) -> None:
        """is_mapped: where it can be; else as on another device, which is for tests"""
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_kv_heads = shape.num_kv_heads
        self.num_cells = shape.num_cells(page_size=page_size, dtype=dtype)
        self.head_dim = shape.head_dim
        self.is_int8 = shape.is_int8
        self.dtype = dtype  # of the keys and values that come and go
        stored = torch.int8 if shape.is_int8 else dtype
        row = shape.row_bytes(dtype) // stored.itemsize
        cell_bytes = shape.cell_bytes(page_size=page_size, dtype=dtype)
        # A state is of all layers of the stage, so what goes to somebody else is all that a head has of a page.
        self.cell_bytes = cell_bytes if shape.state is None else self.num_cells * cell_bytes
        self.page_bytes = page_bytes(shape, page_size=page_size, dtype=dtype)
        self.window_bytes = window_bytes(shape, page_size=page_size, dtype=dtype)
        self._window_runs = shape.window_runs(page_size=page_size, dtype=dtype)
        self.fd: int | None = None
        self._mapping: mmap.mmap | None = None
        self.buffer: memoryview | None = None
        sizes = (num_pages, shape.num_kv_heads, self.num_cells, 2, page_size, row)
        if device == "cpu" and is_mapped and self.page_bytes:
            self.fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._give_back = weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, num_pages * self.page_bytes)
            self._mapping = mmap.mmap(self.fd, num_pages * self.page_bytes)
            if self._window_runs:  # of a huge page no part comes back by itself
                with contextlib.suppress(OSError):  # this system has none
                    self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
            self.buffer = memoryview(self._mapping)
            self.tensor = torch.frombuffer(self.buffer, dtype=stored).view(sizes)
        else:
            self.tensor = torch.zeros(sizes, dtype=stored, device=device)
        self.copies = DevicePages(self.tensor, self.page_bytes) if self.buffer is None and self.page_bytes else None
        self.token_rows: Tensor = self.tensor.view(-1, row)
        self.page_rows: Tensor = self.tensor.view(-1, page_size * row)
        in_attention = shape.num_layers * cell_bytes // 4
        numbers = shape.state.numbers if shape.state is not None else 0
        of_head = self.num_cells * 2 * page_size * row
        by_head = self.tensor.view(num_pages, shape.num_kv_heads, of_head).view(torch.float32)
        self.states: Tensor = by_head[..., in_attention : in_attention + numbers]

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable. Valid as long as this object is."""
        assert self.buffer is not None, "pages of device memory have no host view"
        assert 0 <= page_id < self.num_pages
        return self.buffer[page_id * self.page_bytes : (page_id + 1) * self.page_bytes]

    def clear(self, pages: list[int]) -> None:
        for page_id in pages:
            if self.buffer is None:
                self.tensor[page_id].zero_()
            else:  # torch would wake its threads up for it, which would take the cores from the kernels'
                np.frombuffer(self.page(page_id), np.uint8).fill(0)

    def free_windows(self, pages: Iterable[int]) -> None:
        """Of layers with a window: give back what they have in these pages, as far as it is whole pages of the system.

        From any thread, as long as nobody reads or writes there.
        """
        assert self._mapping is not None, "memory of a device is not given back"
        for page in pages:
            for run in self._window_runs:
                start, size = whole_system_pages(page * self.page_bytes + run.start, page * self.page_bytes + run.stop)
                if size:
                    self._mapping.madvise(mmap.MADV_REMOVE, start, size)

    def close(self) -> None:
        """Give the descriptor back, which else goes with this object; the mapping goes with the last view of it."""
        if self.fd is not None:
            self._give_back()
            self.fd = None


def whole_system_pages(start: int, stop: int) -> tuple[int, int]:
    """Where those within [start, stop) begin, and how many bytes they are."""
    first, last = ceil_div(start, SYSTEM_PAGE) * SYSTEM_PAGE, stop // SYSTEM_PAGE * SYSTEM_PAGE
    return first, max(0, last - first)


def window_bytes(shape: KvShape, *, page_size: int, dtype: torch.dtype) -> int:
    """What at least comes back when layers with a window give back what they have in one page, whichever it is."""
    is_aligned = page_bytes(shape, page_size=page_size, dtype=dtype) % SYSTEM_PAGE == 0
    runs = shape.window_runs(page_size=page_size, dtype=dtype)
    if is_aligned:
        return sum(whole_system_pages(run.start, run.stop)[1] for run in runs)
    return sum(max(0, len(run) - SYSTEM_PAGE + 1) // SYSTEM_PAGE * SYSTEM_PAGE for run in runs)


def page_bytes(shape: KvShape, *, page_size: int, dtype: torch.dtype) -> int:
    cells = shape.num_cells(page_size=page_size, dtype=dtype)
    return shape.num_kv_heads * cells * shape.cell_bytes(page_size=page_size, dtype=dtype)


def to_int8(values: Tensor) -> Tensor:
    """[n, head_dim] to rows of int8, [n, head_dim + SCALE_BYTES]: as the native kernels write them."""
    plain = values.float()
    scales = plain.abs().amax(dim=1, keepdim=True) / 127.0
    codes = torch.where(scales > 0, plain / scales, 0.0).round_().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=1)


def from_int8(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, as far as there is one."""
    scales = rows[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[:, :-SCALE_BYTES].float() * scales).to(dtype)


def pages_for_memory(
    shape: KvShape, *, page_size: int, dtype: torch.dtype, budget_bytes: int, windowed_share: float = 1.0
) -> int:
    """How many pages fit into so many bytes; 0 when not even one does. Of pages without bytes as many as one likes.

    windowed_share: of the pages, those that have what layers with a window need at the same time
    """
    each = page_bytes(shape, page_size=page_size, dtype=dtype)
    spared = int((1 - windowed_share) * window_bytes(shape, page_size=page_size, dtype=dtype))
    return budget_bytes // (each - spared) if each else sys.maxsize
