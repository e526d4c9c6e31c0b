"""From a sample's tokens to the text its client may see: detokenized, and cut at what it wants to stop at.

Text that may turn out to be the beginning of a stop string is held back. Where the text is cut does not depend on how
the tokens were grouped: the stop string that is complete first wins, of two the one that began first.
"""

from collections.abc import Iterable, Sequence

from tandem.server.api.detokenizer import Detokenizer
from tandem.server.api.reasoning import Thinking, ThoughtCounter


class StopScanner:
    """Finds the first stop string in a growing text."""

    __slots__ = ("_held", "_keeps", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keeps: bool) -> None:
        self._stops = stops
        self._keeps = keeps
        self._held = ""
        self._longest = max(map(len, stops))
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain now; after a match, the text up to the cut, and nothing any more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        cut = self._first_match(text)
        if cut is not None:
            start, self.matched = cut
            self._held = ""
            return text[: start + len(self.matched)] if self._keeps else text[:start]
        self._held = self._possible_start(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> str:
        """The longest end of the text with which a stop string begins."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return tail
        return ""


class TextStream:
    """The text of one sample.

    A stop token is held back until the next token shows that it was not the last one. Until `min_tokens` tokens have
    come no stop string is looked for.
    """

    __slots__ = (
        "_detokenizer",
        "_keeps",
        "_min_tokens",
        "_scanner",
        "_stop_token",
        "_stop_tokens",
        "_thought",
        "matched",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        stop_tokens: frozenset[int],
        keeps_stop: bool,
        min_tokens: int = 0,
        thinking: Thinking = Thinking.NEVER,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_tokens = stop_tokens
        self._keeps = keeps_stop
        self._min_tokens = min_tokens
        self._scanner = StopScanner(stops, keeps=keeps_stop) if stops else None
        self._thought = ThoughtCounter(is_inside=thinking is Thinking.INSIDE) if thinking else None
        self._stop_token: int | None = None
        self.matched: str | int | None = None  # the stop string, or after `finish` the stop token
        self.num_tokens = 0  # that belong to the sample; those after a stop string do not

    @property
    def holds_stop_token(self) -> bool:
        """The last token was one."""
        return self._stop_token is not None

    @property
    def num_thought_tokens(self) -> int:
        return 0 if self._thought is None else self._thought.num_tokens

    def feed(self, tokens: Iterable[int]) -> str:
        """Take tokens in order; text that is certain now. After a stop string has matched the rest is ignored."""
        text = ""
        for token in tokens:
            if self.matched is not None:
                break
            self.num_tokens += 1
            if self._stop_token is not None:
                text += self._show(self._stop_token)
                self._stop_token = None
            if token in self._stop_tokens:
                self._stop_token = token
            else:
                text += self._show(token)
        return text

    def finish(self, *, is_stopped: bool) -> str:
        """The rest of the text. `is_stopped`: the node ended it at a stop token or on our word, not for its length."""
        text = ""
        if self._stop_token is not None and self.matched is None:
            if is_stopped:
                self.matched = self._stop_token
            if not is_stopped or self._keeps:
                text = self._show(self._stop_token)
        if isinstance(self.matched, str):
            return text
        text += self._scan(self._detokenizer.finish())
        return text if self._scanner is None else text + self._scanner.finish()

    def _show(self, token: int) -> str:
        text = self._detokenizer.add(token)
        if self._thought is not None:
            self._thought.feed(text, self.num_tokens)
        return self._scan(text)

    def _scan(self, text: str) -> str:
        if self._scanner is None or not text or self.num_tokens < self._min_tokens:
            return text
        text = self._scanner.feed(text)
        if self._scanner.matched is not None:
            self.matched = self._scanner.matched
        return text
