"""What the formats of tool calls have in common: text comes in any pieces, calls go out as soon as they are certain.

Whatever the pieces are, what comes out is, put together, the same. A call that is not one after all is text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol  # schemas are JSON

import msgspec

from tandem.grammar import GrammarError
from tandem.server.api.tool_parsers.rules import Rules

MOST_CALLS = 16  # that a grammar lets a model make in one answer
MOST_AT_ONCE = 1024  # characters that a parser takes
ARGUMENTS = ("arguments", "parameters")
SPACES = " \t\n\r"
IN_STRING, IN_VALUE, NOTHING = re.compile(r'[^"\\]+'), re.compile(r'[^"{}\[\]]+'), re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int  # among the calls of the answer
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments: JSON, as the model writes it."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Function:
    """One that may be called, for a grammar. What is said of JSON is a Lark expression."""

    name: str
    schema: dict[str, Any]  # of its arguments
    is_strict: bool
    rules: Rules

    @property
    def arguments(self) -> str:
        return self.value(self.schema)

    def value(self, schema: dict[str, Any]) -> str:
        """Raises `GrammarError` for what cannot be followed."""
        try:
            return self.rules.json(schema, is_lenient=not self.is_strict)
        except GrammarError as error:
            raise self.refused(str(error)) from None

    def refused(self, why: str) -> GrammarError:
        return GrammarError(f"parameters of {self.name}: {why}")


Literal = Callable[[str], str]  # a text as a Lark expression
Tools = Mapping[str, dict[str, Any]]  # functions that may be called: their arguments' schemas by their names


class CallReader(Protocol):
    """One call of an answer, whatever its format."""

    name: str | None  # once it is certain that this is one
    is_done: bool
    is_broken: bool

    @property
    def raw(self) -> str:
        """What has been taken, for who shows it as text; of a call that has a name there is nothing to show."""
        ...

    def feed(self, text: str) -> tuple[int, list[Piece]]:
        """How many characters of it belong to this call, and what is certain by them. What is not taken comes again,
        with more behind it."""
        ...


class CallObject:
    """One call as a JSON object, `{"name": ..., "arguments": {...}}`.

    `opening`: what is before it, which belongs to the text if it is none. `name`: where only the arguments are left.
    `names`: those that a call may have; None: any.
    """

    def __init__(self, index: int, opening: str, name: str | None, names: Collection[str] | None) -> None:
        self._index = index
        self._names = names
        self._is_bare = name is not None
        self._is_announced = False
        self._at: Callable[[str], None] = self._opening
        self._raw = [opening]  # all of it, while it may turn out to be text
        self._token: list[str] = []  # of a key, or of a value that is needed as a whole
        self._key = ""
        self._value = ""  # first character of the value that is being read
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._said: list[str] = []  # arguments that go out now
        self.name = name
        self.is_done = False
        self.is_broken = False
        if self._is_bare:
            self._key, self._at = ARGUMENTS[0], self._before_value

    def feed(self, text: str) -> tuple[int, list[Piece]]:
        """How many characters of it belong to this call, and what is certain by them. The one that shows that it is
        none does not: a call may begin with it."""
        taken = 0
        while taken < len(text) and not self.is_done:
            found = self._run.match(text, taken) if self._at == self._in_value else None
            some = text[taken] if found is None else found.group()
            if found is None:
                self._at(some)
            else:
                self._take(some)
            if self.is_broken:
                break
            if self.name is None:
                self._raw.append(some)
            taken += len(some)
        pieces: list[Piece] = []
        if self.name is not None and not self._is_announced:
            self._is_announced = True
            pieces.append(CallStart(self._index, self.name))
        if self._said:
            pieces.append(CallArguments(self._index, "".join(self._said)))
            self._said = []
        return taken, pieces

    @property
    def _run(self) -> re.Pattern[str]:
        """Characters within a value that change nothing."""
        if self._in_string:
            return NOTHING if self._is_escaped else IN_STRING
        return IN_VALUE if self._depth else NOTHING

    @property
    def raw(self) -> str:
        """What has been taken, for who shows it as text; of a call that has a name there is nothing to show."""
        return "".join(self._raw) if self.name is None else ""

    def _break(self) -> None:
        self.is_broken = True

    def _opening(self, char: str) -> None:
        if char == "{":
            self._at = self._before_key
        elif char not in SPACES:
            self._break()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._token = [char]
            self._in_string, self._is_escaped = True, False
            self._at = self._in_key
        elif char == "}":
            self._end()
        elif char not in SPACES and char != ",":
            self._break()

    def _in_key(self, char: str) -> None:
        self._token.append(char)
        if self._ends_string(char):
            self._key = str(loaded("".join(self._token)))
            self._at = self._before_colon

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._at = self._before_value
        elif char not in SPACES:
            self._break()

    def _before_value(self, char: str) -> None:
        if char in SPACES:
            return
        self._token, self._value = [], char
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._at = self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._in_string:
            is_last = self._ends_string(char) and self._depth == 0
        elif char == '"':
            self._in_string, self._is_escaped, is_last = True, False, False
        elif char in "{[":
            self._depth, is_last = self._depth + 1, False
        elif char in "}]" and self._depth:
            self._depth -= 1
            is_last = self._depth == 0
        elif self._depth == 0 and char in ",}]" + SPACES:  # behind a number or a name
            self._finish_value()
            self._at = self._before_key
            self._before_key(char)
            return
        else:
            is_last = False
        self._take(char)
        if is_last:
            self._finish_value()
            self._at = self._before_key

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    @property
    def _streams(self) -> bool:
        """Arguments go out as they come; those within a string are needed as a whole."""
        return self._key in ARGUMENTS and self._value == "{" and not self._has_arguments

    def _take(self, text: str) -> None:
        if self._streams and self.name is not None:
            self._said.append(text)
        else:
            self._token.append(text)

    def _finish_value(self) -> None:
        text = "".join(self._token)
        if self._key == "name" and self.name is None:
            name = loaded(text)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                self._break()
                return
            self.name = name
            self._said += self._held
        elif self._key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            inner = loaded(text) if self._value == '"' else text
            arguments = inner if isinstance(inner, str) else text
            (self._held if self.name is None else self._said).append(arguments)
            self.is_done = self._is_bare

    def _end(self) -> None:
        if self.name is None:
            self._break()
            return
        if not self._has_arguments:
            self._said.append("{}")
        self.is_done = True


def loaded(text: str) -> object:
    """None for what is not JSON. Half a pair of UTF-16 is not, which Python's own reader lets pass: nobody could write
    it again, nor tokenize it."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):  # of old versions the first is no ValueError
        return None


