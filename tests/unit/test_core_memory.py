"""Pages under pressure: prefix hits, admission, retraction, and the request that outgrows the pool."""

import pytest

from core_driver import World, assert_nothing_is_held, expected_tokens, finished
from tandem.core.commands import StartRequest
from tandem.core.events import BatchReturned, FlushRequested, PagesLanded
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import SECOND, Cause
from tandem.metrics.node_numbers import named

# --- prefix cache ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_seen_before_is_computed_from_its_last_page_on() -> None:
    world = World()
    node = world.unified()
    first = world.submit(node, prompt_len=70)
    world.run()
    again = world.submit(node, prompt_len=70)
    world.run()
    assert node.ended[first].cached_tokens == 0
    assert node.ended[again].cached_tokens == 64
    assert node.ended[again].computed_tokens == 6
    assert node.tokens[again] == expected_tokens(70, 4, seed=1)


@pytest.mark.parametrize("prompt_len", [16, 64])
def test_at_least_one_token_is_computed_even_if_the_whole_prompt_is_cached(prompt_len: int) -> None:
    world = World()
    node = world.unified()
    for _ in range(2):
        request = world.submit(node, prompt_len=prompt_len)
        world.run()
    assert node.ended[request].cached_tokens == prompt_len - 16
    assert node.tokens[request] == expected_tokens(prompt_len, 4, seed=1)


def test_output_pages_are_cached_too_when_the_workers_name_them() -> None:
    world = World()
    node = world.unified()
    world.submit(node, prompt_len=40, max_new_tokens=40)
    world.run()
    # 40 + 40 tokens, of which the last has no KV: 4 full pages
    assert len(node.state.tree.nodes) == 4


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    world = World()
    node = world.unified(prefix_cache=False)
    for _ in range(2):
        request = world.submit(node, prompt_len=64)
        world.run()
    assert node.ended[request].cached_tokens == 0
    assert node.state.pool.num_free == node.state.pool.num_pages


def test_two_requests_that_compute_the_same_page_at_once_keep_one_copy_of_it() -> None:
    world = World()
    node = world.unified(chunk_tokens=256)
    # The longer prompt lacks more than it would share, and does not wait.
    ids = [world.submit(node, prompt_len=length, max_new_tokens=3) for length in (48, 128)]
    world.run()
    assert [row.start for plan in node.plans() for row in plan.rows] == [0, 0]
    assert [node.tokens[it] for it in ids] == [expected_tokens(length, 3, seed=1) for length in (48, 128)]
    assert len(node.state.tree.nodes) == node.state.pool.counts[PageState.CACHED] == 8
    assert_nothing_is_held(node)


def test_old_pages_are_evicted_for_new_prompts() -> None:
    world = World()
    node = world.unified(num_pages=8)
    for seed in range(6):
        request = world.submit(node, prompt_len=100, max_new_tokens=2, seed=seed)
        world.run()
        assert node.tokens[request] == expected_tokens(100, 2, seed=seed)
    assert_nothing_is_held(node)


def test_the_hit_rate_counts_a_prompt_once_however_often_it_is_computed() -> None:
    world = World()
    prefill = world.prefill(chunk_tokens=512, optimistic="retry", optimistic_retries=3)
    left = world.submit(prefill, prompt_len=64, room=7)
    world.run()
    assert prefill.progress(left).side.prefill_retry_count > 0
    assert (prefill.state.counters.input_tokens, prefill.state.counters.hit_tokens) == (64, 0)
    assert named(numbers(prefill.node))["cache_hit_rate"] == 0.0
    world.submit(prefill, prompt_len=64, room=8)  # three of its four pages are there, and it computes the rest
    world.run()
    assert named(numbers(prefill.node))["cache_hit_rate"] == 48 / 128


# --- admission -------------------------------------------------------------------------------------------------------


def test_one_that_does_not_fit_waits_for_pages_and_nobody_overtakes_it() -> None:
    world = World()
    node = world.unified(num_pages=10)
    node.holds.add(BatchReturned)
    world.submit(node, prompt_len=100)
    large = world.submit(node, prompt_len=100, seed=2)
    small = world.submit(node, prompt_len=10, seed=3)
    world.run()
    node.release()
    world.turn(node)
    node.holds.add(BatchReturned)
    world.run()
    assert node.progress(large).waiting_for is WaitingFor.PAGES
    assert node.state_of(small) is State.QUEUED
    node.release()
    world.run()
    assert node.tokens[large] == expected_tokens(100, 4, seed=2)
    assert node.tokens[small] == expected_tokens(10, 4, seed=3)


