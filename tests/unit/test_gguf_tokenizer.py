"""The words that a GGUF file means: cuts, words taken whole, control tokens, spaces, ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from tandem.engine.documents import ModelError
from tandem.engine.gguf_settings import GgufFields
from tandem.engine.gguf_tokenizer import CUTS, byte_level, ends, make, with_spaces
from tandem.server.api.tokenizer import Tokenizer as Served

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
ALPHABET = sorted(ByteLevel.alphabet())
USER, BOS, EOS, TURN = "<｜User｜>", "<｜begin▁of▁sentence｜>", "<|endoftext|>", "<|im_end|>"


class Field:
    def __init__(self, value: Any) -> None:
        self.value = value

    def contents(self) -> Any:
        return self.value


class Reader:
    tensors = ()

    def __init__(self, architecture: str, **said: Any) -> None:
        self.fields = {"general.architecture": Field(architecture)}
        self.fields |= {f"tokenizer.{name.replace('__', '.')}": Field(value) for name, value in said.items()}


def file(
    cut: str | None = "qwen2", *, merges: tuple[str, ...] = (), words: tuple[str, ...] = (), **said: Any
) -> GgufFields:
    """Of a byte-level vocabulary: the bytes, what the merges make, those words, and four control tokens at the end."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in merges), *words, "<think>", USER, BOS, EOS, TURN]
    types = [NORMAL] * (len(tokens) - 5) + [USER_DEFINED] + [CONTROL] * 4
    numbers = {name: tokens.index(word) for name, word in (("bos", BOS), ("eos", EOS))}
    ids = {f"ggml__{name}_token_id": id for name, id in numbers.items()}
    cuts = {} if cut is None else {"ggml__pre": cut}
    fields = {"ggml__model": "gpt2", "ggml__tokens": tokens, "ggml__token_type": types, "ggml__merges": list(merges)}
    return GgufFields(Reader("llama", **fields, **ids, **cuts, **said))


def pieces(cut: str, text: str) -> list[str]:
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in CUTS[cut].pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("cut", "text", "expected"),
    [
        ("gpt-2", "It'S 12345 a.b\n\n c", ["It", "'", "S", " 12345", " a", ".", "b", "\n\n", " c"]),
        ("llama-bpe", "It'S 12345 a.b\n\n c", ["It", "'S", " ", "123", "45", " a", ".b", "\n\n", " c"]),
        ("qwen2", "It'S 123 a.b", ["It", "'S", " ", "1", "2", "3", " a", ".b"]),
        ("qwen35", "a\u0915\u093f 1", ["aà¤ķà¤¿", " ", "1"]),
        ("smollm", "It's 123  a.b", ["It", "'s", " ", "1", "2", "3", " ", " a", ".", "b"]),
        ("tekken", "fooBar 12 a's", ["foo", "Bar", " ", "1", "2", " a", "'s"]),
        ("gpt-4o", "fooBar 1234 a's", ["foo", "Bar", " ", "123", "4", " a's"]),
        ("deepseek-llm", "ab 4,5\nc", ["ab", " ", "4", ",", "5", "\n", "c"]),
        ("deepseek-coder", "ab 45..\nc", ["ab", " ", "4", "5", "..", "\n", "c"]),
        ("deepseek-v3", "ab 4567 .c", ["ab", " ", "456", "7", " .", "c"]),
        ("falcon", "ab 4567..c", ["ab", " ", "456", "7", "..", "c"]),
    ],
)
def test_texts_are_cut_as_the_file_names_it(cut: str, text: str, expected: list[str]) -> None:
    assert pieces(cut, text) == expected


def test_a_cut_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="its tokenizer cuts texts as kimi-k2, which is not known"):
        byte_level(file("kimi-k2"))
    assert byte_level(file(None)).encode("It's").tokens == list("It's")


def test_a_word_that_no_merges_make_is_taken_whole_where_the_model_was_trained_so() -> None:
    words = ("abc",)
    assert byte_level(file("llama-bpe", words=words)).encode("abc", add_special_tokens=False).tokens == ["abc"]
    assert byte_level(file("qwen2", words=words)).encode("abc").tokens == ["a", "b", "c"]


