"""One seed of a whole cluster, from its first process to the last: start, requests under faults, health, end.

start     all servers, in any order; clients wait until the one they talk to is ready
requests  at drawn moments, by all ways of asking, while faults strike
healed    nothing goes wrong any more: plain requests must get their tokens
visited   every page has its answer, and what nobody answers is refused with the one code that it has
idle      servers are asked what they still hold: nothing
end       SIGTERM: every server ends with exit code 0, and leaves no process behind
"""

import asyncio
import logging
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import chdir, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any  # JSON documents

from tandem.core.settings import NodeSettings
from tandem.core.values import SECOND, Cause
from tandem.membership import ClusterSecret
from tandem.server import worker_storage
from tandem.server.api import model_facts
from tandem.server.node.record import records_at
from tandem.server.processes import Launch
from tandem.server.record_file import BrokenRecord, NothingWritten, StepRaised
from tandem.server.replays import replay_alone
from tandem.server.router.app import CONTROL_SECONDS
from tandem.server.worker_process import Loaded, WorkerPlace
from tandem.simulator.faults.options import FIRST_OFF_RECORD
from tandem.simulator.occurrences import Occurrences
from tandem.simulator.oracle import Violation
from tandem.simulator.report import SeedResult
from tandem.simulator.whole import cluster as servers
from tandem.simulator.whole.clients import (
    CHAT,
    PLAIN_ANSWERS,
    Answer,
    Answers,
    ClientRequest,
    Keys,
    as_of_blocks,
    ask_at,
    draw_ask,
    draw_sampling,
    simple,
)
from tandem.simulator.whole.cluster import PlainModel, Server
from tandem.simulator.whole.collectives import collectives
from tandem.simulator.whole.disk import Disk
from tandem.simulator.whole.engine import PlainEngine, SimulatedEngine
from tandem.simulator.whole.faults import Faults
from tandem.simulator.whole.forms import FormedAsk, Forms
from tandem.simulator.whole.groups import Groups, Reasons
from tandem.simulator.whole.idle import held_by_router, held_by_server, held_open
from tandem.simulator.whole.kernel import START_NS, Deadlock, Kernel, Process
from tandem.simulator.whole.last_visits import Visited, greet_wrongly, visit_all
from tandem.simulator.whole.memory import Memories
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.node_checks import CheckedNode, LettingGo
from tandem.simulator.whole.operators import Stranger, Visitor
from tandem.simulator.whole.options import (
    BOOTSTRAP_PORT,
    ENCODER,
    PLAIN,
    RECORD_FOLDER,
    RING_FOLDER,
    Cluster,
    Options,
    draw_options,
    draw_priority,
    make_cluster,
    name_of,
)
from tandem.simulator.whole.peer_checks import Causes, Punctual
from tandem.simulator.whole.spies import spies
from tandem.simulator.whole.starvation import Starvation, server_of
from tandem.simulator.whole.templates import CLOCK, NONE, put_model, tokenizer
from tandem.simulator.whole.torch_engine import (
    TimedEngine,
    alone,
    folder_of,
    load_engine,
    of_workers,
    one_thread,
    with_torch,
)
from tandem.simulator.whole.transfer_checks import CheckedTransfer, TransferWatch
from tandem.simulator.whole.vectors import VectorAsk
from tandem.simulator.whole.verdict import check
from tandem.simulator.whole.virtual_process import LogLines, Programs, Replacement, virtual_machine
from tandem.transfer import protocol, puller

SECRET = b"a secret of one simulation"
READY_S = 30.0
HEAL_S = 60.0
IDLE_S = 45.0
LAST_VISITS_ONE_IN = 2
CROWD = 6  # strangers who come at once
MIDNIGHT = 1_700_006_400  # UTC; any, for templates that show the time
END_S = 3.0  # nothing runs any more, so nothing has to be waited for
LIMIT_NS = 600 * SECOND  # of virtual time: more than everything above together
CANCELLED = "CancelledError"  # uvicorn, at the end of a drain
BUG_MARKS = ("error of ours", "not caught", "Exception in", "never retrieved", "Task was destroyed")


