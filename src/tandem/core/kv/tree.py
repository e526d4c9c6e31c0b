"""The prefix tree: which full pages of KV are kept for requests with the same beginning, and where.

A page's hash is a chain over all pages before it, so a hash names a whole prefix and the tree is a dictionary from
hash to node. A node is pinned while a live request reads it or any page below it; only unpinned leaves are evicted,
least recently used first, by step number and not by clock. The pages themselves belong to the pools.

A node is in any of two tiers: the device, where batches read it, and host memory (`host_tier.py`). Each tier is evicted
by the same rule, its own leaves first. What is on the device has its parent there, too. A node that is nowhere is kept
only for the nodes below it, which nobody finds until it is computed again.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.values import PageHash, PageId

NOWHERE = PageId(-1)


@dataclass(slots=True)
class TreeNode:
    page: PageId  # on the device, or NOWHERE
    parent: PageHash | None
    num_children: int = 0  # on the device, or on their way there
    pins: int = 0  # locks on this node plus pinned children
    used_at: int = 0  # step number
    host: PageId = NOWHERE  # the page of host memory that has a copy
    host_has_part: bool = True  # and it has the window part of the page (`windows.py`)
    num_host_children: int = 0
    num_nodes_below: int = 0  # children, wherever they are
    is_loading: bool = False  # `page` is being filled from `host`: nobody may read it yet
    is_storing: bool = False  # `page` is being copied to host memory; pinned meanwhile
    in_storage: bool = False  # there or on its way there, as far as this node knows; or it could not be written
    hits: int = 1  # how many requests have had it, the one that computed it included

    @property
    def is_landed(self) -> bool:
        """On the device, to be read."""
        return self.page != NOWHERE and not self.is_loading


@dataclass(slots=True)
class PrefixTree:
    nodes: dict[PageHash, TreeNode] = field(default_factory=dict[PageHash, TreeNode])
    num_landed: int = 0
    num_pinned: int = 0  # of those that have landed
    step: int = 0
    # (used_at, hash) of unpinned leaves; entries go stale and are dropped when they come up
    candidates: list[tuple[int, PageHash]] = field(default_factory=list[tuple[int, PageHash]])
    dropped: list[PageHash] = field(default_factory=list[PageHash])  # since the last `take_dropped`
    host_candidates: list[tuple[int, PageHash]] = field(
        default_factory=list[tuple[int, PageHash]]
    )  # the same of copies

    @property
    def num_evictable(self) -> int:
        return self.num_landed - self.num_pinned

    def match(self, hashes: Sequence[PageHash]) -> list[PageId]:
        """Pages of the longest cached prefix of `hashes`. Not pinned yet: `lock` its last hash before anything else."""
        pages: list[PageId] = []
        for page_hash in hashes:
            node = self.nodes.get(page_hash)
            if node is None or not node.is_landed:
                break
            node.used_at = self.step
            pages.append(node.page)
        return pages

    def is_landed(self, page_hash: PageHash | None) -> bool:
        """None is the root, which needs no KV."""
        return page_hash is None or self.nodes[page_hash].is_landed

    def lock(self, page_hash: PageHash) -> None:
        """Pin this node and, by that, everything above it."""
        at: PageHash | None = page_hash
        while at is not None:
            node = self.nodes[at]
            node.pins += 1
            if node.pins > 1:
                return
            self.num_pinned += node.is_landed
            at = node.parent

    def unlock(self, page_hash: PageHash) -> None:
        at: PageHash | None = page_hash
        while at is not None:
            node = self.nodes[at]
            assert node.pins > 0, "unlock without lock"
            node.pins -= 1
            if node.pins > 0:
                return
            self.num_pinned -= node.is_landed
            self._offer_for_eviction(at, node)
            self._drop_if_empty(at, node)
            at = node.parent

    def num_released(self, page_hash: PageHash, pins: dict[PageHash, int]) -> int:
        """Pages of the device that would be pinned no more without a lock on this node. Nothing changes.

        pins: what is left of the pins after other such questions; it is kept up here, so that several locks can be
        asked about together.
        """
        released = 0
        at: PageHash | None = page_hash
        while at is not None:
            node = self.nodes[at]
            pins[at] = pins.get(at, node.pins) - 1
            if pins[at] > 0:
                break
            released += node.is_landed
            at = node.parent
        return released

    def insert(self, page_hash: PageHash, page: PageId, parent: PageHash | None) -> bool:
        """Keep `page` under its hash. False if it is on the device already: the caller keeps its own copy."""
        node = self.nodes.get(page_hash)
        if node is not None and node.is_landed:
            node.used_at = self.step
            return False
        self.join(page_hash, parent)
        self.place(page_hash, page)
        return True

    def join(self, page_hash: PageHash, parent: PageHash | None) -> None:
        """Be a node, used now, wherever its KV comes from."""
        node = self.nodes.get(page_hash)
        if node is None:
            node = self.nodes[page_hash] = TreeNode(NOWHERE, parent)
            if parent is not None:
                self.nodes[parent].num_nodes_below += 1
        node.used_at = self.step

    def place(self, page_hash: PageHash, page: PageId) -> None:
        """It has landed on the device, in this page: computed, or loaded."""
        node = self.nodes[page_hash]
        assert not node.is_landed
        if not node.is_loading and node.parent is not None:
            self.nodes[node.parent].num_children += 1
        node.page, node.is_loading = page, False
        self.num_landed += 1
        self.num_pinned += node.pins > 0
        self._offer_for_eviction(page_hash, node)
        self._offer_copy(page_hash, node)

    def replace(self, page_hash: PageHash, page: PageId) -> PageId:
        """Keep this page instead of one that nobody holds, which is returned."""
        node = self.nodes[page_hash]
        assert node.is_landed
        assert not node.pins
        before, node.page = node.page, page
        node.used_at = self.step
        return before

    def evict(self, num_pages: int, *, only_copied: bool = False) -> list[PageId]:
        """Take up to `num_pages` unpinned leaves off the device, least recently used first, and return their pages."""
        evicted: list[PageId] = []
        kept: list[tuple[int, PageHash]] = []
        while len(evicted) < num_pages and self.candidates:
            used_at, page_hash = heapq.heappop(self.candidates)
            node = self.nodes.get(page_hash)
            if node is None or not node.is_landed or node.pins or node.num_children:
                continue
            if node.used_at != used_at:
                heapq.heappush(self.candidates, (node.used_at, page_hash))
                continue
            if only_copied and node.host == NOWHERE:
                kept.append((used_at, page_hash))
                continue
            evicted.append(node.page)
            self.num_landed -= 1
            self._leave_device(page_hash, node)
        for candidate in kept:
            heapq.heappush(self.candidates, candidate)
        return evicted

    def take_dropped(self) -> tuple[PageHash, ...]:
        """What has left the tree since the last call, in order."""
        dropped, self.dropped = tuple(self.dropped), []
        return dropped

    def _leave_device(self, page_hash: PageHash, node: TreeNode) -> None:
        node.page, node.is_loading = NOWHERE, False
        if node.parent is not None:
            parent = self.nodes[node.parent]
            parent.num_children -= 1
            self._offer_for_eviction(node.parent, parent)
        self._offer_copy(page_hash, node)
        self._drop_if_empty(page_hash, node)

    def _drop_if_empty(self, page_hash: PageHash, node: TreeNode) -> None:
        """Forget a node that is nowhere, and by that maybe those above it."""
        while node.page == NOWHERE and node.host == NOWHERE and not node.num_nodes_below and not node.pins:
            del self.nodes[page_hash]
            self.dropped.append(page_hash)
            if node.parent is None:
                return
            page_hash, node = node.parent, self.nodes[node.parent]
            node.num_nodes_below -= 1

    def _offer_for_eviction(self, page_hash: PageHash, node: TreeNode) -> None:
        if node.is_landed and node.pins == 0 and node.num_children == 0:
            heapq.heappush(self.candidates, (node.used_at, page_hash))
            if len(self.candidates) > 2 * len(self.nodes) + 64:
                self._compact()

    def _compact(self) -> None:
        """Drop stale entries, so that the heap is bounded by the size of the tree."""
        self.candidates = [
            (node.used_at, page_hash)
            for page_hash, node in self.nodes.items()
            if node.is_landed and node.pins == 0 and node.num_children == 0
        ]
        heapq.heapify(self.candidates)

    # --- the tier below the device ---

    def match_below(self, hashes: Sequence[PageHash]) -> list[PageHash]:
        """The leading `hashes` of which there is KV that is not on the device yet: on its way, or in host memory."""
        found: list[PageHash] = []
        for page_hash in hashes:
            node = self.nodes.get(page_hash)
            if node is None or not (node.is_loading or (node.host != NOWHERE and node.page == NOWHERE)):
                break
            node.used_at = self.step
            found.append(page_hash)
        return found

    def begin_load(self, page_hash: PageHash, page: PageId) -> None:
        node = self.nodes[page_hash]
        assert node.page == NOWHERE
        assert node.host != NOWHERE
        node.page, node.is_loading = page, True
        if node.parent is not None:
            self.nodes[node.parent].num_children += 1

    def lose_load(self, page_hash: PageHash) -> None:
        """What should have landed there has not."""
        node = self.nodes[page_hash]
        assert node.is_loading
        self._leave_device(page_hash, node)

    def keep_copy(self, page_hash: PageHash, host: PageId, *, has_part: bool = True) -> None:
        node = self.nodes[page_hash]
        assert node.host == NOWHERE
        node.host, node.host_has_part = host, has_part
        if node.parent is not None:
            self.nodes[node.parent].num_host_children += 1
        self._offer_copy(page_hash, node)

    def drop_copy(self, page_hash: PageHash) -> PageId:
        """Returns the page of host memory, which is to be freed."""
        node = self.nodes[page_hash]
        host, node.host = node.host, NOWHERE
        if node.parent is not None:
            parent = self.nodes[node.parent]
            parent.num_host_children -= 1
            self._offer_copy(node.parent, parent)
        self._drop_if_empty(page_hash, node)
        return host

    def evict_copies(self, num_pages: int, *, before: int) -> list[PageId]:
        """Drop up to `num_pages` copies by the same order, of those that were last used before step `before`."""
        evicted: list[PageId] = []
        while len(evicted) < num_pages and self.host_candidates:
            used_at, page_hash = self.host_candidates[0]
            node = self.nodes.get(page_hash)
            if node is not None and self._may_drop_copy(node) and node.used_at == used_at >= before:
                break
            heapq.heappop(self.host_candidates)
            if node is None or not self._may_drop_copy(node):
                continue
            if node.used_at != used_at:
                heapq.heappush(self.host_candidates, (node.used_at, page_hash))
                continue
            evicted.append(self.drop_copy(page_hash))
        return evicted

    def coldest_without_copy(self, num_pages: int) -> list[PageHash]:
        """Those of the next `num_pages` to be evicted from the device of which nothing would be left."""
        heap, gone, order = list(self.candidates), dict[PageHash, int](), dict[PageHash, None]()
        heapq.heapify(heap)
        while len(order) < num_pages and heap:
            used_at, page_hash = heapq.heappop(heap)
            node = self.nodes.get(page_hash)
            is_leaf = node is not None and node.num_children == gone.get(page_hash, 0)
            if node is None or not node.is_landed or node.pins or not is_leaf or page_hash in order:
                continue
            if node.used_at != used_at:
                heapq.heappush(heap, (node.used_at, page_hash))
                continue
            order[page_hash] = None
            if node.parent is not None:
                gone[node.parent] = gone.get(node.parent, 0) + 1
                heapq.heappush(heap, (self.nodes[node.parent].used_at, node.parent))
        return [page_hash for page_hash in order if self.nodes[page_hash].host == NOWHERE]

    def _may_drop_copy(self, node: TreeNode) -> bool:
        return node.host != NOWHERE and node.num_host_children == 0 and not node.is_loading

    def _offer_copy(self, page_hash: PageHash, node: TreeNode) -> None:
        if self._may_drop_copy(node):
            heapq.heappush(self.host_candidates, (node.used_at, page_hash))
            if len(self.host_candidates) > 2 * len(self.nodes) + 64:
                self.host_candidates = [
                    (node.used_at, page_hash) for page_hash, node in self.nodes.items() if self._may_drop_copy(node)
                ]
                heapq.heapify(self.host_candidates)
