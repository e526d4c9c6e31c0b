"""The loop around a node: events reach it, commands go out in order, and the loss of a process ends it."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tandem.config import ServerConfig
from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan
from tandem.core.commands import Command, Effects, EmitTokens, FailRequest, LaunchBatch
from tandem.core.disagg.message_checks import Bounds
from tandem.core.events import (
    AbortRequested,
    BatchReturned,
    Event,
    FlushRequested,
    PagesLanded,
    RequestArrived,
    TransferFailed,
)
from tandem.core.kv_parts import KvGrid
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, BatchId, Cause, Incarnation, Nanos, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.ranks import all_ranks
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.channel import BlockingChannel, PolledChannel, frame
from tandem.server.node import driver, process
from tandem.server.node.dispatch import NoSiblings
from tandem.server.node.driver import Inbox, drive
from tandem.server.node.injection import FailedTransfers
from tandem.server.node.local_peer import LocalPeer, LocalPeerLost, SelectorPoller
from tandem.server.node.peers import Peers
from tandem.server.processes import ServerFailure

LAUNCH = LaunchBatch(BatchPlan(BatchId(1), 1, BatchKind.PREFILL))
RETURNED = BatchReturned(BatchOutcome(BatchId(1), 1, b"", b""))


class Clock:
    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())


class FakeNode:
    """Answers events by a table, and remembers what it saw."""

    def __init__(self, answers: Callable[[Event], Sequence[Command]] = lambda event: (), wake_in: Nanos | None = None):
        self.answers = answers
        self.wake_in = wake_in
        self.steps: list[tuple[Event, ...]] = []

    def step(self, events: Sequence[Event], now: Nanos) -> Effects:
        self.steps.append(tuple(events))
        wake_at = None if self.wake_in is None else Nanos(now + self.wake_in)
        return Effects(tuple(command for event in events for command in self.answers(event)), wake_at)

    def snapshot(self) -> bytes:
        return b""

    def restore(self, snapshot: bytes) -> None:
        raise NotImplementedError


class Server:
    """The node's loop in a thread, and the other processes as channels of the test."""

    def __init__(self, node: FakeNode, *, tp_size: int = 1, pp_size: int = 1) -> None:
        ranks = all_ranks(tp_size, pp_size)
        api, node_api = socket.socketpair()
        pairs = [socket.socketpair() for _ in ranks]
        for sock in (api, *(worker for _, worker in pairs)):
            sock.settimeout(5)
        self.node_ends = (node_api, *(node_end for node_end, _ in pairs))
        self.node = node
        self.api: BlockingChannel[wire.NodeToApi] = BlockingChannel(api, wire.NodeToApi)
        self.workers: list[BlockingChannel[wire.NodeToWorker]] = [
            BlockingChannel(worker, wire.NodeToWorker) for _, worker in pairs
        ]
        self.worker = self.workers[0]
        poller, clock = SelectorPoller(), Clock()
        self.inbox = Inbox(
            poller=poller,
            api=PolledChannel(node_api, wire.ApiToNode),
            ranks=ranks,
            workers=[PolledChannel(node_end, wire.WorkerToNode) for node_end, _ in pairs],
            clock=clock,
            failures=FailedTransfers(0.0),
        )
        self.inbox.meet(
            Peers(
                Incarnation("me", "1"),
                "",
                ClusterSecret(b"what members know"),
                shards=(),
                bounds=Bounds(1, lambda extra: True, lambda extra: True),
                poller=poller,
                report=self.inbox.report,
                reach=self.inbox.reach,
                clock=clock.now,
                note=lambda line: None,
            )
        )
        self.loss: LocalPeerLost | None = None
        self.thread = threading.Thread(target=self._run, args=(clock,), daemon=True)  # a test that fails leaves it
        self.thread.start()

    def _run(self, clock: Clock) -> None:
        try:
            answer = lambda query, now: query.what.encode()  # noqa: E731
            drive(self.node, self.inbox, clock, observers=[], answer=answer, siblings=NoSiblings())
        except LocalPeerLost as lost:
            self.loss = lost

    def end(self) -> None:
        self.api.send(wire.Shutdown())
        self.join()

    def join(self) -> None:
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.api.close()
        for worker in self.workers:
            worker.close()
        for sock in self.node_ends:
            sock.close()


