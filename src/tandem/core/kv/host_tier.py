"""Host memory below the device: which pages have a copy there, what is being copied, and when that is worth it.

A *copy* is a command to all workers, each for its part of some pages: to host memory (a store) or back (a load). It
counts as far as the worker that has come least far. Until all have answered nobody else may have its pages:

    store    the page on the device is CACHED and pinned; the one in host memory is OWNED by the copy.
             whole: the node has a copy.  failed: the page in host memory is free, and the node is not stored again.
    load     the page on the device is LOADING and belongs to the prefix tree, so whoever wanted it may end meanwhile;
             the one in host memory stays its node's. whole: landed.  failed: the page on the device is free, the copy
             that could not be read is dropped, and who waited for it computes.

What was computed while it was being loaded has landed already; the load's page is free then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.kv.load_policy import BreakEven
from tandem.core.kv.pool import PagePool
from tandem.core.kv.tree import NOWHERE, PrefixTree
from tandem.core.settings import TierSettings, WritePolicy
from tandem.core.values import Nanos, PageHash, PageId, RequestId, ShardId

NEVER = -(1 << 30)  # hits of a page that could not be stored
STORE_SHARE = 4  # at most this part of the device's pages is pinned by stores
LOAD_SHARE = 2  # and this part being loaded
AHEAD_SHARE = 8  # `write_back` keeps about this part ready to leave: who decodes cannot wait for a copy


@dataclass(slots=True)
class Copy:
    number: int
    is_load: bool
    hashes: tuple[PageHash, ...]
    pages: tuple[PageId, ...]  # on the device
    host_pages: tuple[PageId, ...]
    begun_at: Nanos
    makes_room: bool = False  # somebody waits until these pages may leave the device
    whole: dict[ShardId, int] = field(default_factory=dict[ShardId, int])  # how many are, by worker


@dataclass(slots=True)
class TierCounters:
    """Sums since the start, in pages."""

    stored: int = 0
    loaded: int = 0
    lost: int = 0  # could not be stored or loaded


@dataclass(slots=True)
class HostTier:
    settings: TierSettings
    pool: PagePool
    copies: dict[int, Copy] = field(default_factory=dict[int, Copy])
    last_copy: int = 0
    break_even: BreakEven = field(default_factory=BreakEven)
    counters: TierCounters = field(default_factory=TierCounters)
    flushes: bool = False  # drop every page once more when nothing is being copied

    @classmethod
    def empty(cls, settings: TierSettings | None) -> "HostTier":
        """None: there is no host memory, and nothing of this ever happens."""
        settings = settings if settings is not None else TierSettings(num_pages=0)
        return cls(settings, PagePool.empty(settings.num_pages))

    @property
    def is_there(self) -> bool:
        return self.pool.num_pages > 0

    @property
    def makes_room(self) -> bool:
        return any(copy.makes_room for copy in self.copies.values())

    @property
    def writes_back(self) -> bool:
        return self.is_there and self.settings.write_policy is WritePolicy.WRITE_BACK

    def is_stuck(self, now: Nanos) -> bool:
        """Something has been copied for too long: nothing new is begun."""
        oldest = next(iter(self.copies.values()), None)
        return oldest is not None and oldest.begun_at + self.settings.load_timeout_ns <= now

    def count(self) -> int:
        """The next number. Storage takes its own from here, too."""
        self.last_copy += 1
        return self.last_copy

    def make_room(self, tree: PrefixTree, num_pages: int) -> int:
        """Drop the copies that were used least recently until so many pages are free; how many are, at most those."""
        for host_page in tree.evict_copies(num_pages - self.pool.num_free, before=tree.step):
            self.pool.evict(host_page)
        return min(num_pages, self.pool.num_free)

    def keep(
        self, tree: PrefixTree, page_hash: PageHash, parent: PageHash | None, host_page: PageId, owner: RequestId
    ) -> None:
        """A page that has been filled from elsewhere is this node's copy from here on."""
        self.pool.share(host_page, owner)
        tree.join(page_hash, parent)
        tree.keep_copy(page_hash, host_page)

    # --- to host memory ---

    def store_used(self, tree: PrefixTree, hashes: Sequence[PageHash], device_pages: int, now: Nanos) -> Copy | None:
        """Copy those of one sequence that have been used often enough, as the policy has it, and have no copy."""
        if not self.is_there or self.writes_back:
            return None
        wanted: list[PageHash] = []
        for page_hash in hashes:
            node = tree.nodes[page_hash]
            if node.host != NOWHERE or node.is_storing:
                continue
            parent = tree.nodes[node.parent] if node.parent is not None else None
            is_reached = parent is None or parent.host != NOWHERE or parent.is_storing or node.parent in wanted[-1:]
            if node.hits < self.settings.min_hits or not is_reached or not node.is_landed:
                break  # what is below it would not be found
            wanted.append(page_hash)
        return self._store(tree, wanted, device_pages, now)

    def store_coldest(self, tree: PrefixTree, num_pages: int, device_pages: int, now: Nanos) -> Copy | None:
        """Of the next pages that leave the device, and of some behind them, copy those that would be lost."""
        num_ahead = max(1, device_pages // AHEAD_SHARE)
        cold = tree.coldest_without_copy(num_pages + num_ahead)
        return self._store(tree, [one for one in cold if tree.nodes[one].hits > 0], device_pages, now)

    def _store(self, tree: PrefixTree, wanted: Sequence[PageHash], device_pages: int, now: Nanos) -> Copy | None:
        under_way = sum(len(copy.pages) for copy in self.copies.values() if not copy.is_load)
        most = max(1, device_pages // STORE_SHARE) - under_way
        if most <= 0 or not wanted or self.is_stuck(now):
            return None
        wanted = wanted[:most]
        wanted = wanted[: self.make_room(tree, len(wanted))]
        if not wanted:
            return None
        number = self.count()
        host_pages = self.pool.allocate(len(wanted), RequestId(number))
        pages = tuple(tree.nodes[page_hash].page for page_hash in wanted)
        copy = Copy(number, False, tuple(wanted), pages, tuple(host_pages), now)
        for page_hash in wanted:
            tree.nodes[page_hash].is_storing = True
            tree.lock(page_hash)
        self.copies[copy.number] = copy
        return copy

    # --- and back ---

    def worth_loading(
        self,
        tree: PrefixTree,
        below: Sequence[PageHash],
        page_size: int,
        device_pages: int,
        token_ns: Nanos,
        now: Nanos,
        *,
        is_new: bool,
    ) -> int:
        """How many leading ones of `below` to wait for. What is on its way is waited for whatever it costs.

        is_new: see `BreakEven.is_worth`
        """
        on_their_way = 0
        for page_hash in below:
            if not tree.nodes[page_hash].is_loading:
                break
            on_their_way += 1
        under_way = sum(len(copy.pages) for copy in self.copies.values() if copy.is_load)
        most = max(1, device_pages // LOAD_SHARE) - under_way
        num_pages = min(len(below) - on_their_way, max(0, most))
        if (
            num_pages
            and not self.is_stuck(now)
            and self.break_even.is_worth(num_pages, num_pages * page_size, token_ns, is_new=is_new)
        ):
            return on_their_way + num_pages
        return on_their_way

    def load(self, tree: PrefixTree, device: PagePool, hashes: Sequence[PageHash], now: Nanos) -> Copy | None:
        """Fill pages of the device with those that are not on their way there. The caller has made sure of room."""
        wanted = [page_hash for page_hash in hashes if tree.nodes[page_hash].page == NOWHERE]
        if not wanted:
            return None
        pages = device.begin_load(len(wanted))
        host_pages = tuple(tree.nodes[page_hash].host for page_hash in wanted)
        copy = Copy(self.count(), True, tuple(wanted), tuple(pages), host_pages, now)
        for page_hash, page in zip(wanted, pages, strict=True):
            tree.begin_load(page_hash, page)
            tree.lock(page_hash)
        self.copies[copy.number] = copy
        return copy

    # --- what became of it ---

    def record_answer(self, number: int, shard: ShardId, num_pages: int, shards: Sequence[ShardId]) -> Copy | None:
        """A worker has copied the first `num_pages`. Returns the copy when it was the last that was waited for."""
        copy = self.copies.get(number)
        if copy is None or shard not in shards:
            return None
        copy.whole.setdefault(shard, min(num_pages, len(copy.pages)))
        return self.copies.pop(number) if len(copy.whole) == len(shards) else None

    def finish(self, tree: PrefixTree, device: PagePool, copy: Copy, now: Nanos) -> None:
        num_whole = min(copy.whole.values(), default=0)
        self.counters.lost += len(copy.pages) - num_whole
        if copy.is_load:
            self._finish_load(tree, device, copy, num_whole)
            if num_whole == len(copy.pages):
                self.break_even.loaded(num_whole, Nanos(now - copy.begun_at))
        else:
            self._finish_store(tree, device, copy, num_whole)
        for page_hash in copy.hashes:
            tree.unlock(page_hash)

    def _finish_store(self, tree: PrefixTree, device: PagePool, copy: Copy, num_whole: int) -> None:
        owner = RequestId(copy.number)
        for index, (page_hash, host_page) in enumerate(zip(copy.hashes, copy.host_pages, strict=True)):
            node = tree.nodes[page_hash]
            node.is_storing = False
            if device.has_part and not device.has_part[node.page]:
                device.lost_parts.append(node.page)  # reading has brought zeros there
            if index < num_whole:
                self.pool.share(host_page, owner)
                tree.keep_copy(page_hash, host_page, has_part=not device.has_part or device.has_part[node.page])
                self.counters.stored += 1
            else:
                self.pool.free([host_page], owner)
                node.hits = NEVER

    def _finish_load(self, tree: PrefixTree, device: PagePool, copy: Copy, num_whole: int) -> None:
        for index, (page_hash, page) in enumerate(zip(copy.hashes, copy.pages, strict=True)):
            node = tree.nodes[page_hash]
            if not (node.is_loading and node.page == page):
                device.abandon(page)  # it was computed meanwhile
            elif index < num_whole and tree.is_landed(node.parent):
                device.landed(page)
                tree.place(page_hash, page)
                if not node.host_has_part:
                    device.lose_part(page)
                self.counters.loaded += 1
            else:
                device.abandon(page)
                tree.lose_load(page_hash)
                if index == num_whole:
                    self.pool.evict(tree.drop_copy(page_hash))

    def flush(self, tree: PrefixTree, device: PagePool) -> None:
        """Drop every page that nobody holds, in every tier; those that are being copied when they have been."""
        for page in tree.evict(device.num_pages):
            device.evict(page)
        for host_page in tree.evict_copies(self.pool.num_pages, before=tree.step + 1):
            self.pool.evict(host_page)
        self.flushes = bool(self.copies)
