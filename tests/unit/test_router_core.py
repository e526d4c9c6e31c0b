"""The pair machine and the router as a dialogue, and what holds for any course of events."""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.router.messages import (
    AbortAsked,
    CancelHalf,
    ClientAsked,
    ClientLeft,
    DecodeSpoke,
    DispatchPair,
    Fail,
    Finish,
    Forward,
    ForwardRejection,
    HalfAnswered,
    HalfEnded,
    HalfEvent,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    Probe,
    RouteCause,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerProbed,
)
from tandem.core.router.routed_request import RequestSettings
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.routing import POLICIES, PolicySettings
from tandem.core.router.worker_registry import HealthSettings, ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Nanos, RequestId

P, D = Side.PREFILL, Side.DECODE
R = RequestId(1)
TIMEOUT = Nanos(10 * SECOND)
ENDS = (Finish, Fail, ForwardRejection)


class World:
    """A router with workers that answer their probes, and a hand on its clock."""

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        *,
        policy: str = "round_robin",
        retries: int = 3,
        max_active: int = 100,
    ) -> None:
        roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes
        self.workers = [
            RegisteredWorker(WorkerId(i), role, f"http://h{i}", f"h{i}", 8998) for i, role in enumerate(roles)
        ]
        rooms = itertools.count(1)
        self.router = Router(
            self.workers,
            draw=lambda: next(rooms),
            settings=RouterSettings(
                request=RequestSettings(retries=retries),
                health=HealthSettings(interval_ns=Nanos(5 * SECOND)),
                lost_ns=Nanos(30 * SECOND),
                max_active=max_active,
                prefill_policy=PolicySettings(policy),
                decode_policy=PolicySettings(policy),
            ),
            now=Nanos(0),
        )
        self.now = 0
        self.wake_at = 0
        self.mute: set[int] = set()  # workers that leave their probes unanswered
        self.found: dict[int, ProbeResult] = {}  # by probes of workers that are not well
        self.tell()

    def tell(self, *events: RouterEvent) -> list[RouterCommand]:
        """One step; probes are answered at once, so what is returned is about requests only."""
        queue = list(events)
        said: list[RouterCommand] = []
        while True:
            effects = self.router.step(queue, Nanos(self.now))
            assert effects.wake_at >= self.now
            self.wake_at = effects.wake_at
            said += [command for command in effects.commands if not isinstance(command, Probe)]
            probes = [command.worker.id for command in effects.commands if isinstance(command, Probe)]
            answered = [worker for worker in probes if worker not in self.mute]
            queue = [WorkerProbed(worker, self.found.get(worker, ProbeResult.OK)) for worker in answered]
            if not queue:
                return said

    def sleep(self, seconds: float) -> list[RouterCommand]:
        """Let time pass, waking the router exactly when it wants to be woken."""
        until = self.now + round(seconds * SECOND)
        said: list[RouterCommand] = []
        while self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            said += self.tell()
        self.now = until
        return said

    def ask(
        self, request: int = 1, *, num_prompts: int | None = None, streams: bool = False, merges: bool = False
    ) -> DispatchPair:
        (command,) = self.tell(ClientAsked(RequestId(request), num_prompts, TIMEOUT, streams, merges))
        assert isinstance(command, DispatchPair)
        return command


def ends(commands: list[RouterCommand]) -> list[RouterCommand]:
    return [command for command in commands if isinstance(command, ENDS)]


def only_dispatch(commands: list[RouterCommand]) -> DispatchPair:
    (command,) = commands
    assert isinstance(command, DispatchPair)
    return command


def broken(half: Side, attempt: int = 1) -> HalfFailed:
    return HalfFailed(R, attempt, half, HalfFailure.BROKEN, "gone")


