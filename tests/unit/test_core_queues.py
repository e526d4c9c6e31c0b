"""Which queued request is looked at first, and whom one of higher priority makes give way: slots, pages, queue."""

from typing import Any

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens, finished
from tandem.core.commands import FinishRequest
from tandem.core.events import AbortRequested, BatchReturned, PagesLanded
from tandem.core.request import Request
from tandem.core.scheduler import node as stepping
from tandem.core.scheduler.priorities import gives_way
from tandem.core.scheduler.queue_policy import LOOK_AHEAD, candidates
from tandem.core.scheduler.request_state import Progress, State, WaitingFor
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import OptimisticPolicy
from tandem.core.values import SECOND, Cause, RequestId

FIRST = {"priorities": {"preemption_threshold": 0}}  # larger values first, and one more is enough to push back
LOW_FIRST = {"priorities": {"low_values_first": True, "preemption_threshold": 0}}
CALM = {"priorities": {"preemption_threshold": 1000}}  # nobody is pushed back


def busy(world: World, **settings: Any) -> Replica:
    """One slot, which a request has whose batches do not return."""
    node = world.unified(max_running=1, **settings)
    world.submit(node, prompt_len=8, max_new_tokens=2, seed=99, priority=500)
    world.run_until(lambda: bool(node.state.queues[State.COMPUTING]))
    node.holds.add(BatchReturned)
    return node


def queued(world: World, node: Replica, *asked: dict[str, Any]) -> list[RequestId]:
    ids = [world.submit(node, **{"seed": 100 + number, **one}) for number, one in enumerate(asked)]
    world.run()
    return ids


def order(node: Replica, ids: list[RequestId]) -> list[int]:
    """By number, from 1."""
    return [ids.index(request) + 1 for request in candidates(node.state)]


def order_of_ends(node: Replica, ids: list[RequestId]) -> list[int]:
    assert all(isinstance(node.ended[request], FinishRequest) for request in ids)
    return [ids.index(request) + 1 for request in node.ended if request in ids]


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "priorities", "expected"),
    [
        ({}, [1, 0, 2], [1, 2, 3]),
        (CALM, [0, 1, 0], [2, 1, 3]),
        (CALM, [-1, 0, 0], [2, 3, 1]),
        (LOW_FIRST, [0, 0, -1], [3, 1, 2]),
    ],
)
def test_priority_comes_before_arrival_where_it_counts(
    settings: dict[str, Any], priorities: list[int], expected: list[int]
) -> None:
    world = World()
    node = busy(world, **settings)
    ids = queued(world, node, *({"priority": priority} for priority in priorities))
    assert order(node, ids) == expected


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        ({}, [(0, 10), (0, 100), (0, 1000)], [3, 2, 1]),
        ({}, [(0, 10), (0, 10), (0, 11)], [3, 1, 2]),
        (CALM, [(0, 10), (1, 1), (0, 100)], [2, 3, 1]),
        (LOW_FIRST, [(1, 10), (0, 1), (1, 100)], [2, 3, 1]),
    ],
)
def test_lof_takes_those_first_who_may_say_most(
    settings: dict[str, Any], asked: list[tuple[int, int]], expected: list[int]
) -> None:
    world = World()
    node = busy(world, schedule_policy="lof", **settings)
    ids = queued(world, node, *({"priority": priority, "max_new_tokens": most} for priority, most in asked))
    assert order(node, ids) == expected


def with_a_cached_prompt(world: World, **settings: Any) -> Replica:
    """Of seed 7, 64 tokens; and then a busy slot."""
    node = world.unified(**{"max_running": 1, "schedule_policy": "lpm", **settings})
    world.submit(node, prompt_len=64, seed=7)
    world.run()
    world.submit(node, prompt_len=8, max_new_tokens=2, seed=99, priority=500)
    world.run_until(lambda: bool(node.state.queues[State.COMPUTING]))
    node.holds.add(BatchReturned)
    return node


