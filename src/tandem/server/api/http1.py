"""HTTP/1.1 as uvicorn speaks it, set up alike for every port, with what it leaves open closed.

- Who offers another protocol takes an answer in HTTP/1.1 as a no: Java's own client with `Upgrade: h2c` in each first
  request, Apache's with `Upgrade: TLS/1.2` in each GET. But the parser takes an offer for an agreement: it reads
  neither the body nor what comes on this connection afterwards. So offers are made unreadable (`Offers`).
- The parser keeps a head, or the trailer of a body, in memory until it is complete, however long it grows. Here
  `MAX_HEAD_BYTES` are read for it and no more.
- Fields of a trailer come from it as those of a head do. They are none: whoever stands before us, and says which
  headers pass, has not looked at them.
- What it cannot read is refused in the form of all other errors.
- Who speaks HTTP/1.0 (`ab`, many a health checker and proxy) cannot read chunks, with which uvicorn would answer. So a
  body whose length is not known goes out as it is, and ends with its connection.
- `proxy_headers` is off: who a client is, is told by its socket. Else anybody on this machine could be anybody.
"""

import asyncio
import re
from typing import Literal

import uvicorn
from starlette.types import ASGIApp, Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.server.api.errors import Failure, Problem, error_headers, error_json

NAME = b"\r\nupgrade"
OFFER, REFUSED = re.compile(b"(" + NAME[:-1] + b")e(?=:)", re.IGNORECASE), rb"\1x"
CUT = "tandem.cut"  # extension of a scope: ends the connection at once, whatever is still to be written
MAX_HEAD_BYTES = 1 << 16  # looked at after each such piece, so a head of nearly twice as much may pass


class Offers:
    """Of other protocols, in what comes on one connection.

    The name of the header gets another last letter, and nothing grows or shrinks: a body may have such a line, too, and
    whoever stands before us counts its bytes as they were sent. No valid JSON has one.
    """

    __slots__ = ("_held", "_tail")

    def __init__(self) -> None:
        self._tail = b""  # of what was passed on: a name may have begun there
        self._held = b""  # the last letter of a name: whether it is an offer, the next piece shows

    def hidden(self, data: bytes) -> bytes:
        """The next piece, as far as it may be read."""
        seen, known = self._tail + self._held + data, len(self._tail)
        held = len(seen) - 1 if seen[-len(NAME) :].lower() == NAME else len(seen)
        seen, self._held = seen[:held], seen[held:]
        self._tail = seen[1 - len(NAME) :]
        return OFFER.sub(REFUSED, seen + self._held)[known : len(seen)] if b"\r" in seen else seen[known:]


class Http1(HttpToolsProtocol):
    """One connection."""

    _kept_bytes = 0  # by the parser, since it last came to the end of a head, a piece of a body, or a message
    _is_unreadable = False  # the parser has given up
    _has_head = False  # of the message that comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._offers = Offers()

    def data_received(self, data: bytes) -> None:
        data = self._offers.hidden(data)
        for start in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[start : start + MAX_HEAD_BYTES]
            self._kept_bytes += len(piece)
            super().data_received(piece)
            if self._is_unreadable or self.transport.is_closing():
                return
            if self._kept_bytes >= MAX_HEAD_BYTES:
                self._refuse(HEAD_REFUSED)
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head = False
        self.scope["extensions"] = {CUT: self.cut}  # type: ignore[typeddict-item]  # ASGI has names of its own there

    def cut(self) -> None:
        self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._kept_bytes, self._has_head = 0, True
        super().on_headers_complete()
        if self.scope["method"] == "CONNECT":  # what follows is no HTTP, and the parser reads no further
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            self.cycle.send = unchunked(self.cycle)  # type: ignore[method-assign]  # of this one request

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._kept_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Uvicorn's tells the log what to install for a CONNECT."""

    def send_400_response(self, msg: str) -> None:
        """Uvicorn's, which says it where the parser gives up, as text and in the middle of whatever is being said."""
        self._is_unreadable = True
        self._refuse(UNREADABLE)

    def _refuse(self, answer: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.end_with(answer)
        elif not cycle.response_started and not self.pipeline:  # and it shall not be
            cycle.disconnected = True
            cycle.message_event.set()
            self.end_with(answer)
        else:  # it would land in the middle of an answer
            self.transport.close()

    def end_with(self, answer: bytes) -> None:
        """The last thing that is said here; nothing that comes is heard any more."""
        self.transport.write(answer)
        self.transport.close()


def unchunked(cycle: RequestResponseCycle) -> Send:
    """The cycle's `send`, by which a body without a length goes out as it is. Behind it the connection is closed."""
    send, has_length = cycle.send, True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # of this piece: uvicorn compares the two
        await send(message)  # type: ignore[arg-type]  # the same, as uvicorn names its kinds

    return send_plain


def whole_answer(failure: Failure, reason: str) -> bytes:
    """For a request that has no id yet, on a connection that ends with it. reason: the status in words."""
    body = error_json(failure, "")
    headers = error_headers(failure) | {"content-length": str(len(body)), "connection": "close"}
    lines = (f"HTTP/1.1 {failure.status} {reason}", *(f"{name}: {value}" for name, value in headers.items()))
    return "\r\n".join((*lines, "", "")).encode() + body


HEAD_REFUSED = whole_answer(
    Failure(Problem.HEAD_TOO_LARGE, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes"),
    "Request Header Fields Too Large",
)
UNREADABLE = whole_answer(Failure(Problem.MALFORMED_REQUEST, "this is no HTTP/1.1 that can be read"), "Bad Request")


def uvicorn_config(
    app: ASGIApp, *, drain_seconds: int, lifespan: Literal["on", "off"] = "off", http: type[Http1] = Http1
) -> uvicorn.Config:
    """The same for servers, bootstrap servers and routers. `drain_seconds`: for running requests when it ends."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=http,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_seconds,
    )
