"""What a request is to this node: local, the prefill side of a pair, or its decode side. Each has only its own fields.

    kind          a request is that                                     what comes and goes with its states
    Local         without a room, to its end; and a decode side from    nothing: scheduling is all that there is
                  when its transfer is given up, or it is pushed back
    PrefillSide   with a room, to its end                               `ready`   bootstrapping, retracting: while the
                                                                                  prompt that READY means is rendered
                                                                        `reader`  from READY on
                                                                        `result`  parked, sending
    DecodeSide    with a room and a peer's address, until it is local   `search`  says something while bootstrapping
                                                                        `peer`    from queued on
                                                                        `arrival` from arriving on, or before it
                                                                                  from awaiting on: READY is said

Plain records with a state that only the tables of `transfer_state` move; deciding what to say is `prefill_side` and
`decode_side`. Page indices count from the start of the prompt. The sides are structs and no dataclasses, since only
structs have the tag by which msgspec tells the members of a union apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from msgspec import Struct

from tandem.core.disagg import shard_progress
from tandem.core.disagg.messages import Ready, ResultSlot
from tandem.core.disagg.shard_progress import Landed, ShardReport, Verdict
from tandem.core.disagg.transfer_state import DIGEST_BYTES, RECEIVER, SENDER, TransferState, TransferTrigger
from tandem.core.values import ZERO_NS, Address, Cut, Incarnation, Nanos, Room, ShardId


class Local(Struct, tag="local"):
    """Computed and decoded here; no peer has a part in it."""

    state: ClassVar[None] = None  # of a transfer

    @property
    def counterpart(self) -> None:
        return None


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Digested:
    """What one shard of this prefill has said of the pages that it was given for one reader."""

    num_pages: int
    parts: tuple[bytes, ...]  # digests, of each part that a worker of the reader needs (`core/kv_parts.py`)
    secret: bytes  # of the grant of this attempt


@dataclass(slots=True)
class Reader:
    """The decode that has said READY, and what was handed out to it. Pages before `held_pages` it has already."""

    peer: Incarnation
    attempt: int  # of its READY
    cut: Cut  # how it is cut
    held_pages: int
    published: int  # pages [held_pages, published) were given to the shards for digests
    offered: int  # pages [held_pages, offered) were offered
    ready_at: Nanos
    lease_until: Nanos
    resend_at: Nanos
    digested_shards: dict[ShardId, Digested] = field(default_factory=dict[ShardId, Digested])
    offered_at: Nanos | None = None  # first offer
    result_offered: bool = False

    def record_digests(self, shard: ShardId, num_pages: int, digests: tuple[bytes, ...], secret: bytes) -> None:
        """A shard has digested the next `num_pages`."""
        known = self.digested_shards.get(shard)
        if known is None:
            self.digested_shards[shard] = Digested(num_pages, digests, secret)
        else:
            known.num_pages += num_pages
            known.parts = tuple(old + new for old, new in zip(known.parts, digests, strict=True))

    def digested(self, shards: Iterable[ShardId]) -> int:
        """Pages [held_pages, here) have a digest from every one of these shards: their slowest decides."""
        found = [self.digested_shards.get(shard) for shard in shards]
        return self.held_pages + min(0 if one is None else one.num_pages for one in found)

    def digest_slices(self, shards: Iterable[ShardId], start: int, stop: int) -> tuple[bytes, ...]:
        """Of pages [start, stop), one per part, in order of the shards that have them."""
        low, high = ((index - self.held_pages) * DIGEST_BYTES for index in (start, stop))
        return tuple(part[low:high] for shard in shards for part in self._parts(shard))

    def num_parts(self, shards: Iterable[ShardId]) -> int:
        """Of which each page has a digest."""
        return sum(len(self._parts(shard)) for shard in shards)

    def secrets(self, shards: Iterable[ShardId]) -> tuple[bytes, ...]:
        return tuple(self.digested_shards[shard].secret if shard in self.digested_shards else b"" for shard in shards)

    def _parts(self, shard: ShardId) -> tuple[bytes, ...]:
        known = self.digested_shards.get(shard)
        return () if known is None else known.parts


class PrefillSide(Struct, tag="prefill"):
    """Computes the prompt and offers its KV to the decode that says READY."""

    room: Room
    is_forced: bool  # the test hook has chosen it for a retry, which it has not had yet
    bootstrap_until: Nanos | None  # when READY has to be here
    state: TransferState = TransferState.BOOTSTRAPPING
    announce_at: Nanos | None = None  # decode asks for our rank: when to say it again, in case it was forgotten
    sought: int | None = None  # the rank where decode looks without asking
    ready: Ready | None = None  # means a prompt that is being rendered anew, and waits for it
    is_rendered_anew: bool = False
    reader: Reader | None = None
    result: ResultSlot | None = None
    computed_at: Nanos = ZERO_NS  # the prompt, to its end
    prefill_retry_count: int = 0  # times its pages were given back before READY
    yields: int = 0  # those of them under pressure
    give_back_reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Decode has said READY, and it was checked."""
        return self.reader is not None

    @property
    def counterpart(self) -> Incarnation | None:
        """The decode that has said READY: bound by it, or waiting for the prompt that it means."""
        if self.ready is not None:
            return self.ready.source
        return self.reader.peer if self.reader is not None else None

    @property
    def attempt(self) -> int:
        """Of the READY that is checked; 0 before, for what fails without one."""
        return self.reader.attempt if self.reader is not None else 0

    def move(self, trigger: TransferTrigger) -> None:
        self.state = SENDER.next(self.state, trigger)


