"""What the router has decided is decided again from its record, which holds nothing that a worker has said in words."""

from itertools import count
from pathlib import Path

import pytest

from tandem.core.router.messages import (
    ClientAsked,
    ClientLeft,
    Fail,
    ForwardRejection,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    Probe,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerProbed,
)
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.routing import POLICIES, PolicySettings
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId
from tandem.server.channel import frame
from tandem.server.record_file import StepRaised
from tandem.server.router.last_steps import RouterLastSteps
from tandem.server.router.record import ROUTER, Draws

WORDS = "a prompt that a worker quotes"
WORKERS = [
    RegisteredWorker(WorkerId(number), role, f"http://h{number}", f"h{number}", 8998)
    for number, role in enumerate([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE])
]


class Routed:
    """A router whose last steps are kept, in front of workers that answer every probe."""

    def __init__(self, folder: Path, *, policy: str = "least_load") -> None:
        draws, rooms = Draws(lambda: next(rooms)), count(1000)
        settings = RouterSettings(prefill_policy=PolicySettings(policy), decode_policy=PolicySettings(policy))
        self.router = Router(WORKERS, draw=draws, settings=settings, now=Nanos(0))
        self.kept = RouterLastSteps(self.router, draws, folder, settings=settings)
        self.now = 0
        self.tell()

    def tell(self, *events: RouterEvent) -> list[RouterCommand]:
        self.now += SECOND // 100
        effects = self.kept.step(events, Nanos(self.now))
        probes = [WorkerProbed(one.worker.id, ProbeResult.OK) for one in effects.commands if isinstance(one, Probe)]
        return [*effects.commands, *(self.tell(*probes) if probes else [])]

    def story(self, first: int, number: int) -> None:
        """Requests that break, are tried again, and end."""
        for request in range(first, first + number):
            blocks = tuple(bytes((request // 4, number)) for number in range(request % 4))
            self.tell(ClientAsked(RequestId(request), None, Nanos(5 * SECOND), blocks=blocks))
            self.tell(HalfFailed(RequestId(request), 1, Side.DECODE, HalfFailure.BROKEN, WORDS))
            self.now += SECOND
            self.tell()
            if request % 3 == 0:
                self.tell(ClientLeft(RequestId(request)))
            elif request % 3 == 1:
                self.now += 10 * SECOND
                self.tell()

    def write(self, folder: Path) -> Path:
        assert self.kept.ring is not None
        path = folder / "fault-router-1-1-000000.tandem"
        path.write_bytes(b"".join(map(frame, self.kept.ring.frames())))
        return path


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_step_is_decided_the_same_again(tmp_path: Path, policy: str) -> None:
    routed = Routed(tmp_path, policy=policy)
    routed.story(1, 9)
    result = ROUTER.replay(routed.write(tmp_path))
    assert (result.difference, result.is_cut) == (None, False)
    assert result.steps > 30


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_snapshot_holds_everything(tmp_path: Path, policy: str) -> None:
    """From the middle of a story on: rooms, turns, retries, timers and health go on as they would have."""
    routed = Routed(tmp_path, policy=policy)
    routed.story(1, 8)
    assert routed.kept.ring is not None
    routed.kept.ring.ring.begin_anew()
    routed.story(9, 8)
    head = next(iter(routed.kept.ring.frames()))
    assert head.first_step > 30
    result = ROUTER.replay(routed.write(tmp_path))
    assert result.difference is None


def test_no_words_of_a_worker_are_in_it(tmp_path: Path) -> None:
    routed = Routed(tmp_path)
    routed.tell(ClientAsked(RequestId(1), None, Nanos(5 * SECOND)))
    failed: list[Fail] = []
    for attempt in range(1, 9):
        said = routed.tell(HalfFailed(RequestId(1), attempt, Side.DECODE, HalfFailure.BROKEN, WORDS))
        failed += [command for command in said if isinstance(command, Fail)]
        routed.now += SECOND
        routed.tell()
    assert WORDS in failed[0].detail
    path = routed.write(tmp_path)
    assert WORDS.encode() not in path.read_bytes()
    assert ROUTER.replay(path).difference is None


def test_an_answer_that_is_a_workers_own_fault_leaves_a_record(tmp_path: Path) -> None:
    routed = Routed(tmp_path)
    written: list[str] = []
    routed.kept.write = written.append  # type: ignore[method-assign]  # what it does with a file has a test of its own
    for request, status in ((1, 400), (2, 500)):
        routed.tell(ClientAsked(RequestId(request), None, Nanos(5 * SECOND)))
        said = routed.tell(HalfRejected(RequestId(request), 1, Side.DECODE, status, is_retryable=False))
        assert any(isinstance(command, ForwardRejection) for command in said)
    assert written == ["request 2 has ended with what its decode worker says of itself"]


def test_a_step_that_raises_is_on_record_and_the_router_goes_on(tmp_path: Path) -> None:
    routed = Routed(tmp_path)
    asked = ClientAsked(RequestId(1), None, Nanos(5 * SECOND))
    routed.tell(asked)
    with pytest.raises(AssertionError):
        routed.tell(asked)
    (path,) = tmp_path.iterdir()
    with pytest.raises(StepRaised, match="request ids are used once"):
        ROUTER.replay(path)
    routed.story(2, 3)
    assert ROUTER.replay(routed.write(tmp_path)).difference is None


def test_a_router_that_keeps_nothing_decides_the_same(tmp_path: Path) -> None:
    draws = Draws(lambda: 5)
    router = Router(WORKERS, draw=draws, settings=RouterSettings(), now=Nanos(0))
    kept = RouterLastSteps(router, draws, None, settings=RouterSettings())
    assert kept.ring is None
    assert len(kept.step((), Nanos(1)).commands) == len(WORKERS)
    kept.write_last("nothing happens")
    assert list(tmp_path.iterdir()) == []
