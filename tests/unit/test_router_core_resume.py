"""A stream whose decode dies goes on with another one: what the router's core asks for, and when it does not."""

import pytest
from test_router_core import D, P, R, World, broken, only_dispatch

from tandem.core.router.messages import (
    AbortAsked,
    BreakHalf,
    CancelHalf,
    DecodeSpoke,
    Fail,
    Finish,
    Forward,
    HalfAnswered,
    HalfEnded,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    RouteCause,
    RouterCommand,
    Side,
)
from tandem.core.router.worker_registry import ProbeResult
from tandem.core.values import SECOND, Nanos

GAP_NS = 30 * SECOND


def streaming(world: World, *, is_resumable: bool = True) -> None:
    world.ask(streams=True)
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P))
    assert world.tell(DecodeSpoke(R, 1, is_resumable)) == [Forward(R, 1)]


def failed(attempt: int = 1, failure: HalfFailure = HalfFailure.BROKEN, silent_s: float = 0) -> HalfFailed:
    return HalfFailed(R, attempt, D, failure, "gone", Nanos(round(silent_s * SECOND)))


def cause_of(said: list[RouterCommand]) -> RouteCause:
    last = said[-1]
    assert isinstance(last, Fail)
    return last.cause


def test_what_follows_is_asked_of_another_decode_at_once_and_goes_on_to_the_client() -> None:
    world = World()
    first = world.ask(streams=True)
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), DecodeSpoke(R, 1, is_resumable=True))
    second = only_dispatch(world.tell(failed()))
    assert (second.attempt, second.resumes) == (2, True)
    assert second.pair.decode != first.pair.decode
    assert not set(second.pair.rooms) & set(first.pair.rooms)
    world.tell(HalfAnswered(R, 2, P), HalfEnded(R, 2, P))
    assert world.tell(DecodeSpoke(R, 2, is_resumable=True)) == [Forward(R, 2, resumes=True)]
    assert world.tell(HalfEnded(R, 2, D)) == [Finish(R)]
    assert world.router.num_active() == world.router.num_live_rooms() == 0


def test_a_decode_that_says_that_it_cannot_go_on_is_followed_too_and_is_no_worse_for_it() -> None:
    world = World()
    streaming(world)
    assert only_dispatch(world.tell(failed(failure=HalfFailure.GAVE_UP))).resumes
    breaker = world.router.registry.breaker(world.workers[2].id)
    assert breaker is not None
    assert breaker.failed_at == []


@pytest.mark.parametrize("failure", [HalfFailure.BROKEN, HalfFailure.GAVE_UP])
def test_a_stream_that_nobody_can_go_on_with_ends_with_what_it_was_lost_of(failure: HalfFailure) -> None:
    """What a decode has said itself is with the shell already."""
    for world, is_resumable in ((World(decodes=1), True), (World(), False)):
        streaming(world, is_resumable=is_resumable)
        said = world.tell(failed(failure=failure))
        assert said == [Finish(R)] if failure is HalfFailure.GAVE_UP else cause_of(said) is RouteCause.CONNECTION_LOST


def test_where_there_is_no_other_decode_another_rank_of_the_same_one_goes_on() -> None:
    world = World(decodes=1)
    streaming(world)
    said = world.tell(HalfFailed(R, 1, D, HalfFailure.GAVE_UP, "a rank is lost", serves_on=True))
    second = only_dispatch(said)
    assert (second.resumes, second.pair.decode.id) == (True, world.workers[-1].id)


def test_where_there_is_another_decode_that_one_goes_on_for_a_rank_that_was_lost() -> None:
    world = World()
    first = world.ask(streams=True)
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), DecodeSpoke(R, 1, is_resumable=True))
    second = only_dispatch(world.tell(HalfFailed(R, 1, D, HalfFailure.GAVE_UP, "a rank is lost", serves_on=True)))
    assert second.pair.decode != first.pair.decode


def test_a_request_whose_decode_has_died_twice_kills_no_third() -> None:
    world = World(2, 3)
    streaming(world)
    world.tell(failed())
    world.tell(HalfAnswered(R, 2, P), DecodeSpoke(R, 2, is_resumable=True))
    said = world.tell(failed(2))
    assert said[0] == CancelHalf(R, 2, P)
    assert cause_of(said) is RouteCause.CONNECTION_LOST
    assert world.router.num_active() == 0


