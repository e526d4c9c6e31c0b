"""OLMo 2: norms behind attention and MLP instead of before them, and over all query and all key heads together."""

from functools import partial

from tandem.engine.models.decoder import DecoderLayer, Loader, build_decoder


def block(layer: Loader) -> DecoderLayer:
    bias = layer.config.attention_bias
    return DecoderLayer(
        qkv=layer.qkv("self_attn", bias=bias),
        qk_norm=layer.width_norms("self_attn.q_norm", "self_attn.k_norm"),
        o_proj=layer.output("self_attn.o_proj", bias=bias),
        after_attention=layer.norm("post_attention_layernorm"),
        mlp=layer.mlp("mlp", bias=False),
        after_mlp=layer.norm("post_feedforward_layernorm"),
    )


build = partial(build_decoder, block=block)