def test_both_halves_are_sent_by_one_command_and_decodes_answer_is_forwarded() -> None:
    world = World()
    sent = world.ask()
    assert (sent.pair.prefill.role, sent.pair.decode.role) == (Role.PREFILL, Role.DECODE)
    assert sent.timeout_ns == TIMEOUT
    assert world.tell(HalfAnswered(R, 1, P)) == []
    assert world.tell(HalfEnded(R, 1, P)) == []
    assert world.tell(DecodeSpoke(R, 1)) == [Forward(R, 1)]
    assert world.tell(HalfEnded(R, 1, D)) == [Finish(R)]
    assert world.router.num_active() == world.router.num_live_rooms() == 0


def test_a_prefill_that_still_talks_after_the_answer_is_given_a_while_and_then_closed() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P), DecodeSpoke(R, 1))
    assert world.tell(HalfEnded(R, 1, D)) == []
    assert world.sleep(4.9) == []
    assert world.sleep(0.2) == [CancelHalf(R, 1, P), Finish(R)]


def test_a_failing_prefill_cancels_decode_and_the_retry_has_a_new_room_and_another_pair() -> None:
    world = World()
    first = world.ask()
    assert world.tell(HalfRejected(R, 1, P, 500)) == [CancelHalf(R, 1, D)]
    second = only_dispatch(world.sleep(0.05))
    assert second.attempt == 2
    assert not set(second.pair.rooms) & set(first.pair.rooms)
    assert second.pair.prefill != first.pair.prefill
    assert second.pair.decode != first.pair.decode
    assert second.timeout_ns == TIMEOUT - 50 * MILLISECOND


def test_a_retry_avoids_the_workers_of_the_failed_pair_even_when_it_is_their_turn() -> None:
    world = World()
    first = world.ask(1)
    world.ask(2)  # now it would be their turn again
    world.tell(HalfRejected(R, 1, P, 500))
    second = only_dispatch(world.sleep(0.05))
    assert second.pair.prefill != first.pair.prefill
    assert second.pair.decode != first.pair.decode


def test_an_aborted_request_is_not_tried_again() -> None:
    world = World()
    world.ask()
    assert world.tell(AbortAsked(R)) == []
    cancelled, failed = world.tell(HalfRejected(R, 1, D, 502))
    assert cancelled == CancelHalf(R, 1, P)
    assert isinstance(failed, Fail)
    assert failed.cause is RouteCause.ABORTED
    assert world.router.num_active() == world.router.num_live_rooms() == 0


def test_an_abort_between_two_attempts_ends_the_request_at_once() -> None:
    world = World()
    world.ask()
    world.tell(HalfRejected(R, 1, P, 500))
    (failed,) = world.tell(AbortAsked(R))
    assert isinstance(failed, Fail)
    assert (failed.cause, failed.stage) == (RouteCause.ABORTED, "retry_backoff")


def test_more_requests_than_allowed_are_refused() -> None:
    world = World(max_active=1)
    world.ask(1)
    (failed,) = world.tell(ClientAsked(RequestId(2), None, TIMEOUT))
    assert isinstance(failed, Fail)
    assert failed.cause is RouteCause.QUEUE_FULL
    world.tell(ClientLeft(R))
    world.ask(3)


def test_once_decode_has_its_head_prefill_may_break_as_it_likes() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P), HalfAnswered(R, 1, D))
    assert world.tell(broken(P)) == []
    assert world.tell(DecodeSpoke(R, 1), HalfEnded(R, 1, D)) == [Forward(R, 1), Finish(R)]


def test_a_failing_decode_cancels_prefill() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P))
    assert world.tell(HalfRejected(R, 1, D, 503)) == [CancelHalf(R, 1, P)]


def test_a_pair_without_an_alternative_is_tried_again_with_a_new_room() -> None:
    world = World(1, 1)
    first = world.ask()
    world.tell(HalfRejected(R, 1, D, 500))
    second = only_dispatch(world.sleep(0.05))
    assert second.pair.prefill == first.pair.prefill
    assert second.pair.rooms != first.pair.rooms


