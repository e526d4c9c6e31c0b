"""Worlds in which a bug has to show that few drawn ones show: one server, and what is done to it at one moment."""

from collections.abc import Callable
from typing import Any  # flags

from tandem.core.values import SECOND
from tandem.simulator.report import SeedResult
from tandem.simulator.whole.faults import ENDING_NS
from tandem.simulator.whole.kernel import START_NS, Process
from tandem.simulator.whole.options import Options
from tandem.simulator.whole.world import World

BUSY_NS, IDLE_NS = START_NS + 2 * SECOND, START_NS + 3 * SECOND
NODE, WORKER = "/process", "worker_process"  # ends of the names of processes


def idle_worker_hangs() -> SeedResult:
    """Nobody waits for it: that the other worker answers says nothing of this one."""

    def strike(world: World) -> None:
        (server,) = world.cluster.servers
        _, second = children(world, WORKER)
        world.faults.struck.add(second)
        world.faults.freeze(server, second, 7 * SECOND)

    return run(IDLE_NS, strike, faults=("freeze",), num_requests=2, spread_s=40.0, tp_size=2)


def second_worker_is_killed_behind_a_node_that_is_held_up() -> SeedResult:
    """When the node goes on, the first one has ended for want of the second."""

    def strike(world: World) -> None:
        (server,) = world.cluster.servers
        (node,), (_, second) = children(world, NODE), children(world, WORKER)
        world.faults.struck.add(second)
        world.faults.freeze(server, node, SECOND)
        world.kernel.kill(second)

    return run(BUSY_NS, strike, faults=("freeze", "kill_process"), tp_size=2)


def second_rank_is_killed() -> SeedResult:
    """In the middle of its requests."""

    def strike(world: World) -> None:
        _, second = children(world, NODE)
        world.faults.disturb("unified", ENDING_NS)
        world.kernel.kill(second)

    return run(BUSY_NS, strike, faults=("kill_process",), dp_size=2)


def children(world: World, kind: str) -> list[Process]:
    return [process for process in world.kernel.processes if process.is_alive and process.name.endswith(kind)]


def run(
    when_ns: int,
    strike: Callable[[World], None],
    *,
    faults: tuple[str, ...],
    num_requests: int = 12,
    spread_s: float = 2.0,
    **cut: int,
) -> SeedResult:
    """faults: kinds of what the strike does. In the folder where it is called."""
    flags: dict[str, Any] = {
        "page_size": 8,
        "max_total_tokens": 1024,
        "max_running_requests": 4,
        "num_reserved_decode_tokens": 8,
        "stall_timeout": 5.0,
        "watchdog_timeout": 4.0,
        "drain_timeout": 10.0,
        "request_timeout": 30.0,
        **cut,
    }
    options = Options(
        1,
        "unified",
        flags=flags,
        num_requests=num_requests,
        spread_s=spread_s,
        careless=0.0,
        faults=faults,
        base_s=0.05,
        timeouts=(10.0,),
    )
    world = World(options)
    world.kernel.at(when_ns, lambda: strike(world))
    return world.run()


WORLDS = {
    each.__name__: each
    for each in (idle_worker_hangs, second_worker_is_killed_behind_a_node_that_is_held_up, second_rank_is_killed)
}
