"""What `--prefill-delayer-queue-min-ratio auto` goes by: what a prompt batch costs however few tokens it has, and how
soon the next prompt may be expected. Integers, from what batches are reported to have taken and when prompts came.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from msgspec import Struct

from tandem.core.values import ZERO_NS, Nanos

REMEMBERED = 64  # prompt batches, and times between two prompts
KNOWN_FROM = 4, 8  # of them: fewer say nothing


class CostLine(Struct, frozen=True):
    fixed_ns: Nanos  # of a batch, however few tokens it has
    token_ns: Nanos  # and of each of them


@dataclass(slots=True)
class BatchCost:
    """A line through (tokens, time) of the last prompt batches, by least squares.

    Of a batch in which decode rows ride along it is what they wait for: what it takes longer than one without prompts.
    """

    num_batches: int = 0
    tokens: int = 0
    took_us: int = 0  # why not ns: products of these fit 63 bits in snapshots
    tokens_squared: int = 0
    tokens_took: int = 0
    least_us: int = 0  # that any of the last ones took; 0: not known
    decode_us: int = 0  # the last batch without prompts

    def learn(self, num_tokens: int, duration_ns: Nanos, *, num_decoding: int, is_mixed: bool) -> None:
        """A batch has returned. is_mixed: on this node decode rows ride along with prompts, wherever there are any."""
        took_us = duration_ns // 1000
        if not num_tokens:
            self.decode_us = took_us
        elif is_mixed == bool(num_decoding):
            self.add(num_tokens, self.of_prompts(took_us, num_decoding))

    def of_prompts(self, took_us: int, num_decoding: int) -> int:
        return max(0, took_us - self.decode_us) if num_decoding else took_us

    def add(self, num_tokens: int, took_us: int) -> None:
        if took_us:
            self.least_us = min(self.least_us or took_us, took_us)
        self.num_batches += 1
        self.tokens += num_tokens
        self.took_us += took_us
        self.tokens_squared += num_tokens * num_tokens
        self.tokens_took += num_tokens * took_us
        if self.num_batches >= REMEMBERED:
            self.num_batches //= 2
            self.tokens //= 2
            self.took_us //= 2
            self.tokens_squared //= 2
            self.tokens_took //= 2
            self.least_us = 0

    @property
    def fixed_ns(self) -> Nanos:
        """0: not known."""
        line = self.line()
        return line.fixed_ns if line is not None else ZERO_NS

    def line(self) -> CostLine | None:
        """None: not known, as with few batches, or when all have about as many tokens, and through one point goes any
        line."""
        spread = self.num_batches * self.tokens_squared - self.tokens * self.tokens
        if self.num_batches < KNOWN_FROM[0] or 100 * spread <= self.tokens * self.tokens:
            return None
        at_none = self.took_us * self.tokens_squared - self.tokens * self.tokens_took
        slope = self.num_batches * self.tokens_took - self.tokens * self.took_us
        # A first batch that waited for the disk tilts the line for long; but no batch takes less than its own cost.
        fixed_ns = max(0, 1000 * at_none // spread)
        if self.least_us:
            fixed_ns = min(fixed_ns, 1000 * self.least_us)
        return CostLine(Nanos(fixed_ns), Nanos(max(0, 1000 * slope // spread)))


def remember_arrivals(known: tuple[Nanos, ...], times: Iterable[Nanos]) -> tuple[Nanos, ...]:
    """When prompts came that could begin at once. `times`: of those who wait now, most of whom are known."""
    last = known[-1] if known else Nanos(-1)
    return (*known, *sorted(time for time in times if time > last))[-REMEMBERED - 1 :]


def next_prompt_ns(arrivals: tuple[Nanos, ...], now: Nanos) -> Nanos:
    """The mean time that is left until the next one, by the pauses that were longer than the present one.

    Where prompts come evenly or by chance that is the mean pause; where they come in bursts it is short within one,
    and long as soon as one is over. 0: none is expected, or not enough is known.
    """
    if len(arrivals) <= KNOWN_FROM[1]:
        return ZERO_NS
    silent = now - arrivals[-1]
    left = [pause - silent for before, after in pairwise(arrivals) if (pause := after - before) > silent]
    return Nanos(max(1, sum(left) // len(left))) if left else ZERO_NS
