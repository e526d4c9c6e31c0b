"""Where a request is: the lifecycle table, and the record that one node keeps for it until nothing of it is left.

What every request has is in `Progress`: its tokens, pages, batches and deadlines. What it is beside, local or one side
of a disaggregated pair, is its `side` (`disagg.sides`), exactly one at any time.

A request's state is also its queue: the node keeps one ordered table per state, so a request cannot be in two.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.batch import Row
from tandem.core.commands import Path, StageTimings, StartRequest
from tandem.core.disagg.messages import Ready
from tandem.core.disagg.sides import AnySide, DecodeSide, PeerSearch, PrefillSide
from tandem.core.machine import Machine
from tandem.core.request import Request
from tandem.core.values import ZERO_NS, BatchId, Nanos, PageHash, PageId, RequestId, ShardId


class State(StrEnum):
    BOOTSTRAPPING = "bootstrapping"  # the other half is not known yet, or has not said READY
    AWAITING = "awaiting"  # READY is said; wants pages and a slot when the prefill has computed all of the prompt
    QUEUED = "queued"  # wants pages and a slot
    LOADING = "loading"  # a prefix of it is on its way from host memory
    COMPUTING = "computing"  # its prompt is being computed here, chunk by chunk
    ARRIVING = "arriving"  # its prompt's KV is being pulled from a peer
    RECOVERING = "recovering"  # the transfer failed; its pages are not drained yet
    RUNNING = "running"  # one token per decode batch
    RETRACTING = "retracting"  # gives its pages back as soon as its last batch has returned
    PARKED = "parked"  # computed; nobody has said READY
    SENDING = "sending"  # computed; the peer reads
    DRAINING = "draining"  # ended for everybody; a batch or a transfer still holds its pages
    DONE = "done"


class Trigger(StrEnum):
    PEER_READY = "peer ready"
    PEER_FAILED = "peer failed"
    AWAIT = "await"
    COMPUTE = "compute"
    ARRIVE = "arrive"
    LOAD = "load"
    RUN = "run"
    SEND = "send"
    PARK = "park"
    GIVE_BACK = "give back"
    REQUEUE = "requeue"
    FALL_BACK = "fall back"
    END = "end"
    DRAINED = "drained"


_LIVE = [state for state in State if state not in (State.DRAINING, State.DONE)]

LIFECYCLE: Machine[State, Trigger] = Machine(
    name="request",
    initial=(State.QUEUED, State.BOOTSTRAPPING),
    terminal=frozenset({State.DONE}),
    rules={
        (State.BOOTSTRAPPING, Trigger.PEER_READY): State.QUEUED,
        (State.BOOTSTRAPPING, Trigger.PEER_FAILED): State.QUEUED,  # compute here instead
        (State.BOOTSTRAPPING, Trigger.AWAIT): State.AWAITING,
        (State.AWAITING, Trigger.PEER_READY): State.QUEUED,
        (State.AWAITING, Trigger.PEER_FAILED): State.QUEUED,
        (State.QUEUED, Trigger.PEER_FAILED): State.QUEUED,
        (State.QUEUED, Trigger.COMPUTE): State.COMPUTING,
        (State.QUEUED, Trigger.ARRIVE): State.ARRIVING,
        (State.QUEUED, Trigger.LOAD): State.LOADING,
        (State.LOADING, Trigger.COMPUTE): State.COMPUTING,
        (State.LOADING, Trigger.ARRIVE): State.ARRIVING,
        (State.LOADING, Trigger.REQUEUE): State.QUEUED,  # it will not come
        (State.QUEUED, Trigger.FALL_BACK): State.BOOTSTRAPPING,  # its prompt is rendered anew
        (State.COMPUTING, Trigger.RUN): State.RUNNING,
        (State.COMPUTING, Trigger.SEND): State.SENDING,
        (State.COMPUTING, Trigger.PARK): State.PARKED,
        (State.COMPUTING, Trigger.GIVE_BACK): State.RETRACTING,
        (State.ARRIVING, Trigger.RUN): State.RUNNING,
        (State.ARRIVING, Trigger.PEER_FAILED): State.RECOVERING,
        (State.RECOVERING, Trigger.REQUEUE): State.QUEUED,
        (State.RUNNING, Trigger.GIVE_BACK): State.RETRACTING,
        (State.PARKED, Trigger.SEND): State.SENDING,
        (State.PARKED, Trigger.GIVE_BACK): State.RETRACTING,
        (State.RETRACTING, Trigger.REQUEUE): State.QUEUED,
        (State.RETRACTING, Trigger.FALL_BACK): State.BOOTSTRAPPING,
        **{(state, Trigger.END): State.DRAINING for state in _LIVE},
        (State.DRAINING, Trigger.DRAINED): State.DONE,
    },
)

SLOT_STATES = (
    State.LOADING,
    State.COMPUTING,
    State.ARRIVING,
    State.RECOVERING,
    State.RUNNING,
    State.RETRACTING,
    State.PARKED,
    State.SENDING,
)
WAITING_STATES = (State.BOOTSTRAPPING, State.AWAITING, State.QUEUED)  # without a slot and pages
WANTS_KV = (State.AWAITING, State.QUEUED, State.LOADING, State.ARRIVING)  # as a decode side whose peer is known


class WaitingFor(StrEnum):
    """What a request that is not running waits for; `/debug/waits` lists it, and a missed deadline names it."""

    PEER = "peer"  # bootstrap
    RENDERING = "rendering"  # the edge, which renders the prompt at decode's time
    DP_RANK = "dp_rank"  # which of the peer's ranks has it
    PREFILL = "prefill"  # the peer, to compute the prompt
    TURN = "turn"  # those before it in the queue: what it needs itself has not been asked
    PAGES = "pages"
    SLOT = "slot"
    RESULT_SLOT = "result_slot"
    GATE = "gate"  # the prefill delayer
    PREFIX = "prefix"  # pages that another request is computing, or pulling
    WINDOW = "window"  # its batch
    LANDING = "landing"  # the peer's pages
    TIER = "tier"  # pages of host memory
    STORAGE = "storage"  # pages from below it
    COLLECTION = "collection"  # the peer to read and release
    DRAIN = "drain"


_WAITS = {
    State.BOOTSTRAPPING: WaitingFor.PEER,
    State.AWAITING: WaitingFor.PREFILL,
    State.QUEUED: WaitingFor.TURN,
    State.LOADING: WaitingFor.TIER,
    State.COMPUTING: WaitingFor.WINDOW,
    State.ARRIVING: WaitingFor.LANDING,
    State.RECOVERING: WaitingFor.DRAIN,
    State.RUNNING: WaitingFor.WINDOW,
    State.RETRACTING: WaitingFor.WINDOW,
    State.PARKED: WaitingFor.PEER,
    State.SENDING: WaitingFor.COLLECTION,
    State.DRAINING: WaitingFor.DRAIN,
}


_MAY_BE_BLOCKED = (State.QUEUED, State.COMPUTING, State.ARRIVING)


@dataclass(slots=True)
class Progress:
    """Mutable; owned by one node. Token counts are of this request's own sequence."""

    request: Request
    side: AnySide
    state: State
    arrived_at: Nanos
    entered_at: Nanos  # this state
    deadline: Nanos
    length: int  # known tokens: prompt and emitted outputs
    computed: int = 0  # tokens whose KV is written
    launched: int = 0  # prompt rows: tokens whose KV is written or is being written
    generated: int = 0  # emitted outputs
    pending: int = 0  # tokens that launched batches will sample
    in_flight: int = 0  # launched batches that know this request
    pages: list[PageId] = field(default_factory=list[PageId])
    untold_token: bytes = b""  # first tokens from the peer that no plan has told the workers
    synced_pages: int = 0  # leading pages that the workers know
    hashes: list[PageHash] = field(default_factory=list[PageHash])  # of full pages; grows with the output
    inserted: int = 0  # leading pages that the prefix tree knows under these hashes
    window_from: int = 0  # leading pages whose window parts it has no use for any more (`kv/windows.py`)
    window_claim: int = 0  # how many parts it may need at one time
    locked: PageHash | None = None
    load_until: Nanos | None = None  # loading: then it computes
    computes_all: bool = False  # it has waited for a load that did not come
    prompt_extras: list[bytes] = field(
        default_factory=list[bytes]
    )  # of the prompt, chunk by chunk, until they are handed on
    cached_tokens: int = 0  # found in the prefix tree at the first admission
    host_tokens: int = 0  # those of them that came from host memory
    storage_tokens: int = 0  # those of these that came there from storage, for this request
    fetched_pages: int = 0  # from storage, for this request
    computed_tokens: int = 0  # prompt tokens computed here, repetitions included
    kv_pages: int = 0  # pulled from a peer
    is_counted: bool = False  # its prompt is in the hit rate
    retractions: int = 0
    path: Path = Path.LOCAL
    blocked_on: WaitingFor | None = None  # why the last admission did not take it, or the gate does not let it begin
    computing_since: Nanos = ZERO_NS
    stages: dict[str, Nanos] = field(default_factory=dict[str, Nanos])
    drains: dict[ShardId, None] = field(
        default_factory=dict[ShardId, None]
    )  # have not answered CancelPull or RevokePages
    first_cause: str = ""  # why no KV has come from a peer
    timer_at: Nanos | None = None  # its earliest entry in the timer heap

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def ledger(self) -> StageTimings:
        """Where its time went, up to the stage that it is in."""
        return StageTimings(tuple(self.stages.items()))

    @property
    def waiting_for(self) -> WaitingFor | None:
        if self.state in _MAY_BE_BLOCKED and self.blocked_on is not None:
            return self.blocked_on
        match self.state, self.side:
            case State.BOOTSTRAPPING, DecodeSide(search=PeerSearch(asks_rank=True)):
                return WaitingFor.DP_RANK
            case State.BOOTSTRAPPING, PrefillSide(ready=Ready()):
                return WaitingFor.RENDERING
            case state, _:
                return _WAITS.get(state)


_ENDED = (State.DRAINING, State.DONE)


def is_early(progress: Progress) -> bool:
    """A prefill side to which no decode has said READY: nobody waits for it yet."""
    return isinstance(progress.side, PrefillSide) and not progress.side.is_ready


def start_of(progress: Progress, path: Path, prompt_extras: tuple[bytes, ...] = ()) -> StartRequest:
    """Its first token is here."""
    cached = progress.cached_tokens
    tiers = progress.host_tokens, progress.storage_tokens
    return StartRequest(progress.id, path, cached, progress.ledger, prompt_extras, *tiers)


def num_shared(one: Progress, other: Progress, first: int, last: int) -> int:
    """Pages of [first, last) up to where the two prompts part. A hash names a whole prefix: they do so once."""
    return bisect_left(range(first, last), True, key=lambda index: one.hashes[index] != other.hashes[index])


def has_ended(progress: Progress) -> bool:
    """The request has ended for its client; late results of its batches and transfers are dropped."""
    return progress.state in _ENDED


@dataclass(slots=True)
class InflightBatch:
    """A launched batch that has not returned. `forward_iter` is frozen here, at launch."""

    batch: BatchId
    forward_iter: int
    rows: tuple[Row, ...]
    members: tuple[RequestId, ...]
