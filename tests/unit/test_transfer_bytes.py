"""Any bytes at all at the doors of the data plane: they cost the connection, or the attempt, and nothing else."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_planes import job_of
from tandem.core.commands import PublishPages, PullPages
from tandem.core.events import Event
from tandem.core.kv_parts import KvShard, Runs
from tandem.core.values import Incarnation, PageId, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.digests import DIGEST_BYTES, unpack_digests
from tandem.transfer.handshake import OWNER_PURPOSE, NotProven, OwnerHandshake, ReaderHandshake
from tandem.transfer.jobs import OfferedPages
from tandem.transfer.owner import ReaderLink
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import Hello, Malformed, Registered, Status
from tandem.transfer.reader import PullFailed
from tandem.transfer.sock import SockTransfer

SECRET = ClusterSecret(b"the secret of this cluster")
OWNER, READER = Incarnation("prefill", "1"), Incarnation("decode", "2")
PAGE_BYTES, NUM_PAGES = 64, 8
COUNT_MAX = 5

DECODERS: dict[str, tuple[int, Callable[[bytes], object]]] = {
    "challenge": (protocol.CHALLENGE_MESSAGE_BYTES, protocol.unpack_challenge),
    "hello": (protocol.HELLO_BYTES, protocol.unpack_hello),
    "welcome": (protocol.WELCOME_BYTES, protocol.unpack_welcome),
    "read": (protocol.READ_BYTES, lambda message: protocol.unpack_read(message, KvShard.whole(PAGE_BYTES))),
    "frame": (protocol.FRAME_HEADER_BYTES, lambda message: protocol.unpack_frame(message, count_max=COUNT_MAX)),
    "names": (3 * protocol.NAME_BYTES, lambda message: protocol.unpack_names(message, 3)),
}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_a_decoder_returns_or_says_malformed(name: str, data: st.DataObject) -> None:
    size, decode = DECODERS[name]
    prefix = data.draw(st.sampled_from([b"", protocol.MAGIC, b"READ"]))
    rest = data.draw(st.one_of(st.binary(max_size=size + 3), st.just(b"\xff" * size), st.just(bytes(size))))
    message = (prefix + rest).ljust(size, b"\0")[: data.draw(st.sampled_from([size, size, size + 1, size - 1, 0]))]
    try:
        decode(message)
    except Malformed:
        return
    assert len(message) == size


REGISTERED = st.builds(
    Registered,
    st.integers(0, 2**63),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=300),
)


@given(registered=REGISTERED, proof=st.binary(min_size=32, max_size=32))
def test_what_nixl_has_to_know_survives_the_wire(registered: Registered, proof: bytes) -> None:
    message = protocol.pack_registered(registered) + proof
    assert protocol.size_of_registered(message[: protocol.REGISTERED_HEADER_BYTES]) == len(message)
    assert protocol.unpack_registered(message) == registered


@given(
    tag=st.sampled_from([b"NIXL", b"READ"]),
    numbers=st.tuples(*[st.sampled_from([0, 1, 9, 65536, 65537, 2**32 - 1])] * 2, st.integers(0, 2**64 - 1)),
    rest=st.binary(max_size=120),
)
def test_what_nixl_has_to_know_is_bounded_and_whole(tag: bytes, numbers: tuple[int, int, int], rest: bytes) -> None:
    message = struct.pack("<4sIQQ", tag, *numbers) + rest
    if tag != b"NIXL" or numbers[0] > protocol.MAX_NIXL_METADATA_BYTES:
        with pytest.raises(Malformed):  # nobody waits for so much
            protocol.size_of_registered(message[: protocol.REGISTERED_HEADER_BYTES])
    try:
        registered = protocol.unpack_registered(message)
    except Malformed:
        return
    assert len(registered.metadata) == numbers[0] <= protocol.MAX_NIXL_METADATA_BYTES
    assert registered.address + registered.num_bytes <= 2**64


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(-3, 3000))
def test_a_frame_is_never_larger_than_what_is_due_and_what_one_call_receives(
    status: int, count: int, count_max: int
) -> None:
    try:
        frame = protocol.unpack_frame(struct.pack("<II", status, count), count_max=count_max)
    except Malformed:
        return
    assert frame.status is not Status.OK or 0 < frame.count <= min(count_max, protocol.MAX_FRAME_PAGES)


@given(st.binary(max_size=100))
def test_digests_of_any_length_are_told(packed: bytes) -> None:
    if len(packed) % DIGEST_BYTES:
        with pytest.raises(ValueError, match="bytes of digests"):
            unpack_digests(packed)
    else:
        assert len(unpack_digests(packed)) == len(packed) // DIGEST_BYTES


@given(page_bytes=st.integers(1, 2**32 - 1), version=st.integers(0, 2**16 - 1), fields=st.binary(min_size=96))
def test_a_hello_survives_the_wire(page_bytes: int, version: int, fields: bytes) -> None:
    wants = [bool(byte & 1) for byte in fields[:3]]
    hello = Hello(version, page_bytes, fields[:16], fields[16:32], fields[32:64], fields[64:96], *wants)
    assert protocol.unpack_hello(protocol.pack_hello(hello)) == hello


# --- the handshake ---------------------------------------------------------------------------------------------------


def both() -> tuple[OwnerHandshake, ReaderHandshake]:
    return (
        OwnerHandshake(SECRET, incarnation=protocol.incarnation_digest(OWNER), page_bytes=PAGE_BYTES),
        ReaderHandshake(SECRET, peer=OWNER, reader=protocol.reader_digest(READER, ShardId(0)), page_bytes=PAGE_BYTES),
    )


def test_two_members_agree() -> None:
    owner, reader = both()
    hello, status = owner.hear(reader.hello(owner.challenge))
    assert (status, hello.reader) == (Status.OK, protocol.reader_digest(READER, ShardId(0)))
    assert reader.hear(owner.welcome(Status.OK)) is Status.OK


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_proved_and_cannot_be_exchanged(status: Status) -> None:
    owner, reader = both()
    owner.hear(reader.hello(owner.challenge))
    welcome = owner.welcome(status)
    assert reader.hear(welcome) is status
    for other in set(Status) - {status, Status.NOT_A_MEMBER}:
        with pytest.raises(NotProven):
            reader.hear(protocol.pack_welcome(other, protocol.unpack_welcome(welcome).proof))


@pytest.mark.parametrize(
    ("has_nixl", "nixl_only", "takes_nixl", "needs_nixl", "brings_nixl"),
    [
        (True, False, True, False, False),
        (True, False, False, True, True),
        (True, True, True, False, True),
        (True, True, False, False, False),
        (False, False, False, True, False),
    ],
)
def test_nixl_is_for_who_needs_it_or_where_there_is_nothing_else(
    has_nixl: bool, nixl_only: bool, takes_nixl: bool, needs_nixl: bool, brings_nixl: bool
) -> None:
    incarnation = protocol.incarnation_digest(OWNER)
    owner = OwnerHandshake(
        SECRET, incarnation=incarnation, page_bytes=PAGE_BYTES, has_nixl=has_nixl, nixl_only=nixl_only
    )
    reader = ReaderHandshake(
        SECRET, peer=OWNER, reader=bytes(16), page_bytes=PAGE_BYTES, takes_nixl=takes_nixl, needs_nixl=needs_nixl
    )
    _, status = owner.hear(reader.hello(owner.challenge))
    assert status is (Status.OTHER_BACKEND if nixl_only and not brings_nixl else Status.OK)
    assert reader.hear(owner.welcome(status)) is status
    assert owner.brings_nixl == reader.brings_nixl == brings_nixl


def test_an_owner_that_refuses_brings_nothing_whatever_it_says() -> None:
    """Its memory would be mapped, or an agent of NIXL made, for a connection that there is not."""
    owner, _ = both()
    reader = ReaderHandshake(
        SECRET, peer=OWNER, reader=bytes(16), page_bytes=PAGE_BYTES, wants_memory=True, takes_nixl=True
    )
    hello = reader.hello(owner.challenge)
    challenge = protocol.unpack_challenge(owner.challenge)
    for status, has_memory in [(Status.OK, True), (Status.OK, False), (Status.BUSY, True), (Status.BUSY, False)]:
        has = {"has_memory": has_memory, "has_nixl": True}
        said = protocol.pack_welcome(status, protocol.NO_PROOF, **has)[: -len(protocol.NO_PROOF)]
        proof = SECRET.proof(OWNER_PURPOSE, challenge, hello, said)
        assert reader.hear(protocol.pack_welcome(status, proof, **has)) is status
        is_ok = status is Status.OK
        assert (reader.brings_memory, reader.brings_nixl) == (is_ok and has_memory, is_ok and not has_memory)


@given(position=st.integers(0, protocol.HELLO_BYTES - 1), flip=st.integers(1, 255))
def test_a_hello_with_a_changed_byte_proves_nothing(position: int, flip: int) -> None:
    owner, reader = both()
    message = bytearray(reader.hello(owner.challenge))
    message[position] ^= flip
    try:
        _, status = owner.hear(message)
    except Malformed:
        return
    assert status is Status.NOT_A_MEMBER
    assert owner.welcome(Status.OK) == protocol.pack_welcome(Status.NOT_A_MEMBER, protocol.NO_PROOF)


@given(position=st.integers(0, protocol.WELCOME_BYTES - 1), flip=st.integers(1, 255))
def test_a_welcome_with_a_changed_byte_welcomes_nobody(position: int, flip: int) -> None:
    owner, reader = both()
    owner.hear(reader.hello(owner.challenge))
    message = bytearray(owner.welcome(Status.OK))
    message[position] ^= flip
    with contextlib.suppress(Malformed, NotProven):
        assert reader.hear(message) is Status.NOT_A_MEMBER


def test_neither_end_answers_its_own_question() -> None:
    owner, reader = both()
    hello = reader.hello(owner.challenge)
    mirror, _ = both()
    assert mirror.hear(hello)[1] is Status.NOT_A_MEMBER  # another connection, another challenge
    with pytest.raises(NotProven):
        reader.hear(protocol.pack_welcome(Status.OK, hello[-32:]))


# --- connections -----------------------------------------------------------------------------------------------------


class Plane:
    """A data plane with one published page, both of whose ends can be spoken to over a pair of sockets."""

    def __init__(self) -> None:
        self.memory = bytearray(range(NUM_PAGES)) * PAGE_BYTES
        self.events: list[Event] = []
        self.transfer = SockTransfer(
            Pages(memoryview(self.memory), PAGE_BYTES),
            KvShard.whole(PAGE_BYTES),
            incarnation=OWNER,
            secret=SECRET,
            host="127.0.0.1",
            report=self.events.append,
            io_timeout_s=5,
        )
        command = PublishPages(RequestId(1), 0, 0, (PageId(0),), (1,), 1)
        grant = self.transfer._owner.publish(command)
        self.transfer._owner.digested(grant, command, (bytes(DIGEST_BYTES),))
        self.grant = grant.secret


@pytest.fixture(scope="module")
def plane():
    plane = Plane()
    yield plane
    plane.transfer.close()


WORDS = st.one_of(
    st.binary(max_size=200),
    st.builds(
        protocol.pack_read,
        st.integers(0, 2**64 - 1),
        st.binary(min_size=16, max_size=16),
        st.builds(Runs, st.integers(0, 64), st.integers(0, 64), st.integers(0, 64), st.integers(0, 3)),
        st.just([0, 1]),
        st.just([1, 1]),
    ),
    st.builds(
        lambda count, rest: struct.pack("<4sIQ16sIIII", b"READ", count, 1, bytes(16), 0, 64, 64, 1) + rest,
        st.integers(0, 2**32 - 1),
        st.binary(max_size=64),
    ),
)


class Silent:
    """A handshake after which nothing is said."""

    brings_memory = brings_nixl = False

    def welcome(self, status: Status) -> bytes:
        return b""


@given(said=st.lists(WORDS, max_size=4).map(b"".join), copies=st.booleans())
def test_whatever_a_member_says_costs_it_the_connection_at_most(plane: Plane, said: bytes, copies: bool) -> None:
    owner = plane.transfer._owner
    before = bytes(plane.memory)
    near, far = socket.socketpair()
    with far:
        links.prepare(near, timeout_s=5)
        known = ReaderLink(near, b"somebody", has_memory=copies)
        owner._links[known] = threading.current_thread()
        assert owner._lender.admit(known, known.reader, 0)
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        owner._serve(known, Silent())
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := far.recv(4096):
                answer += data
    assert known not in owner._links
    assert answer in (b"", protocol.pack_frame(Status.NOT_GRANTED, 0))
    assert plane.memory == before


@given(said=st.binary(max_size=300), first=st.sampled_from([b"", struct.pack("<II", 0, 1), struct.pack("<II", 0, 2)]))
def test_whatever_an_owner_says_fails_the_attempt_at_most(plane: Plane, said: bytes, first: bytes) -> None:
    before = bytes(plane.memory)
    command = PullPages(
        RequestId(9), 0, 1, OWNER, 0, (0, 1), (1, 1), (PageId(6), PageId(7)), (bytes(16),), (plane.grant,)
    )
    offer = OfferedPages(digests=(0, 0), secret=plane.grant)
    near, far = socket.socketpair()
    with near, far:
        links.prepare(near, timeout_s=5)
        far.sendall(first + said)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((PullFailed, links.LinkBroken, Malformed)):
            plane.transfer._reader._receive_frame(job_of(command, offer, near, PAGE_BYTES))
    assert plane.memory[: 6 * PAGE_BYTES] == before[: 6 * PAGE_BYTES]
