"""Typed messages over one stream socket: the only way in which the processes of a server talk.

A frame is a 4-byte big-endian length and one msgpack object of a tagged union (`wire.py`, `core/disagg/messages.py`).
Three ends over the same bytes, one per kind of process:

    PolledChannel    node process: never blocks; `send` only buffers, `flush` writes what the kernel takes
    AsyncChannel     API process: an asyncio protocol
    BlockingChannel  worker process: one reader thread, any number of senders

Memory is bounded: a frame has a largest size, and what waits for a slow reader has one too. Beyond that a channel
raises `ChannelFull`; its owner then refuses work or gives the local peer up, whatever fits.

Between servers, and between a node and a worker on another host, the same frames are sealed: `node/session.py`.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar  # Any: a union type as a value, which the type system cannot spell

import msgspec

from tandem.server.frames import HEAD_BYTES, MalformedFrame, Splitter, decoded
from tandem.server.node.session import TAG_BYTES, Seal, opened
from tandem.server.wire import MAX_FRAME_BYTES

Incoming = TypeVar("Incoming")

READ_BYTES = 256 << 10
MAX_PENDING_BYTES = 64 << 20  # of a local peer; it reads all the time, so this is never usual


class ChannelClosed(Exception):
    """The other end is gone."""


class ChannelFull(Exception):
    """The other end reads too slowly for what it is sent."""


class MessageTooLong(Exception):
    """Longer than the other end takes in one piece."""


class ChannelKeys(msgspec.Struct, frozen=True):
    """Of one end of a channel that leaves this machine."""

    sealing: bytes
    opening: bytes


class FrameDecoder(Generic[Incoming]):
    """Bytes in, messages out. `key`: of frames that are sealed."""

    def __init__(self, incoming: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES, key: bytes = b"") -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._opening = Seal(key) if key else None
        self._splitter = Splitter(max_frame_bytes + (TAG_BYTES if key else 0))

    def feed(self, data: bytes) -> Iterator[Incoming]:
        """Messages that are complete with `data`; a cut one waits for the next call. Raises MalformedFrame."""
        for body in self._splitter.feed(data):
            yield decoded(self._decoder, body if self._opening is None else opened(self._opening, body))


_encoder = msgspec.msgpack.Encoder()


def append_frame(buffer: bytearray, message: msgspec.Struct | msgspec.Raw) -> None:
    """Encode `message`, unless it is encoded, at the end of `buffer`, length first."""
    start = len(buffer)
    buffer += bytes(HEAD_BYTES)
    _encoder.encode_into(message, buffer, start + HEAD_BYTES)
    size = len(buffer) - start - HEAD_BYTES
    buffer[start : start + HEAD_BYTES] = size.to_bytes(HEAD_BYTES)


def append_sealed(buffer: bytearray, message: msgspec.Struct | msgspec.Raw, sealing: Seal | None) -> None:
    """As `append_frame`, and sealed where `sealing` says how."""
    if sealing is None:
        append_frame(buffer, message)
    else:
        buffer += sealing.frame(_encoder.encode(message))


def frame(message: msgspec.Struct) -> bytes:
    buffer = bytearray()
    append_frame(buffer, message)
    return bytes(buffer)


def receive_some(sock: socket.socket, max_bytes: int = READ_BYTES) -> bytes:
    """What a socket that does not block has now, maybe nothing. Raises ChannelClosed."""
    try:
        data = sock.recv(max_bytes)
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError as error:
        raise ChannelClosed(str(error)) from error
    if not data:
        raise ChannelClosed("closed by the other end")
    return data


def write_some(sock: socket.socket, pending: bytearray) -> None:
    """Write what the kernel takes without waiting, and take it out of `pending`. Raises ChannelClosed."""
    try:
        while pending:
            taken = sock.send(pending)
            del pending[:taken]
    except (BlockingIOError, InterruptedError):
        return
    except OSError as error:
        raise ChannelClosed(str(error)) from error


class PolledChannel(Generic[Incoming]):
    """The end of one thread that waits for many sockets with `selectors`. Owns `sock`."""

    def __init__(
        self,
        sock: socket.socket,
        incoming: Any,
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        keys: ChannelKeys | None = None,
    ) -> None:
        """keys: where the other end is on another host"""
        sock.setblocking(False)
        self.sock = sock
        self._frames: FrameDecoder[Incoming] = FrameDecoder(incoming, key=b"" if keys is None else keys.opening)
        self._sealing = None if keys is None else Seal(keys.sealing)
        self._max_pending_bytes = max_pending_bytes
        self._pending = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Sent, and not yet taken by the kernel."""
        return len(self._pending)

    def receive(self) -> list[Incoming]:
        """What is there now, maybe nothing. Raises ChannelClosed, MalformedFrame."""
        return list(self._frames.feed(receive_some(self.sock)))

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        """Buffer; `flush` writes. Raises ChannelFull when the other end does not keep up."""
        if len(self._pending) > self._max_pending_bytes:
            raise ChannelFull(f"{len(self._pending)} bytes wait for a reader that does not read")
        append_sealed(self._pending, message, self._sealing)

    def flush(self) -> None:
        """Write what the kernel takes without waiting. Raises ChannelClosed."""
        write_some(self.sock, self._pending)

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
        self._frames: FrameDecoder[Incoming] = FrameDecoder(incoming)
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

    def __init__(self, sock: socket.socket, incoming: Any, *, keys: ChannelKeys | None = None) -> None:
        """keys: where the other end is on another host"""
        sock.setblocking(True)
        self._sock = sock
        self._frames: FrameDecoder[Incoming] = FrameDecoder(incoming, key=b"" if keys is None else keys.opening)
        self._sealing = None if keys is None else Seal(keys.sealing)
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
        data = bytearray()
        try:
            with self._sending:  # sealed frames are numbered in the order in which they are sent
                append_sealed(data, message, self._sealing)
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
