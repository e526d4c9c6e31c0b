"""Who serves behind a bootstrap address: ranks come, restart and leave, and rooms are found where they were sent."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.bootstrap_registry import BootstrapRegistry, Registration, RegistryLimits, Rejected
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo
from tandem.core.values import SECOND, Incarnation, Nanos, Room

FIELDS = {"page_size": "16", "dtype": "bfloat16"}
NOW = Nanos(1000 * SECOND)


def rank(number: int = 0, *, of: int = 1, life: int = 1, name: str = "p", **changes: object) -> Registration:
    document = f"{name}/{number}/{life}".encode()
    made = Registration(Incarnation(f"{name}{number}", str(life)), number, PrefillInfo(of), FIELDS, document)
    return msgspec.structs.replace(made, **changes)


def filled(*registrations: Registration, limits: RegistryLimits | None = None) -> BootstrapRegistry:
    registry = BootstrapRegistry(limits or RegistryLimits())
    for one in registrations:
        assert registry.register(one) is None
    return registry


def documents(registry: BootstrapRegistry) -> list[bytes | None]:
    found = [registry.find(number) for number in range(registry.dp_size)]
    return [known.document if known is not None else None for known in found]


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_nobody_is_ready_before_every_rank_is_there() -> None:
    registry = BootstrapRegistry()
    assert (registry.is_ready, registry.dp_size, registry.find()) == (False, 0, None)
    registry.register(rank(1, of=2))
    assert (registry.is_ready, registry.find(), registry.find(1)) == (False, None, None)
    registry.register(rank(0, of=2))
    assert registry.is_ready
    assert documents(registry) == [b"p/0/1", b"p/1/1"]
    assert registry.find() == rank(0, of=2)
    assert registry.find(2) is None


def test_the_same_registration_again_changes_nothing() -> None:
    registry = filled(rank())
    registry.announce(Room(5), 0, NOW)
    assert registry.register(rank()) is None
    assert registry.ranks_of([Room(5)], NOW) == {5: 0}


def test_a_repeat_does_not_count_as_another_rank() -> None:
    registry = filled(rank(0, of=2))
    registry.register(rank(0, of=2))
    assert not registry.is_ready


def test_another_incarnation_replaces_and_its_old_rooms_are_forgotten() -> None:
    registry = filled(rank(0, of=2), rank(1, of=2))
    registry.announce(Room(5), 0, NOW)
    registry.announce(Room(6), 1, NOW)
    assert registry.register(rank(0, of=2, life=2)) is None
    assert documents(registry) == [b"p/0/2", b"p/1/1"]
    assert registry.ranks_of([Room(5), Room(6)], NOW) == {6: 1}


def test_an_incarnation_that_was_replaced_cannot_come_back() -> None:
    registry = filled(rank(life=1), rank(life=2), rank(life=3))
    for late in (rank(life=1), rank(life=2)):
        refused = registry.register(late)
        assert isinstance(refused, Rejected)
        assert refused.param == "incarnation.id"
        assert "was replaced by another" in refused.reason
    assert documents(registry) == [b"p/0/3"]


def test_a_life_of_the_same_number_at_another_place_was_not_replaced() -> None:
    registry = filled(rank(of=2), rank(1, of=2), rank(of=2, life=2), rank(of=2, life=3))
    assert registry.register(rank(1, of=2, life=2)) is None


def test_replaced_incarnations_are_remembered_in_bounded_number() -> None:
    registry = filled(*(rank(life=life) for life in range(1, 6)), limits=RegistryLimits(max_replaced=2))
    assert isinstance(registry.register(rank(life=4)), Rejected)
    assert registry.register(rank(life=1)) is None


def test_a_life_cannot_change_what_it_said() -> None:
    registry = filled(rank())
    refused = registry.register(rank(document=b"elsewhere"))
    assert isinstance(refused, Rejected)
    assert "and differently" in refused.reason
    assert documents(registry) == [b"p/0/1"]


def test_the_farewell_of_a_replaced_incarnation_is_ignored() -> None:
    registry = filled(rank(life=2))
    assert not registry.unregister(Incarnation("p0", "1"))
    assert registry.is_ready
    assert registry.unregister(Incarnation("p0", "2"))
    assert not registry.is_ready
    assert registry.find() is None


def test_who_has_left_may_come_back() -> None:
    registry = filled(rank())
    registry.announce(Room(5), 0, NOW)
    registry.unregister(rank().who)
    assert registry.ranks_of([Room(5)], NOW) == {}
    assert registry.register(rank()) is None


def test_ranks_that_disagree_are_refused_with_the_field() -> None:
    registry = filled(rank(0, of=2))
    for other, param, part in (
        (rank(1, of=3), "prefill", "dp_size=3"),
        (rank(1, of=2, prefill=PrefillInfo(2, LoadBalanceMethod.ROUND_ROBIN)), "prefill", "ROUND_ROBIN"),
        (rank(1, of=2, prefill=PrefillInfo(2, conflict=DpConflictPolicy.FAIL)), "prefill", "FAIL"),
        (
            rank(1, of=2, layout_fields=FIELDS | {"page_size": "32"}),
            "layout_fields",
            "page_size is 16 at rank 0 and 32 at rank 1",
        ),
    ):
        refused = registry.register(other)
        assert isinstance(refused, Rejected)
        assert refused.param == param
        assert part in refused.reason
    assert not registry.is_ready


def test_a_prefill_that_comes_back_with_fewer_ranks_registers_and_none_of_the_former_ones_is_waited_for() -> None:
    registry = filled(*(rank(number, of=4) for number in range(4)))
    for number in range(4):
        registry.announce(Room(number), number, NOW)
    assert registry.register(rank(1, of=2, life=2)) is None
    assert (registry.is_ready, registry.dp_size) == (False, 2)
    assert registry.ranks_of(map(Room, range(4)), NOW) == {}
    assert registry.register(rank(0, of=2, life=2)) is None
    assert registry.is_ready
    assert documents(registry) == [b"p/0/2", b"p/1/2"]
    for number in range(4):
        late = registry.register(rank(number, of=4))
        assert isinstance(late, Rejected)
        assert "was replaced by another" in late.reason or number > 1
        assert not registry.unregister(rank(number, of=4).who)
    assert documents(registry) == [b"p/0/2", b"p/1/2"]


def test_a_prefill_that_comes_back_with_more_ranks_registers_beginning_with_one_that_it_had() -> None:
    registry = filled(rank(0, of=2), rank(1, of=2))
    new = [rank(number, of=4, life=2) for number in range(4)]
    refused = registry.register(new[3])
    assert isinstance(refused, Rejected)
    assert refused.param == "prefill"
    assert documents(registry) == [b"p/0/1", b"p/1/1"], "who is new at a free place ends nobody"
    for one in (new[1], new[3], new[0], new[2]):
        assert registry.register(one) is None
    assert documents(registry) == [one.document for one in new]


def test_a_life_with_other_flags_does_not_end_a_rank_of_the_server_itself() -> None:
    registry = filled(rank(1, of=2))
    registry.register(rank(0, of=2), is_own=True)
    registry.announce(Room(5), 1, NOW)
    refused = registry.register(rank(1, of=3, life=2))
    assert isinstance(refused, Rejected)
    assert (refused.param, documents(registry)) == ("prefill", [b"p/0/1", b"p/1/1"])
    assert registry.ranks_of([Room(5)], NOW) == {5: 1}


def test_a_rank_of_the_server_itself_is_replaced_by_nobody_else_while_it_lives() -> None:
    registry = BootstrapRegistry()
    registry.register(rank(life=1), is_own=True)
    for foreign in (rank(life=2), rank(life=2, name="q"), rank(of=2, life=2)):
        refused = registry.register(foreign)
        assert isinstance(refused, Rejected)
        assert refused.param == "dp_rank"
    assert registry.register(rank(life=1)) is None
    assert documents(registry) == [b"p/0/1"]
    assert registry.register(rank(life=3), is_own=True) is None
    registry.unregister(rank(life=3).who)
    assert registry.register(rank(life=4)) is None


def test_a_rank_of_the_server_itself_takes_its_place_from_whoever_stands_there() -> None:
    own = rank(life=9)
    for others in ([rank(life=1)], [rank(0, of=2), rank(1, of=2)], [rank(layout_fields={}), rank(life=2)]):
        registry = filled(*others)
        assert registry.register(own, is_own=True) is None
        assert (registry.is_ready, registry.find()) == (True, own)
    registry = filled(rank(life=9, document=b"written by another"))
    assert registry.register(own, is_own=True) is None
    assert registry.find() == own


def test_ranks_beside_the_servers_own_come_from_elsewhere_and_have_to_agree_with_it() -> None:
    registry = BootstrapRegistry()
    registry.register(rank(0, of=2), is_own=True)
    assert isinstance(registry.register(rank(1, of=2, layout_fields={})), Rejected)
    assert registry.register(rank(1, of=2)) is None
    assert registry.register(rank(1, of=2, life=2)) is None
    assert documents(registry) == [b"p/0/1", b"p/1/2"]


def test_a_single_rank_may_change_its_layout_by_a_restart() -> None:
    registry = filled(rank())
    assert registry.register(rank(life=2, layout_fields={"page_size": "32"})) is None


def test_ranks_that_cannot_be_are_refused() -> None:
    registry = BootstrapRegistry()
    for wrong, param in (
        (rank(1, of=1), "dp_rank"),
        (rank(-1, of=1), "dp_rank"),
        (rank(0, of=0), "prefill.dp_size"),
        (rank(0, of=100_000), "prefill.dp_size"),
    ):
        refused = registry.register(wrong)
        assert isinstance(refused, Rejected)
        assert refused.param == param


# --- rooms -----------------------------------------------------------------------------------------------------------


def test_a_room_is_found_where_it_was_sent_and_unknown_rooms_are_absent() -> None:
    registry = filled(rank(0, of=2), rank(1, of=2))
    registry.announce(Room(5), 1, NOW)
    assert registry.ranks_of([Room(4), Room(5), Room(6)], NOW) == {5: 1}
    registry.announce(Room(5), 0, NOW)
    assert registry.ranks_of([Room(5)], NOW) == {5: 0}


def test_a_room_of_a_rank_that_is_not_there_is_refused() -> None:
    registry = filled(rank(0, of=2))
    for number in (1, 2, -1):
        assert registry.announce(Room(5), number, NOW) == Rejected("dp_rank", f"no rank {number} is registered")


def test_rooms_are_forgotten_after_a_while_and_an_announcement_renews() -> None:
    registry = filled(rank(), limits=RegistryLimits(room_ttl_ns=Nanos(10 * SECOND)))
    registry.announce(Room(1), 0, NOW)
    registry.announce(Room(2), 0, NOW)
    registry.announce(Room(1), 0, Nanos(NOW + 6 * SECOND))
    assert set(registry.ranks_of([Room(1), Room(2)], Nanos(NOW + 10 * SECOND - 1))) == {1, 2}
    assert set(registry.ranks_of([Room(1), Room(2)], Nanos(NOW + 10 * SECOND))) == {1}
    assert set(registry.ranks_of([Room(1), Room(2)], Nanos(NOW + 16 * SECOND))) == set()


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_rooms_are_bounded_and_the_newest_stay(announced: list[tuple[int, int]], bound: int) -> None:
    registry = filled(rank(), limits=RegistryLimits(room_ttl_ns=Nanos(10 * SECOND), max_rooms=bound))
    now, newest = NOW, dict[int, int]()
    for room, seconds in announced:
        now = Nanos(now + seconds * SECOND)
        registry.announce(Room(room), 0, now)
        newest.pop(room, None)
        newest[room] = now
        newest = dict(list(newest.items())[-bound:])
    alive = {room for room, at in newest.items() if now < at + 10 * SECOND}
    assert set(registry.ranks_of(map(Room, range(1, 13)), now)) == alive
