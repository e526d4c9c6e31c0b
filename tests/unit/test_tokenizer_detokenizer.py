"""Streamed text equals decoded text, whatever the vocabulary and however the ids fall."""

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tandem.server.api.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer
from tandem.server.api.tokenizer import Tokenizer as Loaded

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Größe, naïve café, ça va?",
    "日本語のテキストと中文文本 mixed with English",
    "numbers 123 456  double  spaces\nnew lines\n\n and tabs\t.",
    "emoji 😀 family 👨‍👩‍👧 flags 🇩🇪",
] * 3
SPECIALS = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return made


def llama_like() -> Tokenizer:
    """SentencePiece with byte fallback, as the Llama 2 family ships it."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for char in dict.fromkeys("▁" + "".join(CORPUS[:1]).replace(" ", "▁") + "日本"):
        vocabulary.setdefault(char, len(vocabulary))
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "▁")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", *SPECIALS])
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    made.decoder = decoders.WordPiece(cleanup=False)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    )
    return made


MAKERS = {"byte_level": byte_level, "metaspace": metaspace, "llama_like": llama_like, "word_piece": word_piece}
_loaded: dict[str, Loaded] = {}


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    if request.param not in _loaded:
        directory = tmp_path_factory.mktemp(request.param)
        MAKERS[request.param]().save(str(directory / "tokenizer.json"))
        _loaded[request.param] = Loaded(directory)
    return _loaded[request.param]


def streamed(tokenizer: Loaded, ids: list[int], skip_special_tokens: bool, prompt: Sequence[int] = ()) -> str:
    stream = detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt)
    return "".join([stream.add(id) for id in ids] + [stream.finish()])


@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_streaming_random_ids_gives_the_text_of_all_ids(tokenizer: Loaded, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_an_answer_is_what_decoding_it_with_its_prompt_has_more(
    tokenizer: Loaded, data: st.DataObject, skip: bool
) -> None:
    """Also for ids that nobody would say: both end and begin anywhere, in spaces, characters and runs of bytes."""
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=20)
    prompt, answer = data.draw(ids), data.draw(ids)
    before, both = (tokenizer.decode(all, skip_special_tokens=skip) for all in (prompt, prompt + answer))
    assume(both.startswith(before))  # else a character of the prompt was incomplete
    assert streamed(tokenizer, answer, skip, prompt) == both.removeprefix(before)


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="a b日é😀.", max_size=20), cut=st.integers(0, 60), extra=st.sampled_from(["", " ", "  T"]))
def test_a_text_that_is_cut_anywhere_goes_on_as_it_was(tokenizer: Loaded, text: str, cut: int, extra: str) -> None:
    ids = tokenizer.encode(text + extra, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    prompt = tokenizer.decode(ids[:cut])
    shown = streamed(tokenizer, ids[cut:], True, ids[:cut])
    assert whole == prompt.rstrip("�") + shown or whole == prompt + shown


def test_a_space_between_prompt_and_answer_is_kept(tokenizer: Loaded) -> None:
    prompt, answer = tokenizer.encode("The quick"), tokenizer.encode("The quick brown fox")
    assert answer[: len(prompt)] == prompt
    assert streamed(tokenizer, answer[len(prompt) :], True, prompt) == " brown fox"


@pytest.mark.parametrize("make", [llama_like, byte_level])
def test_a_character_that_the_prompt_begins_is_completed(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Loaded(tmp_path)
    ids = tokenizer.encode("x\u2260 y")  # in no vocabulary of these: three bytes
    assert len(ids) > 5
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        assert prompt.rstrip("�") + streamed(tokenizer, ids[cut:], True, ids[:cut]) == "x\u2260 y"


def test_the_texts_of_tokens_make_the_text(tokenizer: Loaded) -> None:
    ids = tokenizer.encode("The quick brown fox jumps")
    texts = [tokenizer.token_text(id) for id in ids]
    assert "".join(texts).strip() == tokenizer.decode(ids) == "The quick brown fox jumps"
    assert "".join(texts).count(" ") - "".join(texts).startswith(" ") == 4


def test_a_byte_token_has_its_byte(tmp_path: Path) -> None:
    llama_like().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Loaded(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    for byte in range(256):
        assert tokenizer.token_bytes(vocabulary[f"<0x{byte:02X}>"]) == bytes([byte])
    assert [tokenizer.token_text(vocabulary[name]) for name in ("<0x41>", "<0xC3>", "▁", "▁T")] == ["A", "�", " ", " T"]


@settings(deadline=None, max_examples=80)
@given(text=st.text(max_size=40))
def test_streaming_real_text_gives_it_back_as_decoding_does(tokenizer: Loaded, text: str) -> None:
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids, True) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=80)
@given(text=st.text(max_size=40))
def test_a_byte_level_stream_never_shows_half_a_character(text: str) -> None:
    tokenizer = loaded_byte_level()
    stream = ByteDetokenizer(tokenizer, True)
    shown = ""
    for id in tokenizer.encode(text):
        shown += stream.add(id)
        assert text.startswith(shown)
    assert shown == text


@cache
def loaded_byte_level() -> Loaded:
    with tempfile.TemporaryDirectory() as name:
        byte_level().save(f"{name}/tokenizer.json")
        return Loaded(Path(name))


@settings(deadline=None, max_examples=100)
@given(data=st.data(), skip=st.booleans())
def test_the_window_and_the_byte_table_agree_on_a_byte_level_vocabulary(data: st.DataObject, skip: bool) -> None:
    tokenizer = loaded_byte_level()
    ids = tokenizer.encode(data.draw(st.text(max_size=30)))
    window, table = WindowDetokenizer(tokenizer, skip), ByteDetokenizer(tokenizer, skip)
    assert "".join([window.add(i) for i in ids] + [window.finish()]) == "".join(
        [table.add(i) for i in ids] + [table.finish()]
    )


def test_the_window_stays_short_in_a_long_stream() -> None:
    tokenizer = loaded_byte_level()
    stream = WindowDetokenizer(tokenizer, True)
    for id in tokenizer.encode("The quick brown fox. " * 200):
        stream.add(id)
        assert len(stream._ids) < 12


def test_a_token_that_is_a_replacement_character_is_not_held_back(tmp_path: Path) -> None:
    definition = json.loads(llama_like().to_str())
    vocabulary = definition["model"]["vocab"]
    replacement, byte = len(vocabulary), vocabulary["<0xE6>"]
    vocabulary["\N{REPLACEMENT CHARACTER}"] = replacement
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = Loaded(tmp_path)
    stream = WindowDetokenizer(tokenizer, True, [replacement])
    for _ in range(50):
        assert stream.add(replacement) == "\N{REPLACEMENT CHARACTER}"
        assert len(stream._ids) == 1
    ids = [replacement, byte, replacement, byte, byte, *tokenizer.encode("日 fox"), replacement]
    assert streamed(tokenizer, ids, True) == tokenizer.decode(ids)


def test_a_special_token_between_two_words_keeps_the_space(tmp_path: Path) -> None:
    llama_like().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Loaded(tmp_path)
    space_t = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["▁T"]
    ids = [space_t, 2, space_t, 2, 2, space_t]
    assert streamed(tokenizer, ids, True) == tokenizer.decode(ids) == "T T T"
