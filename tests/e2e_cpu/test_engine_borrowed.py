"""Architectures without code of our own: transformers computes the layers, attention and KV are ours.

Checked against transformers alone, on tiny random checkpoints; what the port does not do is refused by name.
"""

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowed_models import NAMES, make
from engine_world import EngineWorld, prompt_of
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, largest_error, make_llama, reference_logits, reference_tokens, relative_error
from torch import Tensor

from tandem.engine import transformers_facts
from tandem.engine.documents import ModelError
from tandem.engine.model_config import parse_config, read_config
from tandem.engine.models.transformers_model import TransformersModel
from tandem.engine.parallel import OneShard, Shard
from tandem.engine.transformers_facts import examined_elsewhere, examined_here
from tandem.engine.weights import load

TOGETHER = ("gpt2", "cohere2_windows", "glm4", "smollm3", "olmoe_experts", "vaultgemma_caps")


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_transformers_through_chunks_and_decode(tmp_path: Path, name: str) -> None:
    theirs = make(name, tmp_path)
    world = EngineWorld(tmp_path)

    assert isinstance(world.recording.module, TransformersModel)
    assert largest_error(world, theirs) < 1e-4


@pytest.mark.parametrize("name", TOGETHER)
def test_requests_of_one_batch_do_not_see_each_other(tmp_path: Path, name: str) -> None:
    theirs = make(name, tmp_path)
    world = EngineWorld(tmp_path)
    lengths = [1, 16, 33, 100]
    requests = [world.add(prompt_of(length)) for length in lengths]
    late = world.add(prompt_of(50))

    world.run(*[(request, 0, length) for request, length in zip(requests[:3], lengths[:3], strict=True)])
    world.run((requests[3], 0, 30), decodes=True, join=requests[:3])
    world.run((requests[3], 30, 100), (late, 0, 1), decodes=True)
    world.run((late, 1, 50), decodes=True, join=requests[3:])
    world.run(decodes=True, join=[late])
    world.decode(20)

    for request, length in zip([*requests, late], [*lengths, 50], strict=True):
        generated = world.tokens[request][length:]
        assert len(generated) >= 20
        assert generated == reference_tokens(theirs, prompt_of(length), len(generated))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_request_goes_on_behind_the_cached_pages_of_another(tmp_path: Path, name: str) -> None:
    theirs = make(name, tmp_path)
    world = EngineWorld(tmp_path)
    first = world.add(prompt_of(75))
    world.prefill(first, chunk=32)
    prompt = prompt_of(75)[:64] + prompt_of(30, seed=1)
    second = world.add(prompt)
    world.tables[second] = world.tables[first][:4]

    world.prefill(second, start=64)

    assert relative_error(world.logits[second], reference_logits(theirs, prompt)[-1]) < 1e-4


@pytest.mark.parametrize("name", ["gpt_neox", "granite", "phi"])
def test_in_bfloat16_it_differs_from_transformers_by_rounding_only(tmp_path: Path, name: str) -> None:
    theirs = make(name, tmp_path)
    exact = reference_logits(theirs, prompt_of(60))[-1]
    rounded = reference_logits(theirs.to(torch.bfloat16), prompt_of(60))[-1].float()
    world = EngineWorld(tmp_path, dtype="bfloat16")
    request = world.add(prompt_of(60))

    world.prefill(request, chunk=23)

    ours = world.logits[request]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 2 * (rounded - exact).abs().mean() + 0.01 * exact.abs().mean()


def test_keys_and_values_may_be_kept_in_8_bits(tmp_path: Path) -> None:
    theirs = make("gpt_neox", tmp_path)
    world = EngineWorld(tmp_path, kv_is_int8=True)
    request = world.add(prompt_of(60))

    world.prefill(request, chunk=23)

    assert 1e-5 < relative_error(world.logits[request], reference_logits(theirs, prompt_of(60))[-1]) < 0.05


# --- what it knows of itself ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vaultgemma_caps", "gpt2", "cohere2_windows"])
def test_a_process_of_its_own_finds_the_same(tmp_path: Path, name: str) -> None:
    make(name, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())

    assert examined_elsewhere(raw) == examined_here(raw)


