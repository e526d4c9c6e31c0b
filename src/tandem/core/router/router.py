"""The router: a request comes in, a pair is chosen, and whatever goes wrong before the first byte is tried elsewhere.

A deterministic participant like a node: facts in, commands out, no clock and no sockets. What happens within one
request is `routed_request.py`; here is what requests share: who is alive, whose turn it is, which rooms are taken.

    a worker misses its probes     requests that wait for it go to another pair, if there is one
    ... all of them for `lost_ns`  its connections count as broken
    a connection is refused        the worker is dead at once
    requests fail at a worker      it is left alone for a while, where there is another (`circuit_breaker.py`)
    no live pair                   `Fail(NO_LIVE_PAIR)` at once: who calls knows better than we how long to wait
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from tandem.core.router.circuit_breaker import BreakerSettings
from tandem.core.router.messages import (
    AbortAsked,
    ClientAsked,
    ClientLeft,
    DecodeSpoke,
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
    WorkerAdded,
    WorkerProbed,
    WorkerRemoved,
)
from tandem.core.router.pairing import Rooms, WorkerPair
from tandem.core.router.routed_request import Phase, RequestSettings, RoutedRequest
from tandem.core.router.routing import Candidate, PolicySettings, make_policy
from tandem.core.router.worker_registry import (
    Health,
    HealthSettings,
    ProbeResult,
    RegisteredWorker,
    WorkerId,
    WorkerRegistry,
)
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId

IDLE_NS = 60 * SECOND  # without workers there is nothing to wake for
WAKES_MAX = 64  # of requests that have ended, or want to be woken at another time; and `WAKES_EACH` of those under way
WAKES_EACH = 4


class RouterSettings(Struct, frozen=True):
    request: RequestSettings = RequestSettings()
    health: HealthSettings = HealthSettings()
    max_active: int = 4096  # requests under way; more are refused
    lost_ns: Nanos = Nanos(30 * SECOND)  # how long the connections of a silent worker are kept
    prefill_policy: PolicySettings = PolicySettings()
    decode_policy: PolicySettings = PolicySettings()
    breaker: BreakerSettings | None = BreakerSettings()  # of every worker; None: no breakers


class RouterSnapshot(Struct, frozen=True):
    """All that a router knows, beside what it was made with."""

    registry: bytes
    policies: dict[Role, bytes]
    rooms: bytes
    requests: dict[RequestId, RoutedRequest]
    tried: dict[RequestId, list[WorkerPair]]
    load: dict[WorkerId, int]
    wakes: list[tuple[Nanos, RequestId]]
    lost: dict[WorkerId, Nanos]


class RouterEffects(Struct, frozen=True):
    """Commands in the order in which they must begin, and when to call `step` again at the latest."""

    commands: tuple[RouterCommand, ...]
    wake_at: Nanos


class Router:
    """Owns the registry, the rooms and all requests that have not ended."""

    def __init__(
        self,
        workers: Sequence[RegisteredWorker],
        *,
        draw: Callable[[], int],
        settings: RouterSettings,
        now: Nanos,
    ) -> None:
        """`draw` gives 64-bit numbers, for rooms and for policies that need chance."""
        self.registry = WorkerRegistry(workers, settings.health, now, settings.breaker)
        self._policies = {
            Role.PREFILL: make_policy(settings.prefill_policy, draw),
            Role.DECODE: make_policy(settings.decode_policy, draw),
        }
        self._rooms = Rooms(draw)
        self._settings = settings
        self._requests: dict[RequestId, RoutedRequest] = {}
        self._tried: dict[RequestId, list[WorkerPair]] = {}
        self._load: dict[WorkerId, int] = {worker.id: 0 for worker in workers}
        self._wakes: list[tuple[Nanos, RequestId]] = []  # heap; entries of the past are skipped
        self._lost: dict[WorkerId, Nanos] = {}  # since when they were silent whose connections were given up last

    def step(self, events: Sequence[RouterEvent], now: Nanos) -> RouterEffects:
        """Take in what has happened. Never raises for anything that a worker or a client did."""
        commands: list[RouterCommand] = []
        for event in events:
            commands += self._handle(event, now)
        commands += self._probe(now)
        commands += self._give_up_lost(now)
        commands += self._wake(now)
        self._let_leave()
        return RouterEffects(tuple(commands), self._wake_at(now))

    def snapshot(self) -> bytes:
        """Between two steps. What follows depends on it, on events, on time and on the numbers that `draw` gives."""
        return msgspec.msgpack.encode(
            RouterSnapshot(
                self.registry.snapshot(),
                {role: policy.snapshot() for role, policy in self._policies.items()},
                self._rooms.snapshot(),
                self._requests,
                self._tried,
                self._load,
                self._wakes,
                self._lost,
            )
        )

    def restore(self, snapshot: bytes) -> None:
        """Of a router that was made with the same workers and settings."""
        found = msgspec.msgpack.decode(snapshot, type=RouterSnapshot)
        self.registry.restore(found.registry)
        for role, policy in self._policies.items():
            policy.restore(found.policies[role])
        self._rooms.restore(found.rooms)
        self._requests, self._tried = found.requests, found.tried
        self._load, self._wakes, self._lost = found.load, found.wakes, found.lost

    def has_live_pair(self, model: str | None = None) -> bool:
        return bool(self.registry.live(Role.PREFILL, model)) and bool(self.registry.live(Role.DECODE, model))

    def is_live(self, worker: WorkerId) -> bool:
        return self.registry.worker(worker) in self.registry.live(self.registry.worker(worker).role)

    def num_active(self) -> int:
        return len(self._requests)

    def load(self, worker: WorkerId) -> int:
        """Prompts under way there."""
        return self._load.get(worker, 0)

    def num_live_rooms(self) -> int:
        return self._rooms.num_live()

    # --- events ---------------------------------------------------------------------------------------------------

    def _handle(self, event: RouterEvent, now: Nanos) -> list[RouterCommand]:
        match event:
            case ClientAsked():
                return self._ask(event, now)
            case ClientLeft(request=request):
                return self._update(request, RoutedRequest.leave)
            case AbortAsked(request=request):
                return self._update(request, RoutedRequest.abort)
            case WorkerProbed(worker=worker, result=result, models=models, bootstrap_port=port):
                return self._probed(worker, result, now, models, port)
            case WorkerAdded(worker=worker):
                self.registry.add(worker, now)
                self._load[worker.id] = 0
                return []
            case WorkerRemoved(worker=worker):
                self.registry.leave(worker)
                return []
            case _:
                return self._half(event, now)

    def _ask(self, asked: ClientAsked, now: Nanos) -> list[RouterCommand]:
        assert asked.request not in self._requests, "request ids are used once"
        routed = RoutedRequest(
            request=asked.request,
            num_prompts=asked.num_prompts,
            streams=asked.streams,
            merges=asked.merges,
            blocks=asked.blocks,
            model=asked.model,
            deadline=Nanos(now + asked.timeout_ns),
            settings=self._settings.request,
            wake_at=now,
            waits_since=now,
        )
        if len(self._requests) >= self._settings.max_active:
            return routed.fail(RouteCause.QUEUE_FULL, f"{self._settings.max_active} requests are under way")
        self._requests[asked.request] = routed
        self._tried[asked.request] = []
        return self._update(asked.request, lambda e: self._advance(e, now))

    def _half(self, event: HalfEvent, now: Nanos) -> list[RouterCommand]:
        routed = self._requests.get(event.request)
        if routed is not None and routed.pair is not None and event.attempt == routed.attempt:
            half = Side.DECODE if isinstance(event, DecodeSpoke) else event.half
            worker = routed.worker(half).id
            if isinstance(event, HalfFailed) and event.failure is HalfFailure.REFUSED:
                self.registry.refused(worker, now)
            if routed.is_open(half) and (well := is_well(event)) is not None:
                self.registry.answered(worker, now, well=well)
        return self._update(event.request, lambda e: e.handle(event, now, partial(self._has_other, e.model)))

    def _probed(
        self,
        worker: WorkerId,
        result: ProbeResult,
        now: Nanos,
        models: tuple[str, ...] | None = None,
        bootstrap_port: int | None = None,
    ) -> list[RouterCommand]:
        self.registry.probed(worker, result, now, models, bootstrap_port)
        if result is ProbeResult.DECLINED or self.registry.health(worker) is not Health.DEAD:
            return []  # a worker that drains still answers what it has
        return self._each_at(worker, lambda e: e.flee(worker, now, partial(self._has_other, e.model)))

    # --- time -----------------------------------------------------------------------------------------------------

    def _probe(self, now: Nanos) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        for worker in self.registry.overdue(now):
            commands += self._probed(worker, ProbeResult.MISSED, now)
        commands += [Probe(self.registry.worker(worker)) for worker in self.registry.due(now)]
        return commands

    def _give_up_lost(self, now: Nanos) -> list[RouterCommand]:
        """Once per silence: whoever still waits for a worker that has been silent for `lost_ns` waits no more."""
        commands: list[RouterCommand] = []
        for worker, since in self.registry.silent().items():
            if now >= since + self._settings.lost_ns and self._lost.get(worker) != since:
                self._lost[worker] = since
                commands += self._each_at(worker, partial(self._give_up, worker, now))
        return commands

    def _give_up(self, worker: WorkerId, now: Nanos, routed: RoutedRequest) -> list[RouterCommand]:
        return routed.give_up(worker, now, partial(self._has_other, routed.model))

    def _let_leave(self) -> None:
        """Whoever is to leave and has nothing under way has left."""
        for worker in self.registry.leaving():
            if not self._load[worker]:
                self.registry.drop(worker)
                del self._load[worker]
                self._lost.pop(worker, None)

    def _wake(self, now: Nanos) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        while self._wakes and self._wakes[0][0] <= now:
            _, request = heapq.heappop(self._wakes)
            commands += self._update(request, lambda routed: self._advance(routed, now))
        return commands

    def _wake_at(self, now: Nanos) -> Nanos:
        times = [Nanos(now + IDLE_NS) if (probe_at := self.registry.wake_at()) is None else probe_at]
        if self._wakes:
            times.append(self._wakes[0][0])
        for worker, since in self.registry.silent().items():
            if self._lost.get(worker) != since:
                times.append(Nanos(since + self._settings.lost_ns))
        return max(min(times), now)

    # --- requests -------------------------------------------------------------------------------------------------

    def _advance(self, routed: RoutedRequest, now: Nanos) -> list[RouterCommand]:
        if not routed.wants_pair(now):
            return routed.wake(now)
        pair = self._choose(routed, now)
        if pair is None:
            return routed.fail(RouteCause.NO_LIVE_PAIR, self._who_is_missing(routed.model))
        self._tried[routed.request].append(pair)
        return routed.start(pair, now)

    def _update(self, request: RequestId, act: Callable[[RoutedRequest], list[RouterCommand]]) -> list[RouterCommand]:
        """Let the request act, then bring loads, timers and rooms in line with it. Unknown requests have ended."""
        routed = self._requests.get(request)
        if routed is None:
            return []
        wake_before = routed.wake_at
        self._count(routed, -1)
        commands = act(routed)
        self._count(routed, +1)
        if routed.phase is Phase.ENDED:
            self._forget(routed)
        elif routed.wake_at is not None and routed.wake_at != wake_before:
            heapq.heappush(self._wakes, (routed.wake_at, request))
            if len(self._wakes) > WAKES_MAX + WAKES_EACH * len(self._requests):
                self._forget_wakes()
        return commands

    def _forget_wakes(self) -> None:
        """Those that mean nothing any more: clients choose how far in the future they are."""
        self._wakes = sorted((e.wake_at, e.request) for e in self._requests.values() if e.wake_at is not None)

    def _count(self, routed: RoutedRequest, sign: int) -> None:
        for worker in routed.open_workers():
            self._load[worker] += sign * (routed.num_prompts or 1)

    def _forget(self, routed: RoutedRequest) -> None:
        del self._requests[routed.request]
        for pair in self._tried.pop(routed.request):
            self._rooms.close(pair.rooms)

    def _each_at(self, worker: WorkerId, act: Callable[[RoutedRequest], list[RouterCommand]]) -> list[RouterCommand]:
        concerned = [e.request for e in self._requests.values() if e.open_half_at(worker) is not None]
        return [command for request in concerned for command in self._update(request, act)]

    # --- choice ---------------------------------------------------------------------------------------------------

    def _choose(self, routed: RoutedRequest, now: Nanos) -> WorkerPair | None:
        """A live pair with new rooms; workers that this request has not met yet come first."""
        if routed.model is None:
            routed.model = next(iter(self.registry.paired_models()), None)
        if not self.has_live_pair(routed.model):
            return None
        tried = self._tried[routed.request]
        prefill = self._pick(Role.PREFILL, [pair.prefill.id for pair in tried], routed, now)
        decode = self._pick(Role.DECODE, [pair.decode.id for pair in tried], routed, now)
        rooms = self._rooms.open(routed.num_prompts or 1)
        return WorkerPair(prefill, decode, rooms, is_batch=routed.num_prompts is not None)

    def _pick(self, role: Role, tried: Sequence[WorkerId], routed: RoutedRequest, now: Nanos) -> RegisteredWorker:
        usable = self.registry.usable(role, now, routed.model)
        fresh = [worker for worker in usable if worker.id not in tried]
        others = [worker for worker in usable if worker.id not in tried[-1:]]
        candidates = [Candidate(worker.id, self._load[worker.id]) for worker in fresh or others or usable]
        chosen = self._policies[role].choose(candidates, routed.blocks)
        self.registry.chosen(chosen, now)
        return self.registry.worker(chosen)

    def _has_other(self, model: str | None, worker: WorkerId) -> bool:
        """Whether a live pair without this worker exists."""
        role = self.registry.worker(worker).role
        others = [other for other in self.registry.live(role, model) if other.id != worker]
        return bool(others) and self.has_live_pair(model)

    def _who_is_missing(self, model: str | None) -> str:
        missing = [role.value for role in (Role.PREFILL, Role.DECODE) if not self.registry.live(role, model)]
        of_model = "" if model is None else f" of {model}"
        return f"no live {' and no live '.join(missing)} worker{of_model}"


NOT_ITS_FAULT = (502, 503, 504)  # what a worker says of its peer, of its load, and of the client's own deadline


def is_well(event: HalfEvent) -> bool | None:
    """What a half's news say of its worker: it works, it does not, or (None) nothing."""
    match event:
        case HalfFailed(failure=failure):
            return None if failure is HalfFailure.GAVE_UP else False
        case HalfRejected(status=status) if status >= 500 and status not in NOT_ITS_FAULT:
            return False
        case DecodeSpoke():
            return True
        case HalfEnded(half=Side.PREFILL, has_error=False):
            return True
        case _:
            return None
