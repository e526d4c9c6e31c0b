"""When a worker takes the tokens that another one samples: as late as it can.

All workers of a replica run the same batches in the same order, and one samples. Another one begins a batch whose
requests have no part in the batches before (prompts, another micro-batch of those who decode) without their tokens, and
takes these when it cannot go on without them. What a simulation puts in the place of an engine follows the same rules,
by this file.
"""

from collections import deque
from collections.abc import Set
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from tandem.batch_tables import BatchTables, Sequence, TokenSpan
from tandem.core.batch import BatchPlan

MOST_UNSETTLED = 8  # batches

S = TypeVar("S", bound=Sequence)


class TokenSource(Protocol):
    """A `parallel.Pipeline`, as far as it brings tokens."""

    def receive_tokens(self, count: int) -> Any:  # an array of int32
        """Raises WorkerGone."""
        ...


class RunBatch(Struct, Generic[S], frozen=True):
    """What a forward pass was about."""

    plan: BatchPlan
    spans: list[TokenSpan[S]]
    samplers: list[S]

    def touches(self, requests: Set[int]) -> bool:
        """Whether it samples a token for one of them."""
        return any(sequence.request in requests for sequence in self.samplers)

    def shares_decode_set(self, plan: BatchPlan) -> bool:
        """Whether the other plan changes or decodes the set that this batch decodes."""
        changes = plan.decodes or plan.join or plan.leave or plan.grow
        return self.plan.decodes and self.plan.micro_batch == plan.micro_batch and bool(changes)


class LateTokens(Generic[S]):
    """Of one worker. On the one that samples there are never any.

    What the source raises goes through. No tokens are lost by it: what raised may be asked again.
    """

    def __init__(self, tables: BatchTables[S], source: TokenSource) -> None:
        self._tables = tables
        self._source = source
        self._unsettled: deque[RunBatch[S]] = deque()  # whose tokens were not needed yet

    def wait_for(self, batch: RunBatch[S]) -> None:
        """It has run here, and another worker samples its tokens."""
        self._unsettled.append(batch)

    def before(self, plan: BatchPlan) -> None:
        """Take what this batch cannot begin without. Raises WorkerGone."""
        if not self._unsettled:
            return
        requests = {row.request for row in plan.rows} | {join.request for join in plan.join}
        wanted = [batch.shares_decode_set(plan) or batch.touches(requests) for batch in self._unsettled]
        self._settle(wanted)

    def before_forgetting(self, requests: Set[int]) -> None:
        """Take the tokens of those who are about to be dropped: their places tell whose the others are."""
        if self._unsettled:
            self._settle([batch.touches(requests) for batch in self._unsettled])

    def _settle(self, wanted: list[bool]) -> None:
        """Up to the last batch that is wanted; and one, where there are too many."""
        count = max((number for number, is_wanted in enumerate(wanted, 1) if is_wanted), default=0)
        for _ in range(max(count, len(wanted) + 1 - MOST_UNSETTLED)):
            batch = self._unsettled[0]
            tokens = self._source.receive_tokens(len(batch.samplers))
            self._unsettled.popleft()
            self._tables.append(batch.plan, batch.spans, tokens.tolist())
