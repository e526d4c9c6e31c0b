"""What is right: the tokens that one engine alone would give, and what every page has to hold.

An oracle knows the prompt of each request and computes its `Script` from nothing but that. It sees no scheduler, no
pages and no faults, so whatever was retried, retracted, moved or lost, the answer is the same.
"""

from dataclasses import dataclass, field

from tandem.simulator.model import EOS_TOKEN, MASK, kv_content, sample


class Violation(Exception):
    """An invariant does not hold. Ends the seed."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


def told_of(kv_sum: int) -> bytes:
    """In place of a log-probability. kv_sum: of all positions up to the one behind which it is made."""
    return kv_sum.to_bytes(8, "little")


@dataclass(slots=True)
class Script:
    """Tokens and KV of one prompt and its continuation, computed as far as somebody asks."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_one_in: int
    logprobs_from: int | None = None  # the client wants to know of prompt tokens behind this one
    wants_vector: bool = False  # it ends with its prompt
    tokens: list[int] = field(default_factory=list)  # prompt and output; the continuation ignores end-of-sequence
    contents: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0])  # sums[n]: KV of [0, n)
    num_output: int | None = None  # length of the answer once it is known

    def __post_init__(self) -> None:
        self.tokens.extend(self.prompt)

    def token(self, index: int) -> int:
        """Token at `index` of prompt and output together."""
        while len(self.tokens) <= index:
            position = len(self.tokens) - 1
            kv_sum = self.kv_sum(position + 1)
            self.tokens.append(self.sampled(kv_sum=kv_sum, position=position))
        return self.tokens[index]

    def sampled(self, *, kv_sum: int, position: int) -> int:
        """The token that follows `position` where the KV of [0, position] has this sum, be it right or wrong."""
        return sample(kv_sum=kv_sum, position=position, eos_one_in=self.eos_one_in)

    def kv_sum(self, length: int) -> int:
        """Sum of the KV of positions [0, length)."""
        if length < len(self.sums):
            return self.sums[length]
        before = self.sums[-1]
        for position in range(len(self.contents), length):
            token = self.tokens[position] if position < len(self.tokens) else self.token(position)
            content = kv_content(sum_before=before, token=token, position=position)
            before = (before + content) & MASK
            self.contents.append(content)
            self.sums.append(before)
        return before

    def kv(self, tokens: list[int], start: int, sum_before: int) -> tuple[list[int], list[int]]:
        """The KV of `tokens` from position `start` on, and the sum behind each of them, by what came before: `tokens`
        and `sum_before` may be wrong. Where they are right it is known, or will be wanted."""
        stop = start + len(tokens)
        if sum_before == self.kv_sum(start):
            self.kv_sum(stop)
            if tokens == self.tokens[start:stop]:
                return self.contents[start:stop], self.sums[start + 1 : stop + 1]
        contents: list[int] = []
        sums = [sum_before]
        for position, token in enumerate(tokens, start):
            contents.append(kv_content(sum_before=sums[-1], token=token, position=position))
            sums.append((sums[-1] + contents[-1]) & MASK)
        return contents, sums[1:]

    def page(self, index: int, *, page_size: int, length: int) -> list[int]:
        """What the slots of page `index` hold when [0, length) is computed; may be shorter than a page."""
        stop = min((index + 1) * page_size, length)
        self.kv_sum(stop)
        return self.contents[index * page_size : stop]

    def prompt_extras(self) -> bytes:
        """What is told of the prompt: in place of log-probabilities what was read where they are made."""
        if self.logprobs_from is None:
            return b""
        return b"".join(told_of(self.kv_sum(stop)) for stop in range(self.logprobs_from + 1, len(self.prompt)))

    def vector(self) -> bytes:
        """In place of an embedding what was read of the whole prompt."""
        return told_of(self.kv_sum(len(self.prompt)))

    def output_token(self, index: int) -> int:
        return self.token(len(self.prompt) + index)

    def output_length(self) -> int:
        """How many tokens the whole answer has, end-of-sequence included."""
        if self.num_output is None:
            answer = range(self.max_new_tokens)
            ends = (index + 1 for index in answer if self.output_token(index) == EOS_TOKEN)
            self.num_output = next(ends, self.max_new_tokens)
        return self.num_output

    def behind(self, num_said: int) -> "Script":
        """What is left of it once so many tokens were said elsewhere: they are computed as a part of the prompt."""
        said = tuple(self.output_token(index) for index in range(num_said))
        return Script(self.prompt + said, self.max_new_tokens - num_said, self.eos_one_in)