def test_after_the_last_retry_the_client_gets_what_the_worker_said() -> None:
    world = World(retries=1)
    world.ask()
    world.tell(HalfRejected(R, 1, D, 500))
    world.sleep(0.05)
    assert world.tell(HalfRejected(R, 2, P, 503)) == [CancelHalf(R, 2, D), ForwardRejection(R, 2, P)]


@pytest.mark.parametrize("half", Side)
@pytest.mark.parametrize(("status", "is_retryable"), [(500, True), (500, None), (502, True), (429, True)])
def test_what_says_that_it_may_be_tried_again_is(half: Side, status: int, is_retryable: bool | None) -> None:
    world = World()
    world.ask()
    assert world.tell(HalfRejected(R, 1, half, status, is_retryable)) == [CancelHalf(R, 1, half.other)]
    assert only_dispatch(world.sleep(0.05)).attempt == 2


@pytest.mark.parametrize("half", Side)
@pytest.mark.parametrize(("status", "is_retryable"), [(500, False), (502, False), (400, False), (400, None)])
def test_what_says_that_it_may_not_be_tried_again_is_the_answer(
    half: Side, status: int, is_retryable: bool | None
) -> None:
    world = World()
    world.ask()
    said = world.tell(HalfRejected(R, 1, half, status, is_retryable))
    assert said == [CancelHalf(R, 1, half.other), ForwardRejection(R, 1, half)]


def test_a_4xx_of_either_half_is_the_answer() -> None:
    for half in Side:
        world = World()
        world.ask()
        assert world.tell(HalfRejected(R, 1, half, 400)) == [CancelHalf(R, 1, half.other), ForwardRejection(R, 1, half)]


def test_a_409_is_the_answer_at_first_but_after_our_own_attempt_it_is_tried_again() -> None:
    world = World()
    world.ask()
    assert ends(world.tell(HalfRejected(R, 1, P, 409))) == [ForwardRejection(R, 1, P)]
    world = World()
    world.ask()
    world.tell(HalfRejected(R, 1, P, 500))
    world.sleep(0.05)
    assert world.tell(HalfRejected(R, 2, P, 409)) == [CancelHalf(R, 2, D)]


def test_after_the_first_byte_nothing_is_retried() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P), DecodeSpoke(R, 1))
    said = world.tell(broken(D))
    assert said[0] == CancelHalf(R, 1, P)
    assert isinstance(said[1], Fail)
    assert (said[1].cause, said[1].stage) == (RouteCause.CONNECTION_LOST, "stream")


def test_after_the_first_byte_prefill_may_break_as_it_likes() -> None:
    world = World()
    world.ask()
    world.tell(DecodeSpoke(R, 1))
    assert world.tell(broken(P)) == []
    assert world.tell(HalfEnded(R, 1, D)) == [Finish(R)]


def test_a_prefill_that_breaks_after_its_head_is_left_for_another_pair_if_there_is_one() -> None:
    world = World(2, 1)
    world.ask()
    world.tell(HalfAnswered(R, 1, P))
    assert world.tell(broken(P)) == [CancelHalf(R, 1, D)]
    world = World(1, 1)
    world.ask()
    world.tell(HalfAnswered(R, 1, P))
    assert world.tell(broken(P)) == []
    assert world.tell(DecodeSpoke(R, 1), HalfEnded(R, 1, D)) == [Forward(R, 1), Finish(R)]


def test_a_refused_connection_takes_the_worker_out_at_once() -> None:
    world = World(1, 1)
    world.ask()
    world.mute.add(1)
    assert world.tell(HalfFailed(R, 1, D, HalfFailure.REFUSED)) == [CancelHalf(R, 1, P)]
    assert not world.router.has_live_pair()
    (failed,) = world.sleep(0.05)
    assert isinstance(failed, Fail)
    assert (failed.cause, failed.detail) == (RouteCause.NO_LIVE_PAIR, "no live decode worker")


