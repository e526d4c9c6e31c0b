"""Whole clusters with servers on two hosts each: seeds that pass, and one host that is struck."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.core.values import SECOND
from tandem.simulator.faults.options import FIRST_OFF_RECORD
from tandem.simulator.hunt import run_each
from tandem.simulator.report import SeedResult
from tandem.simulator.whole.cuts import draw_num_hosts
from tandem.simulator.whole.kernel import START_NS, Process
from tandem.simulator.whole.options import Options, draw_options, make_cluster
from tandem.simulator.whole.world import World, run_seed
from whole_strikes import frozen, killed

CORPUS = (
    10_045,  # two hosts whose links hold fewer bytes than they greet each other with
    10_050,  # a worker whose node's words are changed on their way
    10_403,  # one that is killed on the second host, and one on the first that ends with it
    10_792,  # ranks that step together
    15_004,  # a connection between the hosts that is cut, which ends their server
    11_376,  # a host that does not read, and is away, and killed, and back
    10_073,  # what two hosts say to each other is cut and lost, that of their workers, too
)
SPREAD_SEED = 10_000
STRIKE_NS = START_NS + 2 * SECOND
Strike = Callable[[World, Process], None]


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    return {result.seed: result for result in run_each(CORPUS, run_seed, are_long=True)}


@pytest.mark.parametrize("seed", CORPUS)
def test_every_request_of_servers_on_several_hosts_ends_as_promised(results: dict[int, SeedResult], seed: int) -> None:
    result = results[seed]
    assert make_cluster(draw_options(seed), "secret").further_hosts
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


def test_the_seeds_are_of_every_kind() -> None:
    drawn = {
        seed: make_cluster(draw_options(seed), "secret") for seed in range(FIRST_OFF_RECORD, FIRST_OFF_RECORD + 200)
    }
    spread = [cluster for cluster in drawn.values() if cluster.further_hosts]
    assert 10 < len(spread) < 60, "a minority"
    names = {host.name for cluster in spread for host in cluster.further_hosts}
    assert {"unified.host1", "prefill0.host1", "decode0.host1"} <= names
    own = {server.name: server.host for cluster in spread for server in cluster.servers}
    assert {host.host == own[host.whole] for cluster in spread for host in cluster.further_hosts} == {True, False}
    assert draw_num_hosts(FIRST_OFF_RECORD - 1, "unified", 2) == 1
    assert {draw_num_hosts(seed, "unified", 3) for seed in drawn} == {1}


def spread_world() -> World:
    """One server of two workers on two hosts."""
    flags = {**draw_options(SPREAD_SEED).flags, "dp_size": 1, "tp_size": 2, "watchdog_timeout": 3.0}
    options = Options(
        SPREAD_SEED,
        "unified",
        flags=flags,
        num_requests=24,
        careless=0.0,
        faults=("freeze",),
        base_s=0.05,
        timeouts=(20.0,),
    )
    return World(options)


def told_of(world: World, strike: Callable[[], None]) -> list[str]:
    """What is said to those whose requests the server loses when it is struck. All else ends as promised."""
    world.kernel.at(STRIKE_NS, strike)
    result = world.run()
    assert not result.invariant, result.detail
    errors = [answer.error for answer in world.answers if answer.error is not None]
    lost = [error["message"] for error in errors if error["code"] == "worker_lost"]
    assert lost
    return lost


@pytest.mark.parametrize(
    ("strike", "is_worker", "reason"),
    [
        (killed, True, "the worker TP1 PP0 process was killed by signal SIGKILL"),
        (frozen, True, "the worker TP1 PP0 process hangs: no answer for "),
        (killed, False, "node rank 1 (127.0.0.1) is lost: "),
        (frozen, False, "node rank 1 (127.0.0.1) is lost: silent for "),
    ],
)
def test_what_is_struck_on_the_second_host_is_named_and_the_server_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Strike, is_worker: bool, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    world = spread_world()
    (host,) = world.cluster.further_hosts

    def hit() -> None:
        assert host.process is not None
        process = host.process.children[0] if is_worker else host.process
        world.faults.struck.add(process)
        world.faults.disturb("unified", 20 * SECOND)
        strike(world, process)
        world.kernel.after(8 * SECOND, lambda: world.kernel.thaw(process))

    lost = told_of(world, hit)
    assert all(reason in message for message in lost), lost


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("cut", "or the connection to one on another host broke"),
        ("vanish", "the worker TP0 PP0 or worker TP1 PP0 process hangs: iteration "),
    ],
)
def test_where_workers_on_two_hosts_hear_nothing_of_each_other_that_is_named_and_the_server_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, reason: str
) -> None:
    """Their hosts do: one that computes is not one that answers."""
    monkeypatch.chdir(tmp_path)
    world = spread_world()
    (host,) = world.cluster.further_hosts

    def hit() -> None:
        assert host.process is not None
        world.faults.disturb("unified", 20 * SECOND)
        (end,) = world.network.between_workers(host.process.children)
        if what == "cut":
            end.cut()
        else:
            end.line.has_vanished = True

    lost = told_of(world, hit)
    assert all(reason in message for message in lost), lost
