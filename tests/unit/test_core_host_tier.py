"""Host memory below the device: what is copied when, what comes back, and what becomes of a copy that fails."""

from typing import Any

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens, finished
from core_scenes import ASKED, LOADING, SCENES, TIER, leave_for_host
from tandem.core.commands import FinishRequest, LoadPages, StorePages
from tandem.core.events import FlushRequested, PagesCopied
from tandem.core.kv.load_policy import BreakEven
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import WritePolicy
from tandem.core.values import SECOND, ZERO_NS, Nanos, RequestId, ShardId
from tandem.metrics.node_numbers import named

FULL = 12  # full pages of the prompt of ASKED: 200 tokens
LEFT = 9  # of them have left the device for those of another prompt
ROLES = ("unified", "prefill", "decode")


def settings(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **more: Any) -> dict[str, Any]:
    return {**TIER, "host_tier": {"num_pages": 64, "write_policy": policy, **more}}


def one_node(**more: Any) -> tuple[World, Replica]:
    world = World()
    return world, world.unified(**{**TIER, **more})


def run(world: World, node: Replica, *, seed: int, prompt_len: int = 200, max_new_tokens: int = 1) -> RequestId:
    request = world.submit(node, seed=seed, prompt_len=prompt_len, max_new_tokens=max_new_tokens)
    world.run()
    return request


def test_a_page_is_copied_when_it_is_computed_and_comes_back_after_it_has_left() -> None:
    world, node = one_node()
    run(world, node, seed=1)
    assert sum(len(store.pages) for store in node.said(StorePages)) == FULL
    run(world, node, seed=9, prompt_len=330)
    again = run(world, node, seed=1, max_new_tokens=4)
    assert [len(load.pages) for load in node.said(LoadPages)] == [LEFT]
    assert finished(node, again).host_tokens == LEFT * 16
    assert finished(node, again).cached_tokens == FULL * 16
    assert node.tokens[again] == expected_tokens(200, 4, seed=1)
    assert_nothing_is_held(node)


