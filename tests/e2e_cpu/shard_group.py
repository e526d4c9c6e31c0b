"""All workers of a model in one process: a thread each. The shards of a stage meet at a barrier, stages have queues.

A worker that fails breaks its barrier, and nobody waits for long at a queue.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem.engine.parallel import Shard
from tandem.ranks import Rank, all_ranks

Result = TypeVar("Result")
T = TypeVar("T")
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
    num_exchanged: int = 0
    is_exact: bool = False

    @property
    def mlp(self) -> "ThreadGroup":
        return self

    def rows(self, own: Tensor) -> Tensor:
        return own

    def sums(self, part: Tensor) -> Tensor:
        return self.all_reduce(part)

    def all_reduce(self, part: Tensor) -> Tensor:
        self.num_reduced += 1
        return self._exchange(part, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        assert part.shape[-1] == sizes[self.shard.rank]
        assert len(sizes) == self.shard.size
        self.num_gathered += 1
        return self._exchange(part, lambda parts: torch.cat(parts, dim=-1))

    def _exchange(self, part: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.num_exchanged += 1
        self.meeting.parts[self.shard.rank] = part
        self.meeting.barrier.wait()
        combined = combine(list(self.meeting.parts))
        self.meeting.barrier.wait()  # all have read before somebody writes his next part
        return combined


@dataclass
class ThreadContext:
    """The `ContextRanks` of one thread."""

    group: ThreadGroup

    @property
    def shard(self) -> Shard:
        return self.group.shard

    def all_rows(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        assert len(own) == sizes[self.shard.rank]
        return self.group._exchange(own, torch.cat)


@dataclass
class ThreadRanks:
    """The `DpRanks` of one thread, and the `MlpGroup` of its model."""

    group: ThreadGroup
    sizes: list[int] = field(default_factory=list)
    is_exact: bool = False
    num_prefill_ranks: int = 0

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        raise AssertionError("only exact groups gather inputs")

    @property
    def shard(self) -> Shard:
        return self.group.shard

    def meet(self, rows: int | None, *, has_prompts: bool = False) -> bool:
        said = self.group._exchange(torch.tensor([[rows or 0, has_prompts]]), torch.cat)
        self.sizes, prefills = said.T.tolist()
        self.num_prefill_ranks = sum(prefills)
        return any(self.sizes)

    def rows(self, own: Tensor) -> Tensor:
        assert len(own) == self.sizes[self.shard.rank]
        return self.group._exchange(own, torch.cat)

    def sums(self, part: Tensor) -> Tensor:
        return self.group.all_reduce(part).split(self.sizes)[self.shard.rank]


def on_every_shard(size: int, program: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What the program returns on each, in order of ranks. Raises what the first of them raises."""
    meeting = Meeting(size)

    def run(rank: int) -> Result:
        try:
            return program(ThreadGroup(Shard(rank, size), meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    return together(run, range(size))


def together(run: Callable[[T], Result], members: Sequence[T]) -> list[Result]:
    """Each in a thread of its own. Raises what the first raises that has not only waited for others in vain."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(run, member) for member in members]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError | queue.Empty)):
        raise error
    return [future.result() for future in futures]


Mailboxes = defaultdict[tuple[str, int], "queue.Queue[Tensor]"]


@dataclass
class ThreadPipeline:
    """A `Pipeline`."""

    rank: Rank
    mailboxes: Mailboxes
    context: ThreadContext
    num_received: int = 0  # batches whose tokens were taken

    @property
    def stage(self) -> Shard:
        return Shard(self.rank.pp_rank, self.rank.pp_size)

    @property
    def samples(self) -> bool:
        return self.rank.samples

    def receive_hidden(self, rows: int, features: int, dtype: torch.dtype) -> Tensor:
        hidden = self.mailboxes["hidden", self.rank.shard].get(timeout=MEETING_SECONDS)
        assert (tuple(hidden.shape), hidden.dtype) == ((rows, features), dtype)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        self.mailboxes["hidden", self.rank.shard + self.rank.tp_size * self.rank.cp_size].put(hidden)

    def send_tokens(self, tokens: np.ndarray) -> None:
        for shard in range(self.rank.num_shards):
            if shard != self.rank.shard:
                self.mailboxes["tokens", shard].put(torch.from_numpy(tokens))

    def receive_tokens(self, count: int) -> np.ndarray:
        tokens = self.mailboxes["tokens", self.rank.shard].get(timeout=MEETING_SECONDS)
        assert len(tokens) == count
        self.num_received += 1
        return tokens.numpy()


def on_every_worker(
    tp_size: int, pp_size: int, program: Callable[[ThreadGroup, ThreadPipeline], Result], *, cp_size: int = 1
) -> list[Result]:
    """What the program returns on each, in order of shards. Raises what the first of them raises."""
    mailboxes: Mailboxes = defaultdict(queue.Queue)
    ranks = all_ranks(tp_size, pp_size, cp_size)
    for rank in ranks:
        mailboxes["hidden", rank.shard], mailboxes["tokens", rank.shard] = queue.Queue(), queue.Queue()
    shards = {(rank.pp_rank, rank.cp_rank): Meeting(tp_size) for rank in ranks}
    contexts = {(rank.pp_rank, rank.tp_rank): Meeting(cp_size) for rank in ranks}

    def run(rank: Rank) -> Result:
        meeting, context = shards[rank.pp_rank, rank.cp_rank], contexts[rank.pp_rank, rank.tp_rank]
        try:
            group = ThreadGroup(Shard(rank.tp_rank, tp_size), meeting)
            others = ThreadContext(ThreadGroup(Shard(rank.cp_rank, cp_size), context))
            return program(group, ThreadPipeline(rank, mailboxes, others))
        except BaseException:
            meeting.barrier.abort()
            context.barrier.abort()
            raise

    return together(run, ranks)
