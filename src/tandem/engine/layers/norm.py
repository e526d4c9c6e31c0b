"""Norms: of the root mean square, BERT's of layers, and a factor where others have one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.native import library
from tandem.engine.parallel import Group, HeadShard


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over the last dimension, in fp32 whatever the type of x. Every shard has all of it.

    A weight of the type of x is multiplied after rounding to that type, one of fp32 before.
    """

    weight: Tensor  # [features]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        kernels = library.fitting(x)
        if kernels is not None and self.weight.dtype == x.dtype:
            return kernels.rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if self.weight.dtype == torch.float32:
            return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor in the place of a norm."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Over the last dimension: mean 0 and variance 1 before weight and bias. Every shard has all of it."""

    weight: Tensor  # [features]
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Of queries and keys, each head for itself."""

    q: RMSNorm
    k: RMSNorm

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q: [n, heads, head_dim], k: [n, kv_heads, head_dim]"""
        return self.q(q), self.k(k)


@dataclass(frozen=True, slots=True)
class WidthNorms:
    """Of queries and keys, over all heads of the layer together: the group adds up what each shard sees of a row."""

    q: RMSNorm  # weights: those of this shard's heads
    k: RMSNorm
    q_features: int  # of the whole layer
    k_features: int
    adds_keys: bool  # of several shards with the same KV head one counts it
    group: Group

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q: [n, heads, head_dim], k: [n, kv_heads, head_dim]: this shard's"""
        if self.group.shard.size == 1:
            return self.q(q.flatten(1)).view_as(q), self.k(k.flatten(1)).view_as(k)
        squares = [x.float().square().sum(dim=(1, 2)) for x in (q, k)]
        sums = self.group.all_reduce(torch.stack((squares[0], squares[1] * self.adds_keys), dim=-1))
        q_mean, k_mean = sums[:, :1] / self.q_features, sums[:, 1:] / self.k_features
        return _scaled(q, q_mean, self.q), _scaled(k, k_mean, self.k)


@dataclass(frozen=True, slots=True)
class GatheringWidthNorms:
    """The same in an exact group (`linear.py`): each shard sees all heads, norms them all, and keeps its own."""

    q: RMSNorm  # weights: those of all heads
    k: RMSNorm
    heads: HeadShard
    heads_of_all: list[HeadShard]
    group: Group

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """As `WidthNorms` has them."""
        dim = q.shape[-1]
        own_k = k.flatten(1) if self.heads.is_first else k.new_empty(k.shape[0], 0)  # each head comes once
        all_q = self.group.all_gather(q.flatten(1), [one.num_query * dim for one in self.heads_of_all])
        all_k = self.group.all_gather(own_k, [one.num_kv * dim * one.is_first for one in self.heads_of_all])
        whole_q, whole_k = (norm(x).unflatten(1, (-1, dim)) for norm, x in ((self.q, all_q), (self.k, all_k)))
        own_q, own_k = whole_q[:, self.heads.query], whole_k[:, self.heads.kv]
        return own_q.contiguous(), own_k.contiguous()  # a row in pieces is rotated with other roundings


def _scaled(x: Tensor, mean_square: Tensor, norm: RMSNorm) -> Tensor:
    """x: [n, heads, head_dim], mean_square: [n, 1] fp32"""
    values = x.flatten(1).float() * torch.rsqrt(mean_square + norm.eps)
    return (values.to(x.dtype) * norm.weight).view_as(x)