def test_without_a_live_pair_a_request_is_refused_at_once() -> None:
    world = World(1, 0)
    (failed,) = world.tell(ClientAsked(R, None, TIMEOUT))
    assert isinstance(failed, Fail)
    assert failed.cause is RouteCause.NO_LIVE_PAIR


def test_the_deadline_names_the_wait_it_cut_and_leaves_workers_a_grace() -> None:
    for heard, stage in (([], "prefill_head"), ([HalfAnswered(R, 1, P)], "decode_head")):
        world = World()
        world.ask()
        world.tell(*heard)
        assert world.sleep(10.29) == []
        said = world.sleep(0.02)
        assert said[:2] == [CancelHalf(R, 1, P), CancelHalf(R, 1, D)]
        assert isinstance(said[2], Fail)
        assert (said[2].cause, said[2].stage) == (RouteCause.DEADLINE_EXCEEDED, stage)
        assert said[2].waited_ns == TIMEOUT + RequestSettings().grace_ns


def test_how_long_a_wait_was_counts_from_its_beginning_and_not_from_that_of_the_request() -> None:
    world = World()
    world.ask()
    world.sleep(3)
    world.tell(HalfAnswered(R, 1, P))
    world.sleep(2)
    world.tell(HalfAnswered(R, 1, D))
    world.sleep(4)
    (failed,) = ends(world.tell(ClientAsked(RequestId(2), None, Nanos(0))))
    assert isinstance(failed, Fail)
    assert (failed.cause, failed.stage, failed.waited_ns) == (RouteCause.DEADLINE_EXCEEDED, "route", 0)
    (failed,) = ends(world.sleep(600))
    assert isinstance(failed, Fail)
    assert (failed.stage, failed.waited_ns) == ("decode_body", RequestSettings().document_ns)


def test_a_broken_half_says_how_long_it_was_waited_for_and_a_stream_since_its_last_piece() -> None:
    for streams, event, waited in (
        (False, HalfFailed(R, 1, D, HalfFailure.BROKEN), Nanos(4 * SECOND)),
        (True, HalfFailed(R, 1, D, HalfFailure.STALLED, silent_ns=Nanos(7)), Nanos(7)),
    ):
        world = World(retries=0)
        world.ask(streams=streams)
        world.tell(*([DecodeSpoke(R, 1)] if streams else []))
        world.sleep(4)
        (failed,) = ends(world.tell(event))
        assert isinstance(failed, Fail)
        assert failed.waited_ns == waited


def test_a_document_may_take_longer_than_the_deadline_once_prefill_has_ended_well() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P))
    world.sleep(5)
    world.tell(HalfEnded(R, 1, P))
    assert world.sleep(599) == []
    (cancelled, failed) = world.sleep(2)
    assert cancelled == CancelHalf(R, 1, D)
    assert isinstance(failed, Fail)


def test_a_stream_or_a_prefill_that_failed_gives_no_time_beyond_the_deadline() -> None:
    for streams, has_error in ((True, False), (False, True)):
        world = World()
        world.ask(streams=streams)
        world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P, has_error))
        assert len(ends(world.sleep(10.31))) == 1


def test_decodes_head_ends_the_deadline() -> None:
    world = World()
    world.ask()
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), HalfAnswered(R, 1, D))
    assert world.sleep(60) == []
    assert world.tell(DecodeSpoke(R, 1), HalfEnded(R, 1, D)) == [Forward(R, 1), Finish(R)]


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("prefill", [[HalfAnswered(R, 1, P)], [HalfAnswered(R, 1, P), HalfEnded(R, 1, P)]])
def test_a_document_of_which_only_the_head_comes_ends(prefill: list[HalfEvent], merges: bool) -> None:
    world = World()
    world.ask(merges=merges)
    world.tell(*prefill, HalfAnswered(R, 1, D))
    (failed,) = ends(world.sleep(600.5))
    assert isinstance(failed, Fail)
    assert (failed.cause, failed.stage) == (RouteCause.DEADLINE_EXCEEDED, "decode_body")


