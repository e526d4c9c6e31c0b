"""From a checkpoint directory to a model that runs.

Weights are memory-mapped: where the stored type is the wanted one, nothing is copied, loading takes no time, and
several engines on one machine share the pages. Everything a user can get wrong ends in a `ModelError` of one line.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # values of JSON documents

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.model_config import ModelConfig, ModelError, parse_config, read_json
from tandem.engine.models.llama import Transformer
from tandem.engine.models.table import builder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DIGEST_BYTES = 4096  # of each end of each file


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    module: Transformer
    dtype: torch.dtype
    device: str
    layout_fields: dict[str, str]  # what two engines must agree on before KV may travel between them

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.config.eos_ids

    @property
    def max_context(self) -> int:
        """Tokens, prompt and output together."""
        return self.config.max_context


def load(model_dir: Path, *, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """dtype: "float32", "bfloat16", or "auto": as stored (float16 becomes float32 on CPU, bfloat16 elsewhere)."""
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist; give a Hugging Face checkpoint directory")
    raw = read_json(model_dir / "config.json")
    config = parse_config(raw, generation=read_json(model_dir / "generation_config.json", optional=True))
    build = builder(config.architecture)
    _check_device(device)
    checkpoint = Checkpoint(model_dir)
    chosen = _choose_dtype(dtype, stored=checkpoint.dtype_of("model.embed_tokens.weight"), device=device)
    module = build(config, WeightSource(checkpoint, dtype=chosen, device=device))
    fields = {
        "model": config.architecture,
        "dtype": str(chosen).removeprefix("torch."),
        "layers": str(config.num_layers),
        "kv_heads": str(config.num_kv_heads),
        "head_dim": str(config.head_dim),
        "weights": _digest(raw, checkpoint),
        "deterministic": "off",  # until a self-check says otherwise
    }
    return LoadedModel(config=config, module=module, dtype=chosen, device=device, layout_fields=fields)


class Checkpoint:
    """The safetensors files of a directory, opened, and which tensor is in which."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.files = _weight_files(model_dir)
        self._opened = {path: _open(path) for path in self.files}
        self._file_of = {name: path for path, opened in self._opened.items() for name in opened.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape_of(self, name: str) -> list[int]:
        return self._opened[self._find(name)].get_slice(name).get_shape()

    def dtype_of(self, name: str) -> str:
        """As safetensors spells it: F32, F16, BF16, ..."""
        return self._opened[self._find(name)].get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        """Mapped, not read."""
        return self._opened[self._find(name)].get_tensor(name)

    def _find(self, name: str) -> Path:
        if name not in self._file_of:
            raise ModelError(
                f"the tensor {name} is missing from {self.model_dir} ({len(self.files)} weight files, "
                f"{len(self._file_of)} tensors); download the checkpoint again"
            )
        return self._file_of[name]


class WeightSource:
    """Hands tensors to a model: checked, in the wanted type, on the wanted device."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"the tensor {name} has the shape {tuple(tensor.shape)}, config.json asks for {shape}; "
                "weights and config.json belong to different models"
            )
        return tensor.to(dtype=self.dtype).to(device=self.device)


def _weight_files(model_dir: Path) -> list[Path]:
    """One file, or the shards that the index names; sorted."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map; download the checkpoint again")
        return sorted({model_dir / name for name in weight_map.values()})
    single = model_dir / "model.safetensors"
    if single.exists():
        return [single]
    raise ModelError(f"no model.safetensors (or its index) in {model_dir}; only safetensors checkpoints can be served")


def _open(path: Path) -> Any:  # safetensors ships no types for its handle
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the checkpoint again") from None


def _check_device(device: str) -> None:
    kind = device.partition(":")[0]
    if device != "cpu" and kind != "cuda":
        raise ModelError(f"the device {device!r} is not known; use cpu, cuda or cuda:N")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise ModelError(f"the device {device} cannot be used ({cause}); use --device cpu") from None


def _choose_dtype(asked: str, *, stored: str, device: str) -> torch.dtype:
    if asked in DTYPES:
        return DTYPES[asked]
    if asked != "auto":
        raise ModelError(f"the dtype {asked!r} is not known; use auto, {' or '.join(DTYPES)}")
    match stored:
        case "F32":
            return torch.float32
        case "BF16":
            return torch.bfloat16
        case "F16":
            return torch.float32 if device == "cpu" else torch.bfloat16
        case _:
            raise ModelError(f"weights are stored as {stored}, which is not supported; choose another checkpoint")


def _digest(raw_config: dict[str, Any], checkpoint: Checkpoint) -> str:
    """Cheap: tells different checkpoints apart without reading them. Independent of where the directory lies."""
    told = {key: value for key, value in raw_config.items() if key not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in checkpoint.names():
        digest.update(f"{name} {checkpoint.shape_of(name)} {checkpoint.dtype_of(name)}\n".encode())
    for path in checkpoint.files:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(DIGEST_BYTES)
            file.seek(max(0, size - DIGEST_BYTES))
            digest.update(f"{size}\n".encode() + head + file.read(DIGEST_BYTES))
    return digest.hexdigest()[:32]