class World:
    """`run` may be called once."""

    def __init__(self, options: Options, *, watches: bool = False) -> None:
        """watches: for what occurs, which takes longer."""
        self.options = options
        self.keys = Keys(*options.keys)
        self.seen = Occurrences() if watches else None
        self.kernel = Kernel(options.seed)
        self.network = Network(self.kernel, Random(f"network {options.seed}"), tcp_capacity=options.tcp_capacity)
        self.random = Random(f"world {options.seed}")
        self.own_random = Random(f"strangers {options.seed}")
        secret = Path("secret")
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        put_model(options.template, folder_of(options))
        self.cluster: Cluster = make_cluster(options, str(secret))
        self.memories = Memories(self.kernel, Random(f"memory {options.seed}"))
        self.disk = Disk(self.kernel, options.disk, Random(f"disk {options.seed}"))
        self.network.names = {name_of(server.host): [server.host] for server in self.cluster.all_hosts}
        self.forms = Forms(options.flags)
        if options.formed:
            tokenizer().open_vocabulary()  # out here: all seeds share the grammars in it, so its lock is none of theirs
        self.is_plain = options.engine == PLAIN
        self.right: Answers = PLAIN_ANSWERS if self.is_plain else alone(options.flags, folder_of(options))
        self.answers: list[Answer] = []
        self.visitors: list[Process] = []
        self.codes: list[str] = []  # that visitors were told, as `code NAME`
        self.engines: list[SimulatedEngine] = []
        self.violation: Violation | None = None
        self.of_steps: Violation | None = None  # the first that a node's own checkers have found
        self.lines: LogLines | None = None
        self.faults = Faults(
            self.kernel,
            self.network,
            self.cluster,
            options,
            Random(f"faults {options.seed}"),
            self.engines,
            self._abort_all,
            self._crowd,
        )
        self.starvation = Starvation(self.kernel, self.faults, Random(f"starvation {options.seed}"), self.engines)
        self.groups = Groups(self.kernel, self.faults, self._step_is_wrong)
        self.kernel.refuses_threads = self.starvation.refuses_threads
        self.faults.http_ports = {server.port for server in self.cluster.servers}
        bootstraps = {BOOTSTRAP_PORT + number for number in range(options.num_prefills)}
        self.network.http_ports = self.faults.http_ports | bootstraps
        self.network.peer_capacity = options.narrows.peer_capacity
        self.network.pair_capacity = options.narrows.pair_capacity
        self.network.page_delay_ns = options.narrows.page_delay_ns

    def run(self, trace: Callable[[str], None] | None = None) -> SeedResult:
        self.kernel.trace = trace
        looks_both_ways = self.options.vectors == ENCODER
        model = PlainModel(
            base_s=self.options.base_s,
            grid=self.options.grid,
            looks_both_ways=looks_both_ways,
            block_tokens=self.options.block_tokens,
            window_tokens=self.options.window_tokens,
        )
        table = dict(servers.children(model))
        table["tandem.server.worker_process"] = partial(
            servers.worker_process.main, partial(self._load_engine, model=model)
        )
        table["tandem.server.node.process"] = partial(servers.node_process.main, self._make_node)
        watch = TransferWatch(self.kernel, self._step_is_wrong, self._is_held_up, self.memories)
        small = partial(
            CheckedTransfer,
            watch=watch,
            max_transfers=self.options.max_transfers,
            max_links=self.options.max_links,
        )
        instead = [
            (servers.worker_process, "SockTransfer", small),
            *self.memories.replacements(),
            *self._narrowed(),
            *((module, "DiskFolder", self.disk.open) for module in (model_facts, worker_storage)),
            *collectives(),
            *(spies(self.seen) if self.seen else ()),
            *(() if self.is_plain else of_workers(model)),
        ]
        programs = Programs(table, lambda parent: self.starvation.refuses("no_forks", parent))
        reasons = Reasons(self.groups)  # out here: its lock is none of the seed's
        threads = nullcontext() if self.is_plain else one_thread()
        with threads, virtual_machine(self.kernel, self.network, programs, instead) as self.lines:
            logging.getLogger().addHandler(reasons)
            for server in self.random.sample(self.cluster.all_hosts, len(self.cluster.all_hosts)):
                server.start(self.kernel)
            clients = self.kernel.start("clients", self._run_clients, host=self.cluster.client_host)
            try:
                self.kernel.run(START_NS + LIMIT_NS)
                if self.violation is None and self.of_steps is None and clients.error is not None:
                    raise clients.error
                if self.violation is None and self.of_steps is None and clients.is_alive:
                    self.violation = Violation("whole", f"no end within {LIMIT_NS // SECOND} s")
            except Deadlock as error:
                self.violation = Violation("deadlock", str(error))
            except Violation as violation:
                self.violation = violation
            log_hash, now = self.kernel.log.hexdigest(), self.kernel.now
        if isinstance(clients.error, Violation):
            self.violation = clients.error
        self.violation = self.of_steps or self.violation or violation_of_records()
        return self._result(log_hash, now)

    def _narrowed(self) -> list[Replacement]:
        narrows = self.options.narrows
        found: list[Replacement] = []
        if narrows.frame_bytes is not None:
            found.append((protocol, "FRAME_BYTES", narrows.frame_bytes))
        if narrows.read_pages is not None:
            found.append((puller, "MAX_READ_PAGES", narrows.read_pages))
        return found

    def _load_engine(self, launch: Launch, place: WorkerPlace, *, model: PlainModel) -> Loaded:
        process = self.kernel.current().process
        if self.starvation.refuses("no_memory", process):
            raise MemoryError("no memory for a KV pool")
        is_plain = self.is_plain
        loaded = servers.load_plain_engine(launch, place, model=model) if is_plain else load_engine(launch, place)
        engine = loaded.engine
        assert isinstance(engine, PlainEngine | TimedEngine)
        if engine.kv.buffer is not None:
            engine.kv.fd = self.memories.share(engine.kv.buffer)
        if launch.rank.num_shards > 1 or launch.topology.attn_dp_size > 1:
            self.groups.join(launch, engine)
        self.engines.append(engine)
        return loaded

    def _make_node(self, settings: NodeSettings) -> CheckedNode:
        process = self.kernel.current().process
        letting_go = LettingGo(self.kernel, self._step_is_wrong, partial(self._is_held_up, process))
        may_be_spoilt = "corrupt" in self.options.faults
        beside = (
            Causes(process, self.kernel, self.faults.has_cause),
            Punctual(process, self.kernel, self._step_is_wrong, partial(self._is_held_up, process)),
        )
        return CheckedNode(
            settings, process, letting_go, beside, self._step_is_wrong, may_be_spoilt=may_be_spoilt, seen=self.seen
        )

    def _is_held_up(self, process: Process, since_ns: int) -> bool:
        name = server_of(process)
        return self.faults.may_cut_off(name) or self.faults.was_held_up(name, since_ns, self.kernel.now)

    def _step_is_wrong(self, violation: Violation) -> None:
        if self.of_steps is None:
            self.of_steps = violation
            self.kernel.stop()

    def _result(self, log_hash: str, now: int) -> SeedResult:
        answered = sum(answer.is_whole and answer.error is None for answer in self.answers)
        return SeedResult(
            seed=self.options.seed,
            invariant="" if self.violation is None else self.violation.invariant,
            detail="" if self.violation is None else f"{self.violation.detail} ({self.options.describe()})",
            simulated_ns=now - START_NS,
            lived_ns=now - START_NS,
            num_events=self.kernel.num_events,
            num_requests=len(self.answers),
            num_finished=answered,
            faults=dict(self.faults.counts),
            log_hash=log_hash,
            occurred=self._occurred(),
            is_whole=True,
            engine="" if self.is_plain else self.options.engine,
        )

    def _occurred(self) -> dict[str, int]:
        """Codes that anybody has been told, and whatever was watched for."""
        counts = Counter(self.codes) if self.seen is None else self.seen.counts + Counter(self.codes)
        counts.update(f"code {answer.error.get('code')}" for answer in self.answers if answer.error)
        return dict(counts)

    # --- the process of the clients ----------------------------------------------------------------------------------

    def _run_clients(self) -> None:
        try:
            asyncio.run(self._live())
        except Violation as violation:
            self.violation = violation
        finally:
            self.kernel.stop()

    @property
    def _front(self) -> tuple[str, int]:
        return self._address(self.cluster.front)

    def _address(self, server: Server) -> tuple[str, int]:
        return server.host, server.port

    async def _live(self) -> None:
        await self._until(READY_S, "start", self._is_ready)
        spread_ns = int(self.options.spread_s * SECOND)
        self.faults.start(self.kernel.now, self.kernel.now + spread_ns + 2 * SECOND)
        self.starvation.start(self.options.starves, self.kernel.now, self.kernel.now + spread_ns + SECOND)
        for _ in range(self.options.num_visits):
            self.kernel.after(self.random.randrange(1, spread_ns + SECOND), self._send_visitor)
        for _ in range(self.options.narrows.num_strangers):
            self.kernel.after(self.own_random.randrange(1, spread_ns + SECOND), self._send_stranger)
        asks = [
            asyncio.ensure_future(self._ask_later(number, self.random.random() * self.options.spread_s))
            for number in range(1, self.options.num_requests + 1)
        ]
        await asyncio.gather(*asks)
        self.faults.finish()
        while any(visitor.is_alive for visitor in self.visitors):
            await asyncio.sleep(0.05)
        for answer in self.answers:
            check(answer, self.faults)
        await self._heal()
        await self._receive_last_visits()
        await self._knock()
        for server in self.cluster.servers:
            await self._until(IDLE_S, f"{server.name} idle", partial(self._is_idle, server))
        await self._end()
        self._check_logs()

    async def _ask_later(self, number: int, after_s: float) -> None:
        random = Random(f"ask {self.options.seed} {number}")
        options, narrows = self.options, self.options.narrows
        careless = max(options.careless, narrows.careless)
        ask = draw_ask(random, number, careless=careless, timeouts=options.timeouts, lengths=narrows.prompt_lengths)
        form = Random(f"form {self.options.seed} {number}")
        if self.options.vectors:
            ask = VectorAsk.of(ask, Random(f"vector {self.options.seed} {number}"))
        elif form.random() < self.options.formed:
            ask = FormedAsk.of(ask, form)
        ask = replace(ask, priority=draw_priority(options, number))
        await asyncio.sleep(after_s)
        self.answers.append(await self._ask(ask, random))

    async def _ask(self, ask: ClientRequest, random: Random) -> Answer:
        ask = replace(ask, answers=self.right)
        if not self.is_plain and self.options.seed >= FIRST_OFF_RECORD:
            ask = replace(ask, sampling=draw_sampling(Random(f"sampling {self.options.seed} {ask.number}")))
        if self.options.block_tokens > 1:
            ask = as_of_blocks(ask)
        if self.options.template == CLOCK and ask.path == CHAT:
            ask = replace(ask, rendered_at=MIDNIGHT + ask.number)
        if self.options.template == NONE and ask.path == CHAT:
            ask = replace(ask, path="/v1/completions")
        answer = await ask_at(*self._front, ask, random, self.keys)
        if self.forms.matters_for(ask):
            answer.rights = await self.forms.rights(ask)
        return answer

    def _send_visitor(self) -> None:
        server = self.random.choice(self.cluster.servers)
        number = int(server.name[-1]) if server.name.startswith("prefill") else None
        port = 0 if number is None else BOOTSTRAP_PORT + number
        visitor = Visitor(
            server,
            port,
            SECRET,
            Random(self.random.random()),
            self.codes,
            self.faults.has_cause,
            has_keys=self.options.has_keys,
        )
        self.visitors.append(self.kernel.start("visitor", visitor.run, host=server.host))

    def _crowd(self, server: Server, within_ns: int) -> None:
        for _ in range(CROWD if self.options.narrows.num_strangers else 0):
            self.kernel.after(self.own_random.randrange(within_ns), lambda: self._send_stranger(server.host))

    def _send_stranger(self, host: str = "") -> None:
        host = host or self.own_random.choice(self.cluster.servers).host
        stranger = Stranger(self.network, host, Random(self.own_random.random()))
        self.visitors.append(self.kernel.start("stranger", stranger.run, host=host))

    def _abort_all(self) -> None:
        """From outside of the loop: the clients' process does it at its next turn."""
        host, port = self._front

        def run() -> None:
            asking = simple(host, port, "POST", "/abort_request", {"abort_all": True}, key=self.keys.admin)
            asyncio.run(asking)

        self.visitors.append(self.kernel.start("operator", run, host=self.cluster.client_host))

    async def _until(self, limit_s: float, what: str, is_so: Callable[[], Any]) -> None:
        deadline = self.kernel.now + int(limit_s * SECOND)
        why = ""
        while self.kernel.now < deadline:
            why = await is_so()
            if not why:
                return
            await asyncio.sleep(0.25)
        raise Violation("liveness", f"{what}: not within {limit_s:g} s: {why}")

    async def _is_ready(self) -> str:
        """Asked without a key."""
        answer = await simple(*self._front, "GET", "/health" if self.options.layout == "unified" else "/ready")
        return "" if answer is not None and answer.status == 200 else "is not ready"

    async def _heal(self) -> None:
        """Every pair has to be usable again: the first answers may still be errors."""
        await self._until(HEAL_S, "healed", self._is_well)

    async def _is_well(self) -> str:
        for server in self.cluster.servers:
            if trouble := await self._is_serving(server):
                return trouble
        if await self._is_ready():
            return "the router has no pair"
        number = 1000 + len(self.answers)
        random = Random(f"canary {self.options.seed} {number}")
        ask = draw_ask(random, number, careless=0.0, timeouts=(20.0,))
        if self.options.vectors:
            ask = VectorAsk.of(ask, random)
        answer = await self._ask(ask, random)
        self.answers.append(answer)
        check(answer, self.faults)
        return "" if answer.error is None and answer.is_whole else f"{answer.status} {answer.error} {answer.trouble}"

    async def _is_serving(self, server: Server) -> str:
        if server.name in self.faults.ends or not server.is_alive:
            return f"{server.name} is not there"
        answer = await simple(*self._address(server), "GET", "/health")
        return "" if answer is not None and answer.status == 200 else f"{server.name} is not healthy"

    async def _receive_last_visits(self) -> None:
        """Of one server in every other seed, and of the data plane of a prefill."""
        options, random = self.options, Random(f"last visits {self.options.seed}")
        server = random.choice((self.cluster.front, *self.cluster.servers))
        visited = Visited(
            server.name,
            server.port,
            self.keys.admin,
            is_front=server is self.cluster.front,
            is_on_loopback=options.is_one_machine,
            makes_vectors=bool(options.vectors),
            takes_forms=options.block_tokens == 1,
            has_priorities=options.has_priorities,
            takes_hooks=bool(options.flags.get("enable_fault_injection")),
            has_chats=options.template != NONE,
        )
        if self.options.seed % LAST_VISITS_ONE_IN == 0:
            await self._run_at(server, partial(visit_all, visited, self.codes))
        if options.layout == "pairs" and not options.vectors and options.seed >= FIRST_OFF_RECORD:
            await self._until(
                READY_S, "asked in turn", partial(self._is_asked_in_turn, Random(f"in turn {options.seed}"))
            )
        if options.layout == "pairs" and options.template == CLOCK:
            await self._until(
                READY_S, "asked at once", partial(self._is_asked_at_once, Random(f"at once {options.seed}"))
            )
        if options.num_prefills:
            number = random.randrange(options.num_prefills)
            (server,) = (server for server in self.cluster.servers if server.name == f"prefill{number}")
            greeting = partial(greet_wrongly, BOOTSTRAP_PORT + number, ClusterSecret(SECRET), random)
            await self._run_at(server, partial(self._until, READY_S, "all ranks of a prefill", greeting))

    async def _is_asked_in_turn(self, random: Random) -> str:
        """As by routers of vLLM's: a decode with what a prefill has answered."""
        ask, prefill, decode = self._asked_halves(random, "/v1/completions")
        if trouble := await self._is_serving(prefill) or await self._is_serving(decode):
            return trouble
        half = replace(ask, max_new=1, is_streamed=False, routed={"kv_transfer_params": {"do_remote_decode": True}})
        told = await ask_at(*self._address(prefill), half, random, self.keys)
        if told.status != 200:
            return f"{prefill.name} says {told.status} {told.error} {told.trouble}"
        transfer = {"kv_transfer_params": told.events()[0]["kv_transfer_params"]}
        return self._checked(await ask_at(*self._address(decode), replace(ask, routed=transfer), random, self.keys))

    async def _is_asked_at_once(self, random: Random) -> str:
        """As by routers of SGLang's kind whose halves see other times: decode's counts, its tokens are the answer."""
        ask, prefill, decode = self._asked_halves(random, CHAT)
        if trouble := await self._is_serving(prefill) or await self._is_serving(decode):
            return trouble
        port = BOOTSTRAP_PORT + int(prefill.name.removeprefix("prefill"))
        room = {"bootstrap_host": prefill.host, "bootstrap_port": port, "bootstrap_room": random.getrandbits(62) + 1}
        seconds = (MIDNIGHT + random.choice((-1, 0, 3600)), MIDNIGHT)
        told, answer = await asyncio.gather(
            *(
                ask_at(*self._address(server), replace(ask, routed=room, rendered_at=second), random, self.keys)
                for server, second in zip((prefill, decode), seconds, strict=True)
            )
        )
        is_left = (told.error or {}).get("code") == Cause.PEER_ABORTED  # decode computes what cannot come
        trouble = "" if told.is_whole and (told.error is None or is_left) else f"{told.error} {told.trouble}"
        return self._checked(answer) or (trouble and f"{prefill.name} says {told.status} {trouble}")

    def _asked_halves(self, random: Random, path: str) -> tuple[ClientRequest, Server, Server]:
        """What a foreign router is asked for, and the prefill and decode that it chooses."""
        ask = draw_ask(random, 1000 + len(self.answers), careless=0.0, timeouts=(20.0,))
        scores = ask.scores if self.options.block_tokens == 1 else 0
        prefill, decode = (
            random.choice([server for server in self.cluster.servers if server.name.startswith(role)])
            for role in ("prefill", "decode")
        )
        return replace(ask, path=path, scores=scores, answers=self.right), prefill, decode

    def _checked(self, answer: Answer) -> str:
        """What a foreign router has brought. Raises Violation."""
        self.answers.append(answer)
        check(answer, self.faults)
        return "" if answer.error is None and answer.is_whole else f"{answer.status} {answer.error} {answer.trouble}"

    async def _run_at(self, server: Server, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """By a process on that server's machine. Raises Violation."""
        found: list[Violation] = []

        def run() -> None:
            try:
                asyncio.run(work())
            except Violation as violation:
                found.append(violation)

        process = self.kernel.start("visitor", run, host=server.host)
        while process.is_alive:
            await asyncio.sleep(0.02)
        if found:
            raise found[0]

    # --- what must be so ---------------------------------------------------------------------------------------------

    async def _knock(self) -> None:
        """At every port: whether somebody is accepted there is looked at when all is idle."""
        for host, port in list(self.network.listening):
            if isinstance(port, int):
                with suppress(OSError):
                    async with asyncio.timeout(1.0):
                        _, writer = await asyncio.open_connection(host, port)
                    writer.close()

    async def _is_idle(self, server: Server) -> str:
        """What the server still holds."""
        is_router = server is self.cluster.front and self.options.layout != "unified"
        held = await (held_by_router(server) if is_router else held_by_server(self.kernel, server, self.keys.admin))
        return held or held_open(self.kernel, server)

    async def _end(self) -> None:
        self.faults.disturb("", LIMIT_NS)
        self.faults.ends |= {server.name for server in self.cluster.all_hosts}
        processes = [server.process for server in self.cluster.all_hosts if server.process is not None]
        for process in processes:
            self.kernel.signal(process, signal.SIGTERM)

        async def is_over() -> str:
            return ", ".join(process.name for process in processes if process.is_alive)

        orders_s = CONTROL_SECONDS if self.options.faults else 0.0  # of clients that were cut off: seen through
        await self._until(END_S + orders_s, "SIGTERM", is_over)
        cut_off = {host.process for host in self.cluster.further_hosts if self.faults.may_cut_off(host.whole)}
        bad = [process for process in processes if process.exit_code != 0 and process not in cut_off]
        wrong = [f"{process.name}: {process.exit_code}" for process in bad]
        if wrong:
            raise Violation("L9", f"exit codes after SIGTERM: {', '.join(wrong)}")

    def _check_logs(self) -> None:
        assert self.lines is not None
        for line in self.lines.errors:
            if any(mark in line for mark in BUG_MARKS) and CANCELLED not in line.splitlines()[-1]:
                raise Violation("internal", f"{line[:300]} ... {line[-1500:]}")
        for process in self.kernel.processes:
            if isinstance(process.error, Violation):
                raise process.error
            if process.error is not None:
                raise Violation("internal", f"{process.name}: {process.error!r}")


def violation_of_records() -> Violation | None:
    """Whatever has been recorded is decided again as it was."""
    for record in (*records_at(Path(RECORD_FOLDER)), *records_at(Path(RING_FOLDER))):
        for segment in record.segments:
            try:
                difference = replay_alone(segment).difference
            except NothingWritten:  # its process was killed first
                continue
            except (BrokenRecord, StepRaised) as error:
                return Violation("record", f"{segment}: {error}")
            if difference is not None:
                return Violation("record", f"{segment}: step {difference.step}: {difference.got}")
    return None


def run_seed(
    seed: int, trace: Callable[[str], None] | None = None, *, watches: bool = False, engine: str = PLAIN
) -> SeedResult:
    options = draw_options(seed)
    return run_options(options if engine == PLAIN else with_torch(options), trace, watches=watches)


def run_options(options: Options, trace: Callable[[str], None] | None = None, *, watches: bool = False) -> SeedResult:
    """In a folder of its own, whose name no server hears: servers tell their flags, and where their model is."""
    with tempfile.TemporaryDirectory(prefix="tandem-whole-") as folder, chdir(folder):
        return World(options, watches=watches).run(trace)
