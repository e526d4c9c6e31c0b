"""Log-probabilities of prompts: what of a cache a request that wants them may use, and that all are told, once."""

import pytest

from core_driver import Replica, World, answer, assert_nothing_is_held, expected_tokens
from tandem.core.commands import StartRequest
from tandem.core.disagg.messages import Offer, Ready
from tandem.core.events import PagesLanded, TransferDrained, TransferFailed
from tandem.core.scheduler.request_state import State
from tandem.core.values import SECOND, Cause, RequestId, ShardId
from tandem.simulator.oracle import told_of


def told(replica: Replica, request: RequestId, *, seed: int = 1) -> list[int]:
    """The positions of which something was said."""
    started: StartRequest = replica.started[request]
    said, script = b"".join(started.prompt_extras), answer(100, seed=seed)
    places = {told_of(script.kv_sum(position + 1)): position for position in range(100)}
    return [places[said[at : at + 8]] for at in range(0, len(said), 8)]


@pytest.mark.parametrize(("wanted_from", "cached"), [(0, 0), (15, 0), (16, 16), (40, 32), (69, 64), (None, 64)])
def test_what_is_wanted_is_computed_and_what_is_before_it_comes_from_the_cache(
    wanted_from: int | None, cached: int
) -> None:
    world = World()
    node = world.unified(chunk_tokens=16)
    world.submit(node, prompt_len=70)
    world.run()
    request = world.submit(node, prompt_len=70, logprobs_from=wanted_from)
    world.run()
    assert told(node, request) == ([] if wanted_from is None else list(range(wanted_from, 69)))
    assert node.ended[request].cached_tokens == cached
    assert node.tokens[request] == expected_tokens(70, 4, seed=1)


@pytest.mark.parametrize("policy", ["off", "retry", "park"])
def test_decode_tells_what_prefill_computed_and_prefill_tells_nothing(policy: str) -> None:
    world = World()
    prefill, decode = world.prefill(optimistic=policy, chunk_tokens=48), world.decode()
    for _ in range(2):  # the second time both have the prompt in their caches
        left, right = world.pair(prefill, decode, prompt_len=100, logprobs_from=20)
        world.run()
        assert decode.ended[right].path == "remote"
        assert told(decode, right) == list(range(20, 99))
        assert told(prefill, left) == []
        assert decode.tokens[right] == expected_tokens(100, 4, seed=1)
    assert prefill.ended[left].cached_tokens == 16
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("settings", [{"force_retry_prob": 1.0, "optimistic": "retry"}, {"optimistic": "retry"}])
def test_a_prompt_that_is_computed_twice_is_told_once(settings: dict[str, object]) -> None:
    world = World()
    prefill, decode = world.prefill(chunk_tokens=48, **settings), world.decode()
    if "force_retry_prob" not in settings:
        prefill.holds.add(Ready)
    _, right = world.pair(prefill, decode, prompt_len=100, logprobs_from=0)
    world.run()
    prefill.release()
    world.run()
    assert sum(prefill.state.counters.prefill_retries.values()) > 0
    assert told(decode, right) == list(range(99))


def test_whoever_did_not_ask_is_told_nothing_by_a_half_of_its_room_that_was_asked() -> None:
    """Two clients have used one room for one prompt, and each has one half of it."""
    world = World()
    prefill, decode = world.prefill(), world.decode()
    world.submit(prefill, prompt_len=100, room=7, logprobs_from=20)
    right = world.submit(decode, prompt_len=100, room=7, peer=prefill.address)
    world.run()
    assert decode.ended[right].path == "remote"
    assert told(decode, right) == []


def results_said(prefill: Replica) -> list[Offer]:
    return [offer for offer in prefill.said(Offer) if offer.result is not None]


def test_what_is_told_of_a_prompt_may_be_large_and_is_said_once() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    _, right = world.pair(prefill, decode, prompt_len=100, logprobs_from=0)
    decode.holds.add(PagesLanded)
    world.run()
    for _ in range(5):
        world.advance(1 * SECOND)
        world.run()
    assert len(prefill.said(Offer)) > 2, "offers and READY are repeated"
    assert len(results_said(prefill)) == 1
    decode.release()
    world.run()
    assert told(decode, right) == list(range(99))


def test_a_result_that_was_lost_is_said_again_for_it_is_asked_for() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    decode.drops.add(Offer)
    _, right = world.pair(prefill, decode, prompt_len=100, logprobs_from=0)
    world.run()
    assert len(results_said(prefill)) == 1
    decode.drops.clear()
    world.advance(2 * SECOND)
    world.run()
    assert told(decode, right) == list(range(99))
    assert len(results_said(prefill)) > 1


def test_a_decode_that_has_to_compute_the_prompt_tells_what_it_has_computed() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(chunk_tokens=32)
    first = world.pair(prefill, decode, prompt_len=100)
    world.run()
    assert decode.ended[first[1]].path == "remote", "the prompt is cached on decode"
    _, right = world.pair(prefill, decode, prompt_len=100, logprobs_from=0)
    decode.holds |= {PagesLanded, TransferDrained}
    world.run()
    attempt = decode.progress(right).side.attempt
    world.send(decode, TransferFailed(right, attempt, ShardId(0), Cause.CORRUPT_PAGES, "page 3"))
    decode.release()
    world.run()
    assert told(decode, right) == list(range(99))
    assert decode.tokens[right] == expected_tokens(100, 4, seed=1)


def test_a_short_prompt_that_decode_computes_itself_is_told_by_it() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(local_prefill="up_to", local_prefill_tokens=50)
    world.pair(prefill, decode, prompt_len=40)
    world.run()
    _, right = world.pair(prefill, decode, prompt_len=40, logprobs_from=3)
    world.run()
    assert decode.ended[right].path == "local"
    assert told(decode, right) == list(range(3, 39))


def test_a_retracted_request_tells_nothing_again_and_may_use_what_is_cached() -> None:
    world = World()
    node = world.unified(num_pages=8, conservativeness=0.0)
    requests = [world.submit(node, prompt_len=48, max_new_tokens=40, seed=seed, logprobs_from=0) for seed in (1, 2)]
    world.run()
    assert node.state.counters.retractions > 0
    for seed, request in zip((1, 2), requests, strict=True):
        assert told(node, request, seed=seed) == list(range(47))
        assert node.tokens[request] == expected_tokens(48, 40, seed=seed)


def test_what_was_gathered_is_in_a_snapshot() -> None:
    world = World()
    node = world.unified(chunk_tokens=16)
    request = world.submit(node, prompt_len=70, logprobs_from=0)
    world.run_until(lambda: request in node.state.requests and node.progress(request).computed >= 32)
    before = node.progress(request).prompt_extras
    assert len(before) >= 2
    node.node.restore(node.node.snapshot())
    assert node.progress(request).prompt_extras == before
    assert node.state_of(request) is State.COMPUTING
    world.run()
    assert told(node, request) == list(range(69))
