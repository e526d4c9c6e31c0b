"""A GGUF file as a Hugging Face directory: config, tokenizer and weights, read by transformers.

Of our own architectures linear layers, embedding and head stay the codes that they are in the file, if `gguf_codes`
knows their type. Other weights are stored as float32 if the file has nothing else, as bfloat16 if it has that, or else
as float16.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # a model of transformers, a reader of gguf

import gguf
import safetensors.torch
import torch
import transformers
from torch import Tensor

from tandem.engine.gguf_codes import CodedRows
from tandem.engine.gguf_settings import complete, refuse_lost
from tandem.engine.models.table import FAMILIES
from tandem.engine.quantized_formats import GGUF_CONFIG, gguf_tensors

LINEAR = re.compile(r"(.*\.layers\..*_proj|model\.embed_tokens|lm_head)\.weight")
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all of a layer, as transformers 5 keeps them


def make(file: Path, folder: Path) -> None:
    """Takes memory for all weights, as float16 of a quantised file. Raises ModelError, and whatever the two libraries
    raise.
    """
    transformers.utils.logging.disable_progress_bar()
    reader = gguf.GGUFReader(file)
    dtype = dtype_for({tensor.tensor_type.name for tensor in reader.tensors})
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, output_loading_info=True)
    model, told = loaded  # of which the library's types do not know
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    name, config, weights = type(model).__name__, model.config, model.state_dict()
    del model  # so that weights are gone as soon as there are codes of them
    config.architectures = [name]
    refuse_lost(reader, list(weights), sorted(told["missing_keys"]))
    complete(config, reader)
    save(config, weights, dtype, reader, folder)


def save(config: Any, weights: dict[str, Tensor], dtype: torch.dtype, reader: Any, folder: Path) -> None:
    """As a checkpoint that transformers' own `save_pretrained` refuses to write of a quantised file."""
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    keeps = dtype == torch.float16 and config.architectures[0] in FAMILIES
    coded = codes_in_place(weights, reader) if keeps else {}
    if coded:
        config.quantization_config = GGUF_CONFIG
    config.save_pretrained(folder)
    plain = {name: tensor.contiguous() for name, tensor in one_by_one(weights)}
    safetensors.torch.save_file(plain | coded, folder / "model.safetensors", {"format": "pt"})


def codes_in_place(weights: dict[str, Tensor], reader: Any) -> dict[str, Tensor]:
    """Takes out of `weights` what the file has as codes, and returns these."""
    rows, coded = CodedRows(reader), {}
    for name in list(weights):
        linear = LINEAR.fullmatch(name)
        found = rows.find(weights[name]) if linear else None
        if linear and found:
            del weights[name]
            coded |= gguf_tensors(linear[1], found)
    return coded


def one_by_one(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each expert for itself, as checkpoints have them."""
    for name, tensor in weights.items():
        experts = EXPERTS.fullmatch(name)
        if experts is None:
            yield name, tensor
            continue
        kinds = ("gate", "up") if experts[2] == "gate_up" else ("down",)
        for kind, those in zip(kinds, tensor.chunk(len(kinds), dim=1), strict=True):
            yield from ((f"{experts[1]}.{index}.{kind}_proj.weight", expert) for index, expert in enumerate(those))


def dtype_for(kinds: set[str]) -> torch.dtype:
    if kinds == {"F32"}:
        return torch.float32
    return torch.bfloat16 if kinds <= {"F32", "BF16"} else torch.float16
