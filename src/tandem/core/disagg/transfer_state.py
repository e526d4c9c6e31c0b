"""The two ends of one KV transfer: what each has said, what each knows.

A `Sender` lives with a request on the prefill side, a `Receiver` with its twin on the decode side. Both are plain
records with a state that only the tables below move; deciding what to say is `sched.prefill` and `sched.decode`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from tandem.core.disagg import shard_progress
from tandem.core.disagg.messages import Ready, ResultSlot
from tandem.core.disagg.shard_progress import Landed, ShardReport, Verdict
from tandem.core.machine import Machine
from tandem.core.values import ZERO_NS, Address, Incarnation, Nanos, RequestId, ShardId

DIGEST_BYTES = 8


class TransferState(IntEnum):
    """Ordered: agreement of many shards is the minimum, so a failure anywhere is a failure."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class TransferTrigger(Enum):
    READY_CHECKED = "ready checked"  # sender: decode's READY was for us and fits
    READY_SENT = "ready sent"  # receiver: pages are reserved
    PAGE_MOVED = "page moved"  # read by the peer / landed here
    RELEASED = "released"  # sender: decode has everything
    COMMITTED = "committed"  # receiver: every shard landed, result slot read
    FAULT = "fault"


_S, _T = TransferState, TransferTrigger
_OPEN = (_S.BOOTSTRAPPING, _S.WAITING_FOR_INPUT, _S.TRANSFERRING)
_FAULTS = {(state, _T.FAULT): _S.FAILED for state in _OPEN}
_TERMINAL = frozenset({_S.FAILED, _S.SUCCESS})

SENDER: Machine[TransferState, TransferTrigger] = Machine(
    name="sender",
    initial=(_S.BOOTSTRAPPING,),
    terminal=_TERMINAL,
    rules={
        (_S.BOOTSTRAPPING, _T.READY_CHECKED): _S.WAITING_FOR_INPUT,
        (_S.BOOTSTRAPPING, _T.RELEASED): _S.SUCCESS,  # decode did not need us
        (_S.WAITING_FOR_INPUT, _T.READY_CHECKED): _S.WAITING_FOR_INPUT,  # said again
        (_S.WAITING_FOR_INPUT, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.WAITING_FOR_INPUT, _T.RELEASED): _S.SUCCESS,  # decode held the whole prefix
        (_S.TRANSFERRING, _T.READY_CHECKED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.RELEASED): _S.SUCCESS,
        **_FAULTS,
    },
    foreign=frozenset({_T.READY_CHECKED, _T.PAGE_MOVED, _T.RELEASED}),
)

RECEIVER: Machine[TransferState, TransferTrigger] = Machine(
    name="receiver",
    initial=(_S.BOOTSTRAPPING,),
    terminal=_TERMINAL,
    rules={
        (_S.BOOTSTRAPPING, _T.READY_SENT): _S.WAITING_FOR_INPUT,
        (_S.WAITING_FOR_INPUT, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.WAITING_FOR_INPUT, _T.COMMITTED): _S.SUCCESS,  # nothing had to move
        (_S.TRANSFERRING, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.COMMITTED): _S.SUCCESS,
        **_FAULTS,
    },
)


