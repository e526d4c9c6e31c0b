"""The prefix tree: which full pages of KV are kept for requests with the same beginning.

A page's hash is a chain over all pages before it, so a hash names a whole prefix and the tree is a dictionary from
hash to node. A node is pinned while a live request reads it or any page below it; only unpinned leaves are evicted,
least recently used first, by step number and not by clock. The pages themselves belong to the pool.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.values import PageHash, PageId


@dataclass(slots=True)
class TreeNode:
    page: PageId
    parent: PageHash | None
    num_children: int = 0
    pins: int = 0  # locks on this node plus pinned children
    used_at: int = 0  # step number


@dataclass(slots=True)
class PrefixTree:
    nodes: dict[PageHash, TreeNode] = field(default_factory=dict[PageHash, TreeNode])
    num_pinned: int = 0
    step: int = 0
    # (used_at, hash) of unpinned leaves; entries go stale and are dropped when they come up
    candidates: list[tuple[int, PageHash]] = field(default_factory=list[tuple[int, PageHash]])
    dropped: list[PageHash] = field(default_factory=list[PageHash])  # since the last `take_dropped`

    @property
    def num_evictable(self) -> int:
        return len(self.nodes) - self.num_pinned

    def match(self, hashes: Sequence[PageHash]) -> list[PageId]:
        """Pages of the longest cached prefix of `hashes`. Not pinned yet: `lock` its last hash before anything else."""
        pages: list[PageId] = []
        for page_hash in hashes:
            node = self.nodes.get(page_hash)
            if node is None:
                break
            node.used_at = self.step
            pages.append(node.page)
        return pages

    def lock(self, page_hash: PageHash) -> None:
        """Pin this node and, by that, everything above it."""
        at: PageHash | None = page_hash
        while at is not None:
            node = self.nodes[at]
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += 1
            at = node.parent

    def unlock(self, page_hash: PageHash) -> None:
        at: PageHash | None = page_hash
        while at is not None:
            node = self.nodes[at]
            assert node.pins > 0, "unlock without lock"
            node.pins -= 1
            if node.pins > 0:
                return
            self.num_pinned -= 1
            self._offer_for_eviction(at, node)
            at = node.parent

    def insert(self, page_hash: PageHash, page: PageId, parent: PageHash | None) -> bool:
        """Keep `page` under its hash. False if the hash is there already: the caller keeps its own copy."""
        known = self.nodes.get(page_hash)
        if known is not None:
            known.used_at = self.step
            return False
        if parent is not None:
            self.nodes[parent].num_children += 1
        node = TreeNode(page, parent, used_at=self.step)
        self.nodes[page_hash] = node
        self._offer_for_eviction(page_hash, node)
        return True

    def evict(self, num_pages: int) -> list[PageId]:
        """Drop up to `num_pages` unpinned leaves, least recently used first, and return their pages."""
        evicted: list[PageId] = []
        while len(evicted) < num_pages and self.candidates:
            used_at, page_hash = heapq.heappop(self.candidates)
            node = self.nodes.get(page_hash)
            if node is None or node.pins or node.num_children:
                continue
            if node.used_at != used_at:
                heapq.heappush(self.candidates, (node.used_at, page_hash))
                continue
            evicted.append(node.page)
            self._drop(page_hash, node)
        return evicted

    def take_dropped(self) -> tuple[PageHash, ...]:
        """What has left the tree since the last call, in order."""
        dropped, self.dropped = tuple(self.dropped), []
        return dropped

    def _drop(self, page_hash: PageHash, node: TreeNode) -> None:
        del self.nodes[page_hash]
        self.dropped.append(page_hash)
        if node.parent is not None:
            parent = self.nodes[node.parent]
            parent.num_children -= 1
            self._offer_for_eviction(node.parent, parent)

    def _offer_for_eviction(self, page_hash: PageHash, node: TreeNode) -> None:
        if node.pins == 0 and node.num_children == 0:
            heapq.heappush(self.candidates, (node.used_at, page_hash))
            if len(self.candidates) > 2 * len(self.nodes) + 64:
                self._compact()

    def _compact(self) -> None:
        """Drop stale entries, so that the heap is bounded by the size of the tree."""
        self.candidates = [
            (node.used_at, page_hash)
            for page_hash, node in self.nodes.items()
            if node.pins == 0 and node.num_children == 0
        ]
        heapq.heapify(self.candidates)
