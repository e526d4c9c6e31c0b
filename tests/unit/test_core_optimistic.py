"""Prefill before READY: off, retry and park side by side, the forced retry, and the pressure valves of park."""

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import FinishRequest, PublishPages
from tandem.core.disagg.messages import Offer, Ready
from tandem.core.disagg.optimistic_prefill import should_force_retry
from tandem.core.events import BatchReturned, HooksChanged, RequestArrived
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import SECOND
from tandem.metrics.node_numbers import named

POLICIES = ("off", "retry", "park")


def withheld(policy: str, **settings: object) -> tuple[World, Replica, Replica, int, int]:
    """Both halves are there, but READY does not get through."""
    world = World()
    prefill = world.prefill(optimistic=policy, chunk_tokens=48, **settings)
    decode = world.decode(resend_ns=SECOND)
    prefill.drops.add(Ready)
    pair = world.pair(prefill, decode, prompt_len=100)
    world.run()
    return world, prefill, decode, *pair


def retries(replica: Replica, request: int) -> int | None:
    progress = replica.state.requests.get(request)
    return progress.side.prefill_retry_count if progress is not None else None


def held_pages(replica: Replica) -> int:
    pool = replica.state.pool
    return pool.num_pages - pool.num_free - replica.state.tree.num_evictable


# --- the three policies, told apart by withholding READY -------------------------------------------------------------


def test_off_computes_nothing_and_holds_nothing() -> None:
    _, prefill, _, left, _ = withheld("off")
    assert prefill.plans() == []
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    assert held_pages(prefill) == 0
    assert prefill.state.results.owners == {}
    assert booked(prefill) == (1, 0, 0)


def test_retry_computes_as_often_as_allowed_and_then_holds_nothing_but_what_is_cached() -> None:
    _, prefill, _, left, _ = withheld("retry", optimistic_retries=2)
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    assert prefill.progress(left).side.prefill_retry_count == 2
    assert held_pages(prefill) == 0
    assert len(prefill.state.tree.nodes) > 0
    assert prefill.state.results.owners == {}
    assert prefill.state.counters.prefill_retries == {"not_ready": 2}


def test_park_computes_once_and_holds_pages_and_result_slot() -> None:
    _, prefill, _, left, _ = withheld("park")
    assert [row.samples for plan in prefill.plans() for row in plan.rows] == [False, False, True]
    assert prefill.state_of(left) is State.PARKED
    assert held_pages(prefill) == 7
    assert list(prefill.state.results.owners) == [left]
    assert booked(prefill) == (1, 0, 0)


@pytest.mark.parametrize(
    ("policy", "batches", "forward_tokens", "pages"),
    [("off", [], 0, 0), ("retry", [[1], [1], [1], [2], [2], [2]], 216, 0), ("park", [[1]], 100, 7)],
)
def test_policies_differ_in_launch_order_forward_tokens_and_pages_held(
    policy: str, batches: list[list[int]], forward_tokens: int, pages: int
) -> None:
    """One slot, two prompts, no READY. A retry goes first, and computes what no full page holds: four tokens. Who is
    parked makes no room for somebody who is no better off."""
    world = World()
    prefill = world.prefill(optimistic=policy, optimistic_retries=2, chunk_tokens=112, max_running=1)
    for seed in (1, 2):
        world.submit(prefill, prompt_len=100, room=seed, seed=seed)
    world.run()
    assert [[row.request for row in plan.rows] for plan in prefill.plans()] == batches
    assert sum(row.stop - row.start for plan in prefill.plans() for row in plan.rows) == forward_tokens
    assert held_pages(prefill) == pages


QUEUE_GAUGES = ("num_prefill_bootstrap_queue_reqs", "num_queue_reqs", "num_prefill_inflight_queue_reqs")


def booked(prefill: Replica) -> tuple[float, ...]:
    shown = named(numbers(prefill.node))
    return tuple(shown[name] for name in QUEUE_GAUGES)


