"""Text of others on its way into a line: on one line, visible, and no longer than a bound.

What clients, peers and servers name themselves ends up in log lines and in error lines of commands. A line feed in it
would begin a line that we never wrote, an escape sequence would have a terminal do things, and a megabyte would push
everything else out of sight.
"""

import reprlib

MAX_VALUE_CHARS = 512
MAX_LINE_CHARS = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 60


def visible(text: str, *, most: int = MAX_VALUE_CHARS) -> str:
    """`text` with what cannot be printed as Python writes it, such as `\\n`, and its middle left out beyond `most`."""
    shown = text if text.isprintable() else _escaped(text[: most + 1])
    if len(text) <= most and len(shown) <= most:
        return shown
    half = most // 2
    return f"{_escaped(text[:half])[:half]} ...({len(text)} characters)... {_escaped(text[-half:])[-half:]}"


def shown(value: object) -> str:
    """A foreign value for a message: its beginning, however long or deep it is."""
    return _short.repr(value)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
