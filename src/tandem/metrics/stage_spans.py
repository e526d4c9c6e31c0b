"""The parts of a request's way as spans, from the numbers that its record has anyway.

The stages of the ledger are laid end to end from the arrival on, in the order in which the request first came to each:
together they are the time to the first token, to the nanosecond. What was in a stage twice has one span for both.
Behind the first token is `generation`. A request that failed before it shows the wait that it failed in.
"""

from collections.abc import Iterator

from msgspec import Struct

from tandem.core.values import SECOND
from tandem.metrics.request_stats import RequestRecord

GENERATION = "generation"
Value = str | int | float | bool


class StageSpan(Struct, frozen=True):
    """Nanoseconds of the monotonic clock."""

    name: str
    began_ns: int
    ended_ns: int


def stage_spans(record: RequestRecord, *, arrival_ns: int) -> Iterator[StageSpan]:
    at, end = arrival_ns, arrival_ns + record.e2e_ns
    for stage, duration_ns in record.ledger:
        yield StageSpan(stage, at, at + duration_ns)
        at += duration_ns
    if record.ttft_ns is not None:
        yield StageSpan(GENERATION, at, end)
    elif record.stage and record.waited_seconds:
        yield StageSpan(record.stage, max(arrival_ns, end - round(record.waited_seconds * SECOND)), end)


def span_attributes(record: RequestRecord, *, model: str) -> dict[str, Value]:
    """Of one sample, by OpenTelemetry's names for generative AI where it has them, SGLang's for the room."""
    found: dict[str, Value | None] = {
        "gen_ai.request.model": model,
        "gen_ai.response.id": record.rid,
        "tandem.request_id": record.request_id,
        "gen_ai.response.finish_reason": None if record.is_failed else record.outcome,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.server.time_to_first_token": None if record.ttft_ns is None else record.ttft_ns / SECOND,
        "bootstrap_room": None if record.room is None else hex(record.room),
        "tandem.path": record.path,
        "tandem.kv_pages": record.kv_pages,
        "tandem.retries": record.retries,
    }
    return {name: value for name, value in found.items() if value is not None}
