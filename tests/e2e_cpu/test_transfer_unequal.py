"""Pages between servers that are cut differently, over real sockets, through shared memory, by NIXL, and of devices:
every byte comes to its place, once, checked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any  # settings by name

import pytest
from staged_side import STAGED, Stage
from transfer_world import DECODE, PREFILL, WITH_NIXL, Side

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import PagesDigested, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import Box, KvGrid, KvShard, box_of
from tandem.core.values import Cause, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.port import Backend, Held

GRID = KvGrid(num_layers=4, num_kv_heads=4)
CELL_BYTES, NUM_PAGES = 96, 32
ONE = RequestId(1)
CUTS = [
    (Cut(1), Cut(2)),
    (Cut(2), Cut(1)),
    (Cut(2), Cut(4)),
    (Cut(4), Cut(2)),
    (Cut(3), Cut(2)),
    (Cut(1, 2), Cut(1)),
    (Cut(1), Cut(1, 2)),
    (Cut(1, 2), Cut(2)),
    (Cut(2, 2), Cut(1)),
    (Cut(2, 2), Cut(1, 3)),
    (Cut(8), Cut(2)),  # two workers have the same head
    (Cut(2), Cut(8)),
]


def cell(page: int, head: int, layer: int) -> bytes:
    return f"page {page:02} head {head} layer {layer} ".encode().ljust(CELL_BYTES, b".")


def content(page: int, box: Box) -> bytes:
    """What a worker with this box has of a page."""
    return b"".join(cell(page, head, layer) for head, layer in box.cells())


@dataclass
class Pair:
    """The workers of a prefill, whose pages say what they are, and those of a decode."""

    prefill: list[Side]
    decode: list[Side]
    cuts: tuple[Cut, Cut]

    def publish(self, pages: Sequence[int]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Digests of all parts, and secrets."""
        command = PublishPages(ONE, 1, 0, tuple(map(PageId, pages)), (5,) * len(pages), 9, reader=self.cuts[1])
        for side in self.prefill:
            side.transfer.publish(command)
        said = [side.wait(PagesDigested, ONE) for side in self.prefill]
        assert [event.num_pages for event in said] == [len(pages)] * len(self.prefill)
        return tuple(digests for event in said for digests in event.digests), tuple(event.secret for event in said)

    def pull(
        self, sources: Sequence[int], destinations: Sequence[int], offered: tuple[tuple[bytes, ...], tuple[bytes, ...]]
    ) -> None:
        places = tuple(map(PageId, destinations))
        command = PullPages(ONE, 1, 9, PREFILL, 0, tuple(sources), (5,) * len(sources), places, *offered)
        for side in self.decode:
            side.transfer.pull(command)

    def box(self, index: int) -> Box:
        return box_of(GRID, self.cuts[1], self.cuts[1].shards[index])


@contextmanager
def pair(
    source: Cut, target: Cut, *, num_pages: int = NUM_PAGES, backend: Backend = Backend.SOCK, stage: Stage | None = None
) -> Iterator[Pair]:
    def side(who: Incarnation, cut: Cut, shard: ShardId) -> Side:
        return Side(who, num_pages=num_pages, kv=KvShard(GRID, cut, shard, CELL_BYTES), backend=backend, stage=stage)

    prefill = [side(PREFILL, source, shard) for shard in source.shards]
    decode = [side(DECODE, target, shard) for shard in target.shards]
    for one, shard in zip(prefill, source.shards, strict=True):
        for page in range(num_pages):
            one.write(page, content(page, box_of(GRID, source, shard)))
        if backend is Backend.NIXL:
            one.transfer.start_nixl(lends=True)
    ends = [PeerAddress(one.transfer.host, one.transfer.port, one.transfer.unix) for one in prefill]
    for one in decode:
        one.transfer.connect(PREFILL, source, ends)
    try:
        yield Pair(prefill, decode, (source, target))
    finally:
        for one in (*decode, *prefill):
            one.close()


