"""The wire of the data plane: fixed-size little-endian headers, sizes checked before anything is allocated.

    owner -> reader   Challenge  first, on every connection: bytes that were never used before
    reader -> owner   Hello      which life of which server is meant, who asks, how large its pages are, a challenge for
                                 the owner, and the proof that the reader is a member of the cluster
    owner -> reader   Welcome    a status, and the owner's proof; anything but OK closes the connection. On a unix
                                 socket a descriptor of the owner's memory may come with it, if the reader wants it
    reader -> owner   Read       room, the secret of the grant, count, the runs of bytes that are wanted of each page,
                                 then count source pages and count generations (u64 each)
    owner -> reader   Frame*     a status and a count, then the runs of count pages, in the order asked for, until all
                                 are sent; a status other than OK has no pages and closes the connection

Who has got the memory copies from it: there no pages follow a Frame, which says that they may be copied now. Then

    reader -> owner   Copied     the pages of the Frame have been copied: nothing reads them any more
    owner -> reader   Frame      the same count: they were lent all the while. Another status: what was copied is void

The memory can be had in two ways: by that descriptor, or by NIXL. Then there follows the Welcome

    owner -> reader   Registered  where the memory lies and what NIXL has to know about it, with a proof

The first three are the handshake (`handshake.py`): their sizes and the place of the version are the same in all
versions, so that two versions can name what divides them. One Read is under way per connection, and it belongs to one
attempt of one request: a connection can therefore be cut without harm to anybody else. A peer that says anything else
is cut off without an answer.

Every `unpack_*` takes any bytes at all, and either returns what they say or raises Malformed.
"""

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any  # what a struct unpacks to

from msgspec import Struct

from tandem.core.kv_parts import KvShard, Runs
from tandem.core.values import Cause, Incarnation, ShardId
from tandem.membership import CHALLENGE_BYTES, PROOF_BYTES

MAGIC = b"TandemKV"
VERSION = 4
MAX_READ_PAGES = 2048  # pages that one Read may name
MAX_FRAME_PAGES = 512
FRAME_BYTES = 1 << 20  # of pages in one Frame, unless a single page is larger: larger frames fall out of the cache
COPIED_FRAME_BYTES = 4 << 20  # where the reader copies: every frame costs an answer, and holds the lease as long
GRANT_SECRET_BYTES = 16
DIGEST_BYTES = 16  # of an incarnation
MAX_NIXL_METADATA_BYTES = 1 << 16  # some hundred for each network card

_CHALLENGE = struct.Struct(f"<8sH6x{CHALLENGE_BYTES}s")
_HELLO = struct.Struct(f"<8sHHI{DIGEST_BYTES}s{DIGEST_BYTES}s{CHALLENGE_BYTES}s{PROOF_BYTES}s")
_WELCOME = struct.Struct(f"<8sHHI{PROOF_BYTES}s")
_READ = struct.Struct(f"<4sIQ{GRANT_SECRET_BYTES}sIIII")
_FRAME = struct.Struct("<II")
_COPIED = struct.Struct("<4sI")
_REGISTERED = struct.Struct("<4sIQQ")
_READ_TAG, _COPIED_TAG, _REGISTERED_TAG = b"READ", b"DONE", b"NIXL"
_WANTS_MEMORY, _TAKES_NIXL, _NEEDS_NIXL = 1, 2, 4  # of a Hello
_HAS_MEMORY, _HAS_NIXL = 1, 2  # of a Welcome
_U64_STOP = 1 << 64

CHALLENGE_MESSAGE_BYTES, HELLO_BYTES, WELCOME_BYTES = _CHALLENGE.size, _HELLO.size, _WELCOME.size
READ_BYTES, FRAME_HEADER_BYTES, COPIED_BYTES = _READ.size, _FRAME.size, _COPIED.size
REGISTERED_HEADER_BYTES = _REGISTERED.size
NAME_BYTES = 16  # of one page name in a Read: source page and generation
NO_PROOF = bytes(PROOF_BYTES)


class Status(IntEnum):
    """Numbers on the wire."""

    OK = 0
    NOT_GRANTED = 1  # never published, or not any more, or not to whoever asks: these are not told apart
    WRONG_GENERATION = 2
    OTHER_INCARNATION = 3  # not the life of the server that was meant
    WRONG_PAGE_BYTES = 4
    WRONG_VERSION = 5
    BUSY = 6  # all connections are in use, or all that one reader may have
    NOT_A_MEMBER = 7  # has not proved the secret of the cluster: nothing else is said to it
    OTHER_BACKEND = 8  # one side is to use a backend only that the other one cannot


