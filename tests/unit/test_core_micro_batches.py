"""Those who decode are divided into micro-batches, which take turns: so that each pipeline stage has one to compute."""

from typing import Any

import pytest

from core_driver import World, assert_nothing_is_held, expected_tokens
from tandem.core.batch import BatchKind, BatchPlan
from tandem.core.events import BatchReturned
from tandem.core.scheduler.request_state import State
from tandem.core.values import MILLISECOND, RequestId

SETTINGS = {"num_micro_batches": 2, "min_micro_batch": 1, "window_depth": 3}


def members(plans: list[BatchPlan]) -> list[set[RequestId]]:
    """Of each decode batch, by what its plans have said."""
    sets: dict[int, set[RequestId]] = {}
    found = []
    for plan in plans:
        if plan.decodes:
            own = sets.setdefault(plan.micro_batch, set())
            own.difference_update(plan.leave)
            own.update(join.request for join in plan.join)
            found.append(set(own))
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_requests_are_shared_out_evenly_and_take_turns(count: int) -> None:
    world = World()
    node = world.unified(num_micro_batches=count, min_micro_batch=1, window_depth=count + 1)
    requests = [world.submit(node, prompt_len=16, max_new_tokens=30, seed=seed) for seed in range(6)]
    world.run()
    assert [node.tokens[one] for one in requests] == [expected_tokens(16, 30, seed=seed) for seed in range(6)]
    turns = [plan.micro_batch for plan in node.plans() if plan.decodes]
    together = members(node.plans())[-3 * count : -2 * count]
    assert [len(one) for one in together] == [6 // count] * count
    assert set().union(*together) == set(requests)
    assert turns[: 20 * count] == list(range(count)) * 20
    assert_nothing_is_held(node)


def test_decode_rows_ride_with_prompts_where_each_stage_has_a_micro_batch() -> None:
    """With few in one, each chunk of a prompt would wait in the first stage for the tokens of the one before."""
    for least, expected in ((1, True), (4, False)):
        world = World()
        node = world.unified(num_pages=256, mixed_chunk=True, chunk_tokens=32, **{**SETTINGS, "min_micro_batch": least})
        first = [world.submit(node, prompt_len=16, max_new_tokens=60, seed=seed) for seed in range(3)]
        world.run_until(lambda node=node, first=first: all(node.state_of(one) is State.RUNNING for one in first))
        world.submit(node, prompt_len=300, max_new_tokens=1, seed=9)
        world.run()
        assert (BatchKind.MIXED in {plan.kind for plan in node.plans()}) == expected


def test_a_window_of_stages_and_one_holds_a_batch_of_each_and_the_next_of_the_first() -> None:
    world = World()
    node = world.unified(**SETTINGS)
    requests = [world.submit(node, prompt_len=16, max_new_tokens=30, seed=seed) for seed in range(4)]
    world.run_until(lambda: all(node.state_of(one) is State.RUNNING for one in requests))
    node.holds.add(BatchReturned)
    world.run()
    flights = [set(flight.members) for flight in node.state.inflight]
    assert len(flights) == 3
    assert flights[0] == flights[2]
    assert not flights[0] & flights[1]
    assert flights[0] | flights[1] == set(requests)
    node.release()
    node.holds.clear()
    world.run()
    assert [node.tokens[one] for one in requests] == [expected_tokens(16, 30, seed=seed) for seed in range(4)]


def test_one_request_decodes_in_every_batch() -> None:
    world = World()
    node = world.unified(**SETTINGS)
    request = world.submit(node, max_new_tokens=9)
    world.run()
    assert node.tokens[request] == expected_tokens(40, 9, seed=1)
    assert {plan.micro_batch for plan in node.plans() if plan.decodes} == {0}


def test_there_is_another_micro_batch_where_each_has_as_many_members_as_are_worth_it() -> None:
    world = World()
    node = world.unified(num_micro_batches=2, min_micro_batch=3, window_depth=3, num_pages=128)
    requests = [world.submit(node, prompt_len=16, max_new_tokens=40, seed=seed) for seed in range(5)]
    world.run_until(lambda: all(node.state_of(one) is State.RUNNING for one in requests))
    assert [len(one.members) for one in node.state.micro_batches.each] == [5, 0]
    requests.append(world.submit(node, prompt_len=16, max_new_tokens=40, seed=5))
    world.run_until(lambda: len(node.state.micro_batches.each[1].members) > 0)
    assert [len(one.members) for one in node.state.micro_batches.each] == [3, 3]
    world.run()
    assert [node.tokens[one] for one in requests] == [expected_tokens(16, 40, seed=seed) for seed in range(6)]
    assert_nothing_is_held(node)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_members_move_when_others_have_left_and_say_the_same_tokens(depth: int) -> None:
    world = World()
    node = world.unified(num_micro_batches=2, min_micro_batch=4, window_depth=depth, num_pages=256)
    first, second = node.state.micro_batches.each
    requests = [world.submit(node, prompt_len=16, max_new_tokens=60, seed=seed) for seed in range(12)]
    world.run_until(lambda: (len(first.members), len(second.members)) == (6, 6))

    gone = list(second.members)[:5]
    for request in gone:
        world.abort(node, request)
    world.run_until(lambda: (len(first.members), len(second.members)) == (4, 3))
    moved = list(second.members)[1:]

    for request in moved + list(first.members)[:2]:
        gone.append(request)
        world.abort(node, request)
    world.run_until(lambda: (len(first.members), len(second.members)) == (3, 0))
    world.run()
    left = [(seed, request) for seed, request in enumerate(requests) if request not in gone]
    assert len(left) == 3
    for seed, request in left:
        assert node.tokens[request] == expected_tokens(16, 60, seed=seed)
    assert_nothing_is_held(node)


def plans_of_prompts_beside_two_who_decode(**settings: Any) -> list[BatchPlan]:
    """What is launched while six prompts of 160 tokens come; each of the two is in a micro-batch of its own."""
    world = World()
    node = world.unified(**SETTINGS, **settings, num_pages=256)
    node.cost.prompt_token_ns = MILLISECOND
    running = [world.submit(node, prompt_len=64, max_new_tokens=200, seed=seed) for seed in range(2)]
    world.run_until(lambda: all(node.state_of(one) is State.RUNNING for one in running))
    before = len(node.plans())
    prompts = [world.submit(node, prompt_len=160, max_new_tokens=1, seed=seed) for seed in range(2, 8)]
    world.run_until(lambda: all(one in node.ended for one in prompts))
    assert not any(one in node.ended for one in running), "they decode all the time"
    plans = node.plans()[before:]
    world.run()
    assert [node.tokens[one] for one in running] == [expected_tokens(64, 200, seed=seed) for seed in range(2)]
    return plans[: 1 + max(index for index, plan in enumerate(plans) if plan.rows)]


def test_prompts_let_every_micro_batch_have_its_turn() -> None:
    plans = plans_of_prompts_beside_two_who_decode(chunk_tokens=16, prefill_streak=2)
    said = "".join("p" if plan.kind is BatchKind.PREFILL else str(plan.micro_batch) for plan in plans)
    assert "ppp" not in said
    assert said.count("pp01pp") + said.count("pp10pp") > 5, "both, and then prompts again"


def test_what_prompts_may_take_is_counted_until_all_have_had_their_turn() -> None:
    stall = {"max_ns": 32 * MILLISECOND, "min_tokens": 1}
    plans = plans_of_prompts_beside_two_who_decode(chunk_tokens=64, prefill_stall=stall)
    for index in range(2):
        waits = [0]
        for plan in plans:
            waits[-1] += sum(row.stop - row.start for row in plan.rows)
            if plan.decodes and plan.micro_batch == index:
                waits.append(0)
        assert 16 <= max(waits) <= 32, "a millisecond for each token"


def test_a_micro_batch_that_waits_for_pages_does_not_keep_the_other_waiting() -> None:
    world = World()
    node = world.unified(**SETTINGS, num_pages=5, reserved_decode_tokens=1, conservativeness=0.0, prefix_cache=False)
    requests = [world.submit(node, prompt_len=15, max_new_tokens=30, seed=seed) for seed in range(3)]
    world.run()
    assert node.state.counters.retractions > 0
    assert [node.tokens[one] for one in requests] == [expected_tokens(15, 30, seed=seed) for seed in range(3)]
    assert_nothing_is_held(node)


def test_one_who_was_pushed_back_may_join_the_other_micro_batch() -> None:
    """Of the first one the workers hear that it has left when that one decodes again."""
    world = World()
    node = world.unified(**SETTINGS, num_pages=9, reserved_decode_tokens=1, conservativeness=0.0)
    requests = [world.submit(node, prompt_len=15, max_new_tokens=20, seed=seed) for seed in range(4)]
    world.run()
    homes: dict[RequestId, set[int]] = {}
    for plan in node.plans():
        for join in plan.join:
            homes.setdefault(join.request, set()).add(plan.micro_batch)
    assert {0, 1} in homes.values()
    assert [node.tokens[one] for one in requests] == [expected_tokens(15, 20, seed=seed) for seed in range(4)]
    assert_nothing_is_held(node)
