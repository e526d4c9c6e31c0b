"""Which architectures run, by the name that `config.json` gives them: one line each.

The model is built by `models/<model_type>.py`, which is loaded when a checkpoint asks for it: the command line reads
this table, and it is not to load torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture's `model_type`, and what the fields of its `config.json` mean.

    computes: fields that are refused of other architectures (`UNSUPPORTED` in `model_config.py`).
    """

    model_type: str
    defaults: Mapping[str, int | float] = field(default_factory=dict)  # of fields that may be absent
    window: int | None = None  # `sliding_window` where the field is absent; null says that there is none
    computes_window: bool = False  # all layers have it; else a window that is used is refused
    has_window_unless_told: bool = True  # a `sliding_window` holds without `use_sliding_window`
    # Switches that the architecture itself decides, and the only values that these fields may have then.
    fixed: dict[str, bool] = field(default_factory=dict)
    computes: frozenset[str] = frozenset()
    activation: str = "silu"  # of the MLP, the only one: a key of `ACTIVATIONS` in `model_config.py`
    full_layer_every: int | None = None  # so many layers one has no window; None: all have the same
    local_theta: float | None = None  # `theta` of layers with a window, where they turn by angles of their own
    expert_size: str | None = None  # the field with the intermediate size of an expert; None: there are no experts
    may_turn_a_part: bool = False  # of each head: `partial_rotary_factor`
    outgrows_float16: bool = False  # hidden states do, in published checkpoints
    theta: float = 10_000.0  # of rotary positions, where nothing names it
    mlp_size: str = "intermediate_size"  # the field with that of the MLP
    may_scan: bool = False  # some layers are state-space layers (`state_space_config.py`)
    has_blocks: bool = False  # of tokens that are found together (`block_config.py`)
    is_encoder: bool = False  # attention looks both ways, and there is no next token (`encoder_config.py`)
    scores: bool = False  # of an encoder: it has a classifier on top


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_MIXTRAL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2}
_QWEN3_MOE = {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
_SDAR = {"num_key_value_heads": 32, "head_dim": 128, "block_size": 4, "mask_token_id": 151_669}
_COUNTS = frozenset({"num_experts", "num_local_experts"})
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA2 = {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_COMPUTES = frozenset({"query_pre_attn_scalar", "final_logit_softcapping"})
_QKV_BIAS = {"attention_bias": True, "mlp_bias": False}

FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA2,
        4096,
        computes_window=True,
        fixed={"mlp_bias": False},
        computes=_GEMMA_COMPUTES | {"attn_logit_softcapping"},
        activation="gelu_tanh",
        outgrows_float16=True,
        full_layer_every=2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA,
        4096,
        computes_window=True,
        fixed={"mlp_bias": False},
        computes=_GEMMA_COMPUTES | {"sliding_window_pattern", "rope_local_base_freq"},
        activation="gelu_tanh",
        outgrows_float16=True,
        full_layer_every=6,
        local_theta=1e4,
        theta=1e6,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        {"num_local_experts": 8},
        fixed={"mlp_bias": False},
        computes=frozenset(
            {
                *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
                "position_embedding_type",
            }
        ),
        mlp_size="shared_intermediate_size",
        may_scan=True,
    ),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", {"num_key_value_heads": 8}, 4096, computes_window=True, fixed=_NO_BIAS),
    "MixtralForCausalLM": Family(
        "mixtral",
        _MIXTRAL,
        computes_window=True,
        fixed={**_NO_BIAS, "norm_topk_prob": True},
        computes=_COUNTS,
        expert_size="intermediate_size",
        theta=1e6,
    ),
    "Olmo2ForCausalLM": Family("olmo2", {"rms_norm_eps": 1e-5}, fixed={"mlp_bias": False}),
    "Phi3ForCausalLM": Family(
        "phi3",
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        computes_window=True,
        fixed=_NO_BIAS,
        may_turn_a_part=True,
    ),
    "Qwen2ForCausalLM": Family("qwen2", {"num_key_value_heads": 32}, has_window_unless_told=False, fixed=_QKV_BIAS),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"num_key_value_heads": 32, "head_dim": 128},
        has_window_unless_told=False,
        fixed={"mlp_bias": False},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _QWEN3_MOE,
        has_window_unless_told=False,
        fixed={"mlp_bias": False},
        computes=_COUNTS,
        expert_size="moe_intermediate_size",
    ),
    "SDARForCausalLM": Family("sdar", _SDAR, has_window_unless_told=False, fixed={"mlp_bias": False}, has_blocks=True),
    "BertForSequenceClassification": Family("bert", is_encoder=True, scores=True),
    "BertModel": Family("bert", is_encoder=True),
}
