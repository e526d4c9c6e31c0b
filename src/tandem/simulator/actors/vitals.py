"""What hangs in one life, and what the watchdog of its server knows of that."""

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.stall_detector import Liveness, PulseQuestions


class Hang(StrEnum):
    """What stands still, as long as it is not killed or goes on; everything else of the server runs."""

    NODE = "node"  # its process: it decides nothing and answers nobody
    WORKER = "worker"  # its process: no batch returns, no page moves, and nothing is said
    BATCH = "batch"  # a forward pass that never ends: the worker's other threads live


@dataclass(slots=True)
class Vitals:
    hang: Hang | None = None
    num_hangs: int = 0  # this one included
    pings: int = 0  # how often the node has asked its worker
    echoes: int = 0  # how often that has answered
    questions: PulseQuestions = field(default_factory=PulseQuestions)
    is_watched: bool = False  # a tick is on the clock
    quiet_ticks: int = 0  # since the last batch, in a row, without a stall

    @property
    def liveness(self) -> Liveness:
        return self.questions.liveness
