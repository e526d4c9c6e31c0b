"""Grammars that bound what a request may say, run by llguidance over the vocabulary of one model.

The API process compiles each grammar once, to refuse what does not compile. The worker that samples compiles it again
and follows its requests token by token: which tokens may come next is a function of the tokens that are known, so
nothing of a matcher's state travels, and a matcher can be made anew wherever the request goes on.

A grammar travels as the text that `from_json_schema` and its neighbours return. No torch here: the API process uses it.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any  # JSON schemas

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.closed_schemas import closed

MOST_NESTED = 64  # levels of a schema
MOST_COMPILED = 64  # grammars that a process keeps
# Between two tokens of JSON. Where more may come, a model that prefers spaces to an answer says nothing else.
WHITESPACE = r" ?"
# `?` and `!` are about the tree that a parser would make: what may be said is the same.
IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]*start\s*:)")
# All that may stand in a URI reference. A name with anything else in it is one that no `$ref` can mean.
URI_REFERENCE = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII)
# Numbers as JSON has them, also where the JSON is a text in a text. What becomes -2**63 as an integer, which everything
# below does, ends the process inside llguidance where it is a value in a schema.
NEGATIVE = re.compile(r"(?:^|[\s\[,:]|\\[nrt])(-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\w)")
LEAST_INTEGER = -(2.0**63)
# Of a regular expression, what llguidance does not follow: looking around, and back to a group.
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
VALUES = ("const", "enum", "default", "examples")  # keywords that hold values and not schemas
BAD_REGEX = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")
UNKNOWN_RULE = re.compile(r"Rule '(.+)' not found")
BEYOND_INTEGERS = "a number below -2**63, or next to it, cannot be followed"


class GrammarError(ValueError):
    """What is wrong with a grammar, or with the tokenizer that it should be made for: one line."""


def from_json_schema(schema: Any, *, is_lenient: bool = False, whitespace: str = WHITESPACE) -> str:
    """Objects have the properties that they name (`closed_schemas`). `is_lenient`: keywords that llguidance does not
    know, and patterns that it cannot follow, bound nothing. Raises GrammarError.
    """
    options = {"whitespace_pattern": whitespace, "lenient": is_lenient}
    if isinstance(schema, dict) and isinstance(id := schema.get("$id"), str) and not URI_REFERENCE.fullmatch(id):
        schema = {key: value for key, value in schema.items() if key != "$id"}
    try:
        meant = _without_looks(schema) if is_lenient else schema
        text = json.dumps(closed(meant))
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]  # options that its stub does not list
    except (ValueError, RecursionError) as error:  # numbers that no fp64 can hold, and the like
        raise GrammarError(in_one_line(str(error))) from None


def _without_looks(schema: Any) -> Any:
    """The schema without patterns that look around, as pydantic has one for decimal numbers."""
    if isinstance(schema, list):
        return [_without_looks(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: each if key in VALUES else _without_looks(each)
        for key, each in schema.items()
        if not (key == "pattern" and isinstance(each, str) and _looks_around(each))
    }


def _looks_around(pattern: str) -> bool:
    return bool(LOOKS_AROUND.search(pattern)) and bool(LLMatcher.validate_grammar(from_regex(pattern), None))


def from_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def from_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def from_ebnf(text: str) -> str:
    """GBNF, as SGLang and vLLM take it, or Lark. Raises GrammarError."""
    try:
        return from_lark(text if IS_LARK.search(text) else gbnf_to_lark(text))
    except Exception as error:  # the converter's own parser, whatever the text makes it raise
        said = in_one_line(str(error)).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        unknown = UNKNOWN_RULE.fullmatch(said)
        raise GrammarError(said if unknown is None else f"{said}{line_of(unknown[1], text)}") from None


def line_of(rule: str, text: str) -> str:
    """Where a rule is asked for."""
    named = re.compile(rf"(?<![\w-]){re.escape(rule)}(?![\w-])")
    return next(
        (f", which line {at} asks for" for at, line in enumerate(text.splitlines(), 1) if named.search(line)), ""
    )


def from_parts(lark: str, parts: dict[str, str]) -> str:
    """`lark` may say `@NAME` for a part, which is a grammar of its own. Parts of that keep their names, so that no two
    grammars of several parts, with the same names in them, may come together."""
    grammars: list[Any] = [{"name": "whole", "lark_grammar": lark}]
    for name, grammar in parts.items():
        first, *inner = json.loads(grammar)["grammars"]
        grammars += [{**first, "name": name}, *inner]
    return json.dumps({"grammars": grammars})


def ends_the_process(grammar: str) -> bool:
    return any(float(found) <= LEAST_INTEGER for found in NEGATIVE.findall(grammar))


def quoted(text: str) -> str:
    """As Lark writes a literal."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, marks: Mapping[str, int]) -> str:
    """This text in Lark. marks: tokens by their names, which no other token spells."""
    return " ".join(literals(text, marks))


