"""Spans of OpenTelemetry, sent over OTLP by a thread of its SDK.

Its queue is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`), and what does not fit is dropped: a request waits for nothing here.
The SDK's own log lines are silenced: a collector that is not there would get one for every batch.
Whether a request is sampled says its `traceparent`; one without is, unless `OTEL_TRACES_SAMPLER` says otherwise.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem import __version__
from tandem.otlp import protocol_of
from tandem.server.tracing import TRACE_HEADERS, Span, Value

CLOSE_S = 2.0
COMPLAIN_S = 60.0
MOST_CHARS = 1024  # of an attribute
PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracing:
    def __init__(
        self, endpoint: str, *, service: str, attributes: Mapping[str, Value], note: Callable[[str], None]
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or service, "service.version": __version__}
        self._provider = TracerProvider(
            resource=Resource.create(named | dict(attributes)),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=MOST_CHARS),
        )
        exporter = QuietExporter(exporter_to(endpoint), endpoint, note)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem", __version__)

    def begin(self, name: str, headers: Mapping[str, str], began_ns: int) -> Span:
        context = PROPAGATOR.extract({key: headers[key] for key in TRACE_HEADERS if key in headers})
        unix_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, start_time=began_ns + unix_ns)
        return OtelSpan(self._tracer, span, unix_ns)

    def close(self) -> None:
        """A collector that takes nothing keeps no server from ending."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class OtelSpan:
    def __init__(self, tracer: Tracer, span: ApiSpan, unix_ns: int) -> None:
        """unix_ns: what makes a time of the monotonic clock one of the calendar, the same for a whole request."""
        self._tracer = tracer
        self._span = span
        self._unix_ns = unix_ns
        self._is_ended = False

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        PROPAGATOR.inject(headers, set_span_in_context(self._span))
        return headers

    def child(self, name: str, began_ns: int, *, is_call: bool = False) -> Span:
        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        inside = set_span_in_context(self._span)
        span = self._tracer.start_span(name, inside, kind, start_time=began_ns + self._unix_ns)
        return OtelSpan(self._tracer, span, self._unix_ns)

    def abort(self, abort_info: Mapping[str, Value]) -> None:
        if not self._is_ended:
            self._span.add_event("abort", dict(abort_info))
            self._span.set_status(Status(StatusCode.ERROR, str(abort_info.get("reason", ""))[:MOST_CHARS]))

    def end(self, ended_ns: int, attributes: Mapping[str, Value]) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._span.set_attributes(dict(attributes))
            self._span.end(ended_ns + self._unix_ns)


class QuietExporter(SpanExporter):
    """Says that spans are lost once a minute, and not for each."""

    def __init__(self, inner: SpanExporter, endpoint: str, note: Callable[[str], None]) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._note = note
        self._num_lost = 0
        self._said_at: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result, reason = self._inner.export(spans), "refused or did not answer"
        except Exception as error:  # of a library that talks to the network: its thread has to live on
            result, reason = SpanExportResult.FAILURE, f"{type(error).__name__} {error}"
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            now = time.monotonic()
            if self._said_at is None or now - self._said_at >= COMPLAIN_S:
                self._said_at = now
                self._note(f"traces: {self._endpoint} takes none ({reason}); {self._num_lost} spans lost so far")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def exporter_to(endpoint: str) -> SpanExporter:
    if protocol_of(endpoint) == "http/protobuf":
        return HttpExporter(endpoint=endpoint)
    return GrpcExporter(endpoint=endpoint.removeprefix("grpc://"), insecure=not endpoint.startswith("https://"))
