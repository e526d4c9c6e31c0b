"""What a model or a server said, on its way to a terminal: characters only, nothing that the terminal would obey.

An escape sequence can set the window's title, write to the clipboard, hide lines or have the terminal type something
into the next shell. An answer comes in pieces, and a sequence may be torn over several of them, so the state is kept
from one to the next (ECMA-48, 8.3; xterm's control sequences).
"""

import re

ESCAPE = "\x1b"
# A sequence from its first character on, in its 7-bit form and in its 8-bit one (C1).
WHOLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\`-~])"  # two characters, or a few more
)
BEGUN = re.compile(  # the same, as far as a piece may end within it
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*\x1b?"
    r"|\x1b[ -/]*"
)
MOST_HELD = 4096  # characters: a sequence that does not end by then is text without its first character
# Controls but tab and line feed; what turns the direction of text around; halves of characters.
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class PlainText:
    """Of one answer. What cannot be decided yet is held until the next piece comes."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """The part of all that came so far that can be shown now and was not yet."""
        text, self._held = self._held + piece, ""
        shown: list[str] = []
        while text:
            start = _first_control(text)
            shown.append(text[:start])
            text = text[start:]
            if not text:
                break
            if (found := WHOLE.match(text)) is not None:
                text = text[found.end() :]
            elif (found := BEGUN.fullmatch(text)) is not None and len(text) <= MOST_HELD:
                self._held, text = text, ""
            else:
                text = text[1:]  # no sequence: the control itself goes
        return UNWANTED.sub("", "".join(shown))


def plain(text: str) -> str:
    """A whole text."""
    return PlainText().feed(text)


def _first_control(text: str) -> int:
    places = (text.find(char) for char in (ESCAPE, *"\x90\x98\x9b\x9d\x9e\x9f"))
    return min((place for place in places if place >= 0), default=len(text))
