"""Pages that readers copy from shared memory: what they may map, when a copy counts, and who waits for whom."""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from transfer_world import DECODE, NOTHING_OPEN, PREFILL, SECRET, ServingProcess, Side, introduced, pair, target

from attackers_data import Asker, Impostor
from data_planes import introduce
from tandem.core.events import PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.values import Cause
from tandem.transfer import link as links
from tandem.transfer import owner as owner_module
from tandem.transfer import pages as pages_module
from tandem.transfer import protocol, shared_memory
from tandem.transfer.port import Backend, Held
from tandem.transfer.protocol import Malformed, Status
from tandem.transfer.shared_memory import PeerMemory, file_of

PAGE_BYTES = 4096


class Copying:
    """The copy of a reader in this process, held up in its middle until it is let go on."""

    def __init__(self) -> None:
        self._begun, self._goes_on = threading.Event(), threading.Event()

    def copy(self, target: memoryview, to_at: Sequence[int], source: memoryview, from_at: Sequence[int], *, size: int):
        half = len(to_at) // 2
        REAL_COPY(target, to_at[:half], source, from_at[:half], size=size)
        self._begun.set()
        assert self._goes_on.wait(30)
        REAL_COPY(target, to_at[half:], source, from_at[half:], size=size)

    def wait(self) -> None:
        assert self._begun.wait(10)

    def go_on(self) -> None:
        self._goes_on.set()


REAL_COPY = pages_module.copy_pieces


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    it = Copying()
    monkeypatch.setattr(pages_module, "copy_pieces", it.copy)
    yield it
    it.go_on()


def says_something(owner: Side, request: int) -> None:
    """Whatever the owner had to say before, it has said when this returns: events keep their order."""
    owner.publish(request, [200])


# --- when a copy counts ----------------------------------------------------------------------------------------------


def test_a_page_that_is_overwritten_during_the_copy_is_a_failure_that_can_be_tried_again(copying: Copying) -> None:
    with pair("shm") as (owner, reader):
        digests = owner.publish(1, range(100))
        reader.pull(1, range(100), range(100), digests)
        copying.wait()
        owner.write(77, b"another request".ljust(PAGE_BYTES, b"."))
        copying.go_on()
        assert reader.wait_failed(1).cause is Cause.CORRUPT_PAGES
        assert not reader.all(PagesLanded, 1)
        reader.cancel(1)
        reader.wait_drained(1)
        reader.pull(1, range(100), range(100), owner.publish(1, range(100), attempt=1), attempt=1)
        reader.wait_landed(1, 100)
        assert reader.memory[: 100 * PAGE_BYTES] == owner.memory[: 100 * PAGE_BYTES]


def test_pages_are_not_drained_while_a_reader_copies_them_and_what_it_has_copied_then_is_void(copying: Copying) -> None:
    """Though its bytes are right: nobody has overwritten them yet."""
    with pair("shm") as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        copying.wait()
        owner.revoke(1)
        says_something(owner, 2)
        assert not owner.all(ReadsDrained, 1)
        assert owner.transfer.held() == Held(live_rooms=2, pinned_pages=101, open_transfers=1)
        copying.go_on()
        owner.wait_reads_drained(1)
        assert reader.wait_failed(1).cause is Cause.LEASE_EXPIRED
        assert not reader.all(PagesLanded, 1)
        assert reader.memory[: 100 * PAGE_BYTES] == owner.memory[: 100 * PAGE_BYTES]


def test_a_cancelled_pull_drains_when_its_copy_has_ended_and_the_owners_pages_do_too(copying: Copying) -> None:
    with pair("shm") as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        copying.wait()
        reader.cancel(1)
        owner.revoke(1)
        reader.pull(2, [200], [200], b"")  # no digests: fails at once
        reader.wait_failed(2)
        says_something(owner, 3)
        assert not reader.all(TransferDrained, 1)
        assert not owner.all(ReadsDrained, 1)
        copying.go_on()
        reader.wait_drained(1)
        owner.wait_reads_drained(1)
        assert not reader.all(PagesLanded, 1)
        assert not reader.all(TransferFailed, 1)


