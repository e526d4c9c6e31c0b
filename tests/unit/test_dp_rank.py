"""Which DP rank of the prefill holds a request: one function for both halves, and no guess that nobody checks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.disagg.dp_rank import (
    Announce,
    AskBootstrap,
    Conflict,
    DpTopology,
    Known,
    Likely,
    Quiet,
    RequestFacts,
    resolve,
    settle,
)
from tandem.core.dp_dispatch import (
    NO_ROOM,
    Dispatched,
    DispatchLoad,
    Loads,
    Newcomer,
    Refused,
    dispatch,
    method_for,
)
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo, Role
from tandem.core.values import Room

FOLLOW, FAIL, RESOLVE = LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, DpConflictPolicy.FAIL, DpConflictPolicy.RESOLVE
OTHERS = [method for method in LoadBalanceMethod if method not in (FOLLOW, LoadBalanceMethod.AUTO)]
STRICT = PrefillInfo(4, FOLLOW, FAIL)  # rooms tell the rank, and what contradicts them is refused
LENIENT = PrefillInfo(4, FOLLOW, RESOLVE)
SINGLE = PrefillInfo(1)
MISMATCH = (
    "follow_bootstrap_room conflict: dispatched to dp_rank 0 but bootstrap_room 7 implies dp_rank 3. "
    "Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
)

infos = st.builds(
    PrefillInfo, st.integers(1, 8), st.sampled_from([FOLLOW, *OTHERS]), st.sampled_from(list(DpConflictPolicy))
)


def asked(room: int = 7, hint: int | None = None) -> RequestFacts:
    return RequestFacts(Room(room), hint)


# --- decode ----------------------------------------------------------------------------------------------------------

DECODE: dict[str, tuple[RequestFacts, PrefillInfo | None, bool, Known | Likely | AskBootstrap | Conflict]] = {
    "a rank in the request wins": (asked(hint=2), STRICT, False, Known(2)),
    "a rank in the request wins over a forced query": (asked(hint=2), STRICT, True, Known(2)),
    "a rank in the request needs no knowledge of the prefill": (asked(hint=2), None, False, Known(2)),
    "without knowledge of the prefill": (asked(), None, False, AskBootstrap()),
    "one rank": (asked(), SINGLE, False, Known(0)),
    "one rank is never asked for": (asked(), SINGLE, True, Known(0)),
    "by room": (asked(), STRICT, False, Known(3)),
    "by room, forced to ask": (asked(), STRICT, True, AskBootstrap()),
    "by room, and the prefill takes what was routed elsewhere": (asked(), LENIENT, False, Likely(3)),
    "by room, and both, forced to ask": (asked(), LENIENT, True, AskBootstrap()),
    "round robin": (asked(), PrefillInfo(4, LoadBalanceMethod.ROUND_ROBIN, FAIL), False, AskBootstrap()),
    "total requests": (asked(), PrefillInfo(4, LoadBalanceMethod.TOTAL_REQUESTS, FAIL), False, AskBootstrap()),
    "total tokens": (asked(), PrefillInfo(4, LoadBalanceMethod.TOTAL_TOKENS, FAIL), False, AskBootstrap()),
    "a rank that is not there": (
        asked(hint=4), STRICT, False, Conflict("disagg_prefill_dp_rank 4 does not exist: prefill has 4 DP ranks"),
    ),
    "a rank that is not there, of one": (
        asked(hint=1), SINGLE, False, Conflict("disagg_prefill_dp_rank 1 does not exist: prefill has 1 DP ranks"),
    ),
    "a rank that cannot be": (asked(hint=-1), None, False, Conflict("disagg_prefill_dp_rank -1 is not a rank")),
}  # fmt: skip


@pytest.mark.parametrize("case", DECODE)
def test_decode_finds_the_rank(case: str) -> None:
    request, prefill, force_query, found = DECODE[case]
    assert resolve(request, prefill, force_query=force_query) == found


# --- prefill ---------------------------------------------------------------------------------------------------------

PREFILL: dict[str, tuple[RequestFacts, PrefillInfo, bool, int, Quiet | Announce | Conflict]] = {
    "where the room says": (asked(), STRICT, False, 3, Quiet()),
    "elsewhere": (asked(), STRICT, False, 0, Conflict(MISMATCH, sought=3)),
    "elsewhere, queries forced": (asked(), STRICT, True, 0, Announce(0)),
    "where the room says, queries forced": (asked(), STRICT, True, 3, Announce(3)),
    "elsewhere, conflicts resolved": (asked(), LENIENT, False, 0, Announce(0, sought=3)),
    "where the room says, conflicts resolved": (asked(), LENIENT, False, 3, Quiet()),
    "elsewhere, conflicts resolved, queries forced": (asked(), LENIENT, True, 0, Announce(0)),
    "round robin": (asked(), PrefillInfo(4, LoadBalanceMethod.ROUND_ROBIN, FAIL), False, 1, Announce(1)),
    "one rank": (asked(), SINGLE, True, 0, Quiet()),
    "a rank in the request": (asked(hint=2), STRICT, False, 2, Quiet()),
    "a rank in the request that it was not routed to": (
        asked(hint=2), LENIENT, False, 1, Conflict("dispatched to dp_rank 1 but disagg_prefill_dp_rank is 2", sought=2),
    ),
    "a rank that is not there": (
        asked(hint=9), STRICT, False, 1, Conflict("disagg_prefill_dp_rank 9 does not exist: prefill has 4 DP ranks"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_announces_what_cannot_be_derived_and_refuses_what_contradicts(case: str) -> None:
    request, own, force_query, actual, found = PREFILL[case]
    assert settle(request, own, actual=actual, force_query=force_query) == found


def test_the_rank_of_plain_dp_is_the_replicas_and_of_dp_attention_the_attentions() -> None:
    replicas = [DpTopology(system_dp_size=2, system_dp_rank=rank) for rank in range(2)]
    attention = [DpTopology(attn_dp_size=4, attn_dp_rank=rank) for rank in range(4)]
    assert [(it.size, it.effective_rank) for it in replicas] == [(2, 0), (2, 1)]
    assert [(it.size, it.effective_rank) for it in attention] == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert (DpTopology().size, DpTopology().effective_rank) == (1, 0)


def test_plain_dp_refuses_no_request_that_follows_its_room() -> None:
    """Comparing the attention rank, which is 0 on every replica, would refuse every second one."""
    for room in range(1, 9):
        here = DpTopology(system_dp_size=2, system_dp_rank=room % 2)
        own = PrefillInfo(here.size, FOLLOW, FAIL)
        assert settle(asked(room), own, actual=here.effective_rank) == Quiet()


@given(st.integers(1, 2**63 - 1), infos, st.booleans(), st.none() | st.integers(0, 9), st.data())
def test_whatever_decode_derives_is_where_prefill_has_it(
    room: int, info: PrefillInfo, force_query: bool, hint: int | None, data: st.DataObject
) -> None:
    """Unless prefill has refused the request, decode knows its rank, or asks and finds it announced, or goes to the
    rank that is told where it is. Who refuses it tells the rank where decode looks."""
    request = asked(room, hint)
    actual = data.draw(st.integers(0, info.dp_size - 1))
    said = settle(request, info, actual=actual, force_query=force_query)
    found = resolve(request, info, force_query=force_query)
    match said:
        case Quiet():
            assert found in (Known(actual), Likely(actual))
        case Announce(rank, sought):
            assert rank == actual != sought
            assert found == (AskBootstrap() if sought is None else Likely(sought))
        case Conflict(sought=sought):
            assert found != Known(actual)
            assert isinstance(found, Conflict) if sought is None else found == Known(sought)


@given(st.integers(1, 2**63 - 1), infos, st.data())
def test_resolving_refuses_nothing_that_carries_no_rank(room: int, info: PrefillInfo, data: st.DataObject) -> None:
    lenient = PrefillInfo(info.dp_size, info.method, RESOLVE)
    actual = data.draw(st.integers(0, info.dp_size - 1))
    assert not isinstance(settle(asked(room), lenient, actual=actual), Conflict)


# --- dispatch --------------------------------------------------------------------------------------------------------


def ranks_of(loads: Loads, method: LoadBalanceMethod, *newcomers: Newcomer) -> list[int | str]:
    found: list[int | str] = []
    for newcomer in newcomers:
        chosen, loads = dispatch(newcomer, loads, method)
        found.append(chosen.rank if isinstance(chosen, Dispatched) else chosen.reason)
    return found


def idle(num_ranks: int, *, down: tuple[int, ...] = ()) -> Loads:
    return Loads(tuple(DispatchLoad(is_active=rank not in down) for rank in range(num_ranks)))


def test_auto_is_by_room_on_a_prefill_and_in_turn_elsewhere() -> None:
    auto = LoadBalanceMethod.AUTO
    assert method_for(auto, Role.PREFILL) is FOLLOW
    assert method_for(auto, Role.DECODE) is method_for(auto, Role.UNIFIED) is LoadBalanceMethod.ROUND_ROBIN
    for method in [FOLLOW, *OTHERS]:
        assert all(method_for(method, role) is method for role in Role)


def test_round_robin_takes_turns_and_passes_over_ranks_that_are_down() -> None:
    method = LoadBalanceMethod.ROUND_ROBIN
    assert ranks_of(idle(3), method, *[Newcomer(1)] * 5) == [0, 1, 2, 0, 1]
    assert ranks_of(idle(3, down=(1,)), method, *[Newcomer(1)] * 4) == [0, 2, 0, 2]
    assert ranks_of(idle(3, down=(2,)), method, *[Newcomer(1)] * 4) == [0, 1, 0, 1]
    assert ranks_of(idle(2, down=(0, 1)), method, Newcomer(1)) == ["no DP rank is active"]


def test_by_room_is_the_room_modulo_the_ranks_and_needs_one() -> None:
    rooms = [Newcomer(1, Room(room)) for room in (1, 7, 8)]
    assert ranks_of(idle(4), FOLLOW, *rooms, Newcomer(1)) == [1, 3, 0, NO_ROOM]
    assert ranks_of(idle(4, down=(3,)), FOLLOW, Newcomer(1, Room(7))) == ["the room's rank 3 is not active"]


def test_a_room_whose_rank_is_down_goes_to_the_least_busy_one_where_decode_asks_for_it() -> None:
    loads = Loads((DispatchLoad(3), DispatchLoad(2), DispatchLoad(is_active=False)))
    assert dispatch(Newcomer(1, Room(8)), loads, FOLLOW, moves=True)[0] == Dispatched(1)
    assert dispatch(Newcomer(1, Room(6)), loads, FOLLOW, moves=True)[0] == Dispatched(0), "its own rank is there"
    routed = dispatch(Newcomer(1, Room(8), routed_dp_rank=2), loads, FOLLOW, moves=True)[0]
    assert routed == Refused("routed_dp_rank 2 is not active"), "who names a rank means it"


def test_the_least_loaded_rank_counts_what_was_just_dispatched() -> None:
    loads = Loads((DispatchLoad(2, 10), DispatchLoad(1, 100), DispatchLoad(2, 10)))
    assert ranks_of(loads, LoadBalanceMethod.TOTAL_REQUESTS, *[Newcomer(5)] * 4) == [1, 0, 1, 2]
    assert ranks_of(loads, LoadBalanceMethod.TOTAL_TOKENS, *[Newcomer(40)] * 4) == [0, 2, 0, 2]
    tie = Loads((DispatchLoad(2, 10), DispatchLoad(1, 10), DispatchLoad(0, 0, is_active=False)))
    assert ranks_of(tie, LoadBalanceMethod.TOTAL_TOKENS, Newcomer(1)) == [1]


@pytest.mark.parametrize("method", [FOLLOW, *OTHERS])
def test_a_rank_in_the_request_goes_before_every_method(method: LoadBalanceMethod) -> None:
    loads = Loads((DispatchLoad(), DispatchLoad(9, 900), DispatchLoad(is_active=False)))
    routed = [Newcomer(1, Room(6), routed_dp_rank=rank) for rank in (1, 2, 3, -1)]
    assert ranks_of(loads, method, *routed) == [
        1,
        "routed_dp_rank 2 is not active",
        "routed_dp_rank 3 does not exist: this server has 3 DP ranks",
        "routed_dp_rank -1 does not exist: this server has 3 DP ranks",
    ]


def test_a_routed_request_does_not_take_a_turn_and_a_refused_one_is_not_counted() -> None:
    method = LoadBalanceMethod.ROUND_ROBIN
    assert ranks_of(idle(3), method, Newcomer(1, routed_dp_rank=2), Newcomer(1), Newcomer(1)) == [2, 0, 1]
    loads = idle(2, down=(1,))
    chosen, after = dispatch(Newcomer(1, routed_dp_rank=1), loads, method)
    assert isinstance(chosen, Refused)
    assert after is loads
