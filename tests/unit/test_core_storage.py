"""Storage below host memory: when it is asked, how long it is waited for, and what becomes of what comes."""

from typing import Any

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens, finished
from tandem.core.commands import FetchPages, LoadPages, LookUpPages, WritePages
from tandem.core.events import PagesCopied, PagesFound
from tandem.core.scheduler.queue_policy import LOOK_AHEAD
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import MILLISECOND, SECOND, Nanos, RequestId, ShardId

LENGTH, FULL = 200, 12  # tokens of a prompt, and its full pages
ROLES = ("unified", "prefill", "decode")


def tiers(host_pages: int = 64, **storage: Any) -> dict[str, Any]:
    host = {"num_pages": host_pages, "storage": {"min_pages": 2, **storage}}
    return {"num_pages": 48, "conservativeness": 0.0, "host_tier": host}


def run(world: World, node: Replica, *, seed: int = 1, max_new_tokens: int = 2) -> RequestId:
    request = world.submit(node, seed=seed, prompt_len=LENGTH, max_new_tokens=max_new_tokens)
    world.run()
    return request


def after_a_restart(**more: Any) -> tuple[World, Replica]:
    """A server whose storage has the pages of one prompt, and nothing in its own tiers."""
    world = World()
    run(world, world.unified(**tiers(**more)))
    assert len(world.folder.contents) == FULL
    return world, world.unified(life=2, **tiers(**more))


def asked(world: World, node: Replica, kept_back: type) -> RequestId:
    """Whose first answer of this kind has not come."""
    node.holds.add(kept_back)
    request = world.submit(node, seed=1, prompt_len=LENGTH, max_new_tokens=2)
    world.run()
    return request


def test_a_conversation_comes_back_after_a_restart() -> None:
    world, node = after_a_restart()
    request = run(world, node)
    end = finished(node, request)
    assert (end.cached_tokens, end.host_tokens, end.storage_tokens) == (FULL * 16,) * 3
    assert node.tokens[request] == expected_tokens(LENGTH, 2, seed=1)
    assert [len(fetch.hashes) for fetch in node.said(FetchPages)] == [FULL]
    assert node.said(WritePages) == [], "what came from there need not go there"
    assert_nothing_is_held(node)


def test_pages_come_some_at_a_time() -> None:
    world, node = after_a_restart(fetch_pages=5)
    assert finished(node, run(world, node)).storage_tokens == FULL * 16
    assert [len(fetch.hashes) for fetch in node.said(FetchPages)] == [5, 5, 2]


def test_who_lacks_little_does_not_ask() -> None:
    world, node = after_a_restart(min_pages=FULL + 1)
    run(world, node)
    assert node.said(LookUpPages) == []


def test_what_this_node_has_is_not_asked_for() -> None:
    world, node = after_a_restart()
    run(world, node)
    run(world, node)
    assert len(node.said(LookUpPages)) == 1


@pytest.mark.parametrize("kept_back", [PagesFound, PagesCopied])
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_who_waits_says_so_is_passed_over_and_computes_in_time(policy: str, kept_back: type) -> None:
    world, node = after_a_restart(policy=policy)
    request = asked(world, node, kept_back)
    assert node.state_of(request) is State.QUEUED
    assert node.progress(request).waiting_for is WaitingFor.STORAGE
    other = world.submit(node, seed=5, prompt_len=20, max_new_tokens=1)
    world.run()
    assert other in node.ended
    world.advance(6 * SECOND)
    assert node.tokens[request] == expected_tokens(LENGTH, 2, seed=1)
    assert finished(node, request).cached_tokens == 0
    node.release()
    world.run()
    assert_nothing_is_held(node)


@pytest.mark.parametrize("queue", [{}, {"priorities": {}}, {"schedule_policy": "lpm"}, {"schedule_policy": "lof"}])
def test_however_many_wait_for_storage_who_comes_behind_them_starts(queue: dict[str, Any]) -> None:
    world = World()
    node = world.unified(**tiers(), **queue)
    node.holds.add(PagesFound)
    ids = [world.submit(node, seed=seed, prompt_len=LENGTH) for seed in range(LOOK_AHEAD)]
    behind = world.submit(node, seed=LOOK_AHEAD, prompt_len=16)
    world.run()
    assert [node.progress(one).waiting_for for one in ids] == [WaitingFor.STORAGE] * LOOK_AHEAD
    assert node.tokens.get(behind) == expected_tokens(16, 4, seed=LOOK_AHEAD)
    node.release()
    world.run()
    assert node.ended.keys() == {*ids, behind}
    assert_nothing_is_held(node)


def test_a_timeout_goes_by_the_length_of_the_prompt() -> None:
    world, node = after_a_restart(timeout_base_ns=100 * MILLISECOND, timeout_per_ki_token_ns=1024 * MILLISECOND)
    request = asked(world, node, PagesFound)
    world.advance(Nanos((100 + LENGTH - 10) * MILLISECOND))
    assert node.state_of(request) is State.QUEUED
    world.advance(Nanos(20 * MILLISECOND))
    assert request in node.ended


def test_best_effort_does_not_wait() -> None:
    world, node = after_a_restart(policy="best_effort")
    request = asked(world, node, PagesFound)
    assert finished(node, request).cached_tokens == 0
    node.release()
    world.run()
    assert node.said(FetchPages) == []


