"""config.json, generation_config.json and the tokenizer's files: what is computed, what is refused, in which words."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from engine_files import CONFIG, refusal, write_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.model_config import UNSUPPORTED, ModelConfig, ModelError, RopeConfig, parse_config, read_config
from tandem.engine.models.table import FAMILIES

QWEN = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "head_dim": 2}
QWEN2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**CONFIG, "architectures": ["MistralForCausalLM"]}
QWEN3_MOE = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}
GEMMA2 = {**CONFIG, "architectures": ["Gemma2ForCausalLM"], "head_dim": 2, "sliding_window": 16}
GEMMA3 = {
    **{name: value for name, value in GEMMA2.items() if name != "rope_theta"},
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
}
PHI3 = {
    **CONFIG,
    "architectures": ["Phi3ForCausalLM"],
    "head_dim": 8,
    "original_max_position_embeddings": 32,
}
OLMO2 = {**CONFIG, "architectures": ["Olmo2ForCausalLM"]}
MIXTRAL = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
GRANITE = {
    **CONFIG,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "shared_intermediate_size": 16,
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1, 2.0, 3.0],
    "long_factor": [1.0] * 4,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def parsed(base: dict = CONFIG, *, generation: dict | None = None, eos: int | None = None, **changes) -> ModelConfig:
    return parse_config({**base, **changes}, generation=generation or {}, tokenizer_eos=eos)


def refused(base: dict = CONFIG, *, generation: dict | None = None, eos: int | None = None, **changes) -> str:
    with pytest.raises(ModelError) as caught:
        parsed(base, generation=generation, eos=eos, **changes)
    text = str(caught.value)
    assert text.isprintable()
    return text


# --- numbers ---------------------------------------------------------------------------------------------------------

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
NO_SIZES = (0, -1, True, "8", 8.0, math.nan, math.inf, 10**30, [8], {"of": 8})


@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_whole_number_within_bounds(name: str, value: Any) -> None:
    text = refused(**{name: value})

    assert f"config.json: {name} is " in text
    assert "correct it, or download it again" in text


@pytest.mark.parametrize("name", [name for name in SIZES if name not in ("num_key_value_heads", "head_dim")])
def test_a_size_that_is_missing_is_named(name: str) -> None:
    assert f"config.json: {name} is None" in refused(**{name: None})


def test_sizes_that_follow_from_others_may_be_missing() -> None:
    assert (parsed(num_key_value_heads=None).num_kv_heads, parsed().head_dim) == (4, 2)
    assert (parsed(QWEN, num_key_value_heads=None, num_attention_heads=32).num_kv_heads) == 32
    assert parsed(QWEN, head_dim=None).head_dim == 128


@pytest.mark.parametrize("value", [0, -1e-5, 2, True, "1e-5", math.nan, math.inf, [1e-5], 10**30], ids=repr)
def test_the_norm_needs_a_small_number(value: Any) -> None:
    assert "rms_norm_eps" in refused(rms_norm_eps=value)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}], ids=repr)
@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    assert f"{name} is {value!r}, true or false is needed" in refused(**{name: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 3}, "head dimension 3 is odd"),
        ({"hidden_size": 9}, "hidden_size 9 is not divisible by 4 heads"),
        ({"model_type": "exaone"}, "LlamaForCausalLM of the model_type 'exaone' is not supported, only of 'llama'"),
        ({"model_type": 4}, "model_type"),
        ({"dtype": 4}, "dtype"),
        ({"dtype": "x" * 1000}, "dtype"),
        ({"architectures": []}, "names the architectures []"),
        ({"architectures": "LlamaForCausalLM"}, "exactly one is needed"),
        ({"architectures": [["LlamaForCausalLM"]]}, "exactly one is needed"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "known are Gemma2ForCausalLM, Gemma3ForCausalLM, GraniteMoeHybridForCausalLM, LlamaForCausalLM",
        ),
        ({"architectures": ["x\ny" * 1000]}, "is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_and_names_have_to_fit_together(changes: dict, named: str) -> None:
    assert named in refused(**changes)


# --- what would compute something else -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", 7),
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("query_pre_attn_scalar", 256),
        ("rope_local_base_freq", 1e4),
        ("sliding_window_pattern", 6),
        ("quantization_config", {"quant_method": "gptq"}),
        ("quantization_config", {}),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("residual_multiplier", 0.22),
        ("residual_multiplier", True),
        ("partial_rotary_factor", 0.5),
        ("rotary_pct", 0.25),
        ("qk_layernorm", True),
        ("is_causal", False),
        ("num_local_experts", 8),
        ("attention_chunk_size", 8192),
        ("per_layer_config", {"0": {}}),
        ("text_config", {"hidden_size": 8}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", [["full_attention"]]),
        ("layer_types", "full_attention"),
        ("sliding_window", 32),
        ("sliding_window", "32"),
        ("use_sliding_window", True),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(name: str, value: Any) -> None:
    assert name in refused(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "swish"},
        {"residual_multiplier": 1.0},
        {"logit_scale": 1},
        {"partial_rotary_factor": 1.0},
        {"is_causal": True},
        {"sliding_window": 64},
        {"sliding_window": 32, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"num_experts": 0},
        {"pruned_heads": {}},
        {"initializer_range": "any", "attention_dropout": 0.5, "pretraining_tp": 8, "pad_token_id": -1},
        {"an_invention": {"of": ["somebody"]}},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(changes: dict) -> None:
    assert parsed(**changes) == parsed()


@pytest.mark.parametrize("base", [QWEN, QWEN2], ids=["Qwen3", "Qwen2"])
def test_qwen_names_a_window_that_it_does_not_use(base: dict) -> None:
    assert parsed(base, sliding_window=32) == parsed(base)
    assert "sliding_window is 32" in refused(base, sliding_window=32, use_sliding_window=True)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 32}, 32),
        ({"sliding_window": 1}, 1),
        ({"sliding_window": 64}, None),
        ({"sliding_window": 32, "use_sliding_window": True}, 32),
        ({"sliding_window": 32, "max_position_embeddings": 32}, None),
        ({}, None),
        ({"max_position_embeddings": 8192}, 4096),
        ({"max_position_embeddings": 8192, "sliding_window": None}, None),
    ],
    ids=str,
)
def test_every_layer_of_mistral_has_the_window_that_is_named_or_the_usual_one(
    changes: dict, window: int | None
) -> None:
    assert parsed(MISTRAL, **changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 32, "use_sliding_window": False}, "sliding_window is 32"),
        ({"sliding_window": None, "use_sliding_window": True}, "use_sliding_window is True"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "32"}, "sliding_window is '32'"),
        ({"sliding_window": 32, "layer_types": ["full_attention", "full_attention"]}, "layer_types is"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is"),
    ],
    ids=str,
)
def test_a_window_that_contradicts_itself_is_refused(changes: dict, named: str) -> None:
    assert named in refused(MISTRAL, **changes)


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (MISTRAL, "attention_bias", True),
        (MISTRAL, "mlp_bias", True),
        (QWEN2, "attention_bias", False),
        (QWEN2, "mlp_bias", True),
        (QWEN, "mlp_bias", True),
        (PHI3, "attention_bias", True),
        (OLMO2, "mlp_bias", True),
    ],
    ids=str,
)
def test_biases_that_an_architecture_does_not_have_are_refused_by_name(base: dict, name: str, value: bool) -> None:
    assert f"{name} is {value}" in refused(base, **{name: value})
    assert parsed(base, **{name: not value}) == parsed(base)


# --- layers with and without a window, soft caps ---------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"


def test_gemma_says_which_layers_have_the_window_or_its_family_does() -> None:
    two, three = parsed(GEMMA2, num_hidden_layers=5), parsed(GEMMA3)

    assert [two.window_of(layer) for layer in range(5)] == [16, None, 16, None, 16]
    assert [three.window_of(layer) for layer in range(7)] == [16] * 5 + [None, 16]
    assert [parsed(GEMMA3, sliding_window_pattern=2).window_of(layer) for layer in range(4)] == [16, None, 16, None]
    assert parsed(GEMMA2, layer_types=[FULL, SLIDING]).sliding_layers == (1,)
    assert parsed(GEMMA3, sliding_window=64).window_of(0) is None
    assert parsed(GEMMA3, sliding_window=64).rope_of(0).theta == 1e4, "the window is as long as the context"


def test_gemmas_caps_and_divisor_are_read_and_null_says_that_there_is_no_cap() -> None:
    usual = parsed(GEMMA2)

    assert (usual.attention_cap, usual.logit_cap, usual.score_divisor) == (50.0, 30.0, 256)
    assert (usual.tied_embeddings, usual.num_kv_heads) == (True, 2)
    assert parsed(GEMMA2, attn_logit_softcapping=None).attention_cap is None
    assert parsed(GEMMA2, final_logit_softcapping=None).logit_cap is None
    assert parsed(GEMMA2, final_logit_softcapping=5).logit_cap == 5.0
    assert parsed(GEMMA2, query_pre_attn_scalar=2).score_divisor is None, "the head dimension, as of all others"
    assert (parsed(GEMMA3).attention_cap, parsed(GEMMA3).logit_cap) == (None, None)
    assert parsed(GEMMA2, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh") == usual


def test_gemma_3_turns_by_two_kinds_of_angles_in_both_spellings() -> None:
    usual = parsed(GEMMA3)
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    newer = {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}}

    assert (usual.rope, usual.local_rope) == (RopeConfig("default", 1e6, {}), RopeConfig("default", 1e4, {}))
    assert parsed(GEMMA3, **older) == parsed(GEMMA3, **newer)
    assert parsed(GEMMA3, **newer).rope == RopeConfig("linear", 5e5, {"factor": 8.0})
    assert parsed(GEMMA3, **newer).local_rope == RopeConfig("default", 2e4, {})
    assert parsed(GEMMA3, rope_parameters={FULL: {}, SLIDING: None}) == usual
    assert parsed(GEMMA3, rope_scaling={}) == parsed(GEMMA3, rope_scaling={"type": "default"}) == usual
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert parsed(GEMMA3, rope_parameters={SLIDING: dynamic}).max_context == 64


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 4.0}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
    ids=lambda given: " ".join(given),
)
def test_gemma_3_was_stretched_from_all_positions_unless_its_angles_say_so_themselves(given: dict) -> None:
    """transformers does not look beside them."""
    found = parsed(GEMMA3, **given, original_max_position_embeddings=32)

    assert found == parsed(GEMMA3, **given)
    assert found.rope.parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (GEMMA2, {"layer_types": [FULL]}, "2 times full_attention or sliding_attention is needed"),
        (GEMMA2, {"layer_types": [FULL, "chunked_attention"]}, "layer_types is"),
        (GEMMA2, {"layer_types": [[FULL], FULL]}, "layer_types is"),
        (GEMMA2, {"layer_types": FULL}, "layer_types is"),
        (GEMMA2, {"sliding_window": None}, "sliding_window is None, a whole number from 1"),
        (GEMMA2, {"sliding_window": 0}, "sliding_window is 0"),
        (GEMMA2, {"use_sliding_window": False}, "sliding_window is 16"),
        (GEMMA2, {"sliding_window_pattern": 2}, "sliding_window_pattern is 2"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA2, {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        (GEMMA2, {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA2, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA2, {"mlp_bias": True}, "mlp_bias is True"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "full_attention and sliding_attention"),
        (GEMMA3, {"rope_parameters": {FULL: {}}, "rope_scaling": {"rope_type": "default"}}, "rope_parameters"),
        (GEMMA3, {"rope_parameters": {FULL: 7}}, "rope_parameters is 7, an object is needed"),
        (GEMMA3, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type and rope_type contradict each other"),
        (GEMMA3, {"rope_parameters": {SLIDING: {"rope_theta": 1e5}}, "rope_local_base_freq": 1e4}, "contradict"),
        (GEMMA3, {"rope_parameters": {FULL: {"rope_theta": 1e5}}, "rope_theta": 1e4}, "contradict"),
        (GEMMA3, {"rope_local_base_freq": 1}, "rope_local_base_freq is 1, more than 1 is needed"),
        (GEMMA3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gemma_that_would_compute_something_else_is_refused_by_name(base: dict, changes: dict, named: str) -> None:
    assert named in refused(base, **changes)


# --- experts ---------------------------------------------------------------------------------------------------------


def test_experts_are_read_in_both_spellings_with_the_defaults_of_their_family() -> None:
    assert parsed(QWEN3_MOE).experts == ExpertsConfig(8, 2, 6, shares_sum_to_one=True, dense_layers=())
    assert parsed(QWEN3_MOE, num_experts=None, num_local_experts=8) == parsed(QWEN3_MOE, num_local_experts=8)
    assert parsed(QWEN3_MOE, norm_topk_prob=None) == parsed(QWEN3_MOE, norm_topk_prob=False) != parsed(QWEN3_MOE)
    assert parsed(MIXTRAL).experts == ExpertsConfig(8, 2, 12, shares_sum_to_one=True, dense_layers=())
    assert parsed(MIXTRAL, rope_theta=None).rope.theta == 1e6
    assert parsed().experts is None


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"decoder_sparse_step": 1}, ()),
        ({"decoder_sparse_step": 2}, (0,)),
        ({"mlp_only_layers": [1]}, (1,)),
        ({"mlp_only_layers": [], "decoder_sparse_step": None}, ()),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (0, 1)),
    ],
    ids=str,
)
def test_some_layers_may_be_dense(changes: dict, dense: tuple[int, ...]) -> None:
    found = parsed(QWEN3_MOE, **changes).experts

    assert found is not None
    assert found.dense_layers == dense


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (QWEN3_MOE, {"num_experts": None}, "num_experts is None, a whole number from 1"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts is 0"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts is '8'"),
        (QWEN3_MOE, {"num_local_experts": 4}, "num_experts and num_local_experts contradict each other"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, a whole number from 1 to 8"),
        (QWEN3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        (QWEN3_MOE, {"moe_intermediate_size": 1.5}, "moe_intermediate_size is 1.5"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1, true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"mlp_only_layers": [2]}, "mlp_only_layers is [2], numbers of layers below 2"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers is [True]"),
        (QWEN3_MOE, {"n_routed_experts": 4}, "n_routed_experts is 4"),
        (QWEN3_MOE, {"sliding_window": 32, "use_sliding_window": True}, "sliding_window is 32"),
        (QWEN3_MOE, {"mlp_bias": True}, "mlp_bias is True"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias is True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_that_cannot_be_are_refused_by_name(base: dict, changes: dict, named: str) -> None:
    assert named in refused(base, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": None}, "layer_types is None, 2 times mamba, linear_attention, attention, full_attention"),
        ({"layer_types": ["mamba", "conv"]}, "layer_types is ['mamba', 'conv']"),
        ({"layer_types": [["mamba"], {}]}, "layer_types is [['mamba'], {}]"),
        ({"layer_types": ["mamba"]}, "layer_types is ['mamba']"),
        ({"mamba_n_heads": 3}, "3 heads of 5 are not the 16 features of a state-space layer"),
        ({"mamba_d_head": 3}, "4 heads of 3 are not the 16 features of a state-space layer"),
        ({"mamba_n_heads": 16, "num_key_value_heads": 4, "mamba_n_groups": 3}, "16 heads of state-space layers"),
        (
            {"mamba_n_heads": 2, "num_key_value_heads": 4},
            "2 heads of state-space layers cannot be spread evenly over 4 KV heads",
        ),
        ({"mamba_n_heads": None}, "mamba_n_heads is None"),
        ({"mamba_d_state": 0}, "mamba_d_state is 0"),
        ({"mamba_d_conv": 1}, "mamba_d_conv is 1, a whole number from 2 to 64 is needed"),
        ({"mamba_expand": "2"}, "mamba_expand is '2'"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit is [0.0, 1.0], none is needed"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', rope or nope is needed"),
        ({"num_local_experts": 4}, "num_local_experts is 4"),
        ({"num_local_experts": None}, "num_local_experts is 8"),
        ({"attention_multiplier": 0}, "attention_multiplier is 0"),
        ({"residual_multiplier": "half"}, "residual_multiplier is 'half'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_space_layers_that_cannot_be_are_refused_by_name(changes: dict, named: str) -> None:
    assert named in refused(GRANITE, **changes)


def test_both_spellings_of_layers_say_the_same_and_multipliers_are_read() -> None:
    older = parsed(GRANITE, time_step_limit=[0.0, None], mamba_d_head="auto", attention_multiplier=0.25)
    newer = parsed(
        GRANITE,
        layer_types=["linear_attention", "full_attention"],
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        mamba_d_head=4,
        attention_multiplier=0.25,
    )
    assert older == newer
    assert older.state_space is not None
    assert (older.state_space.layers, older.attention_layers) == ((0,), (1,))
    assert older.score_divisor == 16.0
    assert older.turns_nothing
    assert parsed(GRANITE, position_embedding_type="rope").turns_nothing is None
    assert parsed(GRANITE, layer_types=["attention"] * 2).state_space is None
    assert refused(residual_multiplier=2.0) == (
        "config.json: residual_multiplier is 2.0, which is not supported; choose another checkpoint"
    )


COMPUTED = {
    *SIZES,
    "architectures",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_parameters",
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias", "shared_intermediate_size"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    *("decoder_sparse_step", "mlp_only_layers", "original_max_position_embeddings"),
}
DECIDED = {
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "eos_token_id",
    "time_step_limit",
    *UNSUPPORTED,
}
# Training and bookkeeping. `max_window_layers` says which layers have a window.
SILENT = {
    "attention_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "initializer_range",
    "use_cache",
    "pretraining_tp",
    "max_window_layers",
}
SILENT |= {"_sliding_window_pattern", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
SILENT |= {"mamba_chunk_size"}  # of kernels elsewhere
SILENT |= {"pad_token_id", "bos_token_id", "rope_theta", "rope_scaling"}


@pytest.mark.parametrize(
    "family",
    [
        *(Gemma2Config, Gemma3TextConfig, GraniteMoeHybridConfig),
        *(LlamaConfig, MistralConfig, MixtralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig),
    ],
)
def test_no_field_of_a_config_of_transformers_is_overlooked(family: type) -> None:
    """A release that adds one makes this fail: compute it, refuse it, or say that it means nothing."""
    fields = set(family().to_dict()) - set(PretrainedConfig().to_dict())

    assert "vocab_size" in fields
    assert fields - COMPUTED - DECIDED - SILENT == set()


def test_what_transformers_writes_by_itself_is_taken() -> None:
    written_by = {
        "Gemma2ForCausalLM": Gemma2Config(),
        "Gemma3ForCausalLM": Gemma3TextConfig(),
        "GraniteMoeHybridForCausalLM": GraniteMoeHybridConfig(num_local_experts=0, num_key_value_heads=8),
        "LlamaForCausalLM": LlamaConfig(),
        "MistralForCausalLM": MistralConfig(),
        "MixtralForCausalLM": MixtralConfig(),
        "Olmo2ForCausalLM": Olmo2Config(),
        "Phi3ForCausalLM": Phi3Config(),
        "Qwen2ForCausalLM": Qwen2Config(),
        "Qwen3ForCausalLM": Qwen3Config(),
        "Qwen3MoeForCausalLM": Qwen3MoeConfig(),
    }
    known = {name for name, family in FAMILIES.items() if not family.is_encoder}
    assert written_by.keys() == known - {"SDARForCausalLM"}, "transformers does not know it"
    for name, config in written_by.items():
        written = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [name]}
        ours = parse_config(written, generation={})
        assert ours.head_dim == (config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)
        assert ours.sliding_window == config.to_dict().get("sliding_window")
        assert ours.num_kv_heads == config.num_key_value_heads
        theirs = config.rope_parameters.get("full_attention", config.rope_parameters)
        assert ours.rope.theta == theirs["rope_theta"]
        assert ours.norm_eps == config.rms_norm_eps
        assert FAMILIES[name].model_type == config.model_type


def test_what_transformers_writes_by_itself_of_an_encoder_is_taken() -> None:
    for name in (name for name, family in FAMILIES.items() if family.is_encoder):
        config = BertConfig(num_labels=1, layer_norm_eps=1e-5, type_vocab_size=3)
        written = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [name]}
        ours = parse_config(written, generation={})
        assert (ours.num_layers, ours.num_kv_heads, ours.head_dim) == (12, 12, 64)
        assert (ours.norm_eps, ours.max_context, ours.intermediate_size) == (1e-5, 512, 3072)
        assert ours.encoder is not None
        assert ours.encoder.type_vocab_size == 3
        assert ours.encoder.scores == FAMILIES[name].scores
        assert FAMILIES[name].model_type == config.model_type


# --- rotary positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": {**LLAMA3}, "rope_theta": 5e5},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 5e5},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "type": "llama3"}, "rope_theta": None},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA3}, "rope_theta": 5e5},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": None},
        {"rope_parameters": {}, "rope_scaling": {**LLAMA3, "finetuned": True}, "rope_theta": 5e5},
        {
            "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
            "original_max_position_embeddings": 32,
            "rope_theta": 5e5,
        },
    ],
    ids=lambda given: " ".join(given),
)
def test_both_spellings_may_be_there_if_they_say_the_same(given: dict) -> None:
    rope = parsed(**{"rope_theta": None, **given}).rope

    assert (rope.kind, rope.theta) == ("llama3", 5e5)
    assert rope.parameters == {name: value for name, value in LLAMA3.items() if name != "rope_type"}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {**LLAMA3}},
        {"rope_parameters": {**LLAMA3}, "rope_scaling": {**LLAMA3, "factor": 4.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA3}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},  # CONFIG has another rope_theta beside it
        {"rope_scaling": {**LLAMA3, "type": "yarn"}},
        {"rope_scaling": {**LLAMA3}, "original_max_position_embeddings": 16},
    ],
    ids=lambda given: " ".join(given),
)
def test_spellings_that_contradict_each_other_are_refused(given: dict) -> None:
    text = refused(**given)

    assert "rope" in text
    assert "remove the wrong one" in text


NO_FACTORS = (0, 0.5, -2.0, True, "2", math.nan, math.inf, 10**30, None, [2.0], {"of": 2.0})


@pytest.mark.parametrize("value", NO_FACTORS, ids=repr)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_a_factor_is_a_number_that_stretches(kind: str, value: Any) -> None:
    given = {**(LLAMA3 if kind == "llama3" else YARN if kind == "yarn" else {}), "rope_type": kind, "factor": value}

    assert "rope_scaling" in refused(rope_scaling=given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "'ntk' is not supported; known are"),
        ({**LONGROPE, "short_factor": None}, "short_factor is None, a list of numbers is needed"),
        ({**LONGROPE, "short_factor": []}, "short_factor is [], a list of numbers is needed"),
        ({**LONGROPE, "short_factor": [1.0, "2", 1.0, 1.0]}, "short_factor"),
        ({**LONGROPE, "short_factor": [1.0, 0, 1.0, 1.0]}, "short_factor"),
        (LONGROPE, "short_factor has 4 numbers, and 1 pairs of a head are turned"),
        ({**LONGROPE, "original_max_position_embeddings": None}, "original_max_position_embeddings is None"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "more than 1 is needed"),
        ({**LONGROPE, "attention_factor": 0}, "attention_factor"),
        ({**LONGROPE, "factor": -1}, "factor"),
        ({"rope_type": ["yarn"]}, "rope_type"),
        ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "more than low_freq_factor is needed"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**YARN, "original_max_position_embeddings": 64.0}, "original_max_position_embeddings"),
        ({**YARN, "beta_fast": -1}, "beta_fast"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "at least beta_slow is needed"),
        ({**YARN, "beta_slow": 1e-320}, "0 or a number from 1e-06 on is needed"),
        ({**YARN, "attention_factor": 0}, "attention_factor"),
        ({**YARN, "mscale": "1"}, "mscale"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({**YARN, "rope_theta": 1}, "rope_theta"),
        ({**YARN, "rope_theta": -5e5}, "rope_theta"),
        ({"rope_type": "default", "factor": 8.0}, "'factor' means nothing to the kind default"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "differ by layer"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_angles_that_would_be_others_are_refused(name: str, given: dict, named: str) -> None:
    assert named in refused(**{name: given})


@pytest.mark.parametrize("value", [3, "yarn", [YARN], True])
def test_rotary_settings_are_an_object(value: Any) -> None:
    assert "an object is needed" in refused(rope_scaling=value)


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    assert parsed(rope_scaling=YARN).max_context == 256
    endless = {**YARN, "factor": 1e6, "original_max_position_embeddings": (1 << 31) - 1}
    assert parsed(rope_scaling=endless).max_context == (1 << 31) - 1


def test_longrope_ends_where_it_was_stretched_from() -> None:
    found = parsed(PHI3, rope_scaling=LONGROPE)

    assert found.max_context == 32
    assert found.rope.parameters["attention_factor"] == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))
    assert parsed(PHI3, rope_scaling={**LONGROPE, "rope_type": "su"}) == found
    assert parsed(PHI3, rope_scaling={**LONGROPE, "type": "su"}) == found  # as transformers saves the older name
    outside = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
    assert parsed(PHI3, rope_scaling=outside) == found
    assert parsed(PHI3, rope_scaling=LONGROPE, max_position_embeddings=16).rope.parameters["attention_factor"] == 1


def test_dual_chunk_attention_is_that_of_others_up_to_the_end_of_its_first_chunk() -> None:
    chunks = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 48}
    assert parsed(QWEN2, dual_chunk_attention_config=chunks).max_context == 40
    assert parsed(QWEN2, dual_chunk_attention_config=chunks, max_position_embeddings=16).max_context == 16
    for wrong in ({"chunk_size": 48}, {**chunks, "local_size": 48}):
        assert "dual_chunk_attention_config: local_size is " in refused(QWEN2, dual_chunk_attention_config=wrong)


@pytest.mark.parametrize(("kind", "same"), [("int", "int-quantized"), ("float", "float-quantized")])
def test_naive_quantized_is_another_name_for_two_forms_of_compressed_tensors(kind: str, same: str) -> None:
    def read(layout: str) -> object:
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        said = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
        return parsed(QWEN2, quantization_config=said).quantization

    assert read("naive-quantized") == read(same) is not None


def test_a_phi_that_says_nothing_beside_its_angles_was_stretched_from_4096_tokens() -> None:
    """transformers has it so, and then does not read what the angles say themselves."""
    silent = {**PHI3, "original_max_position_embeddings": None, "max_position_embeddings": 8192}
    outside = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}

    assert parsed(silent, rope_scaling=outside).rope.parameters["original_max_position_embeddings"] == 4096
    assert "has original_max_position_embeddings 32, and beside it 4096 holds" in refused(silent, rope_scaling=LONGROPE)


def test_a_part_of_the_head_is_turned_where_the_architecture_can() -> None:
    part = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}

    assert parsed(PHI3, **part).rope.rotary_dim(8) == 6
    assert parsed(PHI3, partial_rotary_factor=0.75) == parsed(PHI3, **part) != parsed(PHI3)
    assert parsed(PHI3, partial_rotary_factor=1.0) == parsed(PHI3)
    assert "name two partial_rotary_factor" in refused(PHI3, **part, partial_rotary_factor=0.5)
    assert "turns 5 of the 8 elements" in refused(PHI3, partial_rotary_factor=0.7)
    assert "turns 0 of the 8 elements" in refused(PHI3, partial_rotary_factor=0)
    assert "short_factor has 4 numbers, and 3 pairs" in refused(PHI3, rope_scaling=LONGROPE, **part["rope_parameters"])


def test_dynamic_scaling_ends_where_it_would_begin() -> None:
    assert parsed(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_context == 64


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (2, {}, None, (2,)),
        ([2, 5], {}, None, (2, 5)),
        (2, {"eos_token_id": [7, 3]}, None, (7, 3)),
        (2, {"eos_token_id": None}, None, (2,)),
        (None, {}, None, ()),
        (2, {}, 5, (2, 5)),
        (2, {"eos_token_id": [7, 5]}, 5, (7, 5)),
        (None, {}, 5, (5,)),
    ],
)
def test_an_answer_ends_where_transformers_ends_it_and_where_the_tokenizer_does(
    config: Any, generation: dict, tokenizer: int | None, ends: tuple[int, ...]
) -> None:
    assert parsed(eos_token_id=config, generation=generation, eos=tokenizer).eos_ids == ends


@pytest.mark.parametrize("value", [-1, 20, True, "2", 2.0, 10**30, [2, -1], [[2]], {"a": 2}, list(range(20)) * 50])
def test_ends_are_token_ids(value: Any) -> None:
    assert "config.json: eos_token_id is" in refused(eos_token_id=value)
    assert "generation_config.json: eos_token_id is" in refused(generation={"eos_token_id": value})


def test_an_end_that_only_the_tokenizer_has_room_for_is_refused() -> None:
    assert "the tokenizer ends texts with token 20" in refused(eos=20)


END = "<|im_end|>"
PLACES = {
    "beside its text": ({"added_tokens_decoder": {"7": {"content": END}, "x": 1}}, None),
    "an added token": ({}, {"added_tokens": [{"id": 7, "content": END}]}),
    "in the vocabulary": ({}, {"added_tokens": [{"id": True, "content": END}], "model": {"vocab": {END: 7}}}),
}


@pytest.mark.parametrize("written", [END, {"content": END, "lstrip": False}], ids=["text", "object"])
@pytest.mark.parametrize("place", PLACES)
def test_the_tokenizers_end_is_found(tmp_path: Path, place: str, written: Any) -> None:
    config, definition = PLACES[place]
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": written, **config}))
    if definition is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))

    assert read_config(tmp_path).eos_ids == (2, 7)


def test_the_end_may_be_named_beside_the_tokenizers_configuration(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": END}]}))

    assert read_config(tmp_path).eos_ids == (2, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}}))
    assert read_config(tmp_path).eos_ids == (2,), "it is out of use where the tokens are told"


@pytest.mark.parametrize(
    ("config", "definition"),
    [
        ({}, {}),
        ({"eos_token": 7}, {}),
        ({"eos_token": END}, {"added_tokens": {"a": 1}, "model": []}),
        ({"eos_token": END, "added_tokens_decoder": [END]}, {"added_tokens": [7, END], "model": {"vocab": [END]}}),
        ({"eos_token": END, "added_tokens_decoder": {"٧": END, "-7": END}}, {"model": {"vocab": {END: "7"}}}),
    ],
)
def test_a_tokenizer_that_says_nothing_usable_of_its_end_adds_none(
    tmp_path: Path, config: dict, definition: dict
) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))

    assert read_config(tmp_path).eos_ids == (2,)


# --- hostile documents -----------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"]" * 100_000
DOCUMENTS = {
    "empty": b"",
    "cut": b'{"vocab_size": 3',
    "no object": b"[]",
    "null": b"null",
    "not a number": b'{"vocab_size": NaN}',
    "infinite": b'{"vocab_size": -Infinity}',
    "beyond fp64": b'{"rms_norm_eps": 1e999}',
    "endless digits": b'{"vocab_size": ' + b"9" * 100_000 + b"}",
    "deep": b'{"vocab_size": ' + DEEP + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a key twice": b'{"vocab_size": 3, "vocab_size": 4}',
    "no utf-8": b'{"\xff": 1}',
    "utf-16": '{"vocab_size": 3}'.encode("utf-16"),
    "a lone surrogate": b'{"architectures": ["\\ud800"]}',
    "large": b" " * (5 << 20),
}


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_broken_document_ends_in_one_line_that_names_it(tmp_path: Path, name: str, document: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(DOCUMENTS[document])
    if name != "config.json" and document == "a lone surrogate":
        assert read_config(tmp_path).eos_ids == (2,)
        return

    assert name in refusal(tmp_path)


def test_a_document_that_is_a_pipe_or_a_folder_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert "it is not a regular file" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "it is not a regular file" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "config.json cannot be read" in refusal(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*CONFIG, *COMPUTED, *DECIDED, "rope_scaling", "rope_theta", "model_type", "torch_dtype"})


@given(
    base=st.sampled_from([CONFIG, GEMMA2, GEMMA3, MISTRAL, MIXTRAL, OLMO2, PHI3, QWEN, QWEN2, QWEN3_MOE]),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    generation=st.dictionaries(st.just("eos_token_id"), JSON),
)
def test_any_values_at_all_are_taken_or_refused_in_one_line(base: dict, changes: dict, generation: dict) -> None:
    try:
        parsed(base, generation=generation, **changes)
        line = ""
    except ModelError as error:
        line = str(error)

    assert line.isprintable()
