"""Workers that come and go while requests are under way."""

import random
from itertools import count
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.router.messages import (
    ClientAsked,
    DecodeSpoke,
    DispatchPair,
    Fail,
    Finish,
    Forward,
    ForwardRejection,
    HalfAnswered,
    HalfEnded,
    HalfFailed,
    HalfFailure,
    Probe,
    RouteCause,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerAdded,
    WorkerProbed,
    WorkerRemoved,
)
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.routing import POLICIES, PolicySettings
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId
from tandem.server.channel import frame
from tandem.server.router.last_steps import RouterLastSteps
from tandem.server.router.record import ROUTER, Draws

P, D = Side.PREFILL, Side.DECODE
ENDS = (Finish, Fail, ForwardRejection)


def worker(number: int, role: Role) -> RegisteredWorker:
    return RegisteredWorker(WorkerId(number), role, f"http://h{number}", f"h{number}", 8998)


class World:
    """A router that starts with a prefill and a decode, whose steps are kept; all workers answer their probes."""

    def __init__(self, policy: str = "least_load", folder: Path | None = None) -> None:
        draws, rooms = Draws(lambda: next(rooms)), count(1)
        named = PolicySettings(policy)
        told = RouterSettings(prefill_policy=named, decode_policy=named)
        first = [worker(0, Role.PREFILL), worker(1, Role.DECODE)]
        self.router = Router(first, draw=draws, settings=told, now=Nanos(0))
        self.kept = RouterLastSteps(self.router, draws, folder, settings=told)
        self.now = 0
        self.ended: list[RequestId] = []
        self.sent: dict[RequestId, DispatchPair] = {}
        self.tell()

    def tell(self, *events: RouterEvent) -> list[RouterCommand]:
        self.now += SECOND // 100
        effects = self.kept.step(events, Nanos(self.now))
        assert effects.wake_at >= self.now
        for command in effects.commands:
            if isinstance(command, DispatchPair):
                assert not {command.pair.prefill.id, command.pair.decode.id} & set(self.router.registry.leaving())
                self.sent[command.request] = command
            elif isinstance(command, ENDS):
                self.ended.append(command.request)
        probes = [WorkerProbed(one.worker.id, ProbeResult.OK) for one in effects.commands if isinstance(one, Probe)]
        return [*effects.commands, *(self.tell(*probes) if probes else [])]

    def ask(self, number: int) -> DispatchPair:
        self.tell(ClientAsked(RequestId(number), None, Nanos(20 * SECOND), True))
        return self.sent[RequestId(number)]

    def answer(self, number: int) -> list[RouterCommand]:
        request, attempt = RequestId(number), self.sent[RequestId(number)].attempt
        self.tell(HalfAnswered(request, attempt, P), DecodeSpoke(request, attempt))
        return self.tell(HalfEnded(request, attempt, P), HalfEnded(request, attempt, D))

    def add(self, role: Role) -> WorkerId:
        new = worker(self.router.registry.next_id, role)
        self.tell(WorkerAdded(new))
        return new.id

    def ids(self) -> list[int]:
        return [int(it.id) for it in self.router.registry.workers()]


def test_a_worker_that_is_added_joins_by_its_first_good_probe_and_is_used() -> None:
    world = World()
    new = world.add(Role.DECODE)
    assert world.router.is_live(new)
    assert {world.ask(number).pair.decode.id for number in (1, 2)} == {1, new}


def test_a_worker_that_leaves_gets_nothing_more_answers_what_it_has_and_is_gone() -> None:
    world = World()
    assert world.ask(1).pair.decode.id == 1
    new = world.add(Role.DECODE)
    world.tell(WorkerRemoved(WorkerId(1)))
    assert [world.ask(number).pair.decode.id for number in (2, 3)] == [new, new]
    assert world.router.load(WorkerId(1)) == 1
    assert world.ids() == [0, 1, new]
    assert [type(it) for it in world.answer(1) if not isinstance(it, Probe)] == [Finish]
    assert world.ids() == [0, new]


