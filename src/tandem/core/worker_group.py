"""The workers of one replica run every batch together; here what each returns becomes the one outcome of the batch.

One of them samples and returns the tokens; all return the batch, when their part of it is done: only then is its KV
whole, may be read by a peer, or its pages used again. Workers return batches in launch order, each once, so outcomes
come in launch order too. Two workers that return different things have parted: nothing can be made of that, and the
replica ends.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import structs

from tandem.core.batch import BatchOutcome
from tandem.core.values import ShardId


class WorkersParted(Exception):
    """Workers of one replica do not run the same batches: a bug, or memory that lies."""


def combined(outcomes: Sequence[BatchOutcome]) -> BatchOutcome:
    """Of one batch, by all workers; their order does not matter. Takes as long as the slowest. Raises WorkersParted."""
    batches = {(outcome.batch, outcome.iteration) for outcome in outcomes}
    if len(batches) != 1:
        raise WorkersParted(
            f"the same batch is {' and '.join(str(i) for _, i in sorted(batches))} on different workers"
        )
    sampling = [
        outcome for outcome in outcomes if outcome.tokens or outcome.hashes or outcome.prompt_extras or outcome.vectors
    ]
    if len(sampling) > 1:
        raise WorkersParted(f"batch {outcomes[0].iteration} was sampled by {len(sampling)} workers")
    outcome = sampling[0] if sampling else outcomes[0]
    return structs.replace(outcome, duration_ns=max(other.duration_ns for other in outcomes))


class WorkerGroup:
    """What the workers of one replica have returned and others have not yet."""

    def __init__(self, num_shards: int) -> None:
        self._returned: list[deque[BatchOutcome]] = [deque() for _ in range(num_shards)]

    @property
    def behind(self) -> list[ShardId]:
        """Of which the oldest batch that has not returned waits."""
        return [ShardId(shard) for shard, waiting in enumerate(self._returned) if not waiting]

    def returned(self, shard: ShardId, outcome: BatchOutcome) -> BatchOutcome | None:
        """The outcome of the batch, when this was the last worker that it was waiting for. Raises WorkersParted."""
        if len(self._returned) == 1:
            return outcome
        self._returned[shard].append(outcome)
        if not all(self._returned):
            return None
        return combined([waiting.popleft() for waiting in self._returned])
