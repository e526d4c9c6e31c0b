"""The KV of one shard as numbered pages of bytes, and the digest that travels with each page.

What the data plane asks of them is `PageAccess`. `Pages` are memory of this process, which is used in
place; of pages elsewhere there are copies (`staged_pages.py`).

A digest is xxh3-64 over the page, seeded with the room, the source page and its generation: bytes that belong to
another request, another page or an earlier owner of the same page never compare equal, even if they are all zero.
It protects against mix-ups and torn reads, not against somebody who forges both page and digest. Where a page is read
in several parts each has a digest of its own, over its runs in order of memory, which both sides have in common.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from msgspec import Struct
from xxhash import xxh3_64, xxh3_64_intdigest

from tandem.core.kv_parts import Runs
from tandem.transfer.copying import copy_pieces

_MASK = (1 << 64) - 1
# Odd 64-bit constants of splitmix64 and friends: they spread neighbouring rooms, pages and generations over the seeds.
_ROOM, _PAGE, _GENERATION = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Pages:
    """Views of the pages of one buffer, which may be read-only. It stays the caller's; views hold it open while they
    live."""

    def __init__(self, buffer: memoryview, page_bytes: int) -> None:
        self.buffer = buffer.cast("B")
        self.page_bytes = page_bytes
        self.num_pages = len(self.buffer) // page_bytes
        assert page_bytes > 0
        assert self.num_pages * page_bytes == len(self.buffer)

    def has_all(self, pages: Sequence[int]) -> bool:
        return not pages or (min(pages) >= 0 and max(pages) < self.num_pages)

    def view(self, page: int) -> memoryview:
        return self.buffer[page * self.page_bytes : (page + 1) * self.page_bytes]

    @property
    def whole(self) -> Runs:
        """All bytes of a page."""
        return Runs(0, self.page_bytes, self.page_bytes, 1)

    def reading(self, pages: Sequence[int], runs: Runs) -> AbstractContextManager["Reached"]:
        return nullcontext(Reached(self, pages, runs))

    landing = reading

    def pieces(self, pages: Sequence[int], runs: Runs) -> list[memoryview]:
        """These bytes of `pages` in order, as few views as possible: neighbours in memory become one."""
        return [self.buffer[start:stop] for start, stop in spans(pages, runs, page_bytes=self.page_bytes)]

    def copy_from(
        self, other: "Pages", *, pages: Sequence[int], runs: Runs, sources: Sequence[int], source_runs: Runs
    ) -> None:
        """Fill these `runs` of own `pages` with the `source_runs` of pages of another buffer, in order.

        Both have as many bytes of a page; one may have in one run what the other has in several.
        """
        assert runs.num_bytes == source_runs.num_bytes
        size = min(runs.size, source_runs.size)
        to_at = _starts(pages, _cut(runs, size), self.page_bytes)
        from_at = _starts(sources, _cut(source_runs, size), other.page_bytes)
        copy_pieces(self.buffer, to_at, other.buffer, from_at, size=size)

    def digests(
        self, pages: Sequence[int], runs: Runs, *, room: int, sources: Iterable[int], generations: Iterable[int]
    ) -> list[int]:
        """One digest per page, over its `runs`, which hold (or should hold) what `sources` held at `generations`."""
        buffer, page_bytes, digest = self.buffer, self.page_bytes, xxh3_64_intdigest
        base, first, end = room * _ROOM, runs.first, runs.first + runs.size
        names = zip(pages, sources, generations, strict=True)
        if runs.count > 1:
            return [
                self._digest(page, runs, (base + source * _PAGE + generation * _GENERATION) & _MASK)
                for page, source, generation in names
            ]
        return [
            digest(
                buffer[page * page_bytes + first : page * page_bytes + end],
                (base + source * _PAGE + generation * _GENERATION) & _MASK,
            )
            for page, source, generation in names
        ]

    def _digest(self, page: int, runs: Runs, seed: int) -> int:
        hashed = xxh3_64(seed=seed)
        for at in _starts((page,), runs, self.page_bytes):
            hashed.update(self.buffer[at : at + runs.size])
        return hashed.intdigest()


class Reached(Struct, frozen=True):
    """Where what was asked for lies in this process."""

    pages: Pages
    numbers: Sequence[int]  # of the pages in order, there
    runs: Runs  # of each


class PageAccess(Protocol):
    """The pages of one worker, wherever they lie. Thread-safe."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview | None:
        """All of them, one behind the other, where they are memory of this process."""
        ...

    def has_all(self, pages: Sequence[int]) -> bool: ...

    def reading(self, pages: Sequence[int], runs: Runs) -> AbstractContextManager[Reached]:
        """These bytes, to be read within the context."""
        ...

    def landing(self, pages: Sequence[int], runs: Runs) -> AbstractContextManager[Reached]:
        """Where these bytes are to be put. They are in the pages when the context has ended; where it ends with an
        exception, nobody may believe what is there. After it nothing of it lands any more."""
        ...

    def digests(
        self, pages: Sequence[int], runs: Runs, *, room: int, sources: Sequence[int], generations: Sequence[int]
    ) -> list[int]:
        """See `Pages.digests`."""
        ...


def spans(pages: Sequence[int], runs: Runs, *, page_bytes: int) -> list[tuple[int, int]]:
    """Where these bytes of `pages` lie, in order: (first, behind the last) from the beginning of page 0. Neighbours in
    memory become one."""
    found: list[tuple[int, int]] = []
    start = stop = pages[0] * page_bytes + runs.first
    for at in _starts(pages, runs, page_bytes):
        if at != stop:
            found.append((start, stop))
            start = at
        stop = at + runs.size
    found.append((start, stop))
    return found


def _starts(pages: Sequence[int], runs: Runs, page_bytes: int) -> list[int]:
    """Where each run of each page begins."""
    first = runs.first
    if runs.count == 1:
        return [page * page_bytes + first for page in pages]
    within = range(first, first + runs.count * runs.stride, runs.stride)
    return [page * page_bytes + at for page in pages for at in within]


def _cut(runs: Runs, size: int) -> Runs:
    """The same bytes in runs of `size`: these, or parts of a single one."""
    if runs.size == size:
        return runs
    assert runs.count == 1
    assert runs.size % size == 0
    return Runs(runs.first, size, size, runs.size // size)
