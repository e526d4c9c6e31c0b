"""A whole cluster in virtual time: replicas, network, clients, faults, and the checkers that watch every step.

The nodes are the production `EngineNode`s, untouched; this is another shell around them, with a heap in place of
sockets. A run has a safety phase with faults; then everything is healed, every pair of replicas gets one more request
that has to succeed, and the system has to drain. The first violation ends the run.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any  # what a step was told and wants, only encoded here

import msgspec

from tandem.core.batch import BatchOutcome, BatchPlan, TokenFlag
from tandem.core.commands import (
    AnnounceCleared,
    AnnounceDpRank,
    AnnounceRemoved,
    AnnounceStored,
    AskDpRank,
    CancelPull,
    Command,
    EmitTokens,
    FailRequest,
    FetchPages,
    FinishRequest,
    ForgetRequests,
    FreeWindows,
    GatherLoad,
    LaunchBatch,
    LearnPeer,
    LoadPages,
    LookUpPages,
    PromptsLetIn,
    PublishPages,
    PullPages,
    RenderAgain,
    RevokePages,
    StartRequest,
    StorePages,
    Tell,
    WritePages,
)
from tandem.core.disagg.messages import Message
from tandem.core.events import (
    BatchFailed,
    BatchReturned,
    Event,
    PeerLearned,
    PromptRendered,
    RequestArrived,
    RequestRefused,
)
from tandem.core.kv_parts import KvGrid, KvShard
from tandem.core.rank_load import RankLoad
from tandem.core.request import Request
from tandem.core.scheduler.delayer_sync import DelayerSync, Mail
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, PrefillInfo, Role
from tandem.core.stall_detector import TICKS
from tandem.core.values import MILLISECOND, SECOND, Cause, Cut, Incarnation, Nanos, PageId, RequestId, ShardId
from tandem.simulator.actors.bootstraps import Bootstraps
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.actors.direct import DirectClients
from tandem.simulator.actors.edge import Edge
from tandem.simulator.actors.executor import ALL_VALID, CostModel, MemoryGuard, ShardMemory
from tandem.simulator.actors.gateway import Gateway
from tandem.simulator.actors.linking import link
from tandem.simulator.actors.model_names import ModelNames
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server, rank_names, server_of
from tandem.simulator.actors.transfer import KvStore
from tandem.simulator.actors.turnover import Turnover
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.actors.watchdog import Watchdogs
from tandem.simulator.actors.workers import SimulatedWorker, Workers
from tandem.simulator.checkers import Checkers
from tandem.simulator.clock import Clock, LocalClock
from tandem.simulator.faults.fault_injector import FaultInjector
from tandem.simulator.faults.fault_schedule import FaultSchedule, cast_of
from tandem.simulator.faults.options import ALONE, FIRST_OFF_RECORD, Options, coarsest_grid
from tandem.simulator.network.data_plane_faults import DataPlaneFaults
from tandem.simulator.network.host import Host
from tandem.simulator.network.http import Http
from tandem.simulator.network.links import Network
from tandem.simulator.occurrences import Occurrences
from tandem.simulator.oracle import Violation
from tandem.simulator.renderings import WallClocks
from tandem.simulator.tiers import Tiers
from tandem.simulator.workload import (
    Workload,
    WorkloadRequest,
    enlarge,
    plain_ask,
    repeat_names,
    route_asks,
    show_times,
    want_logprobs,
    want_vectors,
)
from tandem.transfer.protocol import Status

SETTLE_NS = 20 * SECOND  # after the last arrival: how long faults go on
MAX_EVENTS = 1_000_000  # hundreds of times what a seed takes
QUIET_NS = 5 * SECOND  # after the last end: late copies of messages still come
RECOUNT_EVERY = 256
YEAR_NS = 365 * 24 * 3600 * SECOND
MAX_DRIFT_PPM = 200
FROM_THE_EDGE = (RequestArrived, RequestRefused, PromptRendered)  # they come once, behind the worker's tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Half-open ranges of durations, ns. The defaults are a fast host; `STEADY` has no jitter, for traces to read."""

    hop: tuple[int, int] = (5_000, 60_000)  # between the processes of one server
    page_digest: tuple[int, int] = (10_000, 100_000)
    look_up: tuple[int, int] = (MILLISECOND, 20 * MILLISECOND)
    batch_jitter: float = 0.2
    register: tuple[int, int] = (0, 50 * MILLISECOND)
    render: tuple[float, float] = (-1.0, 3.0)  # powers of ten, of 2 ms: mostly short, sometimes so that much happens


