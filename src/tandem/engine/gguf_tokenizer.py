"""The tokenizer of a GGUF file, as a Hugging Face directory has it: the words that the file means, and no others.

A file names how a text is cut before pairs are merged (`tokenizer.ggml.pre`), and which words are whole. transformers
cuts as GPT-2 where it does not know a name, and spells words anew that bytes do not spell (`<｜User｜>`): texts become
other tokens than the model was trained on, without a word. So byte-level vocabularies are written here, and a name that
is not known is refused. Of SentencePiece's the vocabulary is transformers' work, and the spaces are put right.

What the names mean is what the `tokenizer.json` of those models says; llama.cpp's own examples are held against it
(`make published`).
"""

import json
from pathlib import Path
from typing import Any  # fields of a file, parts of tokenizer.json

import gguf
import transformers
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split
from tokenizers.processors import TemplateProcessing

from tandem.engine.documents import ModelError
from tandem.engine.gguf_settings import GgufFields

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # as a directory names them, and the file

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # what a word may begin with
_SIGNS, _SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(numbers: str, contractions: str = "") -> str:
    """Words that end where small letters are followed by capitals."""
    kinds = (f"{_CAPITALS}*{_SMALL}+", f"{_CAPITALS}+{_SMALL}*")
    words = "|".join(f"{_BEFORE}{kind}{contractions}" for kind in kinds)
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


LLAMA_3 = (rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",)
QWEN_2 = (rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}",)
_MARKED = r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
QWEN_3_5 = (rf"{_CONTRACTIONS}|{_BEFORE}{_MARKED}|{_SPACES}",)
TEKKEN = (_words(r"\p{N}"),)
GPT_4O = (_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)
CHINESE = r"[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_LLM = (
    "[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    CHINESE,
    r"\p{N}",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, r"\p{N}")
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|{_SPACES}",
)


def _pieces(splits: tuple[str, ...]) -> PreTokenizer:
    cuts = [Split(Regex(split), behavior="isolated") for split in splits]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT_2 = ByteLevel(add_prefix_space=False, use_regex=True)
SINGLE_DIGITS = Sequence([Digits(individual_digits=True), GPT_2])
FALCON = Sequence(
    [Punctuation("contiguous"), GPT_2, Digits(individual_digits=False), Split(Regex("[0-9]{3}"), "isolated")]
)
CUTS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _pieces(LLAMA_3)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _pieces(LLAMA_3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _pieces(QWEN_2)),
    "qwen35": _pieces(QWEN_3_5),
    "tekken": _pieces(TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _pieces(GPT_4O)),
    "deepseek-llm": _pieces(DEEPSEEK_LLM),
    "deepseek-coder": _pieces(DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _pieces(DEEPSEEK_3)),
    "falcon": FALCON,
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), SINGLE_DIGITS),
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum"), GPT_2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "granite-docling"), GPT_2),
}
# Control tokens at which a turn or a text ends. A file names one, and of chats it is often not that of a turn.
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<EOT>"),
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    )
)
# Whose words are taken as they are, also where no merges lead to them; and before whose texts the first token stands
# where the file does not say.
WHOLE = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "glm4"))
BEGUN = WHOLE - {"glm4"}
# A vocabulary with this control token has texts between its control tokens that do not begin with a space.
MISTRAL_3 = "[INST]"
KEPT_AFTER = frozenset(("<unk>", "<s>", "<|endoftext|>"))  # of Phi-3: behind its other control tokens space is dropped


def make(said: GgufFields, where: dict[str, str], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template. Raises ModelError, and what the libraries raise."""
    if said.tokenizer("ggml.model") == "gpt2":
        folder.mkdir(parents=True, exist_ok=True)
        byte_level(said).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(_config(said)))
        return
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    if said.tokenizer("ggml.model") == "llama" and not said.architecture.startswith("gemma"):
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(with_spaces(said, json.loads(path.read_text(encoding="utf-8")))))


def ends(said: GgufFields) -> list[int]:
    """At which an answer ends: those that the file names first."""
    named = [said.tokenizer(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    words, control = said.tokenizer("ggml.tokens"), set(_of_kind(said, gguf.TokenType.CONTROL))
    known = [id for id, word in enumerate(words) if word in ENDS and word in control]
    return list(dict.fromkeys(id for id in (*named, *known) if id is not None and id < len(words)))


def byte_level(said: GgufFields) -> Tokenizer:
    cut, words = said.tokenizer("ggml.pre") or "default", said.tokenizer("ggml.tokens")
    if cut not in CUTS:
        raise ModelError(f"its tokenizer cuts texts as {cut}, which is not known")
    merges = [tuple(merge.split(" ")) for merge in said.tokenizer("ggml.merges") or ()]
    made = Tokenizer(BPE({word: id for id, word in enumerate(words)}, merges, ignore_merges=cut in WHOLE))
    made.pre_tokenizer, made.decoder = CUTS[cut], Bytes()
    made.add_special_tokens([AddedToken(word, normalized=False) for word in _of_kind(said, gguf.TokenType.CONTROL)])
    made.add_tokens([AddedToken(word, normalized=False) for word in _of_kind(said, gguf.TokenType.USER_DEFINED)])
    special = _special(said)
    begins, ends = said.tokenizer("ggml.add_bos_token"), said.tokenizer("ggml.add_eos_token")
    first = [special["bos"]] if "bos" in special and (cut in BEGUN if begins is None else begins) else []
    last = [special["eos"]] if "eos" in special and ends else []
    if first or last:
        made.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B", *last],
            special_tokens=[(word, made.token_to_id(word)) for word in (*first, *last)],
        )
    return made


def _special(said: GgufFields) -> dict[str, str]:
    """By the names of a directory."""
    words = said.tokenizer("ggml.tokens")
    ids = {name: said.tokenizer(f"ggml.{theirs}_token_id") for name, theirs in SPECIAL.items()}
    return {name: words[id] for name, id in ids.items() if id is not None and id < len(words)}


def _config(said: GgufFields) -> dict[str, Any]:
    """Chat templates have names where there are several; the usual one has none."""
    names = said.tokenizer("chat_templates") or []
    texts = {name: said.tokenizer(f"chat_template.{name}") for name in names}
    texts = {"default": said.tokenizer("chat_template"), **texts}
    templates = [{"name": name, "template": text} for name, text in texts.items() if text is not None]
    return {
        **{f"{name}_token": word for name, word in _special(said).items()},
        **({"chat_template": templates} if templates else {}),
    }


def _of_kind(said: GgufFields, kind: gguf.TokenType) -> list[str]:
    kinds = said.tokenizer("ggml.token_type") or ()
    return [word for word, its in zip(said.tokenizer("ggml.tokens"), kinds, strict=False) if its == kind]


def with_spaces(said: GgufFields, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A text, and each text behind a control token, begins with a space; spaces are words like others."""
    if MISTRAL_3 in _of_kind(said, gguf.TokenType.CONTROL):
        return tokenizer
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if said.tokenizer("ggml.add_space_prefix") is not False:
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer["pre_tokenizer"] = None
    if said.architecture == "phi3":
        for token in tokenizer["added_tokens"]:
            token["rstrip"] = token["special"] and token["content"] not in KEPT_AFTER
    return tokenizer
