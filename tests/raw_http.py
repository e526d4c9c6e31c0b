"""HTTP by the byte, for what clients tidy up before they send it; and an application on a port as a server has it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tandem.server.api.http1 import uvicorn_config

PATIENCE_S = 20.0


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


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """The port of an application that runs in a thread, set up as the server's own ports are."""
    server = uvicorn.Server(uvicorn_config(app, drain_seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not server.started:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
