"""Decoder-only transformer of the Llama family; Qwen3 is Llama plus a norm on each query and key head.

A layer is two functions of rows with attention between them: `project` and `finish` look at one token at a time, so
the caller decides how many rows go through them together (all of them, or fixed tiles: see `inputs.py`).

Weights keep their layout in the file, [out_features, in_features], because they are mapped, not loaded: joining
q, k and v would copy them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.attention import PagedAttention
from tandem.engine.inputs import TILE_ROWS, Inputs
from tandem.engine.model_config import ModelConfig
from tandem.engine.rope import RotaryTable, rotate

UNDIVIDED_ELEMENTS = 1 << 15  # torch computes so many elements of a tensor in one thread


class Weights(Protocol):
    """Where a model takes its tensors from. Raises ModelError for one that is missing or has another shape."""

    dtype: torch.dtype
    device: str

    def take(self, name: str, *shape: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm, in fp32 whatever the type of x."""

    weight: Tensor  # [features]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


def silu(x: Tensor) -> Tensor:
    """In place. x: [n, features], contiguous.

    torch divides a larger tensor among its threads and computes the last few elements of each share one by one, with
    an exponential that rounds otherwise than the one for whole vectors; where a share ends depends on the number of
    threads. So up to a tile of rows, as the deterministic arrangement has them, goes through in pieces not divided.
    """
    pieces = x.view(-1).split(UNDIVIDED_ELEMENTS) if x.shape[0] <= TILE_ROWS else (x,)
    for piece in pieces:
        functional.silu(piece, inplace=True)
    return x


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Norm
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o_proj: Linear
    post_norm: Norm
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    head_dim: int

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [n, hidden]; returns q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim], q and k rotated."""
        h = self.input_norm(x)
        q = self.q_proj(h).view(h.shape[0], -1, self.head_dim)
        k = self.k_proj(h).view(h.shape[0], -1, self.head_dim)
        v = self.v_proj(h).view(h.shape[0], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [n, hidden], attended: [n, num_heads * head_dim]; returns the layer's output [n, hidden]."""
        x = x + self.o_proj(attended)
        h = self.post_norm(x)
        return x + self.down_proj(silu(self.gate_proj(h)).mul_(self.up_proj(h)))


@dataclass(frozen=True, slots=True)
class Transformer:
    embedding: Tensor  # [vocab, hidden]
    rotary: RotaryTable
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    def logits(self, inputs: Inputs, attend: PagedAttention) -> Tensor:
        """Writes KV of every token of the batch; returns fp32 logits [outcome rows, vocab]."""
        x = functional.embedding(inputs.token_ids, self.embedding)
        cos, sin = self.rotary.at(inputs.positions, last_position=inputs.last_position)
        for index, layer in enumerate(self.layers):
            q, k, v = inputs.by_rows(layer.project, x, cos, sin)
            x = inputs.by_rows(layer.finish, x, attend(q, k, v, inputs=inputs, layer=index))
        scores = inputs.by_rows(self._score, x.index_select(0, inputs.sampled))
        return scores if inputs.sampled_place is None else scores.index_select(0, inputs.sampled_place)

    def _score(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).float()


def build_llama(config: ModelConfig, weights: Weights) -> Transformer:
    return _build(config, weights, head_norms=False)


def build_qwen3(config: ModelConfig, weights: Weights) -> Transformer:
    return _build(config, weights, head_norms=True)


def _build(config: ModelConfig, weights: Weights, *, head_norms: bool) -> Transformer:
    embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = (
        embedding if config.tied_embeddings else weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    return Transformer(
        embedding=embedding,
        rotary=RotaryTable(config.rope, head_dim=config.head_dim, dtype=weights.dtype, device=weights.device),
        layers=tuple(_layer(config, weights, f"model.layers.{i}", head_norms) for i in range(config.num_layers)),
        norm=Norm(weights.take("model.norm.weight", config.hidden_size), config.norm_eps),
        head=Linear(head),
    )


def _layer(config: ModelConfig, weights: Weights, at: str, head_norms: bool) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Linear:
        bias = weights.take(f"{at}.{name}.bias", outputs) if has_bias else None
        return Linear(weights.take(f"{at}.{name}.weight", outputs, inputs), bias)

    def norm(name: str, features: int) -> Norm:
        return Norm(weights.take(f"{at}.{name}.weight", features), config.norm_eps)

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        q_proj=linear("self_attn.q_proj", heads, hidden, config.attention_bias),
        k_proj=linear("self_attn.k_proj", kv_heads, hidden, config.attention_bias),
        v_proj=linear("self_attn.v_proj", kv_heads, hidden, config.attention_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if head_norms else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if head_norms else None,
        o_proj=linear("self_attn.o_proj", hidden, heads, config.attention_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_proj=linear("mlp.gate_proj", inner, hidden, config.mlp_bias),
        up_proj=linear("mlp.up_proj", inner, hidden, config.mlp_bias),
        down_proj=linear("mlp.down_proj", hidden, inner, config.mlp_bias),
        head_dim=config.head_dim,
    )
