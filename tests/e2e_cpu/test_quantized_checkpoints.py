"""Weights of few bits through the whole engine: what is made when a plain checkpoint is loaded, and what was stored so.

A quantised model is held against the plain one that its codes stand for.
"""

import json
from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from quantized_models import (
    FORMATS,
    NUMBERS,
    compressed,
    compressed_numbers,
    gptq_config,
    pair_of_numbers,
    quantised_pair,
)
from safetensors.torch import load_file, save_file
from shard_group import ThreadGroup, on_every_shard
from tiny_models import make_llama, make_phi3, make_qwen3_moe
from torch import Tensor

from tandem.engine import mapped_files
from tandem.engine.layers.packed import PackedCodes
from tandem.engine.layers.quantized import QuantizedWeight
from tandem.engine.model_config import ModelError
from tandem.engine.native import library
from tandem.engine.native.library import OFF, SWITCH
from tandem.engine.weights import load

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
NEAR = 1e-3


def answer(where: Path, prompt: list[int], **settings: object) -> Tensor:
    """Logits after the prompt and after four tokens more, [5, vocab]."""
    world = EngineWorld(where, **settings)
    request = world.add(prompt)
    world.prefill(request)
    rows = [world.logits[request]]
    for step in range(4):
        world.run(decodes=True, join=[request] if step == 0 else [])
        rows.append(world.logits[request])
    return torch.stack(rows)


def refusal(where: Path, **settings: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(where, **settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["gptq4", "awq", "gguf4"])
def test_a_quantised_checkpoint_has_as_many_parameters_as_the_plain_one(name: str, tmp_path: Path) -> None:
    theirs = make_llama(tmp_path / "source", **SIZES)
    quantised, plain = quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)

    assert load(quantised).num_parameters == load(plain).num_parameters == theirs.num_parameters()


def test_what_a_file_holds_as_one_tensor_is_counted_once(tmp_path: Path) -> None:
    theirs = make_phi3(tmp_path, tie_word_embeddings=True)

    assert load(tmp_path).num_parameters == theirs.num_parameters()


@pytest.mark.parametrize("native", ["", OFF])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_computes_what_its_dequantised_weights_do(
    name: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, native)
    library.use(library.best())
    make_llama(tmp_path / "source", **SIZES)
    ours, plain = quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)
    for length in (5, 90):
        prompt = prompt_of(length)
        found, expected = answer(ours, prompt), answer(plain, prompt)

        assert (found - expected).abs().max() < NEAR * max(1.0, expected.abs().max().item())
        assert expected.std() > 0.1, "there is something to compare"
    assert isinstance(load(ours).module.blocks[1].mlp.down_proj.weight, QuantizedWeight | PackedCodes)


@pytest.mark.parametrize("name", FORMATS)
def test_in_bfloat16_it_does_so_but_for_rounding(name: str, tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    ours, plain = quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)
    for length in (5, 90):
        prompt = prompt_of(length)
        exact = answer(plain, prompt)
        found, rounded = (answer(where, prompt, dtype="bfloat16") for where in (ours, plain))

        assert (found - exact).norm() < 1.5 * (rounded - exact).norm(), "no further off than the plain one"
    kernels, weight = library.best(), load(ours, dtype="bfloat16").module.blocks[1].mlp.down_proj.weight
    assert isinstance(weight, PackedCodes) == (kernels is not None and kernels.packs_codes(torch.bfloat16, weight))


