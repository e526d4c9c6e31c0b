"""Qwen3: Llama with a norm on each query and key head before the rotation."""

from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.decoder import Decoder, DecoderLayer, Loader, build_decoder
from tandem.engine.parallel import Group, Shard


def build(config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> Decoder:
    return build_decoder(config, weights, group, stage, block)


def block(layer: Loader) -> DecoderLayer:
    config = layer.config
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=config.attention_bias),
        qk_norm=layer.head_norms("self_attn.q_norm", "self_attn.k_norm"),
        o_proj=layer.output("self_attn.o_proj", bias=config.attention_bias),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=False),
    )
