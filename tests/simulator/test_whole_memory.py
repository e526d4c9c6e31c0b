"""Shared memory between virtual workers: the product's own owner and reader over copies that take virtual time."""

import time
from collections.abc import Callable
from random import Random

import pytest

from data_planes import introduce
from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event, PagesDigested, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard
from tandem.core.values import SECOND, Cause, Incarnation, PageId, RequestId
from tandem.membership import ClusterSecret
from tandem.simulator.oracle import Violation
from tandem.simulator.whole import memory
from tandem.simulator.whole.kernel import START_NS, Kernel
from tandem.simulator.whole.memory import Memories
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.transfer_checks import CheckedTransfer, TransferWatch
from tandem.simulator.whole.virtual_process import Programs, virtual_machine
from tandem.transfer import link as links
from tandem.transfer import owner, reader
from tandem.transfer.pages import Pages

PEER = Incarnation("prefill-0", "1")
PAGE_BYTES, NUM_PAGES = 64, 8
PAGES = tuple(map(PageId, range(4)))


class Pair:
    """Two data planes of one virtual host, and what they say."""

    def __init__(self, kernel: Kernel, memories: Memories, found: list[Violation]) -> None:
        self.said: list[Event] = []
        self.lent = bytearray(range(NUM_PAGES)) * PAGE_BYTES
        self.own = bytearray(NUM_PAGES * PAGE_BYTES)
        watch = TransferWatch(kernel, found.append, lambda process, since: False, memories)
        self.owner, self.reader = (
            CheckedTransfer(
                Pages(memoryview(buffer), PAGE_BYTES),
                KvShard.whole(PAGE_BYTES),
                report=self.said.append,
                watch=watch,
                incarnation=who,
                secret=ClusterSecret(b"a secret of one test"),
                host="127.0.0.1",
                memory=memories.share(memoryview(buffer)),
            )
            for buffer, who in ((self.lent, PEER), (self.own, Incarnation("decode-0", "2")))
        )
        introduce(self.reader, PEER, self.owner.host, self.owner.port, self.owner.unix)

    def pull(self) -> None:
        self.owner.publish(PublishPages(RequestId(1), 1, 0, PAGES, (1,) * 4, 5))
        digested = self.wait(PagesDigested)
        self.reader.pull(
            PullPages(RequestId(1), 1, 5, PEER, 0, PAGES, (1,) * 4, PAGES, digested.digests, (digested.secret,))
        )

    def wait(self, kind: type[Event]):  # type: ignore[no-untyped-def]  # one of that kind
        while not (found := [event for event in self.said if isinstance(event, kind)]):
            time.sleep(0.0001)
        return found[0]


def simulated(monkeypatch: pytest.MonkeyPatch, program: Callable[[Pair, Memories], object]) -> list[Violation]:
    """What the checkers have found while the program ran as a process."""
    monkeypatch.setattr(memory, "UNSHARED", 0.0)
    kernel, found = Kernel(1), list[Violation]()
    memories = Memories(kernel, Random(1))

    def run() -> None:
        pair = Pair(kernel, memories, found)
        program(pair, memories)
        pair.reader.close()
        pair.owner.close()

    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({}), memories.replacements()):
        process = kernel.start("worker", run, host="127.0.0.1")
        kernel.run(START_NS + 60 * SECOND)
        assert not process.is_alive
        if process.error is not None:
            raise process.error
    return found


def test_pages_are_copied_through_a_descriptor_that_came_over_a_virtual_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(pair: Pair, memories: Memories) -> None:
        pair.pull()
        pair.wait(PagesLanded)
        assert pair.own[: 4 * PAGE_BYTES] == pair.lent[: 4 * PAGE_BYTES]
        assert (memories.num_copies, pair.reader.connections()["shm"]) == (1, 1)

    assert simulated(monkeypatch, program) == []


def in_the_middle(pair: Pair, memories: Memories) -> None:
    pair.pull()
    while not memories.num_under_way:
        time.sleep(0.00001)


def revoked(pair: Pair, memories: Memories) -> None:
    in_the_middle(pair, memories)
    pair.owner.revoke(RevokePages(RequestId(1), 1, 5))
    pair.wait(ReadsDrained)
    assert pair.wait(TransferFailed).cause in (Cause.LEASE_EXPIRED, Cause.PEER_LOST)
    assert not any(isinstance(event, PagesLanded) for event in pair.said)


def cancelled(pair: Pair, memories: Memories) -> None:
    in_the_middle(pair, memories)
    pair.reader.cancel(CancelPull(RequestId(1), 1))
    pair.owner.revoke(RevokePages(RequestId(1), 1, 5))
    pair.wait(ReadsDrained)
    pair.wait(TransferDrained)


@pytest.mark.parametrize("program", [revoked, cancelled])
def test_what_is_revoked_in_the_middle_of_a_copy_drains_behind_it(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[Pair, Memories], None]
) -> None:
    assert simulated(monkeypatch, program) == []


def test_an_owner_that_does_not_wait_for_a_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_cut", lambda known: links.cut(known.link))
    assert {violation.invariant for violation in simulated(monkeypatch, revoked)} == {"S4"}


def test_a_reader_that_closes_before_its_copy_has_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.PageReader, "_cut", lambda self, link: links.cut(link))
    assert {violation.invariant for violation in simulated(monkeypatch, cancelled)} == {"S4"}
