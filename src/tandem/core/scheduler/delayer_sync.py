"""The passes of a prefill delayer over several DP ranks: collects one load per rank, and tells all the same.

A group of ranks has one `DelayerSync`, run by whoever starts the ranks. A rank that has prompts says so; the others are
asked for their loads; when all are here, or the deadline is over, every rank hears the same tuple and the same memory,
and decides by `delayer_policy.agree`. A rank that says nothing until the deadline is left out, and not waited for again
until it speaks, so that one dead rank holds up the others once; it hears what was decided all the same. The memory is
kept here: a rank that restarts has lost nothing.
"""

from dataclasses import dataclass, field

from tandem.core.events import LoadsGathered, LoadWanted
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.delayer_policy import agree
from tandem.core.settings import DelayerSettings
from tandem.core.values import Nanos

Mail = list[tuple[int, LoadWanted | LoadsGathered]]  # to which rank, in this order


@dataclass(slots=True)
class DelayerSync:
    settings: DelayerSettings
    number: int = 0  # of the last pass
    memory: DelayHistory = field(default_factory=DelayHistory)
    loads: dict[int, RankLoad] = field(default_factory=dict[int, RankLoad])  # of the pass that is open, by rank
    closes_at: Nanos | None = None  # None: no pass is open
    silent: dict[int, None] = field(default_factory=dict[int, None])  # not waited for until they say something

    def say(self, rank: int, number: int | None, load: RankLoad, now: Nanos) -> Mail:
        """A rank has given its load. One for a pass that is over comes too late and changes nothing."""
        assert 0 <= rank < self.settings.num_ranks
        if number is not None and (self.closes_at is None or number != self.number):
            self.silent.pop(rank, None)  # alive after all
            return []
        mail = self._open(rank, now) if self.closes_at is None else []
        self.loads[rank] = load
        self.silent.pop(rank, None)
        if len(self.loads) + len(self.silent) == self.settings.num_ranks:
            mail += self._close()
        return mail

    def tick(self, now: Nanos) -> Mail:
        """To be called at `closes_at`."""
        if self.closes_at is None or self.closes_at > now:
            return []
        self.silent = {rank: None for rank in range(self.settings.num_ranks) if rank not in self.loads}
        return self._close()

    def _open(self, asking: int, now: Nanos) -> Mail:
        self.number += 1
        self.closes_at = Nanos(now + self.settings.gather_timeout_ns)
        return [(rank, LoadWanted(self.number)) for rank in range(self.settings.num_ranks) if rank != asking]

    def _close(self) -> Mail:
        loads = tuple(load for _, load in sorted(self.loads.items()))
        said = LoadsGathered(self.number, loads, self.memory)
        _, self.memory = agree(loads, self.memory, self.settings)
        self.loads = {}
        self.closes_at = None
        return [(rank, said) for rank in range(self.settings.num_ranks)]
