"""What a checkpoint says about itself: `config.json` of a Hugging Face directory, checked and reduced to what is used.

Both spellings of rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`.
Whatever would change the mathematics and is not implemented is refused here, never ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # values of JSON documents

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class ModelError(Exception):
    """This directory cannot be served: one line with the cause and what to do."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; `parameters` holds what the kind needs beyond theta."""

    kind: str
    theta: float
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    max_context: int  # tokens, prompt and output together
    stored_dtype: str | None  # as config.json names it; the files have the last word
    eos_ids: tuple[int, ...]


def read_config(model_dir: Path) -> ModelConfig:
    """Parse `config.json` (and `generation_config.json` if it is there)."""
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist; give a Hugging Face checkpoint directory")
    raw = read_json(model_dir / "config.json")
    return parse_config(raw, generation=read_json(model_dir / "generation_config.json", optional=True))


def parse_config(raw: dict[str, Any], *, generation: dict[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures") or []
    if len(architectures) != 1:
        raise ModelError(f"config.json names the architectures {architectures}; exactly one is needed")
    _refuse_unsupported(raw)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads != 0:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} KV heads; the file is broken")
    rope = _rope(raw)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        rope=rope,
        max_context=_max_context(raw, rope),
        stored_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_ids=_eos_ids(raw, generation),
    )


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; `{}` when it is optional and absent."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path} is missing; give a complete Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object; download the checkpoint again")
    return document


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Everything that changes the mathematics and is not implemented."""
    activation = raw.get("hidden_act", "silu")
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    problems = [
        (activation not in ("silu", "swish"), f"the activation {activation!r}"),
        (raw.get("quantization_config") is not None, "quantized weights"),
        (bool(raw.get("use_sliding_window")) or layer_types != {"full_attention"}, "sliding-window attention"),
    ]
    for unsupported, what in problems:
        if unsupported:
            raise ModelError(f"the model uses {what}, which is not supported; choose another checkpoint")


def _positive(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, a positive integer is needed; the file is broken")
    return value


def _rope(raw: dict[str, Any]) -> RopeConfig:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(f"the rotary scaling {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; choose another checkpoint")
    parameters = {key: value for key, value in given.items() if key not in ("rope_type", "type", "rope_theta")}
    if kind != "default" and "factor" not in parameters:
        raise ModelError(f"config.json: the rotary scaling {kind!r} has no factor; the file is broken")
    if kind in ("llama3", "yarn"):
        outside = raw.get("original_max_position_embeddings")  # where Phi-like checkpoints keep it; it wins there
        inside = parameters.get("original_max_position_embeddings") or _positive(raw, "max_position_embeddings")
        parameters["original_max_position_embeddings"] = outside or inside
    theta = given.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return RopeConfig(kind=kind, theta=float(theta), parameters=parameters)


def _max_context(raw: dict[str, Any], rope: RopeConfig) -> int:
    """`dynamic` is exact up to the trained length, where it equals `default`; beyond it a key's angle would depend on
    how long its sequence has become, which no page cache can hold. So that is where the context ends.
    """
    trained = _positive(raw, "max_position_embeddings")
    if rope.kind == "yarn" and rope.parameters.get("factor"):
        return max(trained, int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"]))
    return trained


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Union of both files: chat checkpoints often name the end of a turn only in generation_config.json."""
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
