"""All that a node knows, in one record, and the moves of a request between states, with its timers.

Every mutable thing of a node is in `NodeState`, so a snapshot is its encoding and nothing can be forgotten. The only
functions that take and give pages are in `page_tables.py`; those that end a request, in `leaving.py`.
"""

import heapq
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tandem.core.commands import Command
from tandem.core.disagg.dp_rank import RequestFacts
from tandem.core.disagg.messages import LastWord, Ready, Release
from tandem.core.disagg.sides import DecodeSide, PrefillSide
from tandem.core.disagg.transfer_state import ResultSlots
from tandem.core.events import LoadsGathered
from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.pool import PagePool
from tandem.core.kv.storage_tier import StorageTier
from tandem.core.kv.tree import PrefixTree
from tandem.core.kv.windows import Windows, most_seen
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.chunk_budget import ChunkBudget
from tandem.core.scheduler.delayer_policy import Decision
from tandem.core.scheduler.micro_batches import MicroBatches
from tandem.core.scheduler.request_state import LIFECYCLE, WANTS_KV, InflightBatch, Progress, State, Trigger, has_ended
from tandem.core.settings import NodeSettings, PrefillInfo, WindowSettings
from tandem.core.values import ZERO_NS, Address, Incarnation, Nanos, RequestId, Room, ceil_div


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
    gathered: LoadsGathered | None = None  # what they said for the next batch
    batches: tuple[int, ...] = ()  # requests in the last prompt batches
    arrivals: tuple[Nanos, ...] = ()  # of the last prompts, where the queue gate tunes itself
    num_wanted: int = 0  # and how many were worth waiting for when it was last asked about prompts
    load: RankLoad | None = None  # of the last pass
    decision: Decision | None = None
    ranks: tuple[RankLoad, ...] = ()  # that it was made from; others may have been gathered since
    waited_passes: int = 0  # of the delay that it ended
    waited_ns: Nanos = ZERO_NS
    outcomes: dict[tuple[str, bool, str, bool], int] = field(default_factory=dict[tuple[str, bool, str, bool], int])


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
    began_at: Nanos = ZERO_NS  # when it made its first step, before which nobody knows of it
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
        ahead = max(settings.chunk_tokens * settings.window_depth, settings.block_tokens * (settings.window_depth + 1))
        least = most_seen(windows.tokens, ahead, page_size=settings.page_size) if windows.tokens else 0
        assert windows.max_parts >= least, "one request may need more window parts than there are"
        return cls(
            settings,
            PagePool.empty(settings.num_pages, max_parts=windows.max_parts),
            PrefixTree(),
            Windows(windows.tokens, settings.page_size),
            ResultSlots.empty(settings.result_slots),
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


_queues_without_slot = operator.itemgetter(State.BOOTSTRAPPING, State.AWAITING, State.QUEUED, State.DRAINING)

_STAGES = {
    State.BOOTSTRAPPING: "bootstrap",
    State.QUEUED: "waiting",
    State.RETRACTING: "waiting",
    State.LOADING: "load",
    State.COMPUTING: "forward",
    State.PARKED: "bootstrap",
    State.SENDING: "transfer_kv_cache",
    State.AWAITING: "transferred",
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


def mixes(node: NodeState) -> bool:
    """Whether decode rows ride with prompts.

    Not where stages have no micro-batch each: chunks of a prompt follow each other through them without a word from the
    last one, and with the rows of one micro-batch each would wait for the tokens of the one before.
    """
    return node.settings.mixed_chunk and node.micro_batches.all_open


def pages_for(node: NodeState, num_tokens: int) -> int:
    return ceil_div(num_tokens, node.settings.page_size)


def uncomputed(progress: Progress) -> int:
    """Known tokens that this node has to compute still."""
    return 0 if isinstance(progress.side, DecodeSide) else progress.length - progress.launched


def prompt_backlog(node: NodeState) -> int:
    """Such tokens of all that have begun."""
    return sum(uncomputed(progress) for state in (State.COMPUTING, State.LOADING) for progress in node.live(state))


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
    side, state = progress.side, progress.state
    if isinstance(side, DecodeSide):
        if state is State.BOOTSTRAPPING:
            return (side.search.ask_at,)
        if side.arrival is not None and state in WANTS_KV:
            return side.arrival.resend_at, side.arrival.until
    elif isinstance(side, PrefillSide):
        if side.reader is None:
            return side.bootstrap_until, side.announce_at
        if state is State.SENDING:
            return side.reader.lease_until, side.reader.resend_at
        return (side.reader.lease_until,)
    return ()


def schedule(node: NodeState, progress: Progress) -> None:
    """Make sure that the timer heap has an entry early enough. Later entries are found stale when they come up."""
    when = next_timer(node, progress)
    if when is not None and (progress.timer_at is None or when < progress.timer_at):
        progress.timer_at = when
        heapq.heappush(node.timers, (when, progress.id))
        if len(node.timers) > 2 * len(node.requests) + 64:
            drop_stale_timers(node)


def drop_stale_timers(node: NodeState) -> None:
    """So that the heap is bounded by the requests that are there: it may be days until an entry comes up."""
    known = [(progress.timer_at, progress.id) for progress in node.requests.values()]
    node.timers = [(when, request) for when, request in known if when is not None]
    heapq.heapify(node.timers)


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
