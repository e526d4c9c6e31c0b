"""Spans that a test can look at, without OpenTelemetry."""

from collections.abc import Mapping
from typing import Any

from tandem.server.tracing import Span


class SeenSpan:
    """A span of the test, with its children."""

    def __init__(self, name: str, began_ns: int) -> None:
        self.name, self.began_ns = name, began_ns
        self.children: list[SeenSpan] = []
        self.ended_ns: int | None = None
        self.attributes: dict[str, Any] = {}
        self.aborted: dict[str, Any] = {}

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"of {self.name} {self.began_ns}"}

    def child(self, name: str, began_ns: int, *, is_call: bool = False) -> Span:
        self.children.append(SeenSpan(name, began_ns))
        return self.children[-1]

    def abort(self, abort_info: Mapping[str, Any]) -> None:
        if self.ended_ns is None:
            self.aborted = dict(abort_info)

    def end(self, ended_ns: int, attributes: Mapping[str, Any]) -> None:
        if self.ended_ns is None:
            self.ended_ns, self.attributes = ended_ns, dict(attributes)


class SeenTracing:
    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []

    def begin(self, name: str, headers: Mapping[str, str], began_ns: int) -> Span:
        self.spans.append(SeenSpan(name, began_ns))
        return self.spans[-1]

    def close(self) -> None:
        pass