def receive(channel: "BlockingChannel[msgspec.Struct]", count: int) -> list[msgspec.Struct]:
    found: list[msgspec.Struct] = []
    while len(found) < count:
        found += channel.receive()
    return found


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def submit(number: int, *, prompt_bytes: int = 16) -> wire.Submit:
    request = Request(RequestId(number), "rid", prompt_bytes // 4, (), 8, Nanos(SECOND))
    return wire.Submit.of(request, Payload(number, bytes(prompt_bytes), SamplingParams(), b""))


def test_the_worker_knows_a_request_before_the_first_batch_that_names_it() -> None:
    server = Server(FakeNode(lambda event: [LAUNCH] if isinstance(event, RequestArrived) else []))
    sent = submit(1)
    server.api.send(wire.SubmitAll((sent,)))
    assert receive(server.worker, 2) == [sent.payload, LAUNCH]
    server.end()
    assert server.node.steps == [(RequestArrived(sent.request),)]


def test_results_of_the_worker_become_events_and_tokens_go_to_the_api() -> None:
    tokens = EmitTokens((RequestId(1),), b"\1\0\0\0")
    server = Server(FakeNode(lambda event: [tokens] if isinstance(event, BatchReturned) else []))
    server.worker.send(RETURNED)
    assert receive(server.api, 1) == [tokens]
    server.end()


def test_what_comes_together_is_one_step() -> None:
    server = Server(FakeNode())
    aborts = [AbortRequested(RequestId(number)) for number in range(5)]
    data = b"".join(map(frame, aborts))
    server.api._sock.sendall(data)
    server.api.send(wire.Query(1, "hello"))
    assert receive(server.api, 1) == [wire.Answer(1, b"hello")]
    server.end()
    assert server.node.steps[0] == tuple(aborts)


def test_a_question_is_answered_without_a_step_and_a_flush_after_one() -> None:
    server = Server(FakeNode())
    server.api.send(wire.Query(1, "state"))
    assert receive(server.api, 1) == [wire.Answer(1, b"state")]
    assert server.node.steps == []
    server.api.send(wire.Query(2, "flush"))
    assert receive(server.api, 1) == [wire.Answer(2, b"flush")]
    assert server.node.steps == [(FlushRequested(),)]
    server.end()


def test_the_question_for_the_pulse_is_passed_on_to_the_worker_whose_answers_are_counted() -> None:
    server = Server(FakeNode())
    server.api.send(wire.Query(1, "pulse"))
    assert receive(server.api, 1) == [wire.Answer(1, b"pulse")]
    assert receive(server.worker, 1) == [wire.Ping()]
    server.worker.send(wire.Echo())
    server.worker.send(RETURNED)  # so that there is a step to wait for
    eventually(lambda: server.node.steps)
    server.end()
    assert server.inbox.workers.echoes == 1
    assert server.node.steps == [(RETURNED,)]


def test_what_the_worker_counts_is_asked_of_it_and_its_answer_goes_to_the_api_without_a_step() -> None:
    server = Server(FakeNode())
    server.api.send(wire.Query(3, "worker"))
    assert receive(server.worker, 1) == [wire.Query(3, "worker")]
    server.worker.send(wire.Answer(3, b"{}"))
    assert receive(server.api, 1) == [wire.Answer(3, b"[{}]")]
    server.end()
    assert server.node.steps == []


def test_every_worker_hears_everything_and_what_they_say_comes_when_all_have_said_it() -> None:
    server = Server(FakeNode(lambda event: [LAUNCH] if isinstance(event, RequestArrived) else []), tp_size=2, pp_size=2)
    sent = submit(1)
    server.api.send(wire.SubmitAll((sent,)))
    for worker in server.workers:
        assert receive(worker, 2) == [sent.payload, LAUNCH]

    last = server.workers[0]
    server.api.send(wire.Query(3, "worker"))
    for number, worker in enumerate(server.workers):
        assert receive(worker, 1) == [wire.Query(3, "worker")]
        if worker is not last:
            worker.send(RETURNED)
            worker.send(wire.Echo())
            worker.send(wire.Answer(3, b"%d" % number))
    last.send(wire.Answer(3, b"0"))

    assert receive(server.api, 1) == [wire.Answer(3, b"[1,2,3,0]")]
    assert server.node.steps == [(RequestArrived(sent.request),)], "one of them is still at it"
    assert server.inbox.workers.behind == "worker TP0 PP0"
    last.send(RETURNED)
    eventually(lambda: len(server.node.steps) == 2)
    assert server.inbox.workers.behind.count(" or ") == 3
    assert server.node.steps[1] == (RETURNED,)
    assert server.inbox.workers.echoes == 0
    last.send(wire.Echo())
    eventually(lambda: server.inbox.workers.echoes == 1)
    server.end()


def test_what_a_shard_says_of_its_transfers_is_passed_on_as_it_comes() -> None:
    server = Server(FakeNode(), tp_size=2)
    landed = [PagesLanded(RequestId(1), 1, ShardId(shard), 3) for shard in (1, 0)]
    for event in landed:
        server.workers[event.shard].send(event)
        eventually(lambda event=event: (event,) in server.node.steps)
    server.end()
    assert server.node.steps == [(event,) for event in landed]


def test_a_transfer_that_fails_names_the_worker_however_it_came_about() -> None:
    server = Server(FakeNode(), pp_size=2)
    reported = TransferFailed(RequestId(1), 1, ShardId(1), Cause.CORRUPT_PAGES, "digests differ")
    server.workers[1].send(reported)
    eventually(lambda: server.node.steps)
    server.inbox.failures.prob = 1.0
    server.workers[0].send(PagesLanded(RequestId(2), 1, ShardId(0), 3))
    eventually(lambda: len(server.node.steps) == 2)
    server.end()
    assert server.node.steps == [
        (msgspec.structs.replace(reported, detail="worker TP0 PP1: digests differ"),),
        (TransferFailed(RequestId(2), 1, ShardId(0), Cause.TRANSFER_FAILED, "worker TP0 PP0: injected"),),
    ]


def ready(layout: str = "digest", num_pages: int = 7) -> wire.EngineReady:
    return wire.EngineReady(num_pages, 64, KvGrid(), layout, {"model": layout}, 512, wire.DataEndpoint("127.0.0.1", 5))


def test_the_engines_are_ready_when_the_last_one_is_and_their_pages_are_one() -> None:
    server = Server(FakeNode(), tp_size=2)
    server.workers[1].send(ready())
    server.workers[0].send(ready())
    eventually(lambda: server.inbox.workers.engines is not None)
    server.end()
    engines = server.inbox.workers.engines
    assert engines is not None
    assert (engines.num_pages, engines.page_bytes, len(engines.shards)) == (7, 128, 2)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (ready("another"), " (model)"),
        (ready(num_pages=8), ""),
    ],
)
def test_workers_that_have_loaded_different_things_end_the_server(other: wire.EngineReady, named: str) -> None:
    server = Server(FakeNode(), tp_size=2)
    server.workers[0].send(ready())
    eventually(lambda: not server.inbox.workers.engines and server.inbox.workers.num_ready == 1)
    server.workers[1].send(other)
    server.join()
    assert server.loss is not None
    assert (server.loss.who, server.loss.reason) == (
        "worker TP1 PP0",
        f"worker TP1 PP0 has loaded another model than the other workers{named}",
    )


