"""Llama 3: the answer is a call, `{"name": "f", "parameters": {...}}`, or several with semicolons between; or text.

Nothing need be before a call, so an answer in JSON looks like one: it is one where it names a function that there is.
"""

from collections.abc import Sequence

from tandem.server.api.tool_parsers.base import (
    SPACES,
    CallReader,
    Function,
    Literal,
    ToolParser,
    json_call,
    one_of,
    repeated,
)

MARK = "<|python_tag|>"


class Llama3Parser(ToolParser):
    def _outside(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(MARK):
            self._begin_call(self._text.removesuffix(text) + MARK)
        elif text.startswith("{"):
            self._begin_call(names=self._names)
        elif MARK.startswith(text) and not is_last:
            return False
        else:
            self._state = self._plain
        return True

    def _plain(self, is_last: bool) -> bool:
        self._say(self._text)
        self._text = ""
        return False

    def _broken(self, call: CallReader) -> None:
        super()._broken(call)
        self._state = self._plain

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if not text:
            return False
        if text.startswith(";"):
            self._begin_call(self._text.removesuffix(text) + ";")
        else:
            self._state = self._plain
        return True


def calls(functions: Sequence[Function], literal: Literal, *, is_parallel: bool, opened: str = "") -> str:
    """One or more calls as a Lark expression. Nothing opens them."""
    call = one_of(functions, lambda function: json_call(function, literal, "parameters"))
    return repeated(call, f"{literal('; ')} {call}", is_parallel=is_parallel)
