"""GGUF files are served, from a directory that is made of each of them once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cluster import Cluster, Server, cluster
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tiny_models import make_qwen3_moe
from tokenizers import Tokenizer
from transformers import Gemma2Config, Gemma3TextConfig, Phi3Config

from tandem.cli.failure import CommandFailed
from tandem.cli.model_source import BUNDLED, find_model
from tandem.engine.digest_cache import DigestCache
from tandem.engine.documents import ModelError
from tandem.engine.gguf_checkpoint import make, one_by_one, save
from tandem.engine.gguf_settings import GgufFields, complete
from tandem.engine.layers.quantized import QuantizedWeight, looked_up
from tandem.engine.model_config import RopeConfig, parse_config, read_config
from tandem.engine.weights import load

MINI = find_model(BUNDLED)
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}
SCALES = {  # of 256 weights, or 32
    **dict.fromkeys((Kind.Q4_K, Kind.Q5_K), slice(0, 4)),
    **dict.fromkeys((Kind.Q6_K, Kind.Q3_K), slice(-2, None)),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS), slice(0, 2)),
}
MIXED = {
    "attn_q.weight": Kind.Q5_0,
    "attn_k.weight": Kind.Q4_1,
    "attn_v.weight": Kind.Q4_0,
    "3.attn_output.weight": Kind.IQ4_XS,
    "attn_output.weight": Kind.Q6_K,
    "1.ffn_gate.weight": Kind.IQ4_NL,
    "ffn_gate.weight": Kind.Q5_1,
    "ffn_up.weight": Kind.Q8_0,
    "0.ffn_down.weight": Kind.Q4_K,
    "1.ffn_down.weight": Kind.Q5_K,
    "2.ffn_down.weight": Kind.Q3_K,
    "token_embd.weight": Kind.Q8_0,
}
KEPT = {  # bits of codes, and inputs of a group
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), (4, 32)),
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS), (8, 32)),
    **dict.fromkeys((Kind.Q6_K, Kind.Q3_K), (8, 16)),
}
QUESTIONS = ("Calculate 9 * 13 + 48.", "Hello!", "Tom has 3 apples and buys 4 more. How many?")


def write(
    file: Path,
    kinds: dict[str, Kind],
    *,
    says: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    without: str = "",
) -> None:
    """The bundled model as llama.cpp has it. kinds: of tensors by the end of their GGUF name; float32 is usual.

    says: what else is in the file. without: a tensor that is not.
    """
    config = json.loads((MINI / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer)
    says(writer)
    for name, tensor in load_file(MINI / "model.safetensors").items():
        place, values = gguf_name(name), tensor.float().numpy()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if num := heads.get(place.split(".")[-2]):  # there, the two numbers that turn together lie side by side
            values = values.reshape(num, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        kind = kind_of(place, kinds)
        if place == without:
            continue
        if kind in SCALES:  # which the package reads and does not write
            writer.add_tensor(place, drawn_blocks(values.shape, kind), raw_dtype=kind)
        elif kind is Kind.F32:
            writer.add_tensor(place, np.ascontiguousarray(values))
        else:
            writer.add_tensor(place, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(place: str, kinds: dict[str, Kind]) -> Kind:
    return next((kind for end, kind in kinds.items() if place.endswith(end)), Kind.F32)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = json.loads((MINI / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    texts = sorted(Tokenizer.from_file(str(MINI / "tokenizer.json")).get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([text for text, _ in texts])
    writer.add_token_types([gguf.TokenType.CONTROL if id in special else gguf.TokenType.NORMAL for _, id in texts])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((MINI / "tokenizer_config.json").read_text())["chat_template"])


def gguf_name(name: str) -> str:
    place = name.removesuffix(".weight")
    if place in TENSORS:
        return f"{TENSORS[place]}.weight"
    _, _, layer, rest = place.split(".", 3)
    return f"blk.{layer}.{TENSORS[rest]}.weight"


def drawn_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Any bytes, with scales that are numbers."""
    random = np.random.default_rng(1)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // weights, size), dtype=np.uint8)
    blocks[..., SCALES[kind]] = np.frombuffer(np.array([1e-4, 1e-3], np.float16).tobytes(), np.uint8)[SCALES[kind]]
    return blocks.reshape(shape[0], -1)