class ToolParser(ABC):
    """Takes an answer apart. A format says in its `_outside` where a call begins, and in `_behind` what is after one.

    Each of these looks at `_text`, takes from its front what is certain, and returns False when it needs more text.
    `is_last`: no more will come. `names`: of the functions that may be called, for formats without a mark before a
    call; None: any.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._text = ""
        self._pieces: list[Piece] = []
        self._call: CallReader | None = None
        self._state: Callable[[bool], bool] = self._outside
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """A long text in pieces, which change nothing: each step copies what is left."""
        pieces: list[Piece] = []
        for start in range(0, len(text), MOST_AT_ONCE):
            self._text += text[start : start + MOST_AT_ONCE]
            pieces += self._advance(is_last=False)
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, after the last text."""
        pieces = self._advance(is_last=True)
        rest = self._text if self._call is None else self._call.raw + self._text if self._call.name is None else ""
        self._text, self._call = "", None
        if rest.strip(SPACES) or (rest and not self._num_calls):
            pieces.append(Text(rest))
        return pieces

    def _advance(self, *, is_last: bool) -> list[Piece]:
        self._pieces = []
        while self._text and self._state(is_last):
            pass
        return self._pieces

    @abstractmethod
    def _outside(self, is_last: bool) -> bool: ...

    @abstractmethod
    def _behind(self, is_last: bool) -> bool: ...

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Text(text))

    def _begin_call(self, opening: str = "", name: str | None = None, names: Collection[str] | None = None) -> None:
        """`opening` is at the front of the text."""
        self._begin(CallObject(self._num_calls, opening, name, names), opening)

    def _begin(self, call: CallReader, opening: str) -> None:
        self._text = self._text.removeprefix(opening)
        self._call, self._state = call, self._inside

    def _inside(self, is_last: bool) -> bool:
        call = self._call
        assert call is not None
        taken, pieces = call.feed(self._text)
        self._text = self._text[taken:]
        self._pieces += pieces
        if call.is_broken:
            self._broken(call)
        elif call.is_done:
            self._num_calls += 1
            self._call = None
            self._state = self._behind
        return call.is_broken or call.is_done

    def _broken(self, call: CallReader) -> None:
        self._say(call.raw)
        self._num_calls += call.name is not None
        self._call = None
        self._state = self._outside

    def _text_up_to(self, *marks: str, is_last: bool) -> str:
        """Show text up to the first mark and the spaces before it, which are left, and returned with the mark when it
        is there."""
        at, mark = first_of(self._text, marks)
        if not mark and is_last:
            return ""
        before = self._text[:at]
        shown = len(before.rstrip(SPACES)) if mark else at - undecided(before, *marks)
        self._say(before[:shown])
        self._text = self._text[shown:]
        return before[shown:] + mark if mark else ""


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Where which of them is; the end of the text, and none."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(len(text), ""))


def begun(text: str, *marks: str) -> int:
    """How many characters at its end may be the beginning of a mark."""
    most = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def undecided(text: str, *marks: str) -> int:
    """The same, with the spaces before."""
    size = begun(text, *marks)
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip(SPACES))


def one_of(functions: Sequence[Function], write: Callable[[Function], str]) -> str:
    return "(" + " | ".join(write(function) for function in functions) + ")"


def json_call(function: Function, literal: Literal, key: str) -> str:
    """`{"name": "f", "arguments": {...}}` as a Lark expression."""
    head = '{"name": ' + json.dumps(function.name) + ', "' + key + '": '
    return f"{literal(head)} {function.arguments} {literal('}')}"


def as_json(text: str) -> str:
    """What of a text stands between the quotes of JSON, of any part of it the same."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def repeated(first: str, again: str, *, is_parallel: bool) -> str:
    """A Lark expression for one call, or some: `again` has what stands between two."""
    return f"{first} ({again}){{0,{MOST_CALLS - 1}}}" if is_parallel else first
