"""What may lie in a model directory: read what is right, refuse the rest with one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.model_config import ModelError, parse_config
from tandem.engine.weights import LoadedModel, load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


def write_model(where: Path, *, dtype: torch.dtype = torch.float32, generation: dict | None = None, **changes) -> Path:
    """A whole Llama directory; `changes` go into config.json."""
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if generation is not None:
        (where / "generation_config.json").write_text(json.dumps(generation))
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (20, 8), "lm_head": (20, 8), "model.norm": (8,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm": (8,), f"{at}.post_attention_layernorm": (8,)}
        shapes |= {f"{at}.self_attn.{name}_proj": (8 if name in "qo" else 4, 8) for name in "qkvo"}
        shapes |= {f"{at}.mlp.gate_proj": (12, 8), f"{at}.mlp.up_proj": (12, 8), f"{at}.mlp.down_proj": (8, 12)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, where / "model.safetensors")
    return where


def refusal(where: Path, **settings: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(where, **{"dtype": "auto", "device": "cpu", **settings})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_whole_directory_loads(tmp_path: Path) -> None:
    model = load(write_model(tmp_path), dtype="auto", device="cpu")

    assert model.max_context == 64
    assert model.eos_ids == (2,)
    assert model.layout_fields | {"weights": "?"} == {
        "model": "LlamaForCausalLM",
        "dtype": "float32",
        "layers": "2",
        "kv_heads": "2",
        "head_dim": "2",
        "weights": "?",
        "deterministic": "off",
    }


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_the_type_is_the_one_asked_for(tmp_path: Path, stored: torch.dtype, asked: str, got: torch.dtype) -> None:
    model = load(write_model(tmp_path, dtype=stored), dtype=asked, device="cpu")

    original = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert model.dtype == got
    assert torch.equal(model.module.layers[1].down_proj.weight, original.to(got))


def test_weights_of_the_stored_type_are_mapped_not_copied(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = load(tmp_path, dtype="auto", device="cpu")
    address = model.module.embedding.data_ptr()

    lines = Path("/proc/self/maps").read_text().splitlines()

    def holds(line: str) -> bool:
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        return begin <= address < end

    assert next(line for line in lines if holds(line)).endswith(str(tmp_path / "model.safetensors"))


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=[2, 5], generation={"eos_token_id": [7, 2]})

    assert load(tmp_path, dtype="auto", device="cpu").eos_ids == (7, 2, 5)


def test_no_end_token_is_fine(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=None, generation={})

    assert load(tmp_path, dtype="auto", device="cpu").eos_ids == ()


# --- the digest ----------------------------------------------------------------------------------------------------


def weights_digest(model: LoadedModel) -> str:
    return model.layout_fields["weights"]


def test_the_digest_does_not_depend_on_the_place(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a"), write_model(tmp_path / "b", transformers_version="9.9")

    assert weights_digest(load(here)) == weights_digest(load(there))


@pytest.mark.parametrize("change", ["config", "name", "values"])
def test_the_digest_tells_checkpoints_apart(tmp_path: Path, change: str) -> None:
    before = weights_digest(load(write_model(tmp_path / "a")))
    other = write_model(tmp_path / "b", **({"rope_theta": 5e5} if change == "config" else {}))
    tensors = load_file(other / "model.safetensors")
    if change == "name":
        tensors["extra"] = torch.zeros(1)
    if change == "values":
        tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors")

    assert weights_digest(load(other)) != before


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)

    assert "config.json" in refusal(tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    text = refusal(write_model(tmp_path, architectures=["MambaForCausalLM"]))

    assert "MambaForCausalLM" in text
    assert "LlamaForCausalLM, Qwen3ForCausalLM" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"architectures": []}, "architectures"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    assert named in refusal(write_model(tmp_path, **change))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()

    assert "no model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 400])
def test_a_truncated_weight_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    assert "model.safetensors cannot be read" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "model-00001-of-00002.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)

    assert f"the tensor {name} is missing" in refusal(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    text = refusal(write_model(tmp_path, intermediate_size=13))

    assert "model.layers.0.mlp.gate_proj.weight" in text


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    assert "int3" in refusal(write_model(tmp_path), dtype="int3")


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)

    assert "cuda:99" in refusal(tmp_path, device="cuda:99")
    assert "abacus" in refusal(tmp_path, device="abacus")


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    assert parse_config({**CONFIG, "rope_scaling": scaling}, generation={}).max_context == 256


def test_dynamic_scaling_ends_where_it_would_begin() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}

    assert parse_config({**CONFIG, "rope_scaling": scaling}, generation={}).max_context == 64
