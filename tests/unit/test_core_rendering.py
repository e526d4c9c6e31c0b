"""A chat template shows the time, and the two halves have rendered it at two times: decode's counts, asked for once."""

from collections.abc import Callable

import msgspec
import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import FailRequest, FinishRequest, RenderAgain
from tandem.core.disagg.messages import Abort, Ready
from tandem.core.events import (
    BatchReturned,
    DrainRequested,
    PagesLanded,
    PeerLost,
    PeerSaid,
    PromptRendered,
    RequestArrived,
)
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import SECOND, Cause, Incarnation
from tandem.metrics.node_numbers import named

HERE, THERE = 101, 203  # Unix seconds, of prefill and of decode; their prompts differ in length, too
LEN = 100
HOST = {"host_tier": {"num_pages": 64}}
TOKENS = expected_tokens(LEN, 4, seed=1, rendered_at=THERE)


def meet(*, times: tuple[int, int] = (HERE, THERE), seeds: tuple[int, int] = (1, 1), **settings: object):
    """A pair of nodes, and a request on its way to both."""
    world = World()
    prefill = world.prefill(chunk_tokens=48, **settings)
    decode = world.decode(resend_ns=SECOND)
    room = world.room()
    left = world.submit(prefill, prompt_len=LEN, room=room, rendered_at=times[0], seed=seeds[0])
    right = world.submit(
        decode,
        prompt_len=LEN,
        room=room,
        peer=prefill.address,
        rendered_at=times[1],
        seed=seeds[1],
        timeout_ns=9 * SECOND,
    )
    return world, prefill, decode, left, right


def assert_answered(world: World, prefill: Replica, decode: Replica, left: int, right: int) -> None:
    world.run()
    assert [command.rendered_at for command in prefill.said(RenderAgain)] == [THERE]
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == prefill.ended[left].path == "remote"
    assert isinstance(prefill.ended[left], FinishRequest)
    assert prefill.tokens[left] == TOKENS[:1]
    assert prefill.said(Abort) == []
    counters = prefill.state.counters
    assert (counters.bootstrap_failed, counters.transfer_failed) == (0, 0)
    assert_nothing_is_held([prefill, decode])


# --- in every state in which READY can come --------------------------------------------------------------------------


def ready_first(policy: str):
    """READY overtakes the request."""
    made = world, prefill, *_ = meet(optimistic=policy)
    prefill.holds.add(RequestArrived)
    world.run()
    prefill.release()
    return made


def ready_last(policy: str):
    """Whatever prefill can do without READY is done."""
    made = world, prefill, *_ = meet(optimistic=policy)
    prefill.holds.add(Ready)
    world.run()
    prefill.release()
    return made


def ready_while_computing(policy: str):
    made = world, prefill, _, left, _ = meet(optimistic=policy)
    prefill.holds.add(BatchReturned)
    world.run()
    assert policy == "off" or prefill.state_of(left) is State.RETRACTING
    prefill.release()
    return made


@pytest.mark.parametrize("policy", ["off", "retry", "park"])
@pytest.mark.parametrize("scene", [ready_first, ready_last, ready_while_computing])
def test_prefill_goes_on_with_decodes_prompt(scene: Callable[[str], tuple], policy: str) -> None:
    assert_answered(*scene(policy))


def test_a_request_that_waits_in_the_queue_is_rendered_anew_and_queued_again() -> None:
    world = World()
    prefill, decode = world.prefill(max_running=1), world.decode()
    prefill.holds.add(BatchReturned)
    world.submit(prefill, prompt_len=48, seed=9, room=77)
    world.run()
    room = world.room()
    left = world.submit(prefill, prompt_len=LEN, room=room, rendered_at=HERE)
    world.run()
    assert prefill.state_of(left) is State.QUEUED
    prefill.holds.add(PromptRendered)
    right = world.submit(decode, prompt_len=LEN, room=room, peer=prefill.address, rendered_at=THERE)
    world.run()
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    prefill.release()
    world.run()
    assert decode.tokens[right] == TOKENS
    assert isinstance(prefill.ended[left], FinishRequest)
    assert prefill.ended[left].retries == 0, "nothing was computed in vain"


def test_what_was_parked_gives_its_pages_back_and_counts_as_one_retry() -> None:
    world, prefill, decode, left, right = meet(optimistic="park")
    prefill.holds |= {Ready, PromptRendered}
    world.run()
    assert prefill.state_of(left) is State.PARKED
    prefill.release(Ready)
    world.run()
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    assert prefill.progress(left).waiting_for is WaitingFor.RENDERING
    assert prefill.progress(left).pages == []
    assert prefill.state.results.owners == {}
    assert named(numbers(prefill.node))["num_prefill_bootstrap_queue_reqs"] == 1
    prefill.release()
    assert_answered(world, prefill, decode, left, right)
    assert prefill.ended[left].retries == 1
    assert prefill.state.counters.prefill_retries == {"rendered": 1}