def test_an_attempt_to_go_on_that_fails_before_its_first_byte_is_retried_and_then_the_first_loss_is_the_cause() -> None:
    world = World(retries=1)
    streaming(world)
    world.tell(failed())
    assert world.tell(HalfRejected(R, 2, D, 503)) == [CancelHalf(R, 2, P)]
    third = only_dispatch(world.sleep(0.05))
    assert (third.attempt, third.resumes) == (3, True)
    said = world.tell(HalfRejected(R, 3, P, 500))
    assert said[0] == CancelHalf(R, 3, D)
    assert cause_of(said) is RouteCause.CONNECTION_LOST
    assert "gone" in said[-1].detail  # type: ignore[union-attr]  # a failure, as `cause_of` has found


def test_a_rejection_is_no_answer_to_who_has_half_of_one() -> None:
    world = World()
    streaming(world)
    world.tell(failed())
    assert cause_of(world.tell(HalfRejected(R, 2, D, 400))) is RouteCause.CONNECTION_LOST


def test_the_gap_between_two_tokens_bounds_it_and_not_the_deadline_of_the_first() -> None:
    world = World()
    streaming(world)
    world.sleep(60)  # longer than the request's own
    sent = only_dispatch(world.tell(failed(silent_s=10)))
    assert sent.timeout_ns == GAP_NS - 10 * SECOND
    assert world.sleep(20.2) == []
    said = world.sleep(0.2)
    assert said[:2] == [CancelHalf(R, 2, P), CancelHalf(R, 2, D)]
    assert cause_of(said) is RouteCause.CONNECTION_LOST


def test_a_stream_that_was_silent_for_too_long_ends() -> None:
    world = World()
    streaming(world)
    assert cause_of(world.tell(failed(failure=HalfFailure.STALLED, silent_s=30))) is RouteCause.DEADLINE_EXCEEDED


def test_who_was_ended_by_name_is_not_gone_on_with() -> None:
    world = World()
    streaming(world)
    world.tell(AbortAsked(R))
    assert cause_of(world.tell(failed())) is RouteCause.CONNECTION_LOST
    world = World()
    streaming(world)
    world.tell(failed())
    world.tell(AbortAsked(R))
    assert cause_of(world.tell(broken(P, 2))) is RouteCause.ABORTED


@pytest.mark.parametrize("half", [P, D])
@pytest.mark.parametrize("status", [499, 503])
def test_who_is_ended_by_name_at_the_other_decode_ends_with_an_error_of_the_stream(half: Side, status: int) -> None:
    """Its client reads a stream, to which the answer of a refusal is nothing."""
    world = World()
    streaming(world)
    world.tell(failed())
    world.tell(AbortAsked(R))
    assert cause_of(world.tell(HalfRejected(R, 2, half, status))) is RouteCause.ABORTED


def test_a_snapshot_between_loss_and_resumption_goes_on_alike() -> None:
    world = World()
    streaming(world)
    world.tell(failed())
    world.router.restore(world.router.snapshot())
    assert world.tell(HalfAnswered(R, 2, P), DecodeSpoke(R, 2, is_resumable=True)) == [Forward(R, 2, resumes=True)]


@pytest.mark.parametrize("found", [ProbeResult.MISSED, ProbeResult.STALLED])
def test_a_stream_of_a_decode_that_is_not_well_counts_as_broken_where_it_says_nothing(found: ProbeResult) -> None:
    world = World()
    first = world.ask(streams=True)
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), DecodeSpoke(R, 1, is_resumable=True))
    world.found[first.pair.decode.id] = found
    said = world.sleep(12)
    wanted = BreakHalf(R, 1, D, Nanos(10 * SECOND), "does not answer")
    assert len(said) > 1, "it may have said something a moment before: so it is asked for again"
    assert all(command == wanted for command in said)
    second = only_dispatch(world.tell(failed(silent_s=11)))
    assert (second.resumes, second.pair.decode.id) == (True, 5 - first.pair.decode.id)


@pytest.mark.parametrize(
    ("decodes", "is_resumable", "found"),
    [(1, True, ProbeResult.STALLED), (2, False, ProbeResult.STALLED), (2, True, ProbeResult.DECLINED)],
)
def test_a_stream_that_nobody_would_go_on_with_or_whose_decode_drains_is_left_alone(
    decodes: int, is_resumable: bool, found: ProbeResult
) -> None:
    world = World(2, decodes)
    streaming(world, is_resumable=is_resumable)
    world.found |= {worker.id: found for worker in world.workers[2:3]}
    assert world.sleep(12) == []
