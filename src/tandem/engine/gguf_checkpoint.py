"""A GGUF file as a Hugging Face directory: config and tokenizer, made by transformers, and weights.

Of our own architectures linear layers, embedding and head stay the codes that they are in the file, if `gguf_codes`
knows their type; transformers reads the weights of the others. What is no code is stored as float32 if the file has
nothing else, as bfloat16 if it has that, or else as float16.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # a configuration and a model of transformers

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from torch import Tensor

from tandem.engine import gguf_tokenizer
from tandem.engine.gguf_settings import GgufFields, complete, put_sizes, refuse_lost
from tandem.engine.gguf_weights import OURS, GgufWeights
from tandem.engine.quantized_formats import CODES, GGUF_CONFIG

FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all of a layer, as transformers 5 keeps them
HEAD = "lm_head.weight"


def make(file: Path, folder: Path) -> None:
    """Takes memory for all that is stored. Raises ModelError, and whatever the two libraries raise."""
    transformers.utils.logging.disable_progress_bar()
    with read_once(file) as reader:
        said = GgufFields(reader)
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        gguf_tokenizer.make(said, where, folder)
        read = read_ourselves if said.architecture in OURS else read_by_transformers
        model, weights = read(said, where, dtype_for({tensor.tensor_type.name for tensor in said.tensors.values()}))
    model.generation_config.eos_token_id = gguf_tokenizer.ends(said) or None
    model.generation_config.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    complete(model.config, said)
    save(model.config, weights, folder)


class PlainReader(gguf.GGUFReader):
    """Reads slices of a plain array. Those of a memory map are maps, and making them took half of all reading."""

    def _get(self, *where: Any, **how: Any) -> Any:
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        return super()._get(*where, **how)


@contextmanager
def read_once(file: Path) -> Iterator[PlainReader]:
    """Whoever opens the file meanwhile gets the same reader: transformers does it for each part that it makes.

    To read the words of a vocabulary, one by one, takes seconds.
    """
    theirs, reader = gguf.GGUFReader, PlainReader(file)
    gguf.GGUFReader = lambda *_: reader
    try:
        yield reader
    finally:
        gguf.GGUFReader = theirs


def read_ourselves(said: GgufFields, where: dict[str, str], dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """A model without memory, and its weights as a checkpoint has them."""
    config: Any = transformers.AutoConfig.from_pretrained(**where)
    put_sizes(config, said)
    config.dtype = dtype
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if Path(where["pretrained_model_name_or_path"], transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"])
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    weights = GgufWeights(said, config, shapes, dtype)
    refuse_lost(said, list(shapes), weights.missing())
    return model, dict(weights.tensors())


def read_by_transformers(said: GgufFields, where: dict[str, str], dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """All of them become numbers."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, output_loading_info=True)
    model, told = loaded  # of which the library's types do not know
    weights = model.state_dict()
    refuse_lost(said, list(weights), sorted(told["missing_keys"]))
    if model.config.tie_word_embeddings:
        weights.pop(HEAD, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, {name: tensor.contiguous() for name, tensor in one_by_one(weights.items())}


def one_by_one(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each expert for itself, as checkpoints have them."""
    for name, tensor in weights:
        experts = FUSED_EXPERTS.fullmatch(name)
        if experts is None:
            yield name, tensor
            continue
        kinds = ("gate", "up") if experts[2] == "gate_up" else ("down",)
        for kind, those in zip(kinds, tensor.chunk(len(kinds), dim=1), strict=True):
            yield from ((f"{experts[1]}.{index}.{kind}_proj.weight", expert) for index, expert in enumerate(those))


def save(config: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """As a checkpoint that transformers' own `save_pretrained` refuses to write of a quantised file."""
    if any(name.endswith(CODES) for name in weights):
        config.quantization_config = GGUF_CONFIG
    config.save_pretrained(folder)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def dtype_for(kinds: set[str]) -> torch.dtype:
    if kinds == {"F32"}:
        return torch.float32
    return torch.bfloat16 if kinds <= {"F32", "BF16"} else torch.float16
