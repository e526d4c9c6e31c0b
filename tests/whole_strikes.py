"""What strikes a worker of a unified server in a whole cluster. The server ends with it, so requests may fail."""

from tandem.core.values import SECOND
from tandem.simulator.whole.faults import ENDING_NS
from tandem.simulator.whole.kernel import Process
from tandem.simulator.whole.world import World


def killed(world: World, process: Process) -> None:
    world.faults.disturb("unified", ENDING_NS)
    world.kernel.kill(process)


def frozen(world: World, process: Process) -> None:
    world.faults.disturb("unified", 10 * SECOND)
    world.kernel.freeze(process)