@pytest.mark.parametrize("policy", POLICIES)
def test_halves_that_wait_for_ready_are_in_the_bootstrap_queue_whatever_is_computed(policy: str) -> None:
    """At every step of the way there. Two of six fit at once, so that some wait for a slot too."""
    world = World()
    prefill = world.prefill(optimistic=policy, chunk_tokens=32, max_running=2)
    for seed in range(6):
        world.submit(prefill, prompt_len=100, room=seed + 1, seed=seed)
    seen: set[State] = set()
    while world.turn_all():
        assert booked(prefill) == (6, 0, 0)
        seen.update(progress.state for progress in prefill.state.requests.values())
    assert len(prefill.state.requests) == 6
    assert (State.PARKED in seen) == (policy == "park")
    assert (State.COMPUTING in seen) == (policy != "off")


@pytest.mark.parametrize("policy", POLICIES)
def test_when_ready_comes_every_policy_gives_the_same_tokens(policy: str) -> None:
    world, prefill, decode, left, right = withheld(policy)
    num_plans = len(prefill.plans())
    prefill.drops.clear()
    world.advance(2 * SECOND)
    computed_after_ready = [plan for plan in prefill.plans()[num_plans:] if plan.rows]
    assert bool(computed_after_ready) == (policy != "park")
    assert decode.tokens.get(right) == expected_tokens(100, 4, seed=1)
    assert isinstance(prefill.ended[left], FinishRequest)
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("policy", POLICIES)
def test_only_a_policy_that_starts_early_launches_before_ready(policy: str) -> None:
    world = World()
    prefill, decode = world.prefill(optimistic=policy), world.decode()
    decode.holds.add(RequestArrived)
    _left, right = world.pair(prefill, decode, prompt_len=100)
    world.run()
    assert bool(prefill.plans()) == (policy != "off")
    decode.release()
    world.run()
    assert decode.tokens[right] == expected_tokens(100, 4, seed=1)


def test_retry_gives_back_at_a_chunk_boundary_and_continues_where_the_cache_ends() -> None:
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=3, chunk_tokens=32, window_depth=1)
    left = world.submit(prefill, prompt_len=100, room=7)
    world.run()
    starts = [row.start for plan in prefill.plans() for row in plan.rows]
    assert starts == [0, 32, 64, 96]
    assert prefill.progress(left).side.prefill_retry_count == 3


def test_a_chunk_that_is_in_flight_when_pages_go_back_is_cached_too() -> None:
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=3, chunk_tokens=32, window_depth=2)
    left = world.submit(prefill, prompt_len=100, room=7)
    world.run_until(lambda: prefill.state_of(left) is State.RETRACTING)
    assert len(prefill.state.inflight) == 1
    world.turn(prefill)
    assert len(prefill.state.tree.nodes) >= 4
    assert prefill.plans()[2].rows[0].start == 64


def test_ready_between_two_attempts_stops_the_retrying() -> None:
    world = World()
    prefill, decode = world.prefill(optimistic="retry", optimistic_retries=50, chunk_tokens=16), world.decode()
    decode.holds.add(RequestArrived)
    left, right = world.pair(prefill, decode, prompt_len=60)
    world.run_until(lambda: retries(prefill, left) == 2)
    decode.release()
    world.run()
    assert isinstance(prefill.ended[left], FinishRequest)
    assert 2 <= prefill.ended[left].retries < 10
    assert decode.tokens[right] == expected_tokens(60, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_exhausted_retries_fall_back_to_the_bootstrap_queue_without_a_result_slot() -> None:
    world, prefill, decode, left, right = withheld("retry", optimistic_retries=1, result_slots=1)
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    prefill.drops.clear()
    _, other = world.pair(prefill, decode, prompt_len=40, seed=2)
    world.run()
    assert decode.tokens[other] == expected_tokens(40, 4, seed=2)
    world.advance(2 * SECOND)
    assert decode.tokens[right] == expected_tokens(100, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_ready_that_comes_while_pages_go_back_is_no_budget_for_another_retry() -> None:
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=1, chunk_tokens=32, window_depth=2)
    decode = world.decode()
    prefill.holds.add(Ready)
    left, right = world.pair(prefill, decode, prompt_len=200)
    world.run_until(lambda: retries(prefill, left) == 1 and prefill.state_of(left) is State.RETRACTING)
    prefill.holds.add(BatchReturned)
    prefill.release(Ready)
    world.turn(prefill)
    prefill.release(BatchReturned)
    world.run()
    assert prefill.ended[left].retries == 1
    assert prefill.state.counters.prefill_retries == {"not_ready": 1}
    assert decode.tokens[right] == expected_tokens(200, 4, seed=1)


def test_a_retry_that_lacks_pages_keeps_its_result_slot() -> None:
    """Somebody who decodes on this node has grown into them meanwhile."""
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=1000, num_pages=9, conservativeness=0.0)
    grows = world.submit(prefill, prompt_len=20, seed=6, max_new_tokens=60)
    world.run_until(lambda: prefill.state_of(grows) is State.RUNNING)
    request = world.submit(prefill, room=world.room(), prompt_len=100)
    world.run_until(lambda: retries(prefill, request) == 1)
    row = prefill.state.results.owners[request]
    world.run_until(lambda: prefill.progress(request).waiting_for is WaitingFor.PAGES)
    assert prefill.state.results.owners[request] == row


