"""Where a worker stands among the workers of its replica.

Pipeline stages follow each other; in each there are context-parallel ranks, which share out the tokens of prompts; each
of these is cut into tensor-parallel shards. Shards of a replica are numbered in this order (`values.Cut`): the core and
the data plane know these numbers only.
"""

from msgspec import Struct

from tandem.core.values import Cut, ShardId


class Rank(Struct, frozen=True, order=True):
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @property
    def shard(self) -> ShardId:
        return self.cut.shard(self.pp_rank, self.cp_rank, self.tp_rank)

    @property
    def cut(self) -> Cut:
        return Cut(self.tp_size, self.pp_size, self.cp_size)

    @property
    def num_shards(self) -> int:
        return self.cut.num_shards

    @property
    def number_in_stage(self) -> int:
        """What metrics call its `tp_rank`: SGLang counts context-parallel ranks among them."""
        return self.cp_rank * self.tp_size + self.tp_rank

    @property
    def samples(self) -> bool:
        """One worker draws the tokens and tells the others: the first shard of the last stage."""
        return self.tp_rank == self.cp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """For log lines and errors: `worker` where there is one, else `worker TP1 PP0`, or `worker TP1 CP1 PP0`."""
        context = "" if self.cp_size == 1 else f" CP{self.cp_rank}"
        return "worker" if self.num_shards == 1 else f"worker TP{self.tp_rank}{context} PP{self.pp_rank}"


def all_ranks(tp_size: int, pp_size: int, cp_size: int = 1) -> list[Rank]:
    """In order of their shards."""
    cut = Cut(tp_size, pp_size, cp_size)
    places = [cut.place(shard) for shard in cut.shards]
    return [Rank(tp, tp_size, pp, pp_size, cp, cp_size) for pp, cp, tp in places]
