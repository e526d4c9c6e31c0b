"""All shards of a model in one process: a thread each, and a group whose members meet at a barrier.

A shard that fails breaks the barrier, so nobody waits for it.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tandem.engine.parallel import Shard

Result = TypeVar("Result")
MEETING_SECONDS = 60


@dataclass
class Meeting:
    """What the members of a group share."""

    size: int
    parts: list[Tensor] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [torch.empty(0)] * self.size
        self.barrier = threading.Barrier(self.size, timeout=MEETING_SECONDS)


@dataclass
class ThreadGroup:
    """A `Group`. Sums are taken in order of ranks, so all members get the same bits."""

    shard: Shard
    meeting: Meeting
    num_reduced: int = 0
    num_gathered: int = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        self.num_reduced += 1
        return self._exchange(part, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        assert part.shape[-1] == sizes[self.shard.rank]
        assert len(sizes) == self.shard.size
        self.num_gathered += 1
        return self._exchange(part, lambda parts: torch.cat(parts, dim=-1))

    def _exchange(self, part: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.meeting.parts[self.shard.rank] = part
        self.meeting.barrier.wait()
        combined = combine(list(self.meeting.parts))
        self.meeting.barrier.wait()  # all have read before somebody writes his next part
        return combined


def on_every_shard(size: int, program: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What the program returns on each, in order of ranks. Raises what the first of them raises."""
    meeting = Meeting(size)

    def run(rank: int) -> Result:
        try:
            return program(ThreadGroup(Shard(rank, size), meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
