"""All that a node knows, in one record, and the few moves that keep it whole.

Every mutable thing of a node is in `NodeState`, so a snapshot is its encoding and nothing can be forgotten. The
functions here are the only ones that move a request between states or take and give pages.
"""

import heapq
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tandem.core.commands import (
    AnnounceCleared,
    AnnounceRemoved,
    AnnounceStored,
    Command,
    FailRequest,
    FetchPages,
    FinishRequest,
    ForgetRequests,
    FreeWindows,
    LoadPages,
    LookUpPages,
    StorePages,
    WritePages,
)
from tandem.core.disagg.dp_rank import RequestFacts
from tandem.core.disagg.messages import LastWord, Ready, Release
from tandem.core.disagg.sides import Arrival, DecodeSide, Local, PrefillSide, Reader
from tandem.core.disagg.transfer_state import ResultSlots
from tandem.core.events import SnapshotsGathered
from tandem.core.kv.host_tier import Copy, HostTier
from tandem.core.kv.pool import PagePool, PageState
from tandem.core.kv.storage_tier import Act, Operation, StorageTier
from tandem.core.kv.tree import PrefixTree
from tandem.core.kv.windows import Windows, most_seen
from tandem.core.request import Request
from tandem.core.scheduler.chunk_budget import ChunkBudget
from tandem.core.scheduler.delayer_policy import Decision, DelayHistory, RankLoad
from tandem.core.scheduler.micro_batches import MicroBatches
from tandem.core.scheduler.request_state import (
    LIFECYCLE,
    InflightBatch,
    Progress,
    State,
    Trigger,
    has_ended,
)
from tandem.core.settings import NodeSettings, PrefillInfo, WindowSettings
from tandem.core.values import ZERO_NS, Address, Cause, Incarnation, Nanos, PageHash, PageId, RequestId, Room, ceil_div


@dataclass(slots=True)
class Stashed:
    """What decode said of a request that has not come."""

    peer: Incarnation
    message: Ready | Release
    expires_at: Nanos


@dataclass(slots=True)
class Farewell:
    """Whom to tell that a half of decode is over, as soon as it is known who that is."""

    address: Address  # of the bootstrap server
    facts: RequestFacts
    dp_rank: int | None  # the one that is meant; None: follows from the facts
    is_asked: bool = False  # the server was asked where the room is; it is asked once


@dataclass(slots=True)
class KnownPeer:
    """What the bootstrap server at one address told of one DP rank."""

    address: Address
    incarnation: Incarnation
    layout: str
    differs: str = ""  # where it is another layout than ours, in words


@dataclass(slots=True)
class Counters:
    """Sums since the start, for metrics that no state shows. `hit_tokens` without reprocessed ones (sglang#26780)."""

    input_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0  # of them, those that were loaded from host memory
    storage_hit_tokens: int = 0  # of those, the ones that came there from storage for their request
    prefill_retries: dict[str, int] = field(default_factory=dict[str, int])  # by reason
    retractions: int = 0
    bootstrap_failed: int = 0
    transfer_failed: int = 0


@dataclass(slots=True)
class DelayerState:
    """What the prefill delayer of this replica remembers, and has counted."""

    memory: DelayHistory = field(default_factory=DelayHistory)
    since: Nanos | None = None  # when the delay under way began
    ask_at: Nanos = ZERO_NS  # with several ranks: when a pass may be asked for (again)
    gathered: SnapshotsGathered | None = None  # what they said for the next batch
    batches: tuple[int, ...] = ()  # requests in the last prompt batches
    snapshot: RankLoad | None = None  # of the last pass
    decision: Decision | None = None
    ranks: tuple[RankLoad, ...] = ()  # that it was made from; others may have been gathered since
    waited_passes: int = 0  # of the delay that it ended
    waited_ns: Nanos = ZERO_NS
    outcomes: dict[tuple[str, bool, str, bool], int] = field(default_factory=dict[tuple[str, bool, str, bool], int])
    waits_by_passes: dict[int, int] = field(default_factory=dict[int, int])
    waits_by_seconds: dict[int, int] = field(default_factory=dict[int, int])  # by bucket; the first is 0
    waited_ns_total: Nanos = ZERO_NS


