"""Tiny random checkpoints for what the bundled model is not: windows, states, blocks, encoders, MLPs that may be cut.

As many layers, heads and tokens as the bundled model has, and its tokenizer: whatever cuts it cuts these. A checkpoint
is written once in a process, into a folder that goes with it.

*Sums that have one term.* Of every row of the weights of an MLP, and of those behind attention, one number is not zero.
So whoever adds up parts of these sums, in whatever order, adds zeros to a number: shards, and DP ranks that step
together, come to the bits of an engine that has all of it. What comes still depends on all of the KV, which attention
adds up where it lies.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any  # values of a JSON document
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tandem.simulator.whole.cluster import MODEL

GEMMA, GRANITE, SDAR, LLAMA, BERT = "gemma3_text", "granitemoehybrid", "sdar", "llama", "bert"
ARCHITECTURES = {
    GEMMA: "Gemma3ForCausalLM",
    GRANITE: "GraniteMoeHybridForCausalLM",
    SDAR: "SDARForCausalLM",
    LLAMA: "LlamaForCausalLM",
    BERT: "BertModel",
}
VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 4, 8, 4, 16
MLP = 96  # of which two, three or four parts are no whole vectors of a processor
STATE_HEADS, STATE_SIZE, CONV = 4, 16, 4
STATE_INNER = 2 * HIDDEN
CONTEXT = 8192
MASK = 1  # of blocks: a token that no text has
Shape = tuple[int, ...]


def checkpoint(kind: str, *, window_tokens: int = 0, block_tokens: int = 1) -> Path:
    """Its folder. window_tokens, block_tokens: of the models that have that."""
    where = Path(_kept().name) / f"{kind} {window_tokens} {block_tokens}"
    if where.exists():
        return where
    where.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (where / name).symlink_to(MODEL / name)
    config = _config(kind, window_tokens=window_tokens, block_tokens=block_tokens)
    (where / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(crc32(kind.encode()))
    shapes = _of_bert() if kind == BERT else _of_decoder(kind)
    save_file({name: _drawn(name, shape, random) for name, shape in shapes.items()}, where / "model.safetensors")
    return where


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tandem-random-models-")


def _config(kind: str, *, window_tokens: int, block_tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    more: dict[str, dict[str, Any]] = {
        GEMMA: {
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "sliding_window": window_tokens,
            "query_pre_attn_scalar": HEAD_DIM,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        GRANITE: {
            "layer_types": ["mamba", "attention"] * (LAYERS // 2),
            "num_local_experts": 0,
            "shared_intermediate_size": MLP,
            "num_attention_heads": HIDDEN // HEAD_DIM,
            "position_embedding_type": "nope",
            "mamba_n_heads": STATE_HEADS,
            "mamba_d_state": STATE_SIZE,
            "mamba_d_conv": CONV,
            "attention_multiplier": HEAD_DIM**-0.5,  # other scores are computed by torch, whose bits follow shapes
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
        SDAR: {"block_size": block_tokens, "mask_token_id": MASK},
        BERT: {"type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": None},
    }
    return config | more.get(kind, {})


def _of_decoder(kind: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        at = f"model.layers.{number}."
        scans = kind == GRANITE and number % 2 == 0
        parts = {**(_mixer() if scans else _attention(kind)), **_mlp(kind)}
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if kind == GEMMA else []
        parts |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
        shapes |= {at + name: shape for name, shape in parts.items()}
    return shapes


def _attention(kind: str) -> dict[str, Shape]:
    heads = HIDDEN // HEAD_DIM if kind == GRANITE else HEADS
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (heads * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, heads * HEAD_DIM),
    }
    if kind in (GEMMA, SDAR):
        shapes |= {f"self_attn.{which}_norm.weight": (HEAD_DIM,) for which in "qk"}
    return shapes


def _mlp(kind: str) -> dict[str, Shape]:
    if kind == GRANITE:
        return {"shared_mlp.input_linear.weight": (2 * MLP, HIDDEN), "shared_mlp.output_linear.weight": (HIDDEN, MLP)}
    return {
        "mlp.gate_proj.weight": (MLP, HIDDEN),
        "mlp.up_proj.weight": (MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP),
    }


def _mixer() -> dict[str, Shape]:
    convolved = STATE_INNER + 2 * STATE_SIZE
    return {
        "mamba.A_log": (STATE_HEADS,),
        "mamba.D": (STATE_HEADS,),
        "mamba.dt_bias": (STATE_HEADS,),
        "mamba.conv1d.weight": (convolved, 1, CONV),
        "mamba.conv1d.bias": (convolved,),
        "mamba.in_proj.weight": (STATE_INNER + convolved + STATE_HEADS, HIDDEN),
        "mamba.norm.weight": (STATE_INNER,),
        "mamba.out_proj.weight": (HIDDEN, STATE_INNER),
    }


def _of_bert() -> dict[str, Shape]:
    norms = ("weight", "bias")
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.position_embeddings.weight": (CONTEXT, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        **{f"embeddings.LayerNorm.{which}": (HIDDEN,) for which in norms},
    }
    for number in range(LAYERS):
        at = f"encoder.layer.{number}."
        products: dict[str, Shape] = {
            **{f"attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")},
            "attention.output.dense": (HIDDEN, HIDDEN),
            "intermediate.dense": (MLP, HIDDEN),
            "output.dense": (HIDDEN, MLP),
        }
        for name, shape in products.items():
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        shapes |= {
            f"{at}{name}.LayerNorm.{which}": (HIDDEN,) for name in ("attention.output", "output") for which in norms
        }
    return shapes


def _drawn(name: str, shape: Shape, random: np.random.Generator) -> NDArray[np.float32]:
    """Such that what layers add is neither lost nor all that counts."""
    if "mlp" in name or "o_proj" in name:
        return _of_one_term(shape, random)
    if len(shape) == 2:
        return random.normal(0.0, 1.5 / shape[1] ** 0.5, shape).astype(np.float32)
    return random.uniform(0.5, 1.5, shape).astype(np.float32)


def _of_one_term(shape: Shape, random: np.random.Generator) -> NDArray[np.float32]:
    found = np.zeros(shape, np.float32)
    found[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = random.normal(0.0, 1.5, shape[0])
    return found
