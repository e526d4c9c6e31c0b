"""Layers with a sliding window: their KV is given back where no query sees it any more.

Such a layer's query sees the latest `tokens` tokens, itself included. A page's KV of these layers, its *window part*,
is memory of its own: a page may have lost it and still be read by the layers without a window. `PagePool` counts parts;
here is who needs which of those that belong to the prefix tree, and which of the others goes first.

    own pages     get a part when they are written and lose it when the request's window has passed them.
    cached pages  keep it as long as somebody pins it, and then until others need it, the one used least recently first.

A cached prefix can be used up to a page before which a whole window has its parts: whoever goes on there sees no more.
Who sends pages, or waits for them, keeps the parts of all: what a peer reads does not change while it reads.

Admission counts on *claims*: how many parts a request may need at one time, which becomes less as it goes on, and never
more. Claims together are no more than there are parts, so nobody who runs is ever without one.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.kv.pool import PagePool
from tandem.core.kv.tree import PrefixTree
from tandem.core.values import PageHash, PageId


def most_seen(window_tokens: int, num_new: int, *, page_size: int) -> int:
    """Pages that `num_new` tokens in a row are written to, or see, at most, wherever they begin."""
    return (window_tokens + num_new - 2) // page_size + 2


@dataclass(slots=True)
class Windows:
    """tokens: 0 where no layer has a window; then every page that is there is whole, and nothing of this happens."""

    tokens: int
    page_size: int
    pins: dict[PageHash, int] = field(default_factory=dict[PageHash, int])
    # (used_at, hash) of cached pages with a part that nobody pins; entries go stale and are dropped when they come up
    candidates: list[tuple[int, PageHash]] = field(default_factory=list[tuple[int, PageHash]])

    @property
    def are_there(self) -> bool:
        return self.tokens > 0

    def first_seen(self, position: int) -> int:
        """The first page of which a query at this position, or behind it, may see something."""
        return max(0, position + 1 - self.tokens) // self.page_size

    def most_seen(self, num_new: int) -> int:
        return most_seen(self.tokens, num_new, page_size=self.page_size)

    def num_usable(
        self, tree: PrefixTree, pool: PagePool, pages: Sequence[PageId], below: Sequence[PageHash] = ()
    ) -> int:
        """How much of a cached prefix may be used: `pages` on the device, and behind them those `below` it."""
        if not self.are_there:
            return len(pages) + len(below)
        best = whole = 0
        have_part = [pool.has_part[page] for page in pages] + [tree.nodes[one].host_has_part for one in below]
        for index, has_part in enumerate(have_part):
            whole = whole + 1 if has_part else 0
            if whole > index - self.first_seen((index + 1) * self.page_size):
                best = index + 1
        return best

    def pin(self, hashes: Sequence[PageHash]) -> None:
        for page_hash in hashes:
            self.pins[page_hash] = self.pins.get(page_hash, 0) + 1

    def unpin(self, tree: PrefixTree, pool: PagePool, hashes: Sequence[PageHash]) -> None:
        for page_hash in hashes:
            self.pins[page_hash] -= 1
            if not self.pins[page_hash]:
                del self.pins[page_hash]
        self.offer(tree, pool, hashes)

    def offer(self, tree: PrefixTree, pool: PagePool, hashes: Sequence[PageHash]) -> None:
        """Of cached pages those whose part nobody sees may lose it."""
        if not self.are_there:
            return
        for page_hash in hashes:
            node = tree.nodes.get(page_hash)
            if node is not None and node.is_landed and page_hash not in self.pins and pool.has_part[node.page]:
                heapq.heappush(self.candidates, (node.used_at, page_hash))
        if len(self.candidates) > 2 * pool.max_parts + 64:
            self._compact(tree, pool)

    def make_room(self, tree: PrefixTree, pool: PagePool, num_parts: int) -> None:
        """Cached pages lose their parts until so many are free, or nobody can lose one."""
        while pool.max_parts - pool.num_parts < num_parts and self.candidates:
            used_at, page_hash = heapq.heappop(self.candidates)
            node = tree.nodes.get(page_hash)
            if node is None or not node.is_landed or page_hash in self.pins or not pool.has_part[node.page]:
                continue
            if node.used_at != used_at:
                heapq.heappush(self.candidates, (node.used_at, page_hash))
                continue
            pool.lose_part(node.page)

    def _compact(self, tree: PrefixTree, pool: PagePool) -> None:
        self.candidates = [
            (node.used_at, page_hash)
            for page_hash, node in tree.nodes.items()
            if node.is_landed and page_hash not in self.pins and pool.has_part[node.page]
        ]
        heapq.heapify(self.candidates)