@dataclass(slots=True)
class NodeState:
    settings: NodeSettings
    pool: PagePool
    tree: PrefixTree
    windows: Windows
    results: ResultSlots
    host: HostTier
    storage: StorageTier
    micro_batches: MicroBatches
    now: Nanos = ZERO_NS
    steps: int = 0
    requests: dict[RequestId, Progress] = field(default_factory=dict[RequestId, Progress])
    queues: dict[State, dict[RequestId, None]] = field(default_factory=dict[State, dict[RequestId, None]])
    rooms: dict[Room, RequestId] = field(default_factory=dict[Room, RequestId])
    inflight: list[InflightBatch] = field(default_factory=list[InflightBatch])
    forward_ct: int = 0
    attempts: int = 0  # transfers begun; never used twice, so an old OFFER of a room that is used again is told apart
    chunk_budget: ChunkBudget = field(default_factory=ChunkBudget)
    timers: list[tuple[Nanos, RequestId]] = field(default_factory=list[tuple[Nanos, RequestId]])
    stash: dict[Room, Stashed] = field(default_factory=dict[Room, Stashed])
    tombstones: dict[Room, LastWord] = field(default_factory=dict[Room, LastWord])
    farewells: dict[Room, Farewell] = field(default_factory=dict[Room, Farewell])  # tombstones that nobody was told
    prefills: dict[str, PrefillInfo] = field(default_factory=dict[str, PrefillInfo])  # by bootstrap address
    peers: dict[str, KnownPeer] = field(default_factory=dict[str, KnownPeer])  # by bootstrap address and DP rank
    asked: dict[str, Nanos] = field(default_factory=dict[str, Nanos])
    held_back: dict[RequestId, None] = field(default_factory=dict[RequestId, None])  # pulls, while another one pulls
    draining: bool = False
    counters: Counters = field(default_factory=Counters)
    delayer: DelayerState = field(default_factory=DelayerState)
    out: list[Command] = field(default_factory=list[Command])  # of the step that runs; empty between steps
    forgotten: list[RequestId] = field(default_factory=list[RequestId])

    @classmethod
    def empty(cls, settings: NodeSettings) -> "NodeState":
        windows = settings.windows or WindowSettings(0, 0)
        ahead = settings.chunk_tokens * settings.window_depth
        least = most_seen(windows.tokens, ahead, page_size=settings.page_size) if windows.tokens else 0
        assert windows.max_parts >= least, "one request may need more window parts than there are"
        return cls(
            settings,
            PagePool.empty(settings.num_pages, max_parts=windows.max_parts),
            PrefixTree(),
            Windows(windows.tokens, settings.page_size),
            ResultSlots.empty(settings.metadata_slots),
            HostTier.empty(settings.host_tier),
            StorageTier(settings.host_tier.storage if settings.host_tier is not None else None),
            MicroBatches.empty(settings.num_micro_batches),
            queues={state: OrderedDict() for state in State if state is not State.DONE},
        )

    def encode(self) -> bytes:
        assert not self.out, "snapshots are taken between steps"
        # Why not as they are: msgspec reads an OrderedDict as a dict and does not see what `move_to_end` has moved.
        queues = {queue: dict.fromkeys(ids) for queue, ids in self.queues.items()}
        return msgspec.msgpack.encode(replace(self, queues=queues))

    @classmethod
    def decode(cls, snapshot: bytes) -> "NodeState":
        state = msgspec.msgpack.decode(snapshot, type=cls)
        state.queues = {queue: OrderedDict(ids) for queue, ids in state.queues.items()}
        return state

    @property
    def num_slots_used(self) -> int:
        """Requests in `SLOT_STATES`: counted by those that are not, which are fewer states."""
        return len(self.requests) - sum(map(len, _queues_without_slot(self.queues)))

    def live(self, state: State) -> list[Progress]:
        """The requests in one state, in order of entry."""
        queue = self.queues[state]
        return list(map(self.requests.__getitem__, queue)) if queue else []

    def in_room(self, room: Room) -> Progress | None:
        request = self.rooms.get(room)
        return self.requests.get(request) if request is not None else None


def enter(node: NodeState, progress: Progress, trigger: Trigger, *, first: bool = False) -> None:
    """Move a request along the lifecycle table; `first` puts it at the head of the new queue."""
    request, after = progress.id, LIFECYCLE.next(progress.state, trigger)
    charge_stage(node, progress)
    del node.queues[progress.state][request]
    progress.state = after
    if after is State.DONE:
        return
    queue = node.queues[after]
    queue[request] = None
    if first:
        assert isinstance(queue, OrderedDict)
        queue.move_to_end(request, last=False)
    schedule(node, progress)