def test_control_tokens_that_bytes_do_not_spell_keep_their_ids_and_are_whole(tmp_path: Path) -> None:
    said = file(merges=("h i",))
    make(said, {}, tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = said.tokenizer("ggml.tokens")
    assert made.get_vocab_size() == len(tokens)
    assert made.encode(f"{USER}hi<think>{TURN}").ids == [tokens.index(word) for word in (USER, "hi", "<think>", TURN)]
    served = Served(tmp_path)
    assert served.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert served.decode(served.encode(f"{USER}hi<think>"), skip_special_tokens=True) == "hi<think>"
    assert served.special_ids == {tokens.index(word) for word in (USER, BOS, EOS, TURN)}


@pytest.mark.parametrize(
    ("cut", "said", "first", "last"),
    [
        ("qwen2", {}, [], []),
        ("llama-bpe", {}, [BOS], []),
        ("tekken", {}, [BOS], []),
        ("llama-bpe", {"ggml__add_bos_token": False}, [], []),
        ("qwen2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, [BOS], [EOS]),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(
    cut: str, said: dict[str, bool], first: list[str], last: list[str]
) -> None:
    made = byte_level(file(cut, **said))
    assert made.encode("a").tokens == [*first, "a", *last]
    assert made.encode("a", "b").tokens == [*first, "a", *last, *first, "b", *last]


def test_chat_templates_are_found_by_their_names(tmp_path: Path) -> None:
    make(file(chat_template="plain", chat_templates=["tool_use"], chat_template__tool_use="tools"), {}, tmp_path)
    assert Served(tmp_path).templates == {"default": "plain", "tool_use": "tools"}


def test_an_answer_ends_where_turns_do_whatever_the_file_names() -> None:
    said = file(ggml__eot_token_id=3)
    tokens = said.tokenizer("ggml.tokens")
    assert ends(said) == [tokens.index(EOS), 3, tokens.index(TURN)]


def sentence_pieces(architecture: str, *control: str, **said: Any) -> Tokenizer:
    """Of a vocabulary of single characters and runs of spaces, as transformers makes it."""
    words = ["<unk>", *control, "▁", "▁▁", *"abc\n"]
    made = Tokenizer(BPE({word: id for id, word in enumerate(words)}, [("▁", "▁")], unk_token="<unk>"))
    made.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens(list(control))
    types = [2, *[CONTROL] * len(control), *[NORMAL] * (len(words) - 1 - len(control))]
    fields = {"ggml__model": "llama", "ggml__tokens": words, "ggml__token_type": types}
    put = with_spaces(GgufFields(Reader(architecture, **fields, **said)), json.loads(made.to_str()))
    return Tokenizer.from_str(json.dumps(put))


def test_each_text_between_control_tokens_begins_with_a_space_and_spaces_are_words() -> None:
    made = sentence_pieces("llama", "<s>")
    assert made.encode(" a").tokens == ["▁▁", "a"]
    assert made.encode("<s>a<s> b").tokens == ["<s>", "▁", "a", "<s>", "▁▁", "b"]
    bare = sentence_pieces("llama", "<s>", ggml__add_space_prefix=False)
    assert bare.encode("a<s> b").tokens == ["a", "<s>", "▁", "b"]


def test_behind_the_marks_of_a_mistral_there_is_no_space_that_nobody_wrote() -> None:
    made = sentence_pieces("llama", "<s>", "[INST]")
    assert made.encode("<s>[INST] a").tokens == ["<s>", "[INST]", "▁", "a"]


def test_behind_control_tokens_of_a_phi_3_lines_do_not_begin() -> None:
    made = sentence_pieces("phi3", "<s>", "<|user|>")
    words = ["<s>", "▁", "\n", "<|user|>", "▁", "a"]
    assert made.encode("<s>\n<|user|>\na").ids == [made.token_to_id(word) for word in words]
