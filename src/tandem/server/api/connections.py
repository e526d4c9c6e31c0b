"""Connections of a port that anybody may reach: each has a deadline for what it does now, and their number a bound.

    a head      from the first moment, or the first byte of the next request, until it is whole
    a body      between two of its pieces (`body_s`), or from its head until the whole request is answered (`request_s`)
    an answer   while it waits for somebody to read it (`write_s`): more is not written before some of it has gone
    idle        until the next request begins

Who is late is cut, not closed: closing would wait until everything that was written has been read. Where there are too
many, the one goes that has waited longest for its next request, or for its first one to begin, if it had `patience_s`
for that. Else the newcomer is refused before a byte of it is read: with a 503 that says when to come back.

Of the requests, those under way are bounded, too (`max_requests`). One more is refused by its head alone, with the same
503: its body is not waited for, and no task begins for it. Probes, and what operators ask for (`PAGES`), are neither
counted nor refused: who is full is not ill.
"""

import logging
import resource
import socket
import struct
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem.core.values import Cause
from tandem.server.api.access import PAGES
from tandem.server.api.errors import Failure, Problem
from tandem.server.api.http1 import Http1, whole_answer
from tandem.server.api.turn_limits import Turns
from tandem.server.repeated_lines import RepeatedLine

MAX_CONNECTIONS = 1024
HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
REQUEST_SECONDS = 30.0
WRITE_SECONDS = 30.0
IDLE_SECONDS = 60.0
LINGER_SECONDS = 1.0  # for who is refused to read why
MAX_LINGERING = 256  # further ones are cut at once, and may not read it

MAX_API_CONNECTIONS = 4096
MAX_API_LINGERING = 4096
KEEP_ALIVE_SECONDS = 90.0  # longer than uvicorn's own, which closes in peace
API_PATIENCE_SECONDS = 1.0  # a head may take so long in a storm before somebody else gets its place
SPARE_FDS = 128  # for the model, logs, channels, and what is being accepted
LINE_EVERY_SECONDS = 1.0
LAST_DATA_RECV = struct.Struct("=52xI")  # of `tcp_info` (linux/tcp.h): milliseconds

logger = logging.getLogger("tandem.http")


def new_line() -> RepeatedLine:
    return RepeatedLine(logger, every_s=LINE_EVERY_SECONDS)


@dataclass(slots=True)
class ConnectionBounds:
    """Of one port, with the connections that wait for a head. The first of them has waited longest."""

    max_connections: int = MAX_CONNECTIONS
    head_s: float = HEAD_SECONDS
    body_s: float | None = None  # None: `request_s` bounds it
    request_s: float | None = REQUEST_SECONDS  # None: the application bounds it
    write_s: float = WRITE_SECONDS
    idle_s: float = IDLE_SECONDS
    patience_s: float = 0.0
    max_lingering: int = MAX_LINGERING
    max_requests: int | None = None  # under way; None: as many as there are connections
    num_requests: int = 0
    turns: Turns = field(default_factory=Turns)  # who asks, and has not begun
    num_open: int = 0  # without those that are being refused
    num_refused: int = 0
    waiting: "dict[BoundedHttp1, float]" = field(default_factory=dict)  # since when
    lingering: dict[object, None] = field(default_factory=dict[object, None])  # who has been refused, and may read why
    refused: Callable[[float | None], object] = lambda waited: None  # of each refusal: see `waited_s`
    refusals: RepeatedLine = field(default_factory=new_line)

    def protocol(self) -> "type[BoundedHttp1]":
        """For `uvicorn.Config(http=...)`, which makes one per connection."""
        return type("BoundedHttp1", (BoundedHttp1,), {"bounds": self})

    @property
    def is_full(self) -> bool:
        return self.max_requests is not None and self.num_requests + len(self.turns) >= self.max_requests

    def note_refusal(self, sock: socket.socket | None) -> None:
        """sock: of somebody who has waited for us."""
        self.num_refused += 1
        self.refusals.note("refused: there are as many connections or requests as there may be")
        self.refused(None if sock is None else waited_s(sock))

    def make_room(self, now: float) -> bool:
        """For one more. False when nobody has waited long enough."""
        oldest, since = next(iter(self.waiting.items()), (None, now))
        if oldest is None or now - since < self.patience_s:
            return False
        oldest.give_way()
        return True