def test_only_what_the_two_prompts_share_counts_as_cached() -> None:
    world = World()
    prefill, decode = world.prefill(optimistic="park"), world.decode()
    warm = world.submit(prefill, prompt_len=LEN, rendered_at=HERE)
    world.run()
    assert isinstance(prefill.ended[warm], FinishRequest)
    room = world.room()
    world.submit(prefill, prompt_len=LEN, room=room, rendered_at=HERE)
    world.run()
    right = world.submit(decode, prompt_len=LEN, room=room, peer=prefill.address, rendered_at=THERE)
    world.run()
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].cached_tokens == LEN // 2 // 16 * 16


def test_no_more_comes_from_host_memory_than_was_cached() -> None:
    world = World()
    prefill, decode = world.prefill(optimistic="park", num_pages=16, conservativeness=0.0, **HOST), world.decode()
    for seed, length in ((1, LEN), (5, 250)):  # the second one takes the pages of the first on the device
        world.submit(prefill, prompt_len=length, rendered_at=HERE, seed=seed)
        world.run()
    room = world.room()
    left = world.submit(prefill, prompt_len=LEN, room=room, rendered_at=HERE, seed=1)
    world.run()
    assert prefill.progress(left).host_tokens == LEN // 16 * 16
    world.submit(decode, prompt_len=LEN, room=room, peer=prefill.address, rendered_at=THERE, seed=1)
    world.run()
    ended = prefill.ended[left]
    assert isinstance(ended, FinishRequest)
    assert ended.host_tokens == ended.cached_tokens == LEN // 2 // 16 * 16
    assert ended.storage_tokens == 0


# --- when it is not asked for ----------------------------------------------------------------------------------------


def test_two_times_that_render_alike_are_one_prompt() -> None:
    """The date of two seconds of one day."""
    world, prefill, decode, _, right = meet(times=(203, 1203))
    world.run()
    assert prefill.said(RenderAgain) == []
    assert decode.tokens[right] == expected_tokens(LEN, 4, seed=1, rendered_at=203)
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("times", [(0, THERE), (HERE, 0), (THERE, THERE)])
def test_another_prompt_is_refused_unless_both_show_a_time_of_their_own(times: tuple[int, int]) -> None:
    world, prefill, decode, left, right = meet(times=times, seeds=(1, 2))
    world.run()
    assert prefill.said(RenderAgain) == []
    assert decode.cause(right) is Cause.PROTOCOL
    assert prefill.state_of(left) is State.PARKED  # its own decode may still come
    assert_nothing_is_held(decode)


def test_prompts_that_differ_at_one_time_too_end_the_request() -> None:
    world, prefill, decode, left, right = meet(seeds=(1, 2))
    world.run()
    assert len(prefill.said(RenderAgain)) == 1
    assert prefill.cause(left) is decode.cause(right) is Cause.PROTOCOL
    assert_nothing_is_held([prefill, decode])


def changed(ready: Ready, **fields: object) -> Ready:
    return msgspec.structs.replace(ready, **fields)


def test_a_decode_that_names_ever_new_times_is_answered_once() -> None:
    world, prefill, decode, left, _ = rendering(seeds=(1, 2))
    ready = decode.said(Ready)[0]
    for time in (301, 302):
        world.send(prefill, PeerSaid(decode.name, changed(ready, rendered_at=time)))
    prefill.release()
    world.run()
    for time in (303, 304):
        world.send(prefill, PeerSaid(decode.name, changed(ready, rendered_at=time)))
    world.run()
    assert len(prefill.said(RenderAgain)) == 1
    assert prefill.cause(left) is Cause.PROTOCOL


def test_after_ready_was_taken_another_prompt_is_refused() -> None:
    world, prefill, decode, left, right = meet(times=(THERE, THERE))
    prefill.holds.add(BatchReturned)
    world.run()
    assert prefill.progress(left).side.is_ready
    ready = decode.said(Ready)[0]
    world.send(prefill, PeerSaid(decode.name, changed(ready, rendered_at=999, prompt_digest=b"another")))
    world.run()
    assert prefill.said(RenderAgain) == []
    assert prefill.cause(left) is Cause.PROTOCOL
    prefill.release()
    world.run()
    assert isinstance(decode.ended[right], FailRequest)
    assert_nothing_is_held([prefill, decode])


# --- while the edge renders ------------------------------------------------------------------------------------------


def rendering(policy: str = "park", **asked: object):
    made = world, prefill, *_ = meet(optimistic=policy, **asked)
    prefill.holds.add(PromptRendered)
    world.run()
    assert len(prefill.said(RenderAgain)) == 1
    return made


def test_ready_said_again_asks_for_nothing_and_is_not_refused() -> None:
    world, prefill, decode, left, right = rendering()
    world.advance(3 * SECOND)
    assert len(decode.said(Ready)) > 2
    assert prefill.state_of(left) is State.BOOTSTRAPPING
    prefill.release()
    assert_answered(world, prefill, decode, left, right)


