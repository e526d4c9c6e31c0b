"""Pages and digests, the wire format, and the table of grants of the KV data plane, each alone."""

import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.values import RequestId
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.grants import READ_REPORT_INTERVAL_S, Grant, Grants
from tandem.transfer.pages import Pages, pack_digests, unpack_digests
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

LENT = b"secret of 16 byt"
U64 = st.integers(min_value=0, max_value=(1 << 64) - 1)


def make_pages(num_pages: int = 8, page_bytes: int = 4) -> Pages:
    return Pages(memoryview(bytearray(i % 251 for i in range(num_pages * page_bytes))), page_bytes)


@given(st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=20))
def test_runs_hold_the_pages_in_the_order_asked_for(asked: list[int]) -> None:
    pages = make_pages()
    runs = pages.runs(asked)
    assert b"".join(runs) == b"".join(pages.view(page) for page in asked)


@given(st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=20))
def test_neighbours_are_one_run(asked: list[int]) -> None:
    jumps = sum(later != earlier + 1 for earlier, later in pairwise(asked))
    assert len(make_pages().runs(asked)) == jumps + 1


def test_a_digest_tells_rooms_pages_generations_and_bytes_apart() -> None:
    pages = make_pages()
    variants = [(0, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0)]
    digests = [
        pages.digests([page], room=room, sources=[source], generations=[generation])[0]
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
    message = protocol.pack_read(room, LENT, sources, generations)
    read = protocol.unpack_read(message[: protocol.READ_BYTES])
    assert (read.room, read.secret, read.count) == (room, LENT, len(names))
    assert protocol.unpack_names(message[protocol.READ_BYTES :], read.count) == (sources, generations)


def test_every_refusal_has_a_meaning() -> None:
    assert set(protocol.REFUSALS) == set(Status) - {Status.OK}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def link() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    with near, far:
        yield near


def is_cut(link: socket.socket) -> bool:
    try:
        return link.send(b"x") == 0
    except BrokenPipeError:
        return True


def granted() -> tuple[Grants, bytes]:
    """With the secret of what is granted."""
    grants = Grants(clock=Clock())
    return grants, grants.extend(RequestId(1), 0, room=5, pages=[1, 2], generations=[10, 20])


def test_a_lease_needs_room_pages_and_generations(link: socket.socket) -> None:
    grants, secret = granted()
    assert isinstance(grants.lease(5, secret=secret, pages=[2, 1], generations=[20, 10], reader=link), Grant)
    assert grants.lease(6, secret=secret, pages=[1], generations=[10], reader=link) is Status.NOT_GRANTED
    assert grants.lease(5, secret=secret, pages=[1, 3], generations=[10, 0], reader=link) is Status.NOT_GRANTED
    assert grants.lease(5, secret=secret, pages=[1, 2], generations=[10, 21], reader=link) is Status.WRONG_GENERATION


def test_without_the_secret_nothing_is_told(link: socket.socket) -> None:
    grants, secret = granted()
    other = grants.extend(RequestId(2), 0, room=6, pages=[1], generations=[10])
    assert other != secret
    for wrong in (other, bytes(16), b"", secret[:15]):
        for room, pages, generations in ((5, [1, 2], [10, 20]), (5, [1], [11]), (5, [7], [1]), (4, [1], [10])):
            found = grants.lease(room, secret=wrong, pages=pages, generations=generations, reader=link)
            assert found is Status.NOT_GRANTED
    assert grants.held().open_transfers == 0


def test_a_grant_that_follows_a_revoked_one_has_another_secret(link: socket.socket) -> None:
    grants, secret = granted()
    grants.revoke(RequestId(1), 0)
    assert grants.extend(RequestId(1), 1, room=5, pages=[1], generations=[10]) != secret
    assert grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link) is Status.NOT_GRANTED


def test_the_secret_of_a_grant_is_in_no_log_line(link: socket.socket) -> None:
    grants, secret = granted()
    grant = grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link)
    assert repr(secret) not in repr(grant)


def test_a_grant_grows(link: socket.socket) -> None:
    grants, secret = granted()
    assert grants.extend(RequestId(1), 0, room=5, pages=[3], generations=[30]) == secret
    assert isinstance(grants.lease(5, secret=secret, pages=[1, 3], generations=[10, 30], reader=link), Grant)


def test_revoking_without_readers_drains_at_once_and_ends_leases(link: socket.socket) -> None:
    grants, secret = granted()
    assert grants.revoke(RequestId(1), 0)
    assert grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link) is Status.NOT_GRANTED
    assert not is_cut(link)


def test_the_last_lease_of_a_revoked_grant_drains_it_and_readers_are_cut(link: socket.socket) -> None:
    grants, secret = granted()
    leases = [grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link) for _ in range(2)]
    assert all(isinstance(lease, Grant) for lease in leases)
    assert not grants.revoke(RequestId(1), 0)
    assert is_cut(link)
    assert not grants.revoke(RequestId(1), 0)
    assert [grants.end_lease(lease, link) for lease in leases if isinstance(lease, Grant)] == [False, True]
    assert grants.revoke(RequestId(1), 0)


def test_a_lease_that_ends_before_the_revocation_drains_nothing(link: socket.socket) -> None:
    grants, secret = granted()
    lease = grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link)
    assert isinstance(lease, Grant)
    assert not grants.end_lease(lease, link)
    assert grants.revoke(RequestId(1), 0)


def test_a_publication_during_the_drain_is_a_new_grant(link: socket.socket) -> None:
    grants, secret = granted()
    old = grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link)
    assert isinstance(old, Grant)
    grants.revoke(RequestId(1), 0)
    secret = grants.extend(RequestId(1), 0, room=5, pages=[1], generations=[11])
    assert isinstance(grants.lease(5, secret=secret, pages=[1], generations=[11], reader=link), Grant)
    assert grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link) is Status.WRONG_GENERATION
    assert grants.end_lease(old, link)
    assert not grants.revoke(RequestId(1), 0)


def test_what_is_lent_is_counted_until_the_last_reader_has_left(link: socket.socket) -> None:
    grants, secret = granted()
    assert grants.held() == Held(live_rooms=1, pinned_pages=2)
    lease = grants.lease(5, secret=secret, pages=[1], generations=[10], reader=link)
    assert isinstance(lease, Grant)
    grants.revoke(RequestId(1), 0)
    assert grants.held() == Held(live_rooms=1, pinned_pages=2, open_transfers=1)
    grants.end_lease(lease, link)
    assert grants.held() == Held()


def test_reads_are_reported_at_most_once_per_interval(link: socket.socket) -> None:
    clock = Clock()
    grants = Grants(clock=clock)
    secret = grants.extend(RequestId(1), 0, room=5, pages=[1], generations=[1])
    grant = grants.lease(5, secret=secret, pages=[1], generations=[1], reader=link)
    assert isinstance(grant, Grant)
    assert grants.is_report_due(grant)
    assert not grants.is_report_due(grant)
    clock.now += READ_REPORT_INTERVAL_S
    assert grants.is_report_due(grant)


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
