"""Our router in the world: the production router's core, and around it what its shell does with connections.

A gateway is a place; a crash drops the core and every connection, and the next core knows nothing. What its clients
hear is checked here, at their edge: right tokens, each once, and exactly one end within the deadline.
"""

from dataclasses import dataclass, field
from random import Random

from tandem.core.router.messages import (
    AbortAsked,
    BreakHalf,
    CancelHalf,
    ClientAsked,
    ClientLeft,
    DispatchPair,
    Fail,
    Finish,
    Forward,
    ForwardRejection,
    Probe,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerProbed,
)
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.routing import CACHE_AWARE
from tandem.core.router.sent_prefixes import Blocks
from tandem.core.router.upstream_call import UpstreamCall
from tandem.core.router.worker_registry import HTTP_UNAVAILABLE, ProbeResult, RegisteredWorker, probe_result
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId
from tandem.pagehash import prompt_hashes, root_hash
from tandem.simulator.actors.clients import RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT
from tandem.simulator.actors.model_names import ModelNames, names_of
from tandem.simulator.actors.servers import Server
from tandem.simulator.actors.turnover import Turnover
from tandem.simulator.actors.upstream_calls import HTTP_OK, STALL_NS, Caller, SimulatedConnection, Surroundings
from tandem.simulator.clock import LocalClock
from tandem.simulator.network.http import CONNECT_NS
from tandem.simulator.oracle import Violation
from tandem.simulator.workload import WorkloadRequest

SECRET = b"of a simulated router"
BLOCK_TOKENS = 4
LATE_NS = SECOND  # after the deadline: how late an end may be