BACKENDS = pytest.mark.parametrize(
    "how",
    [
        pytest.param({"backend": Backend.SOCK}, id="sock"),
        pytest.param({"backend": Backend.SHM}, id="shm"),
        pytest.param({"backend": Backend.NIXL}, id="nixl", marks=WITH_NIXL),
        pytest.param({"stage": STAGED}, id="staged"),
    ],
)


@BACKENDS
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{cuts[0].name} to {cuts[1].name}")
def test_every_worker_gets_its_part_of_every_page_and_no_other_byte(cuts: tuple[Cut, Cut], how: dict[str, Any]) -> None:
    sources, destinations = [3, 4, 5, 17, 9], [8, 1, 2, 30, 31]
    with pair(*cuts, **how) as it:
        before = [bytes(side.memory) for side in it.decode]
        it.pull(sources, destinations, it.publish(sources))
        for index, side in enumerate(it.decode):
            side.wait(PagesLanded, ONE, where=lambda event: event.landed == len(sources))
            expected = bytearray(before[index])
            for source, destination in zip(sources, destinations, strict=True):
                start = destination * side.page_bytes
                expected[start : start + side.page_bytes] = content(source, it.box(index))
            assert side.memory == expected
            assert side.transfer.held() == Held()


@BACKENDS
def test_many_pages_of_many_runs_are_more_pieces_than_one_call_takes(how: dict[str, Any]) -> None:
    pages = list(range(300))
    with pair(Cut(1, 4), Cut(1), num_pages=len(pages), **how) as it:
        assert len(pages) * GRID.num_kv_heads > 1024
        it.pull(pages, pages[::-1], it.publish(pages))
        (side,) = it.decode
        side.wait(PagesLanded, ONE, where=lambda event: event.landed == len(pages))
        assert all(side.page(pages[-1 - page]) == content(page, it.box(0)) for page in pages)


@BACKENDS
def test_a_changed_byte_of_one_part_fails_where_it_is_read_and_lands_elsewhere(how: dict[str, Any]) -> None:
    with pair(Cut(2), Cut(1, 2), **how) as it:
        offered = it.publish([3])
        last = it.prefill[1]
        changed = bytearray(last.page(3))
        changed[-1] ^= 1  # of the last layer, which the second stage has
        last.write(3, bytes(changed))
        it.pull([3], [7], offered)
        assert it.decode[1].wait(TransferFailed, ONE).cause is Cause.CORRUPT_PAGES
        it.decode[0].wait(PagesLanded, ONE)
        assert it.decode[0].page(7) == content(3, it.box(0))


@BACKENDS
def test_a_worker_that_is_gone_fails_the_attempt_which_then_drains(how: dict[str, Any]) -> None:
    with pair(Cut(2), Cut(1), **how) as it:
        offered = it.publish([3, 4])
        it.prefill[1].transfer.close()
        it.pull([3, 4], [7, 8], offered)
        (side,) = it.decode
        assert side.wait(TransferFailed, ONE).cause is Cause.PEER_LOST
        side.transfer.cancel(CancelPull(ONE, 1))
        side.wait(TransferDrained, ONE)
        assert side.transfer.held() == Held()
        it.prefill[0].transfer.revoke(RevokePages(ONE, 1, 9))
        it.prefill[0].wait(ReadsDrained, ONE)
        assert it.prefill[0].transfer.held() == Held()


def test_more_readers_of_one_server_than_the_share_of_one_find_a_place() -> None:
    """Four workers read from one: each is a reader of its own."""
    with pair(Cut(1), Cut(4)) as it:
        it.prefill[0].transfer._owner._lender._max_links = 4  # of which one reader may have one
        it.pull([3], [7], it.publish([3]))
        for index, side in enumerate(it.decode):
            side.wait(PagesLanded, ONE)
            assert side.page(7) == content(3, it.box(index))
