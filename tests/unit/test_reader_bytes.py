"""What the threads of the data plane do with bytes, one call at a time."""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable

import pytest

from data_planes import job_of
from tandem.core.commands import PullPages
from tandem.core.events import Event, TransferFailed
from tandem.core.kv_parts import KvShard
from tandem.core.values import Cause, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import owner as owner_module
from tandem.transfer import protocol
from tandem.transfer import reader as reader_module
from tandem.transfer.digests import DIGEST_BYTES
from tandem.transfer.jobs import OfferedPages, PeerAddress, Trouble
from tandem.transfer.outbox import Outbox
from tandem.transfer.owner import PageOwner
from tandem.transfer.pages import Pages
from tandem.transfer.port import Backend
from tandem.transfer.protocol import Registered, Status
from tandem.transfer.puller import NO_ADDRESS
from tandem.transfer.reader import PageReader, PullFailed

PAGE_BYTES, NUM_PAGES = 64, 8
PEER = Incarnation("prefill", "1")
SOURCES, GENERATIONS, DESTINATIONS = (3, 1, 2), (7, 8, 9), (PageId(6), PageId(5), PageId(0))


def reader(tell: Callable[[Event], None] = lambda event: None) -> tuple[PageReader, bytearray]:
    memory, outbox = bytearray(PAGE_BYTES * NUM_PAGES), Outbox(tell)
    made = PageReader(
        Pages(memoryview(memory), PAGE_BYTES),
        KvShard.whole(PAGE_BYTES),
        incarnation=Incarnation("decode", "2"),
        secret=ClusterSecret(b"the secret of this cluster"),
        outbox=outbox,
        flush_later=outbox.flush,
        io_timeout_s=5,
        max_transfers=1,
        host="127.0.0.1",
        backend=Backend.SOCK,
    )
    return made, memory


def receive(said: bytes, digests: tuple[int, ...]) -> tuple[int, bytearray]:
    """A frame of up to three pages, as `said` by the peer."""
    made, memory = reader()
    command = PullPages(RequestId(1), 0, 1, PEER, 0, SOURCES, GENERATIONS, DESTINATIONS, (b"",), (b"",))
    near, far = socket.socketpair()
    with near, far:
        links.prepare(near, timeout_s=5)
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        try:
            return made._receive_frame(job_of(command, OfferedPages(digests, b""), near, PAGE_BYTES)), memory
        finally:
            made.close(grace_s=1)