def answer(server: Server, question: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    found = server.call("POST", "/v1/chat/completions", body)
    return {"choices": found["choices"], "prompt_tokens": found["usage"]["prompt_tokens"]}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tandem" / "gguf"


@pytest.mark.slow
def test_a_pair_that_serves_a_file_says_what_the_checkpoint_it_was_made_from_says(
    common: Cluster, tmp_path: Path, own_cache: Path
) -> None:
    file = tmp_path / "mini.gguf"
    write(file, {})
    with cluster(prefills=1, decodes=1, model=str(file), flags=["--deterministic"]) as it:
        assert [answer(it.router, question) for question in QUESTIONS] == [
            answer(common.unified, question) for question in QUESTIONS
        ]
    (made,) = [entry for entry in own_cache.iterdir() if entry.is_dir()]
    assert find_model(str(file)) == made  # it was there, and was not made again
    file.write_bytes(b"GGUF, but not really")
    with pytest.raises(CommandFailed, match=r"mini\.gguf cannot be read: "):
        find_model(str(file))
    assert [entry for entry in own_cache.iterdir() if entry.is_dir()] == [made]


@pytest.mark.slow
def test_a_pair_that_serves_codes_says_what_one_server_says(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "mini-q8_0.gguf"
    write(file, dict.fromkeys(("attn_q.weight", "attn_output.weight", "ffn_up.weight", "token_embd.weight"), Kind.Q8_0))
    with cluster(prefills=1, decodes=1, unified=True, model=str(file), flags=["--deterministic"]) as it:
        answers = [answer(it.router, question) for question in QUESTIONS]
        assert answers == [answer(it.unified, question) for question in QUESTIONS]
        assert "165" in answers[0]["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_quantised_tensors_stay_codes_of_the_numbers_that_the_file_means(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "mini-mixed.gguf"
    write(file, MIXED)
    made = find_model(str(file))
    tensors = gguf.GGUFReader(file).tensors
    meant = {tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors}
    config = read_config(MINI)
    for name, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
        for layer in range(config.num_layers):
            rows = meant[f"blk.{layer}.{name}.weight"]
            meant[f"blk.{layer}.{name}.weight"] = rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).flatten(0, 2)

    module = load(made, cache=DigestCache(None), dtype="float32", packing_share=0.0).module
    embedding = looked_up(module.embedding.weight, torch.arange(config.vocab_size), torch.float32)
    torch.testing.assert_close(embedding, meant["token_embd.weight"], rtol=1e-6, atol=1e-7)
    assert module.head.weight is module.embedding.weight
    for index, block in enumerate(module.blocks):
        gate_up = block.mlp.gate_up
        linears = {f"attn_{kind}": getattr(block.qkv, f"{kind}_proj") for kind in "qkv"}
        linears |= {"attn_output": block.o_proj, "ffn_down": block.mlp.down_proj}
        linears |= {"ffn_gate": gate_up.gate_proj, "ffn_up": gate_up.up_proj}
        for name, linear in linears.items():
            expected, weight = meant[f"blk.{index}.{name}.weight"], linear.weight
            if name == "ffn_down" and index > 2:
                assert torch.equal(weight, expected.half().float())
                continue
            assert isinstance(weight, QuantizedWeight)
            assert (weight.bits, weight.group) == KEPT[kind_of(f"blk.{index}.{name}.weight", MIXED)]
            torch.testing.assert_close(weight.plain(torch.float32), expected, rtol=1e-6, atol=1e-7)
    ours = read_config(made)
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rope", "max_context"):
        assert getattr(ours, name) == getattr(config, name)
    assert ours.eos_ids == (*config.eos_ids, 0)  # <|endoftext|> is a control token
    assert ours.norm_eps == pytest.approx(config.norm_eps)  # 32 bits there


def test_a_file_is_read_once_for_all_that_is_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    read = gguf.GGUFReader.__init__

    def counted(reader: gguf.GGUFReader, path: Path, *rest: Any) -> None:
        opened.append(path)
        read(reader, path, *rest)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    theirs = gguf.GGUFReader
    write(tmp_path / "mini.gguf", {})
    make(tmp_path / "mini.gguf", tmp_path / "made")
    assert opened == [tmp_path / "mini.gguf"]
    assert gguf.GGUFReader is theirs


def test_experts_are_kept_as_checkpoints_have_them(tmp_path: Path) -> None:
    model = make_qwen3_moe(tmp_path / "checkpoint")
    save(model.config, dict(one_by_one(model.state_dict().items())), tmp_path / "made")
    expected, made = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint", "made"))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    load(tmp_path / "made", cache=DigestCache(None))


# --- what transformers does not read ---------------------------------------------------------------------------------

FACTORS = [1.0 + pair / 4 for pair in range(16)]  # of the bundled model's heads
LONGROPE = {"short_factor": FACTORS, "attention_factor": 1.0, "original_max_position_embeddings": 8192}


def factors(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def stretched(kind: gguf.RopeScalingType, *, trained: int | None = None) -> Callable[[gguf.GGUFWriter], None]:
    def says(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        if trained is not None:
            writer.add_rope_scaling_orig_ctx_len(trained)

    return says


@pytest.mark.parametrize(
    ("says", "rope"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", factors(FACTORS)), ("longrope", LONGROPE)),
        (stretched(gguf.RopeScalingType.LINEAR), ("linear", {"factor": 4.0})),
        (
            stretched(gguf.RopeScalingType.YARN, trained=2048),
            ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
        ),
        (stretched(gguf.RopeScalingType.NONE), ("default", {})),
    ],
    ids=["freqs", "linear", "yarn", "none"],
)
def test_how_a_file_stretches_positions_is_computed(
    tmp_path: Path, says: Callable[[gguf.GGUFWriter], object], rope: tuple[str, dict[str, Any]]
) -> None:
    write(tmp_path / "mini.gguf", {}, says=says)
    make(tmp_path / "mini.gguf", tmp_path / "made")
    found = read_config(tmp_path / "made")
    assert (found.rope, found.max_context) == (RopeConfig(rope[0], 10_000.0, rope[1]), 8192)


@pytest.mark.parametrize(
    ("says", "without", "reason"),
    [
        (None, "blk.1.ffn_down.weight", r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight and 0 other"),
        ("blk.0.attn_q.bias", "", r"the tensor blk\.0\.attn_q\.bias is in it, and transformers has no place"),
        ("blk.2.post_ffw_norm.weight", "", r"the tensor blk\.2\.post_ffw_norm\.weight is in it"),
    ],
)
def test_no_tensor_is_made_up_or_left_away(tmp_path: Path, says: str | None, without: str, reason: str) -> None:
    added = np.ones(256, np.float32)
    write(
        tmp_path / "mini.gguf",
        {},
        says=lambda writer: says and writer.add_tensor(says, added),
        without=without,
    )
    with pytest.raises(ModelError, match=reason):
        make(tmp_path / "mini.gguf", tmp_path / "made")


def file_that_says(
    tmp_path: Path, architecture: str, fields: dict[str, float | str], tensors: tuple[str, ...] = ()
) -> GgufFields:
    writer = gguf.GGUFWriter(str(tmp_path / "some.gguf"), architecture)
    for name, value in fields.items():
        kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(f"{architecture}.{name}", value, kind[type(value)])
    for name in tensors:
        writer.add_tensor(name, factors([1.0, 2.0, 3.0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFields(gguf.GGUFReader(tmp_path / "some.gguf"))


def completed(config: Any, architecture: str, said: GgufFields) -> Any:
    config.architectures = [architecture]
    complete(config, said)
    return parse_config(json.loads(config.to_json_string()), generation={})


SMALL = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize(("layers", "divisor"), [(4, None), (46, 8.0)], ids=["as heads are", "as the hidden size is"])
def test_scores_of_a_gemma_are_divided_as_llama_cpp_divides_them(
    tmp_path: Path, layers: int, divisor: float | None
) -> None:
    said = file_that_says(tmp_path, "gemma2", {"attn_logit_softcapping": 7.5, "final_logit_softcapping": 3.5})
    config = Gemma2Config(**SMALL, head_dim=12, num_hidden_layers=layers)
    found = completed(config, "Gemma2ForCausalLM", said)
    assert (found.score_divisor, found.attention_cap, found.logit_cap) == (divisor, 7.5, 3.5)


def test_positions_of_a_gemma_3_are_stretched_where_it_has_no_window(tmp_path: Path) -> None:
    said = file_that_says(tmp_path, "gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    found = completed(Gemma3TextConfig(**SMALL, head_dim=12), "Gemma3ForCausalLM", said)
    assert found.rope == RopeConfig("linear", 1_000_000.0, {"factor": 8.0})
    assert (found.local_rope, found.score_divisor) == (RopeConfig("default", 10_000.0, {}), None)


def test_a_phi_3_has_its_window_its_factors_and_its_part_of_a_head(tmp_path: Path) -> None:
    said = file_that_says(
        tmp_path,
        "phi3",
        {
            "attention.sliding_window": 99,
            "rope.dimension_count": 6,
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 256,
        },
        ("rope_factors_short.weight", "rope_factors_long.weight"),
    )
    found = completed(Phi3Config(**SMALL, pad_token_id=None, eos_token_id=2), "Phi3ForCausalLM", said)
    assert (found.sliding_window, found.max_context) == (99, 256)
    assert found.rope.parameters == {
        "short_factor": [1.0, 2.0, 3.0],
        "attention_factor": 1.25,
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 0.75,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"attention.scale": 0.5},
        {"logit_scale": 2.0},
        {"rope.scaling.attn_factor": 1.5},
        {"rope.scaling.type": "su"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_would_compute_something_else_is_refused_by_name(tmp_path: Path, fields: dict[str, float | str]) -> None:
    said = file_that_says(tmp_path, "gemma2", fields)
    with pytest.raises(ModelError, match=rf"gemma2\.{next(iter(fields)).rpartition('.')[0]}.* not supported"):
        completed(Gemma2Config(**SMALL, head_dim=12), "Gemma2ForCausalLM", said)
