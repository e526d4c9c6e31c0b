"""A page of the simulator has a state, as state-space layers have one: what loses it, or changes it twice, shows."""

import pytest

from tandem.core.batch import BatchKind, BatchPlan, Row
from tandem.core.values import BatchId, PageId, RequestId, ShardId
from tandem.simulator.actors.executor import Executor
from tandem.simulator.oracle import Script, Violation

SIZE, REQUEST = 4, RequestId(1)
PAGES = (PageId(0), PageId(1), PageId(2))


@pytest.fixture
def worker() -> Executor:
    executor = Executor(8, SIZE, ShardId(0), guard=lambda *_: None)
    executor.add(REQUEST, Script(prompt=tuple(range(10, 20)), max_new_tokens=4, eos_one_in=0), bytes(16))
    return executor


def run(worker: Executor, start: int, stop: int) -> None:
    number = worker.last_iteration + 1
    row = Row(REQUEST, start, stop, 0, PAGES, stop == 10)
    worker.run(BatchPlan(BatchId(number), number, BatchKind.PREFILL, rows=(row,)))


def test_chunks_go_on_where_the_one_before_stopped(worker: Executor) -> None:
    for start, stop in ((0, 4), (4, 8), (8, 9), (9, 10)):
        run(worker, start, stop)


def test_a_token_that_was_computed_already_is_not_computed_into_the_same_state_again(worker: Executor) -> None:
    run(worker, 0, 4)
    run(worker, 4, 7)
    with pytest.raises(Violation, match=r"KV or state of \[0, 6\)"):
        run(worker, 6, 8)


def test_a_page_that_was_filled_is_gone_behind_as_often_as_one_likes(worker: Executor) -> None:
    run(worker, 0, 7)
    run(worker, 4, 10)


def test_a_page_that_was_copied_without_its_state_shows(worker: Executor) -> None:
    run(worker, 0, 4)
    contents = worker.memory.copy_out(PAGES[0])
    worker.memory.copy_in(PAGES[0], [*contents[:SIZE], 0])
    with pytest.raises(Violation, match=r"KV or state of \[0, 4\)"):
        run(worker, 4, 8)
