"""Gemma 2: norms before and behind attention and MLP, gates of GELU, scaled embeddings. Windows of every other layer
and soft caps are the attention backend's affair: `ModelConfig`.
"""

from collections.abc import Callable

import torch

from tandem.engine.layers.activation import gelu_tanh_and_mul
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.decoder import Decoder, DecoderLayer, Loader, build_decoder
from tandem.engine.parallel import Group, Shard


def block(layer: Loader) -> DecoderLayer:
    bias = layer.config.attention_bias
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=bias),
        o_proj=layer.output("self_attn.o_proj", bias=bias),
        after_attention=layer.norm("post_attention_layernorm"),
        before_mlp=layer.norm("pre_feedforward_layernorm"),
        mlp=layer.mlp("mlp", bias=False, activation=gelu_tanh_and_mul),
        after_mlp=layer.norm("post_feedforward_layernorm"),
    )


def build(
    config: ModelConfig,
    weights: Weights,
    group: Group,
    stage: Shard,
    block: Callable[[Loader], DecoderLayer] = block,
) -> Decoder:
    scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
    return build_decoder(config, weights, group, stage, block, norms_add_one=True, embedding_scale=scale)