def test_a_reader_that_is_frozen_in_its_copy_is_waited_for_for_a_timeout_and_no_page_of_it_counts(
    copying: Copying,
) -> None:
    with pair("shm", io_timeout_s=0.3) as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        copying.wait()
        owner.revoke(1)
        owner.wait_reads_drained(1)  # without a word of it
        assert owner.transfer.held() == Held()
        copying.go_on()
        assert reader.wait_failed(1).cause is Cause.LEASE_EXPIRED
        assert not reader.all(PagesLanded, 1)


def test_an_owner_that_closes_during_a_copy_has_not_confirmed_it(copying: Copying) -> None:
    with pair("shm") as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        copying.wait()
        owner.close()
        copying.go_on()
        assert reader.wait_failed(1).cause is Cause.PEER_LOST
        assert not reader.all(PagesLanded, 1)


def test_an_owner_that_is_killed_during_a_copy_has_not_confirmed_it(copying: Copying) -> None:
    server = ServingProcess(num_pages=64, page_bytes=PAGE_BYTES, frame_ms=0, shares=True)
    reader = Side(DECODE, backend=Backend.SHM)
    reader.lender = server
    try:
        introduce(reader.transfer, PREFILL, server.host, server.port, server.unix)
        reader.pull(1, range(64), range(64), server.digests)
        copying.wait()
        server.end()
        copying.go_on()
        assert reader.wait_failed(1).cause is Cause.PEER_LOST
        assert not reader.all(PagesLanded, 1)
    finally:
        reader.close()
        server.end()


READ = """
import json, mmap, sys, threading
from tandem.core.commands import PullPages
from tandem.core.kv_parts import KvShard
from tandem.core.values import Cut, Incarnation
from tandem.membership import ClusterSecret
from tandem.transfer import pages
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.port import Backend
from tandem.transfer.sock import SockTransfer

name, id, secret, page_bytes, numbers, at, digests, granted = json.loads(sys.argv[1])
def copy(*args, **options):
    print("copies", flush=True)
    while True:
        pass  # as a copy does: computes, and hears no signal that Python would handle
pages.copy_pieces = copy
peer = Incarnation(name, id)
memory = memoryview(mmap.mmap(-1, 64 * page_bytes))
transfer = SockTransfer(pages.Pages(memory, page_bytes), KvShard.whole(page_bytes), host="127.0.0.1",
                        incarnation=Incarnation("decode", "9"), secret=ClusterSecret(bytes.fromhex(secret)),
                        report=lambda event: print(event, file=sys.stderr), backend=Backend.SHM)
transfer.connect(peer, Cut(), [PeerAddress(*at)])
transfer.pull(PullPages(1, 0, 1, peer, 0, tuple(numbers), (1,) * len(numbers), tuple(numbers),
                        (bytes.fromhex(digests),), (bytes.fromhex(granted),)))
threading.Event().wait()
"""


