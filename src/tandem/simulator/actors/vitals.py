"""What hangs in one life, and what the watchdog of its server knows of that."""

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.batch import BatchPlan
from tandem.core.stall_detector import Liveness, ProgressReport


class Hang(StrEnum):
    """What stands still, as long as it is not killed or goes on; everything else of the server runs."""

    NODE = "node"  # its process: it decides nothing and answers nobody
    WORKER = "worker"  # its process: no batch returns, no page moves, and nothing is said
    BATCH = "batch"  # a forward pass that never ends: the worker's other threads live


@dataclass(slots=True)
class Vitals:
    hang: Hang | None = None
    held: BatchPlan | None = None  # would have returned, but for the hang
    pings: int = 0  # how often the node has asked its worker
    echoes: int = 0  # how often that has answered
    liveness: Liveness = field(default_factory=Liveness)
    answer: ProgressReport | None = None  # of the node to the last question; None: it has not answered
    is_watched: bool = False  # a tick is on the clock
    quiet_ticks: int = 0  # since the last batch, in a row, without a standstill