def test_a_retry_keeps_its_result_slot_and_its_place_at_the_head() -> None:
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=3, chunk_tokens=32, window_depth=1, max_running=1)
    first = world.submit(prefill, prompt_len=100, room=7)
    second = world.submit(prefill, prompt_len=100, room=8, seed=2)
    world.run_until(lambda: retries(prefill, first) == 1)
    assert prefill.state.results.owners.keys() == {first}
    assert prefill.state_of(first) is State.COMPUTING
    assert prefill.state_of(second) is State.QUEUED


def test_a_retry_keeps_its_result_slot_while_it_is_queued() -> None:
    """Behind a long prompt whose decode is READY, so that it cannot take another row at once."""
    world = World()
    prefill, decode = world.prefill(optimistic="retry", chunk_tokens=128, max_running=2), world.decode()
    first = world.submit(prefill, prompt_len=100, room=700)
    world.pair(prefill, decode, prompt_len=400, seed=2)
    world.run_until(lambda: prefill.state_of(first) is State.QUEUED and bool(retries(prefill, first)))
    assert first in prefill.state.results.owners


def test_a_retry_begins_its_stages_anew_and_the_arrival_stays() -> None:
    world = World()
    prefill = world.prefill(optimistic="retry", optimistic_retries=3, chunk_tokens=32, window_depth=1)
    left = world.submit(prefill, prompt_len=100, room=7, timeout_ns=60 * SECOND)
    world.run_until(lambda: left in prefill.state.requests)
    arrived_at = prefill.progress(left).arrived_at
    for count in (1, 2):
        world.now += 1_000_000
        world.run_until(lambda count=count: retries(prefill, left) == count)
        progress = prefill.progress(left)
        assert progress.stages == {"prefill_retried": world.now - arrived_at}
        assert progress.computing_since == progress.entered_at == world.now
        assert (progress.arrived_at, progress.deadline) == (arrived_at, arrived_at + 60 * SECOND)


# --- forced retries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forced_request_is_retried_once_and_ends_with_equal_tokens(policy: str) -> None:
    world = World()
    prefill, decode = world.prefill(optimistic=policy, force_retry_prob=1.0, chunk_tokens=48), world.decode()
    left, right = world.pair(prefill, decode, prompt_len=100)
    world.run()
    assert decode.tokens[right] == expected_tokens(100, 4, seed=1)
    forced = policy != "off"
    assert prefill.ended[left].retries == forced
    assert prefill.state.counters.prefill_retries == ({"forced": 1} if forced else {})
    assert_nothing_is_held([prefill, decode])


def test_the_share_of_forced_requests_is_the_same_on_node_and_function() -> None:
    world = World()
    prefill, decode = world.prefill(force_retry_prob=0.5), world.decode()
    pairs = [world.pair(prefill, decode, prompt_len=20, seed=seed, rid=f"r{seed}") for seed in range(12)]
    world.run()
    retried = [prefill.ended[left].retries == 1 for left, _ in pairs]
    assert retried == [should_force_retry(f"r{seed}", prob=0.5, prefill_retry_count=0) for seed in range(12)]


