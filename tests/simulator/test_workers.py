"""Simulated workers of one replica: each in its own time, and together one."""

import msgspec
import pytest

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Join, Row
from tandem.core.kv_parts import KvGrid, KvShard
from tandem.core.values import BatchId, Cut, PageId, RequestId, ShardId
from tandem.simulator.actors.workers import SimulatedWorker, Workers
from tandem.simulator.model import MASK, cell_weight, content_of
from tandem.simulator.oracle import Script, Violation


def plan(number: int, *, decodes: bool = False, of: int = 0) -> BatchPlan:
    kind = BatchKind.DECODE if decodes else BatchKind.PREFILL
    return BatchPlan(BatchId(number), number, kind, decodes=decodes, micro_batch=of)


TWO = Cut(tp_size=2)


def two_workers() -> tuple[Workers, SimulatedWorker, SimulatedWorker]:
    kv = [KvShard(KvGrid(1, 2), TWO, shard, cell_bytes=1) for shard in TWO.shards]
    workers = Workers(kv, num_pages=4, page_size=2, guard=lambda *_: None, seed="1")
    return workers, *workers.all


def run(workers: Workers, worker: SimulatedWorker) -> BatchOutcome | None:
    """Its next batch, begun and ended."""
    begun = workers.next_batch(worker)
    assert begun is not None
    return workers.returned(worker, worker.executor.run(begun))


def test_a_batch_has_returned_when_the_last_worker_has_returned_it() -> None:
    workers, first, second = two_workers()
    for number in (1, 2):
        workers.tell(plan(number))
    assert run(workers, first) is None
    assert run(workers, first) is None
    assert [run(workers, second), run(workers, second)] == [
        BatchOutcome(BatchId(number), number, b"", b"") for number in (1, 2)
    ]
    assert workers.is_idle


def prompt(number: int, request: int) -> BatchPlan:
    rows = (Row(RequestId(request), 0, 2, 0, (PageId(2 * request - 2),), samples=True),)
    return BatchPlan(BatchId(number), number, BatchKind.PREFILL, rows)


def joined(number: int, request: int, *, of: int) -> BatchPlan:
    join = (Join(RequestId(request), 1, (PageId(2 * request - 1),)),)
    return msgspec.structs.replace(plan(number, decodes=True, of=of), join=join)


def test_who_does_not_sample_runs_ahead_and_waits_for_the_tokens_that_a_batch_begins_with() -> None:
    """By the rules of `engine/late_tokens.py`."""
    workers, first, second = two_workers()
    for request in (1, 2):
        workers.add(RequestId(request), Script(prompt=(10, 10 + request), max_new_tokens=4, eos_one_in=0), bytes(16))
    last = plan(5, decodes=True)
    for order in (prompt(1, 1), prompt(2, 2), joined(3, 1, of=0), joined(4, 2, of=1), last, (RequestId(2),)):
        workers.tell(order)
    for _ in range(2):
        run(workers, second)
    assert workers.next_batch(second) is None, "the prompt of who joins has not been sampled"
    for _ in range(2):
        run(workers, first)
    for _ in range(2):
        run(workers, second)
    assert workers.next_batch(second) is None, "the batch before of that micro-batch has not been sampled"
    run(workers, first)
    run(workers, second)
    assert workers.next_batch(second) is None
    assert not second.is_idle, "who is to be forgotten has a token to come"
    run(workers, first)
    assert workers.next_batch(second) is None
    assert second.is_idle


def test_all_workers_have_the_tokens_of_the_one_that_samples() -> None:
    workers, first, second = two_workers()
    script = Script(prompt=(10, 11), max_new_tokens=4, eos_one_in=0)
    workers.add(RequestId(1), script, bytes(16))
    for order in (prompt(1, 1), joined(2, 1, of=0)):
        workers.tell(order)
        for worker in (first, second):
            run(workers, worker)
    tokens = [worker.executor.requests[RequestId(1)].tokens.tolist() for worker in (first, second)]
    assert tokens == [[script.token(at) for at in range(length)] for length in (4, 3)], "the last one is not needed yet"


def test_workers_that_return_different_batches_are_a_violation() -> None:
    workers, first, second = two_workers()
    workers.returned(first, BatchOutcome(BatchId(1), 1, b"", b""))
    with pytest.raises(Violation, match="S24"):
        workers.returned(second, BatchOutcome(BatchId(2), 2, b"", b""))


@pytest.mark.parametrize("shard", range(4))
def test_every_shard_finds_the_content_in_its_own_part_and_in_no_other(shard: int) -> None:
    content = 0x9E3779B97F4A7C15
    assert content_of(content * cell_weight(shard), ShardId(shard)) == content
    assert content_of(content * cell_weight(shard + 1) & MASK, ShardId(shard)) != content
