"""Qwen3-MoE: Qwen3 with experts in place of the MLP, except in the layers that `config.json` calls dense."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    config = layer.config
    is_dense = config.experts is None or layer.index in config.experts.dense_layers
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=config.attention_bias),
        qk_norm=layer.head_norms("self_attn.q_norm", "self_attn.k_norm"),
        o_proj=layer.output("self_attn.o_proj", bias=config.attention_bias),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=False) if is_dense else layer.experts("mlp"),
    )


build = partial(build_decoder, block=block)