STEADY = Timing((10_000, 10_001), (50_000, 50_001), (MILLISECOND, MILLISECOND + 1), 0.0, (0, 1), (0.0, 0.0))

Trace = Callable[[int, Life, tuple[Event, ...], tuple[Command, ...]], None]


@dataclass(slots=True)
class World:
    options: Options
    trace: Trace | None = None
    occurrences: Occurrences | None = None  # None: nobody wants to know what has occurred
    timing: Timing = Timing()
    recount_every: int = RECOUNT_EVERY  # events
    swap_every: int = 0  # replace each node by its own snapshot every so many steps; must change nothing
    clock: Clock = field(default_factory=Clock)
    servers: dict[str, Server] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    gateways: dict[str, Gateway] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    num_events: int = 0
    num_planned: int = 0  # restarts, and the healing, that are still on the clock
    heals_at: int = 0
    quiet_at: int = 0  # when gateways have found out that everything is healed
    is_healed: bool = False
    is_probed: bool = False
    batches_to_fail: int = 0  # the next so many, by order of a scenario

    # Not part of the constructor: one random stream per concern, so that one draw more here moves nothing there.
    grid: KvGrid = field(init=False)  # of the KV of the one model here
    random: Random = field(init=False)
    io_random: Random = field(init=False)
    edge: Edge = field(init=False)
    direct: DirectClients = field(init=False)
    bootstraps: Bootstraps = field(init=False)
    injector: FaultInjector = field(init=False)
    http: Http = field(init=False)
    page_faults: DataPlaneFaults = field(init=False)
    network: Network = field(init=False)
    checkers: Checkers = field(init=False)
    tiers: Tiers = field(init=False)
    watchdogs: Watchdogs = field(init=False)
    log: hashlib.blake2b = field(init=False)
    encoder: msgspec.msgpack.Encoder = field(init=False)

    def __post_init__(self) -> None:
        seed, timing = self.options.seed, self.timing
        self.grid = self.options.grid or coarsest_grid((self.options.prefill.cut, self.options.decode.cut))
        self.random = Random(f"world {seed}")
        self.io_random = Random(f"io {seed}")
        settings = replace(self.options.links)  # healing changes it
        self.network = Network(
            self.clock, Random(f"links {seed}"), settings, self._hear_copy, self._is_unreachable, self.count
        )
        self.http = Http(self.clock, self.network, Random(f"http {seed}"), self.count, self.options.http_breaks)
        self.http.silent_share = self.options.http_silences
        self.page_faults = DataPlaneFaults(self.random, self.options, self.network, timing.page_digest, self.count)
        self.edge = Edge(
            self,
            self.random,
            WallClocks(seed),
            Random(f"rendering {seed}"),
            timing.render,
            Random(f"readers {seed}"),
            self.options.slow_readers,
            refuses=self.options.edge_refuses,
        )
        self.direct = DirectClients(self, self.options, Random(f"router {seed}"), self.random)
        self.bootstraps = Bootstraps(self, Random(f"bootstrap {seed}"), timing.look_up, timing.register)
        self.bootstraps.num_lanes = self.options.bootstrap_lanes
        self.injector = FaultInjector(
            self, self.random, Random(f"hosts {seed}"), Random(f"supervisor {seed}"), self.clock
        )
        self.injector.sizes = Random(f"sizes {seed}") if self.options.resizes else None
        self.checkers = Checkers(self)
        pages = self.checkers.tier_pages
        self.tiers = Tiers(self.options, self.clock, pages, self.push, self.count, lambda: self.is_healed)
        tick_ns = self.options.watchdog_ns // TICKS
        ticked = self.checkers.watchdog_has_ticked
        self.watchdogs = Watchdogs(self.clock, self.servers, tick_ns, ticked, self.edge.see_trouble, self._hangs)
        self.log = hashlib.blake2b(digest_size=16)
        self.encoder = msgspec.msgpack.Encoder()
        self._build()

    # -- setting up

    def _build(self) -> None:
        options = self.options
        for name, role in cast_of(options).servers.items():
            template = options.prefill if role is Role.PREFILL else options.decode
            if role is Role.UNIFIED and options.has_encoder:
                template = msgspec.structs.replace(template, whole_prompts=True, prefix_cache=False)
            info = {Role.PREFILL: options.prefill_info, Role.DECODE: options.decode_info}.get(role, ALONE)
            if "F19" in options.classes and name == "decode-0":
                template = msgspec.structs.replace(template, layout="another layout")
                self.count("F19")
            for fault in ("F11", "F12", "F25"):
                if fault in options.classes:
                    self.count(fault)
            self.add_server(name, role, template, info)
        for name in cast_of(options).gateways:
            self.add_gateway(name)

    def add_server(self, name: str, role: Role, template: NodeSettings, info: PrefillInfo) -> None:
        """With all of its ranks, up from now on."""
        server = self.servers[name] = Server(name, role, info)
        template = msgspec.structs.replace(template, force_query=self.options.force_query)
        for rank_name in rank_names(name, info.dp_size):
            replica = self.replicas[rank_name] = Replica(rank_name, role, template)
            server.places.append(replica)
        server.resize(info.dp_size)
        self.start_server(server)

    def add_replica(self, name: str, role: Role, template: NodeSettings, *, dp_size: int) -> Replica:
        """One rank, up from now on. The first one brings its server. dp_size: of one that is no prefill, whose settings
        do not say it"""
        server_name = server_of(name)
        info = template.prefill_info if role is Role.PREFILL else msgspec.structs.replace(ALONE, dp_size=dp_size)
        server = self.servers.setdefault(server_name, Server(server_name, role, info))
        replica = self.replicas[name] = Replica(name, role, template)
        server.places.append(replica)
        server.ranks.append(replica)
        self.start(replica)
        return replica

    def add_gateway(self, name: str) -> None:
        """Put in when all servers are."""
        options, random = self.options, Random(f"{name} {self.options.seed}")
        turnover = Turnover(Random(f"turnover {name} {options.seed}")) if options.turnover else None
        names = ModelNames(Random(f"models {name} {options.seed}")) if options.names_models else None
        gateway = Gateway(name, self, options.router, random, options.error_heads, turnover, names)
        self.gateways[name] = gateway
        self.start_gateway(gateway)

    def start_gateway(self, gateway: Gateway) -> None:
        gateway.start(self._draw_clock(Incarnation(gateway.name, str(gateway.epoch + 1))))

    def start_server(self, server: Server) -> None:
        """An API process, and a new life of every rank."""
        self._start_edge(server)
        for rank in server.ranks:
            self.start(rank)

    def _start_edge(self, server: Server) -> None:
        clock = self._draw_clock(Incarnation(f"edge of {server.name}", str(server.epoch + 1)))
        server.start(clock, server.ranks[0].template)

    def schedule_all(self) -> None:
        """Clients, faults, and the moment of healing."""
        seed, options = self.options.seed, self.options
        asks = Workload(Random(f"workload {seed}"), options.workload).draw()
        route_asks(
            asks,
            Random(f"ranks {seed}"),
            direct_share=options.direct_share,
            dp_size=options.prefill_info.dp_size,
            lost=options.workload.lost_halves,
            hostility=options.hostility,
        )
        show_times(asks, Random(f"shown times {seed}"), share=options.timed_share, hostility=options.hostility)
        repeat_names(asks, Random(f"names {seed}"), share=options.repeated_names)
        num_tokens = max(each.num_pages * each.page_size for each in (options.prefill, options.decode))
        enlarge(asks, Random(f"misfits {seed}"), share=options.misfits, num_tokens=num_tokens)
        if options.prefill.block_tokens == 1:
            want_logprobs(asks, Random(f"told prompts {seed}"))
        want_vectors(asks, Random(f"vectors {seed}"), is_encoder=options.has_encoder)
        for ask in asks:
            self.edge.num_to_come += 1
            self.clock.at(ask.arrives_at, self._ask, ask)
        self.heals_at = asks[-1].arrives_at + SETTLE_NS
        FaultSchedule(self.injector, Random(f"nemesis {seed}"), options).schedule(self.heals_at)
        self.num_planned += 1
        self.clock.at(self.heals_at, self.injector.heal)

    def _ask(self, ask: WorkloadRequest) -> None:
        self.edge.num_to_come -= 1
        exchange = RoutedRequest(ask, None)
        self.edge.exchanges.append(exchange)
        gateways = list(self.gateways.values())
        if ask.is_direct or not gateways:
            self.direct.ask(ask, exchange)
        else:
            gateways[ask.index % len(gateways)].ask(ask, exchange)

    def start(self, replica: Replica) -> None:
        """A new life: an empty node and empty memory under the next id. It registers by itself."""
        if self.is_healed:  # who spoke with the last one may find out by its silence only
            heartbeat = self.options.heartbeat
            noticed_ns = heartbeat.silence_ns(heartbeat.interval_ns) + QUIET_NS
            self.quiet_at = max(self.quiet_at, self.clock.time + noticed_ns)
        server = self.servers[server_of(replica.name)]
        if not server.is_up:
            self._start_edge(server)
        if replica.life is not None:
            self.network.die(replica.life.host, with_host=False)
        replica.epoch += 1
        incarnation = Incarnation(replica.name, str(replica.epoch))
        settings = msgspec.structs.replace(replica.template, role=replica.role, incarnation=incarnation)
        kv = [KvShard(self.grid, settings.cut, shard, cell_bytes=1) for shard in settings.shards]
        workers = Workers(
            kv,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            block_tokens=settings.block_tokens,
            window_tokens=settings.windows.tokens if settings.windows is not None else 0,
            guard=self._guard_of(replica),
            seed=f"{self.options.seed} {incarnation.name} {incarnation.id}",
        )
        local_clock = self._draw_clock(incarnation)
        life = Life(
            replica,
            incarnation,
            settings,
            EngineNode(settings),
            workers,
            self._new_store(incarnation, kv, workers.memories),
            CostModel(jitter=self.timing.batch_jitter),
            Host(replica.name, self.clock, local_clock, self.network, lambda: replica.paused_until),
            self.grid,
            local_clock,
        )
        life.node.step((), local_clock.read(self.clock.time))
        life.store.emit = lambda event: self.push(life, event)
        link(
            life,
            self.options,
            self.network,
            list(self.replicas).index(replica.name),
            lambda event: self.push(life, event),
        )
        self.tiers.add_to(life)
        replica.life = life
        if replica.role is Role.PREFILL:
            self.bootstraps.register(life)
        else:
            self.edge.see_start(life)

    def _draw_clock(self, incarnation: Incarnation) -> LocalClock:
        """A clock that nobody else has: a time that leaves its node is years off for everybody else."""
        if "F10" not in self.options.classes:
            return LocalClock()
        self.count("F10")
        random = Random(f"clock {self.options.seed} {incarnation.name} {incarnation.id}")
        return LocalClock(random.randrange(YEAR_NS, 100 * YEAR_NS), random.randrange(-MAX_DRIFT_PPM, MAX_DRIFT_PPM + 1))

    def cut_of(self, who: Incarnation) -> Cut | None:
        """None: of whom nobody knows anything."""
        replica = self.replicas.get(who.name)
        return replica.template.cut if replica is not None else None

    def _new_store(self, incarnation: Incarnation, kv: list[KvShard], memories: list[ShardMemory]) -> KvStore:
        random = Random(f"store {self.options.seed} {incarnation.name} {incarnation.id}")
        return KvStore(
            incarnation,
            kv,
            memories,
            self.clock,
            random,
            self.page_faults,
            self.checkers,
            lambda event: None,
            lambda peer: self.cut_of(peer) or Cut(),
            self.find_store,
        )

    def _guard_of(self, replica: Replica) -> MemoryGuard:
        def guard(request: RequestId, table: list[PageId], first_written: int, num_used: int) -> None:
            if replica.life is not None:
                self.checkers.memory_is_used(replica.life, request, table, first_written, num_used)

        return guard

    # -- running

    def run(self, until_ns: int | None = None) -> None:
        """To the end of the seed, or until a moment of virtual time. Raises `Violation`."""
        edge, recount_every = self.edge, self.recount_every
        for _ in self.clock.run(until_ns):
            self.num_events += 1
            if self.num_events % recount_every == 0:
                self.checkers.recount()
                if self.num_events > MAX_EVENTS:
                    raise Violation("W2", f"{self.num_events} events, and it goes on for ever")
            if edge.num_open == 0 and self._is_over():
                break
        else:
            if self.clock.next_time() is not None:
                return
        self.checkers.at_idle()

    def _is_over(self) -> bool:
        """Drained twice: after healing, and once more after every pair has had its probe."""
        if not self.is_healed or self.num_planned or self.edge.num_to_come:
            return False
        if self.clock.time < max(self.edge.last_end_at + QUIET_NS, self.quiet_at):
            return False
        lives = [replica.life for replica in self.replicas.values() if replica.life is not None]
        if any(life.store.is_busy() or life.is_copying for life in lives):
            return False
        if not self.is_probed:
            self.is_probed = True
            if "F19" not in self.options.classes:
                self.probe_all()
            return False
        return True

    def push(self, life: Life, event: Event) -> None:
        """An event for a node; its driver drains the inbox a little later. Who a server is comes with a connection to
        it, and never alone."""
        self._deliver(life, event)
        copies = self.options.event_copies
        if not copies or self.is_healed or isinstance(event, FROM_THE_EDGE):
            return
        if self.random.random() < copies and not isinstance(event, PeerLearned):
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
            life.is_step_due = True
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
        now = life.local_clock.read(self.clock.time)
        life.num_steps += 1
        if self.swap_every and life.num_steps % self.swap_every == 0:
            life.node = restored(life)
        try:
            effects = life.node.step(events, now)
        except Exception as error:
            if self.trace is not None:
                self.trace(self.clock.time, life, events, ())
            raise Violation("S13", f"{life.replica.name} raised {describe_error(error)}") from error
        self.checkers.compare_with_twin(life, events, now, effects)
        self.log_step(life.replica.name, now, events, effects.commands, effects.wake_at)
        if self.trace is not None:
            self.trace(self.clock.time, life, events, effects.commands)
        if self.occurrences is not None:
            self.occurrences.see_transfers(life.node)
        wake_at = effects.wake_at
        return effects.commands, life.local_clock.when(wake_at) if wake_at is not None else None

    def log_step(self, name: str, now: Nanos, events: Any, commands: Any, wake_at: int | None) -> None:
        self.log.update(self.encoder.encode((now, name, events, commands, wake_at)))
        if self.occurrences is not None:
            self.occurrences.see_step(events, commands)

    def _sleep(self, life: Life, wake_at: int | None) -> None:
        """Until then, unless something comes. Who was to wake then before still is: that is on the clock."""
        before, life.wake_at = life.wake_at, wake_at
        if wake_at is not None and (wake_at != before or wake_at <= self.clock.time):
            self.clock.at(max(wake_at, self.clock.time + 1), self._wake, life, wake_at)

    def _wake(self, life: Life, wake_at: int) -> None:
        if life.wake_at == wake_at and not life.is_step_due:
            life.wake_at = None
            self._step(life)

    # -- what nodes ask for

    def _dispatch(self, life: Life, command: Command) -> None:
        match command:
            case LaunchBatch(plan):
                life.workers.tell(plan)
                self._work(life)
                self.watchdogs.watch(life)
            case ForgetRequests(requests):
                life.workers.tell(requests)
                self._work(life)
            case EmitTokens(requests, tokens, _):
                self.edge.see_tokens(life, requests, tokens)
            case FinishRequest() | FailRequest():
                self.edge.see_end(life, command)
            case Tell(peer, message):
                if not self.io_fails():
                    self.network.send(life.host, life.incarnation, peer, message)
            case RenderAgain(request, rendered_at):
                self.edge.render_again(life.halves[request], rendered_at)
            case StartRequest() | PromptsLetIn() | AnnounceStored() | AnnounceRemoved() | AnnounceCleared():
                pass
            case LearnPeer() | AskDpRank():
                self.bootstraps.ask(life, command)
            case AnnounceDpRank():
                self._announce(life, command)
            case GatherLoad(number, load):
                self._gather(life, number, load)
            case PublishPages():
                life.store.publish(command, failing=self._failing_shard(life))
            case RevokePages():
                life.store.revoke(command)
            case PullPages():
                life.store.pull(command, failing=self._failing_shard(life))
            case CancelPull():
                life.store.cancel(command)
            case FreeWindows(pages):
                life.workers.free_windows(pages)
            case StorePages() | LoadPages():
                assert life.tier is not None, "a node without host memory asks for a copy"
                life.tier.begin(command)
            case LookUpPages() | FetchPages() | WritePages():
                assert life.storage is not None, "a node without storage asks for something of it"
                life.storage.begin(command)

    def io_fails(self) -> bool:
        """A socket without room, a device without memory."""
        rate = 0.0 if self.is_healed else self.options.io_failure
        if not rate or self.io_random.random() >= rate:
            return False
        self.count("F20")
        return True

    def _failing_shard(self, life: Life) -> ShardId | None:
        return ShardId(self.io_random.randrange(len(life.settings.shards))) if self.io_fails() else None

    def _announce(self, life: Life, command: AnnounceDpRank) -> None:
        if not self.io_fails():
            self.bootstraps.announce(life, command)

    def _gather(self, life: Life, number: int | None, load: RankLoad) -> None:
        """The ranks of a server decide together; their loads meet at its API process."""
        server = self.servers[server_of(life.replica.name)]
        if server.gathering is None:
            return
        gathering = server.gathering
        now = server.clock.read(self.clock.time)
        self._mail(server, gathering.say(life.settings.dp_rank, number, load, now))
        if gathering.closes_at is not None:
            self.clock.at(server.clock.when(gathering.closes_at), self._tick, server, gathering)

    def _tick(self, server: Server, gathering: DelayerSync) -> None:
        if server.gathering is gathering:
            self._mail(server, gathering.tick(server.clock.read(self.clock.time)))

    def _mail(self, server: Server, mail: Mail) -> None:
        for rank, event in mail:
            life = server.ranks[rank].life
            if life is not None:
                self.push(life, event)

    def _work(self, life: Life) -> None:
        """Give every worker its next batch that has none."""
        for worker in life.workers.all:
            plan = life.workers.next_batch(worker) if worker.work else None
            if plan is not None:
                num_decode_rows = len(worker.executor.tables.members(plan)) + len(plan.join)
                life.cost.slowdown = life.replica.slowdown
                random = self.random if worker is life.workers.sampling else worker.random
                duration_ns = life.cost.batch_ns(plan, num_decode_rows, random)
                self.clock.after(duration_ns, self._finish_batch, life, worker, plan)

    def _finish_batch(self, life: Life, worker: SimulatedWorker, plan: BatchPlan) -> None:
        if not life.is_alive or life.store.dead:
            return  # with a worker that is dead nobody ends a batch
        if life.vitals.hang in (Hang.WORKER, Hang.BATCH):
            worker.held = plan
            return
        fails, invalid = self._draw_failure(life, plan) if worker is life.workers.sampling else (False, ALL_VALID)
        if fails:
            worker.executor.break_off(plan)
            worker.is_working = False
            self.push(life, BatchFailed(plan.id, Cause.ENGINE_FAILED, "the forward pass raised"))
        else:
            outcome = life.workers.returned(worker, worker.executor.run(plan, invalid=invalid))
            if outcome is not None:
                self.push(life, BatchReturned(self._timed(life, plan, outcome)))
        self._work(life)

    def _timed(self, life: Life, plan: BatchPlan, outcome: BatchOutcome) -> BatchOutcome:
        """With how long it took, where somebody weighs that: against a load, against waiting, or against what others
        wait. The last not in seeds that were on record before."""
        delayer, is_newer = life.settings.delayer, self.options.seed >= FIRST_OFF_RECORD
        is_weighed = life.tier is not None or (delayer is not None and delayer.tunes_itself)
        if not is_weighed and (life.settings.prefill_stall is None or not is_newer):
            return outcome
        num_tokens = sum(row.stop - row.start for row in plan.rows)
        num_decode_rows = len(life.workers.sampling.executor.tables.members(plan)) if is_newer else 0
        exact = life.cost.base_ns + num_tokens * life.cost.prompt_token_ns + num_decode_rows * life.cost.decode_row_ns
        return msgspec.structs.replace(outcome, duration_ns=Nanos(exact))

    def _draw_failure(self, life: Life, plan: BatchPlan) -> tuple[bool, Mapping[int, int]]:
        """Whether a forward pass raises, and the flags of rows that get no token: logits are not finite, or a grammar
        has grown too large. One of several workers that raises ends its replica: that is `FaultInjector.lose_shard`."""
        fails, invalid = self.batches_to_fail > 0, ALL_VALID
        rate = 0.0 if self.is_healed else self.options.batch_failure
        if rate and self.random.random() < rate:
            self.count("F20")
            fails = self.random.random() < 0.5 and len(life.workers.all) == 1
            why = TokenFlag.OUTGROWN if plan.iteration % 3 == 2 else 0  # nothing is drawn for it
            invalid = {self.random.randrange(4): TokenFlag.INVALID | why}
        if fails:
            self.batches_to_fail = max(0, self.batches_to_fail - 1)
        return fails, invalid

    def worker_goes_on(self, life: Life) -> None:
        """It hangs no more, and begins with what it has been asked meanwhile."""
        life.vitals.echoes = life.vitals.pings
        life.store.thaw()
        for worker in life.workers:
            held, worker.held = worker.held, None
            if held is not None:
                self._finish_batch(life, worker, held)

    def _hangs(self, life: Life) -> None:
        self.checkers.watchdog_fires(life)
        self.injector.end_hanging(life)

    # -- the end

    def probe_all(self) -> None:
        """Every pair, directly; and every gateway has to find one by itself."""
        self.direct.probe_all()
        for index, gateway in enumerate(self.gateways.values()):
            self.edge.num_to_come += 1
            self.clock.after((index + 1) * SECOND, self._probe, gateway)

    def _probe(self, gateway: Gateway) -> None:
        self.edge.num_to_come -= 1
        prompt_len_max = min(20, self.options.workload.prompt_len_max)
        ask = plain_ask(self.io_random, len(self.edge.exchanges), self.clock.time, prompt_len_max)
        ask.shown = self.options.time_of_a_probe(ask.index)
        exchange = RoutedRequest(ask, None)
        self.edge.exchanges.append(exchange)
        gateway.ask(ask, exchange)

    # -- network

    def _hear_copy(self, source: Incarnation, target: Incarnation, message: Message) -> None:
        """A copy has come over; only the life that it was meant for hears it."""
        life = self.find(target)
        if life is not None:
            told = life.hear(source, self.cut_of(source) or Cut(), message)
            assert told is not None, "our own nodes speak about rooms"
            self.push(life, told)

    def _is_unreachable(self, place: str) -> bool:
        return place in self.replicas and self.servers[server_of(place)].is_unreachable

    def find(self, incarnation: Incarnation) -> Life | None:
        replica = self.replicas.get(incarnation.name)
        life = replica.life if replica is not None else None
        return life if life is not None and life.incarnation == incarnation else None

    def find_store(self, incarnation: Incarnation) -> KvStore | Status | None:
        """Of that very life; OTHER_INCARNATION where another one listens in its place, None where nobody does."""
        replica = self.replicas.get(incarnation.name)
        life = replica.life if replica is not None else None
        if life is None:
            return None
        return life.store if life.incarnation == incarnation else Status.OTHER_INCARNATION

    def step_if_due(self, life: Life) -> None:
        if life.is_alive and life.is_step_due:
            self._step(life)

    def watch_deadline(self, life: Life, half: Half) -> None:
        self.checkers.watch_deadline(life, half)

    def edge_refuses(self, server: Server, rank: Replica, request: Request) -> None:
        self.checkers.edge_refuses(server, rank, request)

    def edge_ends(self, server: Server, half: Half | None, terminal: FinishRequest | FailRequest) -> None:
        self.checkers.edge_ends(server, half, terminal)

    def copy_of(self, life: Life) -> EngineNode:
        return restored(life)

    def count(self, fault: str) -> None:
        self.faults[fault] += 1


def restored(life: Life) -> EngineNode:
    node = EngineNode(life.settings)
    node.restore(life.node.snapshot())
    return node


def describe_error(error: Exception) -> str:
    """Type, text, and the innermost line of the product."""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/tandem/" in code.co_filename and "/simulator/" not in code.co_filename:
            where = f" at {code.co_filename.rpartition('/tandem/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}({error}){where}"
