"""Pages that readers read by NIXL: who may, when they count, and what becomes of reads that do not end.

NIXL moves them over TCP here, where a frozen owner answers nothing; its other way on one host reads the memory of
another process though that is frozen.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
from transfer_world import (
    DECODE,
    NOTHING_OPEN,
    PREFILL,
    SECRET,
    WITH_NIXL,
    ServingProcess,
    Side,
    eventually,
    introduced,
    pair,
    target,
    transfer_threads,
)

from attackers_data import Asker
from data_planes import introduce
from tandem.core.events import PagesLanded, ReadsDrained, TransferFailed
from tandem.core.kv_parts import Runs
from tandem.core.values import Cause
from tandem.transfer import nixl_access, protocol
from tandem.transfer.link import LinkBroken, LinkFrozen
from tandem.transfer.port import Backend, Held
from tandem.transfer.protocol import Status

pytestmark = WITH_NIXL
PAGE_BYTES = 64 << 10
NUM_PAGES = 64
ALL = range(NUM_PAGES)
LEFT: list[Any] = []
OWN = b"of a request that came later ".ljust(PAGE_BYTES, b".")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Over TCP, and every agent that was made is destroyed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    yield
    eventually(lambda: not transfer_threads(), f"the end of {transfer_threads()}")
    left = living()
    LEFT.extend(left)  # for good: they are written to
    nixl_memory().LIVING.clear()
    assert not left


def nixl_memory() -> Any:  # a module that may not be there
    return import_module("tandem.transfer.nixl_memory")


def living() -> list[Any]:
    return list(nixl_memory().LIVING)


def the_agent() -> Any:
    assert len(living()) == 1
    return living()[0]


class Reading:
    """The reads of this process, held up before they are seen to be done until they are let go on."""

    def __init__(self) -> None:
        self._begun, self._goes_on = threading.Event(), threading.Event()

    def is_done(self, transfer: object) -> bool:
        self._begun.set()
        return self._goes_on.is_set() and REAL_IS_DONE(transfer)

    def wait(self) -> None:
        assert self._begun.wait(10)

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    global REAL_IS_DONE
    it, transfer = Reading(), nixl_memory().Transfer
    REAL_IS_DONE = transfer.is_done
    monkeypatch.setattr(transfer, "is_done", lambda self: it.is_done(self))
    yield it
    it.go_on()


REAL_IS_DONE: Any = None


# --- reads that do not end -------------------------------------------------------------------------------------------


@contextmanager
def serving(**options: object) -> Iterator[tuple[ServingProcess, Side]]:
    """A process whose pages a reader here reads."""
    server = ServingProcess(num_pages=NUM_PAGES, page_bytes=PAGE_BYTES, frame_ms=0, backend=Backend.NIXL)
    reader = Side(DECODE, num_pages=NUM_PAGES, page_bytes=PAGE_BYTES, backend=Backend.NIXL, **options)  # type: ignore[arg-type]
    reader.lender = server
    try:
        reader.transfer.start_nixl(lends=False)
        introduce(reader.transfer, PREFILL, server.host, server.port)
        yield server, reader
    finally:
        server.end()
        reader.close()
        eventually(lambda: has_no_agent(reader), "the end of all reads")


def has_no_agent(reader: Side) -> bool:
    """Those that can be destroyed are, then."""
    pages = reader.transfer._reader
    pages._end_nixl()
    return not (pages._nixl or pages._restless)


def freezes_it_first(server: ServingProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read is posted when the owner stands still; those behind it as ever."""
    agent = nixl_memory().Agent
    read = agent.read

    def freeze_and_read(self: object, *args: object, **options: object) -> object:
        monkeypatch.setattr(agent, "read", read)
        server.freeze()
        return read(self, *args, **options)

    monkeypatch.setattr(agent, "read", freeze_and_read)