def test_slots_bound_the_running_set() -> None:
    world = World()
    node = world.unified(max_running=2)
    ids = [world.submit(node, seed=seed) for seed in range(5)]
    world.run_until(lambda: len(node.state.queues[State.RUNNING]) == 2)
    assert node.progress(ids[2]).waiting_for is WaitingFor.SLOT
    world.run()
    assert [node.tokens[request] for request in ids] == [expected_tokens(40, 4, seed=seed) for seed in range(5)]


def test_admission_keeps_a_share_of_the_expected_output_free() -> None:
    def running_together(conservativeness: float) -> int:
        world = World()
        node = world.unified(num_pages=11, conservativeness=conservativeness)
        first = world.submit(node, prompt_len=40, max_new_tokens=100)
        world.run_until(lambda: node.state_of(first) is State.RUNNING)
        second = world.submit(node, prompt_len=40, max_new_tokens=100, seed=2)
        most = 0
        while world.turn(node):
            most = max(most, len(node.state.queues[State.RUNNING]))
        assert set(node.ended) == {first, second}
        return most

    assert running_together(0.0) == 2
    assert running_together(1.0) == 1


def test_a_burst_is_admitted_with_an_eye_on_what_all_of_it_will_need() -> None:
    world = World()
    node = world.unified(num_pages=22, conservativeness=1.0, chunk_tokens=256)
    ids = [world.submit(node, prompt_len=40, max_new_tokens=100, seed=seed) for seed in range(4)]
    world.run()
    assert node.state.counters.retractions == 0
    assert [node.tokens[request] for request in ids] == [expected_tokens(40, 100, seed=seed) for seed in range(4)]


def test_prompts_of_one_chunk_fill_the_whole_window() -> None:
    world = World()
    node = world.unified(chunk_tokens=32, window_depth=2)
    node.holds.add(BatchReturned)
    for seed in range(3):
        world.submit(node, prompt_len=32, seed=seed)
    world.run()
    assert len(node.state.inflight) == 2


# --- retraction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [7, 8, 9, 12])
def test_retracted_requests_give_their_pages_back_and_resume_with_equal_tokens(
    depth: int, prefix_cache: bool, num_pages: int
) -> None:
    world = World()
    node = world.unified(num_pages=num_pages, window_depth=depth, prefix_cache=prefix_cache, conservativeness=0.0)
    ids = [world.submit(node, prompt_len=30, max_new_tokens=60, seed=seed) for seed in range(3)]
    world.run()
    assert [node.tokens.get(request) for request in ids] == [expected_tokens(30, 60, seed=seed) for seed in range(3)]
    assert node.state.counters.retractions > 0
    told = {start.request: start.ledger for start in node.said(StartRequest)}
    assert {request: finished(node, request).ledger for request in ids} == told, "it ends with the first token"
    assert world.now < SECOND, "nobody waited for a timer"
    assert_nothing_is_held(node)


def test_the_one_with_the_least_output_is_pushed_back() -> None:
    world = World()
    node = world.unified(num_pages=7, conservativeness=0.0)
    old = world.submit(node, prompt_len=30, max_new_tokens=60)
    world.run_until(lambda: len(node.tokens.get(old, [])) > 10)
    young = world.submit(node, prompt_len=30, max_new_tokens=60, seed=2)
    world.run_until(lambda: node.state.counters.retractions == 1)
    assert node.progress(young).retractions == 1
    assert node.progress(old).retractions == 0
    world.run()
    assert node.ended[young].retries >= 1
    assert node.tokens[young] == expected_tokens(30, 60, seed=2)


def test_a_sole_request_that_outgrows_the_pool_ends_with_its_cause() -> None:
    for depth in (1, 2):
        world = World()
        node = world.unified(num_pages=4, window_depth=depth)
        request = world.submit(node, prompt_len=40, max_new_tokens=500)
        world.run()
        assert node.cause(request) is Cause.OUT_OF_PAGES
        assert node.tokens[request] == expected_tokens(40, 64 - 40 + 1, seed=1)
        assert world.now < SECOND
        assert_nothing_is_held(node)


def test_those_who_waited_behind_a_request_that_outgrew_the_pool_start_at_once() -> None:
    for depth in (1, 2):
        world = World()
        node = world.unified(num_pages=4, window_depth=depth)
        world.submit(node, prompt_len=40, max_new_tokens=500)
        behind = world.submit(node, prompt_len=40, seed=2)
        world.run()
        assert node.tokens.get(behind) == expected_tokens(40, 4, seed=2)


