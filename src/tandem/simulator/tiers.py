"""Host memory and storage of one life, where its settings have some: what the world gives them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.events import Event
from tandem.simulator.actors.host_tier import SimulatedTier
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.storage import SimulatedStorage, VirtualFolder
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.checkers.tiers import TierPages, TierWatch
from tandem.simulator.clock import Clock
from tandem.simulator.faults.options import Options


@dataclass(slots=True)
class Tiers:
    """Of all servers of a world; what lies in storage outlives every one of them."""

    options: Options
    clock: Clock
    pages: TierPages
    push: Callable[[Life, Event], None]
    count: Callable[[str], None]
    is_healed: Callable[[], bool]
    folder: VirtualFolder = field(init=False)

    def __post_init__(self) -> None:
        random = Random(f"storage {self.options.seed}")

        def strikes(share: float) -> bool:
            if self.is_healed() or not share or random.random() >= share:
                return False
            self.count("F16")
            return True

        self.folder = VirtualFolder(random, self.options.storage_faults, strikes, lambda: self.clock.time)

    def add_to(self, life: Life) -> None:
        settings, who = life.settings.host_tier, life.incarnation
        if settings is None:
            return

        def is_alive() -> bool:
            return life.is_alive and not life.store.dead

        def is_frozen() -> bool:
            return life.vitals.hang is Hang.WORKER

        watch = TierWatch(self.pages, life)
        life.tier = SimulatedTier(
            life.workers.memories,
            settings.num_pages,
            self.options.tier_page_ns,
            self.clock,
            Random(f"tier {self.options.seed} {who.name} {who.id}"),
            self.options.tier_faults,
            watch,
            emit=lambda event: self.push(life, event),
            is_alive=is_alive,
            is_frozen=is_frozen,
            count=self.count,
            is_healed=self.is_healed,
        )
        if settings.storage is None:
            return
        life.storage = SimulatedStorage(
            life.tier.hosts,
            self.folder,
            life.settings.cut,
            self.options.storage_page_ns,
            settings.storage.io_timeout_ns,
            self.clock,
            Random(f"storage {self.options.seed} {who.name} {who.id}"),
            emit=lambda event: self.push(life, event),
            is_alive=is_alive,
            is_frozen=is_frozen,
            fetched=watch.page_is_fetched,
        )
