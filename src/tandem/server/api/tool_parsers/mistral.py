"""Mistral: `[TOOL_CALLS]`, then a list of `{"name": "f", "arguments": {...}}`; newer models: `f[ARGS]{...}`, some of
which give an id of their own before the arguments, `f[CALL_ID]123456789[ARGS]{...}`.
"""

import re
from collections.abc import Collection, Sequence

from tandem.server.api.tool_parsers.base import (
    SPACES,
    Function,
    Literal,
    ToolParser,
    json_call,
    one_of,
    repeated,
)

OPENER = "[TOOL_CALLS]"
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
LIST = "["
BREAK = re.compile(r"[\t\n\r]")  # which no name has


class MistralParser(ToolParser):
    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__(names)
        self._is_list = False
        self._opening = ""

    def _outside(self, is_last: bool) -> bool:
        if opening := self._text_up_to(OPENER, is_last=is_last):
            self._opening, self._state = opening, self._opened
        return bool(opening)

    def _opened(self, is_last: bool) -> bool:
        text = self._text.removeprefix(self._opening)
        head, brace, _ = text.partition("{")
        name = head.strip(SPACES)
        self._is_list = name == LIST
        if not self._is_list and (name.startswith(LIST) or BREAK.search(name)):
            self._broken_off()
        elif self._is_list and brace:
            self._begin_call(self._opening + head)
        elif brace:
            name, _, _ = name.removesuffix(ARGS).partition(CALL_ID)
            if " " in name and name not in (self._names or ()):
                self._broken_off()
            else:
                self._begin_call(self._opening + head, name or None)
        return self._state != self._opened

    def _broken_off(self) -> None:
        """What the mark is before is no call; another mark may be in it."""
        self._say(self._opening)
        self._text = self._text.removeprefix(self._opening)
        self._state = self._outside

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if not text and not is_last:
            return False
        if self._is_list and text.startswith(","):
            self._begin_call(self._text.removesuffix(text) + ",")
            return True
        self._text = text.removeprefix("]") if self._is_list else text
        self._state = self._outside
        return True


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """One or more calls as a Lark expression; `opened`: the mark before them, where it is there already."""
    call = one_of(functions, lambda function: json_call(function, literal, "arguments"))
    some = repeated(call, f"{literal(', ')} {call}", is_parallel=is_parallel)
    opener = "" if opened else f"{literal(OPENER)} "
    return f"{opener}{literal('[')} {some} {literal(']')}"
