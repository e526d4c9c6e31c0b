"""Grammars that bound what a request may say, run by llguidance over the vocabulary of one model.

The API process compiles each grammar once, to refuse what does not compile. The worker that samples compiles it again
and follows its requests token by token: which tokens may come next is a function of the tokens that are known, so
nothing of a matcher's state travels, and a matcher can be made anew wherever the request goes on.

A grammar travels as the text that `from_json_schema` and its neighbours return. No torch here: the API process uses it.
"""

import _thread
import json
import math
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar  # JSON schemas

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.closed_schemas import closed
from tandem.core.values import ceil_div
from tandem.followed_schemas import VALUES, WITHOUT_NUL, followed

MOST_NESTED = 64  # levels of a schema
MOST_COMPILED = 64  # grammars that a process keeps
MOST_TEXTS = 4096  # whose tokens a process remembers
LONGEST_TEXT = 256  # of them
FEW_TOKENS = 4096  # of a vocabulary that llguidance had better not slice
NO_TOKEN = -1
# llguidance follows rules that name rules, and references in a schema, by recursion: a few thousand of them, one behind
# the other, are more than the stack of a thread (8 MiB) holds, which ends the process. This holds as many as the
# longest grammar has; of it the system gives what is touched.
DEEP_STACK_BYTES = 256 << 20
# Between two tokens of JSON. Where more may come, a model that prefers spaces to an answer says nothing else.
WHITESPACE = r" ?"
# A pattern of nothing else. What could also begin a value, or end one, might be ahead for ever (`UNFORCED`).
SPACES_ONLY = re.compile(r"(?!.*\[\])(?:[ \t\n\r()\[\]|?*+]|\\[nrts]|\(\?:|\{\d*,?\d*\})*", re.DOTALL)
# `?` and `!` are about the tree that a parser would make: what may be said is the same.
# Spaces of one line only: over all empty lines that follow, the search would take the square of their number.
IS_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|[?!]*start\s*:)")
# Text that has to come is not looked for: behind `/b+/`, which takes all it can, `"b"` is for ever ahead, and
# llguidance would look without end. The last such line counts.
UNFORCED = '\n%llguidance {"no_forcing": true}'
# Of GBNF: a backslash and what it says, where that is more than a character.
ESCAPED = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
SURROGATES = range(0xD800, 0xE000)
# Names at the top of a schema that llguidance understands; others are as good as none. Of the schema itself: all that
# may stand in a URI reference, since no `$ref` can mean anything else. Of its dialect: the old ones, where a part may
# have an `$id` for a name; the newer ones are read alike.
NAMES = {
    "$id": re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII),
    "$schema": re.compile(r"http://json-schema\.org/draft-0[467]/schema#?"),
}
# Numbers as JSON has them, also where the JSON is a text in a text. What becomes -2**63 as an integer, which everything
# below does, ends the process inside llguidance where it is a value in a schema.
NEGATIVE = re.compile(r"(?:^|[\s\[,:]|\\[nrt])(-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\w)")
LEAST_INTEGER = -(2.0**63)
# What a number has to be a multiple of. For it llguidance visits all remainders that there are, which none of its
# limits counts: of a million that takes seconds, for which everybody waits where the grammar is followed. Of round
# numbers, with one or two digits before their zeros, it visits few. What is too large it refuses itself.
MULTIPLE = re.compile(r'multipleOf\\*"(?:\s|\\[nrt])*:(?:\s|\\[nrt])*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)')
ASCII_ESCAPE = re.compile(r"\\+u00([0-7][0-9A-Fa-f])")
MOST_REMAINDERS = 100_000
THREE_DIGITS = 100
TOO_LARGE = 1e20
# Of a regular expression, what llguidance does not follow: looking around, and back to a group.
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
BAD_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.*)")
TOO_WIDE = re.compile(r"Current row has (\d+) items; max is (\d+)")
UNKNOWN_RULE = re.compile(r"Rule '(.+)' not found")
TOO_MANY_REMAINDERS = f"multipleOf: more than {MOST_REMAINDERS} remainders, of all numbers together"
BEYOND_INTEGERS = "a number below -2**63, or next to it, cannot be followed"

