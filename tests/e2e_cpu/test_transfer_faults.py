"""What happens to pages when peers die, freeze, lie, or change their minds: no wrong byte is ever accepted or kept."""

import contextlib
import os
import random
import signal
import socket
import struct
import time

import pytest
from transfer_world import PREFILL, SECRET, Gate, ServingProcess, Side, eventually, pair, target, transfer_threads

from attackers_data import Asker, Impostor, read_all
from data_planes import introduce, pack_read
from tandem.core.events import PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.values import Cause, Incarnation
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

pytestmark = pytest.mark.usefixtures("no_transfer_thread_is_left")

ABORTS = int(os.environ.get("TANDEM_TEST_ABORTS", "500"))
DECODE_SIDE = Incarnation("decode", "1")


def greet(owner: Side, *, fabric: str = "unix") -> socket.socket:
    """A hand-made reader that has been welcomed."""
    asker = Asker(target(owner, fabric=fabric), secret=SECRET)
    assert asker.join() is Status.OK
    return asker.link


@pytest.mark.parametrize("fabric", ["unix", "tcp"])
def test_revoking_during_a_slow_read_drains_at_once_and_no_changed_byte_goes_out(fabric: str) -> None:
    with pair(num_pages=2048, page_bytes=16384) as (owner, _):
        owner.publish(1, range(2048))
        before = bytes(owner.memory)
        with greet(owner, fabric=fabric) as link:
            link.sendall(pack_read(1, owner.secrets[1], range(2048), [1] * 2048, page_bytes=16384))
            header = links.receive(link, protocol.FRAME_HEADER_BYTES, timeout_s=5)  # it sends; we read no further
            begin = time.monotonic()
            owner.revoke(1)
            owner.wait_reads_drained(1, deadline_s=1)
            print(f"{fabric}: drained {1000 * (time.monotonic() - begin):.1f} ms after the revocation")
            owner.memory[:] = bytes(len(owner.memory))
            received = bytes(header) + read_all(link)
        position = checked = 0
        while position < len(received):  # the last frame may be cut anywhere
            _, count = struct.unpack_from("<II", received, position)
            position += protocol.FRAME_HEADER_BYTES
            body = received[position : position + count * 16384]
            assert body == before[checked : checked + len(body)]
            position += len(body)
            checked += len(body)
        assert checked < len(before)


def test_a_reader_whose_pages_are_revoked_fails_and_keeps_only_what_was_lent() -> None:
    with pair("tcp", num_pages=1024, page_bytes=16384) as (owner, reader):
        gate = Gate(owner, pass_bytes=3 << 20)
        introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port, "")
        before = bytes(owner.memory)
        reader.pull(1, range(1024), range(1024), owner.publish(1, range(1024)))
        assert gate.is_full.wait(10)
        owner.revoke(1)
        owner.wait_reads_drained(1, deadline_s=1)
        owner.memory[:] = bytes(len(owner.memory))
        gate.open()
        assert reader.wait_failed(1).cause == Cause.LEASE_EXPIRED
        landed = max((e.landed for e in reader.all(PagesLanded, 1)), default=0)
        assert 0 < landed < 1024
        assert reader.memory[: landed * 16384] == before[: landed * 16384]
        assert len(owner.all(ReadsDrained, 1)) == 1
        gate.close()


def test_a_cancelled_pull_is_counted_until_no_byte_of_it_can_land() -> None:
    with pair("tcp", num_pages=1024, page_bytes=16384) as (owner, reader):
        gate = Gate(owner, pass_bytes=3 << 20)
        introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port, "")
        reader.pull(1, range(1024), range(1024), owner.publish(1, range(1024)))
        assert gate.is_full.wait(10)
        eventually(lambda: 0 < reader.transfer.held().pinned_pages < 1024, "some pages have landed, some have not")
        held, lent = reader.transfer.held(), owner.transfer.held()
        assert (held.live_rooms, held.open_transfers) == (1, 1)
        assert (lent.live_rooms, lent.pinned_pages, lent.open_transfers) == (1, 1024, 1)
        reader.cancel(1)
        reader.wait_drained(1)
        assert reader.transfer.held() == Held()
        owner.revoke(1)
        owner.wait_reads_drained(1)
        assert owner.transfer.held() == Held()
        gate.close()


