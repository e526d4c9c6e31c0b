"""Real processes under seeded faults: every request ends in time, with the right tokens or a named cause.

20 seconds in `make test`, and in `make slow` as long with every server on two tensor-parallel shards, two pipeline
stages, or two DP ranks. On demand longer, or the same faults again (as far as the machine's timing allows):

    CHAOS_SECONDS=600 CHAOS_SEED=4711 pytest tests/chaos -m "not slow" -s

Here CHAOS_CUT="--tp 2" (or "--dp 2 --tp 2 --enable-dp-attention" and the like) spreads every server over workers, and
CHAOS_CUT="--tp 2 / --pp 2 / --dp 2" each prefill and then each decode otherwise; the last of them is for the rest.
"""

import asyncio
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import leaks
import pytest
import records
import report
from arena import (
    DECODES,
    NUM_CLIENTS,
    PREFILLS,
    RECOVERY_S,
    ROUTER_STALL_S,
    Arena,
    Cuts,
    arena,
    cuts_of,
    page_files,
    rage,
)
from attack_bootstrap import HostileBootstrap
from attack_http import HttpAttacks
from attack_ports import PortAttacks
from attacks import Attack, Attacks
from clients import Ask, Clients, Outcome
from cluster import START_S, Server, eventually, show_logs
from disk_faults import DiskFaults, compiler, disk_faults
from oracle import Case, record

import tandem
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.server.http_pool import KEEPALIVE_SECONDS
from told import Tell

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
SHORT_S = 20.0
SEED = int(os.environ["CHAOS_SEED"])
NUM_CASES = 64
MIN_FAULTS, MIN_KINDS, MIN_REQUESTS, MIN_SHARE = 6, 4, 100, 0.95
WARM_UP = 4 * NUM_CLIENTS
END_S = 60.0  # from the last request to servers that hold nothing, and to damage that they have noticed
USED_AGAIN_S = 20.0  # probes may meet a link that a fault has stalled
ATTACK_EVERY_S = 0.7
ATTACKED_S = 10.0  # with attackers and no faults
MIN_REMOTE = 0.98  # of what succeeds then
MAX_GROWN_BYTES = 192 << 20  # of one process


@dataclass(frozen=True)
class Run:
    """How long faults last, from which seed they are drawn, and what the servers are."""

    seconds: float
    seed: int
    cuts: Cuts

    def __str__(self) -> str:
        return " / ".join(" ".join(cut) or "one worker each" for cut in self.cuts)


