"""Bytes of one stream, cut into frames: a 4-byte big-endian length, and one msgpack object.

No socket in here: what `channel.py` reads within a server, `node/session.py` reads between two.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

Incoming = TypeVar("Incoming")

HEAD_BYTES = 4
MAX_COMPLAINT_CHARS = 200  # of a decoder, which quotes the bytes it was given


class MalformedFrame(Exception):
    """Bytes that are no frame of this channel; the connection is of no use any more."""


class Splitter:
    """Bytes in, bodies of frames out. `max_frame_bytes` may change between two frames."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies that are complete with `data`; a cut one waits for the next call. Raises MalformedFrame.

        What has been taken out is not kept, also when the reader stops in between.
        """
        self._buffer += data
        start = 0
        try:
            while (found := self._body_at(start)) is not None:
                body, start = found
                yield body
        finally:
            del self._buffer[:start]

    def _body_at(self, start: int) -> tuple[bytes, int] | None:
        """The body of the frame that begins at `start`, and where the frame stops; None while it is cut."""
        begin = start + HEAD_BYTES
        if len(self._buffer) < begin:
            return None
        size = int.from_bytes(self._buffer[start:begin])
        if size > self.max_frame_bytes:
            raise MalformedFrame(f"a frame of {size} bytes; at most {self.max_frame_bytes} are allowed")
        stop = begin + size
        return (bytes(memoryview(self._buffer)[begin:stop]), stop) if len(self._buffer) >= stop else None


def decoded(decoder: msgspec.msgpack.Decoder[Incoming], body: bytes) -> Incoming:
    """The message in `body`. Raises MalformedFrame, and nothing else."""
    try:
        return decoder.decode(body)
    except Exception as error:  # besides its own errors: RecursionError, OverflowError, MemoryError, UnicodeDecodeError
        raise MalformedFrame(f"{type(error).__name__}: {error}"[:MAX_COMPLAINT_CHARS]) from error