@pytest.mark.slow
def test_what_a_frozen_owner_sends_when_it_is_drained_comes_to_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL cannot take a read back: it goes on when the owner does."""
    with serving(io_timeout_s=0.5) as (server, reader):
        freezes_it_first(server, monkeypatch)
        reader.pull(1, ALL, ALL, server.digests)
        failed = reader.wait_failed(1)
        assert (failed.cause, failed.detail) == (Cause.PEER_LOST, "NIXL has not read within 0.5 s")
        reader.cancel(1)
        reader.wait_drained(1)
        for page in ALL:  # they are another request's now
            reader.write(page, OWN)
        late = the_agent()
        (slot,) = late._slots
        before = bytes(slot.buffer)
        server.signal(signal.SIGCONT)
        eventually(late.may_end, "the read goes on, and ends")
        assert bytes(slot.buffer) != before, "it came to where NIXL may write"
        assert all(reader.page(page) == OWN for page in ALL)


@pytest.mark.slow
def test_an_agent_whose_read_has_not_ended_is_not_used_again_and_ends_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(io_timeout_s=0.5) as (server, reader):
        freezes_it_first(server, monkeypatch)
        reader.pull(1, ALL, ALL, server.digests)
        reader.wait_failed(1)
        late = the_agent()
        server.signal(signal.SIGCONT)
        reader.pull(1, ALL, ALL, server.digests, attempt=1)
        reader.wait_landed(1, NUM_PAGES)
        assert late not in reader.transfer._reader._nixl.values()
        eventually(late.may_end, "the read goes on, and ends")
        reader.pull(1, ALL[:1], ALL[:1], server.digests[:8], attempt=2)  # whatever: a job that ends
        reader.wait(PagesLanded, 1, where=lambda event: event.attempt == 2)
        eventually(lambda: late not in living(), "its agent is destroyed")
        assert len(living()) == 1


def test_where_a_read_was_not_done_in_time_no_other_connection_reads_either(reading: Reading) -> None:
    """Whoever still has one to that worker is told to make another one."""
    with pair("nixl") as (owner, _):
        memory = owner.transfer._owner._nixl
        assert memory is not None
        settings = {"page_bytes": owner.page_bytes, "host": "127.0.0.1", "slot_bytes": 1 << 20, "timeout_s": 0.2}
        source, whole = nixl_access.source(memory.registered, **settings), Runs(0, owner.page_bytes, 1, 1)
        try:
            with pytest.raises(LinkFrozen), source.reach([1, 2], whole, has_news=lambda: False):
                pass
            assert source.is_spent
            with pytest.raises(LinkBroken, match="not used any more"), source.reach([3], whole, has_news=lambda: False):
                pass
        finally:
            reading.go_on()
            eventually(source.may_end, "the end of the read")
            source.end()


def test_an_owner_that_is_killed_while_nixl_reads_fails_the_attempt_before_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(io_timeout_s=60) as (server, reader):
        freezes_it_first(server, monkeypatch)
        reader.pull(1, ALL, ALL, server.digests)
        eventually(lambda: server.is_frozen, "it is asked")
        server.signal(signal.SIGKILL)
        assert reader.wait_failed(1).cause is Cause.PEER_LOST
        reader.cancel(1)
        reader.wait_drained(1)
        assert not reader.all(PagesLanded, 1)
        eventually(lambda: not living(), "its agent is destroyed")


def test_a_cancelled_pull_drains_soon_though_nixl_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(io_timeout_s=60) as (server, reader):
        freezes_it_first(server, monkeypatch)
        reader.pull(1, ALL, ALL, server.digests)
        eventually(lambda: server.is_frozen, "it is asked")
        reader.cancel(1)
        reader.wait_drained(1)
        assert reader.transfer.held() == Held()
        assert not reader.all(TransferFailed, 1)


@pytest.mark.slow
def test_agents_whose_reads_do_not_end_are_bounded_and_the_transfer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("tandem.transfer.reader"), "MAX_RESTLESS", 1)
    with serving(io_timeout_s=0.5) as (frozen, reader), serving() as (other, _):
        freezes_it_first(frozen, monkeypatch)
        reader.pull(1, ALL, ALL, frozen.digests)
        reader.wait_failed(1)
        introduce(reader.transfer, PREFILL, other.host, other.port)
        reader.lender = other
        reader.pull(2, ALL, ALL, other.digests, room=1)
        failed = reader.wait_failed(2)
        assert (failed.cause, "do not end" in failed.detail) == (Cause.TRANSFER_FAILED, True)


# --- when pages count ------------------------------------------------------------------------------------------------


def test_pages_that_are_taken_back_while_nixl_reads_them_are_void_though_their_bytes_are_right(
    reading: Reading,
) -> None:
    with pair("nixl") as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        reading.wait()
        owner.revoke(1)
        owner.publish(2, [200])  # what it had to say before, it has said now
        assert not owner.all(ReadsDrained, 1)
        assert owner.transfer.held() == Held(live_rooms=2, pinned_pages=101, open_transfers=1)
        reading.go_on()
        owner.wait_reads_drained(1)
        assert reader.wait_failed(1).cause is Cause.LEASE_EXPIRED
        assert not reader.all(PagesLanded, 1)


def test_a_page_that_is_overwritten_while_nixl_reads_is_told_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = nixl_memory().Agent
    read = agent.read
    with pair("nixl") as (owner, reader):
        digests = owner.publish(1, range(100))

        def overwrite_and_read(self: object, *args: object, **options: object) -> object:
            owner.write(77, b"another request".ljust(owner.page_bytes, b"."))
            return read(self, *args, **options)

        monkeypatch.setattr(agent, "read", overwrite_and_read)
        reader.pull(1, range(100), range(100), digests)
        assert reader.wait_failed(1).cause is Cause.CORRUPT_PAGES
        assert not reader.all(PagesLanded, 1)


def test_a_cancelled_pull_drains_when_its_read_has_ended_and_the_owners_pages_do_too(reading: Reading) -> None:
    with pair("nixl") as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        reading.wait()
        reader.cancel(1)
        owner.revoke(1)
        reading.go_on()
        reader.wait_drained(1)
        owner.wait_reads_drained(1)
        assert not reader.all(PagesLanded, 1)
        assert not reader.all(TransferFailed, 1)


def test_a_reader_whose_nixl_hangs_is_waited_for_for_a_timeout(reading: Reading) -> None:
    with pair("nixl", io_timeout_s=0.5) as (owner, reader):
        reader.pull(1, range(100), range(100), owner.publish(1, range(100)))
        reading.wait()
        owner.revoke(1)
        owner.wait_reads_drained(1)  # without a word of it
        assert reader.wait_failed(1).cause is Cause.PEER_LOST
        reading.go_on()
        eventually(lambda: has_no_agent(reader), "the end of the read")


def test_an_owner_that_lends_pages_beyond_its_memory_fails_the_transfer() -> None:
    with pair("nixl", num_pages=8) as (owner, reader):
        digests = owner.publish(1, [0, 1])
        owner.transfer._owner._lender.grants()[0].generations[8] = 1  # one behind the last
        reader.pull(1, [0, 8], [0, 1], digests)
        failed = reader.wait_failed(1)
        assert (failed.cause, "does not have" in failed.detail) == (Cause.TRANSFER_FAILED, True)


def test_all_connections_to_a_worker_share_one_agent_which_ends_with_the_last() -> None:
    with pair("nixl") as (owner, reader):
        digests = {request: owner.publish(request, range(64)) for request in range(1, 9)}
        for request in digests:
            reader.pull(request, range(64), range(64, 128), digests[request])
        for request in digests:
            reader.wait_landed(request, 64)
        assert len(living()) == 1
        reader.transfer.disconnect(PREFILL)
        eventually(lambda: not living(), "its agent is destroyed")


# --- who takes it ----------------------------------------------------------------------------------------------------

AUTO, SOCK, SHM, NIXL = Backend
WAYS = [
    ((NIXL, NIXL), "nixl"),
    ((NIXL, AUTO), "nixl"),
    ((AUTO, NIXL), "nixl"),
    ((NIXL, SOCK), None),
    ((SOCK, NIXL), None),
    ((NIXL, SHM), None),
    ((SHM, NIXL), None),
]


@contextmanager
def two(of_owner: Backend, of_reader: Backend, *, unix: bool, gives_back: bool = False) -> Iterator[tuple[Side, Side]]:
    owner = Side(PREFILL, seed=1, backend=of_owner, gives_back=gives_back)
    with introduced(owner, Side(DECODE, seed=2, backend=of_reader), unix=unix) as sides:
        yield sides


def pull(owner: Side, reader: Side) -> None:
    reader.pull(1, range(10), range(20, 30), owner.publish(1, range(10)))


def is_refused(owner: Side, reader: Side) -> str:
    """The words for it."""
    pull(owner, reader)
    failed = reader.wait_failed(1)
    assert failed.cause is Cause.TRANSFER_FAILED
    return failed.detail


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
@pytest.mark.parametrize(("backends", "way"), WAYS)
def test_who_is_set_to_nixl_takes_nothing_else_and_auto_follows(
    backends: tuple[Backend, Backend], way: str | None, unix: bool
) -> None:
    nixl_access.try_out()  # loads it, which under load takes longer than a pull may
    with two(*backends, unix=unix) as (owner, reader):
        if way is None:
            assert "--disaggregation-transfer-backend" in is_refused(owner, reader)
            return
        pull(owner, reader)
        reader.wait_landed(1, 10)
        size = reader.page_bytes
        assert reader.memory[20 * size : 30 * size] == owner.memory[: 10 * size]
        for side in (owner, reader):
            assert side.transfer.connections() == NOTHING_OPEN | {way: 1}


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_who_cannot_load_nixl_is_refused_or_says_so(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object, **__: object) -> None:
        raise nixl_access.Unavailable("NIXL cannot be loaded: no module named nixl")

    monkeypatch.setattr(nixl_access, "source" if who == "reader" else "register", unavailable)
    backends = (AUTO, NIXL) if who == "owner" else (NIXL, AUTO)
    with two(*backends, unix=True) as (owner, reader):
        expected = "nixl needs NIXL on both" if who == "owner" else "no module named nixl"
        assert expected in is_refused(owner, reader)


def test_memory_that_is_given_back_in_parts_is_not_registered() -> None:
    """`auto` follows nobody there. Who asks is told."""
    with two(AUTO, NIXL, unix=True, gives_back=True) as (owner, reader):
        assert "prefill set to nixl where layers have a window" in is_refused(owner, reader)
    with two(AUTO, AUTO, unix=True, gives_back=True) as (owner, reader):
        pull(owner, reader)
        reader.wait_landed(1, 10)


def test_nixl_is_loaded_where_it_is_needed_and_nowhere_else() -> None:
    program = """
