"""The KV allocation of one shard as numbered pages of bytes, and the digest that travels with each page.

A digest is xxh3-64 over the page, seeded with the room, the source page and its generation: bytes that belong to
another request, another page or an earlier owner of the same page never compare equal, even if they are all zero.
It protects against mix-ups and torn reads, not against somebody who forges both page and digest.
"""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

_MASK = (1 << 64) - 1
# Odd 64-bit constants of splitmix64 and friends: they spread neighbouring rooms, pages and generations over the seeds.
_ROOM, _PAGE, _GENERATION = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Pages:
    """Views of the pages of one writable buffer. The buffer stays the caller's; views hold it open while they live."""

    def __init__(self, buffer: memoryview, page_bytes: int) -> None:
        self._buffer = buffer.cast("B")
        self.page_bytes = page_bytes
        self.num_pages = len(self._buffer) // page_bytes
        assert not self._buffer.readonly
        assert page_bytes > 0
        assert self.num_pages * page_bytes == len(self._buffer)

    def has_all(self, pages: Sequence[int]) -> bool:
        return not pages or (min(pages) >= 0 and max(pages) < self.num_pages)

    def view(self, page: int) -> memoryview:
        return self._buffer[page * self.page_bytes : (page + 1) * self.page_bytes]

    def runs(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of `pages` in order, as few views as possible: neighbours in memory become one."""
        buffer, page_bytes = self._buffer, self.page_bytes
        views: list[memoryview] = []
        start = stop = pages[0]
        for page in pages:
            if page != stop:
                views.append(buffer[start * page_bytes : stop * page_bytes])
                start = page
            stop = page + 1
        views.append(buffer[start * page_bytes : stop * page_bytes])
        return views

    def digests(
        self, pages: Sequence[int], *, room: int, sources: Iterable[int], generations: Iterable[int]
    ) -> list[int]:
        """One digest per page of `pages`, which hold (or should hold) what `sources` held at `generations`."""
        buffer, page_bytes, digest = self._buffer, self.page_bytes, xxh3_64_intdigest
        base = room * _ROOM
        return [
            digest(
                buffer[page * page_bytes : (page + 1) * page_bytes],
                (base + source * _PAGE + generation * _GENERATION) & _MASK,
            )
            for page, source, generation in zip(pages, sources, generations, strict=True)
        ]
