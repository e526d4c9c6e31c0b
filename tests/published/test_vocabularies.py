"""Published tokenizers in GGUF files: the tokens of llama.cpp's examples, which are those of the models' own files."""

from pathlib import Path

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

from tandem.engine import gguf_tokenizer
from tandem.engine.gguf_checkpoint import read_once
from tandem.engine.gguf_settings import GgufFields

pytestmark = pytest.mark.slow  # and by `make published` only
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)
BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_texts_become_the_tokens_that_the_model_was_trained_on(
    name: str, models_of_llama_cpp: Path, tmp_path: Path
) -> None:
    file = models_of_llama_cpp / f"ggml-vocab-{name}.gguf"
    with read_once(file) as reader:
        said = GgufFields(reader)
        gguf_tokenizer.make(said, {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}, tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = said.tokenizer("ggml.tokens")
    assert made.get_vocab_size() == len(words)
    for id, (word, kind) in enumerate(zip(words, said.tokenizer("ggml.token_type"), strict=True)):
        if kind == TokenType.CONTROL:
            assert made.encode(word, add_special_tokens=False).ids == [id]
    texts = Path(f"{file}.inp").read_bytes().decode().split(BETWEEN)
    tokens = [[int(id) for id in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    wrong = [
        text for text, its in zip(texts, tokens, strict=False) if made.encode(text, add_special_tokens=False).ids != its
    ]
    assert len(texts) > 40
    assert wrong == []
