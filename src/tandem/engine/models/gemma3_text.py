"""Gemma 3, text only: Gemma 2 with a norm on each query and key head, and other angles in layers with a window
(`ModelConfig.rope_of`).
"""

from dataclasses import replace
from functools import partial

from tandem.engine.models import gemma2
from tandem.engine.models.decoder import DecoderLayer, Loader


def block(layer: Loader) -> DecoderLayer:
    return replace(gemma2.block(layer), qk_norm=layer.head_norms("self_attn.q_norm", "self_attn.k_norm"))


build = partial(gemma2.build, block=block)