@dataclass(slots=True, eq=False)
class Gateway:
    name: str
    world: Surroundings
    settings: RouterSettings
    random: Random
    error_share: float = 0.0  # of what arrives at a server
    turnover: Turnover | None = None  # who takes workers out and puts them back
    model_names: ModelNames | None = None  # None: it asks nobody
    clock: LocalClock = field(default_factory=LocalClock)
    epoch: int = 0
    router: Router | None = None  # None: down
    callers: dict[RequestId, Caller] = field(default_factory=dict)  # whom the core has not ended
    num_waiting: int = 0  # clients that have heard no end
    next_id: int = 0
    wake_at: int | None = None

    # -- lives

    def start(self, clock: LocalClock) -> None:
        """A new core. Rooms of this life are drawn by a stream of its own."""
        self.epoch += 1
        self.clock = clock
        rooms = Random(f"rooms {self.random.getrandbits(64)}")
        self.router = Router(
            self._workers(),
            draw=lambda: rooms.getrandbits(64),
            settings=self.settings,
            now=self.clock.read(self.world.clock.time),
        )
        self.tell()

    def _workers(self) -> list[RegisteredWorker]:
        """All servers that will ever be: who is not there yet joins when it is."""
        paired = [server for server in self.world.servers.values() if server.role is not Role.UNIFIED]
        return [
            RegisteredWorker(
                id=index,  # type: ignore[arg-type]  # a plain number is a WorkerId
                role=server.role,
                url=f"http://{server.name}",
                host=server.name,
                bootstrap_port=BOOTSTRAP_PORT if server.role is Role.PREFILL else None,
            )
            for index, server in enumerate(paired)
        ]

    def crash(self) -> None:
        """Clients see their connections break, and so do the servers, each in its time."""
        self.router, self.wake_at = None, None
        callers, self.callers = self.callers, {}
        for caller in callers.values():
            for connection in caller.connections.values():
                connection.hang_up()
            if not caller.outcome:
                self.end(caller, "gateway lost")

    # -- clients

    def ask(self, ask: WorkloadRequest, exchange: RoutedRequest) -> None:
        """A client's request. Refused while the gateway is down; nothing is asked twice."""
        if self.router is None:
            return
        if self.turnover is not None:
            self.turnover.visit(self)
        self.next_id += 1
        streams = ask.must_finish or self.random.random() < 0.7
        merges = not streams and self.random.random() < 0.3
        deadline = self.world.clock.time + ask.timeout_ns
        exchange.rendered_at = self.world.edge.clocks.seconds(self.name, self.world.clock.time)
        caller = Caller(exchange, RequestId(self.next_id), deadline, streams, merges)
        self.callers[caller.request] = caller
        self.num_waiting += 1
        if ask.leaves_after_ns is not None:
            self.world.clock.after(ask.leaves_after_ns, self.leave, caller, "F13")
        last_end = deadline + self.settings.request.grace_ns + LATE_NS
        self.world.clock.at(last_end, self._look, caller)
        model = None if self.model_names is None else self.model_names.asked(ask)
        timeout_ns = Nanos(ask.timeout_ns)
        self.tell(ClientAsked(caller.request, None, timeout_ns, streams, merges, self._blocks(ask), model))

    def _blocks(self, ask: WorkloadRequest) -> Blocks:
        """Of tokens in place of text."""
        if CACHE_AWARE not in (self.settings.prefill_policy.name, self.settings.decode_policy.name):
            return ()
        root = root_hash(secret=SECRET, tenant=ask.tenant)
        return tuple(prompt_hashes(root, ask.script.prompt, page_size=BLOCK_TOKENS))

    def leave(self, caller: Caller, fault: str) -> None:
        """The client goes away, or ends its request by name and waits for what is said to that."""
        if caller.outcome or self.callers.get(caller.request) is not caller:
            return
        self.world.count(fault)
        if self.random.random() < 0.3:
            for connection in caller.connections.values():
                connection.abort()
            self.tell(AbortAsked(caller.request))
            return
        self.end(caller, "left")
        caller.has_left = True
        self.tell(ClientLeft(caller.request))

    def disconnect(self, share: float) -> None:
        for caller in list(self.callers.values()):
            if self.random.random() < share:
                self.leave(caller, "F18")

    def end(self, caller: Caller, outcome: str) -> None:
        if caller.has_left:
            return
        caller.end(outcome)
        self.num_waiting -= 1
        self.world.edge.last_end_at = self.world.clock.time
        if caller.exchange.ask.must_finish and outcome != "finished":
            raise Violation("L5", f"{caller}: {outcome} after healing")

    def _look(self, caller: Caller) -> None:
        """Whoever streams has its first token, or has heard why not."""
        if caller.streams and not caller.outcome and caller.source is None:
            raise Violation("L1", f"{caller} of {self.name} has heard nothing by its deadline")

    # -- the core

    def tell(self, *events: RouterEvent) -> None:
        """Never called by what a command begins: everything that is begun takes its time."""
        if self.router is None:
            return
        now = self.clock.read(self.world.clock.time)
        try:
            effects = self.router.step(events, now)
        except Exception as error:
            raise Violation("S13", f"{self.name} raised {error!r}") from error
        self.world.log_step(self.name, now, events, effects.commands, effects.wake_at)
        for command in effects.commands:
            self._begin(command)
        wake_at = max(self.clock.when(effects.wake_at), self.world.clock.time + 1)
        if self.wake_at != wake_at:
            self.wake_at = wake_at
            self.world.clock.at(wake_at, self._wake, wake_at, self.epoch)

    def _wake(self, wake_at: int, epoch: int) -> None:
        if self.wake_at == wake_at and self.epoch == epoch:
            self.wake_at = None
            self.tell()

    def _begin(self, command: RouterCommand) -> None:
        if isinstance(command, Probe):
            self._probe(command.worker)
            return
        caller = self.callers.get(command.request)
        if caller is None:
            raise Violation("S12", f"{self.name}: {command} of a request that has ended")
        match command:
            case DispatchPair():
                self._dispatch(caller, command)
            case CancelHalf(half=side):
                caller.connections[side].hang_up()
            case BreakHalf(half=side, silent_ns=silent_ns, detail=detail):
                caller.connections[side].break_off(silent_ns, detail)
            case Forward(resumes=resumes):
                self._forward(caller, resumes)
            case ForwardRejection(half=side):
                self._close(caller, f"rejected {caller.connections[side].upstream.status}")
            case Fail(cause=cause):
                self._close(caller, f"failed {cause}")
            case Finish():
                self._close(caller, "")

    def _dispatch(self, caller: Caller, sent: DispatchPair) -> None:
        for side, worker in ((Side.PREFILL, sent.pair.prefill), (Side.DECODE, sent.pair.decode)):
            upstream = UpstreamCall(sent.request, sent.attempt, side, STALL_NS)
            connection = SimulatedConnection(self, caller, upstream, self.world.servers[worker.host], self.epoch)
            caller.connections[side] = connection
            if sent.resumes:
                connection.num_said, connection.has_all = caller.num_tokens, caller.has_all
            connection.send(sent)

    def _forward(self, caller: Caller, resumes: bool) -> None:
        """From here on the client hears what decode says; what has been said is passed on at once."""
        if resumes is not (caller.source is not None):
            raise Violation("S12", f"{caller}: {'no' if resumes else 'a second'} answer is forwarded")
        caller.give_up_message = ""
        caller.num_resumes += resumes
        caller.source = caller.connections[Side.DECODE]
        caller.source.pass_on(caller.source.tokens)

    def _close(self, caller: Caller, failure: str) -> None:
        """The core's last word. A stream that has been passed on to its end has told the client already."""
        del self.callers[caller.request]
        if caller.outcome:
            return
        failure = failure or caller.give_up_message
        if not failure:
            raise Violation("S12", f"{caller}: its request ends and it hears nothing")
        self.end(caller, failure)

    # -- probes

    def finds_out_ns(self) -> int:
        """How long it may believe what is true no more: until enough probes have been missed, or one has not."""
        health = self.settings.health
        return health.misses * (health.interval_ns + health.probe_timeout_ns) + CONNECT_NS

    def _probe(self, worker: RegisteredWorker) -> None:
        server = self.world.servers[worker.host]
        round_trip_ns = self.world.http.delay_ns() + self.world.http.delay_ns()
        self.world.clock.after(round_trip_ns, self._probe_returns, worker, server, self.epoch)

    def _probe_returns(self, worker: RegisteredWorker, server: Server, epoch: int) -> None:
        """A server that is frozen answers when it goes on; one that cannot be reached does not answer."""
        if self.world.http.network.is_cut(self.name, server.name) or (not server.is_up and server.is_unreachable):
            self.world.clock.after(CONNECT_NS, self._probed, worker, ProbeResult.MISSED, epoch)
            return
        status = None
        if server.is_up:
            status = HTTP_OK if server.is_healthy else HTTP_UNAVAILABLE
        result = ProbeResult.STALLED if status == HTTP_UNAVAILABLE and server.is_stalled else probe_result(status)
        if server.frozen_until > self.world.clock.time:
            self.world.clock.at(server.frozen_until, self._probed, worker, result, epoch)
        else:
            self._probed(worker, result, epoch)

    def _probed(self, worker: RegisteredWorker, result: ProbeResult, epoch: int) -> None:
        if epoch == self.epoch:
            tells = self.model_names is not None and result is ProbeResult.OK
            self.tell(WorkerProbed(worker.id, result, names_of(worker.host) if tells else None))

    # -- faults of servers' edges

    def draw_error(self) -> int | None:
        """The status of a server that has no thread, socket or memory for this request."""
        if not self.error_share or self.world.is_healed or self.random.random() >= self.error_share:
            return None
        self.world.count("F20")
        return self.random.choice((500, 503))
