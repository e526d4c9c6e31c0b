"""What a model thinks before it answers, `<think>...</think>`, apart from the answer.

A prompt may end inside: templates of some models open the thought themselves. Then the answer begins within it.
"""

from collections.abc import Sequence
from enum import StrEnum

from tandem.server.api.tool_parsers.base import SPACES, Piece, Reasoning, Text, undecided

OPENER, CLOSER = "<think>", "</think>"


class Thinking(StrEnum):
    """Whether an answer begins with a thought."""

    NEVER = ""
    MAYBE = "maybe"  # as it likes
    INSIDE = "inside"  # the prompt has opened one


def parser_for(name: str, templates: Sequence[str]) -> str:
    """Of `--reasoning-parser`. `auto`: one where the chat templates know the marks."""
    if name != "auto":
        return name
    return "qwen3" if any(CLOSER in template for template in templates) else "none"


def begins_inside(parser: str, prompt: str) -> bool:
    tail = prompt.rstrip()
    return tail.endswith(OPENER) or (parser == "deepseek-r1" and not tail.endswith(CLOSER))


def is_over(prompt: str) -> bool:
    """The prompt has thought already, or says that there is nothing to think."""
    return prompt.rstrip().endswith(CLOSER)


class ReasoningSplitter:
    """A thought, then text. Put together the same, whatever the pieces in which it comes."""

    def __init__(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside  # from the first token on
        self._text = ""
        self._pieces: list[Piece] = []
        self._state = self._before
        self.has_begun = False  # there is a thought

    @property
    def is_over(self) -> bool:
        """What comes now is text."""
        return self._state in (self._gap, self._outside)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        self._pieces = []
        while self._text and self._state():
            pass
        return self._pieces

    def finish(self) -> list[Piece]:
        """The rest, after the last text."""
        rest, self._text = self._text, ""
        if not rest or self._state == self._gap:
            return []
        is_thought = self._state == self._inside or (self._state == self._before and self._is_inside)
        return [Reasoning(rest) if is_thought else Text(rest)]

    # each takes from the front of the text, and returns whether the next state should look at it

    def _before(self) -> bool:
        text = self._text.lstrip(SPACES)
        if text.startswith(OPENER):
            self._text = text.removeprefix(OPENER)
            self._state, self.has_begun = self._opened, True
        elif OPENER.startswith(text):
            return False
        else:
            self._state, self.has_begun = (self._opened, True) if self._is_inside else (self._outside, False)
        return True

    def _opened(self) -> bool:
        self._text = self._text.lstrip(SPACES)
        if self._text:
            self._state = self._inside
        return bool(self._text)

    def _inside(self) -> bool:
        thought, found, after = self._text.partition(CLOSER)
        if not found:
            shown = len(self._text) - undecided(self._text, CLOSER)
            thought, after = self._text[:shown], self._text[shown:]
        else:
            thought = thought.rstrip(SPACES)
            self._state = self._gap
        if thought:
            self._pieces.append(Reasoning(thought))
        self._text = after
        return bool(found)

    def _gap(self) -> bool:
        self._text = self._text.lstrip(SPACES)
        if self._text:
            self._state = self._outside
        return bool(self._text)

    def _outside(self) -> bool:
        self._pieces.append(Text(self._text))
        self._text = ""
        return False


class ThoughtCounter:
    """How many tokens of an answer are its thought, marks and all. Given a token at a time, it is always the same."""

    __slots__ = ("_splitter", "num_tokens")

    def __init__(self, *, is_inside: bool) -> None:
        self._splitter = ReasoningSplitter(is_inside=is_inside)
        self.num_tokens = 0

    def feed(self, text: str, num_tokens: int) -> None:
        """num_tokens: of the answer so far, with the one whose text this is."""
        if self._splitter.is_over:
            return
        self._splitter.feed(text)
        if self._splitter.has_begun:
            self.num_tokens = num_tokens
