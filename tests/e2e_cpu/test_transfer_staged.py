"""Pages that lie in memory of a device travel between data planes: byte for byte, and never late.

The device is a tensor over the memory of a side, so a test sees what is written there, and can hold a copy up.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from staged_side import stage_on
from torch import Tensor
from transfer_world import DEADLINE_S, DECODE, PREFILL, Gate, Side, eventually

from data_planes import introduce
from tandem.core.commands import PublishPages, RevokePages
from tandem.core.events import PagesLanded, ReadsDrained, TransferDrained
from tandem.core.kv_parts import Runs
from tandem.core.values import Cause, PageId, RequestId
from tandem.engine.device_pages import DevicePages
from tandem.transfer.port import Backend, Held

pytestmark = pytest.mark.usefixtures("no_transfer_thread_is_left")

HELD_UP, OTHER, NOT_TOLD = 3, 200, 999


class Device(DevicePages):
    """Copies of page `HELD_UP` wait for `go_on`, once somebody `holds` them."""

    def __init__(self, tensor: Tensor, page_bytes: int) -> None:
        super().__init__(tensor, page_bytes)
        self.holds, self.has_begun, self.go_on, self.has_ended = (threading.Event() for _ in range(4))
        self.is_broken = False

    def read(self, pages: Sequence[int], runs: Runs, into: memoryview) -> None:
        if self.is_broken:
            raise RuntimeError("out of memory")
        self._wait(pages)
        super().read(pages, runs, into)
        self.has_ended.set()

    def write(self, pages: Sequence[int], runs: Runs, content: memoryview) -> None:
        self._wait(pages)
        super().write(pages, runs, content)
        self.has_ended.set()

    def _wait(self, pages: Sequence[int]) -> None:
        if HELD_UP in pages and self.holds.is_set():
            self.has_ended.clear()
            self.has_begun.set()
            assert self.go_on.wait(DEADLINE_S)


@contextmanager
def pair(who: str = "both", *, fabric: str = "unix", **options: object) -> Iterator[tuple[Side, Side, list[Device]]]:
    """Owner, reader, and the devices of those `who` have one, in this order."""
    devices: list[Device] = []

    def open_device(tensor: Tensor, page_bytes: int) -> Device:
        devices.append(Device(tensor, page_bytes))
        return devices[-1]

    def side(name: str, seed: int) -> Side:
        staged = {"stage": stage_on(open_device), "backend": Backend.SOCK} if who in (name, "both") else {}
        return Side(PREFILL if name == "owner" else DECODE, seed=seed, **staged, **options)  # type: ignore[arg-type]  # a mapping of mixed values

    owner, reader = side("owner", 1), side("reader", 2)
    reader.lender = owner
    unix = owner.transfer.unix if fabric == "unix" else ""
    introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, unix)
    try:
        yield owner, reader, devices
    finally:
        for device in devices:
            device.go_on.set()
        reader.close()
        owner.close()


def after_the_digests(side: Side) -> None:
    """What the digest thread of this side was told to answer before is answered."""
    side.publish(NOT_TOLD, [OTHER])


@pytest.mark.parametrize("who", ["owner", "reader", "both"])
@pytest.mark.parametrize(("fabric", "page_bytes"), [("unix", 512), ("tcp", 16384), ("unix", (1 << 20) + 32)])
def test_scattered_pages_arrive_byte_for_byte_and_no_other_byte_does(who: str, fabric: str, page_bytes: int) -> None:
    num_pages = min(2048, (16 << 20) // page_bytes)
    rng = random.Random(3)
    sources, destinations = (rng.sample(range(num_pages), num_pages // 2) for _ in range(2))
    with pair(who, fabric=fabric, num_pages=num_pages, page_bytes=page_bytes) as (owner, reader, devices):
        assert len(devices) == (2 if who == "both" else 1)
        expected = bytearray(reader.memory)
        for source, destination in zip(sources, destinations, strict=True):
            expected[destination * page_bytes : (destination + 1) * page_bytes] = owner.page(source)
        reader.pull(1, sources, destinations, owner.publish(1, sources))
        reader.wait_landed(1, len(sources))
        assert reader.memory == expected
        eventually(lambda: reader.transfer.held() == Held(), "the end of the pull")
        owner.revoke(1)
        owner.wait_reads_drained(1)
        assert owner.transfer.held() == Held()


def test_half_a_frame_of_a_cancelled_pull_never_comes_to_its_pages() -> None:
    with pair(page_bytes=16384) as (owner, reader, _):
        pages = range(64)
        before, gate = bytes(reader.memory), Gate(owner, pass_bytes=300_000)
        try:
            introduce(reader.transfer, PREFILL, "127.0.0.1", gate.port)
            reader.pull(1, pages, pages, owner.publish(1, pages))
            assert gate.is_full.wait(DEADLINE_S)
            reader.cancel(1)
            reader.wait_drained(1)
            assert reader.memory == before
        finally:
            gate.close()
        assert reader.memory == before
        assert reader.transfer.held() == Held()


def test_a_page_that_differs_from_its_digest_never_comes_to_the_device() -> None:
    with pair() as (owner, reader, _):
        digests, before = owner.publish(1, [1, 2]), bytes(reader.memory)
        owner.write(2, bytes(owner.page_bytes))
        reader.pull(1, [1, 2], [7, 8], digests)
        assert reader.wait_failed(1).cause == Cause.CORRUPT_PAGES
        assert reader.memory == before


def test_a_cancelled_pull_drains_when_the_copy_into_its_pages_has_ended() -> None:
    """From then on they may be somebody else's."""
    with pair("reader") as (owner, reader, (device,)):
        device.holds.set()
        reader.pull(1, [1], [HELD_UP], owner.publish(1, [1]))
        assert device.has_begun.wait(DEADLINE_S)
        reader.cancel(1)
        after_the_digests(reader)
        assert not reader.all(TransferDrained, 1)
        assert reader.transfer.held().open_transfers == 1
        device.has_ended.clear()
        device.go_on.set()
        reader.wait_drained(1)
        assert device.has_ended.is_set()
        assert not reader.all(PagesLanded, 1)
        assert reader.transfer.held().open_transfers == 0