@pytest.mark.parametrize("native", ["", OFF])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_8_bits_compute_what_they_are_scaled_to(
    name: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, native)
    library.use(library.best())
    make_llama(tmp_path / "source", **SIZES)
    ours, plain = pair_of_numbers(tmp_path / "source", NUMBERS[name], tmp_path)
    exact = answer(plain, prompt_of(40))
    most = NEAR * max(1.0, exact.abs().max().item())
    assert (answer(ours, prompt_of(40)) - exact).abs().max() < most
    found, rounded = (answer(where, prompt_of(40), dtype="bfloat16") for where in (ours, plain))
    assert (found - exact).norm() < 1.5 * (rounded - exact).norm(), "no further off than the plain one"

    def on_shard(group: ThreadGroup) -> Tensor:
        return answer(ours, prompt_of(40), group=group)

    for found in on_every_shard(2, on_shard):
        assert (found - exact).abs().max() < most


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_8_bits_stay_what_they_are(name: str, tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    ours, plain = pair_of_numbers(tmp_path / "source", NUMBERS[name], tmp_path)
    model = load(ours, dtype="bfloat16")
    weight = model.module.blocks[1].mlp.down_proj.weight
    assert isinstance(weight, QuantizedWeight | PackedCodes)
    assert (weight.bits, weight.is_float8) == (8, True)
    others = sum(
        2 * t.numel() for n, t in load_file(plain / "model.safetensors").items() if not n.endswith("_proj.weight")
    )
    assert model.weight_bytes - others < 0.7 * (load(plain, dtype="bfloat16").weight_bytes - others)

    path, layer = ours / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(path)
    broken = stored[f"{layer}.weight"].view(torch.uint8).clone()
    broken[3, 5] = 0xFF
    save_file({**stored, f"{layer}.weight": broken.view(torch.float8_e4m3fn)}, path)
    assert f"{layer}.weight holds what is no number" in refusal(ours)
    scale = f"{layer}.{NUMBERS[name].scale}"
    save_file({key: value for key, value in stored.items() if key != scale}, path)
    assert f"{layer}.weight_scale is missing" in refusal(ours)


@pytest.mark.parametrize(("is_quantised", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_float16_is_computed_as_bfloat16_where_it_stands_beside_codes(
    is_quantised: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_llama(tmp_path / "source", **SIZES)
    where = quantised_pair(tmp_path / "source", FORMATS["awq"], tmp_path)[0 if is_quantised else 1]
    tensors = load_file(where / "model.safetensors")
    save_file({n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}, where / "model.safetensors")

    assert load(where).dtype == dtype


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_is_quantised_here_computes_what_it_stands_for_and_takes_less_memory(name: str, tmp_path: Path) -> None:
    make_llama(tmp_path / "plain", **SIZES)
    model = load(tmp_path / "plain", quantization=name)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for index, block in enumerate(model.module.blocks):
        at = f"model.layers.{index}"
        parts = {
            **{f"{at}.self_attn.{kind}_proj": getattr(block.qkv, f"{kind}_proj") for kind in "qkv"},
            **{f"{at}.mlp.{kind}_proj": getattr(block.mlp.gate_up, f"{kind}_proj") for kind in ("gate", "up")},
            f"{at}.self_attn.o_proj": block.o_proj,
            f"{at}.mlp.down_proj": block.mlp.down_proj,
        }
        assert all(isinstance(linear.weight, QuantizedWeight | PackedCodes) for linear in parts.values())
        tensors |= {f"{each}.weight": linear.weight.plain(torch.float32) for each, linear in parts.items()}
    (tmp_path / "dequantised").mkdir()
    save_file(tensors, tmp_path / "dequantised" / "model.safetensors")
    (tmp_path / "dequantised" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())

    found = answer(tmp_path / "plain", prompt_of(40), quantization=name)
    assert (found - answer(tmp_path / "dequantised", prompt_of(40))).abs().max() < NEAR
    assert (found - answer(tmp_path / "plain", prompt_of(40))).abs().max() > NEAR, "it is another model"
    assert model.weight_bytes < load(tmp_path / "plain").weight_bytes


@pytest.mark.parametrize("make", [make_phi3, make_qwen3_moe])
def test_fused_layers_and_experts_are_quantised_too(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    plain, found = answer(tmp_path, prompt_of(20)), answer(tmp_path, prompt_of(20), quantization="int8")

    assert 1e-5 < (found - plain)[0].abs().max() < 0.3 * plain[0].std()


@pytest.mark.parametrize("name", ["gptq4", "awq", "packed8", "bytes", "gguf4", "gguf8", "int8", "int4"])
def test_shards_compute_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    make_llama(tmp_path / "source", **sizes)
    made_here = None if name in FORMATS else name
    where = tmp_path / "source" if made_here else quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)[0]
    expected = answer(where, prompt_of(30), quantization=made_here)

    def on_shard(group: ThreadGroup) -> Tensor:
        return answer(where, prompt_of(30), quantization=made_here, group=group)

    for found in on_every_shard(2, on_shard):
        assert (found - expected).abs().max() < NEAR


def test_a_group_that_shards_would_share_is_refused_by_name(tmp_path: Path) -> None:
    make_llama(tmp_path, **SIZES)

    with pytest.raises(ModelError, match=r"o_proj at 0 and 48, within one of its groups of 32 .* another --tp-size"):
        on_every_shard(2, lambda group: load(tmp_path, group=group, quantization="int4"))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_logits_depend_on_nothing_but_the_row(name: str, dtype: str, tmp_path: Path) -> None:
    make_llama(tmp_path, **SIZES)
    prompt = prompt_of(30)
    library.use(library.best(deterministic=True))
    try:
        alone = answer(tmp_path, prompt, quantization=name, deterministic=True, dtype=dtype)
        world = EngineWorld(tmp_path, quantization=name, deterministic=True, dtype=dtype)
        request, other = world.add(prompt), world.add(prompt_of(70))
        world.run((request, 0, 13), (other, 0, 70))
        world.run((request, 13, 30))
        assert torch.equal(world.logits[request], alone[0])
    finally:
        library.use(library.best())


def test_two_sides_that_quantise_differently_have_different_layouts(tmp_path: Path) -> None:
    make_llama(tmp_path, **SIZES)
    layouts = [load(tmp_path, quantization=name).layout_fields for name in (None, "int8", "int4", "w8a16")]

    assert layouts[1] == layouts[3], "another name of the same"
    assert layouts[0] != layouts[1] != layouts[2] != layouts[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (gptq_config(4, 32, desc_act=True), "desc_act"),
        (gptq_config(3, 32), "bits"),
        (gptq_config(4, 16), "group_size"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, "weight_block_size"),
        (compressed_numbers(strategy="group", group_size=32), "strategy"),
        (compressed_numbers(strategy="channel", type="int"), "type"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method"),
        (compressed("marlin-24", 4, 32), "format"),
        (compressed_numbers(strategy="channel", symmetric=False), "symmetric"),
        (compressed("pack-quantized", 4, 32, type="float"), "type"),
        (compressed("pack-quantized", 4, 32, actorder="group"), "actorder"),
        (compressed("pack-quantized", 4, 32) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed("pack-quantized", 4, 32) | {"config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict, says: str, tmp_path: Path) -> None:
    make_llama(tmp_path, **SIZES)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))

    assert f"{says} is" in refusal(tmp_path)


def test_codes_that_do_not_fit_what_config_json_says_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    form = FORMATS["gptq4"]
    ours, plain = quantised_pair(tmp_path / "source", form, tmp_path)
    path = ours / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.0.mlp.up_proj"

    save_file({**stored, f"{name}.g_idx": stored[f"{name}.g_idx"].flip(0)}, path)
    assert "g_idx" in refusal(ours)
    save_file({**stored, f"{name}.qweight": stored[f"{name}.qweight"][1:]}, path)
    assert f"{name}.qweight is I32 of the shape" in refusal(ours)
    save_file({key: value for key, value in stored.items() if key != f"{name}.scales"}, path)
    assert f"{name}.scales is missing" in refusal(ours)
    save_file(stored, path)
    assert "quantised by gptq already" in refusal(ours, quantization="int8")
    assert "quantised by gptq already" in refusal(ours, quantization="awq")
    assert load(ours, quantization="gptq").layout_fields == load(ours).layout_fields
    assert "no quantization_config" in refusal(plain, quantization="awq")


def test_zeros_of_groups_are_there_where_config_json_says_so_and_nowhere_else(tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    ours, _ = quantised_pair(tmp_path / "source", FORMATS["packed4_zeros"], tmp_path)
    path, name = ours / "model.safetensors", "model.layers.0.mlp.up_proj.weight_zero_point"
    stored = load_file(path)
    save_file({key: value for key, value in stored.items() if key != name}, path)
    assert f"{name} is missing" in refusal(ours)
    save_file({**stored, name: stored[name][1:].contiguous()}, path)
    assert f"{name} is I32 of the shape" in refusal(ours)
    save_file(stored, path)
    config = json.loads((ours / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (ours / "config.json").write_text(json.dumps(config))
    assert "weight_zero_point is not supported" in refusal(ours)


def test_mapped_codes_of_another_form_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    ours, _ = quantised_pair(tmp_path / "source", FORMATS["gguf4"], tmp_path)
    path, name = ours / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(path)

    for kind, changed in (("codes", stored[f"{name}.codes"][:, 1:]), ("scales", stored[f"{name}.scales"][:, 1:])):
        save_file({**stored, f"{name}.{kind}": changed.contiguous()}, path)
        assert f"{name} has" in refusal(ours)
        assert "which is no format of ours" in refusal(ours)
    save_file({**stored, f"{name}.offsets": stored[f"{name}.offsets"][1:]}, path)
    assert f"{name}.offsets is F32 of the shape" in refusal(ours)


@pytest.mark.parametrize("name", ["gguf4", "gguf8"])
def test_mapped_codes_of_64_inputs_are_those_that_were_stored(name: str, tmp_path: Path) -> None:
    """A row takes as many bytes with 4 bits as with 8."""
    make_llama(tmp_path / "source", **{**SIZES, "hidden_size": 64, "num_attention_heads": 4})
    ours, plain = quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)

    found, expected = answer(ours, prompt_of(9)), answer(plain, prompt_of(9))
    assert (found - expected).abs().max() < NEAR * max(1.0, expected.abs().max().item())


@pytest.mark.skipif(library.best() is None, reason="no native kernels")
@pytest.mark.parametrize("name", ["gguf4", "gguf8"])
def test_nothing_of_mapped_codes_is_kept_when_they_are_packed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scales are as many bytes as half of the codes."""
    monkeypatch.setattr(library, "CODES_IN_ROWS", set())
    monkeypatch.setattr(library, "SCALED_SUMS", set())
    forgotten: list[int] = []
    monkeypatch.setattr(mapped_files, "forget", lambda parts, _: forgotten.extend(size for _, size in parts))
    make_llama(tmp_path / "source", **SIZES)
    ours, _ = quantised_pair(tmp_path / "source", FORMATS[name], tmp_path)

    assert load(ours, dtype="bfloat16").is_packed
    stored = load_file(ours / "model.safetensors")
    for kind in ("codes", "scales", "offsets"):
        for size in {tensor.nbytes for name, tensor in stored.items() if name.endswith(f".{kind}")}:
            assert size in forgotten


def test_a_bias_beside_codes_where_the_architecture_has_none_may_be_zero_and_nothing_else(tmp_path: Path) -> None:
    """AutoGPTQ has written such ones."""
    make_llama(tmp_path / "source", **SIZES)
    where, _ = quantised_pair(tmp_path / "source", FORMATS["gptq4"], tmp_path)
    without = answer(where, prompt_of(40))
    tensors = load_file(where / "model.safetensors")
    bias = torch.zeros(SIZES["hidden_size"], dtype=torch.float16)
    save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": bias}, where / "model.safetensors")

    assert torch.equal(answer(where, prompt_of(40)), without)
    bias[-1] = 0.01
    save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": bias}, where / "model.safetensors")
    assert "has no place for 'model.layers.0.self_attn.o_proj.bias' and 0 other tensors" in refusal(where)


def test_a_layer_that_was_left_plain_stays_plain(tmp_path: Path) -> None:
    make_llama(tmp_path / "source", **SIZES)
    ours, plain = quantised_pair(tmp_path / "source", FORMATS["awq"], tmp_path)
    stored, whole = load_file(ours / "model.safetensors"), load_file(plain / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    kept = {key: value for key, value in stored.items() if not key.startswith(name)}
    save_file({**kept, f"{name}.weight": whole[f"{name}.weight"]}, ours / "model.safetensors")

    assert (answer(ours, prompt_of(9)) - answer(plain, prompt_of(9))).abs().max() < 1e-2
    assert isinstance(load(ours).module.blocks[0].mlp.down_proj.weight, Tensor)
