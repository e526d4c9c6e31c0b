"""The files of a model directory, one of which is not what it should be; the others are those of a tiny model."""

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import torch
from api_fakes import load_tokenizer
from engine import Run, Target
from mutators import Mutator, mutate_bytes, mutate_json
from safetensors.torch import save

from tandem.engine import weights
from tandem.engine.layers.rotary import RotaryTable
from tandem.engine.model_config import ModelError
from tandem.server.api.errors import Refusal
from tandem.server.api.tokenizer import Tokenizer

HIDDEN, INNER, HEADS, HEAD_DIM, VOCAB = 8, 16, 2, 4, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "attention_factor": 1.0,
        "truncate": True,
        "original_max_position_embeddings": 32,
    },
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE_TENSOR = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}
ASKED = [{"role": "user", "content": "a"}]


def tensors() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    return {name: torch.full(shape, 0.1) for name, shape in shapes.items()}


def documents() -> dict[str, bytes]:
    """The tiny model's own."""
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1, 3]}).encode(),
        WEIGHTS: save(tensors(), metadata={"format": "pt"}),
    }


def loading(changed: str) -> Callable[[], Run]:
    """A target that loads the model with this file changed. What can be loaded can be computed with."""

    def open_target() -> Run:
        torch.set_num_threads(1)
        folder = Path(tempfile.mkdtemp())
        for name, content in documents().items():
            (folder / name).write_bytes(content)

        def run(data: bytes) -> None:
            (folder / changed).write_bytes(data)
            model = weights.load(folder)
            table = RotaryTable(model.config.rope, head_dim=model.config.head_dim, dtype=model.dtype, device="cpu")
            table.at(torch.tensor([0, 5]), last_position=5)
            check_facts(model)

        return run

    return open_target


def check_facts(model: weights.LoadedModel) -> None:
    """What others are told of it is what it says there: whole numbers within bounds."""
    assert all(type(id) is int for id in model.eos_ids), model.eos_ids
    assert type(model.max_context) is int
    assert 0 < model.max_context < 1 << 31, model.max_context
    assert all(isinstance(value, str) for value in model.layout_fields.values())


def tokenizing(changed: str) -> Callable[[], Run]:
    def open_target() -> Run:
        folder = Path(tempfile.mkdtemp())
        (folder / "tokenizer.json").write_bytes(tokenizer_json())
        (folder / "tokenizer_config.json").write_text("{}")

        def run(data: bytes) -> None:
            (folder / changed).write_bytes(data)
            try:
                tokenizer = Tokenizer(folder)
            except Exception as error:  # as the API process does: see `load_tokenizer` there
                raise NotLoaded from error
            if changed != "tokenizer.json":
                tokenizer.render_chat(ASKED, add_generation_prompt=True, variables={}, rendered_at=1)
            tokenizer.decode(tokenizer.encode("a b"))

        return run

    return open_target


class NotLoaded(Exception):
    """The server says so and does not start."""


def tokenizer_json() -> bytes:
    return load_tokenizer(None)._tokenizer.to_str().encode()


def config_seeds() -> Mapping[str, bytes]:
    scaled = {f"rope_{name}": {**CONFIG, "rope_scaling": rope} for name, rope in ROPES.items()}
    both = {**CONFIG, "rope_parameters": {**ROPES["yarn"], "rope_theta": 10000.0}}
    more = {
        **CONFIG,
        "layer_types": ["full_attention"],
        "use_sliding_window": False,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        "quantization_config": None,
    }
    found = {"plain": CONFIG, "rope_parameters": both, "more": more, **scaled}
    return {name: json.dumps(document).encode() for name, document in found.items()}


def index_seeds() -> Mapping[str, bytes]:
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors(), WEIGHTS)}
    return {"plain": json.dumps(index).encode()}


def tokenizer_config_seeds() -> Mapping[str, bytes]:
    template = "{% for m in messages %}{{ bos_token }}{{ m['content'] | tojson }}{% endfor %}"
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": False,
        "chat_template": template,
    }
    named = {**config, "chat_template": [{"name": "default", "template": template}, {"name": "tool", "template": "x"}]}
    return {"plain": json.dumps(config).encode(), "named": json.dumps(named).encode()}


def mutate_safetensors(random: Random, entry: bytes, other: bytes) -> bytes:
    """Mostly the JSON of the header, whose length is then right."""
    if random.random() < 0.3:
        return mutate_bytes(random, entry, other)
    (size,) = struct.unpack("<Q", entry[:8].ljust(8, b"\0"))
    (other_size,) = struct.unpack("<Q", other[:8].ljust(8, b"\0"))
    size, other_size = min(size, len(entry)), min(other_size, len(other))
    header = mutate_json(random, entry[8 : 8 + size], other[8 : 8 + other_size])
    return struct.pack("<Q", len(header)) + header + entry[8 + size :]


def weight_seeds() -> Mapping[str, bytes]:
    header = json.dumps(ONE_TENSOR).encode()
    return {"model": documents()[WEIGHTS], "one_tensor": struct.pack("<Q", len(header)) + header + bytes(8)}


def row(name: str, changed: str, work: int, seeds: Callable[[], Mapping[str, bytes]], mutate: Mutator) -> Target:
    return Target(name, loading(changed), mutate, work, answers=(ModelError,), seeds=seeds)


def generation_seeds() -> Mapping[str, bytes]:
    return {"plain": documents()["generation_config.json"], "one": b'{"eos_token_id": 1, "temperature": 0.6}'}


TARGETS = (
    row("config_json", "config.json", 1_500, config_seeds, mutate_json),
    row("generation_config", "generation_config.json", 300, generation_seeds, mutate_json),
    row("weights_index", INDEX, 400, index_seeds, mutate_json),
    row("safetensors", WEIGHTS, 1_000, weight_seeds, mutate_safetensors),
    Target(
        "tokenizer_config",
        tokenizing("tokenizer_config.json"),
        mutate_json,
        500,
        answers=(NotLoaded, Refusal),
        seeds=tokenizer_config_seeds,
    ),
    Target(
        "tokenizer_json",
        tokenizing("tokenizer.json"),
        mutate_json,
        300,
        answers=(NotLoaded,),
        seeds=lambda: {"plain": tokenizer_json()},
    ),
)
