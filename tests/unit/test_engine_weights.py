"""What may lie in a model directory: read what is right, refuse the rest with one line."""

from pathlib import Path

import pytest
import torch
from engine_files import change_tensors, refusal, write_model
from safetensors.torch import load_file, save_file

import tandem
from tandem.core.disagg.layout_check import differences
from tandem.engine import machine_memory
from tandem.engine.layers.packed import PackedCodes, PackedWeight
from tandem.engine.layers.quantized import QuantizedWeight
from tandem.engine.models.base import build_of
from tandem.engine.models.table import FAMILIES
from tandem.engine.native import library
from tandem.engine.weights import in_short, load

MINI = Path(tandem.__file__).parent / "bundled" / "mini"


def test_a_whole_directory_loads(tmp_path: Path) -> None:
    model = load(write_model(tmp_path), dtype="auto", device="cpu")

    assert model.max_context == 64
    assert model.eos_ids == (2,)
    assert model.layout_fields | {"weights": "?", "config": "?"} == {
        "model": "LlamaForCausalLM",
        "dtype": "float32",
        "layers": "2",
        "kv_heads": "2",
        "head_dim": "2",
        "config": "?",
        "eos_token_ids": "2",
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
        (torch.float16, "float16", torch.float16),
        (torch.float32, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_the_type_is_the_one_asked_for(tmp_path: Path, stored: torch.dtype, asked: str, got: torch.dtype) -> None:
    model = load(write_model(tmp_path, dtype=stored), dtype=asked, device="cpu", packing_share=0.0)

    original = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert model.dtype == got
    assert torch.equal(model.module.blocks[1].mlp.down_proj.weight, original.to(got))


def test_weights_of_the_stored_type_are_mapped_not_copied(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = load(tmp_path, dtype="auto", device="cpu")
    address = model.module.embedding.weight.data_ptr()

    lines = Path("/proc/self/maps").read_text().splitlines()

    def holds(line: str) -> bool:
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        return begin <= address < end

    assert next(line for line in lines if holds(line)).endswith(str(tmp_path / "model.safetensors"))


@pytest.fixture
def every_library_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.best() is None:
        pytest.skip("no native kernels were built, or this processor runs none of them")
    monkeypatch.setattr(library, "PACKED", {(name, torch.bfloat16) for name in library.NEEDS})


@pytest.mark.usefixtures("every_library_packs")
@pytest.mark.parametrize("is_tied", [True, False])
def test_linear_layers_and_the_head_are_packed_and_the_embedding_is_looked_up(tmp_path: Path, is_tied: bool) -> None:
    write_model(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=is_tied)
    if is_tied:
        change_tensors(tmp_path, **{"lm_head.weight": None})
    packed, plain = load(tmp_path), load(tmp_path, packing_share=0.0)

    assert packed.is_packed
    assert not plain.is_packed
    assert torch.equal(packed.module.embedding.weight, plain.module.embedding.weight)
    pairs = [(packed.module.head.weight, plain.module.head.weight)]
    for own, other in zip(packed.module.blocks, plain.module.blocks, strict=True):
        pairs += [(own.mlp.down_proj.weight, other.mlp.down_proj.weight)]
        pairs += [(own.qkv.k_proj.weight, other.qkv.k_proj.weight)]
    for one, original in pairs:
        assert isinstance(one, PackedWeight)
        assert torch.equal(one.plain(torch.bfloat16), original)


@pytest.mark.usefixtures("every_library_packs")
def test_weights_that_take_much_of_the_memory_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of a machine share them then."""
    write_model(tmp_path, dtype=torch.bfloat16)
    own = load(tmp_path).weight_bytes

    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: 8 * own)
    assert load(tmp_path, packing_share=1 / 8).is_packed
    assert not load(tmp_path, packing_share=1 / 9).is_packed


@pytest.mark.usefixtures("every_library_packs")
def test_other_types_are_not_packed(tmp_path: Path) -> None:
    write_model(tmp_path)

    assert not load(tmp_path).is_packed
    assert not load(tmp_path, dtype="float16", quantization="int8").is_packed


@pytest.mark.usefixtures("every_library_packs")
@pytest.mark.parametrize("are_codes", [True, False])
def test_codes_are_packed_where_there_are_products_for_them(
    are_codes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "CODES_IN_ROWS", set() if are_codes else library.PACKED)
    write_model(tmp_path)
    found, rows = (load(tmp_path, dtype="bfloat16", quantization="int8", packing_share=share) for share in (0.25, 0.0))

    assert found.is_packed == are_codes
    packed, original = (each.module.blocks[0].mlp.down_proj.weight for each in (found, rows))
    assert isinstance(packed, PackedCodes if are_codes else QuantizedWeight)
    torch.testing.assert_close(packed.plain(torch.float32), original.plain(torch.float32), rtol=2**-11, atol=0)


# --- the layout ----------------------------------------------------------------------------------------------------


def layout_difference(here: Path, there: Path) -> str:
    return differences(load(here).layout_fields, load(there).layout_fields, them="prefill", us="decode")


def test_the_layout_does_not_depend_on_the_place_or_on_who_saved_the_config(tmp_path: Path) -> None:
    here = write_model(tmp_path / "a", torch_dtype="float32", initializer_range=0.1)
    there = write_model(
        tmp_path / "b",
        transformers_version="9.9",
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        hidden_act="silu",
        use_cache=False,
    )

    assert layout_difference(here, there) == ""


def test_the_digests_of_the_bundled_model_are_those_of_earlier_versions() -> None:
    """So servers of two versions can be put together while one is replaced by the other."""
    fields = load(MINI).layout_fields

    assert (fields["weights"], fields["config"]) == (
        "b3f2c6a7afff1addedc0b1ca35f1aebf",
        "b89505501118eccf2fe0326f3b9ac50e",
    )


def test_one_element_in_the_middle_of_one_tensor_is_a_difference_in_the_weights(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(there / "model.safetensors")[name]
    tensor[6, 4] = torch.nextafter(tensor[6, 4], torch.tensor(9.0))
    change_tensors(there, **{name: tensor})

    assert layout_difference(here, there).startswith("weights is ")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_theta": 5e5}, "config"),
        ({"rms_norm_eps": 1e-6}, "config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "config"),
        ({"eos_token_id": [2, 3]}, "eos_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_layout_names_what_else_differs(tmp_path: Path, change: dict, field: str) -> None:
    here, there = write_model(tmp_path / "a"), write_model(tmp_path / "b", **change)

    assert layout_difference(here, there).startswith(f"{field} is ")
    assert ";" not in layout_difference(here, there)


def test_tokens_that_end_an_answer_are_listed_where_they_fit() -> None:
    assert in_short((2, 151645)) == "2,151645"
    assert len(in_short(tuple(range(200)))) == 32
    assert in_short(tuple(range(200))) != in_short(tuple(range(201)))


def test_a_longer_context_or_another_name_of_the_type_computes_the_same(tmp_path: Path) -> None:
    here, there = (
        write_model(tmp_path / "a"),
        write_model(tmp_path / "b", max_position_embeddings=32, torch_dtype="float16"),
    )

    assert layout_difference(here, there) == ""


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_has_a_file_that_builds_it(architecture: str) -> None:
    assert callable(build_of(architecture))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()

    assert "no model.safetensors" in refusal(tmp_path)


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


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.rotary_emb.inv_freq.more",
        "lm_head.bias",
    ],
)
def test_a_tensor_that_nobody_computes_with_is_refused_by_name(tmp_path: Path, name: str) -> None:
    text = refusal(change_tensors(write_model(tmp_path), **{name: torch.zeros(8)}))

    assert f"has no place for '{name}'" in text


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_stored_angles_follow_from_the_config_and_may_be_there(tmp_path: Path, name: str) -> None:
    plain = write_model(tmp_path / "a")
    other = change_tensors(write_model(tmp_path / "b"), **{name: torch.ones(1)})

    assert layout_difference(plain, other) == ""


def test_a_head_beside_tied_embeddings_may_be_their_copy_and_nothing_else(tmp_path: Path) -> None:
    tied = write_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tied)

    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    with_copy = load(change_tensors(tied, **{"lm_head.weight": embedding.clone()})).layout_fields

    assert with_copy == load(change_tensors(tied, **{"lm_head.weight": None})).layout_fields


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_a_type_that_is_not_computed_with_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = load_file(write_model(tmp_path) / "model.safetensors")[name].to(dtype)

    assert f"the tensor {name} is stored as" in refusal(change_tensors(tmp_path, **{name: tensor}))


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    assert "int3" in refusal(write_model(tmp_path), dtype="int3")


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)

    assert "cuda:99" in refusal(tmp_path, device="cuda:99")
    assert "abacus" in refusal(tmp_path, device="abacus")
