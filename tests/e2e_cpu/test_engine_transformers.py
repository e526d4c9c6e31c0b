"""The engine against transformers, on tiny random checkpoints: logits, KV, greedy continuations."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_world import VOCAB, EngineWorld, prompt_of
from tiny_models import (
    LLAMA3_ROPE,
    YARN_ROPE,
    largest_error,
    longrope,
    make_gemma2,
    make_gemma3,
    make_granite,
    make_llama,
    make_mistral,
    make_mixtral,
    make_olmo2,
    make_phi3,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
    reference_logits,
    reference_tokens,
    relative_error,
)
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.model_config import ModelError
from tandem.engine.weights import load

Maker = Callable[..., PreTrainedModel]

CHECKPOINTS: dict[str, Maker] = {
    "llama": lambda where: make_llama(where),
    "llama3_scaling": lambda where: make_llama(where, rope_parameters=LLAMA3_ROPE),
    "linear_scaling": lambda where: make_llama(
        where, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "dynamic_scaling_within_trained_length": lambda where: make_llama(
        where, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    ),
    "yarn_scaling": lambda where: make_llama(where, rope_parameters=YARN_ROPE),
    "yarn_with_its_own_factors": lambda where: make_llama(
        where, rope_parameters={**YARN_ROPE, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    ),
    "tied": lambda where: make_llama(where, tie_word_embeddings=True),
    "biases": lambda where: make_llama(where, attention_bias=True, mlp_bias=True),
    "one_kv_head_per_head": lambda where: make_llama(where, num_key_value_heads=6),
    "explicit_head_dim": lambda where: make_llama(where, head_dim=32),
    "sharded": lambda where: make_llama(where, max_shard_size="40KB"),
    "qwen2": lambda where: make_qwen2(where),
    "qwen2_untied": lambda where: make_qwen2(where, tie_word_embeddings=False),
    "qwen2_nine_heads_of_six": lambda where: make_qwen2(
        where, hidden_size=54, num_attention_heads=9, num_key_value_heads=3
    ),
    "qwen2_yarn": lambda where: make_qwen2(where, rope_parameters=YARN_ROPE),
    "mistral": lambda where: make_mistral(where),
    "mistral_tied": lambda where: make_mistral(where, tie_word_embeddings=True),
    "mistral_seven_heads_of_ten": lambda where: make_mistral(
        where, num_attention_heads=7, num_key_value_heads=1, head_dim=10
    ),
    "mistral_window": lambda where: make_mistral(where, sliding_window=24),
    "mistral_window_that_ends_in_the_output": lambda where: make_mistral(where, sliding_window=155),
    "mistral_window_beyond_the_context": lambda where: make_mistral(where, sliding_window=512),
    "qwen3": lambda where: make_qwen3(where),
    "qwen3_odd_sizes": lambda where: make_qwen3(
        where, hidden_size=50, intermediate_size=77, num_attention_heads=5, num_key_value_heads=1, head_dim=14
    ),
    "qwen3_yarn_untied": lambda where: make_qwen3(where, rope_parameters=YARN_ROPE, tie_word_embeddings=False),
    "qwen3_moe": lambda where: make_qwen3_moe(where),
    "qwen3_moe_shares_as_they_are": lambda where: make_qwen3_moe(where, norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3_moe_one_expert_per_token": lambda where: make_qwen3_moe(
        where, num_experts_per_tok=1, head_dim=14, moe_intermediate_size=17, norm_topk_prob=False
    ),
    "qwen3_moe_dense_layers": lambda where: make_qwen3_moe(
        where, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True
    ),
    "phi3": lambda where: make_phi3(where),
    "phi3_tied_with_a_window": lambda where: make_phi3(
        where, tie_word_embeddings=True, sliding_window=24, num_key_value_heads=6, intermediate_size=37
    ),
    "phi3_part_of_the_head": lambda where: make_phi3(
        where, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    ),
    "phi3_longrope": lambda where: make_phi3(where, rope_parameters=longrope(4)),
    "phi3_longrope_part_of_the_head": lambda where: make_phi3(
        where, rope_parameters={**longrope(3), "partial_rotary_factor": 0.75, "factor": 8.0}, tie_word_embeddings=True
    ),
    "olmo2": lambda where: make_olmo2(where),
    "olmo2_tied_with_biases": lambda where: make_olmo2(
        where,
        tie_word_embeddings=True,
        attention_bias=True,
        hidden_size=54,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "gemma2": lambda where: make_gemma2(where),
    "gemma2_untied_without_caps": lambda where: make_gemma2(
        where, tie_word_embeddings=False, attn_logit_softcapping=None, final_logit_softcapping=None, num_hidden_layers=3
    ),
    "gemma2_divisor_and_biases": lambda where: make_gemma2(
        where, query_pre_attn_scalar=7, attention_bias=True, head_dim=10, num_attention_heads=4, intermediate_size=37
    ),
    "gemma2_named_layers": lambda where: make_gemma2(
        where, num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "gemma3": lambda where: make_gemma3(where),
    "gemma3_untied_capped_logits": lambda where: make_gemma3(
        where, tie_word_embeddings=False, final_logit_softcapping=6.0, query_pre_attn_scalar=20
    ),
    "gemma3_two_kinds_of_angles": lambda where: make_gemma3(
        where,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 8e4, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma3_window_that_ends_in_the_output": lambda where: make_gemma3(where, sliding_window=155),
    "gemma3_window_beyond_the_context": lambda where: make_gemma3(where, sliding_window=512),
    "gemma3_by_its_pattern": lambda where: make_gemma3(where, num_hidden_layers=7, layer_types=None),
    "granite_hybrid": lambda where: make_granite(where),
    "granite_hybrid_that_turns_with_groups_and_biases": lambda where: make_granite(
        where,
        position_embedding_type="rope",
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
        tie_word_embeddings=True,
    ),
    "granite_hybrid_that_only_attends": lambda where: make_granite(where, layer_types=["attention"] * 4),
    "mixtral": lambda where: make_mixtral(where),
    "mixtral_tied_with_a_window": lambda where: make_mixtral(
        where, tie_word_embeddings=True, sliding_window=24, head_dim=10, intermediate_size=37
    ),
}

MAKERS: tuple[Maker, ...] = (
    *(make_llama, make_qwen2, make_qwen3, make_mistral, make_qwen3_moe, make_mixtral, make_phi3, make_olmo2),
    *(make_gemma2, make_gemma3, make_granite),
)


def mean_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean() / theirs.abs().mean())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_logits_are_those_of_transformers(tmp_path: Path, checkpoint: str) -> None:
    theirs = CHECKPOINTS[checkpoint](tmp_path)

    assert largest_error(EngineWorld(tmp_path), theirs) < 1e-4


def test_sharded_checkpoints_come_in_more_than_one_file(tmp_path: Path) -> None:
    CHECKPOINTS["sharded"](tmp_path)

    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_the_older_spelling_of_rotary_settings_means_the_same(tmp_path: Path) -> None:
    theirs = CHECKPOINTS["llama3_scaling"](tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_scaling"] = config.pop("rope_parameters")
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    world = EngineWorld(tmp_path)
    request = world.add(prompt_of(100))

    world.prefill(request)

    assert relative_error(world.logits[request], reference_logits(theirs, prompt_of(100))[-1]) < 1e-4


def test_the_older_spelling_of_gemmas_angles_and_layers_means_the_same(tmp_path: Path) -> None:
    theirs = CHECKPOINTS["gemma3_by_its_pattern"](tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del config[name]
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 6}
    path.write_text(json.dumps(config | older))
    world = EngineWorld(tmp_path)
    request = world.add(prompt_of(100))

    world.prefill(request)

    assert relative_error(world.logits[request], reference_logits(theirs, prompt_of(100))[-1]) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_half_precision_differs_from_transformers_by_rounding_only(tmp_path: Path, maker: Maker, dtype: str) -> None:
    """As far from the exact scores as theirs is, on the average of many: single ones are a matter of luck."""
    theirs = maker(tmp_path)
    if dtype == "float16" and maker in (make_gemma2, make_gemma3):
        with pytest.raises(ModelError, match="beyond the largest number of float16; use --dtype bfloat16 or float32"):
            EngineWorld(tmp_path, dtype=dtype)
        return
    prompts = [prompt_of(60, seed=seed) for seed in range(8)]
    exact = torch.stack([reference_logits(theirs, prompt)[-1] for prompt in prompts])
    rounding = theirs.to(getattr(torch, dtype))
    rounded = torch.stack([reference_logits(rounding, prompt)[-1].float() for prompt in prompts])
    world = EngineWorld(tmp_path, dtype=dtype)
    requests = [world.add(prompt) for prompt in prompts]
    for request in requests:
        world.prefill(request, chunk=23)
    assert (world.engine.kernels == "products by torch, attention by TorchSdpa") or dtype != "float16"
    ours = torch.stack([world.logits[request] for request in requests])

    assert ours.dtype == torch.float32
    assert mean_error(ours, exact) < 1.5 * mean_error(rounded, exact) < (0.1 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize("maker", [make_granite, make_gemma2, make_gemma3])
def test_embeddings_are_scaled_bit_by_bit_as_by_transformers(tmp_path: Path, maker: Maker) -> None:
    """Gemma's factor is rounded to the type of the weights, Granite's is not."""
    changes = {"embedding_multiplier": 6.3} if maker is make_granite else {}
    theirs = maker(tmp_path, **changes).to(torch.bfloat16).model
    ids = torch.arange(VOCAB)
    expected = theirs.embed_tokens(ids) * (theirs.embedding_multiplier if changes else 1)

    assert torch.equal(load(tmp_path, dtype="bfloat16").module.embedding(ids), expected)


def test_the_kv_of_ten_prompts_is_that_of_transformers_page_by_page(tmp_path: Path) -> None:
    theirs = make_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    world = EngineWorld(tmp_path)
    size = world.page_size
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 70, 128]
    requests = [world.add(prompt_of(length)) for length in lengths]

    world.run(*[(request, 0, length) for request, length in zip(requests, lengths, strict=True)])

    for request, length in zip(requests, lengths, strict=True):
        with torch.inference_mode():
            cache = theirs(torch.tensor([prompt_of(length)]), use_cache=True).past_key_values
        for index, page in enumerate(world.tables[request]):
            start, stop = index * size, min(length, (index + 1) * size)
            ours = world.engine.kv.tensor[page]  # [kv_heads, layers, 2, page_size, head_dim]
            for layer, cached in enumerate(cache.layers):
                torch.testing.assert_close(ours[:, layer, 0, : stop - start], cached.keys[0, :, start:stop])
                torch.testing.assert_close(ours[:, layer, 1, : stop - start], cached.values[0, :, start:stop])
            assert not ours[:, :, :, stop - start :].any(), "slots behind the last token hold zeros"


def test_a_page_of_bytes_is_a_page_of_the_tensor(tmp_path: Path) -> None:
    make_llama(tmp_path)
    world = EngineWorld(tmp_path)
    request = world.add(prompt_of(16))
    world.prefill(request)
    page = world.tables[request][0]

    seen = torch.frombuffer(world.engine.kv.page(page), dtype=torch.float32).view(world.engine.kv.tensor[page].shape)

    assert seen.any()
    assert torch.equal(seen, world.engine.kv.tensor[page])


@pytest.mark.parametrize("maker", MAKERS)
def test_greedy_continuations_are_those_of_transformers_whatever_else_runs(tmp_path: Path, maker: Maker) -> None:
    theirs = maker(tmp_path)
    world = EngineWorld(tmp_path)
    lengths = [1, 15, 16, 17, 32, 100, 200]
    requests = [world.add(prompt_of(length)) for length in lengths]
    late = world.add(prompt_of(50))

    world.run(*[(request, 0, length) for request, length in zip(requests[:5], lengths[:5], strict=True)])
    world.run((requests[5], 0, 30), (requests[6], 0, 77), decodes=True, join=requests[:5])
    world.run((requests[5], 30, 100), (requests[6], 77, 200), decodes=True)
    world.run((late, 0, 1), decodes=True, join=requests[5:])
    world.run((late, 1, 50), decodes=True, leave=[requests[2]])
    world.run(decodes=True, join=[late])
    world.decode(3)
    world.run(decodes=True, join=[requests[2]])
    world.decode(33)

    for request, length in zip([*requests, late], [*lengths, 50], strict=True):
        generated = world.tokens[request][length:]
        assert len(generated) >= 33
        assert generated == reference_tokens(theirs, prompt_of(length), len(generated))


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_the_page_size_changes_nothing(tmp_path: Path, page_size: int) -> None:
    theirs = make_llama(tmp_path)
    world = EngineWorld(tmp_path, page_size=page_size)

    tokens = world.generate(prompt_of(33), 20, chunk=10)

    assert tokens == reference_tokens(theirs, prompt_of(33), 20)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_give_the_same_tokens_as_one_piece(tmp_path: Path, chunk: int) -> None:
    make_llama(tmp_path)

    whole = EngineWorld(tmp_path).generate(prompt_of(90), 20)
    chunked = EngineWorld(tmp_path).generate(prompt_of(90), 20, chunk=chunk)

    assert chunked == whole


def test_hundreds_of_rows_of_very_different_lengths_decode_together(tmp_path: Path) -> None:
    theirs = make_llama(tmp_path)
    world = EngineWorld(tmp_path, num_pages=1400)
    lengths = [1 + (37 * index) % 90 for index in range(240)]
    lengths[7] = 400
    requests = [world.add(prompt_of(length, seed=i)) for i, length in enumerate(lengths)]
    for first in range(0, 240, 60):
        world.run(*[(r, 0, lengths[r]) for r in requests[first : first + 60]])
    world.run(decodes=True, join=requests)
    world.decode(5)

    for request in (0, 7, 8, 100, 239):
        expected = reference_tokens(theirs, prompt_of(lengths[request], seed=request), 7)
        assert world.tokens[request][lengths[request] :] == expected


# --- sliding windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_a_window_ends_in_the_middle_of_pages_chunks_and_decoding_rows(
    tmp_path: Path, window: int, page_size: int, deterministic: bool
) -> None:
    """Two requests: decoding rows of one group begin at different pages, and one reaches its window as it decodes."""
    theirs = make_mistral(tmp_path, sliding_window=window)
    world = EngineWorld(tmp_path, page_size=page_size, num_pages=512, deterministic=deterministic)
    long, short = world.add(prompt_of(120)), world.add(prompt_of(2))
    for request in (long, short):
        world.prefill(request, chunk=33)
    ours: dict[int, list[Tensor]] = {request: [world.logits[request]] for request in (long, short)}
    for step in range(44):
        world.run(decodes=True, join=[long, short] if step == 0 else [])
        for request in (long, short):
            ours[request].append(world.logits[request])

    for request, length in ((long, 120), (short, 2)):
        expected = reference_logits(theirs, world.tokens[request][:-1])[length - 1 :]
        assert relative_error(torch.stack(ours[request]), expected) < 1e-4


def test_a_window_shows(tmp_path: Path) -> None:
    """Or the test above would pass without one."""
    rows = []
    for name, window in (("with", 24), ("without", None)):
        make_mistral(tmp_path / name, sliding_window=window)
        world = EngineWorld(tmp_path / name)
        request = world.add(prompt_of(60))
        world.prefill(request)
        rows.append(world.logits[request])

    assert relative_error(*rows) > 0.01


def test_pages_before_the_window_are_not_read(tmp_path: Path) -> None:
    make_mistral(tmp_path, num_hidden_layers=1, sliding_window=24)
    rows = []
    for forgets in (False, True):
        world = EngineWorld(tmp_path)
        request = world.add(prompt_of(100))
        world.run((request, 0, 70))
        for page in world.tables[request][:2] if forgets else []:
            world.engine.kv.tensor[page] = float("nan")
        world.run((request, 70, 100))
        world.run(decodes=True, join=[request])
        rows.append(world.logits[request])

    assert torch.equal(*rows)
    assert rows[0].isfinite().all()