Result = TypeVar("Result")
deep_stack = _thread.allocate_lock()  # the size is that of all threads that are started meanwhile


class GrammarError(ValueError):
    """What is wrong with a grammar, or with the tokenizer that it should be made for: one line."""


def from_json_schema(schema: Any, *, is_lenient: bool = False, whitespace: str = WHITESPACE) -> str:
    """Objects have the properties that they name (`closed_schemas`). `is_lenient`: keywords that llguidance does not
    know, and patterns that it cannot follow, bound nothing. Raises GrammarError.
    """
    if SPACES_ONLY.fullmatch(whitespace) is None:
        raise GrammarError("between two tokens of JSON may be spaces only")
    options = {"whitespace_pattern": whitespace, "lenient": is_lenient}
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if not _is_strange(key, value)}
    try:
        schema = followed(schema)
        meant = _without_looks(schema) if is_lenient else schema
        text = json.dumps(closed(meant))
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]  # options that its stub does not list
    except (ValueError, RecursionError) as error:  # numbers that no fp64 can hold, and the like
        raise GrammarError(in_one_line(str(error))) from None


def _is_strange(key: str, value: Any) -> bool:
    return key in NAMES and isinstance(value, str) and not NAMES[key].fullmatch(value)


def _without_looks(schema: Any) -> Any:
    """The schema without patterns that look around, as pydantic has one for decimal numbers, and without what has too
    many multiples to be looked at."""
    if isinstance(schema, list):
        return [_without_looks(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: each if key in VALUES else _without_looks(each)
        for key, each in schema.items()
        if not _is_beyond(key, each)
    }


def _is_beyond(key: str, value: Any) -> bool:
    if key == "multipleOf" and isinstance(value, int | float):
        return has_too_many_remainders(json.dumps({key: value}))
    return key == "pattern" and isinstance(value, str) and _looks_around(value)


def _looks_around(pattern: str) -> bool:
    return bool(LOOKS_AROUND.search(pattern)) and bool(LLMatcher.validate_grammar(from_regex(pattern), None))


def from_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def from_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark + UNFORCED}]})


def from_ebnf(text: str) -> str:
    """GBNF, as SGLang and vLLM take it, or Lark. Raises GrammarError."""
    try:
        return from_lark(text if IS_LARK.search(text) else gbnf_to_lark(ESCAPED.sub(_plain, text)))
    except Exception as error:  # the converter's own parser, whatever the text makes it raise
        said = in_one_line(str(error)).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        unknown = UNKNOWN_RULE.fullmatch(said)
        raise GrammarError(said if unknown is None else f"{said}{line_of(unknown[1], text)}") from None


def _plain(escape: re.Match[str]) -> str:
    """A character for its number, of which the converter drops leading zeros: it would be another one."""
    digits = escape[1] or escape[2]
    if digits is None or (code := int(digits, 16)) > sys.maxunicode or code in SURROGATES:
        return escape[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


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


def has_too_many_remainders(grammar: str) -> bool:
    """All numbers count together, as if a value had to be a multiple of each."""
    plain = ASCII_ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar)
    given = {abs(float(found)) for found in MULTIPLE.findall(plain)}
    steps = [Decimal(repr(step)).normalize() for step in given if 1 / TOO_LARGE < step < TOO_LARGE]
    places = max((0, *(-int(step.as_tuple().exponent) for step in steps)))
    together = 1
    for step in steps:
        together = math.lcm(together, int(step.scaleb(places)))
        if together > MOST_REMAINDERS and int(str(together).rstrip("0")) >= THREE_DIGITS:
            return True
    return False


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """`function()`, in a thread of its own, which is a real one in a simulation, too. Raises GrammarError where the
    system has none."""
    found: list[Result] = []
    failed: list[BaseException] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # a panic of the library's is none of Exception
            failed.append(error)
        finally:
            ended.release()

    with deep_stack:
        before = _thread.stack_size(DEEP_STACK_BYTES)
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError as error:
            raise GrammarError(f"it cannot be compiled at the moment: {error}") from None
        finally:
            _thread.stack_size(before)
    ended.acquire()
    if failed:
        raise failed[0]
    return found[0]


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