def test_who_ends_meanwhile_asks_for_no_more() -> None:
    """`release_aborted_request`: what is under way lands in the tree, and somebody else finds it there."""
    world, node = after_a_restart(fetch_pages=5)
    request = asked(world, node, PagesCopied)
    world.abort(node, request)
    world.run()
    assert request not in node.state.requests
    assert node.state.storage.prefetches == {}
    node.release()
    world.run()
    assert [len(fetch.hashes) for fetch in node.said(FetchPages)] == [5]
    assert_nothing_is_held(node)
    assert finished(node, run(world, node)).host_tokens == FULL * 16


def test_two_who_want_the_same_fetch_it_once() -> None:
    world, node = after_a_restart(fetch_pages=5)
    both = [world.submit(node, seed=1, prompt_len=LENGTH, max_new_tokens=2) for _ in range(2)]
    world.run()
    assert [finished(node, request).host_tokens for request in both] == [FULL * 16] * 2
    assert sum(len(fetch.hashes) for fetch in node.said(FetchPages)) == FULL


def test_a_page_that_has_vanished_since_the_look_up_is_computed() -> None:
    world, node = after_a_restart()
    request = asked(world, node, PagesFound)
    world.folder.remove(node.files[0].name(node.progress(request).hashes[4]))
    node.release()
    world.run()
    assert finished(node, request).storage_tokens == 4 * 16
    assert node.tokens[request] == expected_tokens(LENGTH, 2, seed=1)
    assert node.state.storage.counters.lost == FULL - 4


def test_all_workers_have_the_same_prefix() -> None:
    """What is there is the least of what each of them has found, and of what each has fetched (sglang#34568)."""
    world = World()
    node = world.unified(**tiers(), cut={"tp_size": 2})
    node.holds |= {PagesFound, PagesCopied}
    request = world.submit(node, seed=1, prompt_len=LENGTH, max_new_tokens=2)
    world.run()
    (asked,) = node.said(LookUpPages)
    world.step(node, [PagesFound(asked.number, ShardId(0), FULL)] * 2)
    assert node.said(FetchPages) == []
    world.step(node, [PagesFound(asked.number, ShardId(1), 7)])
    (fetch,) = node.said(FetchPages)
    assert len(fetch.hashes) == 7
    world.step(node, [PagesCopied(fetch.copy, ShardId(0), 7)])
    assert node.state_of(request) is State.QUEUED
    world.step(node, [PagesCopied(fetch.copy, ShardId(1), 3)])
    (load,) = node.said(LoadPages)
    assert len(load.hashes) == 3


def test_a_prefix_takes_half_of_host_memory_at_most() -> None:
    world, _ = after_a_restart()
    node = world.unified(life=3, **tiers(host_pages=8))
    assert finished(node, run(world, node)).storage_tokens == 4 * 16
    assert_nothing_is_held(node)


def test_what_comes_for_all_together_takes_half_of_host_memory_at_most() -> None:
    world = World()
    first = world.unified(**tiers())
    for seed in (1, 2):
        run(world, first, seed=seed)
    node = world.unified(life=2, **tiers(host_pages=16))
    node.holds.add(PagesCopied)
    ids = [world.submit(node, seed=seed, prompt_len=LENGTH, max_new_tokens=2) for seed in (1, 2)]
    world.run_until(lambda: len(node.said(LookUpPages)) == 2 and node.said(FetchPages))
    assert sum(len(fetch.hashes) for fetch in node.said(FetchPages)) == 8
    node.release()
    world.run()
    assert [node.tokens[request] for request in ids] == [expected_tokens(LENGTH, 2, seed=seed) for seed in (1, 2)]
    assert_nothing_is_held(node)


@pytest.mark.parametrize(("waited", "writes_again"), [(4 * SECOND, True), (6 * SECOND, False)])
def test_where_a_write_hangs_no_other_is_begun(waited: int, writes_again: bool) -> None:
    world = World()
    node = world.unified(**tiers())
    world.submit(node, seed=1, prompt_len=40, max_new_tokens=1)
    world.run_until(lambda: node.said(WritePages))
    node.holds.add(PagesCopied)
    world.run()
    node.holds.clear()  # that answer does not come, all later ones do
    num_written = len(node.said(WritePages))
    world.advance(waited)
    run(world, node, seed=2)
    assert (len(node.said(WritePages)) > num_written) is writes_again


def test_storage_that_costs_more_than_computing_is_left_alone() -> None:
    world, node = after_a_restart()
    node.state.storage.break_even.loaded(1, Nanos(10 * SECOND))
    node.state.chunk_budget.learn(1000, Nanos(1000))
    assert finished(node, run(world, node)).cached_tokens == 0
    assert node.said(FetchPages) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_half_of_a_pair_serves_from_storage(role: str) -> None:
    world = World()
    run(world, world.unified(**tiers()))
    settings = {"prefill": {}, "decode": {}, role: tiers()}
    prefill, decode = world.prefill(**settings["prefill"]), world.decode(**settings["decode"])
    halves = dict(zip(("prefill", "decode"), world.pair(prefill, decode, prompt_len=LENGTH, seed=1), strict=True))
    world.run()
    node = {"prefill": prefill, "decode": decode}[role]
    assert finished(node, halves[role]).storage_tokens == FULL * 16
    if role == "decode":
        assert finished(decode, halves["decode"]).kv_pages == 1, "only the rest travels"
    world.advance(2 * SECOND)
    assert_nothing_is_held([prefill, decode])
