"""The workers of one simulated replica: each runs the node's batches over its own part of the KV, in its own time.

They are told the same things in the same order. What each returns is made the one outcome of the batch by the product's
own `WorkerGroup`. The first one samples for all: another one begins a batch when it has the tokens that it cannot begin
without, by the product's own `LateTokens`, and runs ahead with all others, as stages do with the chunks of a prompt.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.kv_parts import KvShard
from tandem.core.values import PageId, RequestId, ShardId
from tandem.core.worker_group import WorkerGroup, WorkersParted
from tandem.simulator.actors.executor import Executor, MemoryGuard, ShardMemory, TokensToCome, cell_numbers
from tandem.simulator.oracle import Script, Violation

Order = BatchPlan | tuple[RequestId, ...]  # a batch, or requests to forget


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    shard: ShardId
    executor: Executor
    random: Random  # how long its batches take
    work: deque[Order] = field(default_factory=deque)
    is_working: bool = False
    held: BatchPlan | None = None  # would have returned, but for a hang

    @property
    def is_idle(self) -> bool:
        return not (self.work or self.is_working)


class Workers:
    """Of one life; in order of shards."""

    def __init__(
        self,
        kv: Sequence[KvShard],
        *,
        num_pages: int,
        page_size: int,
        guard: MemoryGuard,
        seed: str,
        block_tokens: int = 1,
        window_tokens: int = 0,
    ) -> None:
        """kv: what each of them has"""
        self.all = [
            SimulatedWorker(
                one.shard,
                Executor(
                    num_pages,
                    page_size,
                    one.shard,
                    guard,
                    cell_numbers(one),
                    block_tokens=block_tokens,
                    window_tokens=window_tokens,
                ),
                Random(f"worker {one.shard} {seed}"),
            )
            for one in kv
        ]
        self.sampling.executor.send = [worker.executor.sent for worker in self.all[1:]]
        self._group = WorkerGroup(len(kv))

    def __iter__(self) -> Iterator[SimulatedWorker]:
        return iter(self.all)

    @property
    def sampling(self) -> SimulatedWorker:
        return self.all[0]

    @property
    def memories(self) -> list[ShardMemory]:
        return [worker.executor.memory for worker in self.all]

    @property
    def is_idle(self) -> bool:
        return all(worker.is_idle for worker in self.all)

    def add(self, request: RequestId, script: Script, prompt_hash: bytes) -> None:
        for worker in self.all:
            worker.executor.add(request, script, prompt_hash)

    def tell(self, order: Order) -> None:
        for worker in self.all:
            worker.work.append(order)

    def free_windows(self, pages: Sequence[PageId]) -> None:
        """At once, as a worker's reader does, whatever batch is under way."""
        for worker in self.all:
            worker.executor.memory.free_windows(pages)

    def next_batch(self, worker: SimulatedWorker) -> BatchPlan | None:
        """What it begins now. Requests are forgotten in their turn between batches, as on a worker's one socket."""
        try:
            while worker.work and not worker.is_working:
                order = worker.work[0]
                if isinstance(order, BatchPlan):
                    worker.executor.begin(order)
                    worker.work.popleft()
                    worker.is_working = True
                    return order
                worker.executor.forget(order)
                worker.work.popleft()
        except TokensToCome:
            pass  # the order waits for them
        return None

    def returned(self, worker: SimulatedWorker, outcome: BatchOutcome) -> BatchOutcome | None:
        """The outcome of the batch when this was the last worker that it was waiting for."""
        worker.is_working = False
        try:
            return self._group.returned(worker.shard, outcome)
        except WorkersParted as error:
            raise Violation("S24", str(error)) from error