def test_an_idle_worker_is_gone_at_once_and_its_number_is_not_used_again() -> None:
    world = World()
    for number in (2, 3, 4):
        assert world.add(Role.DECODE) == number
        world.tell(WorkerRemoved(WorkerId(number)))
        assert world.ids() == [0, 1]


def test_a_request_whose_worker_leaves_and_breaks_goes_to_another() -> None:
    world = World()
    world.ask(1)
    new = world.add(Role.DECODE)
    world.tell(WorkerRemoved(WorkerId(1)), HalfFailed(RequestId(1), 1, D, HalfFailure.BROKEN))
    world.now += SECOND
    world.tell()
    assert world.sent[RequestId(1)].pair.decode.id == new
    assert world.ids() == [0, new]


def test_without_workers_the_router_says_so_and_sleeps() -> None:
    world = World()
    world.tell(WorkerRemoved(WorkerId(0)), WorkerRemoved(WorkerId(1)), WorkerRemoved(WorkerId(7)))
    assert world.ids() == []
    (failed,) = world.tell(ClientAsked(RequestId(1), None, Nanos(SECOND)))
    assert isinstance(failed, Fail)
    assert failed.cause is RouteCause.NO_LIVE_PAIR


def test_late_news_of_a_worker_that_has_left_change_nothing() -> None:
    world = World()
    world.ask(1)
    world.tell(WorkerRemoved(WorkerId(1)))
    world.answer(1)
    world.tell(
        WorkerProbed(WorkerId(1), ProbeResult.MISSED),
        HalfFailed(RequestId(1), 1, D, HalfFailure.REFUSED),
        WorkerRemoved(WorkerId(1)),
    )
    assert world.ids() == [0]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whoever_comes_and_goes_every_request_ends_and_whoever_is_to_go_is_gone(seed: int) -> None:
    rng = random.Random(seed)
    world, asked = World(rng.choice(list(POLICIES))), 0
    for _ in range(rng.randrange(60)):
        number = rng.randrange(asked + 1)
        choice = rng.randrange(6)
        if choice == 0:
            world.add(rng.choice((Role.PREFILL, Role.DECODE)))
        elif choice == 1 and world.ids():
            world.tell(WorkerRemoved(WorkerId(rng.choice(world.ids()))))
        elif choice == 2:
            asked += 1
            world.tell(ClientAsked(RequestId(asked), None, Nanos(20 * SECOND), True))
        elif RequestId(number) in world.sent:
            attempt = world.sent[RequestId(number)].attempt
            if choice == 3:
                world.answer(number)
            else:
                world.tell(HalfFailed(RequestId(number), attempt, rng.choice((P, D)), rng.choice(list(HalfFailure))))
        if rng.random() < 0.2:
            world.now += SECOND
            world.tell()
    for left in world.ids():
        world.tell(WorkerRemoved(WorkerId(left)))
    for _ in range(30):
        world.now += SECOND
        world.tell()
    assert sorted(world.ended) == list(range(1, asked + 1))
    assert (world.ids(), world.router.num_live_rooms()) == ([], 0)


def test_what_was_decided_while_workers_came_and_went_is_decided_again(tmp_path: Path) -> None:
    world = World("cache_aware", tmp_path)
    for number in range(1, 30):
        world.ask(number)
        if number % 5 == 0:
            world.add(Role.DECODE)
        if number % 7 == 0:
            world.tell(WorkerRemoved(WorkerId(world.ids()[1])))
        if number == 15:
            assert world.kept.ring is not None
            world.kept.ring.ring.begin_anew()  # a snapshot in the middle, with one that is leaving
        if number % 3:
            assert any(isinstance(it, (Finish, Forward)) for it in world.answer(number))
    assert world.kept.ring is not None
    path = tmp_path / "fault-router-1-1-000000.tandem"
    path.write_bytes(b"".join(map(frame, world.kept.ring.frames())))
    result = ROUTER.replay(path)
    assert (result.difference, result.is_cut) == (None, False)
    assert result.steps > 20
