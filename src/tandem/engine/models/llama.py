"""Llama: norm before attention and MLP, grouped KV heads, rotated queries and keys. Biases where `config.json` says."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    config = layer.config
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=config.attention_bias),
        o_proj=layer.output("self_attn.o_proj", bias=config.attention_bias),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=config.mlp_bias),
    )


build = partial(build_decoder, block=block)