def test_nothing_of_a_forced_attempt_is_offered() -> None:
    world = World()
    prefill, decode = world.prefill(force_retry_prob=1.0, chunk_tokens=48), world.decode()
    left, _ = world.pair(prefill, decode, prompt_len=100)
    world.run_until(lambda: retries(prefill, left) == 1)
    assert prefill.said(Offer) == []


def test_not_even_a_cached_prefix_is_handed_out_in_a_forced_attempt() -> None:
    """Its pages go back to the tree, where they may be evicted: nobody may read them meanwhile."""
    world = World()
    prefill, decode = world.prefill(), world.decode(prefix_cache=False)
    world.pair(prefill, decode, prompt_len=60)
    world.run()
    world.send(prefill, HooksChanged(1.0))
    world.run()
    before = len(prefill.said(PublishPages))
    room = world.room()
    right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address)
    world.run()
    left = world.submit(prefill, prompt_len=100, room=room)
    world.run_until(lambda: retries(prefill, left) == 0 and prefill.state_of(left) is State.COMPUTING)
    assert prefill.progress(left).computed > 0
    assert prefill.progress(left).side.is_ready
    assert len(prefill.said(PublishPages)) == before
    world.run()
    assert decode.tokens[right] == expected_tokens(100, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


# --- pressure --------------------------------------------------------------------------------------------------------


def test_parked_requests_give_way_to_one_that_needs_their_pages() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=8), world.decode()
    parked = world.submit(prefill, prompt_len=100, room=7)
    world.run()
    assert prefill.state_of(parked) is State.PARKED
    _, right = world.pair(prefill, decode, prompt_len=100, seed=2)
    world.run()
    assert decode.tokens[right] == expected_tokens(100, 4, seed=2)
    assert prefill.state_of(parked) is State.BOOTSTRAPPING
    assert prefill.state.counters.prefill_retries == {"yield": 1}
    assert sum(numbers(prefill.node).retries.values()) == 1, "each of them is exported under its reason"
    late = world.submit(decode, prompt_len=100, room=7, peer=prefill.address)
    world.run()
    assert decode.tokens[late] == expected_tokens(100, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_the_newest_parked_request_gives_way_first() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=12), world.decode()
    ids = [world.submit(prefill, prompt_len=64, room=10 + seed, seed=seed) for seed in range(3)]
    world.run()
    assert [prefill.state_of(request) for request in ids] == [State.PARKED] * 3
    world.pair(prefill, decode, prompt_len=64, seed=9)
    world.run()
    assert [prefill.state_of(request) for request in ids] == [State.PARKED, State.PARKED, State.BOOTSTRAPPING]


def test_parked_requests_give_way_to_one_that_needs_a_slot() -> None:
    world = World()
    prefill, decode = world.prefill(max_running=1), world.decode()
    parked = world.submit(prefill, room=7)
    world.run()
    _, right = world.pair(prefill, decode, seed=2)
    world.run()
    assert decode.tokens[right] == expected_tokens(40, 4, seed=2)
    assert prefill.state_of(parked) is State.BOOTSTRAPPING


def test_who_gave_way_runs_again_behind_those_who_wait() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=8, park_attempts=2), world.decode()
    world.submit(prefill, prompt_len=100, room=50, seed=1)
    world.run()
    for seed in (2, 3):
        world.pair(prefill, decode, prompt_len=100, seed=seed)
    world.run()
    order = [row.request for plan in prefill.plans() for row in plan.rows if row.start == 0]
    assert order == [1, 2, 3, 1]


@pytest.mark.parametrize("bound", [{"max_running": 1}, {"num_pages": 8}])
def test_a_ready_request_behind_many_early_ones_pushes_a_parked_one_out(bound: dict[str, int]) -> None:
    world = World()
    prefill, decode = world.prefill(**bound), world.decode()
    for seed in range(100):
        world.submit(prefill, prompt_len=100, room=1000 + seed, seed=seed)
    world.run()
    _, right = world.pair(prefill, decode, prompt_len=100, seed=200)
    world.run()
    assert decode.tokens[right] == expected_tokens(100, 4, seed=200)


