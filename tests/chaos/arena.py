"""The arena of the chaos run: a router, two prefills, two decodes, and between them the fault proxy.

    client -> router -> [link] -> prefill and decode         HTTP: delay, stall, cut
    decode -> [link] -> route proxy -> prefill's bootstrap   HTTP: delay, stall, cut
    decode -> [link] -> prefill's node and worker            control and data plane: also corrupt and duplicate
    attackers -> every port                                  `attacks.py`
    the first prefill and decode -> host memory -> files     which they share: changed, shortened, mixed up, removed;
                                                             on a disk that is slow, or stalls, or is full

Two lanes of faults run at once, all drawn from one seed. Processes are killed and paused in the one; the other harms
links, makes clients leave and orders aborts. At most one server of a role is down or paused at a time. A kill of a
server waits until nothing else is wrong, and nothing else begins before the next success: that time is a promise.
"""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any  # JSON documents

import httpx
import records
from clients import Clients, Order, Outcome
from cluster import START_S, Server, children_named, children_of
from disk_faults import READS, WRITES, DiskFaults
from greetings import Regreeter
from proxy import LOOPBACK, Link, RouteProxy

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.values import Incarnation
from tandem.membership import user_secret
from tandem.page_files import PAGE_NAME

PREFILLS = DECODES = 2
NUM_CLIENTS = 16
STALL_S = 10.0  # of the servers ...
ROUTER_STALL_S = STALL_S + 2  # ... and of the router, who speaks for a server that is silent altogether
PAUSE_S = (0.5, 20.0)
LINK_FAULT_S = (0.5, 8.0)  # both planes give a silent peer up after 5 s
DELAY_S = (0.005, 0.2)
DISK_DELAY_S = (0.001, 0.05)  # of each call
DISK_ROOM = 1 << 17  # bytes at most, before it is full
HARMED_PIECES = (2, 8)
HARM_S = 3.0  # how long to wait for pieces to harm
RECOVERY_S = 10.0
READY_S = 90.0
ORDER_SLACK_S = 1.0

Cuts = tuple[tuple[str, ...], ...]  # flags that spread servers over workers: one by one, the last of them for the rest
SERVER_FLAGS = ("--max-total-tokens", "8192", "--chunked-prefill-size", "128", "--stall-timeout", f"{STALL_S:g}")
TIER_FLAGS = (
    *("--max-total-tokens", "4096", "--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    *("--hicache-storage-size", "0.02", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
)
ROUTER_FLAGS = (
    *("--health-check-interval", "1", "--stall-timeout", f"{ROUTER_STALL_S:g}", "--request-timeout", "20"),
    *("--cb-timeout-duration-secs", "5"),  # nobody is left alone for most of the run
)

PROCESS_FAULTS = ("kill_prefill", "kill_decode", "kill_child", "kill_router", "pause", "pause", "pause", "pause")
OTHER_FAULTS = (
    "delay",
    "stall",
    "cut",
    "cut",
    "corrupt",
    "corrupt",
    "duplicate",
    "duplicate",
    "leave",
    "leave",
    "abort",
    "damage",
)
DISK_FAULTS = ("slow_disk", "full_disk")  # where there is a compiler, besides
DAMAGES = ("changed", "shortened", "of another page", "removed")
DAMAGED_FILES = 8  # at once


@dataclass
class Fault:
    kind: str
    what: str
    at: float  # seconds since the beginning

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind:<10} {self.what}"


@dataclass(eq=False)
class Target:
    """One server, the link in front of its HTTP port, and what is wrong with it now."""

    server: Server
    role: str
    link: Link
    cut: tuple[str, ...]
    is_impaired: bool = False

    @property
    def name(self) -> str:
        return self.server.member.name

    @property
    def pid(self) -> int:
        return self.server.member.process.pid

    @property
    def dp_size(self) -> int:
        return int(self.cut[self.cut.index("--dp") + 1]) if "--dp" in self.cut else 1

    @property
    def has_groups(self) -> bool:
        """Whether its workers meet when they start."""
        return any(flag in self.cut for flag in ("--tp", "--pp", "--attn-cp-size"))