# --- decode ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PeerSearch:
    """Which prefill has the room: what the bootstrap server was asked, and what it has answered."""

    ask_at: Nanos = ZERO_NS  # when to ask (again)
    dp_rank: int | None = None  # of the prefill, as its bootstrap server answered
    learns_rank: int | None = None  # whose incarnation is asked for
    asks_rank: bool = False  # it is a question which rank has the room
    is_likely: bool = False  # the rank is the one that the room implies, and nobody was asked
    is_astray: bool = False  # it is not, or nobody is there: ask
    is_informed: bool = False  # the prefill has said who it is since this request came
    rank_asked: int = 0  # times
    rank_until: Nanos | None = None  # when some rank has to have it
    unanswered: int = 0  # times it was found that nobody is there
    missed_at: Nanos | None = None  # the last of them


@dataclass(slots=True)
class Arrival:
    """What READY has asked for, and what of it has come."""

    peer: Incarnation  # the prefill to which READY is said
    held_pages: int  # pages before this one were here already, as READY says
    first_wanted: int  # and those before this one, from `held_pages` on, were found here or came for others since
    num_wanted: int  # pages [first_wanted, first_wanted + num_wanted) have to come
    offered: int  # pages [first_wanted, offered) were offered and, if it has pages for them, a pull was asked
    ready_at: Nanos
    until: Nanos | None  # when the KV has to be here
    resend_at: Nanos = ZERO_NS
    reports: dict[ShardId, ShardReport] = field(default_factory=dict[ShardId, ShardReport])  # of this attempt
    moved_to: int | None = None  # the DP rank that has the room, as we were told; once per attempt
    pulling: bool = False  # a PullPages of this attempt was given out, so it has to be drained
    offered_at: Nanos | None = None  # first offer
    result: ResultSlot | None = None
    result_at: Nanos = ZERO_NS  # when it came first
    is_booked: bool = False  # the ledger tells already what prefill did since READY

    @property
    def is_answered(self) -> bool:
        """Something has come from the prefill: an offer, or where the room is."""
        return self.offered_at is not None or self.moved_to is not None

    def record_report(self, shard: ShardId, report: ShardReport) -> None:
        """A shard has said how far it is, or that it failed."""
        shard_progress.record_report(self.reports, shard, report)

    def verdict(self, shards: Iterable[ShardId]) -> Verdict:
        """What the shards say together about the pages that are wanted."""
        return shard_progress.verdict(dict.fromkeys(shards, self.num_wanted), self.reports)

    def landed_result(self, shards: Iterable[ShardId]) -> ResultSlot | None:
        """The result slot, if it is here and every shard has every wanted page."""
        return self.result if self.result is not None and isinstance(self.verdict(shards), Landed) else None


class DecodeSide(Struct, tag="decode"):
    """Gets the KV of its prompt from the prefill that computes it, and goes on from there."""

    room: Room
    address: Address  # the bootstrap server of the prefill
    attempt: int  # of this node, rising
    total_pages: int  # of the prompt
    state: TransferState = TransferState.BOOTSTRAPPING
    search: PeerSearch = msgspec.field(default_factory=PeerSearch)
    peer: Incarnation | None = None
    arrival: Arrival | None = None

    @property
    def counterpart(self) -> Incarnation | None:
        return self.peer

    @property
    def is_unmet(self) -> bool:
        """READY went where the room is likely to be, and nothing has come from there: it may be elsewhere."""
        return self.search.is_likely and not (self.arrival is not None and self.arrival.is_answered)

    @property
    def offered(self) -> int:
        """Pages before this one were offered, or are here already; 0 until READY is said."""
        return self.arrival.offered if self.arrival is not None else 0

    def move(self, trigger: TransferTrigger) -> None:
        self.state = RECEIVER.next(self.state, trigger)


AnySide = Local | PrefillSide | DecodeSide
