"""Traces of requests, as routers and servers see them: a span per request, with a child for each part of its way.

Nothing here knows OpenTelemetry. `otel.py` does, an extra, which `make_tracing` loads where traces are wanted;
elsewhere a span is `NO_SPAN`, and costs a call. Times are nanoseconds of the monotonic clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol

from tandem.server.api.errors import Failure, Refusal

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context
Value = str | int | float | bool


class TracingRefused(Exception):
    """One line: what OpenTelemetry says of its variables."""


class Span(Protocol):
    """Ends once; what is said of it afterwards changes nothing."""

    @property
    def headers(self) -> dict[str, str]:
        """The context in which whoever is called works on: this span as parent. Empty without tracing."""
        ...

    def child(self, name: str, began_ns: int, *, is_call: bool = False) -> "Span": ...

    def abort(self, abort_info: Mapping[str, Value]) -> None:
        """It has failed; why."""
        ...

    def end(self, ended_ns: int, attributes: Mapping[str, Value]) -> None: ...


class Tracing(Protocol):
    def begin(self, name: str, headers: Mapping[str, str], began_ns: int) -> Span:
        """A request that came with these headers: its span is a child of the one that they name."""
        ...

    def close(self) -> None:
        """Send what is left, for a moment."""
        ...


class NoSpan:
    @property
    def headers(self) -> dict[str, str]:
        return {}

    def child(self, name: str, began_ns: int, *, is_call: bool = False) -> Span:
        return self

    def abort(self, abort_info: Mapping[str, Value]) -> None:
        pass

    def end(self, ended_ns: int, attributes: Mapping[str, Value]) -> None:
        pass


class NoTracing:
    def begin(self, name: str, headers: Mapping[str, str], began_ns: int) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN: Span = NoSpan()
NO_TRACING: Tracing = NoTracing()


def make_tracing(
    *, is_enabled: bool, endpoint: str, service: str, attributes: Mapping[str, Value], note: Callable[[str], None]
) -> Tracing:
    """note: gets a line now and then while the collector takes nothing. Raises TracingRefused."""
    if not is_enabled:
        return NO_TRACING
    otel = import_module("tandem.server.otel")  # only here: an extra brings what it imports
    try:
        tracing: Tracing = otel.OtelTracing(endpoint, service=service, attributes=attributes, note=note)
    except ValueError as error:
        raise TracingRefused(f"--enable-trace: OpenTelemetry refuses what OTEL_* say: {error}") from error
    return tracing


def abort_info(failure: Failure) -> dict[str, Value]:
    """What a span says of a failure."""
    said: dict[str, Value] = {"reason": failure.message, "code": failure.code.value, "status_code": failure.status}
    return said | known(stage=failure.stage, peer=failure.peer, waited_seconds=failure.waited_seconds)


def known(**attributes: Value | None) -> dict[str, Value]:
    """Those that say something."""
    return {name: value for name, value in attributes.items() if value}


def response_headers(span: Span) -> dict[str, str]:
    """By which a client finds its trace (W3C Trace Context, level 2)."""
    context = span.headers.get("traceparent")
    return {} if context is None else {"traceresponse": context}


@contextmanager
def ending_with_errors(span: Span) -> Iterator[None]:
    """What is raised inside ends the span."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Refusal):
            span.abort(abort_info(error.failure))
        else:
            span.abort({"reason": f"{type(error).__name__} {error}".strip()})
        span.end(time.monotonic_ns(), {})
        raise