_queues_without_slot = operator.itemgetter(State.BOOTSTRAPPING, State.QUEUED, State.DRAINING)

_STAGES = {
    State.BOOTSTRAPPING: "bootstrap",
    State.QUEUED: "waiting",
    State.RETRACTING: "waiting",
    State.LOADING: "load",
    State.COMPUTING: "forward",
    State.PARKED: "bootstrap",
    State.SENDING: "transfer_kv_cache",
    State.ARRIVING: "transferred",
    State.RECOVERING: "transferred",
}


def charge_stage(node: NodeState, progress: Progress) -> None:
    """Book the time in the present state on the TTFT ledger; stages partition [arrival, first token]."""
    charge(node, progress, _STAGES.get(progress.state))


def charge_stage_as_waiting(node: NodeState, progress: Progress) -> None:
    """It was ready to be computed, and something else held it."""
    charge(node, progress, "waiting")


def charge(node: NodeState, progress: Progress, stage: str | None) -> None:
    since, progress.entered_at = progress.entered_at, node.now
    if stage is None or progress.generated:
        return
    side = "decode" if isinstance(progress.side, DecodeSide) else "prefill"
    add_stage(progress, f"{side}_{stage}", Nanos(node.now - since))


def add_stage(progress: Progress, stage: str, duration_ns: Nanos) -> None:
    if duration_ns > 0:
        progress.stages[stage] = Nanos(progress.stages.get(stage, 0) + duration_ns)


# --- pages -----------------------------------------------------------------------------------------------------------


def take_pages(node: NodeState, progress: Progress, *, num_pages: int, match_pages: int, reserve: int) -> bool:
    """Fill the request's page table with `num_pages`: a cached prefix of at most `match_pages`, then own pages.

    What of the prefix is not on the device yet has a page there and is on its way: `is_loading`. False, with nothing
    taken, if fewer than `reserve` pages would stay available, or others have to be copied to host memory first.
    """
    assert not progress.pages
    hashes = progress.hashes[:match_pages]
    matched = node.tree.match(hashes) if node.settings.prefix_cache else []
    below = worth_loading(node, progress, hashes[len(matched) :])
    below = below[: node.pool.max_parts] if node.windows.are_there else below
    num_found = node.windows.num_usable(node.tree, node.pool, matched, below)
    matched, below = matched[:num_found], below[: max(0, num_found - len(matched))]
    num_matched = len(matched)
    deepest = hashes[num_found - 1] if num_found else None
    if deepest is not None:
        node.tree.lock(deepest)
    num_loading = sum(node.tree.nodes[page_hash].is_loading for page_hash in below)
    wanted = num_pages - num_matched - num_loading
    num_loads = len(below) - num_loading
    lacks = wanted + reserve > node.pool.num_free + node.tree.num_evictable
    claims = not lacks and claim_parts(node, progress, num_pages, num_found, num_loads)
    if not claims or not make_room_copied(node, wanted):
        if claims:
            give_up_claim(node, progress, num_found)
        if deepest is not None:
            node.tree.unlock(deepest)
        return False
    if not progress.is_counted:
        progress.host_tokens = len(below) * node.settings.page_size
        progress.storage_tokens = min(len(below), progress.fetched_pages) * node.settings.page_size
    node.windows.make_room(node.tree, node.pool, num_loads)
    begin_copy(node, node.host.load(node.tree, node.pool, below, node.now))
    loading = [node.tree.nodes[page_hash].page for page_hash in below]
    progress.pages = matched + loading + node.pool.allocate(num_pages - num_found, progress.id)
    progress.inserted = num_found
    progress.locked = deepest
    if isinstance(progress.side, DecodeSide):  # all of it is going to be written by transfers
        take_parts(node, progress.pages[num_found:])
    progress.synced_pages = 0
    progress.computed = progress.launched = num_found * node.settings.page_size
    use_again(node, hashes[:num_matched])
    return True


def worth_loading(node: NodeState, progress: Progress, hashes: Sequence[PageHash]) -> Sequence[PageHash]:
    """The leading `hashes` that are in host memory, or on their way from there, as far as it pays to wait for them."""
    if not node.host.is_there or not node.settings.prefix_cache or progress.computes_all:
        return ()
    below, num_pages = node.tree.match_below(hashes), node.pool.num_pages
    token_ns = node.chunk_budget.token_ns
    return below[: node.host.worth_loading(node.tree, below, node.settings.page_size, num_pages, token_ns, node.now)]


