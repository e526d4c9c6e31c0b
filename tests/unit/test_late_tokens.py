"""When a worker takes the tokens that another one samples: not before it needs them, and in order."""

from array import array
from collections import defaultdict

import numpy as np

from tandem.batch_tables import BatchTables, PlainDecodeSet, Sequence
from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId
from tandem.engine.late_tokens import MOST_UNSETTLED, LateTokens, RunBatch

PROMPT = 16  # tokens, one page


class Worker:
    """One that does not sample: another one's tokens are 100, 101 and so on."""

    def __init__(self) -> None:
        self.tables: BatchTables[Sequence] = BatchTables(defaultdict(PlainDecodeSet))
        self.late = LateTokens(self.tables, self)
        self.num_taken = 0

    def receive_tokens(self, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        first, self.num_taken = self.num_taken, self.num_taken + count
        return np.arange(100 + first, 100 + self.num_taken, dtype=np.int32)

    def add(self, *requests: int) -> None:
        for request in requests:
            name, prompt = RequestId(request), array("i", range(PROMPT))
            self.tables.add(Sequence(request=name, prompt_len=PROMPT, page_size=PROMPT, tokens=prompt, prompt_hash=b""))

    def run(
        self, *rows: Row, decodes: bool = False, join: tuple[Join, ...] = (), leave: tuple[int, ...] = (), of: int = 0
    ) -> None:
        """of: the micro-batch"""
        gone = tuple(map(RequestId, leave))
        plan = BatchPlan(BatchId(1), 1, BatchKind.PREFILL, rows, decodes, micro_batch=of, join=join, leave=gone)
        self.late.before(plan)
        spans = self.tables.apply(plan)
        self.late.wait_for(RunBatch(plan, spans, self.tables.sampling(plan, spans)))

    def forget(self, *requests: int) -> None:
        self.late.before_forgetting(set(requests))
        self.tables.forget(requests)

    def said(self, request: int) -> list[int]:
        return self.tables.sequences[RequestId(request)].tokens[PROMPT:].tolist()


def prompt(request: int) -> Row:
    return Row(RequestId(request), 0, PROMPT, 0, (PageId(request),), samples=True)


def join(request: int) -> Join:
    return Join(RequestId(request), 1, (PageId(8 + request),))


def test_prompts_of_other_requests_run_ahead_of_the_tokens_before_them() -> None:
    worker = Worker()
    worker.add(1, 2)
    worker.run(prompt(1))
    worker.run(prompt(2))
    assert worker.num_taken == 0
    worker.late.before_forgetting({1, 2})
    assert (worker.said(1), worker.said(2)) == ([100], [101])


def test_a_prompt_that_runs_again_waits_for_the_token_of_its_first_time() -> None:
    worker = Worker()
    worker.add(1, 2)
    worker.run(prompt(1))
    worker.run(prompt(2))
    worker.run(prompt(1))
    assert worker.num_taken == 1, "and not that of the other"
    worker.late.before_forgetting({1})
    assert worker.said(1) == [102], "the second one in the place of the first"


def test_whoever_decodes_waits_for_the_token_before() -> None:
    worker = Worker()
    worker.add(1)
    worker.run(prompt(1))
    worker.run(decodes=True, join=(join(1),))
    assert worker.num_taken == 1
    worker.run(decodes=True)
    assert worker.said(1) == [100, 101]


def test_no_more_than_some_batches_run_ahead() -> None:
    worker = Worker()
    requests = range(1, MOST_UNSETTLED + 2)
    worker.add(*requests)
    for request in requests:
        assert worker.num_taken == 0
        worker.run(prompt(request))
    assert worker.num_taken == 1, "of the oldest"


def test_a_micro_batch_runs_ahead_of_the_tokens_of_another_one() -> None:
    worker = Worker()
    worker.add(1, 2)
    worker.run(prompt(1))
    worker.run(prompt(2))
    worker.run(decodes=True, join=(join(1),), of=0)
    worker.run(decodes=True, join=(join(2),), of=1)
    assert worker.num_taken == 2, "of the prompts"
    worker.run(decodes=True, of=0)
    assert worker.num_taken == 3, "its own last token, and not the one that the other waits for"
    worker.run(decodes=True, of=1)
    assert (worker.said(1), worker.said(2)) == ([100, 102], [101, 103])


def test_who_is_forgotten_has_its_tokens_taken_first_and_others_run_ahead() -> None:
    worker = Worker()
    worker.add(1, 2, 3)
    for request in (1, 2, 3):
        worker.run(prompt(request))
    worker.run(decodes=True, join=(join(1), join(2)), of=0)
    worker.run(decodes=True, join=(join(3),), of=1)
    worker.forget(1)
    assert worker.num_taken == 5, "two of the batch that it was in"
    worker.run(decodes=True, of=0)
    worker.run(decodes=True, of=1)
    assert (worker.said(2), worker.said(3)) == ([101, 104], [102, 105]), "each its own"
