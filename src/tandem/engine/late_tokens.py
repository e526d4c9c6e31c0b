"""When a worker takes the tokens that another one samples: as late as it can.

All workers of a replica run the same batches in the same order, and one samples. Another one begins a batch of prompts
that had no part in the batches before without their tokens, and takes these when it cannot go on without them. What a
simulation puts in the place of an engine follows the same rules, by this file.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tandem.batch_tables import BatchTables, Sequence, Span
from tandem.core.batch import BatchPlan

MOST_UNSETTLED = 8  # batches

S = TypeVar("S", bound=Sequence)


class TokenSource(Protocol):
    """A `parallel.Pipeline`, as far as it brings tokens."""

    def receive_tokens(self, count: int) -> Any:  # an array of int32
        """Raises WorkerGone."""
        ...


@dataclass(frozen=True, slots=True)
class RunBatch(Generic[S]):
    """What a forward pass was about."""

    spans: list[Span[S]]
    samplers: list[S]
    decodes: bool


class LateTokens(Generic[S]):
    """Of one worker. On the one that samples there are never any."""

    def __init__(self, tables: BatchTables[S], source: TokenSource) -> None:
        self._tables = tables
        self._source = source
        self._unsettled: deque[RunBatch[S]] = deque()  # whose tokens were not needed yet

    def wait_for(self, batch: RunBatch[S]) -> None:
        """It has run here, and another worker samples its tokens."""
        self._unsettled.append(batch)

    def before(self, plan: BatchPlan) -> None:
        """Take what this batch cannot begin without. Raises WorkerGone."""
        if not self._runs_ahead(plan):
            self.settle()

    def settle(self) -> None:
        """Take the tokens of all batches that have run. Raises WorkerGone."""
        while self._unsettled:
            batch = self._unsettled.popleft()
            tokens = self._source.receive_tokens(len(batch.samplers))
            self._tables.finish(batch.spans, tokens.tolist(), decodes=batch.decodes)

    def _runs_ahead(self, plan: BatchPlan) -> bool:
        """Whether this batch can begin without the tokens of those before it."""
        if plan.decodes or plan.join or plan.leave or plan.grow or len(self._unsettled) == MOST_UNSETTLED:
            return False
        sampled = {sequence.request for batch in self._unsettled for sequence in batch.samplers}
        return not any(row.request in sampled for row in plan.rows)
