"""Where a worker stands among the workers of its replica.

Pipeline stages follow each other, each is cut into tensor-parallel shards. Shards of a replica are numbered stage by
stage: the core and the data plane know these numbers only.
"""

from msgspec import Struct

from tandem.core.values import Cut, ShardId


class Rank(Struct, frozen=True, order=True):
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def shard(self) -> ShardId:
        return ShardId(self.pp_rank * self.tp_size + self.tp_rank)

    @property
    def cut(self) -> Cut:
        return Cut(self.tp_size, self.pp_size)

    @property
    def num_shards(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def samples(self) -> bool:
        """One worker draws the tokens and tells the others: the first shard of the last stage."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """For log lines and errors: `worker` where there is one, else `worker TP1 PP0`."""
        return "worker" if self.num_shards == 1 else f"worker TP{self.tp_rank} PP{self.pp_rank}"


def all_ranks(tp_size: int, pp_size: int) -> list[Rank]:
    """In order of their shards."""
    return [Rank(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
