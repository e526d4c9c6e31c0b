"""Pages travel between two data planes: what arrives, what is refused, and what every call answers."""

import os
import random
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest
from transfer_world import DECODE, NIXL, PREFILL, Gate, Side, eventually, pair, transfer_threads

from data_planes import introduce
from tandem.core.commands import PullPages
from tandem.core.events import PageRead, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.values import Cause, Incarnation
from tandem.transfer import link as links
from tandem.transfer.port import Backend

pytestmark = pytest.mark.usefixtures("no_transfer_thread_is_left")


@pytest.mark.parametrize("fabric", ["unix", "tcp", "shm", NIXL])
@pytest.mark.parametrize("page_bytes", [512, 4096, 16384, 1 << 20])
def test_scattered_pages_arrive_byte_for_byte(fabric: str, page_bytes: int) -> None:
    num_pages = min(4096, (16 << 20) // page_bytes)
    rng = random.Random(3)
    sources = rng.sample(range(num_pages), num_pages // 2)
    destinations = rng.sample(range(num_pages), num_pages // 2)
    with pair(fabric, num_pages=num_pages, page_bytes=page_bytes) as (owner, reader):
        before = bytes(reader.memory)
        reader.pull(1, sources, destinations, owner.publish(1, sources))
        reader.wait_landed(1, len(sources))
        assert all(reader.page(d) == owner.page(s) for s, d in zip(sources, destinations, strict=True))
        untouched = set(range(num_pages)) - set(destinations)
        assert all(reader.page(p) == before[p * page_bytes : (p + 1) * page_bytes] for p in untouched)


def test_the_watermark_only_grows_and_counts_all_commands_of_the_attempt() -> None:
    with pair(num_pages=4096, page_bytes=4096) as (owner, reader):
        for index in range(4):
            pages = range(index * 1000, (index + 1) * 1000)
            reader.pull(1, pages, pages, owner.publish(1, pages, first_page=index * 1000), first_wanted=index * 1000)
        reader.wait_landed(1, 4000)
        marks = [e.landed for e in reader.all(PagesLanded, 1)]
        assert marks == sorted(set(marks))
        assert set(marks) >= {1000, 2000, 3000, 4000}
        assert owner.memory[: 4000 * 4096] == reader.memory[: 4000 * 4096]


def test_a_later_command_goes_on_where_a_finished_one_ended() -> None:
    with pair() as (owner, reader):
        reader.pull(1, [0, 1], [10, 11], owner.publish(1, [0, 1]))
        reader.wait_landed(1, 2)
        reader.pull(1, [2], [12], owner.publish(1, [2], first_page=2), first_wanted=2)
        reader.wait_landed(1, 3)
        assert reader.page(12) == owner.page(2)


def test_many_requests_are_pulled_side_by_side() -> None:
    with pair(num_pages=1024, page_bytes=16384) as (owner, reader):
        pages = {request: range(32 * request, 32 * request + 32) for request in range(1, 31)}
        digests = {request: owner.publish(request, pages[request]) for request in pages}
        for request in pages:
            reader.pull(request, pages[request], pages[request], digests[request])
        for request in pages:
            reader.wait_landed(request, 32)
        assert all(reader.page(p) == owner.page(p) for r in pages for p in pages[r])
        assert transfer_threads().count("kv-pull") == 4 + 1  # the owner keeps one, too


def test_one_page_may_be_lent_to_several_rooms() -> None:
    with pair() as (owner, reader):
        first, second = owner.publish(1, [5, 6]), owner.publish(2, [5, 7])
        assert first[:8] != second[:8]  # a digest is of the page in its room
        owner.revoke(1)
        owner.wait_reads_drained(1)
        reader.pull(2, [5, 7], [0, 1], second)
        reader.wait_landed(2, 2)
        reader.pull(1, [5, 6], [2, 3], first)
        assert reader.wait_failed(1).cause == Cause.LEASE_EXPIRED


def test_a_page_that_changed_after_its_digest_fails_its_request_alone() -> None:
    with pair() as (owner, reader):
        torn, whole = owner.publish(1, range(100)), owner.publish(2, range(100, 200))
        flipped = bytearray(owner.page(57))
        flipped[1234] ^= 1
        owner.write(57, bytes(flipped))
        reader.pull(1, range(100), range(100), torn)
        reader.pull(2, range(100, 200), range(100, 200), whole)
        assert reader.wait_failed(1).cause == Cause.CORRUPT_PAGES
        reader.wait_landed(2, 100)
        assert not reader.all(TransferFailed, 2)
        assert all(e.landed <= 57 for e in reader.all(PagesLanded, 1))


def test_equal_bytes_of_another_page_are_not_accepted() -> None:
    with pair() as (owner, reader):
        for page in range(2):
            owner.write(page, bytes(owner.page_bytes))
        digests = owner.publish(1, [0, 1])
        reader.pull(1, [1, 0], [0, 1], digests)
        assert reader.wait_failed(1).cause == Cause.CORRUPT_PAGES


def test_pages_that_were_not_published_are_refused() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, [0, 1])
        reader.pull(1, [0, 1, 2], [0, 1, 2], digests + bytes(8))
        assert reader.wait_failed(1).cause == Cause.LEASE_EXPIRED
        reader.pull(2, [0], [0], digests[:8])  # published, but for another room
        assert reader.wait_failed(2).cause == Cause.LEASE_EXPIRED


def test_another_generation_is_refused() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, [0, 1], generation=4)
        reader.pull(1, [0, 1], [0, 1], digests, generation=3)
        failed = reader.wait_failed(1)
        assert failed.cause == Cause.CORRUPT_PAGES
        assert "another owner" in failed.detail
        assert not reader.all(PagesLanded, 1)


@pytest.mark.parametrize("fabric", ["unix", "tcp", "shm", NIXL])
def test_another_life_of_the_peer_is_refused(fabric: str) -> None:
    with pair(fabric) as (owner, reader):
        digests = owner.publish(1, [0])
        unix = "" if fabric == "tcp" else owner.transfer.unix
        for request, id in enumerate(("6", "8", ""), start=10):
            peer = Incarnation(PREFILL.name, id)
            introduce(reader.transfer, peer, owner.transfer.host, owner.transfer.port, unix)
            reader.pull(request, [0], [0], digests, peer=peer, room=1)
            failed = reader.wait_failed(request)
            assert failed.cause == Cause.PEER_LOST
            assert "another incarnation" in failed.detail


def test_a_peer_that_was_lost_is_not_asked_any_more() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, [0])
        reader.transfer.disconnect(PREFILL)
        reader.pull(1, [0], [0], digests)
        failed = reader.wait_failed(1)
        assert failed.cause == Cause.PEER_LOST
        assert "no address" in failed.detail


