"""Mixtral: Mistral with experts in place of the MLP, in every layer."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=False),
        o_proj=layer.output("self_attn.o_proj", bias=False),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.experts("block_sparse_moe", kinds=("w1", "w3", "w2")),
    )


build = partial(build_decoder, block=block)
