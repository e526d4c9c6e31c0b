"""All blocks of a decoder in one call of the native kernels: nothing of Python between two layers, no memory taken.

Holds where every tensor lies. Only for a model that is not cut into shards, whose sums have to be put together between
the products, and whose linears are those of `layers/linear.py`; and only for layers as Llama's: dense, norms before
attention and MLP and perhaps on each query and key head, heads that are turned whole.
"""

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine.attention.native import NativeAttention
from tandem.engine.layers.activation import silu_and_mul
from tandem.engine.layers.experts import Experts
from tandem.engine.layers.linear import ColumnParallelLinear, GatheringLinear, QkvLinear, RowParallelLinear
from tandem.engine.layers.mlp import GatedMlp
from tandem.engine.layers.norm import GatheringWidthNorms, HeadNorms, RMSNorm, WidthNorms
from tandem.engine.layers.quantized import LinearWeight
from tandem.engine.native.library import DecoderView, LayerView, LinearView


class Layer(Protocol):
    """What is read of a block."""

    @property
    def before_attention(self) -> RMSNorm | None: ...
    @property
    def qkv(self) -> QkvLinear: ...
    @property
    def qk_norm(self) -> HeadNorms | WidthNorms | GatheringWidthNorms | None: ...
    @property
    def o_proj(self) -> RowParallelLinear | GatheringLinear: ...
    @property
    def after_attention(self) -> object | None: ...
    @property
    def before_mlp(self) -> RMSNorm | None: ...
    @property
    def mlp(self) -> GatedMlp | Experts: ...
    @property
    def after_mlp(self) -> object | None: ...


@dataclass(frozen=True, slots=True)
class FlatBlocks:
    """Addresses of the tensors of blocks, which have to outlive it."""

    views: Array[LayerView]
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, blocks: Sequence[Layer], *, rotary_dim: int) -> "FlatBlocks | None":
        """None where they are not what one call can run. rotary_dim: how much of a head is turned."""
        views = [view for block in blocks if (view := _view(block)) is not None]
        if not views or len(views) < len(blocks):
            return None
        first, dim, norm = views[0], blocks[0].qkv.head_dim, blocks[0].before_attention
        if rotary_dim < dim or norm is None:
            return None
        return cls(
            views=(LayerView * len(views))(*views),
            hidden=first.o.outputs,
            inner=first.down.inputs,
            heads=first.q.outputs // dim,
            kv_heads=first.k.outputs // dim,
            head_dim=dim,
            eps=norm.eps,
        )

    def fits(self, x: Tensor, attention: object) -> bool:
        """x: [n, hidden]"""
        if not isinstance(attention, NativeAttention) or not x.is_contiguous():
            return False
        return attention.view.num_tokens == x.shape[0]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: NativeAttention) -> Tensor:
        """x: [n, hidden], in place. cos, sin: [positions, head_dim], of all positions up to the last of the batch."""
        kv = attention.kv
        model = DecoderView(
            len(self.views),
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.inner,
            self.eps,
            self.views,
            kv.tensor.data_ptr(),
            kv.page_size,
            kv.is_int8,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        attention.kernels.layers(model, attention.view, x)
        return x


def _view(block: Layer) -> LayerView | None:
    """None of a block that one call cannot run."""
    qkv, mlp, qk_norm = block.qkv, block.mlp, block.qk_norm
    if not isinstance(mlp, GatedMlp) or mlp.activation is not silu_and_mul:
        return None
    if isinstance(qk_norm, WidthNorms | GatheringWidthNorms):
        return None
    if block.before_attention is None or block.before_mlp is None or block.after_attention or block.after_mlp:
        return None
    columns = (qkv.q_proj, qkv.k_proj, qkv.v_proj)
    inner = (mlp.gate_up.gate_proj, mlp.gate_up.up_proj)
    rows = (block.o_proj, mlp.down_proj)
    if not all(isinstance(linear, ColumnParallelLinear) for linear in (*columns, *inner)):
        return None
    if not all(isinstance(linear, RowParallelLinear) and linear.group.shard.size == 1 for linear in rows):
        return None
    linears = (*columns, block.o_proj, *inner, mlp.down_proj)
    if not all(_lies_as_kernels_read_it(linear.weight) for linear in linears):
        return None
    q_norm, k_norm = (None, None) if qk_norm is None else (qk_norm.q, qk_norm.k)
    norms = (block.before_attention, q_norm, k_norm, block.before_mlp)
    addresses = (None if norm is None else norm.weight.data_ptr() for norm in norms)
    return LayerView(*addresses, *(LinearView.of(linear.weight, linear.bias) for linear in linears))


def _lies_as_kernels_read_it(weight: LinearWeight) -> bool:
    return not isinstance(weight, Tensor) or (weight.device.type == "cpu" and weight.is_contiguous())
