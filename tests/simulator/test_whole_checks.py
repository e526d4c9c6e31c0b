"""What the checkers of whole clusters notice, each shown what it is there for."""

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from data_planes import introduce
from tandem.core.commands import CancelPull, Effects, PullPages
from tandem.core.events import Event, PeerLost, PeerReturned, TransferDrained
from tandem.core.kv_parts import KvShard
from tandem.core.values import MILLISECOND, SECOND, Incarnation, Nanos, PageId, RequestId, Room, ShardId
from tandem.membership import ClusterSecret
from tandem.server.api import endpoint_parts
from tandem.simulator.oracle import Violation
from tandem.simulator.whole import verdict
from tandem.simulator.whole.clients import Answer, ClientRequest, Conduct
from tandem.simulator.whole.kernel import START_NS, Deadlock, Kernel
from tandem.simulator.whole.memory import Memories
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.peer_checks import Causes, Punctual
from tandem.simulator.whole.transfer_checks import CheckedTransfer, TransferWatch
from tandem.simulator.whole.virtual_process import Programs, virtual_machine
from tandem.simulator.whole.world import World, run_options
from tandem.transfer.pages import Pages
from tandem.transfer.reader import PageReader

PEER = Incarnation("prefill-0", "1")


def simulated(program: Callable[[Kernel], object]) -> None:
    """Run it as a process. Raises what it raises."""
    kernel = Kernel(1)
    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({})):
        process = kernel.start("worker", lambda: program(kernel), host="127.0.0.1")  # type: ignore[arg-type,return-value]
        kernel.run(START_NS + 10 * SECOND)
        if process.error is not None:
            raise process.error


def test_who_is_told_of_something_to_read_again_and_again_and_does_not_read_is_noticed() -> None:
    def program(kernel: Kernel) -> None:
        ours, theirs = socket.socketpair()
        theirs.send(b"x")
        with selectors.DefaultSelector() as selector:
            selector.register(ours, selectors.EVENT_READ)
            while True:
                selector.select()

    with pytest.raises(Deadlock, match="does nothing about it"):
        simulated(program)


def test_an_empty_connection_takes_a_small_message_whole() -> None:
    taken: list[int] = []

    def program(kernel: Kernel) -> None:
        for _ in range(100):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.setblocking(False)
                taken.append(ours.send(bytes(80)))

    simulated(program)
    assert taken == [80] * 100


def causes(*, momentary: bool, lasting: bool) -> Causes:
    kernel = Kernel(1)
    process = kernel.start("node", lambda: None, host="127.0.0.1")
    kernel.shut_down()
    return Causes(process, kernel, lambda since, must_last: lasting or (momentary and not must_last))


def test_a_peer_that_is_given_up_or_has_to_return_for_no_reason_is_noticed() -> None:
    none = Effects((), None)
    for event in (PeerLost(PEER), PeerReturned(PEER)):
        with pytest.raises(Violation, match="nothing has gone wrong"):
            causes(momentary=False, lasting=False).after_step([event], none)
        causes(momentary=False, lasting=True).after_step([event], none)
    causes(momentary=True, lasting=False).after_step([PeerReturned(PEER)], none)
    with pytest.raises(Violation, match="nothing has gone wrong"):
        causes(momentary=True, lasting=False).after_step([PeerLost(PEER)], none)


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_node_that_sleeps_when_it_wanted_to_be_woken_is_noticed(*, is_woken: bool) -> None:
    found: list[Violation] = []

    def program(kernel: Kernel) -> None:
        checker = Punctual(kernel.current().process, kernel, found.append, lambda since: False)
        checker.after_step((), Effects((), Nanos(kernel.now + SECOND)))
        time.sleep(1.0)
        if is_woken:
            checker.after_step((), Effects((), None))
        time.sleep(1.0)

    simulated(program)
    assert [violation.invariant for violation in found] == ([] if is_woken else ["W1"])


def transfer_of(kernel: Kernel, found: list[Violation], told: list[Event]) -> CheckedTransfer:
    watch = TransferWatch(kernel, found.append, lambda process, since: False, Memories(kernel, Random(1)))
    return CheckedTransfer(
        Pages(memoryview(bytearray(8 * 64)), 64),
        KvShard.whole(64),
        report=told.append,
        watch=watch,
        incarnation=Incarnation("decode-0", "1"),
        secret=ClusterSecret(b"a secret of one test"),
        host="127.0.0.1",
    )