def test_no_retry_begins_when_the_deadline_would_come_first() -> None:
    world = World()
    world.ask()
    world.sleep(9.96)
    assert ends(world.tell(HalfRejected(R, 1, D, 502))) == [ForwardRejection(R, 1, D)]


def test_a_client_that_leaves_closes_both_halves() -> None:
    world = World()
    world.ask()
    assert world.tell(ClientLeft(R)) == [CancelHalf(R, 1, P), CancelHalf(R, 1, D), Finish(R)]
    assert world.tell(ClientLeft(R), DecodeSpoke(R, 1)) == []


def test_a_merged_answer_waits_for_both_bodies() -> None:
    for order in ((P, D), (D, P)):
        world = World()
        world.ask(merges=True)
        world.tell(HalfAnswered(R, 1, P), HalfAnswered(R, 1, D))
        assert world.tell(HalfEnded(R, 1, order[0])) == []
        assert world.tell(HalfEnded(R, 1, order[1])) == [Forward(R, 1, merged=True), Finish(R)]


def test_a_merged_answer_does_not_wait_for_prefill_for_ever() -> None:
    world = World()
    world.ask(merges=True)
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, D))
    (cancelled, failed) = world.sleep(10.01)
    assert cancelled == CancelHalf(R, 1, P)
    assert isinstance(failed, Fail)
    assert failed.stage == "prefill_body"


@pytest.mark.parametrize("lost", [broken(P), HalfRejected(R, 1, P, 500)], ids=["broken", "rejected"])
@pytest.mark.parametrize("decode", [HalfAnswered(R, 1, D), HalfEnded(R, 1, D)], ids=["answered", "ended"])
def test_a_merged_answer_whose_part_of_prefill_is_lost_is_asked_for_again(decode: HalfEvent, lost: HalfEvent) -> None:
    world = World()
    world.ask(merges=True)
    world.tell(decode)
    assert world.tell(lost) == ([CancelHalf(R, 1, D)] if isinstance(decode, HalfAnswered) else [])
    assert only_dispatch(world.sleep(0.05)).attempt == 2


def test_requests_that_wait_for_a_silent_worker_go_elsewhere_when_there_is_another() -> None:
    world = World(2, 1)
    world.mute.add(0)
    world.sleep(8.1)  # the probe of second 5 is missed
    assert world.ask().pair.prefill.id == 0
    said = world.sleep(4)  # and the next one, too
    assert said[:2] == [CancelHalf(R, 1, P), CancelHalf(R, 1, D)]
    assert only_dispatch(said[2:]).pair.prefill.id == 1


def test_requests_that_wait_for_a_silent_worker_stay_when_there_is_no_other() -> None:
    world = World(1, 1)
    world.ask()
    world.mute.add(0)
    assert world.sleep(9.9) == []


def test_an_answer_that_has_begun_is_not_begun_elsewhere_while_its_worker_is_silent() -> None:
    world = World(1, 2)
    decode = world.ask().pair.decode.id
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), DecodeSpoke(R, 1))
    world.mute.add(decode)
    assert world.sleep(30) == []


def test_an_answer_that_a_silent_worker_owes_is_given_up_after_a_while() -> None:
    world = World(1, 1)
    world.ask()
    world.tell(HalfAnswered(R, 1, P), HalfEnded(R, 1, P), DecodeSpoke(R, 1))
    world.mute.add(1)
    assert world.sleep(30) == []
    (cancelled, failed) = world.sleep(15)
    assert cancelled == CancelHalf(R, 1, D)
    assert isinstance(failed, Fail)
    assert failed.cause is RouteCause.CONNECTION_LOST


def test_of_requests_that_have_ended_no_wakes_are_kept_however_far_their_deadlines() -> None:
    world = World(1, 1)
    for number in range(1000):
        request = RequestId(number)
        world.tell(ClientAsked(request, None, Nanos(86_400 * SECOND)))
        world.tell(HalfEnded(request, 1, P), DecodeSpoke(request, 1), HalfEnded(request, 1, D))
        world.now += 1
    assert world.router.num_active() == 0
    empty = World(1, 1)
    assert len(world.router.snapshot()) < len(empty.router.snapshot()) + 2000


