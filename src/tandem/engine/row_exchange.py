"""DP attention over torch.distributed: rows of all DP ranks for every MLP, and each sum back to the rank of its row.

The workers are those of all DP ranks of a server, one each. Every step begins with an exchange of one number: how many
rows each of them has, and whether prompts are among them, or that it has no batch. The parts of a sum are added in
order of ranks, so that a row's bits do not depend on which rank has it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.core.lockstep import Lockstep
from tandem.engine.closed_doors import close_doors
from tandem.engine.parallel import Shard
from tandem.engine.process_group import Meeting, as_bytes, connect, gathered, greet, joined_rows, least, others_there

NO_BATCH = -1  # said instead of a number of rows
PROMPTS = 1 << 32  # added to that of a rank which computes prompts


class RowExchange:
    """The `DpRanks` of one worker, and the `MlpGroup` of its model."""

    is_exact = False

    def __init__(self, shard: Shard, lockstep: Lockstep, at: Meeting) -> None:
        """Returns when all are there. `lockstep`: told of every step.

        Raises OSError or RuntimeError when they do not come, WorkerGone when they do not stay.
        """
        self.shard = shard
        self._lockstep = lockstep
        self._sizes: Sequence[int] = ()  # rows of each rank in this step
        self.num_prefill_ranks = 0
        connect(shard.rank, shard.size, at)
        least(0)  # all have connected to all
        close_doors()
        if at.device != "cpu":
            greet(at.device, [None])

    def meet(self, rows: int | None, *, has_prompts: bool = False) -> bool:
        own = torch.tensor([NO_BATCH if rows is None else rows + PROMPTS * has_prompts], dtype=torch.int64)
        said = [int(number) for number in gathered(own, self.shard.size)]
        self._lockstep.ran([rank for rank, number in enumerate(said) if number != NO_BATCH])
        self._sizes = [max(number, 0) % PROMPTS for number in said]
        self.num_prefill_ranks = sum(number >= PROMPTS for number in said)
        return any(self._sizes)

    def rows(self, own: Tensor) -> Tensor:
        assert own.shape[0] == self._sizes[self.shard.rank], "as many as were told when the step began"
        return joined_rows(own, self._sizes)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        raise AssertionError("only exact groups gather inputs")

    def sums(self, part: Tensor) -> Tensor:
        own, row_bytes = self._sizes[self.shard.rank], part.shape[1] * part.element_size()
        found = part.new_empty(self.shard.size, own, part.shape[1])
        with others_there():
            dist.all_to_all_single(
                as_bytes(found),
                as_bytes(part.contiguous()),
                output_split_sizes=[own * row_bytes] * self.shard.size,
                input_split_sizes=[size * row_bytes for size in self._sizes],
            )
        total, *others = found.unbind()
        for other in others:
            total += other
        return total
