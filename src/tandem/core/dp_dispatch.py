"""Which data-parallel rank takes a new request. Pure: loads and the round robin's place come in, and go out changed.

    routed_dp_rank           the request says it: before every method
    follow_bootstrap_room    room % ranks; without a room it is refused. A rank that is not active refuses, or where
                             decode asks for every request's rank anyway (`moves`) the least busy one takes it
    round_robin              the next rank that is active
    total_requests           the active rank with the fewest requests
    total_tokens             the active rank with the fewest tokens, then the fewest requests

Loads are copies that are refreshed now and then. Between two of them every dispatch is added to the copy, or a
burst would all land on the rank that was idle when the copy was made.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from tandem.core.disagg.dp_rank import room_rank
from tandem.core.settings import LoadBalanceMethod, Role
from tandem.core.values import Room

NO_ROOM = "follow_bootstrap_room needs a bootstrap_room: do not send requests to this server directly, use the router"


class DispatchLoad(Struct, frozen=True):
    requests: int = 0  # running and waiting
    tokens: int = 0  # of those
    is_active: bool = True


class Loads(Struct, frozen=True):
    """All ranks of one server as the dispatcher sees them."""

    ranks: tuple[DispatchLoad, ...]
    next_rank: int = 0  # where round robin goes on


class Newcomer(Struct, frozen=True):
    prompt_len: int
    room: Room | None = None
    routed_dp_rank: int | None = None


class Dispatched(Struct, frozen=True, tag=True):
    rank: int


class Refused(Struct, frozen=True, tag=True):
    reason: str


def method_for(method: LoadBalanceMethod, role: Role) -> LoadBalanceMethod:
    """`auto` is by room on a prefill, since that spares decode a question, and in turn everywhere else."""
    if method is not LoadBalanceMethod.AUTO:
        return method
    return LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM if role is Role.PREFILL else LoadBalanceMethod.ROUND_ROBIN


def dispatch(
    newcomer: Newcomer, loads: Loads, method: LoadBalanceMethod, *, moves: bool = False
) -> tuple[Dispatched | Refused, Loads]:
    """The rank for one request, and the loads with it counted. A refusal changes nothing. `method` is not `auto`."""
    chosen = choose(newcomer, loads, method, moves=moves)
    if isinstance(chosen, Refused):
        return chosen, loads
    before = loads.ranks[chosen]
    after = replace(before, requests=before.requests + 1, tokens=before.tokens + newcomer.prompt_len)
    is_turn = method is LoadBalanceMethod.ROUND_ROBIN and newcomer.routed_dp_rank is None
    return Dispatched(chosen), Loads(
        (*loads.ranks[:chosen], after, *loads.ranks[chosen + 1 :]),
        (chosen + 1) % len(loads.ranks) if is_turn else loads.next_rank,
    )


def choose(newcomer: Newcomer, loads: Loads, method: LoadBalanceMethod, *, moves: bool = False) -> int | Refused:
    ranks = loads.ranks
    if newcomer.routed_dp_rank is not None:
        return checked(newcomer.routed_dp_rank, ranks, "routed_dp_rank")
    active = [rank for rank, load in enumerate(ranks) if load.is_active]
    if not active:
        return Refused("no DP rank is active")
    match method:
        case LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM:
            if newcomer.room is None:
                return Refused(NO_ROOM)
            implied = room_rank(newcomer.room, len(ranks))
            if moves and not ranks[implied].is_active:
                return min(active, key=lambda rank: ranks[rank].requests)
            return checked(implied, ranks, "the room's rank")
        case LoadBalanceMethod.ROUND_ROBIN:
            return next((rank for rank in active if rank >= loads.next_rank), active[0])
        case LoadBalanceMethod.TOTAL_REQUESTS:
            return min(active, key=lambda rank: ranks[rank].requests)
        case LoadBalanceMethod.TOTAL_TOKENS:
            return min(active, key=lambda rank: (ranks[rank].tokens, ranks[rank].requests))
        case LoadBalanceMethod.AUTO:
            raise AssertionError("auto is made a method by `method_for`")
        case _:
            assert_never(method)


def checked(rank: int, ranks: Sequence[DispatchLoad], what: str) -> int | Refused:
    if not 0 <= rank < len(ranks):
        return Refused(f"{what} {rank} does not exist: this server has {len(ranks)} DP ranks")
    if not ranks[rank].is_active:
        return Refused(f"{what} {rank} is not active")
    return rank
