"""Calls as Python writes them: `[f(a=1), g(b="x")]` is the whole answer (Llama 3.2 and 4); of OLMo 3 they stand one to
a line between `<function_calls>` tags, in any text. Nothing is run: values become JSON as they are read.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence

from tandem.server.api.tool_parsers.arguments import MOST_ARGUMENTS, SpelledCall, arguments_of, property_of
from tandem.server.api.tool_parsers.base import (
    SPACES,
    Function,
    Literal,
    Piece,
    ToolParser,
    one_of,
    repeated,
)
from tandem.server.api.tool_parsers.llama3 import Llama3Parser
from tandem.server.api.tool_parsers.python_value import PythonValue

OPENER, CLOSER = "<function_calls>", "</function_calls>"
NAME = re.compile(r"[^\s()\[\]{},;:=\"'<>]+")  # of a function or an argument


class PythonCall(SpelledCall):
    """It is one when its first value has begun, or when it ends. names: those that it may have; None: any."""

    def __init__(self, index: int, opening: str, names: Collection[str] | None) -> None:
        super().__init__(index, opening)
        self._names = names
        self._at: Callable[[str, int], int] = self._in_function
        self._word: list[str] = []  # a name that is being read
        self._function = ""
        self._head = ""  # of the JSON, before the value that begins now
        self._value = PythonValue()

    def feed(self, text: str) -> tuple[int, list[Piece]]:
        was_named = self.name is not None
        at = 0
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._at(text, at)
        if self.name is None:
            self._raw.append(text[:at])
        return at, self._pieces(was_named=was_named)

    # each takes the text and where in it to go on, and returns where the next one does

    def _in_function(self, text: str, at: int) -> int:
        if found := NAME.match(text, at):
            self._word.append(found.group())
            return found.end()
        if text[at] in SPACES and not self._word:
            return at + 1
        self._function = "".join(self._word)
        is_one = bool(self._function) and (self._names is None or self._function in self._names)
        if text[at] != "(" or not is_one:
            self.is_broken = True
            return at
        self._at = self._before_argument
        return at + 1

    def _before_argument(self, text: str, at: int) -> int:
        if text[at] in SPACES:
            return at + 1
        self._word, self._at = [], self._in_argument
        return self._close(at) if text[at] == ")" else at

    def _in_argument(self, text: str, at: int) -> int:
        if found := NAME.match(text, at):
            self._word.append(found.group())
            return found.end()
        if text[at] == "=" and self._word:
            name = json.dumps("".join(self._word), ensure_ascii=False)
            self._head = f"{', ' if self._has_arguments else '{'}{name}: "
            self._value, self._at = PythonValue(), self._in_value
        elif text[at] not in SPACES:
            self.is_broken = True
            return at
        return at + 1

    def _in_value(self, text: str, at: int) -> int:
        at = self._value.feed(text, at)
        if said := self._value.said():
            self._is(self._function)
            self._has_arguments = True
            self._said.append(self._head + said)
            self._head = ""
        self.is_broken = self._value.is_broken
        if self._value.is_done:
            self._at = self._behind_value
        return at

    def _behind_value(self, text: str, at: int) -> int:
        if text[at] == ")":
            return self._close(at)
        if text[at] == ",":
            self._at = self._before_argument
        elif text[at] not in SPACES:
            self.is_broken = True
            return at
        return at + 1

    def _close(self, at: int) -> int:
        self._is(self._function)
        self.is_done = True
        self._said.append("}" if self._has_arguments else "{}")
        return at + 1


class PythonicParser(Llama3Parser):
    def _outside(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith("["):
            self._next(self._text.removesuffix(text) + "[")
        elif text:
            self._state = self._plain
        return bool(text)

    def _next(self, opening: str) -> None:
        self._begin(PythonCall(self._num_calls, opening, self._names), opening)

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(","):
            self._next(self._text.removesuffix(text) + ",")
        elif text.startswith("]"):
            self._text, self._state = text.removeprefix("]"), self._closed
        elif text:
            self._state = self._plain
        return bool(text)

    def _closed(self, is_last: bool) -> bool:
        if is_text := bool(self._text.strip(SPACES)):
            self._state = self._plain
        return is_text


class Olmo3Parser(ToolParser):
    def _outside(self, is_last: bool) -> bool:
        if opening := self._text_up_to(OPENER, is_last=is_last):
            self._next(opening)
        return bool(opening)

    def _next(self, opening: str) -> None:
        self._begin(PythonCall(self._num_calls, opening, self._names), opening)

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(CLOSER):
            self._text, self._state = text.removeprefix(CLOSER), self._outside
        elif CLOSER.startswith(text) and not is_last:
            return False
        else:
            self._next("," if text.startswith(",") else "")
        return True


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """One or more calls as a Lark expression. Nothing opens them."""
    call = one_of(functions, lambda function: python_call(function, literal))
    some = repeated(call, f"{literal(', ')} {call}", is_parallel=is_parallel)
    return f"{literal('[')} {some} {literal(']')}"


def olmo3_calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """The same. `opened`: the mark before them, where it is there already."""
    call = one_of(functions, lambda function: python_call(function, literal))
    some = repeated(call, f"{literal(chr(10))} {call}", is_parallel=is_parallel)
    return f"{'' if opened else literal(OPENER)} {some} {literal(CLOSER)}"


def python_call(function: Function, literal: Literal) -> str:
    """Values as JSON writes them, which is read as well."""
    comma, rule = literal(", "), function.rules.rule
    first = behind = ""  # what may come from one argument on: as the first, or behind others
    for each in reversed(named := arguments_of(function, NAME)):
        said = rule(f"{literal(each.name + '=')} {function.value(each.schema)}")
        if each.is_required:
            first, behind = rule(f"{said} {behind}"), rule(f"{comma} {said} {behind}")
        else:
            first = rule(f"{said} {behind} | {first}" if first else f"({said} {behind})?")
            behind = rule(f"({comma} {said})? {behind}")
    if not named and function.schema.get("additionalProperties") is not False:
        said = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {function.value(property_of(function.schema, ''))}"
        first = rule(f"({said} ({comma} {said}){{0,{MOST_ARGUMENTS - 1}}})?")
    return rule(f"{literal(function.name + '(')} {first} {literal(')')}")