import sys
sys.path[:0] = {path!r}
from transfer_world import Backend, pair
with pair("unix", backend=Backend.AUTO) as (owner, reader):
    reader.pull(1, [1], [2], owner.publish(1, [1]))
    reader.wait_landed(1, 1)
    assert reader.transfer.connections()["shm"] == 1
assert not [name for name in sys.modules if name.startswith("nixl")]
"""
    path = [one for one in sys.path if one.endswith(("tests", "e2e_cpu"))]
    subprocess.run([sys.executable, "-c", program.format(path=path)], check=True, timeout=60)


# --- what is said about it -------------------------------------------------------------------------------------------


def test_who_has_not_proved_the_secret_learns_nothing_of_the_memory() -> None:
    with pair("nixl") as (owner, _), Asker(target(owner, fabric="tcp"), secret=SECRET, reader=DECODE) as asker:
        asker.hear_challenge()
        forged = bytearray(asker.hello(needs_nixl=True))
        forged[-1] ^= 1
        welcome = asker.say_hello(bytes(forged))
        assert (welcome.status, welcome.has_nixl) == (Status.NOT_A_MEMBER, False)
        assert asker.is_closed()


@pytest.mark.parametrize("at", [0, 8, 16, 30, -1], ids=["tag", "address", "size", "metadata", "proof"])
def test_what_nixl_has_to_know_is_believed_with_its_proof_only(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handshake = import_module("tandem.transfer.handshake").OwnerHandshake
    registered = handshake.registered

    def changed(self: object, what: object) -> bytes:
        message = bytearray(registered(self, what))
        message[at] ^= 1
        return bytes(message)

    monkeypatch.setattr(handshake, "registered", changed)
    with pair("nixl") as (owner, reader):
        is_refused(owner, reader)
        assert not living()


@pytest.mark.parametrize("num_bytes", [0, 4097])
def test_a_member_that_registers_what_is_no_pages_fails_its_own_transfer(num_bytes: int) -> None:
    with pair("nixl") as (owner, reader):
        memory = owner.transfer._owner._nixl
        assert memory is not None
        honest = memory.registered
        memory.registered = protocol.Registered(honest.address, num_bytes, honest.metadata)
        assert f"registered {num_bytes} bytes" in is_refused(owner, reader)


def test_a_member_whose_metadata_are_none_fails_its_own_transfer() -> None:
    with pair("nixl") as (owner, reader):
        memory = owner.transfer._owner._nixl
        assert memory is not None
        honest = memory.registered
        memory.registered = protocol.Registered(honest.address, honest.num_bytes, b"not of NIXL" * 9)
        assert "metadata are not taken" in is_refused(owner, reader)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("::1", "lo"), ("0.0.0.0", None)]
)
def test_the_interface_of_an_address_is_found(host: str, expected: str | None) -> None:
    assert nixl_memory().interface_of(host) == expected


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    """That has made an agent."""
    start = "from tandem.transfer.nixl_memory import Agent\nagent = Agent('127.0.0.1', is_owner=True)\n"
    return subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True, timeout=60)


def test_an_agent_listens_on_the_interface_of_its_server_only() -> None:
    ended = in_a_process(
        "import os\n"
        "files = [f'/proc/self/fd/{one}' for one in os.listdir('/proc/self/fd')]\n"
        "own = {os.readlink(one) for one in files if os.path.lexists(one)}\n"
        "rows = [line.split() for line in open('/proc/net/tcp')][1:]\n"
        "print([row[1].split(':')[0] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in own])"
    )
    assert ended.stdout.strip() == "['0100007F']", ended.stderr


def test_a_process_that_has_an_agent_ends_by_sighup_as_ever() -> None:
    """UCX would take the signal, to wait for a debugger."""
    ended = in_a_process("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('alive')")
    assert (ended.returncode, ended.stdout) == (-signal.SIGHUP, "")


def test_what_may_end_begins_no_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent is destroyed next, and nothing may be under way then."""

    class Agent:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def meet(self, metadata: bytes) -> bytes:
            return b"the peer"

        def register(self, buffer: memoryview) -> None:
            raise AssertionError("a read begins")

        def destroy(self) -> bool:
            return True

    monkeypatch.setattr(nixl_memory(), "Agent", Agent)
    registered = protocol.Registered(0, NUM_PAGES * PAGE_BYTES, b"metadata")
    settings = {"page_bytes": PAGE_BYTES, "host": "127.0.0.1", "slot_bytes": PAGE_BYTES, "timeout_s": 1.0}
    memory = nixl_memory().ReadMemory(registered, **settings)
    try:
        assert memory.may_end()
        whole = Runs(0, PAGE_BYTES, 1, 1)
        with pytest.raises(LinkBroken, match="is not used any more"), memory.reach([0], whole, has_news=lambda: False):
            pass
    finally:
        memory.end()