class RememberingTokenizer(TokenizerWrapper):
    """llguidance's own tokenizer, which remembers what it was asked.

    Where a grammar leaves no choice, llguidance tokenizes the text that has to come: for every token anew, the same few
    texts again and again, at a third of what finding the allowed tokens costs.
    """

    def __init__(self, own: LLTokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = own.eos_token, None
        self.tokens = [_bytes_of(own, id) for id in range(own.vocab_size)]
        self.special_token_ids = []  # their bytes tell
        self._own = own
        self._known = lru_cache(MOST_TEXTS)(own.tokenize_str)

    def __call__(self, text: str) -> list[int]:
        return self._known(text) if len(text) <= LONGEST_TEXT else self._own.tokenize_str(text)


def _bytes_of(own: LLTokenizer, id: int) -> bytes:
    """As llguidance keeps them: special ones behind a byte that no text has, none at all where there is no token."""
    shown = own.decode_bytes([id])
    if own.is_special_token(id):
        return b"\xff" + shown
    return b"" if shown == b"<[%d]>" % id else shown


class Vocabulary:
    """The tokens of one model, and the grammars compiled for them. May be used from any thread."""

    def __init__(self, path: Path, *, size: int = 0) -> None:
        """`path`: of tokenizer.json; `size`: of the logits, where there are more than tokens. Raises GrammarError."""
        try:
            text = path.read_text(encoding="utf-8")
            own = LLTokenizer(text, slices=[])
            if own.vocab_size < size:
                own = LLTokenizer(text, n_vocab=size, slices=[])
            slices = [] if own.vocab_size <= FEW_TOKENS else None
            self._tokenizer = LLTokenizer(RememberingTokenizer(own), slices=slices)
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
        """Compile it, which may take tens of milliseconds without the interpreter's lock. Raises GrammarError, also for
        one that compiles and allows no token to begin with, as a definition that is only itself, or has too many
        choices behind the text with which all begin."""
        is_known = self.is_compiled(grammar)
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise GrammarError(in_one_line(matcher.get_error()))
        if not is_known and (complaint := self._complaint_at_once(grammar)):
            with self._lock:
                self._compiled.pop(grammar, None)
            raise GrammarError(complaint)

    def _complaint_at_once(self, grammar: str) -> str:
        """What the first steps of a request would meet."""
        if not any(self.matcher(grammar, eos_ids=self._guessed_ends).allowed()):
            return "no text fits it"
        begun = self._matcher(grammar).deep_copy()
        begun.consume_tokens(self._tokenizer.tokenize_bytes(begun.compute_ff_bytes()))
        said = begun.get_error()  # of a mark, also that its bytes are no text
        return in_one_line(said) if TOO_WIDE.search(said) else ""

    def complaint(self, grammar: str) -> str:
        """What `check` would raise, of a grammar that nobody will use; empty when nothing is wrong."""
        if ends_the_process(grammar):
            return BEYOND_INTEGERS
        if has_too_many_remainders(grammar):
            return TOO_MANY_REMAINDERS
        return in_one_line(on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, self._tokenizer)))

    def matcher(self, grammar: str, *, eos_ids: Iterable[int], ignores_eos: bool = False) -> "Matcher":
        made = self._matcher(grammar).deep_copy()
        ends = _ends(frozenset(eos_ids), self._guessed_ends)
        return Matcher(made, ends, ignores_eos=ignores_eos, size=self.size)

    def _matcher(self, grammar: str) -> LLMatcher:
        """One that nobody advances."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        if ends_the_process(grammar):
            raise GrammarError(BEYOND_INTEGERS)
        if has_too_many_remainders(grammar):
            raise GrammarError(TOO_MANY_REMAINDERS)
        made = on_deep_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0))
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return made


class Matcher:
    """Where one request stands in its grammar.

    A token is taken when somebody asks, and what may come next is kept until the next one. So whoever has many of them
    takes the tokens of all, then looks ahead for all (`look_ahead`): code and data stay at hand, which is worth as much
    as llguidance's own work.
    """

    __slots__ = ("_allowed", "_end_bits", "_eos_ids", "_ignores_eos", "_is_finished", "_matcher", "_size", "_token")

    def __init__(self, matcher: LLMatcher, ends: "Ends", *, ignores_eos: bool, size: int) -> None:
        self._matcher = matcher
        self._eos_ids, self._end_bits = ends
        self._ignores_eos = ignores_eos
        self._size = ceil_div(size, 32) * 4  # bytes
        self._token = NO_TOKEN  # that is not taken yet
        self._allowed: bytes | None = None
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Nothing can follow."""
        token, self._token = self._token, NO_TOKEN
        if token == NO_TOKEN or self._is_finished:
            return self._is_finished
        if token in self._eos_ids:
            self._is_finished = True
        elif self._matcher.consume_token(token):
            self._is_finished = self._matcher.is_stopped()
        return self._is_finished

    def accept(self, token: int) -> None:
        """The request's next token. After the end of a grammar anything may come, and means nothing."""
        if not self.is_finished:  # the one before has been taken
            self._token, self._allowed = token, None

    def restart(self, outputs: Iterable[int]) -> None:
        """From the beginning, with these tokens."""
        self._matcher.reset()
        self._token, self._allowed, self._is_finished = NO_TOKEN, None, False
        for token in outputs:
            self.accept(token)

    def allowed(self) -> bytes:
        """Words of 32 bits, little endian: one bit for each token that may come next, the lowest first.

        No bit at all: it has grown beyond the bounds of llguidance, and the request cannot go on.
        """
        if self._allowed is None:
            self._keep(b"\xff" * self._size if self.is_finished else self._matcher.compute_bitmask())
        assert self._allowed is not None
        return self._allowed

    def _keep(self, mask: bytes) -> None:
        """One bit for the end of text is behind the last token. Where the grammar may end, or has failed, llguidance
        allows what it takes for the end.
        """
        mask = mask[: self._size]
        for at, bits in self._end_bits:
            if mask[at] & bits:
                mask = mask if self._is_finished else self._with_ends(mask)
                break
        self._allowed = mask

    def _with_ends(self, mask: bytes) -> bytes:
        """With those of the model in the place of what llguidance takes for the end."""
        bits = bytearray(mask)
        for at, ends in self._end_bits:
            bits[at] &= 0xFF ^ ends
        if self._matcher.is_accepting() and (not self._ignores_eos or bits.count(0) == len(bits)):
            for id in self._eos_ids:
                bits[id >> 3] |= 1 << (id & 7)
        return bytes(bits)