def test_one_prompt_loads_into_no_more_than_half_of_the_device() -> None:
    world, node = one_node()
    run(world, node, seed=1, prompt_len=330)
    run(world, node, seed=9, prompt_len=330)
    again = run(world, node, seed=1, prompt_len=330, max_new_tokens=4)
    assert [len(load.pages) for load in node.said(LoadPages)] == [TIER["num_pages"] // 2]
    assert node.tokens[again] == expected_tokens(330, 4, seed=1)
    assert_nothing_is_held(node)


def test_the_numbers_say_how_full_host_memory_is() -> None:
    world, node = one_node()
    assert found(node, "hicache_host_used_tokens", "hicache_host_total_tokens") == (0, 64 * 16)
    run(world, node, seed=1)
    assert found(node, "hicache_host_used_tokens", "hicache_host_total_tokens") == (FULL * 16, 64 * 16)


def found(node: Replica, *names: str) -> tuple[float, ...]:
    exported = named(numbers(node.node))
    return tuple(exported[name] for name in names)


def test_selective_waits_for_a_second_use() -> None:
    world, node = one_node(**settings(WritePolicy.WRITE_THROUGH_SELECTIVE))
    run(world, node, seed=1)
    assert node.said(StorePages) == []
    run(world, node, seed=1)
    assert len(node.said(StorePages)) == 1


def test_write_back_copies_what_is_about_to_leave_and_nothing_is_lost() -> None:
    world, node = one_node(**settings(WritePolicy.WRITE_BACK))
    run(world, node, seed=1)
    assert node.said(StorePages) == []
    run(world, node, seed=9, prompt_len=330)
    again = run(world, node, seed=1)
    assert finished(node, again).host_tokens == LEFT * 16
    assert finished(node, again).cached_tokens == FULL * 16


def test_write_back_copies_nothing_while_pages_are_free_or_have_copies() -> None:
    world, node = one_node(**settings(WritePolicy.WRITE_BACK))
    run(world, node, seed=1)
    run(world, node, seed=2, prompt_len=170)
    assert node.said(StorePages) == []
    run(world, node, seed=9, prompt_len=330)
    run(world, node, seed=1)
    num_stored = len(node.said(StorePages))
    run(world, node, seed=3, prompt_len=60)
    assert len(node.said(StorePages)) == num_stored


def test_write_back_copies_ahead_of_an_answer_that_grows() -> None:
    """Its next page cannot wait for a copy: what leaves after the first ones has been copied by then."""
    world, node = one_node(**settings(WritePolicy.WRITE_BACK))
    run(world, node, seed=1)
    grown = run(world, node, seed=2, prompt_len=20, max_new_tokens=300)
    assert node.tokens[grown] == expected_tokens(20, 300, seed=2)
    again = run(world, node, seed=1)
    assert finished(node, again).host_tokens > 0


def test_who_waits_for_room_that_a_copy_makes_says_so() -> None:
    world, node = one_node(**settings(WritePolicy.WRITE_BACK))
    run(world, node, seed=1)
    node.holds.add(PagesCopied)
    late = run(world, node, seed=9, prompt_len=330)
    assert node.progress(late).waiting_for is WaitingFor.TIER
    node.release()
    world.run()
    assert late in node.ended


def test_several_requests_wait_for_one_load() -> None:
    world, node = one_node(max_running=8, num_pages=40)
    run(world, node, seed=1)
    run(world, node, seed=9, prompt_len=600)
    node.holds.add(PagesCopied)
    both = [world.submit(node, seed=1, prompt_len=200, max_new_tokens=2) for _ in range(2)]
    world.run()
    assert [node.state_of(request) for request in both] == [State.LOADING, State.LOADING]
    assert len(node.said(LoadPages)) == 1
    world.abort(node, both[0])
    world.run()
    assert node.state_of(both[0]) is State.DONE or both[0] not in node.state.requests
    node.release()
    world.run()
    assert node.tokens[both[1]] == expected_tokens(200, 2, seed=1)
    assert_nothing_is_held(node)


@pytest.mark.parametrize("role", ROLES)
def test_a_load_that_fails_is_computed_instead(role: str) -> None:
    scene = SCENES[role, State.LOADING, ""]()
    scene.here.breaks_copies = True
    scene.here.release()
    scene.world.run()
    end = scene.here.ended[scene.request]
    assert isinstance(end, FinishRequest)
    assert end.host_tokens == 0
    assert scene.here.state.host.counters.lost > 0
    teller = scene.other if role == "prefill" else scene.here
    request = scene.twin if role == "prefill" else scene.request
    assert teller is not None
    assert request is not None
    assert teller.tokens[request] == expected_tokens(200, 20, seed=1)


@pytest.mark.parametrize("role", ROLES)
def test_a_load_that_takes_too_long_is_not_waited_for(role: str) -> None:
    scene = LOADING[role](seconds=5)
    scene.world.advance(6 * SECOND)
    assert isinstance(scene.here.ended[scene.request], FinishRequest)
    assert scene.here.state.host.is_stuck(Nanos(scene.world.now))
    scene.here.release()
    scene.world.run()
    assert_nothing_is_held(scene.world.replicas.values())


def test_a_worker_that_has_not_answered_is_waited_for() -> None:
    world = World()
    node = world.unified(**TIER, cut={"tp_size": 2})
    leave_for_host(world, node)
    request = world.submit(node, **ASKED)
    world.run()
    (load,) = node.said(LoadPages)
    world.step(node, [PagesCopied(load.copy, ShardId(0), LEFT)] * 2)
    assert node.state_of(request) is State.LOADING
    world.step(node, [PagesCopied(load.copy, ShardId(1), LEFT - 1)])
    assert node.state_of(request) is State.COMPUTING
    assert node.progress(request).inserted == FULL - 1, "as far as the worker that has come least far"


def test_decode_pulls_only_what_its_own_host_memory_lacks() -> None:
    scene = SCENES["decode", State.LOADING, ""]()
    scene.here.release()
    scene.world.run()
    end = finished(scene.here, scene.request)
    assert end.host_tokens == LEFT * 16
    assert end.kv_pages == 1


def test_a_flush_drops_the_copies_too_also_those_under_way() -> None:
    world, node = one_node()
    run(world, node, seed=1)
    node.holds.add(PagesCopied)
    run(world, node, seed=2)
    world.send(node, FlushRequested())
    world.run()
    node.release()
    world.run()
    assert node.state.tree.nodes == {}
    assert node.state.host.pool.num_free == 64


def test_a_load_is_worth_what_it_has_cost() -> None:
    known, token_ns = BreakEven(), Nanos(1000)
    assert known.is_worth(10, 160, token_ns)
    known.loaded(10, Nanos(1_000_000))
    assert known.is_worth(10, 80, ZERO_NS), "what a token costs is not known yet"
    assert not known.is_worth(10, 80, token_ns)
    assert known.is_worth(10, 2000, token_ns)
    for _ in range(100):
        known.is_worth(10, 80, token_ns)
    assert known.is_worth(10, 80, token_ns), "it is tried again some time"


def test_a_load_that_took_seconds_is_tried_again_after_two_dozen_prompts() -> None:
    known, token_ns = BreakEven(), Nanos(1000)
    known.loaded(1, Nanos(8 * SECOND))
    refused = [known.is_worth(10, 160, token_ns) for _ in range(24)].index(True)
    assert 16 < refused < 24


def test_a_prompt_that_waits_for_room_doubts_the_cost_of_loads_once() -> None:
    """It is looked at in every step; two dozen of these are no two dozen prompts."""
    world, node = one_node(max_running=8)
    run(world, node, seed=1)
    run(world, node, seed=9, prompt_len=330)
    costs = node.state.host.break_even
    world.submit(node, seed=30, prompt_len=300, max_new_tokens=60)
    world.turn_all()
    costs.page_load_ns = Nanos(8 * SECOND)
    node.state.chunk_budget.num_measured, node.state.chunk_budget.took_ns = 1000, Nanos(1_000_000)
    late = world.submit(node, seed=1, prompt_len=200, max_new_tokens=1)
    world.run_until(lambda: late in node.state.requests and node.progress(late).blocked_on is WaitingFor.PAGES)
    believed = costs.page_load_ns
    assert believed < SECOND
    for _ in range(24):
        world.turn_all()
        assert node.state_of(late) is State.QUEUED
    assert costs.page_load_ns == believed
    world.run()
    assert finished(node, late).host_tokens == 0
    assert node.said(LoadPages) == []


def test_who_is_pushed_back_finds_its_own_pages_in_host_memory_again() -> None:
    """Its prompt and the full pages of its answer: only what host memory lacks is computed a second time."""
    computed: dict[bool, int] = {}
    for has_host in (False, True):
        world = World()
        node = world.unified(**{**TIER, "num_pages": 8, **({} if has_host else {"host_tier": None})})
        asked = [world.submit(node, prompt_len=30, max_new_tokens=60, seed=seed) for seed in range(3)]
        world.run()
        assert [node.tokens[request] for request in asked] == [expected_tokens(30, 60, seed=seed) for seed in range(3)]
        assert node.state.counters.retractions > 0
        assert bool(node.said(LoadPages)) == has_host
        computed[has_host] = sum(row.stop - row.start for plan in node.plans() for row in plan.rows)
        assert_nothing_is_held(node)
    assert computed[True] < computed[False]
