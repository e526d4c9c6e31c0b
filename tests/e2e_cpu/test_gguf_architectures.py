"""Files of every architecture whose weights we read ourselves: they are what transformers reads of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any  # models of transformers

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from test_gguf import add_tokenizer
from tiny_models import make_gemma2, make_gemma3, make_llama, make_phi3, make_qwen2, make_qwen3, make_qwen3_moe
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.digest_cache import DigestCache
from tandem.engine.documents import ModelError
from tandem.engine.gguf_checkpoint import make, one_by_one
from tandem.engine.gguf_weights import OURS
from tandem.engine.layers.quantized import QuantizedWeight
from tandem.engine.weights import load

# As wide as a block of codes, and of the sizes that transformers takes for granted.
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
MAKERS: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "qwen2": (make_qwen2, {}),
    "qwen3": (make_qwen3, {"head_dim": 128}),
    "qwen3moe": (make_qwen3_moe, {"head_dim": 128, "num_experts": 3, "moe_intermediate_size": 768}),
    "phi3": (make_phi3, {}),
    "gemma2": (make_gemma2, {"head_dim": 32}),
    "gemma3": (make_gemma3, {"head_dim": 32}),
}


def write(file: Path, model: Any, architecture: str, kind: Kind) -> None:
    """As llama.cpp's converter does. kind: of all matrices."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer)
    writer.add_pad_token_id(0)
    (arch,) = (it for it, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    places = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, values in whole_tensors(model):
        layer, _, end = name.rpartition(".")
        place = f"{places.get_name(layer)}.{end}"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if architecture == "llama" and (num := heads.get(place.split(".")[-2])):
            values = values.reshape(num, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and place.endswith("norm.weight"):
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(place, values)
        else:
            writer.add_tensor(place, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def whole_tensors(model: Any) -> list[tuple[str, np.ndarray]]:
    """All experts of a layer are one, and a head that is the embedding is none."""
    weights = dict(one_by_one(model.state_dict().items()))
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    found: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        found.setdefault(re.sub(r"(?<=\.experts)\.\d+", "", name), []).append(tensor)
    return [
        (name, np.ascontiguousarray((torch.stack(those) if ".experts." in name else those[0]).detach().numpy()))
        for name, those in found.items()
    ]


def numbers(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes become what they mean."""
    found = {name: tensor for name, tensor in made.items() if name.endswith(("weight", "bias"))}
    for name in (name.removesuffix(".codes") for name in made if name.endswith(".codes")):
        codes = made[f"{name}.codes"]
        weight = QuantizedWeight(codes, made[f"{name}.scales"], None, bits=8, group=32, inputs=codes.shape[1])
        found[f"{name}.weight"] = weight.plain(torch.float32).half()
    return found


def test_there_is_one_of_each() -> None:
    assert set(MAKERS) == OURS


@pytest.mark.parametrize("architecture", MAKERS)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16], ids=["codes", "numbers"])
def test_weights_are_what_transformers_reads(
    tmp_path: Path, architecture: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, changes = MAKERS[architecture]
    write(tmp_path / "some.gguf", maker(tmp_path / "checkpoint", **SMALL, **changes), architecture, kind)
    dtype = torch.float16 if kind is Kind.Q8_0 else torch.bfloat16
    reads = transformers.AutoModelForCausalLM.from_pretrained
    model: Any = reads(str(tmp_path), gguf_file="some.gguf", dtype=dtype)
    expected = dict(one_by_one(model.state_dict().items()))
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)

    make(tmp_path / "some.gguf", tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")

    plain = {name for name, tensor in found.items() if tensor.ndim == 2 and name.endswith(".weight")}
    assert all(name.endswith("mlp.gate.weight") for name in plain) == (kind is Kind.Q8_0), "of experts it is no MLP's"
    found = numbers(found)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3 if kind is Kind.Q8_0 else 0, atol=0)
    load(tmp_path / "made", cache=DigestCache(None), dtype="float32")


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("qwen3", {"head_dim": 16}), ("qwen3moe", {"num_experts": 3, "moe_intermediate_size": 96})],
)
def test_sizes_that_transformers_takes_for_granted_are_those_of_the_file(
    tmp_path: Path, architecture: str, sizes: dict[str, int]
) -> None:
    model = MAKERS[architecture][0](tmp_path / "checkpoint", **SMALL, **sizes)
    write(tmp_path / "some.gguf", model, architecture, Kind.F32)
    make(tmp_path / "some.gguf", tmp_path / "made")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint", "made"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    load(tmp_path / "made", cache=DigestCache(None))


def test_a_tensor_of_another_size_than_the_model_has_is_refused(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "checkpoint", **SMALL)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(63))
    write(tmp_path / "some.gguf", model, "llama", Kind.Q8_0)
    with pytest.raises(ModelError, match=r"tensor output_norm\.weight is \(63,\), and model\.norm\.weight .* \(64,\)"):
        make(tmp_path / "some.gguf", tmp_path / "made")