def literals(text: str, marks: Mapping[str, int]) -> list[str]:
    """The same piece by piece: each is a text in quotes, or a mark."""
    found = [name for name in marks if name in text]
    if not found:
        return [quoted(text)]
    pieces = re.split("(" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")", text)
    return [f"<[{marks[piece]}]>" if piece in marks else quoted(piece) for piece in pieces if piece]


def is_mark(literal: str) -> bool:
    return literal.startswith("<[")


class Vocabulary:
    """The tokens of one model, and the grammars compiled for them. May be used from any thread."""

    def __init__(self, path: Path, *, size: int = 0) -> None:
        """`path`: of tokenizer.json; `size`: of the logits, where there are more than tokens. Raises GrammarError."""
        try:
            text = path.read_text(encoding="utf-8")
            own = LLTokenizer(text)
            self._tokenizer = own if own.vocab_size >= size else LLTokenizer(text, n_vocab=size)
        except Exception as error:  # the library raises bare exceptions for what it cannot read
            raise GrammarError(f"grammars cannot be followed with this tokenizer: {in_one_line(str(error))}") from None
        self.size = self._tokenizer.vocab_size
        # What llguidance reads out of the file as the end need not be one of the model's.
        self._guessed_ends = frozenset((self._tokenizer.eos_token, *getattr(self._tokenizer, "eos_tokens", ())))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def is_compiled(self, grammar: str) -> bool:
        with self._lock:
            return grammar in self._compiled

    def check(self, grammar: str) -> None:
        """Compile it, which may take tens of milliseconds without the interpreter's lock. Raises GrammarError."""
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise GrammarError(in_one_line(matcher.get_error()))

    def complaint(self, grammar: str) -> str:
        """What `check` would raise, of a grammar that nobody will use; empty when nothing is wrong."""
        if ends_the_process(grammar):
            return BEYOND_INTEGERS
        return in_one_line(LLMatcher.validate_grammar(grammar, self._tokenizer))

    def matcher(self, grammar: str, *, eos_ids: Iterable[int], ignores_eos: bool = False) -> "Matcher":
        made = self._matcher(grammar).deep_copy()
        return Matcher(made, frozenset(eos_ids), self._guessed_ends, ignores_eos=ignores_eos, size=self.size)

    def _matcher(self, grammar: str) -> LLMatcher:
        """One that nobody advances."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        if ends_the_process(grammar):
            raise GrammarError(BEYOND_INTEGERS)
        made = LLMatcher(self._tokenizer, grammar, log_level=0)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return made


class Matcher:
    """Where one request stands in its grammar."""

    __slots__ = ("_eos_ids", "_ignores_eos", "_masked_ids", "_matcher", "_num_words", "is_finished")

    def __init__(
        self, matcher: LLMatcher, eos_ids: frozenset[int], guessed: frozenset[int], *, ignores_eos: bool, size: int
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._masked_ids = eos_ids | guessed
        self._ignores_eos = ignores_eos
        self._num_words = (size + 31) // 32
        self.is_finished = False  # nothing can follow

    def accept(self, token: int) -> None:
        """The request's next token. After the end of a grammar anything may come, and means nothing."""
        if self.is_finished:
            return
        if token in self._eos_ids:
            self.is_finished = True
            return
        self._matcher.consume_token(token)
        self.is_finished = not self._matcher.is_error() and self._matcher.is_stopped()

    def restart(self, outputs: Iterable[int]) -> None:
        """From the beginning, with these tokens."""
        self._matcher.reset()
        self.is_finished = False
        for token in outputs:
            self.accept(token)

    def allowed(self) -> array:
        """[ceil(vocabulary / 32)] words of 32 bits: one for each token that may come next, the lowest first.

        No bit at all: it has grown beyond the bounds of llguidance, and the request cannot go on.
        """
        if self.is_finished:
            return array("I", [0xFFFFFFFF]) * self._num_words
        if self._matcher.is_error():
            return array("I", [0]) * self._num_words
        # llguidance returns one bit for its own end of text behind the last token.
        bits = array("I", self._matcher.compute_bitmask()[: 4 * self._num_words])
        may_end = self._matcher.is_accepting()
        for id in self._masked_ids:
            bits[id >> 5] &= 0xFFFFFFFF ^ (1 << (id & 31))
        if may_end and (not self._ignores_eos or not any(bits)):
            for id in self._eos_ids:
                bits[id >> 5] |= 1 << (id & 31)
        return bits


def in_one_line(message: str, *, most: int = 300) -> str:
    """Of several lines, without the lists of all special tokens that end in thousands of characters. Of a regular
    expression with a caret below it the place is said as a number."""
    shown = BAD_REGEX.search(message)
    if shown is not None:
        message = f"invalid regular expression, at character {len(shown[1]) + 1}: {shown[2]}"
    line = " ".join(message.split("; following special tokens", 1)[0].split())
    return line if len(line) <= most else line[: most - 1] + "…"
