"""Storage below host memory: what is asked of it, fetched from it and written to it, and for whom.

Nobody knows what is there: other servers write and remove, and a folder outlives them all. So a request that comes with
pages which are in no tier of this node has them *looked up*. Those that every worker has found are *fetched* into host
memory, some at a time, from where they are loaded as any page of host memory (`host_tier.py`); what has a copy there is
*written*. Each is a command to all workers, each for its part, and counts as far as the worker that has come least far.

    prefetch   a request's, while it is queued or waits for its peer: it asks for one look-up, then for one fetch after
               the other. Who ends, or waits no longer, asks for no more: nothing has to be taken back.
    fetch      its pages of host memory are OWNED by it until all workers have answered. Then they belong to the prefix
               tree, or are free: what did not come, what has a copy by now, what hangs from nothing in the tree.
    write      owns and pins nothing: a page that leaves host memory meanwhile is not written.

The tree says of a node whether storage has it, as far as is known here; what is in storage only is no node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.load_policy import BreakEven
from tandem.core.kv.tree import NOWHERE, PrefixTree
from tandem.core.settings import StorageSettings
from tandem.core.values import Nanos, PageHash, PageId, RequestId, ShardId

FETCH_SHARE = 2  # at most this part of host memory is being fetched


class Act(StrEnum):
    LOOK_UP = "look up"
    FETCH = "fetch"
    WRITE = "write"


@dataclass(slots=True)
class Operation:
    number: int
    act: Act
    hashes: tuple[PageHash, ...]
    begun_at: Nanos
    host_pages: tuple[PageId, ...] = ()
    parent: PageHash | None = None  # of the first of them
    request: RequestId | None = None  # whose prefetch it is part of
    answers: dict[ShardId, int] = field(default_factory=dict[ShardId, int])  # how many pages, by worker

    @property
    def num_whole(self) -> int:
        return min(self.answers.values(), default=0)


@dataclass(slots=True)
class Prefetch:
    """What one request hopes for."""

    hashes: tuple[PageHash, ...]  # of its prompt
    first: int  # the first of them that is in no tier of this node
    num_there: int | None = None  # from that on in storage; None: that is being looked up
    until: Nanos | None = None  # then it is not waited for; None: nobody waits yet for what is asked now
    waited_until: Nanos | None = None  # and by policy `timeout`, whatever is asked; None: nobody has waited


@dataclass(slots=True)
class StorageCounters:
    """Sums since the start: look-ups, or pages."""

    hits: int = 0  # look-ups
    misses: int = 0
    fetched: int = 0
    written: int = 0
    lost: int = 0  # could not be fetched or written


@dataclass(slots=True)
class StorageTier:
    settings: StorageSettings | None  # None: there is none, and nothing of this ever happens
    prefetches: dict[RequestId, Prefetch] = field(default_factory=dict[RequestId, Prefetch])
    operations: dict[int, Operation] = field(default_factory=dict[int, Operation])
    break_even: BreakEven = field(default_factory=BreakEven)
    counters: StorageCounters = field(default_factory=StorageCounters)

    def until(self, request: RequestId) -> Nanos | None:
        prefetch = self.prefetches.get(request)
        return None if prefetch is None else prefetch.until

    def is_stuck(self, now: Nanos, *, writing: bool = False) -> bool:
        """Something has been read, or written, for too long: nothing new is begun."""
        if self.settings is None:
            return True
        since = [one.begun_at for one in self.operations.values() if (one.act is Act.WRITE) == writing]
        return bool(since) and since[0] + self.settings.io_timeout_ns <= now

    # --- from storage ---

    def look_up(
        self, tree: PrefixTree, host: HostTier, request: RequestId, hashes: Sequence[PageHash], now: Nanos
    ) -> Operation | None:
        """Begin a prefetch of what of `hashes` is in no tier of this node, if that may be worth it."""
        if self.settings is None:
            return None
        first = num_known(tree, hashes)
        wanted = hashes[first : first + host.pool.num_pages // FETCH_SHARE]
        is_full = len(self.prefetches) >= self.settings.max_prefetches
        if len(wanted) < self.settings.min_pages or is_full or self.is_stuck(now):
            return None
        self.prefetches[request] = Prefetch(tuple(hashes), first)
        return self._begin(host, Act.LOOK_UP, wanted, now, request=request)

    def fetch_next(self, tree: PrefixTree, host: HostTier, request: RequestId, now: Nanos) -> Operation | None:
        """The next pages of a prefetch. It ends when there are none, or no room."""
        prefetch = self.prefetches[request]
        if self.settings is None or prefetch.num_there is None:
            return None
        stop = prefetch.first + prefetch.num_there
        first = prefetch.first + num_known(tree, prefetch.hashes[prefetch.first : stop])
        prefetch.first, prefetch.num_there = first, stop - first
        parent = prefetch.hashes[first - 1] if first else None
        if first == stop or self.is_stuck(now) or (parent is not None and parent not in tree.nodes):
            del self.prefetches[request]
            return None
        coming = {page_hash for one in self._fetches() for page_hash in one.hashes}
        num_coming = sum(len(one.hashes) for one in self._fetches())
        most = min(self.settings.fetch_pages, max(1, host.pool.num_pages // FETCH_SHARE) - num_coming)
        wanted: list[PageHash] = []
        for page_hash in prefetch.hashes[first : min(stop, first + most)]:
            if page_hash in coming or is_known(tree, page_hash):
                break
            wanted.append(page_hash)
        if not wanted:  # they come for others, or others fill the room: it goes on when those have come
            return None
        if not host.make_room(tree, len(wanted)):
            del self.prefetches[request]
            return None
        operation = self._begin(host, Act.FETCH, wanted[: host.pool.num_free], now, request=request)
        operation.parent = parent
        operation.host_pages = tuple(host.pool.allocate(len(operation.hashes), RequestId(operation.number)))
        return operation

    def release(self, request: RequestId) -> None:
        """It asks for no more. Safe at any time, and twice."""
        self.prefetches.pop(request, None)

    # --- to storage ---

    def write(self, tree: PrefixTree, host: HostTier, hashes: Sequence[PageHash], now: Nanos) -> Operation | None:
        """Those that have a copy in host memory and none in storage; each is tried once while it is in the tree."""
        if self.settings is None or self.is_stuck(now, writing=True):
            return None
        under_way = sum(len(one.hashes) for one in self.operations.values() if one.act is Act.WRITE)
        wanted: list[PageHash] = []
        for page_hash in hashes:
            node = tree.nodes.get(page_hash)
            if len(wanted) >= self.settings.max_writing - under_way:
                break
            if node is not None and node.host != NOWHERE and node.host_has_part and not node.in_storage:
                node.in_storage = True
                wanted.append(page_hash)
        if not wanted:
            return None
        operation = self._begin(host, Act.WRITE, wanted, now)
        operation.host_pages = tuple(tree.nodes[page_hash].host for page_hash in wanted)
        return operation

    # --- what became of it ---

    def record_answer(self, number: int, shard: ShardId, num_pages: int, shards: Sequence[ShardId]) -> Operation | None:
        """A worker has answered. Returns the operation when it was the last that was waited for."""
        operation = self.operations.get(number)
        if operation is None or shard not in shards:
            return None
        operation.answers.setdefault(shard, min(num_pages, len(operation.hashes)))
        return self.operations.pop(number) if len(operation.answers) == len(shards) else None

    def finish_look_up(self, operation: Operation, page_size: int, token_ns: Nanos) -> None:
        num_there = operation.num_whole
        self.counters.hits += num_there > 0
        self.counters.misses += num_there == 0
        prefetch = self.prefetches.get(operation.request) if operation.request is not None else None
        if operation.request is None or prefetch is None:
            return
        prefetch.num_there, prefetch.until = num_there, None
        if not num_there or not self.break_even.is_worth(num_there, num_there * page_size, token_ns):
            self.release(operation.request)

    def finish_fetch(self, tree: PrefixTree, host: HostTier, operation: Operation, now: Nanos) -> int:
        """What has come belongs to the tree. Returns how many pages of it are new there."""
        num_whole, num_new, parent = operation.num_whole, 0, operation.parent
        for index, (page_hash, host_page) in enumerate(zip(operation.hashes, operation.host_pages, strict=True)):
            if index < num_whole and may_keep(tree, page_hash, parent):
                host.keep(tree, page_hash, parent, host_page, RequestId(operation.number))
                tree.nodes[page_hash].in_storage = True
                num_new += 1
            else:
                host.pool.free([host_page], RequestId(operation.number))
            parent = page_hash
        self.counters.fetched += num_new
        self.counters.lost += len(operation.hashes) - num_whole
        prefetch = self.prefetches.get(operation.request) if operation.request is not None else None
        if prefetch is not None:
            prefetch.until = None
        if num_whole == len(operation.hashes):
            self.break_even.loaded(num_whole, Nanos(now - operation.begun_at))
        elif operation.request is not None:
            self.release(operation.request)
        return num_new

    def finish_write(self, operation: Operation) -> None:
        self.counters.written += operation.num_whole
        self.counters.lost += len(operation.hashes) - operation.num_whole

    def _fetches(self) -> list[Operation]:
        return [one for one in self.operations.values() if one.act is Act.FETCH]

    def _begin(
        self, host: HostTier, act: Act, hashes: Sequence[PageHash], now: Nanos, *, request: RequestId | None = None
    ) -> Operation:
        operation = Operation(host.count(), act, tuple(hashes), now, request=request)
        self.operations[operation.number] = operation
        return operation


def is_known(tree: PrefixTree, page_hash: PageHash) -> bool:
    """There is KV of it in a tier of this node, or on its way between them."""
    node = tree.nodes.get(page_hash)
    return node is not None and (node.page != NOWHERE or node.host != NOWHERE)


def num_known(tree: PrefixTree, hashes: Sequence[PageHash]) -> int:
    """How many leading ones are; they count as used now."""
    for index, page_hash in enumerate(hashes):
        if not is_known(tree, page_hash):
            return index
        tree.nodes[page_hash].used_at = tree.step
    return len(hashes)


def may_keep(tree: PrefixTree, page_hash: PageHash, parent: PageHash | None) -> bool:
    """Nobody has made a copy meanwhile, or is making one, and what it hangs from is still there."""
    node = tree.nodes.get(page_hash)
    if node is not None:
        return node.host == NOWHERE and not node.is_storing
    return parent is None or parent in tree.nodes