# What a refusal means for the transfer, in words for the log and for the user.
REFUSALS: dict[Status, tuple[Cause, str]] = {
    Status.NOT_GRANTED: (Cause.LEASE_EXPIRED, "the peer does not lend these pages (any more)"),
    Status.WRONG_GENERATION: (Cause.CORRUPT_PAGES, "the peer has given a source page to another owner"),
    Status.OTHER_INCARNATION: (Cause.PEER_LOST, "the peer has restarted: another incarnation listens there"),
    Status.WRONG_PAGE_BYTES: (Cause.LAYOUT_MISMATCH, "page_bytes differs"),
    Status.WRONG_VERSION: (Cause.LAYOUT_MISMATCH, "version of the data plane differs"),
    Status.BUSY: (Cause.TRANSFER_FAILED, "the peer has no connection left"),
    Status.NOT_A_MEMBER: (Cause.TRANSFER_FAILED, "the peer says that this server does not have its cluster's secret"),
    Status.OTHER_BACKEND: (
        Cause.TRANSFER_FAILED,
        "the two servers' --disaggregation-transfer-backend do not fit: shm needs both servers on one host, under one "
        "user, and neither set to sock; nixl needs NIXL on both, neither set to sock or shm, and prefill set to nixl "
        "where layers have a window",
    ),
}


class Malformed(Exception):
    """The other side does not speak this protocol, or lies about sizes."""


class Hello(Struct, frozen=True):
    version: int
    page_bytes: int  # of a page of the owner, as the reader has it
    incarnation: bytes  # digest of the one that is meant
    reader: bytes  # digest of the worker that asks
    challenge: bytes  # for the owner
    proof: bytes
    wants_memory: bool = False
    takes_nixl: bool = False  # if the owner would rather
    needs_nixl: bool = False  # or not at all


class Welcome(Struct, frozen=True):
    version: int
    status: Status
    proof: bytes
    has_memory: bool = False  # a descriptor of it comes along
    has_nixl: bool = False  # Registered follows


class Registered(Struct, frozen=True):
    """Memory of an owner, as NIXL finds it."""

    address: int  # where it begins, in the owner
    num_bytes: int
    metadata: bytes


class Read(Struct, frozen=True):
    room: int
    secret: bytes  # of the grant
    count: int
    runs: Runs  # of each page


class Frame(Struct, frozen=True):
    status: Status
    count: int


def incarnation_digest(incarnation: Incarnation) -> bytes:
    return hashlib.sha256(incarnation.id.encode()).digest()[:DIGEST_BYTES]


def reader_digest(incarnation: Incarnation, shard: ShardId) -> bytes:
    """Of one worker: several of a server may read from one owner, and each has its own share of the connections."""
    return hashlib.sha256(f"{incarnation.id} {shard}".encode()).digest()[:DIGEST_BYTES]


def pack_challenge(challenge: bytes) -> bytes:
    return _CHALLENGE.pack(MAGIC, VERSION, challenge)


def unpack_challenge(message: bytes | bytearray) -> bytes:
    """The challenge. Of whatever version: the owner names a difference, once it has proved who it is."""
    magic, _, challenge = _fields(_CHALLENGE, message)
    if magic != MAGIC:
        raise Malformed("not a challenge")
    return challenge


def pack_hello(hello: Hello) -> bytes:
    wants = hello.wants_memory * _WANTS_MEMORY | hello.takes_nixl * _TAKES_NIXL | hello.needs_nixl * _NEEDS_NIXL
    page_bytes = hello.page_bytes
    return _HELLO.pack(
        MAGIC, hello.version, wants, page_bytes, hello.incarnation, hello.reader, hello.challenge, hello.proof
    )


def unpack_hello(message: bytes | bytearray) -> Hello:
    magic, version, wants, page_bytes, incarnation, reader, challenge, proof = _fields(_HELLO, message)
    if magic != MAGIC:
        raise Malformed("not a hello")
    return Hello(
        version=version,
        page_bytes=page_bytes,
        incarnation=incarnation,
        reader=reader,
        challenge=challenge,
        proof=proof,
        wants_memory=bool(wants & _WANTS_MEMORY),
        takes_nixl=bool(wants & _TAKES_NIXL),
        needs_nixl=bool(wants & _NEEDS_NIXL),
    )


def pack_welcome(status: Status, proof: bytes, *, has_memory: bool = False, has_nixl: bool = False) -> bytes:
    return _WELCOME.pack(MAGIC, VERSION, status, has_memory * _HAS_MEMORY | has_nixl * _HAS_NIXL, proof)


def unpack_welcome(message: bytes | bytearray) -> Welcome:
    magic, version, status, has, proof = _fields(_WELCOME, message)
    if magic != MAGIC:
        raise Malformed("not a welcome")
    return Welcome(
        version=version,
        status=_status(status),
        proof=proof,
        has_memory=bool(has & _HAS_MEMORY),
        has_nixl=bool(has & _HAS_NIXL),
    )


