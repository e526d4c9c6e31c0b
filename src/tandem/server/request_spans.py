"""What the span of a request tells: a child for each part of its way, and why it failed."""

from collections.abc import Sequence

from tandem.metrics.request_stats import RequestRecord
from tandem.metrics.stage_spans import span_attributes, stage_spans
from tandem.server.tracing import Span, Value, known


def tell_spans(span: Span, records: Sequence[RequestRecord], *, arrival_ns: int, model: str) -> None:
    """End the span with all its children. A request of several samples has a child for each, and below it its parts."""
    for record in records:
        own = span if len(records) == 1 else span.child("sample", arrival_ns)
        for stage in stage_spans(record, arrival_ns=arrival_ns):
            own.child(stage.name, stage.began_ns).end(stage.ended_ns, {})
        if record.is_failed:
            own.abort(abort_of(record))
        own.end(arrival_ns + record.e2e_ns, span_attributes(record, model=model))
    if len(records) > 1:
        if failed := next((record for record in records if record.is_failed), None):
            span.abort(abort_of(failed))
        span.end(arrival_ns + max(record.e2e_ns for record in records), {})


def abort_of(record: RequestRecord) -> dict[str, Value]:
    said: dict[str, Value] = {"reason": record.detail or record.outcome, "code": record.outcome}
    return said | known(stage=record.stage, peer=record.peer, waited_seconds=record.waited_seconds)