def is_loading(node: NodeState, progress: Progress) -> bool:
    """Part of the prefix in its page table has not landed."""
    return not node.tree.is_landed(progress.locked)


def begin_copy(node: NodeState, copy: Copy | None) -> None:
    if copy is None:
        return
    if copy.is_load:
        node.out.append(LoadPages(copy.number, copy.hashes, copy.host_pages, copy.pages))
    else:
        node.out.append(StorePages(copy.number, copy.hashes, copy.pages, copy.host_pages))


def use_again(node: NodeState, hashes: Sequence[PageHash]) -> None:
    """One more request has these pages: by policy, now is the time to copy them."""
    if not node.host.is_there:
        return
    for page_hash in hashes:
        node.tree.nodes[page_hash].hits += 1
    begin_copy(node, node.host.store_used(node.tree, hashes, node.pool.num_pages, node.now))
    begin_operation(node, node.storage.write(node.tree, node.host, hashes, node.now))


def begin_operation(node: NodeState, operation: Operation | None) -> None:
    """Of storage."""
    match operation:
        case None:
            pass
        case Operation(act=Act.LOOK_UP):
            node.out.append(LookUpPages(operation.number, operation.hashes))
        case Operation(act=Act.FETCH):
            node.out.append(FetchPages(operation.number, operation.hashes, operation.host_pages))
        case Operation():
            node.out.append(WritePages(operation.number, operation.hashes, operation.host_pages))


def make_room_copied(node: NodeState, num_pages: int) -> bool:
    """As `make_room`, but what has to be copied before it leaves the device is copied first: False until it is."""
    if node.host.writes_back and drop_copied(node, num_pages) > 0:
        copy = node.host.store_coldest(node.tree, num_pages - node.pool.num_free, node.pool.num_pages, node.now)
        if copy is not None:
            copy.makes_room = True
            begin_copy(node, copy)
        if node.host.makes_room and not node.host.is_stuck(node.now):
            return False
    return make_room(node, num_pages)


def drop_copied(node: NodeState, num_pages: int) -> int:
    """Take pages off the device of which a copy stays. Returns how many are lacking still, 0 or less: none."""
    for page in node.tree.evict(num_pages - node.pool.num_free, only_copied=True):
        node.pool.evict(page)
    return num_pages - node.pool.num_free


def make_room(node: NodeState, num_pages: int) -> bool:
    """Evict cached pages until `num_pages` are free, if that is possible."""
    keeps_ahead = node.host.writes_back and num_pages > node.pool.num_free
    if keeps_ahead:
        drop_copied(node, num_pages)
    removed = evict(node, num_pages - node.pool.num_free)
    if removed and node.settings.announces_cache:
        node.out.append(AnnounceRemoved(removed))
    if keeps_ahead:
        begin_copy(node, node.host.store_coldest(node.tree, 0, node.pool.num_pages, node.now))
    return node.pool.num_free >= num_pages


def flush_cache(node: NodeState) -> None:
    """Evict every cached page that nobody holds."""
    removed = evict(node, node.pool.num_pages)
    node.host.flush(node.tree, node.pool)
    if removed and node.settings.announces_cache:
        node.out.append(AnnounceRemoved(removed) if node.tree.nodes else AnnounceCleared())


def evict(node: NodeState, num_pages: int) -> tuple[PageHash, ...]:
    """Up to so many cached pages become free; their hashes."""
    for page in node.tree.evict(num_pages):
        node.pool.evict(page)
    return node.tree.take_dropped()