def test_a_peer_with_other_pages_is_refused_with_the_differing_field() -> None:
    with pair(page_bytes=4096) as (owner, _):
        reader = Side(DECODE, page_bytes=8192)
        introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, owner.transfer.unix)
        reader.pull(1, [0], [0], bytes(8))
        failed = reader.wait_failed(1)
        reader.transfer.close()
        assert failed.cause == Cause.LAYOUT_MISMATCH
        assert "page_bytes" in failed.detail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digests", ()),
        ("digests", (b"short",)),
        ("secrets", ()),
        ("secrets", (bytes(15),)),
        ("secrets", (bytes(17),)),
        ("generations", (1 << 64,)),
        ("sources", (-1,)),
        ("room", 1 << 80),
    ],
)
def test_an_offer_that_cannot_be_fails_the_transfer(field: str, value: object) -> None:
    fields = {
        "request": 1,
        "attempt": 0,
        "room": 1,
        "peer": PREFILL,
        "first_wanted": 0,
        "sources": (0,),
        "generations": (1,),
        "destinations": (0,),
        "digests": (bytes(8),),
        "secrets": (bytes(16),),
    }
    with pair() as (_, reader):
        reader.transfer.pull(PullPages(**(fields | {field: value})))
        assert reader.wait_failed(1).cause == Cause.TRANSFER_FAILED


def test_a_failed_attempt_fails_once_and_a_new_one_may_succeed() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, [0, 1])
        reader.pull(1, [0, 1], [0, 1], bytes(16))
        reader.wait_failed(1)
        reader.pull(1, [0, 1], [0, 1], digests, first_wanted=2)
        reader.cancel(1)
        reader.wait_drained(1)
        reader.pull(1, [0, 1], [0, 1], digests, attempt=1)
        reader.wait_landed(1, 2)
        assert len(reader.all(TransferFailed, 1)) == 1


def test_cancel_answers_once_whether_never_begun_under_way_failed_or_done() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, range(200))
        reader.cancel(4)  # never begun
        reader.pull(1, range(200), range(200), digests)  # under way
        reader.pull(2, [0], [200], bytes(8), room=1)  # fails
        reader.wait_failed(2)
        reader.pull(3, [0], [201], digests[:8], room=1)  # succeeds
        reader.wait_landed(3, 1)
        for _ in range(3):
            for request in (1, 2, 3, 4):
                reader.cancel(request)
        reader.pull(4, [0], [202], digests[:8], room=1)  # too late
        for request in (1, 2, 3, 4):
            reader.wait_drained(request)
        reader.cancel(5)  # answered behind everything that was to be said before
        reader.wait_drained(5)
        assert [len(reader.all(TransferDrained, request)) for request in (1, 2, 3, 4)] == [1, 1, 1, 1]
        assert not reader.all(PagesLanded, 4)


