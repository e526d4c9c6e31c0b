"""Calls in one list, `[{"name": "f", "arguments": {...}}, ...]`, behind a mark: `<|tool_call|>`, which Phi-4-mini
closes and Granite 3 does not, or the `functools` of other templates for Phi-4-mini. Each is read, whichever is meant.
"""

import re
from collections.abc import Collection, Sequence

from tandem.server.api.tool_parsers.base import SPACES, Function, Literal, ToolParser, json_call, one_of, repeated

MARK, CLOSER, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["
OPENERS = (MARK, FUNCTOOLS)
END = re.compile(rf"[{SPACES}]*\]?(?:[{SPACES}]*{re.escape(CLOSER)})?")


class JsonListParser(ToolParser):
    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__(names)
        self._opening = ""

    def _outside(self, is_last: bool) -> bool:
        if opening := self._text_up_to(*OPENERS, is_last=is_last):
            self._opening, self._state = opening, self._opened
        return bool(opening)

    def _opened(self, is_last: bool) -> bool:
        """A list, or a call alone."""
        text = self._text.removeprefix(self._opening)
        inner = text.lstrip(SPACES)
        if not inner:
            return False
        begins = inner.startswith("[") and not self._opening.endswith(FUNCTOOLS)
        self._begin_call(self._opening + text.removesuffix(inner) + "[" * begins)
        return True

    def _behind(self, is_last: bool) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(","):
            self._begin_call(self._text.removesuffix(text) + ",")
            return True
        rest = text.removeprefix("]").lstrip(SPACES)
        if rest != CLOSER and CLOSER.startswith(rest) and not is_last:
            return False
        end = END.match(self._text)
        self._text = self._text[end.end() if end else 0 :]
        self._state = self._outside
        return True


def calls(
    functions: Sequence[Function],
    literal: Literal,
    *,
    is_parallel: bool,
    opened: str = "",
    mark: str = MARK,
    closer: str = "",
) -> str:
    """One or more calls as a Lark expression. `opened`: the mark before them, where it is there already; else it is
    `mark`. `closer`: what ends them."""
    call = one_of(functions, lambda function: json_call(function, literal, "arguments"))
    some = repeated(call, f"{literal(', ')} {call}", is_parallel=is_parallel)
    head = mark.removesuffix("[") + "[" if not opened else "[" if opened == MARK else ""
    tail = "]" + (closer if (opened or mark) == MARK else "")
    return f"{literal(head) if head else ''} {some} {literal(tail)}"
