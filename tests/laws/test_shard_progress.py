"""Laws of the verdict: the order and number of reports change nothing, and the failure of one shard is everybody's."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.disagg.shard_progress import (
    Failed,
    Landed,
    Pending,
    ShardReport,
    TransferFailure,
    Verdict,
    join,
    record_report,
    verdict,
)
from tandem.core.values import Cause, ShardId

A, B, C = ShardId(0), ShardId(1), ShardId(2)
PAGES = 8
CAUSES = (Cause.PEER_LOST, Cause.CORRUPT_PAGES, Cause.LEASE_EXPIRED)

Said = list[tuple[ShardId, ShardReport]]
failures = st.builds(TransferFailure, st.sampled_from(CAUSES), st.sampled_from(["", "no answer", "digest differs"]))


def landed(pages: int, *, attempt: int = 1) -> ShardReport:
    return ShardReport(attempt, pages)


def failed(cause: Cause, detail: str = "", *, attempt: int = 1) -> ShardReport:
    return ShardReport(attempt, failure=TransferFailure(cause, detail))


def reports(*, last_attempt: int = 1, may_fail: bool = True) -> st.SearchStrategy[ShardReport]:
    attempts = st.integers(1, last_attempt)
    return st.builds(ShardReport, attempts, st.integers(0, PAGES), st.none() | failures if may_fail else st.none())


def said(*, last_attempt: int = 1, may_fail: bool = True) -> st.SearchStrategy[Said]:
    """What shards say, in the order in which the node hears it."""
    report = reports(last_attempt=last_attempt, may_fail=may_fail)
    return st.lists(st.tuples(st.sampled_from([A, B, C]), report), max_size=12)


wanted = st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, PAGES), min_size=1)


def rank(found: Verdict) -> tuple[int, int]:
    """Pending(n) < Landed, Pending(n) < Failed."""
    return (0, found.landed) if isinstance(found, Pending) else (1, 0)


# --- the examples ----------------------------------------------------------------------------------------------------


def test_a_failure_on_any_shard_fails_the_transfer() -> None:
    heard = {A: landed(8), B: landed(8), C: failed(Cause.PEER_LOST)}
    assert verdict({A: 8, B: 8, C: 8}, heard) == Failed(Cause.PEER_LOST, shard=C)


def test_nothing_has_landed_before_the_slowest_shard() -> None:
    assert verdict({A: 8, B: 8}, {A: landed(8), B: landed(7)}) == Pending(7)
    assert verdict({A: 8, B: 8}, {A: landed(8)}) == Pending(0)
    assert verdict({A: 8, B: 8}, {A: landed(8), B: landed(8)}) == Landed()


def test_totals_may_differ_per_shard() -> None:
    assert verdict({A: 8, B: 2}, {A: landed(4), B: landed(2)}) == Pending(4)
    assert verdict({A: 8, B: 2, C: 0}, {A: landed(8), B: landed(2)}) == Landed()


def test_a_shard_that_wants_nothing_can_still_fail() -> None:
    assert verdict({A: 8, B: 0}, {A: landed(8), B: failed(Cause.PEER_LOST)}) == Failed(Cause.PEER_LOST, B)


def test_of_several_failures_the_lowest_shard_is_named() -> None:
    heard = {C: failed(Cause.PEER_LOST), B: failed(Cause.CORRUPT_PAGES, "page 3")}
    assert verdict({A: 8, B: 8, C: 8}, heard) == Failed(Cause.CORRUPT_PAGES, B, "page 3")


def test_a_transfer_without_shards_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="at least one shard"):
        verdict({}, {})


def test_reports_of_different_attempts_cannot_be_joined() -> None:
    with pytest.raises(AssertionError, match="different attempts"):
        join(landed(1), landed(2, attempt=2))


def fold(said: Said, *, attempt: int) -> dict[ShardId, ShardReport]:
    """As an `Arrival` does: one report per shard, and other attempts are none of its affair."""
    reports: dict[ShardId, ShardReport] = {}
    for shard, report in said:
        if report.attempt == attempt:
            record_report(reports, shard, report)
    return reports


# --- the laws --------------------------------------------------------------------------------------------------------


@given(reports(), reports(), reports())
def test_a_join_is_commutative_associative_and_idempotent(
    left: ShardReport, middle: ShardReport, right: ShardReport
) -> None:
    assert join(left, right) == join(right, left)
    assert join(join(left, middle), right) == join(left, join(middle, right))
    assert join(left, left) == left


@given(said(last_attempt=3), st.data())
def test_the_order_of_reports_is_irrelevant(heard: Said, data: st.DataObject) -> None:
    other = data.draw(st.permutations(heard))
    assert fold(heard, attempt=2) == fold(other, attempt=2)


@given(said(), st.data())
def test_duplicates_are_irrelevant(heard: Said, data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(heard), max_size=6)) if heard else []
    assert fold(heard + again, attempt=1) == fold(heard, attempt=1)


@given(said(last_attempt=3))
def test_reports_of_another_attempt_are_ignored(heard: Said) -> None:
    own = [(shard, report) for shard, report in heard if report.attempt == 2]
    assert fold(heard, attempt=2) == fold(own, attempt=2)


@given(wanted, said())
def test_a_failure_anywhere_is_a_failure_and_without_one_there_is_none(
    expected: dict[ShardId, int], heard: Said
) -> None:
    found = verdict(expected, fold(heard, attempt=1))
    guilty = {shard for shard, report in heard if report.failure is not None and shard in expected}
    assert isinstance(found, Failed) == bool(guilty)
    if isinstance(found, Failed):
        assert found.shard == min(guilty)
        assert (found.shard, TransferFailure(found.cause, found.detail)) in [
            (shard, report.failure) for shard, report in heard
        ]


@given(wanted, said(may_fail=False))
def test_nothing_lands_before_every_shard_has_all_that_it_wants(expected: dict[ShardId, int], heard: Said) -> None:
    marks = {shard: max([0, *(report.landed for who, report in heard if who == shard)]) for shard in expected}
    found = verdict(expected, fold(heard, attempt=1))
    assert (found == Landed()) == all(marks[shard] >= expected[shard] for shard in expected)
    if isinstance(found, Pending):
        assert all(marks[shard] >= min(found.landed, expected[shard]) for shard in expected)


@given(wanted, said())
def test_more_reports_never_take_a_verdict_back(expected: dict[ShardId, int], heard: Said) -> None:
    """A verdict only rises, but for a shard that said it had all and then fails: the transfer latches against that."""
    found = [verdict(expected, fold(heard[:count], attempt=1)) for count in range(len(heard) + 1)]
    for before, after in itertools.pairwise(found):
        assert rank(before) <= rank(after)
        assert not isinstance(before, Failed) or isinstance(after, Failed)


@given(wanted, said(), st.data())
def test_what_a_shard_is_called_does_not_matter(expected: dict[ShardId, int], heard: Said, data: st.DataObject) -> None:
    """A pipeline stage or a context-parallel part is not a special case."""
    names = dict(zip([A, B, C], data.draw(st.permutations([A, B, C])), strict=True))
    renamed = [(names[shard], report) for shard, report in heard]
    before = verdict(expected, fold(heard, attempt=1))
    after = verdict({names[shard]: pages for shard, pages in expected.items()}, fold(renamed, attempt=1))
    assert type(before) is type(after)
    if isinstance(before, Pending):
        assert before == after


@given(wanted, said(), reports())
def test_shards_that_are_not_expected_do_not_count(
    expected: dict[ShardId, int], heard: Said, stranger: ShardReport
) -> None:
    known = verdict(expected, fold(heard, attempt=1))
    assert verdict(expected, fold([*heard, (ShardId(9), stranger)], attempt=1)) == known
