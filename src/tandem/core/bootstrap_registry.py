"""Who serves behind one bootstrap address: the DP ranks of a prefill, and which rank holds which room. Pure.

A registration brings a whole rank at once, all its shards in one document, so nobody ever sees half of one.

    another incarnation of a rank   replaces the one that is there, and forgets the rooms it had announced
    the same one, said again        changes nothing; with another document it is refused: an incarnation does not change
    one that was replaced           is refused, so that a late registration cannot undo a restart; so is its farewell
    ranks that disagree             about their number, method or layout: a newcomer is refused, with the field. Who
                                    replaces another one shows that their server was started anew, with other flags:
                                    all of the former life that contradict it are replaced with that one
    a rank of the server itself     whose node runs beside this registry is never replaced from outside, and takes its
                                    place from whoever stands there: who answers here knows best what runs here
    ready                           when every rank is there

Rooms are remembered for a while and in bounded number, the oldest go first. Who asks for one that is not here (yet, or
any more) gets no answer for it and asks again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.disagg.layout_check import differences
from tandem.core.settings import MAX_DP_SIZE, PrefillInfo
from tandem.core.values import SECOND, Incarnation, Nanos, Room


class Registration(Struct, frozen=True):
    """One DP rank of a prefill, as it registers."""

    who: Incarnation
    dp_rank: int
    prefill: PrefillInfo
    layout_fields: dict[str, str]
    document: bytes  # what decode is told; opaque here


class Rejected(Struct, frozen=True, tag=True):
    param: str  # the field that is wrong
    reason: str


class RegistryLimits(Struct, frozen=True):
    room_ttl_ns: Nanos = Nanos(120 * SECOND)
    max_rooms: int = 65_536
    max_replaced: int = 1024  # incarnations that are remembered as replaced, the newest


@dataclass(slots=True)
class Announced:
    dp_rank: int
    expires_at: Nanos


@dataclass(slots=True)
class BootstrapRegistry:
    limits: RegistryLimits = field(default_factory=RegistryLimits)
    _ranks: dict[int, Registration] = field(default_factory=dict[int, Registration])
    _own: dict[int, None] = field(default_factory=dict[int, None])  # ranks of `_ranks` that run in this very server
    _replaced: dict[Incarnation, None] = field(default_factory=dict[Incarnation, None])  # the oldest first
    _rooms: dict[Room, Announced] = field(default_factory=dict[Room, Announced])  # the oldest first

    @property
    def prefill(self) -> PrefillInfo | None:
        """As the ranks say; None while nobody has registered."""
        return next((known.prefill for known in self._ranks.values()), None)

    @property
    def dp_size(self) -> int:
        return 0 if self.prefill is None else self.prefill.dp_size

    @property
    def is_ready(self) -> bool:
        return bool(self._ranks) and len(self._ranks) == self.dp_size

    # --- ranks -------------------------------------------------------------------------------------------------------

    def register(self, new: Registration, *, is_own: bool = False) -> Rejected | None:
        """None: it is accepted. `is_own`: said by the server that holds this registry, of its own node."""
        refusal = self._impossible(new) or self._outdated(new, is_own=is_own)
        if refusal is not None:
            return refusal
        others = self._contradicting(new)
        is_next_life = is_own or new.dp_rank in self._ranks
        staying = [other for other in others if other.dp_rank in self._own or not is_next_life]
        if staying:
            return disagreement(staying[0], new)
        if self._ranks.get(new.dp_rank) != new:
            for replaced in [*others, *self._at(new.dp_rank)]:
                self._replace(replaced, new.who)
            self._ranks[new.dp_rank] = new
        if is_own:
            self._own[new.dp_rank] = None
        return None

    def _impossible(self, new: Registration) -> Rejected | None:
        if not 1 <= new.prefill.dp_size <= MAX_DP_SIZE:
            return Rejected("prefill.dp_size", f"must lie between 1 and {MAX_DP_SIZE}")
        if not 0 <= new.dp_rank < new.prefill.dp_size:
            return Rejected("dp_rank", f"there is no rank {new.dp_rank} of {new.prefill.dp_size}")
        return None

    def _outdated(self, new: Registration, *, is_own: bool) -> Rejected | None:
        """Somebody else is there, and stays."""
        known = self._ranks.get(new.dp_rank)
        is_protected = new.dp_rank in self._own
        if known is not None and known.who == new.who:
            if known == new or (is_own and not is_protected):
                return None
            return Rejected("incarnation.id", "this incarnation has registered already, and differently")
        if new.who in self._replaced:
            return Rejected("incarnation.id", f"this incarnation of rank {new.dp_rank} was replaced by another")
        if is_protected and not is_own:
            return Rejected("dp_rank", f"rank {new.dp_rank} runs in this server itself, which nobody replaces")
        return None

    def _contradicting(self, new: Registration) -> list[Registration]:
        """The other ranks with which it cannot be one prefill."""
        said = (new.prefill, new.layout_fields)
        ranks = self._ranks.values()
        return [
            known for known in ranks if known.dp_rank != new.dp_rank and (known.prefill, known.layout_fields) != said
        ]

    def _at(self, dp_rank: int) -> list[Registration]:
        known = self._ranks.get(dp_rank)
        return [] if known is None else [known]

    def unregister(self, who: Incarnation) -> bool:
        """This life serves no more. False when it is not, or not any more, the one that is registered."""
        ranks = [rank for rank, known in self._ranks.items() if known.who == who]
        for rank in ranks:
            self._drop(rank)
            self._own.pop(rank, None)
        return bool(ranks)

    def find(self, dp_rank: int | None = None) -> Registration | None:
        """One rank, or any for who only wants to know the prefill. None until all are there."""
        if not self.is_ready:
            return None
        return self._ranks.get(dp_rank if dp_rank is not None else min(self._ranks))

    def _replace(self, known: Registration, who: Incarnation) -> None:
        """By `who`, which may be the same one, known better."""
        self._drop(known.dp_rank)
        if known.who != who:
            self._replaced[known.who] = None
        while len(self._replaced) > self.limits.max_replaced:
            del self._replaced[next(iter(self._replaced))]

    def _drop(self, dp_rank: int) -> None:
        self._ranks.pop(dp_rank, None)
        for room in [room for room, announced in self._rooms.items() if announced.dp_rank == dp_rank]:
            del self._rooms[room]

    # --- rooms -------------------------------------------------------------------------------------------------------

    def announce(self, room: Room, dp_rank: int, now: Nanos) -> Rejected | None:
        """The request of this room was dispatched to this rank. None: whoever asks is told so."""
        if dp_rank not in self._ranks:
            return Rejected("dp_rank", f"no rank {dp_rank} is registered")
        self._expire(now)
        self._rooms.pop(room, None)  # the newest goes to the end
        while len(self._rooms) >= self.limits.max_rooms:
            del self._rooms[next(iter(self._rooms))]
        self._rooms[room] = Announced(dp_rank, Nanos(now + self.limits.room_ttl_ns))
        return None

    def ranks_of(self, rooms: Iterable[Room], now: Nanos) -> dict[Room, int]:
        """Those that are known."""
        self._expire(now)
        return {room: self._rooms[room].dp_rank for room in rooms if room in self._rooms}

    def _expire(self, now: Nanos) -> None:
        """All live equally long, so the first that has not expired ends the search."""
        while self._rooms:
            room, announced = next(iter(self._rooms.items()))
            if announced.expires_at > now:
                return
            del self._rooms[room]


def disagreement(known: Registration, new: Registration) -> Rejected:
    """Between two ranks of one prefill, of which the first one stays."""
    if new.prefill != known.prefill:
        return Rejected("prefill", f"rank {known.dp_rank} says {known.prefill}, rank {new.dp_rank} {new.prefill}")
    them, us = f"rank {known.dp_rank}", f"rank {new.dp_rank}"
    return Rejected("layout_fields", differences(known.layout_fields, new.layout_fields, them=them, us=us))