def checkpoint(node: NodeState, progress: Progress) -> None:
    """Give the full, computed pages to the prefix tree. The request reads on; the tree owns them from here."""
    if not node.settings.prefix_cache:
        return
    full = min(len(progress.hashes), progress.computed // node.settings.page_size)
    if full <= progress.inserted:
        return
    first_new = full
    for index in range(progress.inserted, full):
        page_hash, page = progress.hashes[index], progress.pages[index]
        if node.tree.insert(page_hash, page, parent_of(progress, index)):
            first_new = min(first_new, index)
        elif is_better(node, page_hash, page):
            node.pool.evict(node.tree.replace(page_hash, page))
        else:
            continue
        node.pool.share(page, progress.id)
        if node.windows.are_there and index >= progress.window_from:
            node.windows.pin((page_hash,))
    if first_new < full and node.settings.announces_cache:  # behind a page that was not there none was
        new = tuple(progress.hashes[first_new:full])
        node.out.append(AnnounceStored(progress.id, first_new, parent_of(progress, first_new), new))
    used = progress.hashes[progress.inserted : full]
    lock_up_to(node, progress, full)
    begin_copy(node, node.host.store_used(node.tree, used, node.pool.num_pages, node.now))


def is_better(node: NodeState, page_hash: PageHash, page: PageId) -> bool:
    """Than the cached one, which has lost its window part, and nobody holds it."""
    cached, has_part = node.tree.nodes[page_hash], node.pool.has_part
    return bool(has_part) and has_part[page] and not has_part[cached.page] and not cached.pins


def parent_of(progress: Progress, index: int) -> PageHash | None:
    return progress.hashes[index - 1] if index else None


def adopt_cached(node: NodeState, progress: Progress) -> None:
    """Read what the prefix tree has by now instead of own pages, of which nobody has written or told any yet."""
    found = node.tree.match(progress.hashes) if node.settings.prefix_cache else []
    first, stop = progress.inserted, node.windows.num_usable(node.tree, node.pool, found)
    if stop <= first:
        return
    node.pool.free(progress.pages[first:stop], progress.id)
    progress.pages[first:stop] = found[first:stop]
    lock_up_to(node, progress, stop)
    if node.windows.are_there:
        node.windows.pin(progress.hashes[max(first, progress.window_from) : stop])
        give_up_parts(node, progress, node.windows.first_seen(stop * node.settings.page_size))
    progress.computed = progress.launched = stop * node.settings.page_size
    use_again(node, progress.hashes[first:stop])


def lock_up_to(node: NodeState, progress: Progress, num_pages: int) -> None:
    """So many leading pages are in the prefix tree under its hashes, and stay there."""
    before, progress.locked = progress.locked, progress.hashes[num_pages - 1]
    node.tree.lock(progress.locked)
    if before is not None:
        node.tree.unlock(before)
    progress.inserted = num_pages


def give_back_pages(node: NodeState, progress: Progress) -> None:
    """Empty the page table. What the tree took stays cached; the rest is free at once, so nothing may touch it."""
    assert progress.in_flight == 0, "a launched batch may still write these pages"
    assert not progress.drains, "a transfer may still touch these pages"
    give_up_claim(node, progress, len(progress.pages))
    node.pool.free(progress.pages, progress.id)
    if progress.locked is not None:
        node.tree.unlock(progress.locked)
    progress.pages = []
    progress.prompt_extras = []  # of what is computed again
    progress.locked = progress.load_until = None
    progress.inserted = progress.synced_pages = progress.computed = progress.launched = 0


def give_back_if_idle(node: NodeState, progress: Progress) -> bool:
    """Pages go to the prefix tree as soon as no batch writes them, or else stay: False."""
    if progress.in_flight:
        return False
    checkpoint(node, progress)  # chunks that returned meanwhile
    give_back_pages(node, progress)
    progress.length = progress.request.prompt_len + progress.generated
    return True


def reusable_tokens(progress: Progress) -> int:
    """Known tokens whose KV may be cached where the request is computed here: the last one has to be looked at, and so
    has every one whose log-probabilities are wanted, until they have been told."""
    prompt_logprobs_from = progress.request.prompt_logprobs_from
    if prompt_logprobs_from is None or progress.generated:
        return progress.length - 1
    return min(prompt_logprobs_from, progress.length - 1)


def lacks_page(node: NodeState, progress: Progress) -> bool:
    """Of a running request: its next token's input has no page yet."""
    return progress.length + progress.pending > len(progress.pages) * node.settings.page_size


def pages_for(node: NodeState, num_tokens: int) -> int:
    return ceil_div(num_tokens, node.settings.page_size)


def too_long(node: NodeState, request: Request) -> str | None:
    """Why the prompt and one token more can never fit, or None."""
    if node.settings.whole_prompts and request.prompt_len > node.settings.chunk_tokens:
        return (
            f"{request.prompt_len} prompt tokens do not fit one batch of {node.settings.chunk_tokens}, "
            "and a model that looks both ways computes a prompt in one"
        )
    if pages_for(node, request.prompt_len + 1) > node.pool.num_pages:
        tokens = node.pool.num_pages * node.settings.page_size
        return f"{request.prompt_len} prompt tokens do not fit the KV pool of {tokens} tokens"
    if request.room is not None and pages_for(node, request.prompt_len) > node.pool.max_parts > 0:
        tokens = node.pool.max_parts * node.settings.page_size
        return f"{request.prompt_len} prompt tokens do not fit the {tokens} tokens of layers with a window"
    return None


# --- window parts (`kv/windows.py`) ----------------------------------------------------------------------------------


def claim_parts(node: NodeState, progress: Progress, num_pages: int, num_found: int, num_loads: int) -> bool:
    """It gets a page table of so many pages, with a cached prefix, part of which has to be loaded: is there room for
    what it may need at one time? Then that is its claim, and what it sees of the prefix stays.
    """
    windows, pool = node.windows, node.pool
    if not windows.are_there:
        return True
    most = pages_for(node, progress.length + progress.request.max_new_tokens - progress.generated)
    claim = min(most, parts_to_decode(node))
    first = windows.first_seen(num_found * node.settings.page_size)
    match progress.side:
        case Local():
            ahead = node.settings.chunk_tokens * node.settings.window_depth
            claim = max(claim, min(most, windows.most_seen(ahead)))
        case DecodeSide():
            claim = max(claim, num_pages)
        case PrefillSide():
            claim, first = num_pages, 0
    claim = max(claim, num_loads)
    claims = claim + sum(other.window_claim for other in node.requests.values())
    if claims + pool.counts[PageState.LOADING] > pool.max_parts:
        return False
    windows.pin(progress.hashes[first:num_found])
    progress.window_from, progress.window_claim = first, claim
    return True


def parts_to_decode(node: NodeState) -> int:
    """That a request needs which gets one token, or block, after the other."""
    return node.windows.most_seen(node.settings.block_tokens * (node.settings.window_depth + 1))


def give_up_claim(node: NodeState, progress: Progress, num_pages: int) -> None:
    """It has, or would have had, a page table of so many pages, or cached pages of one."""
    give_up_parts(node, progress, num_pages)
    progress.window_from = progress.window_claim = 0


def take_parts(node: NodeState, pages: Sequence[PageId]) -> None:
    """They are about to be written."""
    if node.windows.are_there:
        has_part = node.pool.has_part
        node.windows.make_room(node.tree, node.pool, sum(not has_part[page] for page in pages))
        for page in pages:
            node.pool.take_part(page)


def pass_window(node: NodeState, progress: Progress) -> None:
    """More has been computed, or has landed: parts that no query sees any more go back. Who sends keeps them."""
    if not node.windows.are_there or isinstance(progress.side, PrefillSide):
        return
    if progress.state is State.RUNNING:
        progress.window_claim = min(progress.window_claim, parts_to_decode(node))
    elif progress.state is not State.COMPUTING:
        return
    give_up_parts(node, progress, node.windows.first_seen(progress.computed))


def give_up_parts(node: NodeState, progress: Progress, stop: int) -> None:
    """Of the leading pages: own ones lose them, cached ones when others need room."""
    if not node.windows.are_there:
        return
    pool, sends = node.pool, isinstance(progress.side, PrefillSide)
    for index in range(progress.window_from, stop):
        page = progress.pages[index] if progress.pages else None
        if page is not None and pool.owners[page] == progress.id:
            pool.lose_part(page)
            continue
        node.windows.unpin(node.tree, pool, progress.hashes[index : index + 1])
        if page is not None and sends and not pool.has_part[page]:
            pool.lost_parts.append(page)  # reading has brought zeros there
    progress.window_from = max(progress.window_from, stop)


def free_windows_command(node: NodeState) -> None:
    """The first of its step: what has lost its part may be written again by any of the others."""
    if node.pool.lost_parts:
        node.out.insert(0, FreeWindows(node.pool.take_lost_parts()))


# --- ends ------------------------------------------------------------------------------------------------------------


def failure(node: NodeState, progress: Progress, cause: Cause, detail: str) -> FailRequest:
    """The cause in full: in which wait, for how long, on whom."""
    known = progress.side.counterpart
    peer = known.name if known is not None else ""
    stage = str(progress.waiting_for or progress.state)
    return FailRequest(progress.id, cause, stage, detail, peer, Nanos(node.now - progress.entered_at))


def end(node: NodeState, progress: Progress, verdict: FinishRequest | FailRequest) -> None:
    """The one terminal event. What batches and transfers still touch stays quarantined until it is drained."""
    node.out.append(verdict)
    node.micro_batches.leave(progress)
    release_aborted_request(node, progress)
    node.results.maybe_release_metadata_buffer(progress.id)
    enter(node, progress, Trigger.END)
    if progress.in_flight or progress.drains:
        node.pool.quarantine(progress.pages, progress.id)
    forget_if_drained(node, progress)


def release_aborted_request(node: NodeState, progress: Progress) -> None:
    """Its prefetch from storage, if it has one, asks for no more; what is under way belongs to the prefix tree.

    On every way out of the queue. Safe at any time, and twice.
    """
    node.storage.release(progress.id)


def forget_if_drained(node: NodeState, progress: Progress) -> None:
    if progress.state is not State.DRAINING or progress.in_flight or progress.drains:
        return
    give_back_pages(node, progress)
    enter(node, progress, Trigger.DRAINED)
    del node.requests[progress.id]
    if progress.request.room is not None and node.rooms.get(progress.request.room) == progress.id:
        del node.rooms[progress.request.room]
    node.micro_batches.forget(progress.id)
    node.forgotten.append(progress.id)


def forget_command(node: NodeState) -> None:
    if node.forgotten:
        node.out.append(ForgetRequests(tuple(node.forgotten)))
        node.forgotten = []


def record_closed_room(node: NodeState, room: Room, answer: LastWord) -> None:
    """Remember what to answer when the peer speaks of this room again; the oldest is forgotten first."""
    node.tombstones.pop(room, None)
    node.tombstones[room] = answer
    while len(node.tombstones) > node.settings.tombstones:
        del node.tombstones[next(iter(node.tombstones))]


# --- timers ----------------------------------------------------------------------------------------------------------


def next_timer(node: NodeState, progress: Progress) -> Nanos | None:
    """When this request wants attention although nothing happens."""
    if has_ended(progress):
        return None
    when = progress.deadline
    for time in (progress.load_until, node.storage.until(progress.id), *side_timers(progress)):
        if time is not None and time < when:
            when = time
    return when


def side_timers(progress: Progress) -> tuple[Nanos | None, ...]:
    """When its side of a pair has something to say again, or has waited long enough."""
    match progress.side, progress.state:
        case DecodeSide(search=search), State.BOOTSTRAPPING:
            return (search.ask_at,)
        case DecodeSide(arrival=Arrival() as arrival), State.ARRIVING:
            return arrival.resend_at, arrival.until
        case PrefillSide(reader=None) as side, _:
            return side.bootstrap_until, side.announce_at
        case PrefillSide(reader=Reader() as reader), State.SENDING:
            return reader.lease_until, reader.resend_at
        case PrefillSide(reader=Reader() as reader), _:
            return (reader.lease_until,)
        case _:
            return ()


def schedule(node: NodeState, progress: Progress) -> None:
    """Make sure that the timer heap has an entry early enough. Later entries are found stale when they come up."""
    when = next_timer(node, progress)
    if when is not None and (progress.timer_at is None or when < progress.timer_at):
        progress.timer_at = when
        heapq.heappush(node.timers, (when, progress.id))


def due(node: NodeState) -> list[Progress]:
    """Requests whose timer has come; each wants `schedule` again afterwards."""
    ready: list[Progress] = []
    while node.timers and node.timers[0][0] <= node.now:
        progress = pop_timer(node)
        if progress is not None:
            ready.append(progress)
    return ready


def pop_timer(node: NodeState) -> Progress | None:
    when, request = heapq.heappop(node.timers)
    progress = node.requests.get(request)
    if progress is None or progress.timer_at != when:
        return None
    progress.timer_at = None
    return progress


def earliest_timer(node: NodeState) -> Nanos | None:
    while node.timers:
        when, request = node.timers[0]
        progress = node.requests.get(request)
        if progress is not None and progress.timer_at == when:
            if not has_ended(progress):
                return when
            progress.timer_at = None
        heapq.heappop(node.timers)
    return None


def later(node: NodeState, timeout_ns: Nanos | None) -> Nanos | None:
    return None if timeout_ns is None else Nanos(node.now + timeout_ns)


def is_over(node: NodeState, time: Nanos | None) -> bool:
    return time is not None and time <= node.now


def page_generations(node: NodeState, pages: Sequence[int]) -> tuple[int, ...]:
    return tuple(node.pool.generations[page] for page in pages)