@contextmanager
def reading_process(owner: Side, pages: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """It copies when entered, for as long as it lives."""
    plane, digests = owner.transfer, owner.publish(1, pages)
    at = (plane.host, plane.port, plane.unix)
    told = (PREFILL.name, PREFILL.id, SECRET.raw.hex(), PAGE_BYTES, list(pages), at, digests.hex())
    words = json.dumps([*told, owner.secrets[1].hex()])
    process = subprocess.Popen([sys.executable, "-c", READ, words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "copies\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_is_killed_in_its_copy_leaves_drained_pages() -> None:
    with pair("shm") as (owner, _), reading_process(owner, range(32)) as process:
        owner.revoke(1)
        says_something(owner, 2)
        assert not owner.all(ReadsDrained, 1)
        process.send_signal(signal.SIGKILL)
        owner.wait_reads_drained(1)


# --- what travels how ------------------------------------------------------------------------------------------------

AUTO, SOCK, SHM, _ = Backend
WAYS = [
    ((AUTO, AUTO), "shm"),
    ((AUTO, SHM), "shm"),
    ((SHM, AUTO), "shm"),
    ((SHM, SHM), "shm"),
    ((AUTO, SOCK), "unix"),
    ((SOCK, AUTO), "unix"),
    ((SOCK, SOCK), "unix"),
    ((SHM, SOCK), None),
    ((SOCK, SHM), None),
]


@contextmanager
def two(of_owner: Backend, of_reader: Backend, *, unix: bool = True) -> Iterator[tuple[Side, Side]]:
    owner, reader = Side(PREFILL, seed=1, backend=of_owner), Side(DECODE, seed=2, backend=of_reader)
    with introduced(owner, reader, unix=unix):
        yield owner, reader


def ends_by(owner: Side, reader: Side, way: str | None) -> None:
    """One pull, and how its pages come; None: it is refused."""
    reader.pull(1, range(10), range(20, 30), owner.publish(1, range(10)))
    if way is None:
        failed = reader.wait_failed(1)
        assert failed.cause is Cause.TRANSFER_FAILED
        assert "--disaggregation-transfer-backend" in failed.detail
        return
    reader.wait_landed(1, 10)
    assert reader.memory[20 * PAGE_BYTES : 30 * PAGE_BYTES] == owner.memory[: 10 * PAGE_BYTES]
    for side in (owner, reader):
        assert side.transfer.connections() == NOTHING_OPEN | {way: 1}


@pytest.mark.parametrize(("backends", "way"), WAYS)
def test_the_two_sides_choose_how_pages_travel(backends: tuple[Backend, Backend], way: str | None) -> None:
    with two(*backends) as (owner, reader):
        ends_by(owner, reader, way)


@pytest.mark.parametrize(
    ("backends", "way"), [((AUTO, AUTO), "tcp"), ((SOCK, AUTO), "tcp"), ((AUTO, SHM), None), ((SHM, AUTO), None)]
)
def test_over_tcp_no_memory_travels(backends: tuple[Backend, Backend], way: str | None) -> None:
    with two(*backends, unix=False) as (owner, reader):
        ends_by(owner, reader, way)


@pytest.mark.parametrize(("backend", "way"), [(AUTO, "tcp"), (SHM, None)])
def test_another_user_of_this_host_is_given_no_memory(
    backend: Backend, way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "is_same_user", lambda link: False)
    with two(AUTO, backend) as (owner, reader):
        ends_by(owner, reader, way)


def test_an_owner_whose_pages_are_in_no_memfd_sends_them() -> None:
    server = ServingProcess(num_pages=64, page_bytes=PAGE_BYTES, frame_ms=0)
    reader = Side(DECODE)
    reader.lender = server
    try:
        introduce(reader.transfer, PREFILL, server.host, server.port, server.unix)
        reader.pull(1, range(64), range(64), server.digests)
        reader.wait_landed(1, 64)
        assert reader.transfer.connections() == NOTHING_OPEN | {"unix": 1}
    finally:
        reader.close()
        server.end()


def test_all_connections_to_a_worker_share_one_mapping_and_none_keeps_a_descriptor() -> None:
    with pair("shm", num_pages=256) as (owner, reader):
        digests = {request: owner.publish(request, range(64)) for request in range(1, 9)}
        before = num_descriptors_of(owner._descriptor)
        for request in digests:
            reader.pull(request, range(64), range(64, 128), digests[request])
        for request in digests:
            reader.wait_landed(request, 64)
        known = reader.transfer._reader._known
        assert len({id(one.memory) for one in known.values()}) == 1
        inode = os.fstat(owner._descriptor).st_ino
        mappings = [line.split()[:5] for line in Path("/proc/self/maps").read_text().splitlines()]
        assert sum(words[1] == "r--s" and words[4] == str(inode) for words in mappings) == 1
        assert num_descriptors_of(owner._descriptor) == before + 1, "a mapping of Python's keeps one of its own"


# --- who may do what with the memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", ["unix", "tcp"])
def test_who_has_not_proved_the_secret_gets_no_descriptor(fabric: str) -> None:
    with pair("shm") as (owner, _):
        link = socket.socket(socket.AF_UNIX) if fabric == "unix" else socket.socket()
        plane = owner.transfer
        link.connect(links.unix_address(plane.unix) if fabric == "unix" else (plane.host, plane.port))
        with link:
            links.prepare(link, timeout_s=5)
            asker = Asker.__new__(Asker)
            asker.target, asker.secret, asker.reader, asker.link = target(owner), SECRET, DECODE, link
            asker.hear_challenge()
            forged = bytearray(asker.hello(wants_memory=True))
            forged[-1] ^= 1
            link.sendall(forged)
            welcome, descriptor = links.receive_with_descriptor(link, protocol.WELCOME_BYTES, timeout_s=5)
            assert protocol.unpack_welcome(welcome).status is Status.NOT_A_MEMBER
            assert descriptor is None


@pytest.mark.parametrize("gives_back", [False, True])
def test_a_reader_can_write_nothing_and_the_owner_can(gives_back: bool) -> None:
    with pair("shm", gives_back=gives_back) as (owner, _), received_descriptor(owner) as descriptor:
        size = os.fstat(descriptor).st_size
        for harm in (
            lambda: mmap.mmap(descriptor, size),
            lambda: mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_WRITE),
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 0),
            lambda: os.ftruncate(descriptor, 2 * size),
            lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(OSError, match=r"Permission denied|Operation not permitted|Bad file|Invalid"):
                harm()
        memory = PeerMemory.map(descriptor, PAGE_BYTES)
        with pytest.raises(TypeError):
            memory.pages.view(3)[0] = 1
        owner.write(3, b"written later".ljust(PAGE_BYTES, b"."))
        assert memory.pages.view(3) == owner.page(3)
        if gives_back:
            owner.mapping.madvise(mmap.MADV_REMOVE, 3 * PAGE_BYTES, PAGE_BYTES)
            assert memory.pages.view(3) == owner.page(3) == bytes(PAGE_BYTES)
            owner.write(3, b"and again".ljust(PAGE_BYTES, b"."))
            assert memory.pages.view(3) == owner.page(3)


@contextmanager
def received_descriptor(owner: Side) -> Iterator[int]:
    """As a member gets it that wants the memory."""
    with Asker(target(owner), secret=SECRET, reader=DECODE) as asker:
        asker.hear_challenge()
        asker.say(asker.hello(wants_memory=True))
        _, descriptor = links.receive_with_descriptor(asker.link, protocol.WELCOME_BYTES, timeout_s=5)
        assert descriptor is not None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def memfd(size: int = 4 * PAGE_BYTES, seals: int = shared_memory.SEALS) -> int:
    descriptor = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


HARMFUL: dict[str, Callable[[], int]] = {
    "not sealed": lambda: memfd(seals=0),
    "may shrink": lambda: memfd(seals=shared_memory.SEALS & ~fcntl.F_SEAL_SHRINK),
    "may be written by others": lambda: memfd(seals=shared_memory.SEALS & ~shared_memory.F_SEAL_FUTURE_WRITE),
    "may be sealed further": lambda: memfd(seals=shared_memory.SEALS & ~fcntl.F_SEAL_SEAL),
    "no page": lambda: memfd(size=0),
    "half a page": lambda: memfd(size=PAGE_BYTES + PAGE_BYTES // 2),
    "a pipe": lambda: os.pipe()[0],
    "a device": lambda: os.open("/dev/zero", os.O_RDONLY),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_what_could_harm_its_reader_is_not_mapped(what: str) -> None:
    descriptor = HARMFUL[what]()
    with pytest.raises(Malformed):
        PeerMemory.map(descriptor, PAGE_BYTES)
    os.close(descriptor)


@pytest.mark.parametrize("what", ["not sealed", "may shrink", "half a page"])
def test_a_member_that_shares_what_could_harm_fails_its_own_transfer(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair("shm") as (owner, reader):
        honest, owner.transfer._owner._memory = owner.transfer._owner._memory, HARMFUL[what]()
        reader.pull(1, range(4), range(4), owner.publish(1, range(4)))
        failed = reader.wait_failed(1)
        assert (failed.cause, failed.detail.split(":")[0]) == (Cause.TRANSFER_FAILED, "not a data plane")
        os.close(owner.transfer._owner._memory)
        owner.transfer._owner._memory = honest
        reader.pull(2, range(4), range(4), owner.publish(2, range(4)))
        reader.wait_landed(2, 4)


def test_a_welcome_that_promises_memory_and_brings_none_is_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(link: socket.socket, message: bytes, descriptor: int, *, timeout_s: float) -> None:
        links.send(link, [message], timeout_s=timeout_s)

    monkeypatch.setattr(owner_module.links, "send_with_descriptor", without)
    with pair("shm") as (owner, reader):
        reader.pull(1, [0], [0], owner.publish(1, [0]))
        assert "no memory came" in reader.wait_failed(1).detail


def test_an_owner_that_lends_pages_beyond_its_memory_fails_the_transfer() -> None:
    """It says that they may be copied; the reader looks for itself."""
    with pair("shm", num_pages=8) as (owner, reader):
        grant = owner.transfer._owner._lender
        digests = owner.publish(1, [0, 1])
        grant.grants()[0].generations[8] = 1  # one behind the last
        reader.pull(1, [0, 8], [0, 1], digests)
        failed = reader.wait_failed(1)
        assert (failed.cause, "does not have" in failed.detail) == (Cause.TRANSFER_FAILED, True)


@pytest.mark.parametrize("word", [protocol.pack_copied(3), b"READ" + bytes(4), bytes(8), b""])
def test_a_reader_that_says_something_else_than_that_it_has_copied_is_cut_off(word: bytes) -> None:
    with pair("shm") as (owner, _):
        owner.publish(1, range(4))
        with Asker(target(owner), secret=SECRET, reader=DECODE) as asker:
            asker.hear_challenge()
            asker.say(asker.hello(wants_memory=True))
            _, descriptor = links.receive_with_descriptor(asker.link, protocol.WELCOME_BYTES, timeout_s=5)
            assert descriptor is not None
            os.close(descriptor)
            asker.ask(1, owner.secrets[1], range(2), [1, 1])
            assert links.receive(asker.link, 8, timeout_s=5) == protocol.pack_frame(Status.OK, 2)
            asker.say(word)
            asker.link.shutdown(socket.SHUT_WR)
            assert asker.is_closed()
        owner.revoke(1)
        owner.wait_reads_drained(1)


def test_nobody_who_does_not_speak_the_protocol_makes_a_reader_take_a_descriptor() -> None:
    """An impostor without the secret sends one with its welcome."""
    reader, descriptor = Side(DECODE, backend=AUTO), memfd()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name := f"\0impostor-{os.getpid()}")
        listener.listen()
        introduce(reader.transfer, PREFILL, "127.0.0.1", 1, "@" + name[1:])
        reader.pull(1, [0], [0], bytes(8))
        link, _ = listener.accept()
        with link:
            links.prepare(link, timeout_s=5)
            hello = Impostor.greet(None, link)  # type: ignore[arg-type]  # of any listener
            wrong = type(SECRET)(b"of another cluster")
            welcome = bytes(Impostor.welcome(Status.OK, wrong, hello))
            links.send_with_descriptor(link, welcome, descriptor, timeout_s=5)
            assert reader.wait_failed(1).cause is Cause.TRANSFER_FAILED
        assert num_descriptors_of(descriptor) == 1, "it has been kept"
    finally:
        os.close(descriptor)
        listener.close()
        reader.close()


def num_descriptors_of(descriptor: int) -> int:
    """How many this process has of that file, itself among them."""
    found = 0
    for other in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder, or somebody else has closed it
            found += file_of(int(other)) == file_of(descriptor)
    return found
