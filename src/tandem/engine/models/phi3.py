"""Phi-3 and Phi-4: Llama whose file joins queries, keys and values in one tensor, and gate and up in another."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    return DecoderLayer(
        before_attention=layer.norm("input_layernorm"),
        qkv=layer.qkv("self_attn", bias=False, fused=True),
        o_proj=layer.output("self_attn.o_proj", bias=False),
        before_mlp=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=False, kinds=("gate_up_proj", "gate_up_proj", "down_proj")),
    )


build = partial(build_decoder, block=block)