def a_pull() -> PullPages:
    page = PageId(0)
    return PullPages(RequestId(1), 1, Room(5), PEER, 0, (page,), (1,), (page,), (bytes(8),), (bytes(16),))


def test_an_end_of_a_pull_that_is_told_twice_and_one_that_nobody_tells_are_noticed() -> None:
    found: list[Violation] = []
    told: list[Event] = []

    def program(kernel: Kernel) -> None:
        transfer = transfer_of(kernel, found, told)
        transfer.cancel(CancelPull(RequestId(1), 1))
        time.sleep(0.5)
        assert told == [TransferDrained(RequestId(1), 1, ShardId(0))]
        assert not found
        transfer._outbox.put(told[0])
        time.sleep(0.5)
        assert "nobody tells it" in found[0].detail
        transfer._outbox.flush()
        assert found[-1].invariant == "S22"
        transfer.close()

    simulated(program)


def test_a_pull_that_may_begin_and_that_no_thread_takes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Violation] = []
    monkeypatch.setattr(PageReader, "_call_for_help", lambda reader: None)
    monkeypatch.setattr(PageReader, "_add_thread", lambda reader: None)

    def program(kernel: Kernel) -> None:
        transfer = transfer_of(kernel, found, [])
        introduce(transfer, PEER, "127.0.0.1", 1)
        transfer.pull(a_pull())
        time.sleep(0.1)
        assert "no thread is on its way" in found[0].detail
        transfer._reader._puller._turns.clear()
        transfer._reader._puller._lanes.clear()
        time.sleep(0.1)
        assert found[-1].invariant == "S16"
        transfer.close()

    simulated(program)


def test_a_stream_that_comes_all_at_once_is_noticed() -> None:
    ask = ClientRequest(1, "/generate", (20, 21), "", 40, True, True, 20.0, Conduct.PATIENT)

    def check(first_s: float, ended_s: float, gap_s: float, block_tokens: int = 1, is_whole: bool = True) -> None:
        answer = Answer(ask, 0, first_s=first_s, ended_s=ended_s, longest_gap_s=gap_s, is_whole=is_whole)
        verdict._check_flow(answer, "an answer", 0.05, block_tokens)

    check(1.0, 3.5, 0.3)  # flows
    check(1.0, 9.0, 5.5)  # has had to wait in between
    check(3.4, 3.5, 0.1, block_tokens=4)  # ten batches make it
    check(3.4, 3.5, 0.1, is_whole=False)  # was cut, so that it has few tokens
    for first_s, gap_s in ((3.4, 0.1), (1.0, 2.4)):
        with pytest.raises(Violation, match="at once"):
            check(first_s, 3.5, gap_s)


def test_a_server_that_ends_and_one_that_goes_on_without_a_process_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where its servers have their files
    world = World(replace(draw_options(2), faults=(), starves=()))
    faults, kernel = world.faults, world.kernel
    (server,) = world.cluster.servers
    with pytest.raises(Violation, match="by itself"):
        faults._look_why(server)
    server.process = kernel.start("unified.1", lambda: None, host=server.host)
    child = kernel.start("unified.1/process", lambda: None, host=server.host, parent=server.process)
    child.exit_code = -9
    faults._look_for_losses(server)
    kernel.now += 11 * SECOND
    with pytest.raises(Violation, match="goes on without it"):
        faults._look_for_losses(server)
    faults.disturb(server.name, 100 * MILLISECOND)
    faults._look_why(server)
    kernel.shut_down()


@pytest.mark.parametrize(
    ("layout", "holder", "name", "instead", "noticed"),
    [
        ("unified", endpoint_parts, "MAX_BODY_BYTES", 1 << 50, "is not <Problem.BODY_TOO_LARGE"),
        ("pairs", ClusterSecret, "is_proof", lambda *_: True, "instead of <Status.NOT_A_MEMBER"),
    ],
    ids=["a body", "a reader"],
)
def test_who_answers_what_is_to_be_refused_is_noticed(
    monkeypatch: pytest.MonkeyPatch, layout: str, holder: object, name: str, instead: object, noticed: str
) -> None:
    seed = next(seed for seed in range(100) if draw_options(seed).layout == layout and not draw_options(seed).vectors)
    calm = replace(draw_options(seed), faults=(), num_faults=0, starves=(), num_visits=0, num_requests=1)
    assert run_options(calm).invariant == ""
    monkeypatch.setattr(holder, name, instead)
    assert noticed in run_options(calm).detail
