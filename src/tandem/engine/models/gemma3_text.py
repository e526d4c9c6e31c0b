"""Gemma 3, text only: Gemma 2 with a norm on each query and key head, and other angles in layers with a window
(`ModelConfig.rope_of`).
"""

import torch

from tandem.engine.layers.activation import gelu_tanh_and_mul
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.decoder import Decoder, DecoderLayer, Loader, build_decoder
from tandem.engine.parallel import Group, Shard


def build(config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> Decoder:
    scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
    return build_decoder(config, weights, group, stage, block, norms_add_one=True, embedding_scale=scale)


def block(layer: Loader) -> DecoderLayer:
    bias = layer.config.attention_bias
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=bias),
        qk_norm=layer.head_norms("self_attn.q_norm", "self_attn.k_norm"),
        o_proj=layer.output("self_attn.o_proj", bias=bias),
        after_attention=layer.norm("post_attention_layernorm"),
        before_mlp=layer.norm("pre_feedforward_layernorm"),
        mlp=layer.mlp("mlp", bias=False, activation=gelu_tanh_and_mul),
        after_mlp=layer.norm("post_feedforward_layernorm"),
    )