def offered() -> tuple[list[bytes], tuple[int, ...]]:
    """Pages, and their digests as the owner makes them."""
    contents = [bytes([number]) * PAGE_BYTES for number in (1, 2, 3)]
    source = bytearray(PAGE_BYTES * NUM_PAGES)
    for page, content in zip(SOURCES, contents, strict=True):
        source[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = content
    pages = Pages(memoryview(source), PAGE_BYTES)
    return contents, tuple(pages.digests(SOURCES, pages.whole, room=1, sources=SOURCES, generations=GENERATIONS))


def test_a_frame_lands_in_its_destinations() -> None:
    contents, digests = offered()
    count, memory = receive(protocol.pack_frame(Status.OK, 3) + b"".join(contents), digests)
    assert count == 3
    for page, content in zip(DESTINATIONS, contents, strict=True):
        assert memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == content


@pytest.mark.parametrize("page", range(3))
@pytest.mark.parametrize("position", [0, PAGE_BYTES - 1])
def test_every_page_of_a_frame_is_compared_with_its_digest(page: int, position: int) -> None:
    contents, digests = offered()
    sent = bytearray(b"".join(contents))
    sent[page * PAGE_BYTES + position] ^= 1
    with pytest.raises(PullFailed) as raised:
        receive(protocol.pack_frame(Status.OK, 3) + sent, digests)
    assert raised.value.failure.trouble is Trouble.CORRUPT


@pytest.mark.parametrize("status", sorted(set(Status) - {Status.OK}))
def test_a_refusal_is_passed_on(status: Status) -> None:
    with pytest.raises(PullFailed) as raised:
        receive(protocol.pack_frame(status, 0), (0, 0, 0))
    assert (raised.value.failure.trouble, raised.value.failure.status) == (Trouble.REFUSED, status)


def test_digests_are_as_long_as_the_wire_says() -> None:
    contents, digests = offered()
    assert all(0 <= value < 1 << (8 * DIGEST_BYTES) for value in digests)
    assert len(contents) == len(set(digests))


def test_a_pull_that_fails_before_anything_is_asked_is_said_though_no_thread_has_a_job() -> None:
    said: list[Event] = []
    made, _ = reader(said.append)
    made.pull(PullPages(RequestId(1), 0, 1, PEER, 0, SOURCES, GENERATIONS, DESTINATIONS, (b"",), (b"",)))
    assert said == [TransferFailed(RequestId(1), 0, ShardId(0), Cause.PEER_LOST, NO_ADDRESS)]
    made.close(grace_s=1)


# --- a message drop by drop ------------------------------------------------------------------------------------------


class Dripping:
    """A link on which a byte comes with every second of a clock that nobody else moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int) -> int:
        self.now += 1
        buffer[0] = 7
        return 1


def test_a_small_message_that_comes_drop_by_drop_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Dripping()
    monkeypatch.setattr(links, "time", link)
    with pytest.raises(links.LinkFrozen):
        links.receive(link, 100, timeout_s=5)  # type: ignore[arg-type]
    assert link.now == 5


def test_a_small_message_that_is_whole_in_time_comes_however_many_drops_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Dripping()
    monkeypatch.setattr(links, "time", link)
    assert links.receive(link, 5, timeout_s=5) == bytes([7] * 5)  # type: ignore[arg-type]


def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def test_pulls_go_on_where_the_system_has_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[Event] = queue.Queue()
    made, _ = reader(told.put)

    monkeypatch.setattr(reader_module.threading, "Thread", no_thread)
    made.learn(PEER, Cut(), [PeerAddress("127.0.0.1", 1, "")])
    for request in (RequestId(1), RequestId(2)):
        secret = bytes(protocol.GRANT_SECRET_BYTES)
        made.pull(PullPages(request, 0, 1, PEER, 0, (3,), (7,), (PageId(6),), (bytes(DIGEST_BYTES),), (secret,)))
    for request in (RequestId(1), RequestId(2)):
        failed = told.get(timeout=20)
        assert isinstance(failed, TransferFailed)
        assert (failed.request, failed.cause) == (request, Cause.PEER_LOST)
    made.close(grace_s=5)


def test_memory_is_registered_later_where_the_system_has_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who needs NIXL would be told for ever that this is under way."""
    registered = Registered(0, PAGE_BYTES * NUM_PAGES, b"metadata")
    has_registered = threading.Event()

    class Memory:
        def __init__(self) -> None:
            self.registered = registered
            has_registered.set()

        def close(self) -> None:
            pass

    owner = PageOwner(
        Pages(memoryview(bytearray(PAGE_BYTES * NUM_PAGES)), PAGE_BYTES),
        KvShard.whole(PAGE_BYTES),
        incarnation=PEER,
        secret=ClusterSecret(b"the secret of this cluster"),
        host="127.0.0.1",
        unix_dir=None,
        outbox=Outbox(lambda event: None),
        io_timeout_s=5,
        max_links=4,
        memory=None,
        backend=Backend.AUTO,
        register=Memory,
    )
    try:
        with monkeypatch.context() as full:
            full.setattr(owner_module.threading, "Thread", no_thread)
            with pytest.raises(RuntimeError):
                owner._registered()
        assert owner._registered() is None
        assert has_registered.wait(20)
        owner.register()  # it is, or will be at once
        assert owner._registered() == registered
    finally:
        owner.close(grace_s=5)


def test_a_unix_socket_at_which_many_wait_is_waited_for_and_not_gone_round() -> None:
    """Else a server that is set to shm refused who came over TCP instead."""
    path = f"@tandem-test-{os.getpid()}"
    with links.listen_tcp("127.0.0.1") as tcp, links.listen_unix(path) as unix, contextlib.ExitStack() as waiting:
        port = tcp.getsockname()[1]
        unix.listen(1)
        for _ in range(2):
            waiting.enter_context(links.dial("127.0.0.1", port, path, timeout_s=1))
        with pytest.raises(links.LinkFrozen, match="does not answer"):
            links.dial("127.0.0.1", port, path, timeout_s=0.05)
        accepts = threading.Timer(0.1, lambda: waiting.enter_context(unix.accept()[0]))
        accepts.start()
        with links.dial("127.0.0.1", port, path, timeout_s=5) as link:
            assert links.way(link) == "unix"
        accepts.join()
