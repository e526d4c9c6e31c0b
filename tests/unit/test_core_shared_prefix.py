"""A prompt that comes several times at once is computed once: who would compute the same pages waits for them."""

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.scheduler import inspect
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import RequestId


def computed(node: Replica) -> int:
    """Prompt tokens that batches were launched for."""
    return sum(row.stop - row.start for plan in node.plans() for row in plan.rows)


def samples(world: World, node: Replica, count: int, **asked: int) -> list[RequestId]:
    return [world.submit(node, **asked) for _ in range(count)]


@pytest.mark.parametrize("chunk_tokens", [2048, 128])
def test_samples_of_a_prompt_are_forked_from_one_prefill(chunk_tokens: int) -> None:
    world = World()
    node = world.unified(chunk_tokens=chunk_tokens, num_pages=400, max_running=16)
    ids = samples(world, node, 8, prompt_len=1000)
    world.run()
    assert computed(node) == 1000 + 7 * (1000 - 992)
    assert [node.ended[request].cached_tokens for request in ids] == [0, *[992] * 7]
    assert {tuple(node.tokens[request]) for request in ids} == {tuple(expected_tokens(1000, 4, seed=1))}
    assert_nothing_is_held(node)


def test_prefill_computes_the_prompt_of_several_pairs_once() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=400), world.decode(num_pages=600)
    pairs = [world.pair(prefill, decode, prompt_len=200) for _ in range(4)]
    world.run()
    assert computed(prefill) == 200 + 3 * 8
    assert {tuple(decode.tokens[request]) for _, request in pairs} == {tuple(expected_tokens(200, 4, seed=1))}
    assert_nothing_is_held([prefill, decode])


def test_whoever_computes_it_may_go_and_the_next_one_does() -> None:
    world = World()
    node = world.unified(chunk_tokens=64)
    first, second, third = samples(world, node, 3, prompt_len=200)
    world.run_until(lambda: node.state_of(first) is State.COMPUTING and node.progress(first).computed >= 64)
    assert node.progress(second).blocked_on is node.progress(third).blocked_on is WaitingFor.PREFIX
    world.abort(node, first)
    world.run_until(lambda: node.state_of(second) is State.COMPUTING)
    assert node.progress(third).blocked_on is WaitingFor.PREFIX
    world.run()
    for request in (second, third):
        assert node.tokens[request] == expected_tokens(200, 4, seed=1)
    assert_nothing_is_held(node)


def test_others_pass_whoever_waits_and_the_list_of_waits_says_what_for() -> None:
    world = World()
    node = world.unified(chunk_tokens=512)
    samples(world, node, 2, prompt_len=100)
    other = world.submit(node, prompt_len=40, seed=2)
    world.run_until(lambda: node.state_of(other) is State.COMPUTING)
    waits = [(wait["waiting_for"], wait["owner"]) for wait in inspect.waits(node.node, node.state.now)]
    assert waits == [("window", "worker"), ("prefix", "worker"), ("window", "worker")]
    world.run()


def test_who_shares_less_than_half_of_what_it_lacks_does_not_wait() -> None:
    world = World()
    node = world.unified(chunk_tokens=512)
    samples(world, node, 1, prompt_len=48)
    longer = world.submit(node, prompt_len=130)
    world.run_until(lambda: bool(node.plans()))
    assert node.state_of(longer) is State.COMPUTING
    world.run()


def test_without_a_prefix_cache_everybody_computes() -> None:
    world = World()
    node = world.unified(prefix_cache=False, num_pages=400)
    samples(world, node, 3, prompt_len=100)
    world.run()
    assert computed(node) == 300


def test_who_wants_log_probabilities_of_the_prompt_computes_it() -> None:
    world = World()
    node = world.unified(num_pages=400)
    for _ in range(2):
        world.submit(node, prompt_len=100, logprobs_from=0)
    world.run()
    assert computed(node) == 200