def test_pages_are_told_to_have_landed_when_they_are_on_the_device() -> None:
    with pair("reader") as (owner, reader, (device,)):
        device.holds.set()
        reader.pull(1, [1], [HELD_UP], owner.publish(1, [1]))
        assert device.has_begun.wait(DEADLINE_S)
        after_the_digests(reader)
        assert not reader.all(PagesLanded, 1)
        device.go_on.set()
        reader.wait_landed(1, 1)
        assert reader.page(HELD_UP) == owner.page(1)


def test_revoked_pages_are_drained_when_the_copy_out_of_them_has_ended() -> None:
    with pair("owner") as (owner, reader, (device,)):
        digests = owner.publish(1, [HELD_UP])
        device.holds.set()
        reader.pull(1, [HELD_UP], [1], digests)
        assert device.has_begun.wait(DEADLINE_S)
        owner.transfer.revoke(RevokePages(RequestId(1), 0, 1))
        after_the_digests(owner)
        assert not owner.all(ReadsDrained, 1)
        assert owner.transfer.held().open_transfers == 1
        device.has_ended.clear()
        device.go_on.set()
        owner.wait_reads_drained(1)
        assert device.has_ended.is_set()
        reader.wait_failed(1)


def test_pages_that_cannot_be_digested_fail_their_transfer_and_no_later_one() -> None:
    """Nobody waits until a deadline for what never comes."""
    with pair("owner") as (owner, reader, (device,)):
        device.is_broken = True
        owner.transfer.publish(PublishPages(RequestId(1), 5, 0, (PageId(0),), (1,), 1))
        failed = owner.wait_failed(1)
        assert (failed.attempt, failed.cause) == (5, Cause.TRANSFER_FAILED)
        assert failed.detail == "pages cannot be read: RuntimeError('out of memory')"
        owner.revoke(1, attempt=5)
        owner.wait_reads_drained(1)
        assert owner.transfer.held() == Held()
        device.is_broken = False
        reader.pull(2, [0], [1], owner.publish(2, [0]))
        reader.wait_landed(2, 1)


def test_a_peer_that_wants_shared_memory_or_nixl_is_refused() -> None:
    for wanted in (Backend.SHM, Backend.NIXL):
        with pair("owner") as (owner, _, _):
            reader = Side(DECODE, backend=wanted)
            try:
                introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, owner.transfer.unix)
                reader.pull(1, [1], [1], owner.publish(1, [1]), secret=owner.secrets[1])
                assert "transfer-backend" in reader.wait_failed(1).detail
            finally:
                reader.close()