def test_the_configuration_says_what_the_layers_ask_of_attention(tmp_path: Path) -> None:
    make("vaultgemma_caps", tmp_path)
    config = read_config(tmp_path, examine=examined_here)

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 6, 2, 12)
    assert [config.window_of(layer) for layer in range(2)] == [24, None]
    assert config.score_divisor == pytest.approx(7)
    assert (config.attention_cap, config.max_context, config.vocab_size) == (3.0, 512, 300)


def test_angles_that_change_with_the_length_of_a_text_end_the_context(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {**longrope, "original_max_position_embeddings": 256, "factor": 2.0}
    make("helium", tmp_path, rope_parameters=rope)

    assert read_config(tmp_path, examine=examined_here).max_context == 256


def test_servers_know_each_others_weights_settings_and_library(tmp_path: Path) -> None:
    make("gpt_neox", tmp_path / "one")
    make("gpt_neox", tmp_path / "same")
    make("gpt_neox", tmp_path / "settings", rotary_pct=0.5)
    make("gpt_neox", tmp_path / "weights")
    tensors = load_file(tmp_path / "weights" / "model.safetensors")
    tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.bias"][3] += 1
    save_file(tensors, tmp_path / "weights" / "model.safetensors", {"format": "pt"})
    one, same, settings, weights = (
        load(tmp_path / name).layout_fields for name in ("one", "same", "settings", "weights")
    )

    assert one == same
    assert {name for name in one if one[name] != weights[name]} == {"weights"}
    assert {name for name in one if one[name] != settings[name]} == {"config"}
    assert one["computed_by"].startswith("transformers 5.")


def test_its_weights_are_packed_for_nobody(tmp_path: Path) -> None:
    make("phi", tmp_path)
    assert not load(tmp_path, dtype="bfloat16").is_packed


def test_own_code_is_taken_where_there_is_some(tmp_path: Path) -> None:
    make_llama(tmp_path)

    assert not isinstance(load(tmp_path).module, TransformersModel)


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, dict[str, object], str]] = {
    "sinks": ("gpt_oss", "GptOssForCausalLM", {"head_dim": 8}, "is given s_aux, which ours does not know"),
    "latent": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6, "first_k_dense_replace": 1},
        "do not have heads of one size",
    ),
    "latent_with_fewer_heads": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 9,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        "by its num_key_value_heads 2 heads share one for keys and values, in its layers 1",
    ),
    "two_calls": ("diffllama", "DiffLlamaForCausalLM", {}, "its layer 1 calls attention as 0"),
    "states": (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3},
        "its layer 0 calls attention as 2",
    ),
    "states_of_mamba": ("mamba", "MambaForCausalLM", {}, "cannot be handed to somebody else"),
    "alibi": ("bloom", "BloomForCausalLM", {}, "cannot be handed to somebody else"),
    "looks_ahead": ("bert", "BertLMHeadModel", {}, "its attention looks ahead"),
    "head": (
        "opt",
        "OPTForCausalLM",
        {"ffn_dim": 96, "word_embed_proj_dim": 48},
        "its head wants more than the states of its layers",
    ),
    "own_masks": ("doge", "DogeForCausalLM", {}, "transformers cannot run it without weights"),
    "window_that_no_mask_has": (
        "olmoe",
        "OlmoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
        "a mask of its layers lets token 511 see token 0",
    ),
    "unknown": ("gpt_neox", "GPTNeoYForCausalLM", {}, "neither Tandem nor transformers"),
    "no_decoder": ("t5", "T5ForConditionalGeneration", {}, "this is the name of none"),
    "another_type": ("gpt2", "GPTNeoXForCausalLM", {}, "has a decoder of this name (model_type 'gpt2'"),
    "quantised": (
        "gpt2",
        "GPT2LMHeadModel",
        {"quantization_config": {"quant_method": "gptq"}},
        "weights are quantised",
    ),
    "no_context": ("gpt2", "GPT2LMHeadModel", {"max_position_embeddings": 0}, "its max_position_embeddings is 0"),
    "too_many_layers": ("gpt2", "GPT2LMHeadModel", {"num_hidden_layers": 10**7}, "its num_hidden_layers is 10000000"),
    "broken": ("gpt_neox", "GPTNeoXForCausalLM", {"hidden_size": "much"}, "cannot run it without weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_port_does_not_do_is_refused_by_name(case: str) -> None:
    model_type, architecture, changes, reason = REFUSED[case]
    raw = {**LLAMA, **changes, "model_type": model_type, "architectures": [architecture]}

    with pytest.raises(ModelError) as caught:
        parse_config(raw, generation={}, examine=examined_here)

    assert f"config.json: the architecture '{architecture}' is not supported: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.slow
def test_a_refusal_of_a_process_of_its_own_is_the_same_line(capfd: pytest.CaptureFixture[str]) -> None:
    model_type, architecture, changes, _ = REFUSED["sinks"]
    raw = {**LLAMA, **changes, "model_type": model_type, "architectures": [architecture]}
    said = []
    for examine in (examined_here, examined_elsewhere):
        with pytest.raises(ModelError) as caught:
            examine(raw)
        said.append(str(caught.value))

    assert said[0] == said[1]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("examine", [examined_here, examined_elsewhere])
def test_without_transformers_the_extra_is_named(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers_facts, "find_spec", lambda name: None if name == "transformers" else util.find_spec(name)
    )
    raw = {**LLAMA, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}

    with pytest.raises(ModelError, match=r"transformers is not installed; pip install 'tandem-llm\[transformers\]'"):
        examine(raw)


def test_transformers_that_cannot_be_imported_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('no ResolvedRevision')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    raw = {**LLAMA, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}

    with pytest.raises(
        ModelError, match=r"GPT2LMHeadModel.*does not run here \(ImportError: no ResolvedRevision\); pip"
    ):
        examined_elsewhere(raw)


def test_an_implementation_that_config_json_names_is_not_taken(tmp_path: Path) -> None:
    theirs = make("gpt2", tmp_path)
    path = tmp_path / "config.json"
    named = {"attn_implementation": "somebody/kernels", "_attn_implementation": "somebody/kernels"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named, "auto_map": {"AutoConfig": "code.Config"}}))
    world = EngineWorld(tmp_path)
    request = world.add(prompt_of(20))

    world.prefill(request)

    assert relative_error(world.logits[request], reference_logits(theirs, prompt_of(20))[-1]) < 1e-4


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "remove", "missing keys"),
        ("gpt_neox.layers.0.mlp.gate.weight", "add", "unexpected keys"),
    ],
)
def test_tensors_that_do_not_go_with_the_configuration_are_refused(
    tmp_path: Path, name: str, change: str, said: str
) -> None:
    make("gpt_neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "remove":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match=f"does not go with the tensors of the checkpoint: {said}, '{name}'"):
        load(tmp_path)


def test_a_part_of_it_fewer_bits_and_vectors_are_refused(tmp_path: Path) -> None:
    make("gpt2", tmp_path)

    with pytest.raises(ModelError, match="which cannot be cut; use one worker"):
        load(tmp_path, group=OneShard(Shard(0, 2)))
    with pytest.raises(ModelError, match="which cannot be cut; use one worker"):
        load(tmp_path, stage=Shard(1, 2))
    with pytest.raises(ModelError, match="--quantization is for Tandem's own architectures"):
        load(tmp_path, quantization="int8")
    with pytest.raises(ModelError, match="makes no vectors; leave --is-embedding out"):
        load(tmp_path, is_embedding=True)


# --- the trial at start ----------------------------------------------------------------------------------------------


def counted(self: TransformersModel, step: Any, hidden: Tensor | None = None) -> Tensor:
    """As a model that counts its tokens and does not read their positions."""
    positions = torch.arange(len(step.batch.token_ids))[None]
    self._port.attention = step.attention
    return self._layers(input_ids=step.batch.token_ids[None], position_ids=positions).last_hidden_state[0]


def shifted(self: TransformersModel, step: Any, hidden: Tensor | None = None) -> Tensor:
    """As a model in which a token knows the one before it in the batch, whoever's that is."""
    states = forward(self, step, hidden)
    return states + 0.3 * states.roll(1, dims=0)


forward = TransformersModel.forward


@pytest.mark.parametrize("wrong", [counted, shifted])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "cohere"])
def test_a_model_that_says_something_else_through_the_port_is_not_served(
    tmp_path: Path, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(name, tmp_path)
    monkeypatch.setattr(TransformersModel, "forward", wrong)

    with pytest.raises(ModelError, match="its scores through Tandem's attention differ"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_first_position_is_another_one_is_not_served(tmp_path: Path, dtype: str) -> None:
    make("roberta", tmp_path)

    with pytest.raises(ModelError, match="it does not count the positions of a text from 0 on"):
        load(tmp_path, dtype=dtype)
