"""Which models servers say they serve, where routers ask them, and which ones clients ask for."""

from dataclasses import dataclass
from random import Random

from tandem.simulator.workload import WorkloadRequest

EVERYWHERE, SOMEWHERE = "everywhere", "somewhere"


def names_of(server: str) -> tuple[str, ...]:
    """Of every other server of a role, the first among them, more than of the rest."""
    number = int(server.rpartition("-")[2])
    return (EVERYWHERE,) if number % 2 else (EVERYWHERE, SOMEWHERE)


@dataclass(slots=True)
class ModelNames:
    random: Random

    def asked(self, ask: WorkloadRequest) -> str | None:
        if ask.must_finish:
            return EVERYWHERE
        return self.random.choice((EVERYWHERE, SOMEWHERE, None))