ASKED_FOR = Run(float(os.environ.get("CHAOS_SECONDS", SHORT_S)), SEED, cuts_of(os.environ.get("CHAOS_CUT", "")))
OVER_WORKERS = [Run(SHORT_S, SEED + 10 * at, cuts_of(cut)) for at, cut in enumerate(("--tp 2", "--pp 2", "--dp 2"), 1)]
RUNS = [ASKED_FOR, *(pytest.param(run, marks=pytest.mark.slow) for run in OVER_WORKERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy: nobody changes it under our feet."""
    return str(shutil.copytree(MINI, tmp_path_factory.mktemp("model") / "mini"))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Every process of this run carries it, and puts its temporary files into an own folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    mark = secrets.token_hex(8)
    monkeypatch.setenv(leaks.MARK, mark)
    return mark


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskFaults | None:
    """Below the page files of all servers."""
    return disk_faults(tmp_path / "pages", tmp_path, monkeypatch) if compiler() else None


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, model: str) -> list[Case]:
    """Recorded from one unified server, which is gone when the faults begin."""
    (port,) = free_ports(1)
    with Fleet(tmp_path_factory.mktemp("unified"), engines=1) as fleet:
        unified = Server(fleet.start("unified", serve_words(model, port), port=port))
        fleet.wait_ready(timeout_s=START_S)
        return record(unified, Random(SEED), count=NUM_CASES)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_request_ends_with_its_tokens_or_a_cause_whatever_is_killed_paused_or_garbled(
    tmp_path: Path, model: str, mark: str, disk: DiskFaults | None, cases: list[Case], tell: Tell, run: Run
) -> None:
    fleet = Fleet(tmp_path, engines=PREFILLS + DECODES)
    try:
        with fleet:
            pids = asyncio.run(story(fleet, run, model, disk, cases, tell))
            fleet.stop(timeout_s=30)
            exits = {member.name: member.process.returncode for member in fleet.members}
    except BaseException:
        show_logs(fleet)
        raise
    check_records(tmp_path / "records", tell)
    assert exits == dict.fromkeys(exits, 0)
    eventually(lambda: not leaks.left_running(mark), what=lambda: leaks.left_running(mark))
    assert leaks.left_sockets(pids) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def check_records(folder: Path, tell: Tell) -> None:
    """Every life of every node decides the same again, through rotations and up to where a kill has cut it."""
    lives = list(records.replayed(folder))
    tell(records.page(lives))
    assert [(life.record.name, life.differences) for life in lives if life.differences] == []
    assert {life.server for life in lives} == {f"{role}-{n}" for role in ("prefill", "decode") for n in range(PREFILLS)}
    assert len(lives) > PREFILLS + DECODES, "nobody was killed"
    assert any(life.is_rotated for life in lives)


async def story(fleet: Fleet, run: Run, model: str, disk: DiskFaults | None, cases: list[Case], tell: Tell) -> set[int]:
    """The whole story; returns the ids of all processes that took part."""
    async with arena(fleet, model, Random(run.seed), disk, run.cuts) as it:
        clients = Clients(it.router_server.url, cases, Random(run.seed + 1), stall_s=ROUTER_STALL_S)
        async with clients:
            await warm_up(clients)
            await trim(clients)
            before, memory_before = leaks.descriptors(it), leaks.memory(it)
            asks_before = len(clients.asks)
            it.began = time.monotonic()
            attacks = Attacks(Random(run.seed + 2))
            work = [asyncio.create_task(clients.work()) for _ in range(NUM_CLIENTS)]
            try:
                async with HostileBootstrap(it, attacks) as bootstrap:
                    kinds = {
                        **PortAttacks(it, attacks).kinds(),
                        **bootstrap.kinds(),
                        **HttpAttacks(it, attacks).kinds(),
                    }
                    await rage_under_attack(it, clients, attacks, kinds, seconds=run.seconds)
                    attacked = await attack_alone(clients, attacks, kinds)
            finally:
                clients.is_over = True
                await asyncio.gather(*work)
                clients.settle()
                asks = clients.asks[asks_before:]
                tell(report.page(it, asks, of=str(run), seed=run.seed, seconds=run.seconds))
                tell(f"  attacks     {attacks.words()}")
                print(report.details(it, asks))
            check_attacks(attacks, kinds, attacked)
            await check_healed(it, clients, before)
            check_promises(it, asks)
            assert leaks.grown(memory_before, leaks.memory(it), slack=lambda _: MAX_GROWN_BYTES) == {}
    return it.pids


async def rage_under_attack(
    it: Arena, clients: Clients, attacks: Attacks, kinds: dict[str, Attack], *, seconds: float
) -> None:
    over = asyncio.Event()
    attacking = asyncio.create_task(attacks.until(over.is_set, kinds, every_s=ATTACK_EVERY_S))
    try:
        await rage(it, clients, seconds=seconds)
    finally:
        over.set()
        await attacking


async def attack_alone(clients: Clients, attacks: Attacks, kinds: dict[str, Attack]) -> list[Ask]:
    """Every attack once, and more of them for a while. What genuine clients asked meanwhile."""
    first, until = len(clients.asks), time.monotonic() + ATTACKED_S
    await attacks.each_once(kinds)
    await attacks.until(lambda: time.monotonic() > until, kinds, every_s=ATTACK_EVERY_S)
    return clients.asks[first:]


def check_attacks(attacks: Attacks, kinds: dict[str, Attack], attacked: list[Ask]) -> None:
    """The attackers got nothing, and where nothing else was wrong they did not push anybody off the path."""
    assert attacks.violations == []
    assert set(attacks.tried) == set(kinds)
    assert [ask.story() for ask in attacked if ask.outcome is not Outcome.SUCCESS] == []
    remote = sum(ask.path == "remote" for ask in attacked)
    assert remote >= MIN_REMOTE * len(attacked), f"{remote} of {len(attacked)} pulled their pages"


async def warm_up(clients: Clients) -> None:
    asks = [clients.draw() for _ in range(WARM_UP)]
    for start in range(0, WARM_UP, NUM_CLIENTS):
        await asyncio.gather(*(clients.ask(ask) for ask in asks[start : start + NUM_CLIENTS]))
    assert [ask.story() for ask in asks if ask.outcome is not Outcome.SUCCESS] == []


async def trim(clients: Clients) -> None:
    """One request after another, until connections that idle from busier times are too old to be kept."""
    trimmed_at = time.monotonic() + 2 * KEEPALIVE_SECONDS
    while time.monotonic() < trimmed_at:
        await clients.ask(clients.draw())


def check_promises(it: Arena, asks: list) -> None:
    never = [ask.story() for ask in asks if ask.outcome in report.NEVER]
    assert never == []
    assert len(asks) >= MIN_REQUESTS
    assert len(it.faults) >= MIN_FAULTS
    assert len(it.count()) >= MIN_KINDS
    assert report.share(asks) >= MIN_SHARE
    assert max(max(times) for times in it.recoveries.values()) <= RECOVERY_S
    assert max(it.returns) <= USED_AGAIN_S


async def check_healed(it: Arena, clients: Clients, before: leaks.Counts) -> None:
    """Servers that hold nothing, serve again as in the beginning, and have no more open files than then."""
    await asyncio.to_thread(check_idle, it)
    await check_damage(it, clients)
    await warm_up(clients)
    # A local prefill or a fallback would hide that the two halves have not found each other again.
    assert {ask.path for ask in clients.asks[-WARM_UP:]} == {"remote"}
    for way in ("through shared memory (shm)", "over TCP (sock)"):
        assert await asyncio.to_thread(is_logged, it, way), way
    await trim(clients)
    await asyncio.to_thread(check_idle, it)
    assert leaks.grown(before, leaks.descriptors(it), slack=leaks.slack_fds(before)) == {}


async def check_damage(it: Arena, clients: Clients) -> None:
    """Every page file is damaged, and nothing else is left of what was computed: the same tokens, and they notice.

    Again and again: what they ask for may have been lost before and be written only now, and a disk that was slow is
    not read from until that has been forgotten; so it is with a worker whose requests have failed.
    """
    owners = [target.server for target in (it.of("prefill")[0], it.of("decode")[0])]
    before = sum(map(num_damaged, owners))
    assert len(page_files(it)) > NUM_CASES
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        await asyncio.to_thread(check_idle, it)
        for server in it.servers:
            await asyncio.to_thread(flush, server)
        for file in page_files(it):
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([(content[-1] + 1) % 256]))
        await warm_up(clients)
        if sum(map(num_damaged, owners)) > before:
            return
    raise AssertionError(f"nobody has noticed: {[server.states() for server in owners]}")


def flush(server: Server) -> None:
    with server.open("POST", "/flush_cache") as reply:
        assert reply.status == 200


def num_damaged(server: Server) -> float:
    """Page files that it has removed for what was in them."""
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    name = "tandem:worker_storage_removed_damaged_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def is_logged(it: Arena, way: str) -> bool:
    """Whether pages have come to a decode this way, in whichever of its lives."""
    members = [member for member in it.fleet.members if member.name.startswith("decode")]
    return any(way in member.log.read_text(errors="replace") for member in members)


def check_idle(it: Arena) -> None:
    for server in it.servers:
        eventually(
            lambda s=server: not leaks.held(s),
            within_s=END_S,
            what=lambda s=server: (s.url, leaks.held(s), s.get("/debug/waits")),
        )
    eventually(lambda: not leaks.held_by_router(it.router_server), what=lambda: leaks.held_by_router(it.router_server))