def test_revoking_cuts_nobody_elses_read() -> None:
    with pair(num_pages=1024, page_bytes=16384) as (owner, reader):
        victim, other = owner.publish(1, range(512)), owner.publish(2, range(512, 1024))
        for round_ in range(20):
            reader.pull(1, range(512), range(512), victim, attempt=round_)
            reader.pull(2, range(512, 1024), range(512, 1024), other, attempt=round_)
            owner.revoke(1, attempt=round_)
            reader.wait(PagesLanded, 2, where=lambda e, r=round_: (e.attempt, e.landed) == (r, 512))
            reader.cancel(1, attempt=round_)
            reader.wait_drained(1, attempt=round_)
            victim = owner.publish(1, range(512), attempt=round_ + 1)
        assert not reader.all(TransferFailed, 2)


def test_pages_of_a_cancelled_pull_may_be_reused_at_once() -> None:
    """Random aborts, four pulls at a time; drained pages get a mark that has to be there when they are next used."""
    rng = random.Random(11)
    page_bytes, per_pull, lanes = 16384, 96, 4
    num_pages = 4 * per_pull * lanes
    begin = time.monotonic()
    with pair(num_pages=num_pages, page_bytes=page_bytes) as (owner, reader):
        digests = owner.publish(1, range(num_pages))
        marks: dict[int, bytes] = {}
        free = list(range(num_pages))
        under_way: list[tuple[int, list[int]]] = []
        complete = hits = 0
        for request in range(2, ABORTS + 2):
            rng.shuffle(free)
            destinations, free = free[:per_pull], free[per_pull:]
            for page in destinations:
                assert page not in marks or reader.page(page) == marks[page], "a foreign byte landed"
            first = rng.randrange(num_pages - per_pull)
            sources = range(first, first + per_pull)
            reader.pull(request, sources, destinations, digests[8 * first : 8 * (first + per_pull)], room=1)
            under_way.append((request, destinations))
            if len(under_way) < lanes:
                continue
            ended, pages = under_way.pop(rng.randrange(lanes))
            time.sleep(rng.choice([0, 0.0002, 0.002, 0.004]) * rng.random())  # not to wait: aborts come at any time
            attempt = reader.transfer._reader._puller._attempts.get((ended, 0))
            hits += attempt is not None and attempt.is_armed
            reader.cancel(ended)
            reader.wait_drained(ended)
            complete += any(e.landed == per_pull for e in reader.all(PagesLanded, ended))
            with reader._arrived:
                reader.events.clear()  # or the search for events gets slow
            mark = ended.to_bytes(8, "little") * (page_bytes // 8)
            for page in pages:
                reader.write(page, mark)
                marks[page] = mark
            free += pages
        for ended, _ in under_way:
            reader.cancel(ended)
            reader.wait_drained(ended)
        assert all(reader.page(page) == marks[page] for page in free if page in marks), "a foreign byte landed"
        assert not [e for e in reader.events if isinstance(e, TransferFailed)]
        assert complete > 0
        assert hits > ABORTS // 20, "the aborts came too late to hit anything"
    seconds = time.monotonic() - begin
    print(f"{ABORTS} aborts in {seconds:.1f} s, {hits} hit a read, {complete} came after the end, 0 foreign bytes")


@pytest.mark.parametrize("fabric", ["unix", "tcp"])
def test_a_killed_peer_fails_the_transfer_at_once(fabric: str) -> None:
    server = ServingProcess(num_pages=512, page_bytes=65536, frame_ms=20)
    reader = Side(DECODE_SIDE, num_pages=512, page_bytes=65536)
    reader.lender = server
    try:
        introduce(reader.transfer, PREFILL, server.host, server.port, server.unix if fabric == "unix" else "")
        reader.pull(1, range(512), range(512), server.digests)
        reader.wait(PagesLanded, 1)
        server.signal(signal.SIGKILL)
        begin = time.monotonic()
        failed = reader.wait_failed(1)
        seconds = time.monotonic() - begin
        print(f"{fabric}: failed {1000 * seconds:.1f} ms after SIGKILL")
        assert failed.cause == Cause.PEER_LOST
        assert seconds < 2
        begin = time.monotonic()
        reader.pull(2, [0], [0], server.digests[:8], room=1)
        assert reader.wait_failed(2).cause == Cause.PEER_LOST
        assert time.monotonic() - begin < 2
    finally:
        reader.transfer.close()
        server.end()


@pytest.mark.parametrize("fabric", ["unix", "tcp"])
def test_a_frozen_peer_fails_the_transfer_at_the_timeout_and_a_cancel_does_not_wait_for_it(fabric: str) -> None:
    server = ServingProcess(num_pages=512, page_bytes=65536, frame_ms=20)
    reader = Side(DECODE_SIDE, num_pages=512, page_bytes=65536, io_timeout_s=2)
    reader.lender = server
    try:
        introduce(reader.transfer, PREFILL, server.host, server.port, server.unix if fabric == "unix" else "")
        reader.pull(1, range(256), range(256), server.digests[: 8 * 256])
        reader.pull(2, range(256, 512), range(256, 512), server.digests[8 * 256 :], room=1)
        reader.wait(PagesLanded, 1)
        reader.wait(PagesLanded, 2)
        server.signal(signal.SIGSTOP)
        begin = time.monotonic()
        reader.cancel(2)
        reader.wait_drained(2)
        assert not reader.all(TransferFailed, 1), "the cancel has waited for the timeout"
        failed = reader.wait_failed(1)
        print(f"{fabric}: failed {time.monotonic() - begin:.2f} s after SIGSTOP, timeout 2 s")
        assert failed.cause == Cause.PEER_LOST
    finally:
        reader.transfer.close()
        server.end()


def test_a_reader_that_stops_reading_is_cut_off_at_the_timeout() -> None:
    with pair(num_pages=1024, page_bytes=16384, io_timeout_s=0.3) as (owner, _):
        owner.publish(1, range(1024))
        with greet(owner) as link:
            link.sendall(pack_read(1, owner.secrets[1], range(1024), [1] * 1024, page_bytes=16384))
            eventually(lambda: "kv-owner" in transfer_threads(), "a reader is served")
            eventually(lambda: "kv-owner" not in transfer_threads(), "the stuck reader is cut off", deadline_s=3)


def _hostile_bytes(rng: random.Random, owner: Side, asker: Asker) -> bytes:
    """Of somebody who has the secret of the cluster, and mostly that of the grant."""
    asker.hear_challenge()
    hello, lent = asker.hello(), owner.secrets[1]
    read = pack_read(1, owner.secrets[1], [0, 1], [1, 1])
    header = struct.Struct("<4sIQ16s")
    return rng.choice(
        [
            b"",
            rng.randbytes(rng.randrange(1, 4000)),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            hello[: rng.randrange(len(hello))],
            hello + rng.randbytes(rng.randrange(1, 4000)),
            hello + header.pack(b"READ", 0xFFFFFFFF, 1, lent) + bytes(1000),
            hello + header.pack(b"READ", 0, 1, lent),
            hello + header.pack(b"WRIT", 2, 1, lent) + read[32:],
            hello + pack_read(1, lent, [owner.num_pages], [1]),
            hello + pack_read(1, lent, [(1 << 64) - 1], [1]),
            hello + pack_read(rng.randrange(2, 1 << 64), lent, [0], [1]),
            hello + pack_read(1, lent, [0, 1], [1, 2]),
            hello + pack_read(1, rng.randbytes(16), [0, 1], [1, 1]),
            hello + read[: rng.randrange(1, len(read))],
            asker.hello(incarnation=protocol.incarnation_digest(Incarnation("prefill", "6"))) + read,
        ]
    )


def test_hostile_readers_get_no_page_and_harm_nobody() -> None:
    rng = random.Random(5)
    with pair(num_pages=64, page_bytes=4096, io_timeout_s=0.5) as (owner, reader):
        digests = owner.publish(1, [0, 1])
        contents = [owner.page(page) for page in range(64)]
        for index in range(150):
            with Asker(target(owner, fabric="tcp" if index % 2 else "unix"), secret=SECRET) as asker:
                asker.say(_hostile_bytes(rng, owner, asker))
                with contextlib.suppress(OSError):  # it is cut off already
                    asker.link.shutdown(socket.SHUT_WR)
                answer = read_all(asker.link)
            assert not any(page[:64] in answer for page in contents)
            assert len(answer) <= protocol.WELCOME_BYTES + protocol.FRAME_HEADER_BYTES
        assert [owner.page(page) for page in range(64)] == contents
        reader.pull(1, [0, 1], [0, 1], digests)
        reader.wait_landed(1, 2)
        eventually(lambda: transfer_threads().count("kv-owner") <= 1, "hostile connections are gone")


def test_many_silent_connections_do_not_lock_readers_out() -> None:
    with pair(max_links=4) as (owner, reader):
        crowd = []
        for _ in range(40):
            link = socket.socket(socket.AF_UNIX)
            link.connect(links.unix_address(owner.transfer.unix))
            crowd.append(link)
        reader.pull(1, [0, 1], [0, 1], owner.publish(1, [0, 1]))
        reader.wait_landed(1, 2)
        assert transfer_threads().count("kv-owner") <= 8
        for link in crowd:
            link.close()


def test_a_reader_of_a_busy_owner_waits_for_its_turn() -> None:
    with pair(num_pages=1024, page_bytes=16384, max_links=1) as (owner, reader):
        digests = owner.publish(1, range(1024))
        with greet(owner) as link:
            link.sendall(pack_read(1, owner.secrets[1], range(1024), [1] * 1024, page_bytes=16384))
            links.receive(link, protocol.FRAME_HEADER_BYTES, timeout_s=5)
            with Asker(target(owner), secret=SECRET) as newcomer:
                assert newcomer.join() is Status.BUSY
            reader.pull(1, [0], [0], digests[:8])
        reader.wait_landed(1, 1)


def test_a_reader_of_an_owner_that_stays_busy_fails_at_the_timeout() -> None:
    with pair(num_pages=1024, page_bytes=16384, max_links=1) as (owner, _):
        digests = owner.publish(1, range(1024))
        reader = Side(DECODE_SIDE, page_bytes=16384, io_timeout_s=0.3)
        reader.lender = owner
        introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, owner.transfer.unix)
        with greet(owner) as link:
            link.sendall(pack_read(1, owner.secrets[1], range(1024), [1] * 1024, page_bytes=16384))
            links.receive(link, protocol.FRAME_HEADER_BYTES, timeout_s=5)
            reader.pull(1, [0], [0], digests[:8])
            failed = reader.wait_failed(1)
        reader.transfer.close()
        assert failed.cause == Cause.TRANSFER_FAILED
        assert "no connection left" in failed.detail


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<II", 0, 3),  # more pages than asked for
        struct.pack("<II", 0, 0),
        struct.pack("<II", 77, 1),
        struct.pack("<II", 0, 0xFFFFFFFF),
        struct.pack("<II", 0, 2) + bytes(2 * 4096),  # not these pages
        struct.pack("<II", 1, 2) + bytes(2 * 4096),  # a refusal with pages
    ],
)
def test_an_owner_that_lies_fails_the_transfer_and_touches_nothing_else(frame: bytes) -> None:
    reader = Side(DECODE_SIDE)
    before = bytes(reader.memory)
    with Impostor() as owner:
        introduce(reader.transfer, PREFILL, "127.0.0.1", owner.port, "")
        reader.pull(1, [0, 1], [10, 11], b"\1" * 16)
        with owner.accept() as link:
            link.sendall(owner.welcome(Status.OK, SECRET, owner.greet(link)) + frame)
            failed = reader.wait_failed(1)
    reader.transfer.close()
    assert failed.cause in (Cause.TRANSFER_FAILED, Cause.CORRUPT_PAGES, Cause.LEASE_EXPIRED)
    assert not reader.all(PagesLanded, 1)
    assert reader.memory[: 10 * 4096] == before[: 10 * 4096]
    assert reader.memory[12 * 4096 :] == before[12 * 4096 :]


def test_a_connection_that_breaks_once_is_made_again_and_the_pull_goes_on() -> None:
    with pair("tcp", num_pages=512, page_bytes=16384) as (owner, reader):
        digests = owner.publish(1, range(512))
        gate = Gate(owner, pass_bytes=3 << 20)
        introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port, "")
        reader.pull(1, range(512), range(512), digests)
        assert gate.is_full.wait(10)
        for served in list(owner.transfer._owner._links):
            links.cut(served.link)
        gate.open()
        reader.wait_landed(1, 512)
        assert owner.memory == reader.memory
        gate.close()


def test_closing_ends_pulls_and_reads_under_way() -> None:
    with pair("tcp", num_pages=1024, page_bytes=16384) as (owner, reader):
        gate = Gate(owner, pass_bytes=2 << 20)
        introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port, "")
        reader.pull(1, range(1024), range(1024), owner.publish(1, range(1024)))
        assert gate.is_full.wait(10)
        begin = time.monotonic()
        reader.transfer.close()
        owner.transfer.close()
        assert time.monotonic() - begin < 5
        gate.close()
        assert not transfer_threads()
        assert not reader.all(TransferDrained, 1)
