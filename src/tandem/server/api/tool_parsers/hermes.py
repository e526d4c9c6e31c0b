"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another, in any text."""

from collections.abc import Sequence

from tandem.server.api.tool_parsers.base import SPACES, Function, Literal, ToolParser, json_call, one_of, repeated

OPENER, CLOSER = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def _outside(self, is_last: bool) -> bool:
        if opening := self._text_up_to(OPENER, is_last=is_last):
            self._begin_call(opening)
        return bool(opening)

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(CLOSER):
            self._text = text.removeprefix(CLOSER)
        elif CLOSER.startswith(text) and not is_last:
            return False
        self._state = self._outside
        return True


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """One or more calls as a Lark expression; `opened`: the mark of the first, where it is there already."""
    call = one_of(functions, lambda function: json_call(function, literal, "arguments"))
    rest = f"{literal(chr(10))} {call} {literal(chr(10))} {literal(CLOSER)}"
    whole = f"{literal(OPENER)} {rest}"
    return repeated(rest if opened else whole, f"{literal(chr(10))} {whole}", is_parallel=is_parallel)
