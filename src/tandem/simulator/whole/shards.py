"""What the engines of one virtual replica hand to each other, by the ports of real ones (`engine/parallel.py`).

Every shard keeps the KV of a position times a weight of its own (`simulator/model.py`), so its bytes are nonsense on
every other one. What it has read of a row, without its weight, is what all others have to have read too. The shards of
a stage add up parts of that, as a layer does; a stage makes of it, and of what the stage before hands on, what it hands
on itself. All of them are right, or what comes out is nonsense: the KV that is written next, and the token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tandem.core.kv_parts import share
from tandem.engine.parallel import ContextRanks, DpRanks, Group, OneContext, OneRank, Pipeline
from tandem.ranks import Rank
from tandem.simulator.model import MASK

ONE_RANK = OneRank()
ONE_CONTEXT = OneContext()
BEFORE, HERE = 3, -2  # what the stage before has read, and what this one has; together 1


@dataclass(frozen=True, slots=True)
class Shards:
    """As one of them sees the others. One number for each row of a batch; every number is of 64 bits."""

    rank: Rank
    group: Group
    pipeline: Pipeline
    ranks: DpRanks = ONE_RANK
    context: ContextRanks = ONE_CONTEXT

    def from_stage_before(self, num_rows: int) -> list[int] | None:
        """None on the first stage. Waits. Raises WorkerGone."""
        if self.rank.pp_rank == 0 or num_rows == 0:
            return None
        return numbers(self.pipeline.receive_hidden(num_rows, 1, torch.int64))

    def agreed(self, own: list[int], before: list[int] | None) -> list[int]:
        """What this shard has read, if the others of its stage and the stage before have too. Raises WorkerGone."""
        if self.rank.tp_size > 1 and own:
            own = numbers(self.group.all_reduce(tensor([self._part(number) for number in own])))
        if before is None:
            return own
        return [(BEFORE * one + HERE * other) & MASK for one, other in zip(before, own, strict=True)]

    def _part(self, number: int) -> int:
        """Of all shards of a stage together once."""
        others = self.rank.tp_size - 1
        return number * (3 if self.rank.tp_rank < others else 1 - 3 * others) & MASK

    def shared(self, own: list[int]) -> list[int]:
        """The same numbers, each of which all DP ranks that step together have a part of. Raises WorkerGone."""
        mlp = self.group.mlp
        if not mlp.shard.size > self.rank.tp_size:
            return own
        others = mlp.shard.size - 1
        weight = 3 if mlp.shard.rank < others else 1 - 3 * others
        return numbers(mlp.sums(tensor([number * weight & MASK for number in numbers(mlp.rows(tensor(own)))])))

    def of_all_tokens(self, computed: list[int]) -> list[int]:
        """What the context-parallel ranks have computed of a batch's prompt tokens, each of its own. Raises WorkerGone.

        computed: what this one makes of all. A real one computes its own only; here each depends on all before it.
        """
        total, size = len(computed), self.rank.cp_size
        if size == 1 or total < size:
            return computed
        runs = [share(total, rank, size) for rank in range(size)]
        own = runs[self.rank.cp_rank]
        return numbers(self.context.all_rows(tensor(computed[own.start : own.stop]), [len(run) for run in runs]))

    def to_stage_behind(self, sums: list[int]) -> None:
        """Raises WorkerGone."""
        if self.rank.pp_rank < self.rank.pp_size - 1 and sums:
            self.pipeline.send_hidden(tensor(sums))

    def send_tokens(self, tokens: list[int]) -> None:
        """To all others. Raises WorkerGone."""
        self.pipeline.send_tokens(np.array(tokens, np.int32))


def tensor(values: list[int]) -> torch.Tensor:
    """[n, 1] int64"""
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64).reshape(-1, 1))


def numbers(values: torch.Tensor) -> list[int]:
    return values.numpy().view(np.uint64).reshape(-1).tolist()