def look_ahead(matchers: Iterable[Matcher]) -> None:
    """Find what may come next for each of them, and keep it."""
    unknown = [each for each in matchers if each._allowed is None and not each.is_finished]
    masks = [each._matcher.compute_bitmask() for each in unknown]
    for each, mask in zip(unknown, masks, strict=True):
        each._keep(mask)


Ends = tuple[frozenset[int], tuple[tuple[int, int], ...]]  # of the model; where the bits of all of them are


@lru_cache
def _ends(eos_ids: frozenset[int], guessed: frozenset[int]) -> Ends:
    """The same for all who have the same: what each had of its own would have to be fetched for each."""
    bits: dict[int, int] = {}  # by byte
    for id in eos_ids | guessed:
        bits[id >> 3] = bits.get(id >> 3, 0) | 1 << (id & 7)
    return eos_ids, tuple(bits.items())


def in_one_line(message: str, *, most: int = 300) -> str:
    """Of several lines, without the lists of all special tokens that end in thousands of characters. Of a regular
    expression with a caret below it the place is said as a number, and of what the parser holds what to do."""
    if (shown := BAD_REGEX.search(message)) is not None:
        before = shown[1][: len(shown[2])].replace(WITHOUT_NUL, "[^")
        message = f"invalid regular expression, at character {len(before) + 1}: {shown[3]}"
    elif (shown := TOO_WIDE.search(message)) is not None:
        message = f"{shown[1]} parts of rules at one place, at most {shown[2]}: it has too many optional properties"
    line = " ".join(message.split("; following special tokens", 1)[0].split())
    return line if len(line) <= most else line[: most - 1] + "…"
