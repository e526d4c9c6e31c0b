"""Mistral: `[TOOL_CALLS]`, then a list of `{"name": "f", "arguments": {...}}`; newer models: `f[ARGS]{...}`."""

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
ARGS = "[ARGS]"


class MistralParser(ToolParser):
    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__(names)
        self._is_list = False

    def _outside(self, is_last: bool) -> bool:
        if not self._text_up_to(OPENER, is_last):
            return False
        self._state = self._opened
        return True

    def _opened(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith("["):
            self._text = text[1:]
            self._is_list = True
            self._begin_call()
            return True
        name, brace, rest = text.partition("{")
        if not brace:
            return False
        self._is_list = False
        self._text = brace + rest
        self._begin_call(OPENER, name.strip(SPACES).removesuffix(ARGS) or None)
        return True

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if not text and not is_last:
            return False
        if self._is_list and text.startswith(","):
            self._text = text[1:]
            self._begin_call()
            return True
        self._text = text.removeprefix("]") if self._is_list else text
        self._state = self._outside
        return True


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, is_opened: bool = False) -> str:
    """One or more calls as a Lark expression; `is_opened`: the mark before them is there already."""
    call = one_of(functions, lambda function: json_call(function, literal, "arguments"))
    some = repeated(call, f"{literal(', ')} {call}", is_parallel=is_parallel)
    opener = "" if is_opened else f"{literal(OPENER)} "
    return f"{opener}{literal('[')} {some} {literal(']')}"
