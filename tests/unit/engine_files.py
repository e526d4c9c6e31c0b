"""A tiny Llama directory for the tests of what may lie in one, and the line with which it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.model_config import ModelError
from tandem.engine.weights import load

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


def refusal(where: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(where, **{"dtype": "auto", "device": "cpu", **settings})
    text = str(caught.value)
    assert "\n" not in text
    return text


def change_tensors(where: Path, **tensors: torch.Tensor | None) -> Path:
    """Put tensors into the weight file, or take them out; dots are written as two underscores."""
    path = where / "model.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, path)
    return where
