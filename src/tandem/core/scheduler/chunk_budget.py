"""How many prompt tokens the next batch takes: a chunk, but while others decode only what their tokens can wait for.

A chunk that a GPU computes in milliseconds takes a large model on a CPU seconds, and whoever decodes stands still
meanwhile. So what is launched of prompts between two decode batches, or rides with one, is bounded by the time that it
takes beside them: by what a prompt token has cost on this node. Until that is known a batch is as large as it may be.
Fewer than `min_tokens` are not worth a batch. Where a batch takes more than half of the time however few it has, there
is one between two decode batches, and fewer than cost as much again are not worth it: others would wait as long, for a
fraction of the rate.
"""

from dataclasses import dataclass, field

from tandem.core.scheduler.prompt_costs import BatchCost, CostLine
from tandem.core.settings import PrefillStall
from tandem.core.values import ZERO_NS, Nanos

REMEMBERED = 4096  # prompt tokens, at most
RIDES_BETWEEN = 32  # batches with prompts and decode rows, at most, between two without prompts


@dataclass(slots=True)
class ChunkBudget:
    """Sums of tokens and times, not a mean of batches: ends of cached prompts are many and say little."""

    num_measured: int = 0  # tokens
    took_ns: Nanos = ZERO_NS
    num_launched: int = 0  # prompt tokens since everybody who decodes had a turn
    num_rides: int = 0  # batches of both since the last one without prompts ...
    num_decoding: int = 0  # ... and the decode rows of that one
    cost: BatchCost = field(default_factory=BatchCost)
    line: CostLine | None = None  # as it was known last: batches of one size, as a budget makes them, do not tell

    @property
    def token_ns(self) -> Nanos:
        """What a prompt token costs; 0: not known yet."""
        return Nanos(self.took_ns // self.num_measured) if self.num_measured else ZERO_NS

    def learn(self, num_tokens: int, duration_ns: Nanos, *, num_decoding: int = 0, is_mixed: bool = False) -> None:
        """A batch has returned. is_mixed: as `BatchCost` has it"""
        self.cost.learn(num_tokens, duration_ns, num_decoding=num_decoding, is_mixed=is_mixed)
        took_us = self.cost.of_prompts(duration_ns // 1000, num_decoding)
        if not num_tokens or not took_us:
            return
        self.line = self.cost.line() or self.line
        self.num_measured += num_tokens
        self.took_ns = Nanos(self.took_ns + 1000 * took_us)
        if self.num_measured > REMEMBERED:
            self.num_measured //= 2
            self.took_ns = Nanos(self.took_ns // 2)

    def launch(self, num_tokens: int, *, num_decoding: int, all_had_turn: bool) -> None:
        """all_had_turn: with this batch everybody who decodes has had one since the last batch of prompts"""
        self.num_launched = 0 if all_had_turn else self.num_launched + num_tokens
        if num_decoding and num_tokens:
            self.num_rides += 1
        elif num_decoding:
            self.num_rides, self.num_decoding = 0, num_decoding

    def is_stale(self, num_decoding: int) -> bool:
        """It is time for a batch without prompts: what those in it take longer is measured by the last one."""
        known = self.num_decoding
        return self.num_rides >= RIDES_BETWEEN or (self.num_rides > 0 and not known <= 2 * num_decoding <= 4 * known)

    def tokens_while_others_wait(
        self, stall: PrefillStall | None, most: int, page_size: int, *, num_decoding: int
    ) -> int:
        """0: it is the turn of those who decode."""
        if stall is None or not self.token_ns:
            return most
        if self.is_stale(num_decoding):
            return 0
        if self.dear_batches(stall) is not None:
            return 0 if self.num_launched else min(most, self.tokens_in_turn(stall, page_size))
        allowed = self.tokens_in_turn(stall, page_size) - self.num_launched
        return min(most, allowed) if allowed >= page_size else 0

    def largest_while_others_wait(self, stall: PrefillStall | None, most: int, page_size: int) -> int:
        """What a batch has that is the only one in its turn."""
        return most if stall is None or not self.token_ns else min(most, self.tokens_in_turn(stall, page_size))

    def tokens_in_turn(self, stall: PrefillStall, page_size: int) -> int:
        least = max(stall.min_tokens, page_size)
        if (line := self.dear_batches(stall)) is not None:
            return max(line.fixed_ns // max(1, line.token_ns), least)
        return max(stall.max_ns // self.token_ns, least)

    def dear_batches(self, stall: PrefillStall) -> CostLine | None:
        """What they cost, if two would take longer than is allowed, however few tokens they had."""
        line = self.line
        return line if line is not None and 2 * line.fixed_ns > stall.max_ns else None
