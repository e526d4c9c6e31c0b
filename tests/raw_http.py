"""HTTP by the byte, for what clients tidy up before they send it; and servers in threads: an application on a port as a
server has it, and others that say what a test wants.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import uvicorn

from tandem.server.api.http1 import uvicorn_config

PATIENCE_S = 45.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def ask(
    port: int,
    target: bytes | str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    host: str | None = "127.0.0.1",
) -> Reply:
    """One request on a connection of its own; `target` goes out as it is."""
    raw = target if isinstance(target, bytes) else target.encode("latin-1")
    lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Host: {host}"] if host is not None else []
    lines += ["Connection: close"] + ([f"Content-Length: {len(body)}"] if body or method == "POST" else [])
    head = method.encode() + b" " + raw + b" HTTP/1.1\r\n" + "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return exchange(port, head + body)


def exchange(port: int, data: bytes) -> Reply:
    """What comes back for these bytes until the server closes; status 0 when that is nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was all sent
            sock.sendall(data)
        return read_reply(sock)


def read_reply(sock: socket.socket) -> Reply:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    if not head:
        return Reply(0)
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Reply(int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}, body)


class ServerThread:
    """uvicorn in a thread, set up as at the server's own ports. `stop` lets open requests end, `stop(kill=True)` breaks
    their connections.
    """

    def __init__(self, app: Any, listener: socket.socket, *, lifespan: Literal["on", "off"] = "off") -> None:
        self._server = uvicorn.Server(uvicorn_config(app, drain_seconds=1, lifespan=lifespan))
        self._listener = listener
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)

    async def _run(self) -> None:
        await self._server.serve(sockets=[self._listener])
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def tell_to_stop(self, *, kill: bool = False) -> None:
        self._server.force_exit = kill
        self._server.should_exit = True  # of which it hears within a tenth of a second

    def stop(self, *, kill: bool = False) -> None:
        self.tell_to_stop(kill=kill)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """The port of an application that runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = ServerThread(app, listener)
    try:
        yield listener.getsockname()[1]
    finally:
        thread.stop()


class Handler(BaseHTTPRequestHandler):
    """Of somebody else's server, which says what it is told to, and nothing of it on stderr."""

    def say(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def handling(handler: type[Handler]) -> Iterator[int]:
    """The port of a server that handles every request so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
