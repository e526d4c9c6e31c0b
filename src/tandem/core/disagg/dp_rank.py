"""Which data-parallel rank of a prefill holds a request: `Known`, `Likely`, `AskBootstrap`, or `Conflict`.

Decode has to say READY to the rank that computes the prompt, and all that both halves share is the request's body. The
rule that derives a rank from the room lives in `resolve` and nowhere else. Decode follows what `resolve` says; prefill,
which knows where the request really is, compares (`settle`), and announces what contradicts it.

    what is known, first that applies                          decode         prefill, request on rank r
    `disagg_prefill_dp_rank` names rank h                      Known(h)       quiet if h = r, else Conflict
    nothing of that prefill yet                                AskBootstrap   -
    `disagg_prefill_dp_rank` names a rank that is not there    Conflict       Conflict
    it has one rank                                            Known(0)       quiet
    rooms tell the rank: g = room % n                          Likely(g)      quiet if g = r, else Announce(r, sought=g)
    the same, and what contradicts a room is refused           Known(g)       quiet if g = r, else Conflict
    anything else                                              AskBootstrap   Announce(r)

Rooms tell the rank where the method is `follow_bootstrap_room`. Nobody asks then: decode says READY to the likely rank.
Where a router has sent the request to another one, that rank announces it, and the likely one, told so by its server,
sends decode on (`Moved`). A prefill with `DpConflictPolicy.FAIL` refuses such requests. A switch in the environment
makes both sides ask and announce for every request.
"""

from typing import assert_never

from msgspec import Struct

from tandem.core.settings import DpConflictPolicy, PrefillInfo
from tandem.core.values import Room

FORCE_QUERY = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"


class DpTopology(Struct, frozen=True):
    """The DP ranks of one server, and which of them is speaking.

    Plain DP replicates the whole engine: `system_dp_*`. DP attention splits one engine's attention: `attn_dp_*`, with
    one system rank. Under plain DP every replica's attention rank is 0, so it must not be taken for the rank.
    """

    system_dp_size: int = 1
    system_dp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0

    @property
    def is_replicated(self) -> bool:
        return self.system_dp_size > 1

    @property
    def size(self) -> int:
        return self.system_dp_size if self.is_replicated else self.attn_dp_size

    @property
    def effective_rank(self) -> int:
        """The rank for announcements and comparisons alike."""
        return self.system_dp_rank if self.is_replicated else self.attn_dp_rank


class RequestFacts(Struct, frozen=True):
    """What both halves know of the request."""

    room: Room
    disagg_prefill_dp_rank: int | None = None  # carried by the request itself: nothing is derived then


class Known(Struct, frozen=True, tag=True):
    rank: int


class Likely(Struct, frozen=True, tag=True):
    """Nearly always; this rank says where the request is when it is elsewhere."""

    rank: int


class AskBootstrap(Struct, frozen=True, tag=True):
    """The prefill has to be asked."""


class Conflict(Struct, frozen=True, tag=True):
    """What the request says of its rank cannot be true; for the user."""

    explanation: str
    sought: int | None = None  # the rank where decode looks nevertheless


class Quiet(Struct, frozen=True, tag=True):
    """Decode finds this rank by itself."""


class Announce(Struct, frozen=True, tag=True):
    """Register this rank for the request's room, so that decode finds it; the rank where it is sought hears of it."""

    rank: int
    sought: int | None = None


def room_rank(room: Room, dp_size: int) -> int:
    """The convenience rule. Sound only where somebody checks it."""
    return room % dp_size


def resolve(
    request: RequestFacts, prefill: PrefillInfo | None, *, force_query: bool = False
) -> Known | Likely | AskBootstrap | Conflict:
    """Where decode finds the request. `prefill` is None as long as nothing is known of it."""
    hint = request.disagg_prefill_dp_rank
    if prefill is not None and prefill.dp_size < 1:
        return Conflict(f"prefill says that it has {prefill.dp_size} DP ranks")
    if hint is not None and hint < 0:
        return Conflict(f"disagg_prefill_dp_rank {hint} is not a rank")
    if hint is not None and prefill is not None and hint >= prefill.dp_size:
        return Conflict(f"disagg_prefill_dp_rank {hint} does not exist: prefill has {prefill.dp_size} DP ranks")
    if hint is not None:
        return Known(hint)
    if prefill is None:
        return AskBootstrap()
    if prefill.dp_size == 1:
        return Known(0)
    if not prefill.rooms_tell_the_rank or force_query:
        return AskBootstrap()
    implied = room_rank(request.room, prefill.dp_size)
    return Known(implied) if prefill.conflict is DpConflictPolicy.FAIL else Likely(implied)


def settle(
    request: RequestFacts, own: PrefillInfo, *, actual: int, force_query: bool = False
) -> Quiet | Announce | Conflict:
    """What the prefill does for a request that was dispatched to its rank `actual` (`DpTopology.effective_rank`)."""
    assert 0 <= actual < own.dp_size
    found = resolve(request, own, force_query=force_query)
    match found:
        case Known(rank) | Likely(rank) if rank == actual:
            return Quiet()
        case Likely(rank):
            return Announce(actual, sought=rank)
        case Known(rank) if request.disagg_prefill_dp_rank is None:
            return Conflict(room_conflict(request.room, actual=actual, implied=rank), sought=rank)
        case Known(rank):
            return Conflict(f"dispatched to dp_rank {actual} but disagg_prefill_dp_rank is {rank}", sought=rank)
        case AskBootstrap():
            return Announce(actual)
        case Conflict() as conflict:
            return conflict
        case _:
            assert_never(found)


def room_conflict(room: Room, *, actual: int, implied: int) -> str:
    return (
        f"follow_bootstrap_room conflict: dispatched to dp_rank {actual} but bootstrap_room {room} implies dp_rank "
        f"{implied}. Set {FORCE_QUERY}=1 to allow mixed routing."
    )
