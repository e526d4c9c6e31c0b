"""Qwen3-Coder: `<tool_call>`, `<function=f>`, and each argument as text in a `<parameter=name>` of its own.

What is between the tags is not JSON: it becomes what the function's schema says. The model forgets the first tag now
and then, so that `<function=f>` begins a call, too, of a function that there is.
"""

import json
import re
from collections.abc import Sequence

from tandem.server.api.tool_parsers import hermes
from tandem.server.api.tool_parsers.arguments import (
    MOST_ARGUMENTS,
    Schema,
    SpelledCall,
    arguments_of,
    bound_by,
    json_of,
    property_of,
    texts_of,
    types_of,
)
from tandem.server.api.tool_parsers.base import (
    SPACES,
    Function,
    Literal,
    Piece,
    Tools,
    as_json,
    begun,
    first_of,
    one_of,
    repeated,
)

FUNCTION, PARAMETER, FUNCTION_END, PARAMETER_END = "<function=", "<parameter=", "</function>", "</parameter>"
# Of a value. The last is of a model that forgets to close it.
ENDS = ("\n" + PARAMETER_END, PARAMETER_END, f"\n{FUNCTION_END}\n{hermes.CLOSER}")
NAME = re.compile(r"[^\x00-\x1f<>]{1,256}")
ANY_NAME = rf"/{PARAMETER}[^\x00-\x1f<>]{{1,64}}>\n/"


class TaggedCall(SpelledCall):
    """tools: those that a call may name where no tag is before `opening`; None: any."""

    def __init__(self, index: int, opening: str, tools: Tools | None) -> None:
        super().__init__(index, opening)
        self._tools = tools
        self._is_bare = opening.endswith(FUNCTION)
        self._text = ""
        self._at = self._in_name if self._is_bare else self._before_name
        self._types: set[str] = set()  # of a value
        self._value: list[str] | None = None  # one that is needed as a whole

    def feed(self, text: str) -> tuple[int, list[Piece]]:
        was_named = self.name is not None
        self._text = text
        while self._text and not self.is_done and not self.is_broken and self._at():
            pass
        return len(text) - len(self._text), self._pieces(was_named=was_named)

    # each takes from the front of the text, and returns False when it needs more

    def _before_name(self) -> bool:
        text = self._text.lstrip(SPACES)
        self._raw.append(self._text.removesuffix(text))
        self._text = text
        if text.startswith(FUNCTION):
            self._raw.append(FUNCTION)
            self._text, self._at = text.removeprefix(FUNCTION), self._in_name
            return True
        self.is_broken = not FUNCTION.startswith(text)
        return False

    def _in_name(self) -> bool:
        name, found, rest = self._text.partition(">")
        is_one = NAME.fullmatch(name) is not None
        if found and is_one and (not self._is_bare or self._tools is None or name in self._tools):
            self._is(name)
            self._text, self._at = rest, self._between
            return True
        self.is_broken = bool(found or (name and not is_one))
        return False

    def _between(self) -> bool:
        self._text = self._text.lstrip(SPACES)
        if self._text.startswith(PARAMETER):
            name, found, rest = self._text.removeprefix(PARAMETER).partition(">")
            is_one = NAME.fullmatch(name) is not None
            if found and is_one:
                self._begin_value(name)
                self._text, self._at = rest, self._before_value
                return True
            self.is_broken = bool(found or (name and not is_one))
            return False
        if any(mark.startswith(self._text) and mark != self._text for mark in (PARAMETER, FUNCTION_END)):
            return False
        self._text = self._text.removeprefix(FUNCTION_END)
        self._said.append("}" if self._has_arguments else "{}")
        self.is_done = True
        return False

    def _begin_value(self, name: str) -> None:
        schema = (self._tools or {}).get(self.name or "", {})
        self._types = types_of(property_of(schema, name))
        is_text = self._types <= {"string"}
        self._value = None if is_text else []
        head = f"{', ' if self._has_arguments else '{'}{json.dumps(name, ensure_ascii=False)}: "
        self._said.append(head + '"' * is_text)
        self._has_arguments = True

    def _before_value(self) -> bool:
        self._text = self._text.removeprefix("\n")
        self._at = self._in_value
        return True

    def _in_value(self) -> bool:
        at, end = first_of(self._text, ENDS)
        if not end:
            at -= begun(self._text, *ENDS)
        self._take(self._text[:at])
        self._text = self._text[at:]
        if not end:
            return False
        self._text = self._text.removeprefix(end if end.endswith(PARAMETER_END) else "")
        self._said.append('"' if self._value is None else json_of("".join(self._value), self._types))
        self._at = self._between
        return True

    def _take(self, text: str) -> None:
        if self._value is None:
            self._said.append(as_json(text))
        else:
            self._value.append(text)


class Qwen3CoderParser(hermes.HermesParser):
    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._tools = tools

    def _outside(self, is_last: bool) -> bool:
        if opening := self._text_up_to(hermes.OPENER, FUNCTION, is_last=is_last):
            self._begin(TaggedCall(self._num_calls, opening, self._tools), opening)
        return bool(opening)


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """One or more calls as a Lark expression. `opened`: the tag that is there already."""

    def behind(head: str) -> str:
        return one_of(functions, lambda each: f"{literal(f'{head}{each.name}>{chr(10)}')} {inner(each, literal)}")

    head = "\n" + FUNCTION
    first = {"": hermes.OPENER + head, hermes.OPENER: head, FUNCTION: ""}[opened]
    return repeated(behind(first), behind(f"\n{hermes.OPENER}{head}"), is_parallel=is_parallel)


def inner(function: Function, literal: Literal) -> str:
    """What is between the tags of a function, and the last of them."""
    said: list[str] = []
    for each in arguments_of(function, NAME):
        one = f"{literal(f'{PARAMETER}{each.name}>{chr(10)}')} {value(function, each.schema, literal)}"
        said.append(one if each.is_required else f"({one})?")
    if not said and function.schema.get("additionalProperties") is not False:
        said.append(f"({ANY_NAME} {value(function, property_of(function.schema, ''), literal)}){{0,{MOST_ARGUMENTS}}}")
    return function.rules.rule(f"{' '.join(said)} {literal(f'{FUNCTION_END}{chr(10)}{hermes.CLOSER}')}")


def value(function: Function, schema: Schema, literal: Literal) -> str:
    """With the tag behind it."""
    end = f"\n{PARAMETER_END}\n"
    types = types_of(schema)
    if types and "string" not in types:
        return f"{function.value(schema)} {literal(end)}"
    if (texts := texts_of(schema)) is not None:
        return f"({' | '.join(literal(text + end) for text in texts)})"
    bounds = bound_by(schema) | types - {"string", "null"}
    if function.is_strict and bounds:
        raise function.refused(f"{min(bounds)!r} of a string cannot be followed in this format of calls")
    return f"{function.rules.up_to(PARAMETER_END)} {literal(chr(10))}"
