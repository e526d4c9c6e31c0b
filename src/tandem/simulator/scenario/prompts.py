"""Prompts in the words of a scenario: which story they tell, and where they leave one story for another.

    prompt 3          the token at index i is that of story 3
    prompt 1:16/3     the first 16 tokens are those of story 1, the rest is story 3's: they share a prefix
    prompt 1:24/3     the same where story 1 has a prompt of 20: the next turn, after 4 tokens of its answer

Tokens of two stories differ at every index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.simulator.model import FIRST_TOKEN
from tandem.simulator.oracle import Script

STRIDE = 100  # between the first tokens of two stories
MAX_CANDIDATES = 200  # stories that are tried for one whose answer is as long


@dataclass(slots=True)
class Stories:
    """What the prompts of a scenario say, in the order in which they are read."""

    scripts: dict[int, Script] = field(default_factory=dict)

    def script(self, words: str, *, prompt_len: int, max_new_tokens: int, eos_one_in: int) -> Script:
        """Raises ValueError for words that are no prompt. The last story is the own one."""
        tokens: list[int] = []
        *shared, own = words.split("/")
        for part in shared:
            story, _, stop = part.partition(":")
            tokens += self._tokens(int(story), len(tokens), min(int(stop), prompt_len))
        tokens += _own_tokens(int(own), len(tokens), prompt_len)
        script = Script(tuple(tokens), max_new_tokens, eos_one_in)
        self.scripts.setdefault(int(own), script)
        return script

    def _tokens(self, story: int, start: int, stop: int) -> list[int]:
        """Of a story that was told before, with its answer; otherwise as if it were told."""
        if story not in self.scripts:
            return _own_tokens(story, start, stop)
        script = self.scripts[story]
        return [script.token(index) for index in range(start, stop)]


@dataclass(slots=True)
class Namer:
    """The way back: words for recorded prompts, so that they share what they shared, and answers end where they did."""

    told: list[tuple[str, Script]] = field(default_factory=list)
    stories: Stories = field(default_factory=Stories)
    last_story: int = 0

    def words(self, script: Script) -> tuple[int, str]:
        """(its story, its prompt in words)"""
        shared, words = max(
            ((common_length(script.prompt, earlier.tokens), words) for words, earlier in self.told),
            default=(0, ""),
            key=lambda found: found[0],
        )
        beginning = "" if shared == 0 else f"{_cut(words, shared)}/"
        candidates = range(self.last_story + 1, self.last_story + 1 + MAX_CANDIDATES)
        self.last_story = next(
            (story for story in candidates if self._ends_alike(script, beginning, story)), candidates[0]
        )
        prompt = f"{beginning}{self.last_story}"
        self.told.append((prompt, script))
        self._told_as(script, prompt, self.stories)
        return self.last_story, prompt

    def _ends_alike(self, script: Script, beginning: str, story: int) -> bool:
        """Where an answer ends is up to its tokens, which are other ones now."""
        told = self._told_as(script, f"{beginning}{story}", Stories(dict(self.stories.scripts)))
        return told.output_length() == script.output_length()

    def _told_as(self, script: Script, prompt: str, stories: Stories) -> Script:
        return stories.script(
            prompt,
            prompt_len=len(script.prompt),
            max_new_tokens=script.max_new_tokens,
            eos_one_in=script.eos_one_in,
        )


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _cut(words: str, stop: int) -> str:
    """The first `stop` tokens of a prompt: whatever lies behind is left out."""
    kept: list[str] = []
    for part in words.split("/"):
        story, _, end = part.partition(":")
        if not end or int(end) >= stop:
            return "/".join([*kept, f"{story}:{stop}"])
        kept.append(part)
    raise AssertionError("the own story has no end")


def _own_tokens(story: int, start: int, stop: int) -> list[int]:
    return [FIRST_TOKEN + STRIDE * story + index for index in range(start, stop)]
