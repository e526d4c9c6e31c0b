"""One HTTP/1.1 question to a server that nobody vouches for: one connection, one answer, every byte counted.

Why not httpx: it unpacks what is compressed, keeps connections whose next answer the other side may have written
already, and parses in Python, without a bound, what comes before the head (100 Continue for ever) and around the body
(chunks of one byte). Here `MAX_ANSWER_BYTES` are read in all, by a parser in C, and the connection is cut afterwards.
"""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import httptools

MAX_ANSWER_BYTES = 256 << 10  # with the head, and whatever frames the body
READ_BYTES = 16 << 10


class ExchangeError(Exception):
    """One line: why there is no answer that can be read."""


@dataclass(slots=True)
class HttpResponse:
    status: int = 0
    body: bytes = b""
    headers: Mapping[bytes, bytes] = field(
        default_factory=dict[bytes, bytes]
    )  # names in lower case; the last of a name


@dataclass(slots=True)
class _Reader:
    """What the parser calls. It gets all bytes in order, whatever the answer says of its own length."""

    answer: HttpResponse | None = None
    error: str = ""
    parser: httptools.HttpResponseParser = field(init=False)
    _body: list[bytes] = field(default_factory=list)
    _headers: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            self.error = "the answer is compressed, which nobody asked for"
        self._headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200 and self.answer is None:
            self.answer = HttpResponse(status, b"".join(self._body), self._headers)


async def exchange(
    host: str,
    port: int,
    method: str,
    target: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    connect_s: float | None = None,
) -> HttpResponse:
    """Ask `host`, a number. Raises OSError (not there, TimeoutError too) and ExchangeError."""
    async with asyncio.timeout(timeout_s):
        async with asyncio.timeout(connect_s):
            reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES, flags=socket.AI_NUMERICHOST)
        try:
            writer.write(request_bytes(host, port, method, target, body, headers or {}))
            return await _read(reader)  # meanwhile: who refuses a long body answers before it has read all of it
        finally:
            writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> HttpResponse:
    found, num_bytes = _Reader(), 0
    while found.answer is None:
        data = await reader.read(READ_BYTES)
        num_bytes += len(data)
        if not data:
            raise ExchangeError("the connection was closed before the answer had ended")
        if num_bytes > MAX_ANSWER_BYTES:
            raise ExchangeError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        try:
            found.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if found.answer is None:
                raise ExchangeError(f"the answer is not HTTP/1.1: {type(error).__name__}") from None
        if found.error:
            raise ExchangeError(found.error)
    return found.answer


def request_bytes(
    host: str, port: int, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {f'[{host}]' if ':' in host else host}:{port}"]
    lines += ["Connection: close", "Accept-Encoding: identity"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode("ascii") + (body or b"")
