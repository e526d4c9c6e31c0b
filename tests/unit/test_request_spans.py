"""Spans from the numbers of a record, and what the SDK around them may cost: nothing that a request waits for."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from seen_spans import SeenSpan
from tandem.cli import main as cli
from tandem.core.values import SECOND
from tandem.metrics.request_stats import RequestRecord
from tandem.metrics.stage_spans import GENERATION, span_attributes, stage_spans
from tandem.otlp import PROTOCOL_VARIABLE, is_endpoint, protocol_of
from tandem.server import logs, otel
from tandem.server.api.errors import Problem, Refusal
from tandem.server.otel import OtelTracing, QuietExporter
from tandem.server.request_spans import tell_spans
from tandem.server.tracing import (
    NO_SPAN,
    NO_TRACING,
    TracingRefused,
    ending_with_errors,
    make_tracing,
    response_headers,
)

STAGES = ("edge_receive", "decode_bootstrap", "prefill_forward", "decode_transferred", "edge_send")


def record(**fields: Any) -> RequestRecord:
    usual = {
        "rid": "rid",
        "request_id": "request",
        "endpoint": "/generate",
        "outcome": "stop",
        "is_failed": False,
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "e2e_ns": 1000,
    }
    return RequestRecord(**(usual | fields))


@given(
    durations=st.lists(st.integers(1, 10**12), min_size=1, max_size=5),
    arrival_ns=st.integers(0, 10**18),
    after_ns=st.integers(0, 10**12),
)
def test_stages_lie_end_to_end_and_are_the_time_to_the_first_token(
    durations: list[int], arrival_ns: int, after_ns: int
) -> None:
    ttft_ns = sum(durations)
    ledger = tuple(zip(STAGES, durations, strict=False))
    spans = list(stage_spans(record(ledger=ledger, ttft_ns=ttft_ns, e2e_ns=ttft_ns + after_ns), arrival_ns=arrival_ns))
    assert [(span.name, span.ended_ns - span.began_ns) for span in spans] == [*ledger, (GENERATION, after_ns)]
    assert spans[0].began_ns == arrival_ns
    assert all(one.ended_ns == other.began_ns for one, other in pairwise(spans))


def test_a_request_that_failed_before_its_first_token_shows_the_wait_that_it_failed_in() -> None:
    failed = record(is_failed=True, outcome="peer_lost", stage="peer", waited_seconds=2.0, e2e_ns=3 * SECOND)
    (span,) = stage_spans(failed, arrival_ns=10)
    assert (span.name, span.began_ns, span.ended_ns) == ("peer", 10 + SECOND, 10 + 3 * SECOND)
    assert list(stage_spans(record(is_failed=True, outcome="queue_full"), arrival_ns=10)) == []


def test_one_sample_is_its_request_and_several_have_a_span_each() -> None:
    one, several = SeenSpan("POST", 10), SeenSpan("POST", 10)
    whole = record(ledger=(("edge_receive", 100), ("edge_send", 300)), ttft_ns=400)
    tell_spans(one, [whole], arrival_ns=10, model="tiny")
    assert [child.name for child in one.children] == ["edge_receive", "edge_send", "generation"]
    assert one.ended_ns == 1010
    assert one.attributes == span_attributes(whole, model="tiny")
    failed = record(is_failed=True, outcome="aborted", detail="the client left", stage="client", e2e_ns=2000)
    tell_spans(several, [whole, failed], arrival_ns=10, model="tiny")
    assert [child.name for child in several.children] == ["sample", "sample"]
    assert [len(child.children) for child in several.children] == [3, 0]
    assert (
        several.children[1].aborted
        == several.aborted
        == {
            "reason": "the client left",
            "code": "aborted",
            "stage": "client",
        }
    )
    assert several.ended_ns == 2010


def test_what_is_raised_ends_the_span_with_its_reason() -> None:
    refused, broken = SeenSpan("POST", 0), SeenSpan("POST", 0)
    with pytest.raises(Refusal), ending_with_errors(refused):
        raise Refusal(Problem.INVALID_JSON, "no JSON")
    assert refused.aborted["code"] == "invalid_json"
    assert refused.aborted["status_code"] == 400
    with pytest.raises(KeyError), ending_with_errors(broken):
        raise KeyError("x")
    assert broken.aborted == {"reason": "KeyError 'x'"}
    assert None not in (refused.ended_ns, broken.ended_ns)


def test_without_tracing_nothing_is_made_and_nothing_is_said() -> None:
    never = make_tracing(is_enabled=False, endpoint="", service="", attributes={}, note=print)
    assert never is NO_TRACING
    span = never.begin("POST", {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}, 0)
    assert span is NO_SPAN is span.child("part", 0)
    assert response_headers(span) == {}


def test_variables_that_opentelemetry_refuses_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")  # less than a batch
    with pytest.raises(TracingRefused, match="max_queue_size"):
        make_tracing(is_enabled=True, endpoint="nowhere:1", service="", attributes={}, note=print)
    monkeypatch.setattr(logs, "set_up", lambda *_, **__: None)
    words = "router --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2 --port 0 --enable-trace"
    assert cli.main(words.split()) == 1
    assert capsys.readouterr().err.startswith("tandem: error: --enable-trace: OpenTelemetry refuses")


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


class Stuck(SpanExporter):
    """A collector that does not answer until it is told to."""

    def __init__(self) -> None:
        self.is_asked, self.answers = threading.Event(), threading.Event()
        self.num_told = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        assert self.answers.wait(20)
        self.num_told += len(spans)
        return SpanExportResult.SUCCESS


def tracing_to(exporter: SpanExporter, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> OtelTracing:
    monkeypatch.setattr(otel, "exporter_to", lambda endpoint: exporter)
    return OtelTracing("nowhere:1", service="test", attributes={}, note=notes.append)


def test_a_collector_that_hangs_holds_no_request_up_and_costs_a_bounded_number_of_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MAX_QUEUE_SIZE", 20), ("MAX_EXPORT_BATCH_SIZE", 5), ("SCHEDULE_DELAY", 1)):
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    stuck = Stuck()
    tracing = tracing_to(stuck, monkeypatch, [])
    tracing.begin("first", {}, 0).end(1, {})
    assert stuck.is_asked.wait(20)
    for _ in range(2000):
        span = tracing.begin("POST", {}, 0)
        span.child("part", 0).end(1, {})
        span.end(1, {})
    stuck.answers.set()
    tracing.close()
    assert 1 < stuck.num_told <= 1 + 5 + 20


def test_a_span_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ReadableSpan] = []

    class Keep(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            told.extend(spans)
            return SpanExportResult.SUCCESS

    tracing = tracing_to(Keep(), monkeypatch, [])
    span = tracing.begin("POST", {}, 100)
    span.end(300, {"a": 1})
    span.abort({"reason": "too late"})
    span.end(400, {"b": 2})
    tracing.close()
    (one,) = told
    assert one.start_time is not None
    assert one.end_time is not None
    assert one.end_time - one.start_time == 200
    assert dict(one.attributes or {}) == {"a": 1}
    assert one.events == ()


def test_spans_that_are_lost_are_said_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if len(spans) == 3:
                raise OSError("no route")
            return SpanExportResult.FAILURE

    notes: list[str] = []
    now = 1000.0
    monkeypatch.setattr(otel.time, "monotonic", lambda: now)
    quiet = QuietExporter(Refuses(), "collector:1", notes.append)
    spans: list[Any] = [None, None]
    for _ in range(10):
        quiet.export(spans)
        now += 10.0
    assert quiet.export([*spans, None]) is SpanExportResult.FAILURE
    assert len(notes) == 2
    assert notes[0] == "traces: collector:1 takes none (refused or did not answer); 2 spans lost so far"
    assert "14 spans lost so far" in notes[1]


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("localhost:4317", "grpc"),
        ("grpc://collector:4317", "grpc"),
        ("http://collector:4318/v1/traces", "http/protobuf"),
        ("https://collector/v1/traces", "http/protobuf"),
        ("HTTP://collector:4318/v1/traces", "http/protobuf"),
    ],
)
def test_the_endpoint_says_how_to_speak_to_it(endpoint: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_endpoint(endpoint)
    assert protocol_of(endpoint) == protocol
    for other in ("grpc", "http/protobuf"):
        monkeypatch.setenv(PROTOCOL_VARIABLE, other)
        assert protocol_of(endpoint) == other


@pytest.mark.parametrize(
    "text", ["", "collector", "collector:", "collector:port", "ftp://collector:1", "http://", "http://[::1"]
)
def test_what_names_no_collector_is_refused(text: str) -> None:
    assert not is_endpoint(text)