ASKED = ({"prompt_len": 64}, {"prompt_len": 20, "seed": 7}, {"prompt_len": 64}, {"prompt_len": 60, "seed": 7})


def test_lpm_takes_those_first_of_whom_most_is_cached() -> None:
    world = World()
    node = with_a_cached_prompt(world)
    ids = queued(world, node, *ASKED)
    assert order(node, ids) == [4, 2, 1, 3]
    node.release()
    world.run()
    assert order_of_ends(node, ids) == [4, 2, 1, 3]


def test_lpm_goes_by_priority_first() -> None:
    world = World()
    node = with_a_cached_prompt(world, **CALM)
    ids = queued(world, node, *({**one, "priority": 2 - number // 2} for number, one in enumerate(ASKED)))
    assert order(node, ids) == [2, 1, 4, 3]


def test_without_a_prefix_cache_lpm_is_fcfs() -> None:
    world = World()
    node = with_a_cached_prompt(world, prefix_cache=False)
    assert order(node, queued(world, node, *ASKED)) == [1, 2, 3, 4]


def test_lpm_looks_no_further_than_others_do() -> None:
    world = World()
    node = with_a_cached_prompt(world)
    ids = queued(world, node, *[{}] * LOOK_AHEAD, {"prompt_len": 64, "seed": 7})
    assert order(node, ids) == list(range(1, LOOK_AHEAD + 1))


@pytest.mark.parametrize("policy", ["lpm", "lof"])
def test_who_has_spent_half_of_its_time_goes_before_all_who_come(policy: str) -> None:
    world = World()
    node = with_a_cached_prompt(world, schedule_policy=policy)
    better = {"prompt_len": 64, "seed": 7, "max_new_tokens": 9}
    ids = queued(world, node, {"timeout_ns": 100 * SECOND}, better)
    assert order(node, ids) == [2, 1]
    world.advance(50 * SECOND)
    world.step(node, [])
    assert order(node, ids) == [1, 2]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof"])
def test_who_was_pushed_back_goes_before_all_who_have_said_nothing(policy: str) -> None:
    world = World()
    node = world.unified(num_pages=9, conservativeness=0.0, schedule_policy=policy)
    ids = [world.submit(node, prompt_len=30, max_new_tokens=60, seed=seed) for seed in range(2)]
    world.run_until(lambda: node.state.counters.retractions == 1)
    world.run_until(lambda: bool(node.state.queues[State.QUEUED]))
    late = world.submit(node, prompt_len=30, max_new_tokens=70, seed=4)
    world.run_until(lambda: len(node.state.queues[State.QUEUED]) == 2)
    assert candidates(node.state)[1] == late
    world.run()
    assert {node.tokens[request][-1] for request in ids} == {expected_tokens(30, 60, seed=seed)[-1] for seed in (0, 1)}


# --- who runs gives way ----------------------------------------------------------------------------------------------

LOW = {"prompt_len": 40, "max_new_tokens": 30}


def running(world: World, node: Replica, *priorities: int, **asked: Any) -> list[RequestId]:
    """They decode, each with a token at least."""
    ids = [world.submit(node, **{**LOW, "seed": 10 + n, "priority": p, **asked}) for n, p in enumerate(priorities)]
    world.run_until(lambda: all(node.tokens.get(request) for request in ids))
    return ids


def pushed(node: Replica, ids: list[RequestId]) -> list[bool]:
    return [node.progress(request).retractions > 0 for request in ids]


@pytest.mark.parametrize("settings", [FIRST, LOW_FIRST])
def test_who_is_more_urgent_takes_the_slot_of_who_runs_and_both_say_the_same_as_alone(settings: dict[str, Any]) -> None:
    world = World()
    node = world.unified(max_running=1, **settings)
    sign = 1 if settings is FIRST else -1
    (low,) = running(world, node, 0)
    high = world.submit(node, prompt_len=20, max_new_tokens=6, seed=3, priority=sign)
    world.run()
    assert list(node.ended) == [high, low]
    assert node.tokens[high] == expected_tokens(20, 6, seed=3)
    assert node.tokens[low] == expected_tokens(40, 30, seed=10)
    assert node.state.counters.retractions == 1
    assert_nothing_is_held(node)


@pytest.mark.parametrize(("difference", "is_pushed"), [(10, False), (11, True)])
def test_it_has_to_be_more_urgent_by_more_than_the_threshold(difference: int, is_pushed: bool) -> None:
    world = World()
    node = world.unified(max_running=1, priorities={"preemption_threshold": 10})
    (low,) = running(world, node, -3)
    high = world.submit(node, seed=3, priority=difference - 3)
    last = world.submit(node, seed=4, priority=-3)
    world.run()
    assert (node.state.counters.retractions > 0) is is_pushed
    assert list(node.ended) == ([high, low, last] if is_pushed else [low, high, last])


def test_without_the_settings_nobody_gives_way() -> None:
    world = World()
    node = world.unified(max_running=1)
    (low,) = running(world, node, 0)
    high = world.submit(node, priority=100, seed=3)
    world.run()
    assert (list(node.ended), node.state.counters.retractions) == ([low, high], 0)


def test_the_least_urgent_gives_way_and_of_these_the_newest_and_no_more_than_it_takes() -> None:
    world = World()
    node = world.unified(max_running=4, **FIRST)
    ids = running(world, node, 2, 1, 1, 3)
    high = world.submit(node, prompt_len=20, seed=3, priority=5)
    world.run_until(lambda: node.state_of(high) is State.RUNNING)
    assert pushed(node, ids) == [False, False, True, False]


def test_it_takes_as_many_as_its_pages_need() -> None:
    """Of 16 pages the four have 3 each. Two of them have to go for a prompt of 8."""
    world = World()
    node = world.unified(num_pages=16, conservativeness=0.0, prefix_cache=False, **FIRST)
    ids = running(world, node, 0, 0, 0, 0)
    high = world.submit(node, prompt_len=127, max_new_tokens=2, seed=3, priority=1)
    world.run_until(lambda: node.state_of(high) is State.COMPUTING)
    assert pushed(node, ids) == [False, False, True, True]
    world.run()
    assert node.tokens[high] == expected_tokens(127, 2, seed=3)


def test_all_that_it_needs_or_nobody() -> None:
    world = World()
    node = world.unified(num_pages=16, conservativeness=0.0, prefix_cache=False, **FIRST)
    ids = running(world, node, 0, 0, 9, 9)
    high = world.submit(node, prompt_len=200, max_new_tokens=2, seed=3, priority=1)  # 13 pages, and 10 could be free
    world.run_until(lambda: node.state_of(high) is State.QUEUED and node.progress(high).blocked_on is not None)
    world.run_until(lambda: len(node.tokens[ids[0]]) > 5)
    assert node.progress(high).blocked_on is WaitingFor.PAGES
    assert pushed(node, ids) == [False] * 4
    world.run()
    assert node.tokens[high] == expected_tokens(200, 2, seed=3)


def test_shared_pages_are_not_counted_as_if_they_came_back() -> None:
    """What two who run share stays pinned by the one of them that is too urgent to be pushed back."""
    world = World()
    node = world.unified(num_pages=16, conservativeness=0.0, max_running=8, **FIRST)
    first = running(world, node, 9, prompt_len=96, seed=7)
    second = running(world, node, 0, prompt_len=98, seed=7)
    assert len(node.progress(second[0]).pages) == 7
    high = world.submit(node, prompt_len=150, max_new_tokens=1, seed=3, priority=1)  # 10 pages; 8 free, 1 comes back
    world.run_until(lambda: node.state_of(high) is State.QUEUED and node.progress(high).blocked_on is not None)
    world.run_until(lambda: len(node.tokens[second[0]]) > 5)
    assert pushed(node, first + second) == [False, False]
    world.run()
    assert node.tokens[high] == expected_tokens(150, 1, seed=3)


def test_nobody_gives_way_while_somebody_else_is_going() -> None:
    world = World()
    node = world.unified(max_running=2, **FIRST)
    ids = running(world, node, 0, 0)
    node.holds.add(BatchReturned)
    high = world.submit(node, prompt_len=20, seed=3, priority=1)
    world.run()
    assert [node.state_of(request) for request in ids] == [State.RUNNING, State.RETRACTING]
    other = world.submit(node, seed=4)
    world.run()
    assert [node.state_of(request) for request in ids] == [State.RUNNING, State.RETRACTING], "one slot is enough"
    node.release()
    world.run()
    assert next(iter(node.ended)) == high
    assert len(node.ended) == 4
    assert node.tokens[other] == expected_tokens(40, 4, seed=4)


def test_nobody_gives_way_for_a_slot_that_is_about_to_be_free() -> None:
    world = World()
    node = world.unified(max_running=2, **FIRST)
    (short,) = running(world, node, 0, max_new_tokens=12)
    (long,) = running(world, node, 0)
    world.run_until(lambda: short not in node.state.micro_batches.members)
    assert node.state_of(short) is State.RUNNING
    node.holds.add(BatchReturned)
    world.submit(node, prompt_len=20, seed=3, priority=1)
    world.run()
    assert State.RETRACTING not in (node.state_of(long), node.state_of(short))


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_gives_way_whose_last_token_is_being_sampled(depth: int) -> None:
    """It is a member still: nothing has been planned since."""
    world = World()
    node = world.unified(max_running=1, window_depth=depth, **FIRST)
    (low,) = running(world, node, 0)
    progress = node.progress(low)
    world.run_until(lambda: progress.generated + progress.pending >= LOW["max_new_tokens"])
    assert low in node.state.micro_batches.members
    node.holds.add(BatchReturned)
    high = world.submit(node, prompt_len=20, seed=3, priority=1)
    world.run()
    assert node.state_of(low) is State.RUNNING
    node.release()
    world.run()
    assert (list(node.ended), node.state.counters.retractions) == ([low, high], 0)
    assert_nothing_is_held(node)


def test_who_waits_for_its_first_token_gives_way_to_nobody() -> None:
    world = World()
    node = world.unified(max_running=1, **FIRST)
    node.holds.add(BatchReturned)
    low = world.submit(node, **LOW, priority=0)
    world.run()
    assert low in node.state.micro_batches.members
    high = world.submit(node, prompt_len=20, seed=3, priority=1)
    world.run()
    assert node.state_of(low) is State.COMPUTING
    node.release()
    world.run()
    assert node.tokens[low] == expected_tokens(LOW["prompt_len"], LOW["max_new_tokens"], seed=1)
    assert node.tokens[high] == expected_tokens(20, 4, seed=3)
    assert_nothing_is_held(node)


def test_what_is_kept_free_for_one_that_leaves_is_free_with_it() -> None:
    """Of 7 pages it has 2 and another one 3. The newcomer wants 2, and 2 more for what it and the other one may say."""
    world = World()
    node = world.unified(num_pages=7, conservativeness=1.0, prefix_cache=False, window_depth=1, **FIRST)
    (low,) = running(world, node, 0, prompt_len=33, max_new_tokens=14)
    (last,) = running(world, node, 0, prompt_len=20, max_new_tokens=2)
    node.holds.add(BatchReturned)
    assert node.progress(last).pending == 1
    num_tokens = 32 - (14 - node.progress(low).generated)
    high = world.submit(node, prompt_len=20, max_new_tokens=num_tokens, seed=3, priority=1)
    world.run()
    assert node.state_of(low) is State.RUNNING
    node.release()
    world.run()
    assert list(node.ended) == [last, low, high]
    assert node.state.counters.retractions == 0


def test_pages_of_one_that_has_ended_are_counted_as_they_come_back_with_its_batch() -> None:
    """Of 16 pages the four have 3 each. One has been aborted, and one more has to go for a prompt of 8."""
    world = World()
    node = world.unified(num_pages=16, conservativeness=0.0, prefix_cache=False, **FIRST)
    ids = running(world, node, 0, 0, 0, 0)
    node.holds.add(BatchReturned)
    world.send(node, AbortRequested(ids[3]))
    world.run()
    assert node.state_of(ids[3]) is State.DRAINING
    world.submit(node, prompt_len=127, max_new_tokens=2, seed=3, priority=1)
    world.run()
    states = [node.state_of(request) for request in ids]
    assert states == [State.RUNNING, State.RUNNING, State.RETRACTING, State.DRAINING]


WINDOW = {"page_size": 4, "chunk_tokens": 8, "max_running": 2}
PARTS = 8  # that a long prompt may need at one time, and 4 of these when it decodes


@pytest.mark.parametrize(("num_free", "is_pushed"), [(PARTS - 1, False), (PARTS, True)])
def test_nobody_gives_way_for_a_slot_without_the_parts_of_windows_that_the_newcomer_needs(
    num_free: int, is_pushed: bool
) -> None:
    world = World()
    node = world.unified(windows={"tokens": 10, "max_parts": num_free + 4}, **WINDOW, **FIRST)
    (stays,) = running(world, node, 9)
    (low,) = running(world, node, 0, prompt_len=7, max_new_tokens=5)
    node.holds.add(BatchReturned)
    high = world.submit(node, seed=3, priority=1)
    world.run()
    assert node.state_of(low) is (State.RETRACTING if is_pushed else State.RUNNING)
    node.release()
    world.run()
    assert node.tokens[high] == expected_tokens(40, 4, seed=3)
    assert [len(node.tokens[one]) for one in (stays, low)] == [30, 5]
    assert_nothing_is_held(node)


def test_who_runs_gives_way_for_the_parts_of_windows_that_it_has() -> None:
    world = World()
    node = world.unified(windows={"tokens": 10, "max_parts": PARTS + 3}, **WINDOW, **FIRST)
    (low,) = running(world, node, 0)
    high = world.submit(node, seed=3, priority=1)
    world.run()
    assert list(node.ended) == [high, low]
    assert node.tokens[low] == expected_tokens(40, 30, seed=10)


def test_who_pushes_somebody_back_reads_its_cached_prefix_all_the_same() -> None:
    world = World()
    node = world.unified(num_pages=16, max_running=1, **FIRST)
    world.submit(node, prompt_len=100, max_new_tokens=1, seed=3)
    world.run()
    (low,) = running(world, node, 0)
    high = world.submit(node, prompt_len=100, max_new_tokens=4, seed=3, priority=5)
    world.run()
    assert node.state.counters.retractions == 1
    assert finished(node, high).cached_tokens == 96
    assert node.tokens[high] == expected_tokens(100, 4, seed=3)
    assert low in node.ended
    assert_nothing_is_held(node)


def test_when_pages_run_out_the_least_urgent_gives_way() -> None:
    world = World()
    node = world.unified(num_pages=9, conservativeness=0.0, **CALM)
    asked = {"prompt_len": 30, "max_new_tokens": 60}
    ids = running(world, node, 0, seed=12, **asked)  # it has said most
    ids += running(world, node, 5, 3, **asked)
    world.run_until(lambda: node.state.counters.retractions == 1)
    assert pushed(node, ids) == [True, False, False]
    world.run()
    assert [node.tokens[one] for one in ids] == [expected_tokens(30, 60, seed=seed) for seed in (12, 10, 11)]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_was_pushed_back_and_has_outgrown_the_pool_ends_and_keeps_nobody_waiting(depth: int) -> None:
    """Its last token needs a fifth page of four, so it can never be admitted again."""
    world = World()
    node = world.unified(num_pages=4, window_depth=depth, **FIRST)
    (low,) = running(world, node, 0, max_new_tokens=500)
    world.run_until(lambda: len(node.tokens[low]) == 64 - 40)
    high = world.submit(node, prompt_len=20, seed=3, priority=1)
    behind = world.submit(node, prompt_len=20, seed=4)
    world.run()
    assert node.state.counters.retractions == 1
    assert node.cause(low) is Cause.OUT_OF_PAGES
    assert node.tokens[low] == expected_tokens(40, 64 - 40 + 1, seed=10)
    assert [node.tokens.get(one) for one in (high, behind)] == [expected_tokens(20, 4, seed=seed) for seed in (3, 4)]
    assert_nothing_is_held(node)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_has_begun_keeps_no_more_urgent_one_waiting() -> None:
    world = World()
    node = world.unified(num_pages=200, chunk_tokens=64, window_depth=1, **CALM)
    low = world.submit(node, prompt_len=1000, max_new_tokens=1)
    world.run_until(lambda: node.state_of(low) is State.COMPUTING)
    high = world.submit(node, prompt_len=100, max_new_tokens=1, seed=3, priority=1)
    same = world.submit(node, prompt_len=100, max_new_tokens=1, seed=4)
    world.run_until(lambda: high in node.ended)
    assert node.progress(low).computed < 500
    world.run()
    assert list(node.ended) == [high, low, same]
    for request, length, seed in ((low, 1000, 1), (high, 100, 3), (same, 100, 4)):
        assert node.tokens[request] == expected_tokens(length, 1, seed=seed)


def test_who_is_more_urgent_does_not_wait_for_a_prefix_that_another_computes() -> None:
    world = World()
    node = world.unified(num_pages=200, chunk_tokens=64, window_depth=1, **CALM)
    low = world.submit(node, prompt_len=640, max_new_tokens=1)
    world.run_until(lambda: node.state_of(low) is State.COMPUTING)
    node.holds.add(BatchReturned)
    high = world.submit(node, prompt_len=640, max_new_tokens=1, priority=1)
    same = world.submit(node, prompt_len=640, max_new_tokens=1)
    world.run()
    assert node.state_of(high) is State.COMPUTING
    assert node.progress(same).blocked_on is not None
    node.release()
    world.run()
    assert [node.tokens[one] for one in (low, high, same)] == [expected_tokens(640, 1, seed=1)] * 3


# --- a full queue ----------------------------------------------------------------------------------------------------


def test_a_full_queue_gives_the_place_of_the_last_to_who_is_more_urgent() -> None:
    world = World()
    node = busy(world, max_queued=3, **CALM)
    ids = queued(world, node, {"priority": 1}, {"priority": 0}, {"priority": 0})
    (high,) = queued(world, node, {"priority": 1, "seed": 20})
    assert node.cause(ids[2]) is Cause.QUEUE_FULL
    (equal,) = queued(world, node, {"priority": 0, "seed": 21})
    assert node.cause(equal) is Cause.QUEUE_FULL, "of equals the newest does not come in"
    node.release()
    world.run()
    assert order_of_ends(node, [ids[0], ids[1], high]) == [1, 3, 2]


def test_who_gives_its_place_is_asked_once_and_where_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(node: NodeState, newcomer: Request) -> Progress | None:
        asked.append(newcomer.priority)
        return gives_way(node, newcomer)

    monkeypatch.setattr(stepping, "gives_way", ask)
    world = World()
    node = busy(world, max_queued=1, **CALM)
    queued(world, node, {"priority": 3}, {"priority": 2}, {"priority": 4})
    assert asked == [2, 4]


def test_who_has_said_something_keeps_its_place_in_a_full_queue() -> None:
    world = World()
    node = world.unified(max_running=1, max_queued=1, **FIRST)
    (low,) = running(world, node, 0)
    urgent = world.submit(node, prompt_len=20, seed=3, priority=1)
    world.run_until(lambda: node.state_of(low) is State.QUEUED)
    refused = world.submit(node, seed=4, priority=1)
    world.run()
    assert node.cause(refused) is Cause.QUEUE_FULL
    assert node.tokens[low] == expected_tokens(40, 30, seed=10)
    assert node.tokens[urgent] == expected_tokens(20, 4, seed=3)


def test_a_half_that_loses_its_place_tells_the_other_one() -> None:
    world = World()
    prefill = world.prefill(max_running=1, max_queued=1, optimistic=OptimisticPolicy.OFF, **CALM)
    decode = world.decode(load_failure="fail", **CALM)
    prefill.holds.add(BatchReturned)
    first = world.pair(prefill, decode, priority=2)
    world.run()
    low = world.pair(prefill, decode, seed=2)
    world.run()
    high = world.pair(prefill, decode, seed=3, priority=1)
    world.run()
    assert prefill.cause(low[0]) is Cause.QUEUE_FULL
    assert low[1] in decode.ended
    prefill.release()
    world.run()
    assert [decode.tokens[one[1]] for one in (first, high)] == [expected_tokens(40, 4, seed=seed) for seed in (1, 3)]
    assert_nothing_is_held([prefill, decode])


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_on_a_pair_the_more_urgent_one_overtakes_and_pushes_back() -> None:
    world = World()
    prefill = world.prefill(max_running=1, **FIRST)
    decode = world.decode(max_running=1, **FIRST)
    low, later = (world.pair(prefill, decode, **{**LOW, "seed": seed}) for seed in (10, 11))
    world.run_until(lambda: decode.state_of(low[1]) is State.RUNNING)
    high = world.pair(prefill, decode, prompt_len=20, seed=3, priority=1)
    world.run()
    assert list(decode.ended) == [high[1], low[1], later[1]]
    assert decode.tokens[high[1]] == expected_tokens(20, 4, seed=3)
    assert [decode.tokens[one[1]] for one in (low, later)] == [expected_tokens(40, 30, seed=seed) for seed in (10, 11)]
    assert_nothing_is_held([prefill, decode])


def test_the_least_urgent_of_those_that_are_parked_gives_back_what_it_holds() -> None:
    world = World()
    prefill = world.prefill(max_running=2, **CALM)
    low = world.submit(prefill, room=8, seed=2)
    world.run()
    high = world.submit(prefill, room=7, priority=1)
    world.run()
    assert [prefill.state_of(one) for one in (high, low)] == [State.PARKED] * 2
    decode = world.decode(**CALM)
    other = world.pair(prefill, decode, seed=3, priority=-5)
    world.run()
    assert (prefill.state_of(high), prefill.state_of(low)) == (State.PARKED, State.BOOTSTRAPPING)
    assert decode.tokens[other[1]] == expected_tokens(40, 4, seed=3)


def test_however_urgent_it_is_who_is_parked_gives_way_to_one_that_decode_waits_for() -> None:
    world = World()
    prefill, decode = world.prefill(max_running=1, **FIRST), world.decode(**FIRST)
    high = world.submit(prefill, room=7, priority=100)
    world.run()
    assert prefill.state_of(high) is State.PARKED
    low = world.pair(prefill, decode, seed=3)
    world.run()
    assert decode.tokens[low[1]] == expected_tokens(40, 4, seed=3)
    assert prefill.state_of(high) is State.BOOTSTRAPPING


def test_halves_that_stand_in_opposite_orders_all_end() -> None:
    world = World()
    prefill = world.prefill(max_running=1, num_pages=8, result_slots=1, **FIRST)
    decode = world.decode(max_running=1, num_pages=8, **LOW_FIRST)
    pairs = [world.pair(prefill, decode, seed=seed, priority=seed) for seed in range(8)]
    world.run()
    for seed, (_, right) in enumerate(pairs):
        assert decode.tokens[right] == expected_tokens(40, 4, seed=seed)
    assert world.now < SECOND, "nobody waited for a timer"
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize(
    "settings",
    [
        {"optimistic": OptimisticPolicy.RETRY, **CALM},
        {"optimistic": OptimisticPolicy.PARK, "park_max_tokens": 200, **CALM},
        {"optimistic": OptimisticPolicy.RETRY, "schedule_policy": "lof"},
    ],
)
def test_urgent_prompts_that_no_decode_waits_for_keep_nobody_waiting_that_has_its_pages(
    settings: dict[str, Any],
) -> None:
    """One that goes before it comes with every step, none of them can be READY before it has ended."""
    world = World()
    prefill = world.prefill(num_pages=400, **settings)
    decode = world.decode(num_pages=16)
    low = {"room": world.room(), "prompt_len": 200}
    right = world.submit(decode, peer=prefill.address, **low)
    world.run()
    for number in range(200):
        world.pair(prefill, decode, prompt_len=64, max_new_tokens=9, seed=10 + number, priority=1)
        if number == 3:
            world.submit(prefill, **low)
        world.turn_all()
    assert decode.tokens.get(right) == expected_tokens(200, 4, seed=1)
    assert len(decode.ended) > 20


@pytest.mark.parametrize("settings", [CALM, {"schedule_policy": "lof"}])
def test_a_long_prompt_that_no_decode_waits_for_goes_on_behind_one_that_is_ready(settings: dict[str, Any]) -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=200, window_depth=1, **settings), world.decode()
    long = world.submit(prefill, room=7, prompt_len=2000, max_new_tokens=9, priority=1)
    world.run_until(lambda: prefill.state_of(long) is State.COMPUTING)
    ready = world.pair(prefill, decode, prompt_len=100, seed=3)
    world.run_until(lambda: ready[1] in decode.ended)
    assert prefill.progress(long).computed < 1000
    assert decode.tokens[ready[1]] == expected_tokens(100, 4, seed=3)


def test_who_holds_a_result_slot_is_found_behind_many_that_lack_one() -> None:
    """They are READY and more urgent, and it is the only one that can give it back."""
    world = World()
    prefill = world.prefill(
        max_running=1, result_slots=1, optimistic=OptimisticPolicy.RETRY, optimistic_retries=9, chunk_tokens=16, **CALM
    )
    decode = world.decode(num_pages=400, max_running=100, **CALM)
    holder = world.submit(prefill, room=7, prompt_len=64)
    world.run_until(lambda: prefill.state_of(holder) is State.COMPUTING)
    prefill.holds.add(BatchReturned)
    pairs = [world.pair(prefill, decode, seed=seed, priority=1) for seed in range(2 * LOOK_AHEAD + 1)]
    world.run()
    prefill.release()
    world.advance(SECOND)
    assert all(len(decode.tokens.get(right, ())) == 4 for _, right in pairs)


def test_pages_that_arrive_for_one_who_is_urgent_are_its_own_after_others_gave_way() -> None:
    world = World()
    prefill = world.prefill(**FIRST)
    decode = world.decode(num_pages=12, conservativeness=0.0, prefix_cache=False, **FIRST)
    low = running(world, decode, 0, 0, prompt_len=70)
    decode.holds.add(PagesLanded)
    high = world.pair(prefill, decode, prompt_len=90, seed=3, priority=1)
    world.run_until(lambda: decode.state_of(high[1]) is State.ARRIVING)
    assert sum(decode.progress(one).retractions for one in low) == 1
    decode.release()
    world.run()
    assert decode.tokens[high[1]] == expected_tokens(90, 4, seed=3)
    assert [decode.tokens[one] for one in low] == [expected_tokens(70, 30, seed=seed) for seed in (10, 11)]
    assert_nothing_is_held([prefill, decode])