def test_a_request_is_not_alone_while_another_one_arrives() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=64), world.decode(num_pages=8, conservativeness=0.0)
    _, grown = world.pair(prefill, decode, prompt_len=40, max_new_tokens=60)
    world.run_until(lambda: decode.state_of(grown) is State.RUNNING)
    decode.holds.add(PagesLanded)
    _, coming = world.pair(prefill, decode, prompt_len=40, seed=2, max_new_tokens=20)
    world.run()
    assert decode.state_of(coming) is State.ARRIVING
    assert grown not in decode.ended, "it lacks pages only because somebody else holds some"
    decode.release()
    world.run()
    assert decode.tokens[grown] == expected_tokens(40, 60, seed=1)
    assert decode.tokens[coming] == expected_tokens(40, 20, seed=2)
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("mixed_chunk", [False, True])
def test_a_prompt_goes_on_while_who_decodes_waits_for_pages_that_arrive_for_another(mixed_chunk: bool) -> None:
    world = World()
    prefill = world.prefill(num_pages=64)
    settings = {"chunk_tokens": 16, "prefill_streak": 1, "mixed_chunk": mixed_chunk}
    decode = world.decode(num_pages=40, conservativeness=0.0, **settings)
    grown = world.submit(decode, prompt_len=30, max_new_tokens=50)
    world.run_until(lambda: decode.state_of(grown) is State.RUNNING)
    decode.holds |= {PagesLanded, BatchReturned}
    _, coming = world.pair(prefill, decode, prompt_len=90, seed=2)
    world.run()
    behind = world.submit(decode, prompt_len=496, seed=3)  # all that is left but one page
    decode.release(BatchReturned)
    world.run()
    assert decode.state_of(coming) is State.ARRIVING
    assert decode.tokens.get(behind) == expected_tokens(496, 4, seed=3)
    assert decode.tokens[grown] == expected_tokens(30, 50, seed=1), "with the pages that it has given back"
    decode.release()
    world.run()
    assert decode.tokens[coming] == expected_tokens(90, 4, seed=2)
    assert_nothing_is_held([prefill, decode])


def test_a_prompt_that_leaves_room_for_one_token_is_served_and_a_longer_one_never_could_be() -> None:
    world = World()
    node = world.unified(num_pages=4)
    fits = world.submit(node, prompt_len=63, max_new_tokens=1)
    world.run()
    assert node.tokens[fits] == expected_tokens(63, 1, seed=1)
    longer = world.submit(node, prompt_len=64, max_new_tokens=1)
    world.run()
    assert "do not fit the KV pool of 64 tokens" in node.ended[longer].detail


def test_who_decodes_alone_waits_for_the_pages_of_somebody_who_arrives_and_ends_at_once() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(num_pages=12, conservativeness=0.0)
    _, grown = world.pair(prefill, decode, prompt_len=60, max_new_tokens=70)
    world.run_until(lambda: decode.state_of(grown) is State.RUNNING)
    decode.holds.add(PagesLanded)
    _, coming = world.pair(prefill, decode, prompt_len=90, max_new_tokens=1, seed=2)
    world.run()
    assert (decode.state_of(grown), decode.state_of(coming)) == (State.RUNNING, State.ARRIVING)
    decode.release()
    world.run()
    assert decode.tokens[grown] == expected_tokens(60, 70, seed=1)
    assert decode.tokens[coming] == expected_tokens(90, 1, seed=2)
    assert decode.state.counters.retractions == 0
    assert_nothing_is_held([prefill, decode])


def test_a_retracted_request_whose_kv_came_from_a_peer_is_computed_here() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(num_pages=7, conservativeness=0.0)
    pairs = [world.pair(prefill, decode, prompt_len=30, max_new_tokens=60, seed=seed) for seed in range(3)]
    world.run()
    assert decode.state.counters.retractions > 0
    for seed, (_, right) in enumerate(pairs):
        assert decode.tokens[right] == expected_tokens(30, 60, seed=seed)
        assert decode.ended[right].path == "remote"
    assert_nothing_is_held([prefill, decode])


def test_no_more_are_pushed_back_than_needed_while_pages_are_on_their_way() -> None:
    world = World()
    node = world.unified(num_pages=12, conservativeness=0.0, window_depth=2)
    ids = [world.submit(node, prompt_len=30, max_new_tokens=60, seed=seed) for seed in range(4)]
    world.run_until(lambda: node.state.counters.retractions == 1)
    assert node.state.inflight, "the victim's last batch has not returned"
    node.holds.add(BatchReturned)
    world.send(node, FlushRequested())
    world.run()
    assert node.state.counters.retractions == 1
    node.release()
    world.run()
    assert set(node.tokens) == set(ids)
