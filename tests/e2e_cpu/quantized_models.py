"""Quantised checkpoints, written from the public descriptions of their formats, and the plain ones they stand for."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.layers.quantized import QuantizedWeight
from tandem.engine.quantized_formats import GGUF_CONFIG, gguf_tensors

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which output stands in the lowest four bits of a word, in the next, ...


@dataclass(frozen=True)
class Layer:
    """codes: [outputs, inputs] from 0, zeros and scales: [outputs, groups]"""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group: int
    bits: int

    def plain(self) -> Tensor:
        of_input = torch.arange(self.codes.shape[1]) // self.group
        return ((self.codes - self.zeros[:, of_input]).double() * self.scales.double()[:, of_input]).float()


def drawn(shape: tuple[int, ...], *, bits: int, group: int | None, symmetric: bool) -> Layer:
    outputs, inputs = shape
    size = group or inputs
    groups = -(-inputs // size)
    half = 1 << (bits - 1)
    zeros = torch.full((outputs, groups), half) if symmetric else torch.randint(1, 2 * half, (outputs, groups))
    scales = (torch.rand(outputs, groups) + 0.5) * 0.4 / half
    return Layer(torch.randint(0, 2 * half, (outputs, inputs)), zeros, scales.half(), size, bits)


def words(values: Tensor, bits: int) -> Tensor:
    """Along the last dimension, the first value lowest: int32"""
    per_word = 32 // bits
    pad = -values.shape[-1] % per_word
    whole = torch.nn.functional.pad(values.long(), (0, pad)).view(*values.shape[:-1], -1, per_word)
    joined = sum(whole[..., index] << (bits * index) for index in range(per_word))
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32).contiguous()


def gptq(layer: Layer) -> dict[str, Tensor]:
    return {
        "qweight": words(layer.codes, layer.bits).T.contiguous(),
        "qzeros": words((layer.zeros - 1).T, layer.bits),
        "scales": layer.scales.T.contiguous(),
        "g_idx": (torch.arange(layer.codes.shape[1]) // layer.group).to(torch.int32),
    }


def gptq_v2(layer: Layer) -> dict[str, Tensor]:
    return {**gptq(layer), "qzeros": words(layer.zeros.T, layer.bits)}


def awq(layer: Layer) -> dict[str, Tensor]:
    def mixed(values: Tensor) -> Tensor:
        return words(values.T.reshape(values.shape[1], -1, 8)[:, :, list(AWQ_COLUMNS)].flatten(1), 4)

    return {"qweight": mixed(layer.codes), "qzeros": mixed(layer.zeros), "scales": layer.scales.T.contiguous()}


def packed(layer: Layer) -> dict[str, Tensor]:
    return {
        "weight_packed": words(layer.codes, layer.bits),
        "weight_scale": layer.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(layer.codes.shape),
    }


def packed_with_zeros(layer: Layer) -> dict[str, Tensor]:
    return {**packed(layer), "weight_zero_point": words(layer.zeros.T, layer.bits).T.contiguous()}


def as_bytes_with_zeros(layer: Layer) -> dict[str, Tensor]:
    return {**as_bytes(layer), "weight_zero_point": (layer.zeros - 128).to(torch.int8)}


def as_bytes(layer: Layer) -> dict[str, Tensor]:
    """With what a device would round activations by."""
    of_activations = {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.tensor([3], dtype=torch.int8)}
    return {"weight": (layer.codes - 128).to(torch.int8), "weight_scale": layer.scales, **of_activations}


def as_mapped(layer: Layer) -> dict[str, Tensor]:
    half = 1 << (layer.bits - 1)
    offsets = layer.scales.float() * (half - layer.zeros)
    weight = QuantizedWeight.of(
        (layer.codes - half).to(torch.int8), layer.scales, offsets, bits=layer.bits, group=layer.group
    )
    return {name.rpartition(".")[-1]: tensor for name, tensor in gguf_tensors("layer", weight).items()}


def compressed(layout: str, bits: int, group: int | None, **changes: object) -> dict[str, object]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **strategy, **changes}
    only = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": only},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def with_activations(config: Any) -> dict[str, object]:
    """Of few bits, too, where there is a device for that."""
    (only,) = config["config_groups"].values()
    only["input_activations"] = {"num_bits": 8, "type": only["weights"]["type"], "dynamic": True, "strategy": "token"}
    return config


@dataclass(frozen=True)
class Format:
    tensors: Callable[[Layer], dict[str, Tensor]]
    config: dict[str, object]
    bits: int
    group: int | None
    symmetric: bool = True
    in_bf16: bool = False  # scales


def gptq_config(bits: int, group: int, **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, Format] = {
    "gptq4": Format(gptq, gptq_config(4, 32), 4, 32),
    "gptq8": Format(gptq, gptq_config(8, 64), 8, 64),
    "gptq4_whole_rows": Format(gptq, gptq_config(4, -1), 4, None),
    "gptq4_asymmetric": Format(gptq, gptq_config(4, 32, sym=False), 4, 32, False),
    "gptq_v2": Format(gptq_v2, gptq_config(4, 32, checkpoint_format="gptq_v2"), 4, 32),
    "awq": Format(awq, AWQ_CONFIG, 4, 32, False),
    "packed4": Format(packed, compressed("pack-quantized", 4, 32), 4, 32, in_bf16=True),
    "packed4_channel": Format(packed, compressed("pack-quantized", 4, None), 4, None, in_bf16=True),
    "packed8": Format(packed, compressed("pack-quantized", 8, 64), 8, 64, in_bf16=True),
    "bytes": Format(as_bytes, with_activations(compressed("int-quantized", 8, None)), 8, None),
    "packed4_zeros": Format(
        packed_with_zeros, compressed("pack-quantized", 4, 64, symmetric=False), 4, 64, False, in_bf16=True
    ),
    "bytes_zeros": Format(as_bytes_with_zeros, compressed("int-quantized", 8, 96, symmetric=False), 8, 96, False),
    "gguf4": Format(as_mapped, GGUF_CONFIG, 4, 32, False),
    "gguf8": Format(as_mapped, GGUF_CONFIG, 8, 16, False),
}


def quantised_pair(source: Path, form: Format, folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """From a plain checkpoint: one with random codes for its linear layers, and the plain one that it stands for."""
    torch.manual_seed(seed)
    stored = load_file(source / "model.safetensors")
    ours, plain = dict(stored), dict(stored)
    for name in linear_names(stored):
        layer = drawn(tuple(stored[name].shape), bits=form.bits, group=form.group, symmetric=form.symmetric)
        tensors = form.tensors(layer)
        if form.in_bf16:
            layer = Layer(layer.codes, layer.zeros, layer.scales.to(torch.bfloat16), layer.group, layer.bits)
        del ours[name]
        ours |= {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}
        plain[name] = layer.plain()
    return written_pair(source, folder, ours, plain, form.config)


def linear_names(tensors: dict[str, Tensor]) -> Iterator[str]:
    return (name for name in sorted(tensors) if name.endswith("_proj.weight"))


def written_pair(
    source: Path, folder: Path, ours: dict[str, Tensor], plain: dict[str, Tensor], quantization: dict[str, object]
) -> tuple[Path, Path]:
    config = json.loads((source / "config.json").read_text())
    return (
        written(folder / "quantised", ours, {**config, "quantization_config": quantization}),
        written(folder / "plain", plain, config),
    )


def written(where: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    where.mkdir()
    save_file(tensors, where / "model.safetensors")
    (where / "config.json").write_text(json.dumps(config))
    return where


# --- numbers of 8 bits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """block: outputs and inputs that have a scale in common; None stands for all of them."""

    config: dict[str, object]
    block: tuple[int | None, int | None]
    scale: str = "weight_scale"
    more: bool = False  # there is a scale for activations, too

    def drawn(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """What is stored of a layer, and the weight."""
        size = [each or whole for each, whole in zip(self.block, shape, strict=True)]
        blocks = [-(-whole // each) for each, whole in zip(size, shape, strict=True)]
        scales = (torch.rand(blocks) + 0.5) / 100
        numbers = (torch.randn(shape) * 20).to(torch.float8_e4m3fn)
        places = [torch.arange(whole) // each for each, whole in zip(size, shape, strict=True)]
        weight = numbers.float() * scales[places[0]][:, places[1]]
        stored = {"weight": numbers, self.scale: scales[0, 0] if self.block == (None, None) else scales}
        return stored | ({"input_scale": torch.tensor(0.5)} if self.more else {}), weight


def compressed_numbers(**weights: object) -> dict[str, object]:
    return with_activations(compressed("float-quantized", 8, None, **{"type": "float", **weights}))


NUMBERS: dict[str, Numbers] = {
    "blocks": Numbers(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 32]},
        (64, 32),
        "weight_scale_inv",
    ),
    "one": Numbers({"quant_method": "fp8", "activation_scheme": "static"}, (None, None), more=True),
    "outputs": Numbers(compressed_numbers(strategy="channel"), (1, None)),
    "blocks of compressed tensors": Numbers(
        compressed_numbers(strategy="block", block_structure=[128, 128]), (128, 128)
    ),
}


def pair_of_numbers(source: Path, form: Numbers, folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    stored = load_file(source / "model.safetensors")
    ours, plain = dict(stored), dict(stored)
    for name in linear_names(stored):
        tensors, plain[name] = form.drawn(tuple(stored[name].shape))
        ours |= {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}
    return written_pair(source, folder, ours, plain, form.config)