def test_a_request_whose_wake_is_among_many_forgotten_ones_has_its_deadline() -> None:
    world = World(1, 1)
    world.ask(1)
    for number in range(2, 500):
        request = RequestId(number)
        world.tell(ClientAsked(request, None, Nanos(86_400 * SECOND)))
        world.tell(ClientLeft(request))
    (failed,) = ends(world.sleep(10.31))
    assert isinstance(failed, Fail)
    assert failed.request == 1


def test_least_load_sees_what_is_under_way() -> None:
    world = World(1, 2, policy="least_load")
    busy = world.ask(1, num_prompts=3).pair.decode.id
    others = [world.ask(number).pair.decode.id for number in (2, 3)]
    assert busy not in others
    assert world.router.load(busy) == 3


def test_a_list_of_prompts_gets_a_room_each() -> None:
    sent = World().ask(num_prompts=3)
    assert len(set(sent.pair.rooms)) == 3
    assert sent.pair.is_batch


@dataclass
class Watched:
    """What an observer of the commands knows of one request."""

    halves: dict[Side, str] = field(default_factory=dict)  # open | head | ended | closed
    attempt: int = 0
    forwarded: bool = False
    forwarded_at: int = 0  # the attempt
    resumable: bool = False  # what is forwarded
    first_attempt: int = 1  # since it was lost
    resumes: int = 0
    ended: int = 0


class Observer:
    """Checks, command by command, what must hold for any course of events."""

    def __init__(self, retries: int) -> None:
        self.requests: dict[int, Watched] = {}
        self.rooms: set[int] = set()
        self.retries = retries

    def see_event(self, event: RouterEvent) -> None:
        if isinstance(event, ClientAsked):
            self.requests[event.request] = Watched()
        if isinstance(event, (ClientAsked, ClientLeft, AbortAsked, WorkerProbed)):
            return
        seen = self.requests[event.request]
        half = D if isinstance(event, DecodeSpoke) else event.half
        if event.attempt != seen.attempt or seen.halves.get(half) not in ("open", "head"):
            return
        if isinstance(event, DecodeSpoke) and not seen.forwarded:
            seen.resumable = event.is_resumable
        states = {HalfAnswered: "head", DecodeSpoke: "head", HalfEnded: "ended"}
        seen.halves[half] = states.get(type(event), "closed")

    def see(self, command: RouterCommand) -> None:
        assert not isinstance(command, Probe)
        seen = self.requests[command.request]
        assert not seen.ended, f"{command} after the end"
        match command:
            case DispatchPair(attempt=attempt, pair=pair, resumes=resumes):
                assert resumes == seen.forwarded, "what follows is asked for, and nothing else once a client has bytes"
                if resumes and not seen.resumes:
                    assert seen.resumable
                    seen.resumes, seen.first_attempt = 1, attempt
                assert attempt == seen.attempt + 1 <= seen.first_attempt + self.retries
                assert not self.is_busy(seen)
                assert not self.rooms & set(pair.rooms), "a retry has new rooms"
                self.rooms |= set(pair.rooms)
                seen.attempt, seen.halves = attempt, {P: "open", D: "open"}
            case CancelHalf(attempt=attempt, half=half):
                assert attempt == seen.attempt
                assert seen.halves[half] in ("open", "head", "closed")
                seen.halves[half] = "closed"
            case Forward(attempt=attempt, resumes=resumes):
                assert attempt == seen.attempt
                assert resumes == seen.forwarded
                assert not resumes or attempt >= seen.first_attempt > 1
                assert seen.forwarded_at != attempt, "twice of one attempt"
                seen.forwarded, seen.forwarded_at = True, attempt
            case Finish() | Fail() | ForwardRejection():
                assert not self.is_busy(seen), "a half is at work after the end"
                if isinstance(command, ForwardRejection):
                    assert not seen.forwarded
                seen.ended += 1

    def is_busy(self, seen: Watched) -> bool:
        return any(state in ("open", "head") for state in seen.halves.values())

    def settle(self) -> None:
        """Between two steps: decode at work without prefill needs a reason; prefill without decode has but one."""
        for seen in self.requests.values():
            if seen.ended or not seen.halves:
                continue
            if seen.halves[P] in ("open", "head"):
                assert seen.halves[D] in ("open", "head", "ended")


