"""Tensor and pipeline parallelism: which part of a model is whose, and what its workers say to each other.

A shard computes with its heads, its part of the inner features and its part of the vocabulary. What is cut along the
outputs needs nothing (each head attends for itself); what is cut along the inputs gives a part of every sum, which
`all_reduce` adds up; what is cut along the vocabulary is put together by `all_gather`.

Parts may be uneven: any number of heads can be spread over any smaller number of shards.

With DP attention the workers of several DP ranks share the MLPs: each attends to rows of its own with all heads, and
has a part of every MLP, for the rows of all.

Layers are spread over stages, each of which is cut into shards like that. A stage hands hidden states on to the next
one; of all workers one samples, and tells the others the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from tandem.core.kv_parts import holders, kv_heads_of, share
from tandem.engine.model_config import check_heads, check_layers


@dataclass(frozen=True, slots=True)
class Shard:
    """Number `rank` of `size`."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    @property
    def all(self) -> list["Shard"]:
        """All of this size, in order."""
        return [Shard(rank, self.size) for rank in range(self.size)]

    def part(self, total: int) -> slice:
        """Of `total` things in a row, this shard's; over all ranks they are all, each once, in order."""
        own = share(total, self.rank, self.size)
        return slice(own.start, own.stop)


class MlpGroup(Protocol):
    """The workers over which MLPs are cut, as one of them sees the others. Raises WorkerGone."""

    @property
    def shard(self) -> Shard: ...

    @property
    def is_exact(self) -> bool:
        """Whether sums keep the bits that they have in one worker: no sum is cut, inputs are gathered instead."""
        ...

    def rows(self, own: Tensor) -> Tensor:
        """[n, features] of this worker to the rows that all compute with. They are the same on every worker."""
        ...

    def sums(self, part: Tensor) -> Tensor:
        """A part of each sum, of what `rows` returned, to the whole sums of this worker's own rows, [n, features].
        `part` is given away."""
        ...

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """What all shards gave, joined along the last dimension in order of ranks. sizes: that dimension of each."""
        ...


class Group(MlpGroup, Protocol):
    """The shards of one model, as one of them sees the others. Every shard makes the same calls in the same order.

    What comes back has the same bits on every shard, or they would sample different tokens. Raises WorkerGone.
    """

    @property
    def mlp(self) -> MlpGroup:
        """Of MLPs: itself, or with DP attention the workers of all ranks."""
        ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of what all shards gave, of one shape. `part` is given away."""
        ...


@dataclass(frozen=True, slots=True)
class OneShard:
    """The group of a model that is not divided, but for its MLPs where DP ranks share them."""

    shard: Shard = Shard(0, 1)
    shared: MlpGroup | None = None
    is_exact: bool = True

    @property
    def mlp(self) -> MlpGroup:
        return self if self.shared is None else self.shared

    def rows(self, own: Tensor) -> Tensor:
        return own

    def sums(self, part: Tensor) -> Tensor:
        return part

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        return part


class DpRanks(Protocol):
    """The DP ranks that go through the same steps, as one of them sees the others (DP attention)."""

    @property
    def num_prefill_ranks(self) -> int | UnsetType:
        """How many of them compute prompts in the step that has begun last; UNSET where there is only one."""
        ...

    def meet(self, rows: int | None, *, has_prompts: bool = False) -> bool:
        """Begin a step: say how many rows this rank has in it, None without a batch, and whether prompts are among
        them; hear it of all others.

        Returns whether anybody has rows. Until the next step every MLP is computed for them. Raises WorkerGone.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """Of a replica that steps alone."""

    num_prefill_ranks: int | UnsetType = UNSET

    def meet(self, rows: int | None, *, has_prompts: bool = False) -> bool:
        return bool(rows)


class ContextRanks(Protocol):
    """The ranks that share out prompt tokens (`context_parallel.py`), as one of them sees the others. Raises
    WorkerGone.
    """

    @property
    def shard(self) -> Shard: ...

    def all_rows(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[n, features] of this rank to the rows of all, in order of ranks. sizes: how many each has."""
        ...


@dataclass(frozen=True, slots=True)
class OneContext:
    """Of a worker that computes all tokens."""

    shard: Shard = Shard(0, 1)

    def all_rows(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        return own


class WorkerGone(Exception):
    """Another worker of the replica does not answer any more; so this one has nothing left to do."""


class Pipeline(Protocol):
    """The stages of one model, as one worker sees them. Nothing is given to somebody who waits for something else:
    who sends goes on at once, who receives takes things in the order in which they were sent. Raises WorkerGone.
    """

    @property
    def stage(self) -> Shard: ...

    @property
    def samples(self) -> bool:
        """Whether this worker is the one that draws the tokens."""
        ...

    def receive_hidden(self, rows: int, features: int, dtype: torch.dtype) -> Tensor:
        """[rows, features]: what the stage before has sent. Not on the first stage."""
        ...

    def send_hidden(self, hidden: Tensor) -> None:
        """To the stage behind. Not on the last one. `hidden` is given away."""
        ...

    def send_tokens(self, tokens: np.ndarray) -> None:
        """To all other workers, from the one that samples. tokens: [n] int32."""
        ...

    def receive_tokens(self, count: int) -> np.ndarray:
        """[count] int32: what the one that samples has sent, batch by batch."""
        ...


@dataclass(frozen=True, slots=True)
class OneStage:
    """The pipeline of a worker that has nobody beside it."""

    stage: Shard = Shard(0, 1)
    samples: bool = True

    def receive_hidden(self, rows: int, features: int, dtype: torch.dtype) -> Tensor:
        raise AssertionError("the only stage is the first one")

    def send_hidden(self, hidden: Tensor) -> None:
        raise AssertionError("the only stage is the last one")

    def send_tokens(self, tokens: np.ndarray) -> None:
        pass

    def receive_tokens(self, count: int) -> np.ndarray:
        raise AssertionError("the only worker samples")


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one shard: query heads, and the KV heads that these look at."""

    query: slice
    kv: slice
    is_first: bool = True  # of the shards that have these KV heads

    @classmethod
    def of(cls, shard: Shard, *, num_heads: int, num_kv_heads: int) -> "HeadShard":
        """Whole groups of query heads go with their KV head where there are enough KV heads; else several shards
        have the same KV head and each a part of its query heads. Raises ModelError for more shards than heads.
        """
        check_heads(num_heads, shard.size)
        heads_per_group = num_heads // num_kv_heads
        kv = kv_heads_of(shard.rank, shard.size, num_kv_heads)
        if shard.size <= num_kv_heads:
            query = slice(kv.start * heads_per_group, kv.stop * heads_per_group)
            return cls(query, slice(kv.start, kv.stop))
        group = kv.start
        sharers = holders(group, shard.size, num_kv_heads)
        own = Shard(sharers.index(shard.rank), len(sharers)).part(heads_per_group)
        assert own.start < own.stop, "no more shards share a KV head than heads look at it"
        first = group * heads_per_group
        return cls(slice(first + own.start, first + own.stop), slice(group, group + 1), is_first=own.start == 0)

    @property
    def num_query(self) -> int:
        return self.query.stop - self.query.start

    @property
    def num_kv(self) -> int:
        return self.kv.stop - self.kv.start


def layers_of(stage: Shard, num_layers: int) -> range:
    """The layers of one pipeline stage. Raises ModelError for more stages than layers."""
    check_layers(num_layers, stage.size)
    return range(num_layers)[stage.part(num_layers)]
