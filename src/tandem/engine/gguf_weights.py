"""Weights of a GGUF file by the names of a checkpoint, of architectures that we compute ourselves.

Which tensor a weight is says the table of the gguf library. Three things are otherwise there, and are put back:

    llama            rows of queries and keys: the two numbers that turn together lie side by side
    gemma2, gemma3   norms have one added
    qwen3moe         the experts of a layer are one tensor

Why not by transformers: it makes numbers of everything, which takes the memory and the time of the whole model, and
here most of it stays codes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any  # a configuration of transformers, a tensor of gguf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.documents import ModelError
from tandem.engine.gguf_codes import LAYOUTS, coded, dequantized, numbers_of
from tandem.engine.gguf_settings import GgufFields, places_of
from tandem.engine.quantized_formats import gguf_tensors

OURS = frozenset(("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3"))  # as files name architectures
LINEAR = re.compile(r"(.*\.layers\..*_proj|model\.embed_tokens|lm_head)\.weight")
EXPERTS = re.compile(r"(.*\.experts)\..+")
OF_AN_EXPERT = ("gate_proj", "up_proj", "down_proj")
INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # tensors, and whose heads they have


class GgufWeights:
    """shapes: of the weights of a model, without a head that is the embedding. dtype: of those that are no codes."""

    def __init__(self, said: GgufFields, config: Any, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._said, self._config, self._dtype = said, config, dtype
        self._places = places_of(shapes, said.architecture)
        self._experts = {found[1]: None for name in shapes if (found := EXPERTS.fullmatch(name))}
        self._shapes = {name: shape for name, shape in shapes.items() if not EXPERTS.fullmatch(name)}

    def missing(self) -> list[str]:
        """Weights that the file has no tensor for."""
        experts = [f"{prefix}.{kind}" for prefix in self._experts for kind in OF_AN_EXPERT]
        return [name for name in (*self._shapes, *experts) if self._tensor(name) is None]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As a checkpoint has them: codes where there are some, and else numbers. Raises ModelError."""
        for name, shape in self._shapes.items():
            tensor, linear = self._tensor(name), LINEAR.fullmatch(name)
            if (found := tuple(map(int, reversed(tensor.shape)))) != shape:
                raise ModelError(f"its tensor {tensor.name} is {found}, and {name} of its model {tuple(shape)}")
            rows = self._rows(tensor)
            if linear and self._stays_coded(tensor):
                yield from gguf_tensors(linear[1], coded(tensor.data[rows], tensor.tensor_type)).items()
            else:
                yield name, self._plain(tensor)[rows].contiguous()
        for prefix in self._experts:
            for kind in OF_AN_EXPERT:
                tensor = self._tensor(f"{prefix}.{kind}")
                for number, expert in enumerate(tensor.data):
                    layer = f"{prefix}.{number}.{kind}"
                    if self._stays_coded(tensor):
                        yield from gguf_tensors(layer, coded(expert, tensor.tensor_type)).items()
                    else:
                        numbers = torch.from_numpy(dequantized(expert, tensor.tensor_type))
                        yield f"{layer}.weight", numbers.to(self._dtype)

    def _stays_coded(self, tensor: Any) -> bool:
        return self._dtype == torch.float16 and tensor.tensor_type.name in LAYOUTS

    def _tensor(self, name: str) -> Any:
        """None: there is none."""
        layer, _, kind = name.rpartition(".")
        place = self._places.get_name(name)  # of experts
        place = f"{place}.weight" if place is not None else f"{self._places.get_name(layer)}.{kind}"
        return self._said.tensors.get(place)

    def _rows(self, tensor: Any) -> npt.NDArray[np.int64]:
        """Which of the tensor's are those of the checkpoint, in order."""
        rows = np.arange(tensor.data.shape[0])
        heads = INTERLEAVED.get(tensor.name.split(".")[-2]) if self._said.architecture == "llama" else None
        return rows if heads is None else rows.reshape(getattr(self._config, heads), -1, 2).swapaxes(1, 2).ravel()

    def _plain(self, tensor: Any) -> Tensor:
        less = 1 if self._said.architecture.startswith("gemma") and tensor.name.endswith("norm.weight") else 0
        return torch.cat([torch.from_numpy(numbers - less).to(self._dtype) for numbers in numbers_of(tensor)])