def pack_registered(registered: Registered) -> bytes:
    """Without the proof that ends the message."""
    metadata = registered.metadata
    assert len(metadata) <= MAX_NIXL_METADATA_BYTES
    head = _REGISTERED.pack(_REGISTERED_TAG, len(metadata), registered.address, registered.num_bytes)
    return head + metadata


def size_of_registered(header: bytes | bytearray) -> int:
    """Bytes of the whole message, of which this is the beginning."""
    tag, metadata_bytes, _, _ = _fields(_REGISTERED, header)
    if tag != _REGISTERED_TAG or metadata_bytes > MAX_NIXL_METADATA_BYTES:
        raise Malformed("not what NIXL has to know")
    return _REGISTERED.size + metadata_bytes + PROOF_BYTES


def unpack_registered(message: bytes | bytearray) -> Registered:
    if len(message) != size_of_registered(message[: _REGISTERED.size]):
        raise Malformed("not all of what NIXL has to know")
    _, _, address, num_bytes = _fields(_REGISTERED, message[: _REGISTERED.size])
    if address + num_bytes > _U64_STOP:
        raise Malformed("memory behind the end of all memory")
    return Registered(address=address, num_bytes=num_bytes, metadata=bytes(message[_REGISTERED.size : -PROOF_BYTES]))


def may_be_read(room: int, pages: Sequence[int], generations: Sequence[int]) -> bool:
    """Whether these numbers, which came from a peer, fit the fields of a Read."""
    numbers = (room, *pages, *generations)
    return min(numbers) >= 0 and max(numbers) < _U64_STOP


def pack_read(room: int, secret: bytes, runs: Runs, pages: Sequence[int], generations: Sequence[int]) -> bytes:
    count = len(pages)
    assert 0 < count <= MAX_READ_PAGES
    assert len(secret) == GRANT_SECRET_BYTES
    head = _READ.pack(_READ_TAG, count, room, secret, runs.first, runs.size, runs.stride, runs.count)
    return head + struct.pack(f"<{2 * count}Q", *pages, *generations)


def unpack_read(header: bytes | bytearray, kv: KvShard) -> Read:
    """Without its pages and generations: `Read.count` says how many of them follow.

    kv: what this owner has of a page, of which the runs must be cells
    """
    tag, count, room, secret, *numbers = _fields(_READ, header)
    if tag != _READ_TAG:
        raise Malformed("not a read")
    if not 0 < count <= MAX_READ_PAGES:
        raise Malformed(f"a read of {count} pages")
    runs = Runs(*numbers)
    if not kv.may_be_read(runs):
        raise Malformed("a read of bytes that no page has")
    return Read(room=room, secret=secret, count=count, runs=runs)


def unpack_names(body: bytes | bytearray, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source pages and generations of a Read."""
    if len(body) != count * NAME_BYTES:
        raise Malformed(f"{len(body)} bytes for the names of {count} pages")
    numbers = struct.unpack(f"<{2 * count}Q", body)
    return numbers[:count], numbers[count:]


def pack_frame(status: Status, count: int) -> bytes:
    return _FRAME.pack(status, count)


def unpack_frame(header: bytes | bytearray, *, count_max: int) -> Frame:
    """count_max: pages that are still due"""
    count_max = min(count_max, MAX_FRAME_PAGES)
    status, count = _fields(_FRAME, header)
    frame = Frame(status=_status(status), count=count)
    if frame.status is Status.OK and not 0 < count <= count_max:
        raise Malformed(f"a frame of {count} pages where at most {count_max} are due")
    return frame


def pack_copied(count: int) -> bytes:
    return _COPIED.pack(_COPIED_TAG, count)


def check_copied(message: bytes | bytearray, *, count: int) -> None:
    """count: pages of the frame"""
    if _fields(_COPIED, message) != (_COPIED_TAG, count):
        raise Malformed(f"no word that {count} pages have been copied")


def pages_of_a_frame(runs: Runs, *, is_copied: bool) -> int:
    """How many pages an owner sends, or lets a reader copy, at once."""
    frame_bytes = COPIED_FRAME_BYTES if is_copied else FRAME_BYTES
    return min(max(1, frame_bytes // runs.num_bytes), MAX_FRAME_PAGES)


def _fields(layout: struct.Struct, message: bytes | bytearray) -> tuple[Any, ...]:
    if len(message) != layout.size:
        raise Malformed(f"{len(message)} bytes where {layout.size} are due")
    return layout.unpack(message)


def _status(number: int) -> Status:
    try:
        return Status(number)
    except ValueError:
        raise Malformed(f"unknown status {number}") from None
