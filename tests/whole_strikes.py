"""What strikes a worker of a unified server in a whole cluster. The server ends with it, so requests may fail."""

from collections.abc import Callable

from tandem.core.values import SECOND
from tandem.simulator.whole.faults import ENDING_NS
from tandem.simulator.whole.kernel import Process
from tandem.simulator.whole.options import Options
from tandem.simulator.whole.world import World

Strike = Callable[[World, Process], None]


def one_server(**flags: object) -> Options:
    usual = {
        "page_size": 8,
        "max_total_tokens": 1024,
        "max_running_requests": 4,
        "num_reserved_decode_tokens": 8,
        "stall_timeout": 8.0,
        "watchdog_timeout": 4.0,
        "drain_timeout": 10.0,
        "request_timeout": 30.0,
    }
    return Options(1, "unified", flags=usual | flags, careless=0.0, faults=("freeze",), base_s=0.05, timeouts=(20.0,))


def struck(world: World, strike: Strike) -> None:
    """The second of two workers."""
    _, second = [process for process in world.kernel.processes if process.name.endswith("worker_process")]
    world.faults.struck.add(second)
    strike(world, second)


def killed(world: World, process: Process) -> None:
    world.faults.disturb("unified", ENDING_NS)
    world.kernel.kill(process)


def frozen(world: World, process: Process) -> None:
    world.faults.disturb("unified", 10 * SECOND)
    world.kernel.freeze(process)
