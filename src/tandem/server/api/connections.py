"""Connections of a port that anybody may reach: each has a deadline for what it does now, and their number a bound.

    a head      from the first moment, or the first byte of the next request, until it is whole
    a request   from there until its answer is handed over, a body that never comes and an answer that nobody reads
    idle        until the next request begins

Who is late is cut, not closed: closing would wait until everything that was written has been read. Where there are too
many, the one goes that has waited longest for its next request, or for its first one to begin.
"""

from asyncio import TimerHandle, Transport
from dataclasses import dataclass, field

from tandem.server.api.http1 import Http1

MAX_CONNECTIONS = 1024
HEAD_SECONDS = 10.0
REQUEST_SECONDS = 30.0
IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Bounds:
    """Of one port, with the connections that wait for a head. The first of them has waited longest."""

    max_connections: int = MAX_CONNECTIONS
    head_s: float = HEAD_SECONDS
    request_s: float = REQUEST_SECONDS
    idle_s: float = IDLE_SECONDS
    num_open: int = 0
    waiting: "dict[BoundedHttp1, None]" = field(default_factory=dict)

    def protocol(self) -> "type[BoundedHttp1]":
        """For `uvicorn.Config(http=...)`, which makes one per connection."""
        return type("BoundedHttp1", (BoundedHttp1,), {"bounds": self})


class BoundedHttp1(Http1):
    """One connection."""

    bounds: Bounds
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        bounds = self.bounds
        bounds.num_open += 1
        self._wait(bounds.head_s)
        if bounds.num_open > bounds.max_connections:
            next(iter(bounds.waiting)).cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.num_open -= 1
        self.bounds.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self in self.bounds.waiting:
            self._wait(self.bounds.head_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.bounds.waiting.pop(self, None)
        self._limit(self.bounds.request_s)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        is_next_there = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            return  # with the deadline of its request: the answer may still wait for somebody to read it
        if is_next_there:
            self._limit(self.bounds.request_s)
        else:
            self._wait(self.bounds.idle_s)

    def cut(self) -> None:
        self.bounds.waiting.pop(self, None)
        self.transport.abort()

    def _wait(self, seconds: float) -> None:
        self.bounds.waiting.pop(self, None)
        self.bounds.waiting[self] = None
        self._limit(seconds)

    def _limit(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.cut)
