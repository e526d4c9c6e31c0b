"""Typed messages over one stream socket: the only way in which the processes of a server talk.

A frame is a 4-byte big-endian length and one msgpack object of a tagged union (`wire.py`, `core/pd/messages.py`).
Three ends over the same bytes, one per kind of process:

    PolledChannel    node process: never blocks; `send` only buffers, `flush` writes what the kernel takes
    AsyncChannel     API process: an asyncio protocol
    BlockingChannel  worker process: one reader thread, any number of senders

Memory is bounded: a frame has a largest size, and what waits for a slow reader has one too. Beyond that a channel
raises `ChannelFull`; its owner then refuses work or gives the neighbour up, whatever fits.

Between servers frames are *checked*: length and body each carry a CRC-32 that runs on from frame to frame. A bit that
was flipped on the way, a frame that is missing or comes twice ends the connection and is never taken for a message.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar  # Any: a union type as a value, which the type system cannot spell
from zlib import crc32

import msgspec

from tandem.server.wire import MAX_FRAME_BYTES

Incoming = TypeVar("Incoming")

HEAD_BYTES = 4
CHECK_BYTES = 4
READ_BYTES = 256 << 10
MAX_PENDING_BYTES = 64 << 20  # of a neighbour in the same server; it reads all the time, so this is never usual


class ChannelClosed(Exception):
    """The other end is gone."""


class ChannelFull(Exception):
    """The other end reads too slowly for what it is sent."""


class MessageTooLong(Exception):
    """Longer than the other end takes in one piece."""


class MalformedFrame(Exception):
    """Bytes that are no frame of this channel; the connection is of no use any more."""


class Frames(Generic[Incoming]):
    """Bytes in, messages out."""

    def __init__(self, incoming: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[Incoming]:
        """Messages that are complete with `data`; a cut one waits for the next call. Raises MalformedFrame."""
        self._buffer += data
        start = 0
        try:
            while (found := self._frame_at(start)) is not None:
                body, start = found
                yield self.decode(body)
        finally:
            del self._buffer[:start]

    def _frame_at(self, start: int) -> tuple[bytes, int] | None:
        """The body of the frame that begins at `start`, and where the frame stops; None while it is cut."""
        size = self._number_at(start)
        if size is None:
            return None
        return self._body_at(start + HEAD_BYTES, size)

    def _number_at(self, start: int) -> int | None:
        stop = start + HEAD_BYTES
        return int.from_bytes(self._buffer[start:stop]) if len(self._buffer) >= stop else None

    def _body_at(self, start: int, size: int) -> tuple[bytes, int] | None:
        if size > self.max_frame_bytes:
            raise MalformedFrame(f"a frame of {size} bytes; at most {self.max_frame_bytes} are allowed")
        stop = start + size
        return (bytes(memoryview(self._buffer)[start:stop]), stop) if len(self._buffer) >= stop else None

    def decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedFrame(str(error)) from error


class CheckedFrames(Frames[Incoming]):
    """Length, its check, body, its check: see the top of this file."""

    _check = 0  # of everything before

    def _frame_at(self, start: int) -> tuple[bytes, int] | None:
        size, check = self._number_at(start), self._number_at(start + HEAD_BYTES)
        if size is None or check is None:
            return None
        _compare(check, head_check(size, self._check))
        found = self._body_at(start + HEAD_BYTES + CHECK_BYTES, size)
        told = self._number_at(found[1]) if found is not None else None
        if found is None or told is None:
            return None
        body, stop = found
        self._check = crc32(body, check)
        _compare(told, self._check)
        return body, stop + CHECK_BYTES


def head_check(size: int, before: int) -> int:
    return crc32(size.to_bytes(HEAD_BYTES), before)


def _compare(told: int, found: int) -> None:
    if told != found:
        raise MalformedFrame("bytes were changed, lost or repeated on their way")


_encoder = msgspec.msgpack.Encoder()


def append_frame(buffer: bytearray, message: msgspec.Struct) -> None:
    """Encode `message` at the end of `buffer`, length first."""
    start = len(buffer)
    buffer += bytes(HEAD_BYTES)
    _encoder.encode_into(message, buffer, start + HEAD_BYTES)
    size = len(buffer) - start - HEAD_BYTES
    buffer[start : start + HEAD_BYTES] = size.to_bytes(HEAD_BYTES)


def append_checked_frame(buffer: bytearray, message: msgspec.Struct, before: int) -> int:
    """The same for `CheckedFrames`, after frames whose check was `before`. Returns the check for the next one."""
    body = _encoder.encode(message)
    check = head_check(len(body), before)
    after = crc32(body, check)
    buffer += len(body).to_bytes(HEAD_BYTES) + check.to_bytes(CHECK_BYTES) + body + after.to_bytes(CHECK_BYTES)
    return after


def frame(message: msgspec.Struct) -> bytes:
    buffer = bytearray()
    append_frame(buffer, message)
    return bytes(buffer)


class PolledChannel(Generic[Incoming]):
    """The end of one thread that waits for many sockets with `selectors`. Owns `sock`."""

    def __init__(
        self,
        sock: socket.socket,
        incoming: Any,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        is_checked: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        kind = CheckedFrames if is_checked else Frames
        self.frames: Frames[Incoming] = kind(incoming, max_frame_bytes=max_frame_bytes)
        self._max_pending_bytes = max_pending_bytes
        self._pending = bytearray()
        self._check: int | None = 0 if is_checked else None  # of everything that was sent

    @property
    def pending_bytes(self) -> int:
        """Sent, and not yet taken by the kernel."""
        return len(self._pending)

    def receive(self) -> list[Incoming]:
        """What is there now, maybe nothing. Raises ChannelClosed, MalformedFrame."""
        try:
            data = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("closed by the other end")
        return list(self.frames.feed(data))

    def send(self, message: msgspec.Struct) -> None:
        """Buffer; `flush` writes. Raises ChannelFull when the other end does not keep up."""
        if len(self._pending) > self._max_pending_bytes:
            raise ChannelFull(f"{len(self._pending)} bytes wait for a reader that does not read")
        if self._check is None:
            append_frame(self._pending, message)
        else:
            self._check = append_checked_frame(self._pending, message, self._check)

    def flush(self) -> None:
        """Write what the kernel takes without waiting. Raises ChannelClosed."""
        try:
            while self._pending:
                taken = self.sock.send(self._pending)
                del self._pending[:taken]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        self.sock.close()


class AsyncChannel(asyncio.Protocol, Generic[Incoming]):
    """The end of an event loop. Made by `open_channel`; `receive` is called for every message, in order."""

    def __init__(
        self,
        incoming: Any,
        *,
        receive: Callable[[Incoming], None],
        closed: Callable[[str], None],
        max_pending_bytes: int,
    ) -> None:
        self._frames: Frames[Incoming] = Frames(incoming)
        self._receive = receive
        self._closed = closed
        self._max_pending_bytes = max_pending_bytes
        self._transport: asyncio.Transport | None = None
        self._malformed = ""

    def send(self, message: msgspec.Struct, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Never waits. Raises ChannelFull, ChannelClosed, MessageTooLong, and what encoding raises: nothing is sent."""
        data = frame(message)
        if len(data) > max_bytes:
            raise MessageTooLong(f"{len(data)} bytes in one message; at most {max_bytes} are taken")
        if self._transport is not None and self._transport.get_write_buffer_size() > self._max_pending_bytes:
            raise ChannelFull("the other end does not keep up")
        self._write(data)

    def send_always(self, message: msgspec.Struct) -> None:
        """For what must not be refused because its number is bounded by what was sent before. Raises ChannelClosed."""
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ChannelClosed("closed")
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except MalformedFrame as error:
            assert self._transport is not None
            self._malformed = str(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed(self._malformed or (str(exc) if exc else "closed by the other end"))


async def open_channel(
    sock: socket.socket,
    incoming: Any,
    *,
    receive: Callable[[Incoming], None],
    closed: Callable[[str], None],
    max_pending_bytes: int = MAX_PENDING_BYTES,
) -> "AsyncChannel[Incoming]":
    """Put an event loop behind `sock`, which the channel owns from here on."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    channel: AsyncChannel[Incoming] = AsyncChannel(
        incoming, receive=receive, closed=closed, max_pending_bytes=max_pending_bytes
    )
    await loop.create_unix_connection(lambda: channel, sock=sock)
    return channel


class BlockingChannel(Generic[Incoming]):
    """The end of plain threads: one may `receive`, all may `send`. Owns `sock`."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames: Frames[Incoming] = Frames(incoming)
        self._sending = threading.Lock()

    def receive(self) -> list[Incoming]:
        """Wait for at least one message. Raises ChannelClosed, MalformedFrame."""
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("closed by the other end")
            if messages := list(self._frames.feed(data)):
                return messages

    def send(self, message: msgspec.Struct) -> None:
        """Return when the kernel has all of it: a reader that is slow slows the sender. Raises ChannelClosed."""
        data = frame(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