@dataclass(slots=True)
class Sender:
    """Prefill's end. Page indices count from the start of the prompt."""

    state: TransferState = TransferState.BOOTSTRAPPING
    peer: Incarnation | None = None  # the decode that said READY
    attempt: int = 0  # of that READY
    ready: Ready | None = None  # means a prompt that is being rendered anew, and waits for it
    is_rendered_anew: bool = False
    held_pages: int = 0  # decode has these already
    published: int = 0  # pages [held, published) were given to the shards for digests
    digests: dict[ShardId, bytes] = field(default_factory=dict[ShardId, bytes])  # of pages [held, ...)
    secrets: dict[ShardId, bytes] = field(default_factory=dict[ShardId, bytes])  # of the grant of this attempt
    offered: int = 0  # pages [held, offered) were offered
    result: ResultSlot | None = None
    result_offered: bool = False
    is_forced: bool = False  # the test hook has chosen it for a retry, which it has not had yet
    is_announced: bool = False  # decode asks for our rank: what a bootstrap server forgot is said again
    bootstrap_until: Nanos | None = None  # when READY has to be here
    ready_at: Nanos | None = None
    offered_at: Nanos | None = None  # first offer
    computed_at: Nanos = ZERO_NS  # the prompt, to its end
    lease_until: Nanos = ZERO_NS
    resend_at: Nanos = ZERO_NS

    @property
    def is_ready(self) -> bool:
        return self.state in (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)

    @property
    def counterpart(self) -> Incarnation | None:
        """The decode that has said READY: bound by it, or waiting for the prompt that it means."""
        return self.ready.source if self.ready is not None else self.peer

    def move(self, trigger: TransferTrigger) -> None:
        self.state = SENDER.next(self.state, trigger)

    def begin(self, peer: Incarnation, *, attempt: int, held_pages: int) -> None:
        """READY has come for the first time."""
        self.move(TransferTrigger.READY_CHECKED)
        self.peer = peer
        self.attempt = attempt
        self.held_pages = self.published = self.offered = held_pages

    def digested(self, shards: Iterable[ShardId]) -> int:
        """Pages [held, here) have a digest from every shard: their slowest decides."""
        shortest = min(len(self.digests.get(shard, b"")) for shard in shards)
        return self.held_pages + shortest // DIGEST_BYTES

    def digest_slices(self, shards: Iterable[ShardId], start: int, stop: int) -> tuple[bytes, ...]:
        low, high = ((index - self.held_pages) * DIGEST_BYTES for index in (start, stop))
        return tuple(self.digests.get(shard, b"")[low:high] for shard in shards)


@dataclass(slots=True)
class Receiver:
    """Decode's end."""

    address: Address
    attempt: int  # of this node, rising
    state: TransferState = TransferState.BOOTSTRAPPING
    dp_rank: int | None = None  # of the prefill, as its bootstrap server answered
    learns_rank: int | None = None  # whose incarnation is asked for
    asks_rank: bool = False  # it is a question which rank has the room
    rank_asked: int = 0  # times
    rank_until: Nanos | None = None  # when some rank has to have it
    peer: Incarnation | None = None
    held_pages: int = 0
    total_pages: int = 0
    offered: int = 0  # pages [held, offered) were offered and a pull for them was asked
    reports: dict[ShardId, ShardReport] = field(default_factory=dict[ShardId, ShardReport])  # of this attempt
    result: ResultSlot | None = None
    ready_at: Nanos | None = None
    offered_at: Nanos | None = None  # first offer
    result_at: Nanos | None = None
    ask_at: Nanos = ZERO_NS  # when to ask the bootstrap server (again)
    unanswered: int = 0  # times it was found that nobody is there
    missed_at: Nanos | None = None  # the last of them
    resend_at: Nanos = ZERO_NS
    arrival_until: Nanos | None = None  # when the KV has to be here
    pulling: bool = False  # a PullPages of this attempt was given out, so it has to be drained

    def move(self, trigger: TransferTrigger) -> None:
        self.state = RECEIVER.next(self.state, trigger)

    def hear(self, shard: ShardId, report: ShardReport) -> None:
        """A shard has said how far it is, or that it failed."""
        assert report.attempt == self.attempt
        shard_progress.hear(self.reports, shard, report)

    def verdict(self, shards: Iterable[ShardId]) -> Verdict:
        """What the shards say together about the pages that are wanted."""
        return shard_progress.verdict(dict.fromkeys(shards, self.total_pages - self.held_pages), self.reports)

    def is_complete(self, shards: Iterable[ShardId]) -> bool:
        """Every shard has every wanted page, and the result slot is here."""
        return self.result is not None and isinstance(self.verdict(shards), Landed)


@dataclass(slots=True)
class ResultSlots:
    """The prefill's bounded table of result slots; SGLang calls a slot a metadata buffer.

    A row is taken before the first forward pass and given back exactly once, when the request ends or falls back.
    """

    num_rows: int
    free_rows: list[int] = field(default_factory=list[int])
    owners: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    @classmethod
    def empty(cls, num_rows: int) -> "ResultSlots":
        return cls(num_rows, free_rows=list(range(num_rows - 1, -1, -1)))

    def ensure_metadata_buffer(self, request: RequestId) -> bool:
        """True if the request has a row now. Exhaustion is an answer: the caller goes on with the next request."""
        if request in self.owners:
            return True
        if not self.free_rows:
            return False
        self.owners[request] = self.free_rows.pop()
        return True

    def maybe_release_metadata_buffer(self, request: RequestId) -> None:
        """Give the row back if there is one; idempotent."""
        row = self.owners.pop(request, None)
        if row is not None:
            self.free_rows.append(row)
