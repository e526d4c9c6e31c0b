"""A whole cluster in virtual time: replicas, network, clients, faults, and the checkers that watch every step.

The nodes are the production `EngineNode`s, untouched; this is another shell around them, with a heap in place of
sockets. A run has a safety phase with faults; then everything is healed, every pair of replicas gets one more request
that has to succeed, and the system has to drain. The first violation ends the run.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import msgspec

from tandem.core.batch import BatchPlan
from tandem.core.commands import (
    CancelPull,
    Command,
    EmitTokens,
    FailRequest,
    FinishRequest,
    ForgetRequests,
    LaunchBatch,
    LearnPeer,
    PublishPages,
    PullPages,
    RevokePages,
    StartRequest,
    Tell,
)
from tandem.core.events import (
    BatchFailed,
    BatchReturned,
    Event,
    PeerLearned,
    PeerLost,
    PeerSaid,
    PeerUnknown,
    RequestArrived,
)
from tandem.core.pd.messages import Message
from tandem.core.sched.node import EngineNode
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Address, Cause, Incarnation, PageId, RequestId
from tandem.sim.checkers import Checkers
from tandem.sim.clients import Half
from tandem.sim.clock import Clock
from tandem.sim.executor import CostModel, Executor, MemoryGuard, PageMemory
from tandem.sim.faults import Nemesis, Options
from tandem.sim.links import Network
from tandem.sim.oracle import Violation
from tandem.sim.replica import Life, Replica
from tandem.sim.router import Router
from tandem.sim.transfer import KvStore
from tandem.sim.weather import DataWeather
from tandem.sim.workload import Workload

SETTLE_NS = 20 * SECOND  # after the last arrival: how long faults go on
QUIET_NS = 5 * SECOND  # after the last end: late copies of messages still come
RECOUNT_EVERY = 256  # events


@dataclass(frozen=True, slots=True)
class Timing:
    """Half-open ranges of durations, ns. The defaults are a fast host; `STEADY` has no jitter, for traces to read."""

    hop: tuple[int, int] = (5_000, 60_000)  # between the processes of one server
    page_digest: tuple[int, int] = (10_000, 100_000)
    look_up: tuple[int, int] = (MILLISECOND, 20 * MILLISECOND)
    batch_jitter: float = 0.2


STEADY = Timing((10_000, 10_001), (50_000, 50_001), (MILLISECOND, MILLISECOND + 1), 0.0)

Trace = Callable[[int, Life, tuple[Event, ...], tuple[Command, ...]], None]


@dataclass(slots=True)
class World:
    options: Options
    trace: Trace | None = None
    timing: Timing = Timing()
    swap_every: int = 0  # replace each node by its own snapshot every so many steps; must change nothing
    clock: Clock = field(default_factory=Clock)
    replicas: dict[str, Replica] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    num_events: int = 0
    num_planned: int = 0  # restarts, and the healing, that are still on the clock
    is_healed: bool = False
    is_probed: bool = False
    batches_to_fail: int = 0  # the next so many, by order of a scenario

    # Not part of the constructor: one random stream per concern, so that one draw more here moves nothing there.
    random: Random = field(init=False)
    router: Router = field(init=False)
    weather: DataWeather = field(init=False)
    network: Network = field(init=False)
    checkers: Checkers = field(init=False)
    log: hashlib.blake2b = field(init=False)
    encoder: msgspec.msgpack.Encoder = field(init=False)

    def __post_init__(self) -> None:
        seed = self.options.seed
        self.random = Random(f"world {seed}")
        self.router = Router(self, self.options, Random(f"router {seed}"), self.random)
        links = Random(f"links {seed}")
        settings = replace(self.options.links)  # healing changes it
        self.network = Network(self.clock, links, settings, self._arrive, self._lose, self.count)
        self.weather = DataWeather(self.random, self.options, self.network, self.timing.page_digest, self.count)
        self.checkers = Checkers(self)
        self.log = hashlib.blake2b(digest_size=16)
        self.encoder = msgspec.msgpack.Encoder()
        self._build()

    # -- setting up

    def _build(self) -> None:
        options = self.options
        for role, template, count in (
            (Role.PREFILL, options.prefill, options.num_prefills),
            (Role.DECODE, options.decode, options.num_decodes),
            (Role.UNIFIED, options.decode, options.num_unified),
        ):
            for index in range(count):
                replica = Replica(f"{role}-{index}", role, template)
                if "F19" in options.classes and role is Role.DECODE and index == 0:
                    replica.template = msgspec.structs.replace(template, layout="another layout")
                    self.count("F19")
                for name in ("F11", "F12"):
                    if name in options.classes:
                        self.count(name)
                self.replicas[replica.name] = replica
                self.start(replica)

    def schedule_all(self) -> None:
        """Clients, faults, and the moment of healing."""
        seed, options = self.options.seed, self.options
        asks = Workload(Random(f"workload {seed}"), options.workload).draw()
        self.router.expect(asks)
        heal_at = asks[-1].arrives_at + SETTLE_NS
        Nemesis(self, Random(f"nemesis {seed}"), options).schedule(heal_at)
        self.num_planned += 1
        self.clock.at(heal_at, self._heal)

    def start(self, replica: Replica) -> None:
        """A new life: an empty node and empty memory under the next epoch."""
        replica.epoch += 1
        incarnation = Incarnation(replica.name, replica.epoch)
        settings = msgspec.structs.replace(replica.template, role=replica.role, incarnation=incarnation)
        num_shards = len(settings.shards)
        executor = Executor(settings.num_pages, settings.page_size, num_shards, self._guard_of(replica))
        life = Life(
            replica,
            incarnation,
            settings,
            EngineNode(settings),
            executor,
            self._new_store(incarnation, executor.memories),
            CostModel(jitter=self.timing.batch_jitter),
        )
        life.store.emit = lambda event: self.push(life, event)
        replica.life = life

    def _new_store(self, incarnation: Incarnation, memories: list[PageMemory]) -> KvStore:
        random = Random(f"store {self.options.seed} {incarnation.instance} {incarnation.epoch}")
        return KvStore(
            incarnation, memories, self.clock, random, self.weather, self.checkers, lambda event: None, self.find_store
        )

    def _guard_of(self, replica: Replica) -> MemoryGuard:
        def guard(request: RequestId, table: list[PageId], first_written: int, num_used: int) -> None:
            if replica.life is not None:
                self.checkers.memory_is_used(replica.life, request, table, first_written, num_used)

        return guard

    # -- running

    def run(self, until_ns: int | None = None) -> None:
        """To the end of the seed, or until a moment of virtual time. Raises `Violation`."""
        while (next_time := self.clock.next_time()) is not None:
            if until_ns is not None and next_time > until_ns:
                return
            self.clock.run_next()
            self.num_events += 1
            if self.num_events % RECOUNT_EVERY == 0:
                self.checkers.recount()
            if self.router.num_open == 0 and self._is_over():
                break
        self.checkers.at_idle()

    def _is_over(self) -> bool:
        """Drained twice: after healing, and once more after every pair has had its probe."""
        if not self.is_healed or self.num_planned or self.router.num_to_come:
            return False
        if self.clock.time < self.router.last_end_at + QUIET_NS:
            return False
        if any(replica.life is not None and replica.life.store.is_busy() for replica in self.replicas.values()):
            return False
        if not self.is_probed:
            self.is_probed = True
            if "F19" not in self.options.classes:
                self.router.probe_all()
            return False
        return True

    def push(self, life: Life, event: Event) -> None:
        """An event for a node; its driver drains the inbox a little later."""
        self._deliver(life, event)
        copies = 0.0 if self.is_healed or isinstance(event, RequestArrived) else self.options.event_copies
        if copies and self.random.random() < copies:
            self.count("F3")
            self.clock.after(self.random.randrange(SECOND), self._deliver, life, event)

    def _deliver(self, life: Life, event: Event) -> None:
        life.inbox.append(event)
        if not life.is_step_due:
            life.is_step_due = True
            self.clock.after(self.random.randrange(*self.timing.hop), self._step, life)

    def _step(self, life: Life) -> None:
        if not life.is_alive:
            return
        if life.replica.paused_until > self.clock.time:
            self.clock.at(life.replica.paused_until, self._step, life)
            return
        life.is_step_due = False
        events, life.inbox = tuple(life.inbox), []
        commands, wake_at = self._think(life, events)
        self.checkers.after_step(life, events, commands)
        for command in commands:
            self._dispatch(life, command)
        self._sleep(life, wake_at)

    def _think(self, life: Life, events: tuple[Event, ...]) -> tuple[tuple[Command, ...], int | None]:
        now = self.clock.now()
        life.num_steps += 1
        if self.swap_every and life.num_steps % self.swap_every == 0:
            life.node = restored(life)
        try:
            effects = life.node.step(events, now)
        except Exception as error:
            raise Violation("S13", f"{life.replica.name} raised {describe_error(error)}") from error
        self.checkers.compare_with_twin(life, events, now, effects)
        self.log.update(self.encoder.encode((now, life.replica.name, events, effects.commands, effects.wake_at)))
        if self.trace is not None:
            self.trace(now, life, events, effects.commands)
        return effects.commands, effects.wake_at

    def _sleep(self, life: Life, wake_at: int | None) -> None:
        life.wake_at = wake_at
        if wake_at is not None:
            self.clock.at(max(wake_at, self.clock.time + 1), self._wake, life, wake_at)

    def _wake(self, life: Life, wake_at: int) -> None:
        if life.wake_at == wake_at and not life.is_step_due:
            life.wake_at = None
            self._step(life)

    # -- what nodes ask for

    def _dispatch(self, life: Life, command: Command) -> None:
        match command:
            case LaunchBatch(plan):
                life.work.append(plan)
                self._work(life)
            case ForgetRequests(requests):
                life.work.append(requests)
                life.store.forget(requests)
                self._work(life)
            case EmitTokens(requests, _, _):
                for request in requests:
                    self.router.see_token(life, life.halves[request])
            case FinishRequest(request) | FailRequest(request):
                self.router.see_end(life, life.halves[request])
            case StartRequest():
                pass
            case LearnPeer(address):
                self._look_up(life, address)
            case Tell(peer, message):
                self.network.send(life.incarnation, peer, message)
            case PublishPages():
                life.store.publish(command)
            case RevokePages():
                life.store.revoke(command)
            case PullPages():
                life.store.pull(command)
            case CancelPull():
                life.store.cancel(command)

    def _work(self, life: Life) -> None:
        """Give the worker its next batch, if it has none."""
        while life.work and not life.is_working:
            item = life.work.popleft()
            if isinstance(item, BatchPlan):
                life.is_working = True
                num_decode_rows = len(life.executor.decode_set) + len(item.join) if item.decodes else 0
                life.cost.slowdown = life.replica.slowdown
                duration_ns = life.cost.batch_ns(item, num_decode_rows, self.random)
                self.clock.after(duration_ns, self._finish_batch, life, item)
            else:
                life.executor.forget(item)

    def _finish_batch(self, life: Life, plan: BatchPlan) -> None:
        if not life.is_alive:
            return
        life.is_working = False
        invalid: frozenset[int] = frozenset()
        rate = 0.0 if self.is_healed else self.options.batch_failure
        fails = self.batches_to_fail > 0
        if rate and self.random.random() < rate:
            self.count("F20")
            fails = self.random.random() < 0.5
            invalid = frozenset({self.random.randrange(4)})
        if fails:
            self.batches_to_fail = max(0, self.batches_to_fail - 1)
            life.executor.break_off(plan)
            self.push(life, BatchFailed(plan.id, Cause.ENGINE_FAILED, "the forward pass raised"))
        else:
            self.push(life, BatchReturned(life.executor.run(plan, invalid=invalid)))
        self._work(life)

    def _look_up(self, life: Life, address: Address) -> None:
        """The bootstrap server lives and dies with its replica."""
        self.clock.after(self.random.randrange(*self.timing.look_up), self._answer, life, address)

    def _answer(self, life: Life, address: Address) -> None:
        if not life.is_alive:
            return
        replica = self.replicas.get(address.host)
        there = replica.life if replica is not None else None
        if there is None or self.network.is_cut(life.replica.name, address.host):
            self.push(life, PeerUnknown(address, "nobody answers"))
        else:
            self.push(life, PeerLearned(address, there.incarnation, there.settings.layout))

    # -- network

    def _arrive(self, source: Incarnation, target: Incarnation, message: Message) -> None:
        """A message has come over; only the life that it was meant for hears it."""
        life = self.find(target)
        if life is not None:
            self.push(life, PeerSaid(source, message))
            return
        sender = self.find(source)
        if sender is not None:  # the connection is refused, or made by another epoch
            self.clock.after(self.random.randrange(MILLISECOND, SECOND), self._tell_loss, sender, target)

    def _lose(self, name: str, lost: str) -> None:
        """The connection from `name` to `lost` has broken although both live."""
        life, there = self.replicas[name].life, self.replicas[lost].life
        if life is not None and there is not None:
            self.push(life, PeerLost(there.incarnation))

    def _tell_loss(self, life: Life, lost: Incarnation) -> None:
        if life.is_alive and self.find(lost) is None:
            self.push(life, PeerLost(lost))

    def find(self, incarnation: Incarnation) -> Life | None:
        replica = self.replicas.get(incarnation.instance)
        life = replica.life if replica is not None else None
        return life if life is not None and life.incarnation == incarnation else None

    def find_store(self, incarnation: Incarnation) -> KvStore | None:
        life = self.find(incarnation)
        return life.store if life is not None else None

    # -- faults

    def replica_names(self) -> list[str]:
        return list(self.replicas)

    def crash(self, name: str, *, down_ns: int) -> None:
        replica = self.replicas[name]
        life, replica.life = replica.life, None
        if life is None:
            return
        self.count("F6")
        self.network.drop_stalled(name)
        for half in life.halves.values():
            if half.is_open:
                self.router.close(half)
        for other in self.replicas.values():
            if other.life is not None:
                detected_ns = int(3 * SECOND * 10 ** self.random.uniform(-3.0, 0.0))
                self.clock.after(detected_ns, self._tell_loss, other.life, life.incarnation)
        self.num_planned += 1
        self.clock.after(down_ns, self._restart, replica)

    def _restart(self, replica: Replica) -> None:
        self.num_planned -= 1
        if replica.life is None:
            self.start(replica)

    def pause(self, name: str, *, duration_ns: int) -> None:
        replica = self.replicas[name]
        if replica.paused_until > self.clock.time:
            return
        self.count("F8")
        replica.paused_until = self.clock.time + duration_ns
        replica.pauses_ns += duration_ns

    def slow_down(self, name: str, *, factor: float, duration_ns: int) -> None:
        self.count("F9")
        replica = self.replicas[name]
        replica.slowdown = factor
        self.clock.after(duration_ns, self._speed_up, replica)

    def _speed_up(self, replica: Replica) -> None:
        replica.slowdown = 1.0

    def partition(self, source: str, target: str, *, duration_ns: int) -> None:
        if source == target:
            return
        self.count("F5")
        self.network.cut(source, target)
        self.clock.after(duration_ns, self.network.heal, source, target)

    def disconnect(self, share: float) -> None:
        self.router.disconnect(share)

    def swap_for_snapshot(self, name: str) -> None:
        """From here on a restored copy decides beside the original; see `Checkers.compare_with_twin`."""
        life = self.replicas[name].life
        if life is not None and life.twin is None:
            self.count("F22")
            life.twin = restored(life)
            life.twin_steps = 100

    def _heal(self) -> None:
        self.num_planned -= 1
        self.is_healed = self.weather.is_calm = True
        self.network.heal_all()
        for replica in self.replicas.values():
            replica.slowdown = 1.0
            replica.pauses_ns -= max(0, replica.paused_until - self.clock.time)
            replica.paused_until = 0
            if replica.life is None:
                self.start(replica)
            elif replica.life.is_step_due:
                self.clock.after(0, self._step_if_due, replica.life)

    def _step_if_due(self, life: Life) -> None:
        if life.is_alive and life.is_step_due:
            self._step(life)

    def watch_deadline(self, life: Life, half: Half) -> None:
        self.checkers.watch_deadline(life, half)

    def count(self, fault: str) -> None:
        self.faults[fault] += 1


def restored(life: Life) -> EngineNode:
    node = EngineNode(life.settings)
    node.restore(life.node.snapshot())
    return node


def describe_error(error: Exception) -> str:
    """Type, text, and the innermost line of the core."""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/core/" in code.co_filename:
            where = f" at {code.co_filename.rpartition('/tandem/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}({error}){where}"
