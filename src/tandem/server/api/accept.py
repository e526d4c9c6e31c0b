"""A port's own accept: who cannot be served is told so at the bare socket, before anything is made of the connection.

Under a burst most of who comes is refused, and a refusal is worth something while it is early: its client goes
elsewhere. A transport and a parser for each would take most of the event loop's time, and who is refused would stand
behind those who are let in. So a turn of the loop takes `ACCEPTS_PER_TURN` out of the kernel's queue, and says at once
who is refused. The others have their place, and `PER_TURN` of them get their transports.

    too many connections   refused unread
    too many requests      refused where it has asked for work already; else it is let in, and refused by its head when
                           that comes (`connections.py`)

Who is full is not ill: whoever has asked for one of `PAGES`, probes among them, is let in before all others, and so are
`MORE_FOR_PAGES` of them where there are too many connections.

A refused socket is read to its end, or for `LINGER_SECONDS`: closing it at once would reset the connection, and who
still sends would not read why.
"""

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from tandem.server.api.access import PAGES
from tandem.server.api.connections import (
    ENDING,
    LINGER_SECONDS,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_REQUESTS,
    BoundedHttp1,
    ConnectionBounds,
    asked_path,
    new_line,
)
from tandem.server.api.http1 import uvicorn_config

ACCEPTS_PER_TURN = 256
PER_TURN = 32
LISTEN_BACKLOG = 2048
MORE_FOR_PAGES = 32  # connections, beyond those that there may be
PEEKED_BYTES = 4096  # for the first line of a head
DISCARDED_BYTES = 1 << 16
RETRY_SECONDS = 1.0  # where file descriptors or memory have run out
NO_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedServer(uvicorn.Server):
    """uvicorn behind listeners that keep to `bounds`. Its sockets are bound, and its own."""

    def __init__(
        self, app: ASGIApp, bounds: ConnectionBounds, *, drain_seconds: int, lifespan: Literal["on", "off"] = "off"
    ) -> None:
        """drain_seconds: for running requests when it ends."""
        super().__init__(uvicorn_config(app, drain_seconds=drain_seconds, lifespan=lifespan, http=bounds.protocol()))
        self._bounds = bounds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.servers = [HttpListener(listener, self._bounds, self._connection) for listener in sockets or ()]  # type: ignore[misc]  # of what uvicorn does with a server, it can all

    def _connection(self) -> BoundedHttp1:
        kind = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg, return-value]  # uvicorn knows it as a class of asyncio


class HttpListener:
    """One listening socket on the running loop, until `close`."""

    def __init__(self, sock: socket.socket, bounds: ConnectionBounds, make: Callable[[], BoundedHttp1]) -> None:
        self._sock, self._bounds, self._make = sock, bounds, make
        self._loop = asyncio.get_running_loop()
        self._let_in: deque[socket.socket] = deque()  # with a place each
        self._is_closed = False
        self._is_connecting = False  # the next turn will begin with `_connect_some`
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: dict[RefusedConnection, None] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._no_means = new_line()
        sock.setblocking(False)
        sock.listen(LISTEN_BACKLOG)
        self._start()

    def close(self) -> None:
        """Nobody is accepted or let in any more. The listening socket stays the caller's."""
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()
        while self._let_in:
            self._bounds.num_open -= 1
            turn_away(self._let_in.popleft())
        for refused in tuple(self._refused):
            refused.close()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def _start(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in NO_MEANS:
                    raise
                self._no_means.note("a connection could not be accepted: no file descriptor, or no memory, is left")
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(RETRY_SECONDS, self._start)
                break
            sock.setblocking(False)
            self._take(sock)
        if not self._is_connecting:
            self._connect_some()

    def _take(self, sock: socket.socket) -> None:
        bounds, path = self._bounds, peeked_path(sock)
        if path in PAGES and bounds.num_open < bounds.max_connections + MORE_FOR_PAGES:
            bounds.num_open += 1
            self._begin(sock)
        elif bounds.num_open >= bounds.max_connections and not bounds.make_room(self._loop.time()):
            self._refuse(sock, TOO_MANY_CONNECTIONS)
        elif bounds.is_full and is_work(path):
            self._refuse(sock, TOO_MANY_REQUESTS)
        else:
            bounds.num_open += 1
            self._let_in.append(sock)

    def _connect_some(self) -> None:
        for _ in range(min(PER_TURN, len(self._let_in))):
            sock = self._let_in.popleft()
            if self._bounds.is_full and is_work(peeked_path(sock)):
                self._bounds.num_open -= 1
                self._refuse(sock, TOO_MANY_REQUESTS)
            else:
                self._begin(sock)
        self._is_connecting = bool(self._let_in)
        if self._is_connecting:
            self._loop.call_soon(self._connect_some)

    def _begin(self, sock: socket.socket) -> None:
        task = self._loop.create_task(self._connect(self._make(), sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: BoundedHttp1, sock: socket.socket) -> None:
        if self._is_closed:
            connection.leave_place()
            turn_away(sock)
            return
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # it has left
            connection.leave_place()
            sock.close()
            return
        if self._is_closed:
            connection.shutdown()  # the others were told before it was one of them

    def _refuse(self, sock: socket.socket, answer: bytes) -> None:
        bounds = self._bounds
        bounds.note_refusal(sock)
        try:
            sock.send(answer)
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it has left
            sock.close()
            return
        if len(bounds.lingering) >= bounds.max_lingering:
            sock.close()
            return
        refused = RefusedConnection(sock, self._loop, self._forget)
        self._refused[refused] = bounds.lingering[refused] = None

    def _forget(self, refused: "RefusedConnection") -> None:
        del self._refused[refused], self._bounds.lingering[refused]


class RefusedConnection:
    """A socket on which a refusal has been written, read to its end."""

    def __init__(
        self, sock: socket.socket, loop: asyncio.AbstractEventLoop, closed: "Callable[[RefusedConnection], None]"
    ) -> None:
        self._sock, self._loop, self._closed = sock, loop, closed
        self._timer = loop.call_later(LINGER_SECONDS, self.close)
        loop.add_reader(sock, self._discard)

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._closed(self)

    def _discard(self) -> None:
        try:
            if self._sock.recv(DISCARDED_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # it has left
        self.close()


def turn_away(sock: socket.socket) -> None:
    """At once. What it has sent is read before: closed with that unread, the connection would be reset."""
    with contextlib.suppress(OSError):  # nothing is there, or it has left
        sock.recv(DISCARDED_BYTES)
    with contextlib.suppress(OSError):
        sock.send(ENDING)
    sock.close()


def peeked_path(sock: socket.socket) -> str | None:
    """What it has asked for already, if anything. Nothing is taken from the socket."""
    try:
        return asked_path(sock.recv(PEEKED_BYTES, socket.MSG_PEEK))
    except OSError:  # nothing is there, or it has left
        return None


def is_work(path: str | None) -> bool:
    """Whether it is asked for, and no page that is served by who is full."""
    return path is not None and path not in PAGES
