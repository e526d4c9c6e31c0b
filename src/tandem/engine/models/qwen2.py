"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and nowhere else."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=True),
        o_proj=layer.output("self_attn.o_proj", bias=False),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=False),
    )


build = partial(build_decoder, block=block)