def test_workers_that_have_parted_end_the_server() -> None:
    server = Server(FakeNode(), pp_size=2)
    server.workers[0].send(RETURNED)
    server.workers[1].send(BatchReturned(BatchOutcome(BatchId(2), 2, b"", b"")))
    server.join()
    assert server.loss is not None
    assert server.loss.reason == "the same batch is 1 and 2 on different workers"


@pytest.mark.parametrize("shard", [0, 1])
def test_each_worker_of_a_group_is_missed(shard: int) -> None:
    server = Server(FakeNode(), pp_size=2)
    server.workers[shard].close()
    server.join()
    assert server.loss is not None
    assert (server.loss.who, server.loss.reason) == (f"worker TP0 PP{shard}", "")


def test_a_transfer_that_is_to_fail_comes_to_the_node_as_a_failure() -> None:
    server = Server(FakeNode(lambda event: [LAUNCH]))
    server.api.send(wire.FailTransfers(1.0))
    server.api.send(wire.Query(1, "faults"))
    assert receive(server.api, 1) == [wire.Answer(1, b"faults")]
    server.worker.send(PagesLanded(RequestId(1), 1, ShardId(0), 3))
    assert receive(server.worker, 1) == [LAUNCH]
    server.end()
    ((event,),) = server.node.steps
    assert event == TransferFailed(RequestId(1), 1, ShardId(0), Cause.TRANSFER_FAILED, "injected")


