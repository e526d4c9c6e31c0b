"""When the worker of one DP rank has to take part in a step of all of them (DP attention, decision 020).

All workers go through the same steps: in each, every rank runs one batch that its node has launched, or none. A node
that launches a batch has it told to all other ranks. A worker begins a step when it has a batch, or when some rank has
launched more batches than it has run: that rank's worker is about to begin it, and waits for everybody. What was run is
told in the step itself, so all workers know the same of it after every step, in whatever order they hear of launches.
"""


class Lockstep:
    """As one rank sees it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._launched = [0] * num_ranks  # batches of other ranks, as far as they have been told here
        self._run = [0] * num_ranks

    def launched(self, rank: int) -> None:
        """Another rank has launched its next batch."""
        self._launched[rank] += 1

    def ran(self, ranks: list[int]) -> None:
        """A step has begun in which these ranks run a batch."""
        for rank in ranks:
            self._run[rank] += 1

    @property
    def is_awaited(self) -> bool:
        """Whether another rank waits for this one, or is about to."""
        return any(launched > run for launched, run in zip(self._launched, self._run, strict=True))
