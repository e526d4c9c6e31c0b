"""A machine that has nothing left for a while, for the processes of one server.

no_forks        no process is started, and no thread of those that run; one of its processes is killed, so that it tries
no_memory       no engine finds memory for its KV, and a forward pass none for itself; one of its processes is killed
"""

from dataclasses import dataclass, field
from random import Random

from tandem.core.values import SECOND
from tandem.simulator.whole.cluster import Server
from tandem.simulator.whole.engine import SimulatedEngine
from tandem.simulator.whole.faults import Faults
from tandem.simulator.whole.kernel import Kernel, Process

LONGEST_NS = 4 * SECOND
AFTERWARDS_NS = 15 * SECOND  # until a server that could not start has been started again, and again


@dataclass(slots=True)
class Starvation:
    kernel: Kernel
    faults: Faults
    random: Random
    engines: list[SimulatedEngine]
    ends: dict[tuple[str, str], int] = field(default_factory=dict)  # (kind, server)
    had_threads: set[Process] = field(default_factory=set)  # that ran when it began

    def start(self, kinds: tuple[str, ...], begin_ns: int, until_ns: int) -> None:
        for kind in kinds:
            self.kernel.at(self.random.randrange(begin_ns, until_ns), lambda kind=kind: self._strike(kind))

    def refuses(self, kind: str, process: Process) -> bool:
        """Whether the operating system gives this process none."""
        return not self.faults.is_over and self.kernel.now < self.ends.get((kind, server_of(process)), 0)

    def refuses_threads(self, process: Process) -> bool:
        return process in self.had_threads and self.refuses("no_forks", process)

    def _strike(self, kind: str) -> None:
        alive = [server for server in self.faults.cluster.all_hosts if server.is_alive]
        if self.faults.is_over or not alive:
            return
        server = self.random.choice(alive)
        length = self.random.randrange(SECOND // 10, LONGEST_NS)
        self.ends[kind, server.whole] = self.kernel.now + length
        self.faults.disturb(server.whole, length + AFTERWARDS_NS)
        self.faults.counts[kind] += 1
        self.kernel.note(f"fault {kind}")
        if kind == "no_forks":
            self.had_threads = {process for process in self.kernel.processes if process.is_alive}
        else:
            for engine in self.engines:
                engine.fails_next = engine.fails_next or self.random.random() < 0.5
        self._kill_one(server)

    def _kill_one(self, server: Server) -> None:
        assert server.process is not None
        children = [child for child in server.process.children if child.is_alive]
        if children and self.random.random() < 0.7:
            found = self.random.choice(children)
            self.faults.struck.add(found)
            self.kernel.kill(found)


def server_of(process: Process) -> str:
    return process.name.partition(".")[0]