def test_a_node_is_stepped_again_when_it_wants_to_be_woken() -> None:
    node = FakeNode(wake_in=Nanos(5_000_000))
    server = Server(node)
    server.api.send(AbortRequested(RequestId(1)))
    deadline = time.monotonic() + 5
    while len(node.steps) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    server.end()
    assert node.steps[:3] == [(AbortRequested(RequestId(1)),), (), ()]


def test_what_is_decided_on_the_last_events_before_the_end_is_still_said() -> None:
    tokens = EmitTokens((RequestId(1),), b"\1\0\0\0")
    server = Server(FakeNode(lambda event: [tokens]))
    server.api._sock.sendall(frame(AbortRequested(RequestId(1))) + frame(wire.Shutdown()))
    server.thread.join(5)
    for sock in server.node_ends:
        sock.close()
    assert receive(server.api, 1) == [tokens]
    server.join()


def test_a_worker_that_says_why_it_ends_is_quoted() -> None:
    server = Server(FakeNode())
    server.worker.send(wire.Died("worker", "no memory; buy some"))
    server.join()
    assert server.loss is not None
    assert (server.loss.who, server.loss.reason) == ("worker", "no memory; buy some")


def test_a_worker_that_says_why_it_ends_is_heard_by_who_is_about_to_write_to_it() -> None:
    near, far = socket.socketpair()
    with near, far:
        heard: list[msgspec.Struct] = []
        peer = LocalPeer("worker", PolledChannel(near, wire.WorkerToNode), SelectorPoller(), heard.append)
        BlockingChannel(far, wire.NodeToWorker).send(wire.Died("worker", "no memory; buy some"))
        far.close()
        peer.send(wire.Shutdown())
        with pytest.raises(LocalPeerLost):
            peer.flush()
        assert heard == [wire.Died("worker", "no memory; buy some")]


def test_a_worker_that_ends_without_a_word_is_noticed() -> None:
    server = Server(FakeNode())
    server.worker.close()
    server.join()
    assert server.loss is not None
    assert (server.loss.who, server.loss.reason) == ("worker", "")


def test_bytes_that_are_no_message_end_the_server_with_that_reason() -> None:
    server = Server(FakeNode())
    server.worker._sock.sendall(b"\0\0\0\1\xc1")
    server.join()
    assert server.loss is not None
    assert "no message" in server.loss.reason


def test_the_api_is_not_read_while_the_worker_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "WORKER_HIGH_BYTES", 1 << 20)
    server = Server(FakeNode())
    count, size = 60, 256 << 10
    sender = threading.Thread(
        target=lambda: [server.api.send(wire.SubmitAll((submit(n, prompt_bytes=size),))) for n in range(count)]
    )
    sender.start()
    deadline = time.monotonic() + 5
    while server.inbox.workers.pending_bytes < 1 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    sender.join(0.2)
    assert sender.is_alive()
    assert server.inbox.workers.pending_bytes < (1 << 20) + 4 * size
    payloads = receive(server.worker, count)
    assert [payload.request for payload in payloads if isinstance(payload, Payload)] == list(range(count))
    sender.join(5)
    server.end()


def test_an_api_process_that_reads_nothing_ends_the_server() -> None:
    failure = FailRequest(RequestId(1), Cause.ABORTED, "stage", "x" * 100_000)
    server = Server(FakeNode(lambda event: [failure] * 1000))
    server.worker.send(RETURNED)
    server.join()
    assert server.loss is not None
    assert server.loss.who == "API process"


def test_the_last_word_to_who_reads_nothing_is_left_out() -> None:
    here, there = socket.socketpair()
    with here, there:
        channel: PolledChannel[wire.WorkerToNode] = PolledChannel(here, wire.WorkerToNode, max_pending_bytes=1)
        channel.send(wire.Ping())
        process._send_final(channel, wire.Shutdown())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_the_flight_record_and_not_the_server(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(code, "the disk is full")

    monkeypatch.setattr(process, "FlightRecorder", full)
    config = ServerConfig(model="tandem/mini", flight_record=str(tmp_path))
    settings = NodeSettings(Role.UNIFIED, Incarnation("server", "1"), num_pages=64)
    assert process._recorder(config, settings, EngineNode(settings)) is None
    assert "there is no flight record" in caplog.text


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ServerConfig(model="tandem/mini", flight_record=str(tmp_path / "file" / "folder"))
    settings = NodeSettings(Role.UNIFIED, Incarnation("server", "1"), num_pages=64)
    with pytest.raises(ServerFailure, match="choose another --flight-record"):
        process._recorder(config, settings, EngineNode(settings))
