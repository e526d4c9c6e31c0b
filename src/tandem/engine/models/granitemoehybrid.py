"""Granite 4 (hybrid, dense): most layers are Mamba 2, a few attend, without positions where the configuration says so.

What each layer adds is scaled, and so are embeddings, attention scores and logits. Those with experts are refused.
"""

from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.decoder import Decoder, DecoderLayer, Loader, StateSpaceLayer, build_decoder
from tandem.engine.parallel import Group, Shard

MLP = ("input_linear", "input_linear", "output_linear")


def build(config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> Decoder:
    return build_decoder(config, weights, group, stage, block, embedding_scale=config.embedding_scale or 1.0)


def block(layer: Loader) -> DecoderLayer | StateSpaceLayer:
    config, scale = layer.config, layer.residual_scale()
    before, before_mlp = layer.norm("input_layernorm"), layer.norm("post_attention_layernorm")
    if layer.index not in config.attention_layers:
        return StateSpaceLayer(
            before_mixer=before,
            mixer=layer.mamba2("mamba"),
            after_mixer=scale,
            before_mlp=before_mlp,
            mlp=layer.mlp("shared_mlp", bias=False, kinds=MLP),
            after_mlp=scale,
        )
    return DecoderLayer(
        before_attention=before,
        qkv=layer.qkv("self_attn", bias=config.attention_bias),
        o_proj=layer.output("self_attn.o_proj", bias=config.attention_bias),
        after_attention=scale,
        before_mlp=before_mlp,
        mlp=layer.mlp("shared_mlp", bias=False, kinds=MLP),
        after_mlp=scale,
    )
