"""Many shards report on one transfer; here their reports become one verdict. Arithmetic, so nobody can disagree.

A replica has one node and the node hears every shard, so there is no vote and no round trip: what each shard has said
is joined, and the verdict is a function of that. TP, PP and CP parts are just elements of `expected`; a pipeline stage
is no special case, so a failure on a later stage cannot be filtered out by an earlier one.

    join       two reports of one shard: the larger watermark, and the failure if there is one. Commutative,
               associative, idempotent: the order in which reports come, and how often, changes nothing.
    attempts   a report of another attempt than the present one is not about this transfer.
    verdict    a failure anywhere is a failure; nothing has landed before the slowest shard has.

The transfer latches the verdict by moving its state: what a shard says after the commit, or after a failure, is late.
"""

from collections.abc import Mapping

from msgspec import Struct

from tandem.core.values import Cause, ShardId


class TransferFailure(Struct, frozen=True, order=True):
    cause: Cause
    detail: str = ""


class ShardReport(Struct, frozen=True):
    """What one shard has said of one attempt, as far as it is known."""

    attempt: int
    landed: int = 0  # watermark: this many of the pages that the shard wants are here, in order
    failure: TransferFailure | None = None


class Pending(Struct, frozen=True, tag=True):
    landed: int  # pages of the slowest among the shards that still lack some


class Landed(Struct, frozen=True, tag=True):
    """Every shard has everything that it wants."""


class Failed(Struct, frozen=True, tag=True):
    cause: Cause
    shard: ShardId  # the lowest of those that failed
    detail: str = ""


Verdict = Pending | Landed | Failed


def join(left: ShardReport, right: ShardReport) -> ShardReport:
    """What two reports of one shard and one attempt say together."""
    assert left.attempt == right.attempt, "reports of different attempts have nothing to say to each other"
    failures = [report.failure for report in (left, right) if report.failure is not None]
    # Why the smallest, not the first: which of two failures of one shard comes first is chance.
    return ShardReport(left.attempt, max(left.landed, right.landed), min(failures, default=None))


def record_report(reports: dict[ShardId, ShardReport], shard: ShardId, report: ShardReport) -> None:
    """Take one more report of a shard into `reports`, which are all of one attempt."""
    known = reports.get(shard)
    reports[shard] = report if known is None else join(known, report)


def verdict(expected: Mapping[ShardId, int], reports: Mapping[ShardId, ShardReport]) -> Verdict:
    """Combine what the shards of one transfer have reported.

    expected: pages that each shard wants; may be 0.
    reports: at most one per shard, all of one attempt (`record_report`). A shard without one has said nothing: 0
             landed. Shards that are not expected do not count.
    """
    assert expected, "a transfer has at least one shard"
    behind: list[int] = []
    for shard in sorted(expected):
        report = reports.get(shard)
        if report is not None and report.failure is not None:
            return Failed(report.failure.cause, shard, report.failure.detail)
        landed = report.landed if report is not None else 0
        if landed < expected[shard]:
            behind.append(landed)
    return Pending(min(behind)) if behind else Landed()
