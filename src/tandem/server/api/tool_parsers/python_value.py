"""A literal of Python, or of JSON, which becomes JSON as it is read: never run, and as deep as it likes.

Tuples become lists; keys are strings.
"""

import re
from collections.abc import Callable

from tandem.server.api.tool_parsers.base import SPACES, as_json

CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
WORD = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
CLOSERS = {"[": "]", "(": ")", "{": "}"}
RUNS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
ESCAPES |= {char: char for char in "\\'\"/"}  # the last is JSON's
DIGITS = {"x": 2, "u": 4, "U": 8}  # of an escape


class PythonValue:
    """Each state takes the text and where in it to go on, and returns where the next one does."""

    def __init__(self) -> None:
        self._at: Callable[[str, int], int] = self._before
        self._open: list[str] = []  # what closes all that is open
        self._may_close = False
        self._comma = ""  # before the next element
        self._is_key = self._is_triple = False
        self._quote = ""
        self._num_quotes = 0  # that may end a string of three
        self._held: list[str] = []  # of a word, or of an escape
        self._said: list[str] = []
        self.is_done = self.is_broken = False

    def feed(self, text: str, at: int) -> int:
        """Where in the text it ends: behind the value, or where that shows to be none. A number needs a character
        behind it, and so does an empty string."""
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._at(text, at)
        return at

    def said(self) -> str:
        """The JSON that has been read since the last call."""
        found = "".join(self._said)
        self._said = []
        return found

    def _before(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            return at + 1
        if self._may_close and char == self._open[-1]:
            return self._close(at)
        self._said.append(self._comma)
        if char in CLOSERS:
            self._said.append("{" if char == "{" else "[")
            self._open.append(CLOSERS[char])
            self._expect_element()
            return at + 1
        if char in RUNS:
            return self._begin_string(char, at)
        self.is_broken = WORD.match(char) is None
        self._at = self._word
        return at

    def _expect_element(self, comma: str = "") -> None:
        self._comma, self._may_close = comma, True
        self._at = self._before_key if self._open[-1] == "}" else self._before

    def _before_key(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACES:
            return at + 1
        if char == "}":
            return self._close(at)
        if char not in RUNS:
            self.is_broken = True
            return at
        self._said.append(self._comma)
        self._is_key = True
        return self._begin_string(char, at)

    def _before_colon(self, text: str, at: int) -> int:
        char = text[at]
        if char == ":":
            self._said.append(": ")
            self._comma, self._may_close, self._at = "", False, self._before
        elif char not in SPACES:
            self.is_broken = True
            return at
        return at + 1

    def _close(self, at: int) -> int:
        self._said.append("}" if self._open.pop() == "}" else "]")
        self._finish()
        return at + 1

    def _finish(self) -> None:
        self.is_done = not self._open
        self._at = self._after

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char == ",":
            self._expect_element(", ")
        elif char == self._open[-1]:
            return self._close(at)
        elif char not in SPACES:
            self.is_broken = True
            return at
        return at + 1

    def _word(self, text: str, at: int) -> int:
        if found := WORD.match(text, at):
            self._held.append(found.group())
            return found.end()
        word = "".join(self._held)
        self._held = []
        number = re.sub(r"\.(?!\d)", ".0", re.sub(r"(?<!\d)\.", "0.", word.replace("_", "").removeprefix("+")))
        if word in CONSTANTS:
            self._said.append(CONSTANTS[word])
        elif NUMBER.fullmatch(number):
            self._said.append(number)
        else:
            self.is_broken = True
            return at
        self._finish()
        return at

    # strings

    def _begin_string(self, quote: str, at: int) -> int:
        self._said.append('"')
        self._quote, self._is_triple, self._at = quote, False, self._opened
        return at + 1

    def _opened(self, text: str, at: int) -> int:
        is_empty = text[at] == self._quote
        self._at = self._opened_twice if is_empty else self._string
        return at + is_empty

    def _opened_twice(self, text: str, at: int) -> int:
        self._is_triple = text[at] == self._quote
        if not self._is_triple:
            self._end_string()
            return at
        self._at = self._string
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if found := RUNS[self._quote].match(text, at):
            self._said.append(as_json(found.group()))
            return found.end()
        if text[at] == "\\":
            self._at = self._escape
        elif self._is_triple:
            self._num_quotes, self._at = 1, self._closing
        else:
            self._end_string()
        return at + 1

    def _closing(self, text: str, at: int) -> int:
        if text[at] != self._quote:
            self._said.append(as_json(self._quote * self._num_quotes))
            self._at = self._string
            return at
        self._num_quotes += 1
        if self._num_quotes == 3:
            self._end_string()
        return at + 1

    def _end_string(self) -> None:
        self._said.append('"')
        if self._is_key:
            self._is_key, self._at = False, self._before_colon
        else:
            self._finish()

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char in DIGITS:
            self._held, self._at = [char], self._digits
        else:
            self._said.append(as_json(ESCAPES.get(char, "\\" + char)))
            self._at = self._string
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        if is_digit := text[at] in "0123456789abcdefABCDEF":
            self._held.append(text[at])
        if not is_digit or len(self._held) > DIGITS[self._held[0]]:
            self._said.append(escaped("".join(self._held), is_whole=is_digit))
            self._held, self._at = [], self._string
        return at + is_digit


def escaped(digits: str, *, is_whole: bool) -> str:
    """JSON for `x41` and the like. Half a pair of UTF-16 stays an escape: the other half may be the next one."""
    code = int(digits[1:], 16) if is_whole else 0x110000
    if code > 0x10FFFF:
        return as_json("\\" + digits)
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else as_json(chr(code))


def json_of_literal(text: str) -> str | None:
    """None where it is none."""
    value = PythonValue()
    end = value.feed(text + " ", 0)
    return value.said() if value.is_done and not text[end:].strip(SPACES) else None
