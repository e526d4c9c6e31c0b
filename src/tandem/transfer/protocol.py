"""The wire of the data plane: fixed-size little-endian headers, sizes checked before anything is allocated.

    reader -> owner   Hello     once per connection: which life of which server is meant, and how large its pages are
    owner -> reader   Welcome   a status; anything but OK closes the connection
    reader -> owner   Read      room, count, then count source pages and count generations (u64 each)
    owner -> reader   Frame*    a status and a count, then count pages, in the order asked for, until all are sent;
                                a status other than OK has no pages and closes the connection

One Read is under way per connection, and it belongs to one attempt of one request: a connection can therefore be cut
without harm to anybody else. A peer that says anything else is cut off without an answer.
"""

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from tandem.core.values import Cause, Incarnation

MAGIC = b"TandemKV"
VERSION = 1
MAX_READ_PAGES = 2048  # pages that one Read may name
MAX_FRAME_PAGES = 512  # with the header below the 1024 pieces that Linux takes in one sendmsg
FRAME_BYTES = 1 << 20  # of pages in one Frame, unless a single page is larger: larger frames fall out of the cache

_HELLO = struct.Struct("<8sHHI16s")
_WELCOME = struct.Struct("<8sHH4x")
_READ = struct.Struct("<4sIQ")
_FRAME = struct.Struct("<II")
_READ_TAG = b"READ"
_U64_STOP = 1 << 64

HELLO_BYTES, WELCOME_BYTES, READ_BYTES, FRAME_HEADER_BYTES = _HELLO.size, _WELCOME.size, _READ.size, _FRAME.size
NAME_BYTES = 16  # of one page name in a Read: source page and generation


class Status(IntEnum):
    """Numbers on the wire."""

    OK = 0
    NOT_GRANTED = 1  # never published, or not any more
    WRONG_GENERATION = 2
    OTHER_INCARNATION = 3  # not the life of the server that was meant
    WRONG_PAGE_BYTES = 4
    WRONG_VERSION = 5
    BUSY = 6  # all connections are in use


# What a refusal means for the transfer, in words for the log and for the user.
REFUSALS: dict[Status, tuple[Cause, str]] = {
    Status.NOT_GRANTED: (Cause.LEASE_EXPIRED, "the peer does not lend these pages (any more)"),
    Status.WRONG_GENERATION: (Cause.CORRUPT_PAGES, "the peer has given a source page to another owner"),
    Status.OTHER_INCARNATION: (Cause.PEER_LOST, "the peer has restarted: another incarnation listens there"),
    Status.WRONG_PAGE_BYTES: (Cause.LAYOUT_MISMATCH, "page_bytes differs"),
    Status.WRONG_VERSION: (Cause.LAYOUT_MISMATCH, "version of the data plane differs"),
    Status.BUSY: (Cause.TRANSFER_FAILED, "the peer has no connection left"),
}


class Malformed(Exception):
    """The other side does not speak this protocol, or lies about sizes."""


class Hello(Struct, frozen=True):
    version: int
    page_bytes: int
    incarnation: bytes  # digest of the one that is meant


class Read(Struct, frozen=True):
    room: int
    count: int


class Frame(Struct, frozen=True):
    status: Status
    count: int


def incarnation_digest(incarnation: Incarnation) -> bytes:
    return hashlib.sha256(incarnation.id.encode()).digest()[:16]


def pack_hello(peer: Incarnation, *, page_bytes: int) -> bytes:
    return _HELLO.pack(MAGIC, VERSION, 0, page_bytes, incarnation_digest(peer))


def unpack_hello(message: bytes | bytearray) -> Hello:
    magic, version, _, page_bytes, incarnation = _HELLO.unpack(message)
    if magic != MAGIC:
        raise Malformed("not a hello")
    return Hello(version=version, page_bytes=page_bytes, incarnation=incarnation)


def pack_welcome(status: Status) -> bytes:
    return _WELCOME.pack(MAGIC, VERSION, status)


def unpack_welcome(message: bytes | bytearray) -> Status:
    magic, _, status = _WELCOME.unpack(message)
    if magic != MAGIC:
        raise Malformed("not a welcome")
    return _status(status)


def may_be_read(room: int, pages: Sequence[int], generations: Sequence[int]) -> bool:
    """Whether these numbers, which came from a peer, fit the fields of a Read."""
    numbers = (room, *pages, *generations)
    return min(numbers) >= 0 and max(numbers) < _U64_STOP


def pack_read(room: int, pages: Sequence[int], generations: Sequence[int]) -> bytes:
    count = len(pages)
    assert 0 < count <= MAX_READ_PAGES
    return _READ.pack(_READ_TAG, count, room) + struct.pack(f"<{2 * count}Q", *pages, *generations)


def unpack_read(header: bytes | bytearray) -> Read:
    tag, count, room = _READ.unpack(header)
    if tag != _READ_TAG:
        raise Malformed("not a read")
    if not 0 < count <= MAX_READ_PAGES:
        raise Malformed(f"a read of {count} pages")
    return Read(room=room, count=count)


def unpack_names(body: bytes | bytearray, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source pages and generations of a Read."""
    numbers = struct.unpack(f"<{2 * count}Q", body)
    return numbers[:count], numbers[count:]


def pack_frame(status: Status, count: int) -> bytes:
    return _FRAME.pack(status, count)


def unpack_frame(header: bytes | bytearray, *, count_max: int) -> Frame:
    status, count = _FRAME.unpack(header)
    frame = Frame(status=_status(status), count=count)
    if frame.status is Status.OK and not 0 < count <= count_max:
        raise Malformed(f"a frame of {count} pages where at most {count_max} are due")
    return frame


def _status(number: int) -> Status:
    try:
        return Status(number)
    except ValueError:
        raise Malformed(f"unknown status {number}") from None
