"""Who owns each KV page. One owner at a time, and a generation that rises whenever a page goes back to the free list.

    FREE --allocate--> OWNED --share--> CACHED --evict--> FREE
                       OWNED --free--> FREE
                       OWNED --quarantine--> QUARANTINED --free--> FREE
    FREE --begin_load--> LOADING --landed--> CACHED
                         LOADING --abandon--> FREE

OWNED belongs to one request, which alone writes it. CACHED belongs to the prefix tree and is read-only for ever.
QUARANTINED still belongs to a request that has ended, until no byte can land in it or be read from it any more.
LOADING belongs to the prefix tree, too: it is being filled from host memory, and nobody else may touch it.

Where some layers have a window, their KV is a part of the page that is there or not (`windows.py`), and of such parts
there are fewer than pages: a page takes one when it is written, and loses it with its owner, or before.

Whoever read a page under one generation and finds another afterwards has read somebody else's KV.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from tandem.core.values import PageId, RequestId

NOBODY = RequestId(0)


class PageState(IntEnum):
    """An index into `PagePool.counts`; the order has no meaning."""

    FREE = 0
    OWNED = 1
    CACHED = 2
    QUARANTINED = 3
    LOADING = 4


@dataclass(slots=True)
class PagePool:
    num_pages: int
    free_pages: list[PageId] = field(default_factory=list[PageId])
    states: list[PageState] = field(default_factory=list[PageState])
    owners: list[RequestId] = field(default_factory=list[RequestId])
    generations: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])  # pages per PageState
    max_parts: int = 0  # pages that may have a window part; 0: there is no such thing
    num_parts: int = 0
    has_part: list[bool] = field(default_factory=list[bool])  # of each page; empty where there is no such thing
    lost_parts: list[PageId] = field(default_factory=list[PageId])  # pages without it since the last `take_lost_parts`

    @classmethod
    def empty(cls, num_pages: int, *, max_parts: int = 0) -> "PagePool":
        return cls(
            num_pages,
            free_pages=[PageId(page) for page in range(num_pages - 1, -1, -1)],
            states=[PageState.FREE] * num_pages,
            owners=[NOBODY] * num_pages,
            generations=[0] * num_pages,
            counts=[num_pages, 0, 0, 0, 0],
            max_parts=max_parts,
            has_part=[False] * num_pages if max_parts else [],
        )

    @property
    def num_free(self) -> int:
        return len(self.free_pages)

    def allocate(self, num_pages: int, owner: RequestId) -> list[PageId]:
        """Pages that `owner` alone may write from here on. The caller has made sure that there are enough."""
        assert num_pages <= len(self.free_pages), "allocate after admission said it fits"
        assert owner != NOBODY
        pages = [self.free_pages.pop() for _ in range(num_pages)]
        free, owned = PageState.FREE, PageState.OWNED
        for page in pages:
            self._move(page, free, owned)
            self.owners[page] = owner
        return pages

    def share(self, page: PageId, owner: RequestId) -> None:
        """The page is full and final: it goes from its request to the prefix tree."""
        assert self.owners[page] == owner, "only the owner gives a page away"
        self._move(page, PageState.OWNED, PageState.CACHED)
        self.owners[page] = NOBODY

    def evict(self, page: PageId) -> None:
        """The prefix tree gives a page back."""
        self._move(page, PageState.CACHED, PageState.FREE)
        self._to_free_list(page)

    def begin_load(self, num_pages: int) -> list[PageId]:
        """Pages that are filled for the prefix tree. The caller has made sure that there are enough."""
        pages = [self.free_pages.pop() for _ in range(num_pages)]
        for page in pages:
            self._move(page, PageState.FREE, PageState.LOADING)
            self.take_part(page)
        return pages

    def landed(self, page: PageId) -> None:
        self._move(page, PageState.LOADING, PageState.CACHED)

    def abandon(self, page: PageId) -> None:
        """Nothing has landed there, or nobody wants it any more; and nothing will."""
        self._move(page, PageState.LOADING, PageState.FREE)
        self._to_free_list(page)

    def quarantine(self, pages: list[PageId], owner: RequestId) -> None:
        """The owner has ended, but a batch or a transfer may still touch its pages."""
        for page in pages:
            if self.owners[page] == owner and self.states[page] is PageState.OWNED:
                self._move(page, PageState.OWNED, PageState.QUARANTINED)

    def free(self, pages: list[PageId], owner: RequestId) -> None:
        """Give back those of `pages` that `owner` owns; the others (shared ones) stay with the prefix tree."""
        for page in pages:
            if self.owners[page] == owner:
                self._move(page, self.states[page], PageState.FREE)
                self.owners[page] = NOBODY
                self._to_free_list(page)

    def take_part(self, page: PageId) -> None:
        """The page is about to be written. The caller has made sure that there is a part."""
        if self.has_part and not self.has_part[page]:
            assert self.num_parts < self.max_parts, "more window parts than admission said"
            self.has_part[page] = True
            self.num_parts += 1

    def lose_part(self, page: PageId) -> None:
        """Nobody reads it any more."""
        if self.has_part and self.has_part[page]:
            self.has_part[page] = False
            self.num_parts -= 1
            self.lost_parts.append(page)

    def take_lost_parts(self) -> tuple[PageId, ...]:
        lost, self.lost_parts = tuple(self.lost_parts), []
        return lost

    def _to_free_list(self, page: PageId) -> None:
        self.lose_part(page)
        self.generations[page] += 1
        self.free_pages.append(page)

    def _move(self, page: PageId, before: PageState, after: PageState) -> None:
        assert self.states[page] is before or self.states[page] == before, f"page {page} is {self.states[page].name}"
        self.states[page] = after
        self.counts[before] -= 1
        self.counts[after] += 1