def api_bounds(
    *,
    max_requests: int,
    write_s: float = WRITE_SECONDS,
    fds_each: int = 1,
    refused: Callable[[float | None], object] = lambda waited: None,
) -> ConnectionBounds:
    """For generation: a request is as long as its deadline says. fds_each: file descriptors that a request takes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = 1 << 30 if soft == resource.RLIM_INFINITY else soft - SPARE_FDS
    most = max(16, min(MAX_API_CONNECTIONS, fds // fds_each))
    return ConnectionBounds(
        max_lingering=max(MAX_LINGERING, min(MAX_API_LINGERING, fds - most * fds_each)),
        max_connections=most,
        body_s=BODY_SECONDS,
        request_s=None,
        write_s=write_s,
        idle_s=KEEP_ALIVE_SECONDS,
        patience_s=API_PATIENCE_SECONDS,
        refused=refused,
        max_requests=min(
            max_requests, most - most // 8
        ),  # the others: for probes, and who hears that it is one too many
    )


def raise_fd_limit() -> None:
    """As far as it may be raised: every connection is a file descriptor, and the usual limit is for a shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class BoundedHttp1(Http1):
    """One connection."""

    bounds: ConnectionBounds
    _timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _is_refused = False
    _is_ending = False  # the port does
    _is_open = True  # one of `num_open`, since it was accepted
    _has_asked = False  # the head of a request has come whole
    # The requests that are under way, in order, and whether each is one of `num_requests`.
    _under_way: deque[tuple[RequestResponseCycle, bool]]

    def leave_place(self) -> None:
        """It is none of those that are counted as open any more."""
        if self._is_open:
            self._is_open = False
            self.bounds.num_open -= 1

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._under_way = deque()
        self._wait(self.bounds.head_s)

    def end_with(self, answer: bytes) -> None:
        """`data_received` leaves time to read it, as the rest of what is refused may be under way."""
        self.leave_place()
        self.bounds.waiting.pop(self, None)
        self._is_refused = True
        self.transport.write(answer)

    def end_behind(self, cycle: RequestResponseCycle) -> None:
        """Who has not sent all of its request has time to read the answer."""
        if cycle.more_body:
            self.leave_place()
            self._is_refused = True
            self.flow.resume_reading()
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closing at once would reset the connection, and who sends would not read why."""
        bounds = self.bounds
        if len(bounds.lingering) >= bounds.max_lingering:
            self.transport.abort()
            return
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # it was reset, and the loop has not heard of it yet: nobody reads
            self.transport.abort()
            return
        bounds.lingering[self] = None
        self._limit(LINGER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        bounds = self.bounds
        bounds.num_requests -= sum(counts for _, counts in self._under_way)
        for cycle, _ in self._under_way:  # uvicorn tells the one that came last
            cycle.disconnected = True
            cycle.message_event.set()
        self._under_way.clear()
        bounds.lingering.pop(self, None)
        bounds.turns.drop(self)
        self.leave_place()
        bounds.waiting.pop(self, None)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self in self.bounds.waiting and not self._may_begin(data):
            return
        self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_refused and not self.transport.is_closing():
            self._linger()  # the rest of its request is still under way

    def _may_begin(self, data: bytes) -> bool:
        """What comes to who waits for a head. Neither probes nor refusals stand behind others."""
        bounds = self.bounds
        if bounds.is_full or asked_path(data) in PAGES or bounds.turns.take():
            return True
        self.transport.pause_reading()
        bounds.waiting.pop(self)
        self._limit(None)  # it waits for us
        bounds.turns.hold(self, data)
        return False

    def begin(self, data: bytes) -> None:
        self.transport.resume_reading()
        self._wait(self.bounds.head_s)
        self._take_in(data)

    def eof_received(self) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().eof_received()

    def on_message_begin(self) -> None:
        if self in self.bounds.waiting:
            self._wait(self.bounds.head_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self.bounds.waiting.pop(self, None)
        self._has_asked = True
        counts = self.url.partition(b"?")[0].decode("latin-1") not in PAGES
        if counts and self.bounds.is_full and not self._under_way:  # an answer that is under way is not cut short
            self.end_with(TOO_MANY_REQUESTS)
            self.bounds.note_refusal(self.transport.get_extra_info("socket"))
            return
        self.bounds.num_requests += counts
        self._limit(self.bounds.request_s or self.bounds.body_s)
        super().on_headers_complete()
        self._under_way.append((self.cycle, counts))
        self.cycle.transport = EndedBehind(self, self.cycle)  # type: ignore[assignment]  # uvicorn writes and closes, no more

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        if self.bounds.request_s is None and self not in self.bounds.waiting:
            self._limit(self.bounds.body_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self.transport.close()  # nothing of it is left that could reset the connection
            return
        if self.bounds.request_s is None and self not in self.bounds.waiting:
            self._limit(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_next_there = bool(self.pipeline)
        _, counts = self._under_way.popleft()
        self.bounds.num_requests -= counts
        if not self._is_refused:
            super().on_response_complete()
            self._refuse_unfinished()  # of a request that has waited behind this one
        if self._is_refused:
            return  # it lingers
        if self.transport.is_closing():
            if self.bounds.request_s is None:  # else with the deadline of its request
                self._limit(self.bounds.write_s)  # the answer may still wait for somebody to read it
        elif is_next_there:
            self._limit(self.bounds.request_s)
        else:
            self._wait(self.bounds.idle_s)

    def shutdown(self) -> None:
        """The port ends: what runs may finish. Who has not sent all of its request yet may never do it."""
        self._is_ending = True
        self._refuse_unfinished()
        if not self._is_refused:
            super().shutdown()

    def _refuse_unfinished(self) -> None:
        cycle = self.cycle  # the last one that has begun to come
        if not self._is_ending or self._is_refused or cycle is None or self.pipeline:
            return
        if cycle.more_body and not cycle.response_started:
            self._refuse(ENDING)
            self._linger()

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self.bounds.write_s, self.cut)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def give_way(self) -> None:
        """To a newcomer. Who has not asked yet is told why; between two requests an answer would be to none of them."""
        if self._has_asked:
            self.cut()
            return
        self.end_with(TOO_MANY_CONNECTIONS)
        self.bounds.note_refusal(None)  # we have waited for it
        self._linger()

    def cut(self) -> None:
        """Its place is free at once."""
        self.leave_place()
        self.bounds.waiting.pop(self, None)
        super().cut()

    def _wait(self, seconds: float) -> None:
        self.bounds.waiting.pop(self, None)
        self.bounds.waiting[self] = self.loop.time()
        self._limit(seconds)

    def _limit(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.cut)


class EndedBehind:
    """What uvicorn takes for the transport of one request: it closes it where the connection ends with the answer."""

    def __init__(self, connection: BoundedHttp1, cycle: RequestResponseCycle) -> None:
        transport = connection.transport
        self.write, self.is_closing = transport.write, transport.is_closing
        self.close = partial(connection.end_behind, cycle)


def waited_s(sock: socket.socket) -> float | None:
    """How long ago the last byte of the other end came to this machine, or the connection itself, if no byte has come.

    Also while nobody had accepted it: the kernel keeps account. None where it does not tell.
    """
    if sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECV.size)
    except OSError:  # it has left
        return None
    return LAST_DATA_RECV.unpack(told)[0] / 1000 if len(told) == LAST_DATA_RECV.size else None


def asked_path(data: bytes) -> str | None:
    """Of the request that begins there; None where its first line is not whole, or none of HTTP."""
    line, end, _ = data.partition(b"\r\n")
    words = line.split(b" ")
    return words[1].partition(b"?")[0].decode("latin-1") if end and len(words) == 3 else None


def busy(message: str) -> bytes:
    return whole_answer(Failure(Problem.BUSY, message), "Service Unavailable")


TOO_MANY_CONNECTIONS = busy("this server has as many connections as it can hold")
ENDING = whole_answer(Failure(Cause.DRAINING, "this server is shutting down"), "Service Unavailable")
TOO_MANY_REQUESTS = busy("this server has as many requests under way as it may")