def test_early_ones_do_not_overtake_each_other() -> None:
    """The second prompt is too long for what the parked one leaves, the third would fit."""
    world = World()
    prefill = world.prefill(num_pages=12)
    for room, length in ((1, 100), (2, 100), (3, 40)):
        world.submit(prefill, prompt_len=length, room=room, seed=room)
    world.run()
    assert {row.request for plan in prefill.plans() for row in plan.rows} == {1}


def test_parked_tokens_are_bounded() -> None:
    world = World()
    prefill = world.prefill(park_max_tokens=100)
    first, second = (world.submit(prefill, prompt_len=60, room=seed, seed=seed) for seed in (1, 2))
    world.run()
    assert prefill.state_of(first) is State.PARKED
    assert prefill.state_of(second) is State.BOOTSTRAPPING


# --- result slots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["same", "opposite"])
def test_one_result_slot_and_many_requests_never_deadlock(policy: str, order: str) -> None:
    """Prefill computes in one order, decode has slots for two and collects in the other."""
    world = World()
    prefill = world.prefill(optimistic=policy, result_slots=1, num_pages=256, max_running=8)
    decode = world.decode(max_running=2, num_pages=256)
    rooms = [(world.room(), seed) for seed in range(20)]
    for room, seed in rooms:
        world.submit(prefill, room=room, seed=seed)
    collected = rooms if order == "same" else rooms[::-1]
    rights = {seed: world.submit(decode, room=room, peer=prefill.address, seed=seed) for room, seed in collected}
    world.advance(20 * SECOND)
    for seed, right in rights.items():
        assert decode.tokens.get(right) == expected_tokens(40, 4, seed=seed)
        assert decode.ended[right].path == "remote"
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("attempts", [1, 2])
def test_who_gives_way_gives_its_result_slot_back_too_however_often_it_may_run_again(attempts: int) -> None:
    world = World()
    prefill, decode = world.prefill(result_slots=1, park_attempts=attempts), world.decode()
    parked = world.submit(prefill, room=7)
    world.run()
    assert parked in prefill.state.results.owners
    _, right = world.pair(prefill, decode, seed=2)
    world.run()
    assert decode.tokens.get(right) == expected_tokens(40, 4, seed=2)
    assert world.now < SECOND, "nobody waited for a timer"


def test_one_result_slot_and_a_ready_request_far_behind_in_the_queue_never_deadlock() -> None:
    world = World()
    prefill = world.prefill(result_slots=1, num_pages=512)
    decode = world.decode(max_running=1)
    rooms = [(world.room(), seed) for seed in range(150)]
    for room, seed in rooms:
        world.submit(prefill, room=room, seed=seed)
    world.run()
    last_room, last_seed = rooms[-1]
    right = world.submit(decode, room=last_room, peer=prefill.address, seed=last_seed)
    world.advance(5 * SECOND)
    assert decode.ended[right].path == "remote"


def test_one_that_waits_for_a_result_slot_says_so_and_does_not_block_one_that_needs_none() -> None:
    world = World()
    prefill = world.prefill(result_slots=1)
    prefill.holds.add(BatchReturned)
    world.submit(prefill, room=7)
    waiting = world.submit(prefill, room=8, seed=2)
    plain = world.submit(prefill, seed=3)
    world.run()
    assert prefill.progress(waiting).waiting_for is WaitingFor.RESULT_SLOT
    assert prefill.state_of(plain) is State.COMPUTING


def test_a_hook_that_is_set_later_does_not_touch_a_request_that_is_here() -> None:
    world, prefill, _decode, left, _right = withheld("park")
    world.send(prefill, HooksChanged(1.0))
    world.run()
    prefill.drops.clear()
    world.advance(2 * SECOND)
    end = prefill.ended[left]
    assert isinstance(end, FinishRequest)
    assert end.retries == 0
    assert_nothing_is_held(prefill)
