"""What the data plane meets: how long pages take, which ones arrive corrupted, how late a cancelled one still comes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.values import SECOND
from tandem.simulator.faults.options import Options
from tandem.simulator.network.links import Network
from tandem.transfer.protocol import Status


@dataclass(slots=True)
class DataPlaneFaults:
    """What goes wrong with the `KvStore`s of a world, by chance."""

    random: Random
    options: Options
    network: Network
    page_digest_ns: tuple[int, int]
    count: Callable[[str], None]  # a fault of this class has happened
    is_calm: bool = False  # healed: nothing goes wrong any more
    pages_to_corrupt: int = 0  # the next so many, by order of a scenario
    answers: Counter[Status] = field(default_factory=Counter)

    def transit_ns(self, source: str, target: str) -> int | None:
        return None if self.network.is_cut(source, target) else self.network.latency_ns()

    def give_up_ns(self) -> int:
        return self.random.randrange(2 * SECOND, 10 * SECOND)

    def corrupts(self) -> bool:
        if self.pages_to_corrupt:
            self.pages_to_corrupt -= 1
            return True
        rate = 0.0 if self.is_calm else self.options.corruption
        if rate and self.random.random() < rate:
            self.count("F14")
            return True
        return False

    def answered(self, status: Status) -> None:
        self.answers[status] += 1

    def digest_ns(self, num_pages: int) -> int:
        return num_pages * self.random.randrange(*self.page_digest_ns)

    def page_read_ns(self) -> int:
        return self.random.randrange(*self.options.page_read_ns)

    def linger_ns(self) -> int:
        if self.options.linger_ns and not self.is_calm:
            self.count("F15")
            return self.random.randrange(self.options.linger_ns)
        return self.random.randrange(100_000)
