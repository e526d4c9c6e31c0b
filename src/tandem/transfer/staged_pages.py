"""Pages in memory that sockets do not reach, such as a GPU's: what travels is a copy in host memory (decision 036).

Each frame has a *slot* of host memory while it moves. What is sent is copied there first, under the frame's lease. What
comes is received and compared there, and copied into the pages only then: bytes that nobody asked for, or that are not
what was offered, never leave the slot, and when a job has ended nothing of it is copied any more.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tandem.core.kv_parts import Runs
from tandem.transfer.link import LinkFrozen
from tandem.transfer.pages import Pages, Reached
from tandem.transfer.protocol import FRAME_BYTES, Malformed


class HostCopies(Protocol):
    """Copies between pages and host memory: the runs of all pages, one behind the other. Thread-safe.

    Each is behind what was computed before it and ahead of what is computed after it.
    """

    def host_memory(self, num_bytes: int) -> memoryview:
        """New, and good for copies."""
        ...

    def read(self, pages: Sequence[int], runs: Runs, into: memoryview) -> None:
        """When this returns they are there."""
        ...

    def write(self, pages: Sequence[int], runs: Runs, content: memoryview) -> None:
        """When this returns `content` is not needed any more."""
        ...


class StagedPages:
    """A `PageAccess`. Owns the slots: at most `max_slots`, and as many as frames have moved at once."""

    def __init__(
        self, copies: HostCopies, *, num_pages: int, page_bytes: int, max_slots: int, timeout_s: float
    ) -> None:
        """timeout_s: after which a frame that gets no slot has moved for too long"""
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self.buffer = None
        self._copies, self._max_slots, self._timeout_s = copies, max_slots, timeout_s
        self._slot_bytes = max(FRAME_BYTES, page_bytes)
        self._free: list[memoryview] = []
        self._num_slots = 0
        self._is_free = threading.Condition()

    def has_all(self, pages: Sequence[int]) -> bool:
        return not pages or (min(pages) >= 0 and max(pages) < self.num_pages)

    @contextmanager
    def reading(self, pages: Sequence[int], runs: Runs) -> Iterator[Reached]:
        """Raises LinkFrozen where there is no slot."""
        with self._slot(len(pages) * runs.num_bytes) as slot:
            self._copies.read(pages, runs, slot)
            yield _reached(slot, len(pages), runs)

    @contextmanager
    def landing(self, pages: Sequence[int], runs: Runs) -> Iterator[Reached]:
        """Raises Malformed where that is no frame, and LinkFrozen where there is no slot."""
        with self._slot(len(pages) * runs.num_bytes) as slot:
            yield _reached(slot, len(pages), runs)
            self._copies.write(pages, runs, slot)

    def digests(
        self, pages: Sequence[int], runs: Runs, *, room: int, sources: Sequence[int], generations: Sequence[int]
    ) -> list[int]:
        found: list[int] = []
        few = self._slot_bytes // runs.num_bytes
        for start in range(0, len(pages), few):
            part = slice(start, start + few)
            names = {"sources": sources[part], "generations": generations[part]}
            with self.reading(pages[part], runs) as here:
                found += here.pages.digests(here.numbers, here.runs, room=room, **names)
        return found

    @contextmanager
    def _slot(self, num_bytes: int) -> Iterator[memoryview]:
        if num_bytes > self._slot_bytes:
            raise Malformed(f"a frame of {num_bytes} bytes")
        with self._is_free:
            if not self._is_free.wait_for(self._may_take, self._timeout_s):
                raise LinkFrozen(f"no staging memory for {self._timeout_s:g} s")
            slot = self._free.pop() if self._free else None
            self._num_slots += slot is None
        try:
            if slot is None:
                slot = self._copies.host_memory(self._slot_bytes)
            yield slot[:num_bytes]
        finally:
            with self._is_free:
                if slot is None:
                    self._num_slots -= 1
                else:
                    self._free.append(slot)
                self._is_free.notify()

    def _may_take(self) -> bool:
        return bool(self._free) or self._num_slots < self._max_slots


def _reached(slot: memoryview, num_pages: int, runs: Runs) -> Reached:
    pages = Pages(slot, runs.num_bytes)
    return Reached(pages, range(num_pages), pages.whole)
