"""A worker whose requests fail is left alone for a while, tried again one request at a time, and used again."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.router.circuit_breaker import BreakerSettings, BreakerState, CircuitBreaker
from tandem.core.router.messages import (
    ClientAsked,
    DecodeSpoke,
    DispatchPair,
    HalfAnswered,
    HalfEnded,
    HalfEvent,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    Probe,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerProbed,
)
from tandem.core.router.router import Router, RouterSettings, is_well
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId

P, D = Side.PREFILL, Side.DECODE
R = RequestId(1)
SETTINGS = BreakerSettings(failures=3, successes=2, timeout_ns=Nanos(100), window_ns=Nanos(50))
CLOSED, OPEN, HALF_OPEN = BreakerState


def after(*words: str) -> CircuitBreaker:
    """What words like `fail@10` have made of a breaker."""
    breaker = CircuitBreaker(SETTINGS)
    for word in words:
        name, _, at = word.partition("@")
        now = Nanos(int(at))
        match name:
            case "fail":
                breaker.failed(now)
            case "well":
                breaker.succeeded(now)
            case "try":
                assert breaker.allows(now)
                breaker.chosen(now)
            case "back":
                breaker.came_back(now)
            case _:
                raise AssertionError(word)
    return breaker


OPENED = ("fail@1", "fail@2", "fail@3")


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("fail@1", "fail@2"), CLOSED),
        (OPENED, OPEN),
        (("fail@1", "fail@2", "well@3", "fail@4", "fail@5"), CLOSED),  # in a row
        (("fail@1", "fail@2", "fail@51"), CLOSED),  # within the window
        (("fail@1", "fail@2", "fail@51", "fail@51"), OPEN),
        ((*OPENED, "well@4", "well@5"), OPEN),  # news of before
        ((*OPENED, "try@103"), HALF_OPEN),
        ((*OPENED, "try@103", "well@110"), HALF_OPEN),
        ((*OPENED, "try@103", "well@110", "try@110", "well@111"), CLOSED),
        ((*OPENED, "try@103", "well@110", "try@110", "fail@111"), OPEN),
        ((*OPENED, "try@103", "fail@104", "try@204", "well@210"), HALF_OPEN),  # counts anew
        ((*OPENED, "try@103", "well@110", "well@111", "fail@112", "fail@113"), CLOSED),
        ((*OPENED, "back@5", "try@5"), HALF_OPEN),  # another life
        ((*OPENED, "back@5", "well@6", "well@7"), OPEN),  # news of the life before
        ((*OPENED, "try@103", "well@110", "back@111", "try@111", "well@112"), HALF_OPEN),  # counts anew
        (("fail@1", "fail@2", "back@3", "fail@4"), OPEN),  # who dies again and again
    ],
)
def test_what_has_happened_tells_the_state(words: tuple[str, ...], state: BreakerState) -> None:
    assert after(*words).state is state


def test_an_open_one_allows_nothing_until_its_time_and_then_one_at_a_time() -> None:
    breaker = after(*OPENED)
    assert [breaker.allows(Nanos(now)) for now in (3, 102, 103)] == [False, False, True]
    breaker.chosen(Nanos(103))
    assert [breaker.allows(Nanos(now)) for now in (103, 150, 203)] == [False, False, True], "no answer: another one"
    breaker.succeeded(Nanos(150))
    assert breaker.allows(Nanos(150))


@given(st.lists(st.tuples(st.sampled_from(("fail", "well", "choose")), st.integers(0, 60)), max_size=60))
def test_it_never_opens_before_so_many_failures_and_never_stays_open_for_ever(course: list[tuple[str, int]]) -> None:
    breaker, now, in_a_row = CircuitBreaker(SETTINGS), 0, 0
    for name, gap in course:
        now += gap
        if name == "choose":
            if breaker.allows(Nanos(now)):
                breaker.chosen(Nanos(now))
            continue
        was = breaker.state
        in_a_row = in_a_row + 1 if name == "fail" else 0
        (breaker.failed if name == "fail" else breaker.succeeded)(Nanos(now))
        assert breaker.state is not OPEN or was is not CLOSED or in_a_row >= SETTINGS.failures
        assert breaker.allows(Nanos(now + SETTINGS.timeout_ns)), "whoever waits long enough is let through"
        assert len(breaker.failed_at) < SETTINGS.failures


@pytest.mark.parametrize(
    ("event", "well"),
    [
        (HalfFailed(R, 1, P, HalfFailure.REFUSED), False),
        (HalfFailed(R, 1, D, HalfFailure.STALLED), False),
        (HalfRejected(R, 1, D, 500), False),
        (HalfRejected(R, 1, D, 502), None),  # its peer
        (HalfRejected(R, 1, P, 503, True), None),  # its load
        (HalfRejected(R, 1, D, 504), None),  # the client's deadline
        (HalfRejected(R, 1, D, 400), None),
        (HalfAnswered(R, 1, P), None),
        (HalfEnded(R, 1, P), True),
        (HalfEnded(R, 1, P, has_error=True), None),
        (DecodeSpoke(R, 1), True),
    ],
)
def test_only_what_a_worker_itself_does_counts(event: HalfEvent, well: bool | None) -> None:
    assert is_well(event) is well


@dataclass
class Served:
    """A router with one prefill and some decodes, all alive; whoever is in `bad` breaks every connection."""

    num_decodes: int = 2
    breaker: BreakerSettings | None = BreakerSettings(failures=2, successes=1, timeout_ns=Nanos(60 * SECOND))  # noqa: RUF009
    now: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.bad: set[int] = set()
        roles = [Role.PREFILL] + [Role.DECODE] * self.num_decodes
        workers = [RegisteredWorker(WorkerId(i), role, f"http://h{i}", f"h{i}", 8998) for i, role in enumerate(roles)]
        settings = RouterSettings(breaker=self.breaker)
        self.router = Router(workers, draw=iter(range(1, 10_000)).__next__, settings=settings, now=Nanos(0))
        self.tell()

    def tell(self, *events: RouterEvent) -> list[RouterCommand]:
        self.now += 1
        effects = self.router.step(events, Nanos(self.now))
        probes = [WorkerProbed(one.worker.id, ProbeResult.OK) for one in effects.commands if isinstance(one, Probe)]
        return [*effects.commands, *(self.tell(*probes) if probes else [])]

    def ask(self) -> list[int]:
        """To which decodes a request goes, one after the other, until it is answered or given up."""
        self.asked += 1
        request, tried = RequestId(self.asked), []
        commands = self.tell(ClientAsked(request, None, Nanos(20 * SECOND), True))
        while (sent := next((it for it in commands if isinstance(it, DispatchPair)), None)) is not None:
            decode = sent.pair.decode.id
            tried.append(int(decode))
            if decode in self.bad:
                self.tell(HalfFailed(request, sent.attempt, D, HalfFailure.BROKEN))
                self.now += SECOND
                commands = self.tell()
                continue
            self.tell(HalfAnswered(request, sent.attempt, P), DecodeSpoke(request, sent.attempt))
            commands = self.tell(HalfEnded(request, sent.attempt, P), HalfEnded(request, sent.attempt, D))
        return tried

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)
        self.tell()

    def state(self, worker: int) -> BreakerState:
        breaker = self.router.registry.breaker(WorkerId(worker))
        assert breaker is not None
        return breaker.state


def test_a_worker_whose_requests_fail_is_left_alone_though_it_is_alive() -> None:
    served = Served()
    served.bad = {1}
    first = [served.ask() for _ in range(4)]
    assert [tried for tried in first if 1 in tried] == [[1, 2], [1, 2]], "as often as it may fail"
    assert served.state(1) is OPEN
    assert [served.ask() for _ in range(6)] == [[2]] * 6
    assert served.router.is_live(WorkerId(1))


def test_it_is_tried_with_one_request_and_used_again_once_that_goes_well() -> None:
    served = Served()
    served.bad = {1}
    while served.state(1) is CLOSED:
        served.ask()
    served.wait(61)
    tried = [served.ask() for _ in range(3)]
    assert [one for one in tried if 1 in one] == [[1, 2]]
    assert served.state(1) is OPEN
    served.wait(61)
    served.bad = set()
    assert {one for tried in (served.ask() for _ in range(4)) for one in tried} == {1, 2}
    assert served.state(1) is CLOSED


def test_one_that_was_dead_is_tried_as_soon_as_it_lives_again() -> None:
    served = Served()
    served.bad = {1}
    while served.state(1) is CLOSED:
        served.ask()
    served.router.registry.refused(WorkerId(1), Nanos(served.now))
    served.bad = set()
    assert [served.ask() for _ in range(2)] == [[2]] * 2, "not before"
    served.wait(1)
    assert {one for tried in (served.ask() for _ in range(4)) for one in tried} == {1, 2}
    assert served.state(1) is CLOSED


def test_the_last_worker_of_its_role_is_used_whatever_its_breaker_says() -> None:
    served = Served(num_decodes=1)
    served.bad = {1}
    served.ask()
    assert served.state(1) is OPEN
    served.bad = set()
    assert served.ask() == [1]


def test_without_breakers_it_is_tried_every_time_it_is_its_turn() -> None:
    served = Served(breaker=None)
    served.bad = {1}
    assert len([one for one in (served.ask() for _ in range(12)) if 1 in one]) >= 5


def test_news_of_another_attempt_do_not_count() -> None:
    served = Served()
    (sent,) = [it for it in served.tell(ClientAsked(R, None, Nanos(20 * SECOND))) if isinstance(it, DispatchPair)]
    decode = int(sent.pair.decode.id)
    for attempt in (0, 2, 3, 4):
        served.tell(HalfFailed(R, attempt, D, HalfFailure.BROKEN))
    served.tell(HalfFailed(R, 1, D, HalfFailure.BROKEN), HalfFailed(R, 1, D, HalfFailure.BROKEN))
    assert served.state(decode) is CLOSED
