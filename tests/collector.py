"""A collector of OpenTelemetry: takes spans over OTLP, HTTP or gRPC, and keeps them for a test to look at."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from raw_http import Handler, handling

SERVER, CLIENT, INTERNAL = 2, 3, 1  # kinds of spans
ERROR = 2  # a status


@dataclass(frozen=True)
class SeenSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    status: int
    trace_state: str

    @property
    def duration_ns(self) -> int:
        return self.ended_ns - self.began_ns


@dataclass
class Collector:
    endpoint: str
    _spans: list[SeenSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spans(self) -> list[SeenSpan]:
        with self._lock:
            return list(self._spans)

    def take(self, request: Any) -> None:
        with self._lock:
            for resource in request.resource_spans:
                service = values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [seen(service, span) for span in scope.spans]

    def of_trace(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def children_of(self, parent: SeenSpan) -> list[SeenSpan]:
        """In the order of time."""
        found = [span for span in self.of_trace(parent.trace_id) if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.began_ns, span.ended_ns))


def seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values(span.attributes),
        {event.name: values(event.attributes) for event in span.events},
        span.status.code,
        span.trace_state,
    )


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Collecting(Handler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            read: Message = request
            read.ParseFromString(self.read_body())
            assert self.path == "/v1/traces"
            collector.take(request)
            self.say(
                ExportTraceServiceResponse().SerializeToString(), headers={"content-type": "application/x-protobuf"}
            )

    with handling(Collecting) as port:
        collector.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        yield collector


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
