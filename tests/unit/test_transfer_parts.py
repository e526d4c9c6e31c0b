"""Pages and digests, the wire format, and the links of the KV data plane, each alone."""

import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.events import Event, ReadsDrained
from tandem.core.kv_parts import KvGrid, KvShard, Runs
from tandem.core.values import Cut, RequestId, ShardId
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.digests import pack_digests, unpack_digests
from tandem.transfer.outbox import Outbox
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import Status

LENT = b"secret of 16 byt"
KV = KvShard(KvGrid(num_layers=4, num_kv_heads=3), Cut(), ShardId(0), cell_bytes=8)
RUNS = Runs(8, 16, 32, 3)  # two layers of all heads
U64 = st.integers(min_value=0, max_value=(1 << 64) - 1)


def make_pages(num_pages: int = 8, page_bytes: int = 4) -> Pages:
    return Pages(memoryview(bytearray(i % 251 for i in range(num_pages * page_bytes))), page_bytes)


@given(st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=20))
def test_runs_hold_the_pages_in_the_order_asked_for(asked: list[int]) -> None:
    pages = make_pages()
    runs = pages.pieces(asked, pages.whole)
    assert b"".join(runs) == b"".join(pages.view(page) for page in asked)


@given(st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=20))
def test_neighbours_are_one_run(asked: list[int]) -> None:
    jumps = sum(later != earlier + 1 for earlier, later in pairwise(asked))
    pages = make_pages()
    assert len(pages.pieces(asked, pages.whole)) == jumps + 1


def test_a_digest_tells_rooms_pages_generations_and_bytes_apart() -> None:
    pages = make_pages()
    variants = [(0, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0)]
    digests = [
        pages.digests([page], pages.whole, room=room, sources=[source], generations=[generation])[0]
        for page, room, source, generation in variants
    ]
    assert len(set(digests)) == len(variants)


@given(st.lists(U64))
def test_digests_survive_packing(digests: list[int]) -> None:
    assert list(unpack_digests(pack_digests(digests))) == digests


def test_pages_outside_the_buffer_are_known_as_such() -> None:
    pages = make_pages(num_pages=8)
    assert pages.has_all([0, 7])
    assert pages.has_all([])
    assert not pages.has_all([8])
    assert not pages.has_all([-1])


@given(room=U64, names=st.lists(st.tuples(U64, U64), min_size=1, max_size=50))
def test_a_read_survives_the_wire(room: int, names: list[tuple[int, int]]) -> None:
    sources, generations = zip(*names, strict=True)
    message = protocol.pack_read(room, LENT, RUNS, sources, generations)
    read = protocol.unpack_read(message[: protocol.READ_BYTES], KV)
    assert (read.room, read.secret, read.count, read.runs) == (room, LENT, len(names), RUNS)
    assert protocol.unpack_names(message[protocol.READ_BYTES :], read.count) == (sources, generations)


@pytest.mark.parametrize(
    "runs",
    [
        Runs(8, 16, 32, 0),
        Runs(8, 16, 32, 4),  # beyond the page
        Runs(0, 8, 8, 4),  # more pieces than heads
        Runs(8, 0, 32, 3),
        Runs(8, 16, 8, 3),
        Runs(4, 16, 32, 3),  # no whole cells
        Runs(8, 4, 32, 3),
        Runs(8, 16, 20, 3),
    ],
)
def test_a_read_of_what_is_no_part_is_malformed(runs: Runs) -> None:
    with pytest.raises(protocol.Malformed):
        protocol.unpack_read(protocol.pack_read(1, LENT, runs, [0], [1])[: protocol.READ_BYTES], KV)


def test_every_refusal_has_a_meaning() -> None:
    assert set(protocol.REFUSALS) == set(Status) - {Status.OK}


def test_what_is_received_in_drops_lands_in_all_pieces() -> None:
    near, far = socket.socketpair()
    with near, far:
        links.prepare(near, timeout_s=5)
        memory = bytearray(30)
        pieces = [memoryview(memory)[20:30], memoryview(memory)[0:5]]
        far.send(b"abcdefg")
        far.send(b"hijklmno")
        links.receive_into(near, pieces, timeout_s=5)
        assert bytes(memory) == b"klmno" + bytes(15) + b"abcdefghij"


def test_a_link_on_which_nothing_moves_is_frozen() -> None:
    near, far = socket.socketpair()
    with near, far:
        links.prepare(near, timeout_s=0.05)
        far.send(b"abc")
        with pytest.raises(links.LinkFrozen):
            links.receive_into(near, [memoryview(bytearray(4))], timeout_s=0.05)
        with pytest.raises(links.LinkFrozen):
            links.send(near, [bytes(1 << 26)], timeout_s=0.05)
        with pytest.raises(links.LinkFrozen):
            links.receive(near, 1, timeout_s=0.05)


def test_a_link_on_which_something_moves_within_the_timeout_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call comes back eight times within it, and only the last one has seen a whole timeout pass."""
    now, silences = 0.0, iter((7, 7, 8))

    def glances(pieces: object) -> int:
        nonlocal now, silence
        now += 1.0
        if silence:
            silence -= 1
            raise BlockingIOError
        silence = next(silences)
        return 1

    monkeypatch.setattr(links.time, "monotonic", lambda: now)
    silence = next(silences)
    with pytest.raises(links.LinkFrozen):
        links._move(glances, [bytes(9)], 8.0)
    assert (now, list(silences)) == (24.0, [])


def test_a_link_that_was_cut_or_closed_is_broken() -> None:
    near, far = socket.socketpair()
    with near:
        far.close()
        with pytest.raises(links.LinkBroken):
            links.receive(near, 1, timeout_s=1)
        with pytest.raises(links.LinkBroken):
            links.send(near, [b"x"], timeout_s=1)
        with pytest.raises(links.LinkBroken):
            links.receive_into(near, [memoryview(bytearray(1))], timeout_s=1)


def test_a_unix_path_that_is_too_long_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="longer than"):
        links.listen_unix("/tmp/" + "x" * 200)


def test_after_its_close_an_outbox_says_nothing_and_keeps_nothing() -> None:
    said: list[Event] = []
    outbox = Outbox(said.append)
    outbox.put(ReadsDrained(RequestId(1), 0, ShardId(0)))
    outbox.close()
    outbox.flush()
    assert (said, outbox.has_events) == ([], False)


def test_who_stops_hearing_gets_what_was_sent_and_the_other_side_is_told_nothing() -> None:
    near, far = socket.socketpair()
    with near, far:
        links.prepare(near, timeout_s=1)
        far.send(b"x")
        links.stop_hearing(near)
        assert links.receive(near, 1, timeout_s=1) == b"x"
        with pytest.raises(links.LinkBroken):
            links.receive(near, 1, timeout_s=1)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