def play(seed: int, retries: int) -> None:
    """A random course of events, true and stale ones, then an end in which every open half comes to its end."""
    rng = random.Random(seed)
    world = World(rng.randint(1, 3), rng.randint(1, 3), policy=rng.choice(list(POLICIES)), retries=retries)
    observer = Observer(retries)

    def tell(*events: RouterEvent) -> None:
        for event in events:
            observer.see_event(event)
        look(world.tell(*events))

    def look(commands: list[RouterCommand]) -> None:
        for command in commands:
            observer.see(command)
        observer.settle()

    asked = 0
    kinds = ((False, False), (True, False), (False, True))  # streams, merges
    for _ in range(rng.randint(1, 80)):
        request = RequestId(rng.randint(1, max(asked, 1)))
        attempt = rng.randint(1, observer.requests[request].attempt + 1) if asked else 1
        half = rng.choice((P, D))
        choice = rng.randrange(10)
        if choice == 0 or not asked:
            asked += 1
            batch = rng.choice((None, 1, 2))
            blocks = tuple(bytes((number,)) for number in range(rng.randrange(4)))
            tell(ClientAsked(RequestId(asked), batch, Nanos(rng.randint(1, 5 * SECOND)), *rng.choice(kinds), blocks))
        elif choice == 1:
            tell(ClientLeft(request))
        elif choice == 2:
            tell(HalfAnswered(request, attempt, half))
        elif choice == 3:
            tell(DecodeSpoke(request, attempt, is_resumable=rng.random() < 0.5))
        elif choice == 4:
            tell(HalfEnded(request, attempt, half, has_error=rng.random() < 0.2))
        elif choice == 5 and observer.requests[request].halves.get(half) != "head":
            tell(HalfRejected(request, attempt, half, rng.choice((400, 409, 500, 503))))
        elif choice == 6:
            silent_ns = Nanos(round(rng.choice((0, 1, 40)) * SECOND))
            tell(HalfFailed(request, attempt, half, rng.choice(list(HalfFailure)), silent_ns=silent_ns))
        elif choice == 8:
            tell(AbortAsked(request))
        elif choice in (5, 7):
            world.mute = {worker for worker in range(len(world.workers)) if rng.random() < 0.3}
        else:
            look(world.sleep(rng.choice((0.01, 0.1, 1, 6, 40))))

    for _ in range(retries + 2):
        for request, seen in observer.requests.items():
            tell(*(HalfEnded(RequestId(request), seen.attempt, half) for half in Side))
        look(world.sleep(6))
    assert [request for request, seen in observer.requests.items() if seen.ended != 1] == []
    assert world.router.num_active() == world.router.num_live_rooms() == 0
    assert [world.router.load(worker.id) for worker in world.workers] == [0] * len(world.workers)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), retries=st.integers(0, 3))
def test_every_request_ends_exactly_once_with_nothing_left_behind(seed: int, retries: int) -> None:
    play(seed, retries)


def test_the_same_events_give_the_same_commands() -> None:
    def log() -> list[RouterCommand]:
        world = World()
        said: list[RouterCommand] = []
        for number in range(1, 6):
            said += world.tell(ClientAsked(RequestId(number), None, TIMEOUT))
            said += world.tell(HalfRejected(RequestId(number), 1, P, 500))
        return said + world.sleep(1)

    assert log() == log()