def test_a_pull_that_waits_for_a_thread_is_drained_at_once() -> None:
    with pair("tcp", num_pages=512, page_bytes=16384, max_transfers=1) as (owner, reader):
        gate = Gate(owner, pass_bytes=100_000)
        introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port, "")
        digests = owner.publish(1, range(256))
        reader.pull(1, range(256), range(256), digests)
        assert gate.is_full.wait(10)
        reader.pull(2, [0], [300], digests[:8], room=1)
        reader.cancel(2)
        reader.wait_drained(2)
        reader.cancel(1)
        reader.wait_drained(1)
        gate.close()


def test_revoke_answers_also_when_nothing_was_published_and_when_said_twice() -> None:
    with pair() as (owner, _):
        owner.revoke(9)
        owner.wait_reads_drained(9)
        owner.publish(1, [0])
        owner.revoke(1)
        owner.revoke(1)
        eventually(lambda: len(owner.all(ReadsDrained, 1)) >= 1, "reads drained")


def test_a_new_attempt_may_publish_what_an_earlier_one_had_revoked() -> None:
    with pair() as (owner, reader):
        owner.publish(1, [0])
        owner.revoke(1)
        owner.wait_reads_drained(1)
        digests = owner.publish(1, [0], attempt=1, generation=2)
        reader.pull(1, [0], [0], digests, generation=2)
        reader.wait_landed(1, 1)


def test_reads_are_reported_for_the_first_and_then_at_most_once_per_second() -> None:
    with pair() as (owner, reader):
        digests = owner.publish(1, range(8))
        begin = time.monotonic()
        for count in range(8):
            reader.pull(1, [count], [count], digests[8 * count : 8 * count + 8], first_wanted=count)
            reader.wait_landed(1, count + 1)
        owner.wait(PageRead, 1)
        assert len(owner.all(PageRead, 1)) <= 1 + (time.monotonic() - begin)


def test_connections_are_reused() -> None:
    with pair("tcp") as (owner, reader):
        for request in range(1, 20):
            reader.pull(request, [0], [0], owner.publish(request, [0]))
            reader.wait_landed(request, 1)
        assert transfer_threads().count("kv-owner") <= 4


@pytest.mark.parametrize("fabric", ["unix", "shm"])
def test_an_idle_connection_that_the_peer_closed_is_replaced(fabric: str) -> None:
    with pair(fabric, max_links=1, page_bytes=4096) as (owner, reader):
        digests = owner.publish(1, [0])
        reader.pull(1, [0], [0], digests)
        reader.wait_landed(1, 1)
        backend = Backend.SHM if fabric == "shm" else Backend.SOCK
        other = Side(Incarnation("other decode", "2"), page_bytes=4096, backend=backend)
        other.lender = owner
        introduce(other.transfer, PREFILL, owner.transfer.host, owner.transfer.port, owner.transfer.unix)
        try:
            for request in range(2, 12):  # each takes the only connection away from the other, which is idle
                for side in (other, reader):
                    side.pull(request, [0], [0], digests, room=1)
                    side.wait_landed(request, 1)
            eventually(lambda: transfer_threads().count("kv-owner") == 1, "one connection")
        finally:
            other.transfer.close()


def test_an_abstract_unix_socket_goes_away_with_its_owner() -> None:
    with pair() as (owner, _):
        path = owner.transfer.unix
        assert path.startswith("@")
    with socket.socket(socket.AF_UNIX) as link, pytest.raises(ConnectionRefusedError):
        link.connect(links.unix_address(path))


def test_a_unix_socket_in_a_folder_is_removed_at_the_end() -> None:
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has 107 bytes
        folder = Path(short, "sockets")
        with pair(unix_dir=str(folder)) as (owner, reader):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            assert os.path.exists(owner.transfer.unix)
            reader.pull(1, [0], [0], owner.publish(1, [0]))
            reader.wait_landed(1, 1)
        assert not list(folder.iterdir())


def test_a_unix_path_that_is_not_there_falls_back_to_tcp() -> None:
    with pair("tcp") as (owner, reader):
        introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, "/nowhere/tandem-kv")
        reader.pull(1, [0], [0], owner.publish(1, [0]))
        reader.wait_landed(1, 1)


@pytest.mark.parametrize("fabric", ["unix", "tcp"])
def test_processes_of_another_user_get_no_unix_socket(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "is_same_user", lambda link: False)
    with pair(fabric) as (owner, reader):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(links.unix_address(owner.transfer.unix))
            link.settimeout(5)
            assert link.recv(1) == b""
        reader.pull(1, [0], [0], owner.publish(1, [0]))
        reader.wait_landed(1, 1)  # through TCP


def test_closing_twice_is_fine_and_nothing_is_reported_afterwards() -> None:
    side = Side(DECODE)
    side.transfer.close()
    side.transfer.close()
    side.cancel(1)
    assert not side.events
