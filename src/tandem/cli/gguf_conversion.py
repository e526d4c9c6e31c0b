"""`python -m tandem.cli.gguf_conversion FILE FOLDER`: a GGUF file as a Hugging Face directory, by transformers.

Its config, tokenizer and weights; the weights as float32 if the file has nothing else, as bfloat16 if it has that, or
else as float16, in which a quantised weight of 8 bits and its scale have room. The last line on stderr says what is
wrong.
"""

import os
import sys
from pathlib import Path
from typing import Any  # a model of transformers

import safetensors.torch

NEEDS = "it takes the packages of `pip install tandem-llm[gguf]`"


def main() -> int:
    file, folder = map(Path, sys.argv[1:])
    os.environ["HF_HUB_OFFLINE"] = "1"  # whatever it needs is in the file
    try:
        import gguf
        import transformers
    except ImportError as error:
        return failed(f"{NEEDS} ({error})")
    transformers.utils.logging.disable_progress_bar()
    try:
        kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype_for(kinds))
        tokenizer.save_pretrained(folder)
        save(model, folder)
    except Exception as error:  # two libraries, and any bytes
        return failed(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason'}")
    return 0


def save(model: Any, folder: Path) -> None:
    """As a plain checkpoint, which its own `save_pretrained` refuses to write of a quantised file."""
    config, weights = model.config, model.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def dtype_for(kinds: set[str]) -> str:
    if kinds == {"F32"}:
        return "float32"
    return "bfloat16" if kinds <= {"F32", "BF16"} else "float16"


def failed(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