def test_another_decode_is_not_listened_to() -> None:
    world, prefill, decode, left, right = rendering()
    ready = decode.said(Ready)[0]
    other = Incarnation("other", "1")
    world.send(prefill, PeerSaid(other, changed(ready, source=other, rendered_at=7)))
    world.run()
    prefill.release()
    assert_answered(world, prefill, decode, left, right)


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    world, prefill, decode, left, right = rendering()
    prefill.twice.add(PromptRendered)
    prefill.release()
    assert_answered(world, prefill, decode, left, right)


@pytest.mark.parametrize("policy", ["off", "retry", "park"])
def test_an_abort_reaches_decode_and_the_late_answer_is_forgotten(policy: str) -> None:
    world, prefill, decode, left, right = rendering(policy)
    world.abort(prefill, left)
    world.run()
    assert prefill.cause(left) is Cause.ABORTED
    assert prefill.state_of(left) is State.DONE
    prefill.release()
    world.run()
    assert decode.tokens.get(right) in (None, TOKENS)
    assert right in decode.ended
    assert_nothing_is_held([prefill, decode])


def test_an_abort_of_decode_ends_prefill() -> None:
    world, prefill, decode, left, right = rendering()
    world.abort(decode, right)
    world.run()
    assert prefill.cause(left) is Cause.PEER_ABORTED
    prefill.release()
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_a_deadline_ends_both() -> None:
    world, prefill, decode, left, right = rendering()
    world.advance(10 * SECOND)
    assert decode.cause(right) is Cause.DEADLINE_EXCEEDED
    assert prefill.cause(left) is Cause.PEER_ABORTED
    prefill.release()
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_prefills_own_deadline_names_the_wait() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    prefill.holds.add(PromptRendered)
    room = world.room()
    left = world.submit(prefill, prompt_len=LEN, room=room, rendered_at=HERE, timeout_ns=2 * SECOND)
    right = world.submit(decode, prompt_len=LEN, room=room, peer=prefill.address, rendered_at=THERE)
    world.advance(3 * SECOND)
    assert (prefill.cause(left), prefill.ended[left].stage) == (Cause.DEADLINE_EXCEEDED, "rendering")
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == "fallback"
    prefill.release()
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_a_decode_that_dies_ends_it() -> None:
    world, prefill, decode, left, _ = rendering()
    world.kill(decode)
    world.run()
    assert prefill.cause(left) is Cause.PEER_LOST
    prefill.release()
    world.run()
    assert_nothing_is_held(prefill)


def test_a_drain_lets_it_finish() -> None:
    world, prefill, decode, left, right = rendering()
    world.send(prefill, DrainRequested())
    world.advance(2 * SECOND)
    prefill.release()
    assert_answered(world, prefill, decode, left, right)


def test_a_lost_connection_to_decode_ends_it_although_no_page_was_offered() -> None:
    world, prefill, decode, left, right = rendering()
    world.send(prefill, PeerLost(decode.name))
    world.run()
    assert prefill.cause(left) is Cause.PEER_LOST
    prefill.release()
    world.run()
    assert right in decode.ended
    assert_nothing_is_held([prefill, decode])


def test_a_prompt_that_does_not_fit_at_the_other_time_is_refused() -> None:
    """Room for the prompt of 101 tokens and one more, not for that of 103."""
    world = World()
    prefill, decode = world.prefill(page_size=1, num_pages=103), world.decode(page_size=1, num_pages=300)
    room = world.room()
    left = world.submit(prefill, prompt_len=LEN, room=room, rendered_at=HERE)
    right = world.submit(decode, prompt_len=LEN, room=room, peer=prefill.address, rendered_at=THERE)
    world.run()
    assert prefill.cause(left) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert decode.cause(right) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert_nothing_is_held([prefill, decode])


# --- after an end ----------------------------------------------------------------------------------------------------


def test_a_half_that_has_ended_answers_another_time_with_why_it_ended() -> None:
    """Not with `protocol`, which no fallback would mend."""
    world, prefill, decode, left, right = meet()
    prefill.holds |= {Ready, BatchReturned}
    world.run()
    world.abort(prefill, left)
    world.run()
    assert prefill.state_of(left) is State.DRAINING
    prefill.release(Ready)
    world.run()
    assert {abort.cause for abort in prefill.said(Abort)} == {Cause.ABORTED}
    prefill.release()
    world.run()
    assert right in decode.ended
    assert_nothing_is_held([prefill, decode])


def test_a_failed_transfer_of_a_prompt_rendered_anew_is_computed_on_decode() -> None:
    world, prefill, decode, left, right = meet()
    decode.holds.add(PagesLanded)
    world.run()
    world.abort(prefill, left)
    world.run()
    decode.release()
    world.run()
    assert right in decode.ended
    assert_nothing_is_held([prefill, decode])
