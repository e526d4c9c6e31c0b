"""Transfers that fail on purpose: one draw per transfer and shard, the same for the same seed, on either half."""

from tandem.core.events import BatchFailed, Event, PagesDigested, PagesLanded, TransferDrained, TransferFailed
from tandem.core.values import BatchId, Cause, RequestId, ShardId
from tandem.server.node.injection import FailedTransfers

SHARD = ShardId(0)


def landed(request: int, pages: int = 1, *, attempt: int = 1, shard: int = 0) -> PagesLanded:
    return PagesLanded(RequestId(request), attempt, ShardId(shard), pages)


def digested(request: int, first_page: int = 0) -> PagesDigested:
    return PagesDigested(RequestId(request), 1, SHARD, first_page, 1, (b"digest..",), b"secret")


def is_failed(failures: FailedTransfers, event: Event) -> bool:
    return isinstance(failures.instead_of(event), TransferFailed)


def failed_of(failures: FailedTransfers, count: int = 2000) -> list[int]:
    return [request for request in range(count) if is_failed(failures, landed(request))]


def test_without_a_probability_every_report_is_passed_on() -> None:
    failures = FailedTransfers(0.0)
    for event in (landed(1), digested(1)):
        assert failures.instead_of(event) is event


def test_with_certainty_both_halves_hear_of_a_failure_instead() -> None:
    failures = FailedTransfers(1.0)
    expected = TransferFailed(RequestId(1), 1, SHARD, Cause.TRANSFER_FAILED, "injected")
    assert [failures.instead_of(landed(1)), failures.instead_of(digested(1))] == [expected] * 2


def test_what_is_no_report_of_a_transfer_is_never_changed() -> None:
    failures = FailedTransfers(1.0)
    for event in (TransferDrained(RequestId(1), 1, SHARD), BatchFailed(BatchId(1), Cause.ENGINE_FAILED, "")):
        assert failures.instead_of(event) is event


def test_the_probability_is_the_share_of_transfers_whatever_the_number_of_reports() -> None:
    failures = FailedTransfers(0.3, seed=5)
    chosen = failed_of(failures)
    assert 0.27 < len(chosen) / 2000 < 0.33
    many = [request for request in range(2000) if any(is_failed(failures, landed(request, n)) for n in range(1, 20))]
    assert many == chosen


def test_the_same_seed_chooses_the_same_transfers_and_another_one_others() -> None:
    assert failed_of(FailedTransfers(0.3, seed=5)) == failed_of(FailedTransfers(0.3, seed=5))
    assert failed_of(FailedTransfers(0.3, seed=5)) != failed_of(FailedTransfers(0.3, seed=6))


def test_without_a_seed_one_is_drawn() -> None:
    seeds = {FailedTransfers(0.0).seed for _ in range(5)}
    assert 0 not in seeds
    assert len(seeds) > 1


def test_attempts_shards_and_halves_are_drawn_for_separately() -> None:
    failures = FailedTransfers(0.5, seed=5)
    requests = range(200)
    usual = [is_failed(failures, landed(request)) for request in requests]
    assert usual != [is_failed(failures, landed(request, attempt=2)) for request in requests]
    assert usual != [is_failed(failures, landed(request, shard=1)) for request in requests]
    assert usual != [is_failed(failures, digested(request)) for request in requests]


def test_a_probability_that_is_changed_holds_from_the_next_report_on() -> None:
    failures = FailedTransfers(1.0)
    assert is_failed(failures, landed(1))
    failures.prob = 0.0
    assert not is_failed(failures, landed(1))