@dataclass
class Arena:
    """The processes, the links between them, and the faults so far."""

    fleet: Fleet
    random: Random
    disk: DiskFaults | None = None  # None: it is healthy, for want of a compiler
    cuts: Cuts = ((),)
    targets: list[Target] = field(default_factory=list)
    routes: list[RouteProxy] = field(default_factory=list)
    links: dict[str, Link] = field(default_factory=dict)
    router: Server | None = None
    faults: list[Fault] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(
        default_factory=dict
    )  # seconds from a kill to a success that began after
    returns: list[float] = field(default_factory=list)  # seconds from ready again to used again
    pids: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    calm: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever wants nothing else to go wrong
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a link: who asks meanwhile has to get its port
    active: int = 0  # link faults under way

    def note(self, kind: str, what: str) -> None:
        self.faults.append(Fault(kind, what, time.monotonic() - self.began))

    def count(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for fault in self.faults:
            kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
        return kinds

    @property
    def records(self) -> Path:
        return self.fleet.folder / "records"

    @property
    def pages(self) -> Path:
        """The folder of page files."""
        return self.fleet.folder / "pages"

    @property
    def router_server(self) -> Server:
        assert self.router is not None
        return self.router

    @property
    def servers(self) -> list[Server]:
        return [target.server for target in self.targets]

    def known_documents(self) -> list[dict[str, Any]]:
        """What the prefills' bootstrap servers have told whoever asked."""
        return [route.document for route in self.routes if route.document is not None]

    def known_incarnations(self) -> list[Incarnation]:
        return [Incarnation(**document["incarnation"]) for document in self.known_documents()]

    def of(self, role: str) -> list[Target]:
        return [target for target in self.targets if target.role == role]

    async def open_link(
        self, name: str, port: int, *, is_damageable: bool, regreeter: Callable[[], Regreeter] | None = None
    ) -> Link:
        """The link of this name to this port, open; a link to an earlier port is closed."""
        async with self.opening:
            known = self.links.get(name)
            if known is not None and known.target_port == port:
                return known
            link = self.links[name] = Link(name, port, self.random, is_damageable, regreeter=regreeter)
            if known is not None:
                link.harmed = known.harmed
                await known.close()
            await link.open()
            return link

    async def close(self) -> None:
        for route in self.routes:
            await route.close()
        for link in self.links.values():
            await link.close()

    def heal(self) -> None:
        for link in self.links.values():
            link.heal()
        if self.disk is not None:
            self.disk.heal()
        for target in self.targets:
            resume(target.pid)


# --- start ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def arena(fleet: Fleet, model: str, random: Random, disk: DiskFaults | None, cuts: Cuts) -> AsyncIterator[Arena]:
    """Everything is ready when entered. The fleet is the caller's, who ends it."""
    it = Arena(fleet, random, disk, cuts)
    try:
        await start(it, model)
        await until_ready(it)
        remember_pids(it)
        yield it
    finally:
        it.heal()
        await it.close()


async def start(it: Arena, model: str) -> None:
    words = ["router", "--port", str(free_ports(1)[0]), *ROUTER_FLAGS]
    for index in range(PREFILLS):
        words += ["--prefill", *await start_prefill(it, model, index)]
    for index in range(DECODES):
        words += ["--decode", await start_decode(it, model, index)]
    it.router = Server(it.fleet.start("router", words, port=int(words[2])))


def cuts_of(words: str) -> Cuts:
    """ "--tp 2": all alike; "--tp 2 / --pp 2 / --dp 2": one by one."""
    return tuple(tuple(cut.split()) for cut in words.split("/"))


def cut_of(it: Arena, index: int) -> tuple[str, ...]:
    """Of a prefill; the decodes are counted behind all of them."""
    return it.cuts[min(index, len(it.cuts) - 1)]


def shares_memory(index: int) -> bool:
    """Pages of every second prefill are copied from shared memory; those of the others pass a link that is damaged."""
    return index % 2 == 1


def tiers_of(it: Arena, index: int) -> tuple[str, ...]:
    """Of the first of each role: fewer pages than are asked about, and host memory and files below them."""
    return (*TIER_FLAGS, "--hicache-storage-dir", str(it.pages)) if index == 0 else ()


async def start_prefill(it: Arena, model: str, index: int) -> tuple[str, str]:
    """URL and bootstrap port, as the router is to know them."""
    name, cut = f"prefill-{index}", cut_of(it, index)
    port, bootstrap = free_ports(2)
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
    words = serve_words(model, port, *mode, *SERVER_FLAGS, *cut, *tiers_of(it, index), *records.flags(it.records, name))
    member = it.fleet.start(name, words, port=port)
    link = await it.open_link(f"http {name}", port, is_damageable=False)

    def regreeter() -> Regreeter:
        return Regreeter(user_secret(os.environ), route.data_ports, keeps_unix=shares_memory(index))

    def plane(kind: str, port: int) -> Awaitable[Link]:
        greets = regreeter if kind.startswith("control") else None
        return it.open_link(f"{kind} {name}", port, is_damageable=True, regreeter=greets)

    route = RouteProxy(bootstrap, plane)
    it.routes.append(route)
    await route.open()
    boot = await it.open_link(f"bootstrap {name}", route.port, is_damageable=False)
    it.targets.append(Target(Server(member), "prefill", link, cut))
    return f"http://{LOOPBACK}:{link.port}", str(boot.port)


async def start_decode(it: Arena, model: str, index: int) -> str:
    """URL as the router is to know it. The second has no prefix cache: whatever it decodes was pulled or computed."""
    name, cut = f"decode-{index}", cut_of(it, PREFILLS + index)
    (port,) = free_ports(1)
    cache = ("--disable-radix-cache",) if index % 2 else tiers_of(it, index)
    flags = ("--disaggregation-mode", "decode", *SERVER_FLAGS, *cut, *cache, *records.flags(it.records, name))
    member = it.fleet.start(name, serve_words(model, port, *flags), port=port)
    link = await it.open_link(f"http {name}", port, is_damageable=False)
    it.targets.append(Target(Server(member), "decode", link, cut))
    return f"http://{LOOPBACK}:{link.port}"


async def until_ready(it: Arena, *, within_s: float = START_S) -> None:
    """All members answer, and the router has seen all workers alive."""
    members = [member for member in it.fleet.members if member.process.poll() is None]
    await eventually(lambda: all_ready([member.port for member in members]), within_s=within_s, what="all ready")
    await eventually(lambda: are_used(it), within_s=within_s, what="all workers used by the router")


async def all_ready(ports: list[int]) -> bool:
    return all([await answers(port) for port in ports])


async def answers(port: int) -> bool:
    try:
        async with httpx.AsyncClient(timeout=1.0, trust_env=False, verify=False) as http:
            return (await http.get(f"http://{LOOPBACK}:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def are_used(it: Arena, target: Target | None = None) -> bool:
    """Whether the router gives requests to this worker; to all, when none is named."""
    try:
        async with httpx.AsyncClient(timeout=1.0, trust_env=False, verify=False) as http:
            text = (await http.get(f"{it.router_server.url}/metrics")).text
    except httpx.HTTPError:
        return False
    live = [line for line in text.splitlines() if line.startswith("tandem:router_worker_live{")]
    if target is not None:
        live = [line for line in live if f":{target.link.port}" in line]
    return bool(live) and all(line.endswith(" 1.0") for line in live)


async def eventually(condition: Callable[[], Awaitable[bool]], *, within_s: float, what: str) -> float:
    """Seconds until it was true."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() > began + within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def remember_pids(it: Arena) -> None:
    """Of all processes of the fleet, to look for what they leave behind."""
    for member in it.fleet.members:
        if member.process.poll() is None:
            it.pids |= {member.process.pid, *children_of(member.process.pid)}


# --- faults ---------------------------------------------------------------------------------------------------------


async def rage(it: Arena, clients: Clients, *, seconds: float) -> None:
    """Faults of both lanes for so long, then heal: every process lives, every link flows."""
    over_at = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process_lane(it, clients, over_at))
        tasks.create_task(other_lane(it, clients, over_at))
    it.heal()
    await until_ready(it, within_s=READY_S)
    remember_pids(it)


def bag(random: Random, kinds: tuple[str, ...]) -> Iterator[str]:
    """Every kind comes once in a while: one bag after another, each in another order."""
    while True:
        shuffled = list(kinds)
        random.shuffle(shuffled)
        yield from shuffled


async def process_lane(it: Arena, clients: Clients, over_at: float) -> None:
    """One after another; the victim may still be starting when the next one of the other role is chosen."""
    # The first two are kills, so that even the shortest run measures the recovery of both roles.
    kinds = bag(it.random, PROCESS_FAULTS)
    first = iter(("kill_prefill", "kill_decode"))
    async with asyncio.TaskGroup() as aftermath:
        while time.monotonic() < over_at:
            kind = next(first, None) or next(kinds)
            match kind:
                case "kill_prefill" | "kill_decode":
                    await kill_server(it, clients, kind.removeprefix("kill_"), aftermath)
                case "kill_child":
                    await kill_child(it, clients, aftermath)
                case "kill_router":
                    await kill_router(it, clients)
                case _:
                    await pause(it, aftermath, over_at)
            await asyncio.sleep(it.random.uniform(0.5, 2.0))


@contextlib.asynccontextmanager
async def calmness(it: Arena) -> AsyncIterator[None]:
    """Nothing is wrong when entered, and nothing else begins before the exit."""

    async def all_live() -> bool:
        return not any(target.is_impaired for target in it.targets)

    async def all_well() -> bool:
        return it.active == 0 and await are_used(it)

    await eventually(all_live, within_s=READY_S, what="all processes live before a kill")
    async with it.calm:
        await eventually(all_well, within_s=READY_S, what="all links flow before a kill")
        yield


async def kill_server(it: Arena, clients: Clients, role: str, aftermath: asyncio.TaskGroup) -> None:
    async with calmness(it):
        target = it.random.choice(it.of(role))
        it.note("kill", target.name)
        target.is_impaired = True
        remember_pids(it)
        target.server.member.process.kill()
        await measure_recovery(it, clients, role)
    aftermath.create_task(revive(it, target))


async def kill_child(it: Arena, clients: Clients, aftermath: asyncio.TaskGroup) -> None:
    """The server notices by itself, ends, and is started again by whoever supervises it; a server of several DP ranks
    starts the rank again itself."""
    async with calmness(it):
        target = it.random.choice(it.targets)
        module = it.random.choice(("worker_process", "node.process"))
        it.note("kill", f"{target.name} {module}")
        target.is_impaired = True
        remember_pids(it)
        os.kill(it.random.choice(children_named(target.pid, module)), signal.SIGKILL)
        await measure_recovery(it, clients, target.role)
    aftermath.create_task(revive(it, target))


async def revive(it: Arena, target: Target) -> None:
    """As a supervisor does: wait for its end, start it again on the same ports."""
    member = target.server.member
    process = member.process
    if not (target.dp_size > 1 and process.poll() is None):
        await eventually(lambda: has_ended(process), within_s=20, what=f"{target.name} ends after one of it was killed")
        await asyncio.sleep(it.random.uniform(0.0, 1.0))
        records.set_aside(it.records, target.name)
        it.fleet.restart(member)
    await eventually(lambda: has_all_ranks(target), within_s=READY_S, what=f"{target.name} has all its ranks")
    await eventually(lambda: answers(member.port), within_s=READY_S, what=f"{target.name} is ready again")
    it.returns.append(await eventually(lambda: are_used(it, target), within_s=READY_S, what=f"{target.name} is used"))
    target.is_impaired = False


async def has_all_ranks(target: Target) -> bool:
    try:
        async with httpx.AsyncClient(timeout=1.0, trust_env=False, verify=False) as http:
            answer = await http.get(f"http://{LOOPBACK}:{target.server.member.port}/v1/loads")
            return answer.status_code == 200 and len(answer.json()["loads"]) == target.dp_size
    except httpx.HTTPError:
        return False


async def has_ended(process: "object") -> bool:
    return process.poll() is not None  # type: ignore[attr-defined]


async def measure_recovery(it: Arena, clients: Clients, role: str) -> None:
    """From now to the end of the first success that begins after now."""
    killed_at = time.monotonic()
    while True:
        case = min(clients.cases, key=lambda case: len(case.prompt))
        probe = clients.make(case, max_tokens=1, streams=False, wants_logprobs=False, deadline_s=10)
        await clients.ask(probe)
        if probe.outcome is Outcome.SUCCESS:
            break
    it.recoveries.setdefault(role, []).append(probe.ended - killed_at)


async def kill_router(it: Arena, clients: Clients) -> None:
    async with calmness(it):
        member = it.router_server.member
        it.note("kill", "router")
        clients.router_is_up.clear()
        clients.router_killed_at.append(time.monotonic())
        member.process.kill()
        member.process.wait()
        it.fleet.restart(member)
        await eventually(lambda: answers(member.port), within_s=READY_S, what="the router is ready again")
        clients.router_is_up.set()


async def pause(it: Arena, aftermath: asyncio.TaskGroup, over_at: float) -> None:
    """SIGSTOP one process of a server, or all of them."""
    free = [target for target in it.targets if not any(other.is_impaired for other in it.of(target.role))]
    if not free:
        return
    target = it.random.choice(free)
    module = it.random.choice(("api", "node.process", "worker_process", "all"))
    seconds = log_uniform(it.random, *PAUSE_S)
    async with it.calm:
        it.note("pause", f"{target.name} {module} for {seconds:.1f} s")
        target.is_impaired = True
        for pid in pids_of(it.random, target.pid, module):
            os.kill(pid, signal.SIGSTOP)

    async def go_on() -> None:
        await asyncio.sleep(max(0.5, min(seconds, over_at - time.monotonic())))
        resume(target.pid)
        target.is_impaired = False

    aftermath.create_task(go_on())


def pids_of(random: Random, server: int, module: str) -> list[int]:
    """Of all, or of one process that runs this module."""
    if module == "all":
        return [server, *children_of(server)]
    return [server if module == "api" else random.choice(children_named(server, module))]


def resume(server: int) -> None:
    """Without effect on what is gone or runs."""
    with contextlib.suppress(OSError):
        for pid in (server, *children_of(server)):
            os.kill(pid, signal.SIGCONT)


async def other_lane(it: Arena, clients: Clients, over_at: float) -> None:
    kinds = bag(it.random, OTHER_FAULTS if it.disk is None else (*OTHER_FAULTS, *DISK_FAULTS))
    async with asyncio.TaskGroup() as under_way:
        while time.monotonic() < over_at:
            async with it.calm:
                begin_other(it, clients, next(kinds), under_way)
            await asyncio.sleep(it.random.uniform(0.8, 2.4))


def begin_other(it: Arena, clients: Clients, kind: str, under_way: asyncio.TaskGroup) -> None:
    match kind:
        case "leave":
            leave(it, clients)
        case "abort":
            under_way.create_task(abort(it, clients))
        case "damage":
            damage(it, it.random.sample(pages := page_files(it), min(len(pages), DAMAGED_FILES)))
        case "cut":
            link, half = it.random.choice(list(it.links.values())), it.random.random() < 0.3
            if number := link.cut(half=half):
                it.note("cut", f"{link.name}: {number} connections{', half' if half else ''}")
        case "delay" | "stall":
            under_way.create_task(hold(it, kind))
        case "slow_disk" | "full_disk" if it.disk is not None:
            under_way.create_task(strain(it, it.disk, kind))
        case _:
            under_way.create_task(harm(it, kind))


def page_files(it: Arena) -> list[Path]:
    return sorted(path for path in it.pages.glob("*") if PAGE_NAME.fullmatch(path.name))


def damage(it: Arena, files: list[Path]) -> None:
    """What a disk may do to files, whoever reads or writes them now."""
    kinds: list[str] = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a server has removed it
            content, kind = bytearray(file.read_bytes()), it.random.choice(DAMAGES)
            match kind:
                case "changed" if content:
                    content[it.random.randrange(len(content))] ^= 1 << it.random.randrange(8)
                case "of another page":
                    content = bytearray(it.random.choice(files).read_bytes())
                case "removed":
                    file.unlink()
                    content = bytearray()
                case _:
                    del content[it.random.randrange(len(content) + 1) :]
            if content:
                file.write_bytes(content)
            kinds.append(kind)
    if kinds:
        it.note("damage", ", ".join(f"{kinds.count(kind)} files {kind}" for kind in DAMAGES if kind in kinds))


async def hold(it: Arena, kind: str) -> None:
    """Delay or stall one link for a while."""
    link = it.random.choice(list(it.links.values()))
    seconds = log_uniform(it.random, *LINK_FAULT_S)
    it.active += 1
    if kind == "stall":
        it.note("stall", f"{link.name} for {seconds:.1f} s")
        link.stall()
    else:
        delay_s = log_uniform(it.random, *DELAY_S)
        it.note("delay", f"{link.name} by {1000 * delay_s:.0f} ms for {seconds:.1f} s")
        link.delay(delay_s)
    await asyncio.sleep(seconds)
    link.heal()
    it.active -= 1


async def strain(it: Arena, disk: DiskFaults, kind: str) -> None:
    """The disk of all page files is slow, or stalls, or is full. Counts when it has happened."""
    seconds = log_uniform(it.random, *LINK_FAULT_S)
    before = disk.slowed + disk.refused
    it.active += 1
    if kind == "full_disk":
        room = it.random.randrange(DISK_ROOM)
        disk.fill(room=room)
        what = f"after {room} bytes"
    elif it.random.random() < 0.5:
        delay_s = log_uniform(it.random, *DISK_DELAY_S)
        disk.slow(delay_s)
        what = f"by {1000 * delay_s:.0f} ms"
    else:
        calls = it.random.choice((READS, WRITES, READS | WRITES))
        disk.stall(calls)
        what = {READS: "reads stall", WRITES: "writes stall"}.get(calls, "reads and writes stall")
    await asyncio.sleep(seconds)
    if kind == "full_disk":
        disk.empty()
    else:
        disk.slow(0)
        disk.stall(0)
    it.active -= 1
    if (calls := disk.slowed + disk.refused - before) > 0:
        it.note(kind, f"{what} for {seconds:.1f} s: {calls} calls")


async def harm(it: Arena, kind: str) -> None:
    """Corrupt or duplicate what passes next through a plane. Counts when it has happened."""
    link = it.random.choice([link for link in it.links.values() if link.is_damageable])
    before = link.harmed.get(kind, 0)
    it.active += 1
    link.arm(kind, it.random.randint(*HARMED_PIECES))
    await asyncio.sleep(HARM_S)
    link.heal()
    it.active -= 1
    if (pieces := link.harmed.get(kind, 0) - before) > 0:
        it.note(kind, f"{link.name}: {pieces} pieces")


def leave(it: Arena, clients: Clients) -> None:
    """Some clients close their connections at once."""
    running = [ask for ask in clients.running if ask.task is not None]
    leaving = it.random.sample(running, min(len(running), it.random.randint(2, 6)))
    for ask in leaving:
        clients.leave(ask)
    if leaving:
        it.note("leave", f"{len(leaving)} clients")


async def abort(it: Arena, clients: Clients) -> None:
    """A storm of aborts: everything at the router, everything at one server, or some requests by name."""
    running = clients.running
    match it.random.choice(("router", "server", "names")):
        case "router":
            it.note("abort", f"all {len(running)} at the router")
            orders = [(it.router_server.url, {"abort_all": True}, None)]
        case "server":
            target = it.random.choice(it.targets)
            it.note("abort", f"all at {target.name}")
            orders = [(target.server.url, {"abort_all": True}, None)]
        case _:
            chosen = it.random.sample(running, min(len(running), 8))
            it.note("abort", f"{len(chosen)} by name")
            orders = [(it.router_server.url, {"rid": ask.rid}, ask) for ask in chosen]
    began = time.monotonic()
    await asyncio.gather(*(send_abort(clients.http, url, body) for url, body, _ in orders))
    was_paused = any(target.is_impaired for target in it.targets)
    ended = time.monotonic() + ORDER_SLACK_S + (PAUSE_S[1] if was_paused else 0.0)
    rids = None if any(ask is None for _, _, ask in orders) else frozenset(ask.rid for _, _, ask in orders if ask)
    clients.orders.append(Order(rids, began, ended))


async def send_abort(http: httpx.AsyncClient, url: str, body: dict[str, object]) -> None:
    with contextlib.suppress(httpx.HTTPError):  # whoever is paused or killed does not answer
        await http.post(f"{url}/abort_request", json=body, timeout=12.0)


def log_uniform(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))
