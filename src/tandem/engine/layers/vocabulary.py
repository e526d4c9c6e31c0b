"""The two ends of a model, cut along the vocabulary: tokens in, scores out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.layers.product import product
from tandem.engine.layers.quantized import LinearWeight, Table, looked_up
from tandem.engine.native import library
from tandem.engine.parallel import Group, Shard


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    weight: Table  # [this shard's tokens, hidden]
    dtype: torch.dtype
    first_token: int  # of this shard
    group: Group
    scale: float = 1.0

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[n] int64 to [n, hidden], the same on every shard: who has a token looks it up, the others add -0.0.

        That changes no bit of anything, as +0.0 would of -0.0.
        """
        if self.group.shard.size == 1:
            return self._scaled(looked_up(self.weight, token_ids, self.dtype))
        local = token_ids - self.first_token
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = looked_up(self.weight, local.masked_fill(is_elsewhere, 0), self.dtype)
        return self._scaled(self.group.all_reduce(found.masked_fill(is_elsewhere[:, None], -0.0)))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


@dataclass(frozen=True, slots=True)
class VocabParallelHead:
    weight: LinearWeight  # [this shard's tokens, hidden]
    vocab_size: int
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to the scores of all tokens, fp32 [n, vocab], on every shard"""
        scores = self.group.all_gather(product(x, self.weight), vocab_parts(self.vocab_size, self.group.shard))
        kernels = library.fitting(scores)
        # torch's threads, which have slept since the last step, would have to take the cores from the kernels'
        return scores.float() if kernels is None else kernels.widened(scores)


def vocab_parts(vocab_size: int, shard: Shard) -> list[int]:
    """How many tokens each shard has."""
    parts = [Shard(rank, shard.size).part(vocab_size) for rank in range(shard.size)]
    return [part.stop - part.start for part in parts]
