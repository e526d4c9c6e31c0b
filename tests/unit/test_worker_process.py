"""The worker around its engine: messages in order, a failing forward is an event, transfers go to the data plane."""

import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any  # settings by name

import msgspec
import pytest

from tandem.config import ServerConfig
from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan
from tandem.core.commands import CancelPull, ForgetRequests, LaunchBatch, PublishPages, PullPages, RevokePages
from tandem.core.events import BatchFailed, BatchReturned
from tandem.core.lockstep import Lockstep
from tandem.core.values import BatchId, Cause, Cut, Incarnation, PageId, RequestId
from tandem.engine import self_check, weights
from tandem.engine.model_config import ModelError
from tandem.engine.parallel import WorkerGone
from tandem.ranks import Rank
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire, worker_process
from tandem.server.channel import BlockingChannel
from tandem.server.processes import EXIT_WITH_OTHERS, Launch, ServerFailure
from tandem.server.worker import Worker
from tandem.server.worker_process import in_thousands, layout_digest, start
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.port import Held

PEER = Incarnation("peer", "3")
ALONE = Rank()


class FakeEngine:
    """Remembers its calls; batch 2 raises."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def add(self, payload: Payload) -> None:
        self.calls.append(("add", payload.request))

    def forget(self, requests: Iterable[int]) -> None:
        self.calls.append(("forget", tuple(requests)))

    def run(self, plan: BatchPlan) -> BatchOutcome:
        self.calls.append(("run", plan.id))
        if plan.id == 2:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return BatchOutcome(plan.id, plan.iteration, b"", b"")


class FakeTransfer:
    host, port, unix = "", 0, ""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def connect(self, peer: Incarnation, cut: Cut, shards: Sequence[PeerAddress]) -> None:
        self.calls.append((peer, cut, shards))

    def publish(self, command: PublishPages) -> None:
        self.calls.append(command)

    def revoke(self, command: RevokePages) -> None:
        self.calls.append(command)

    def pull(self, command: PullPages) -> None:
        self.calls.append(command)

    def cancel(self, command: CancelPull) -> None:
        self.calls.append(command)

    def held(self) -> Held:
        return Held(live_rooms=1, pinned_pages=5, open_transfers=2)

    def connections(self) -> dict[str, int]:
        return {"shm": 3, "unix": 1, "tcp": 0}

    def close(self) -> None:
        pass


class Running:
    """A worker in a thread, and the node's end of its channel."""

    def __init__(self, rank: Rank = ALONE) -> None:
        node, worker = socket.socketpair()
        node.settimeout(5)
        self.failure: Exception | None = None
        self.engine, self.transfer = FakeEngine(), FakeTransfer()
        self.node: BlockingChannel[wire.WorkerToNode] = BlockingChannel(node, wire.WorkerToNode)
        own: BlockingChannel[wire.NodeToWorker] = BlockingChannel(worker, wire.NodeToWorker)
        self.worker = Worker(rank, self.engine, self.transfer, own, lockstep=Lockstep(1))  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except Exception as error:
            self.failure = error

    def send(self, *messages: wire.NodeToWorker) -> None:
        for message in messages:
            self.node.send(message)

    def receive(self, count: int) -> list[wire.WorkerToNode]:
        found: list[wire.WorkerToNode] = []
        while len(found) < count:
            found += self.node.receive()
        return found

    def end(self) -> None:
        self.node.send(wire.Shutdown())
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.node.close()


def launch(number: int) -> LaunchBatch:
    return LaunchBatch(BatchPlan(BatchId(number), number, BatchKind.DECODE))


def test_what_concerns_the_engine_is_done_in_order() -> None:
    it = Running()
    payload = Payload(7, b"", SamplingParams(), b"")
    it.send(payload, launch(1), ForgetRequests((RequestId(7),)), launch(3))
    assert it.receive(2) == [BatchReturned(BatchOutcome(BatchId(n), n, b"", b"")) for n in (1, 3)]
    it.end()
    assert it.engine.calls == [("add", 7), ("run", 1), ("forget", (7,)), ("run", 3)]


def test_a_worker_whose_engine_computes_says_that_it_is_there() -> None:
    it = Running()
    may_return = threading.Event()
    it.engine.run = lambda plan: (may_return.wait(5), BatchOutcome(plan.id, plan.iteration, b"", b""))[1]  # type: ignore
    it.send(launch(1), wire.Ping())
    assert it.receive(1) == [wire.Echo()]
    may_return.set()
    assert it.receive(1) == [BatchReturned(BatchOutcome(BatchId(1), 1, b"", b""))]
    it.end()


def test_a_forward_that_raises_ends_its_batch_and_the_worker_goes_on() -> None:
    it = Running()
    it.send(launch(2), launch(3))
    failed, returned = it.receive(2)
    assert failed == BatchFailed(
        BatchId(2), Cause.ENGINE_FAILED, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    assert isinstance(returned, BatchReturned)
    it.end()


def test_a_forward_that_raises_ends_a_worker_that_has_others_beside_it() -> None:
    it = Running(Rank(tp_rank=1, tp_size=2))
    it.send(launch(2))
    it.thread.join(5)
    assert isinstance(it.failure, ServerFailure), "the others wait in the middle of this batch; it is no error of ours"
    assert str(it.failure) == (
        "the worker TP1 PP0 process failed in batch 2: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    it.node.close()


def test_a_worker_that_waits_for_one_that_is_gone_does_not_say_that_it_has_failed() -> None:
    it = Running(Rank(tp_rank=1, tp_size=2))
    gone = WorkerGone("Connection closed by peer")

    def run(plan: BatchPlan) -> BatchOutcome:
        raise gone

    it.engine.run = run  # type: ignore[method-assign]
    it.send(launch(1))
    it.thread.join(5)
    assert it.failure is gone
    it.node.close()


def test_each_worker_is_told_of_all_workers_of_a_peer_however_that_is_cut() -> None:
    it = Running(Rank(1, 2, 1, 2))
    it.send(wire.Reach(PEER, Cut(pp_size=3), tuple(wire.DataEndpoint("10.0.0.2", port) for port in (6, 7, 8))))
    it.end()
    assert it.transfer.calls == [(PEER, Cut(pp_size=3), [PeerAddress("10.0.0.2", port, "") for port in (6, 7, 8)])]


def test_transfers_go_to_the_data_plane() -> None:
    it = Running()
    commands = [
        PublishPages(RequestId(1), 1, 0, (PageId(3),), (1,), 9),
        RevokePages(RequestId(1), 1, 9),
        PullPages(RequestId(1), 1, 9, PEER, 0, (1,), (1,), (PageId(2),), (b"digest..",), (b"secret",)),
        CancelPull(RequestId(1), 1),
    ]
    it.send(wire.Reach(PEER, Cut(), (wire.DataEndpoint("10.0.0.2", 6, "@kv"),)), *commands)
    it.end()
    assert it.transfer.calls == [(PEER, Cut(), [PeerAddress("10.0.0.2", 6, "@kv")]), *commands]


def test_a_worker_tells_what_its_data_plane_holds_under_its_own_ranks() -> None:
    it = Running()
    it.send(wire.Query(9, "worker"))
    (answer,) = it.receive(1)
    it.end()
    numbers = {"live_rooms": 1, "pinned_pages": 5, "open_transfers": 2}
    assert isinstance(answer, wire.Answer)
    assert msgspec.json.decode(answer.body, type=wire.WorkerNumbers) == wire.WorkerNumbers(
        0, 0, 0, numbers, {"shm": 3, "unix": 1, "tcp": 0}
    )
    assert answer.id == 9


def test_a_node_that_is_gone_ends_the_worker() -> None:
    it = Running()
    it.node.close()
    it.thread.join(5)
    assert not it.thread.is_alive()


def test_what_the_reader_of_a_worker_meets_ends_it_with_that_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(payload: Payload) -> None:
        raise RuntimeError("no such grammar")

    it = Running()
    monkeypatch.setattr(it.engine, "prepare", prepare, raising=False)
    it.send(Payload(1, b"", SamplingParams(grammar="root ::= a"), b""))
    it.thread.join(5)
    assert str(it.failure) == "no such grammar"
    it = Running()
    it.node._sock.sendall(b"\x00\x00\x00\x01\xff")
    it.thread.join(5)
    assert isinstance(it.failure, ServerFailure)
    assert str(it.failure).startswith("its node says something that is no message: ")


def test_a_worker_that_ends_because_its_node_is_gone_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for a reason passes it by: on another host somebody may have been first, and is heard of later."""
    here, there = socket.socketpair()
    launch = Launch(ServerConfig(model="tandem/mini"), str(MINI), Incarnation("s", "1"), 0, 1, 0)
    monkeypatch.setattr(worker_process, "read_launch", lambda: launch)
    monkeypatch.setattr(worker_process.logs, "set_up", lambda log_format, *, process: None)
    monkeypatch.setattr(sys, "argv", ["worker", str(there.detach())])

    def load(launch: Launch, channel: BlockingChannel[wire.NodeToWorker], *_: object) -> None:
        here.close()
        while True:
            channel.send(wire.Echo())

    monkeypatch.setattr(worker_process, "start", load)
    assert worker_process.main() == EXIT_WITH_OTHERS


MINI = Path(__file__).parents[2] / "src/tandem/bundled/mini"


@pytest.mark.parametrize(
    ("count", "said"),
    [(999, "999"), (5_800, "5.8k"), (1_935_360, "1.9M"), (387_000_000, "387.0M"), (7 * 10**9, "7.0B")],
)
def test_parameters_are_said_in_the_usual_letters(count: int, said: str) -> None:
    assert in_thousands(count) == said


def test_a_kv_pool_beyond_the_machine_is_refused_at_start_with_what_fits() -> None:
    launch = Launch(
        ServerConfig(model="tandem/mini", max_total_tokens=10**14), str(MINI), Incarnation("s", "1"), 0, 1, 0
    )
    node, worker = socket.socketpair()
    told = r"--max-total-tokens 100000000000000 needs more memory than the [0-9.]+ GiB .*; at most [0-9]+ tokens fit"
    with node, worker, pytest.raises(ServerFailure, match=told):
        start(launch, BlockingChannel(worker, wire.NodeToWorker))


def test_kernels_that_are_named_and_not_there_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NATIVE", "avx3")
    launch = Launch(ServerConfig(model="tandem/mini"), str(MINI), Incarnation("s", "1"), 0, 1, 0)
    node, worker = socket.socketpair()
    with node, worker, pytest.raises(ServerFailure, match="TANDEM_NATIVE='avx3' in the environment is unknown"):
        start(launch, BlockingChannel(worker, wire.NodeToWorker))


def test_a_promise_that_cannot_be_kept_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(model: weights.LoadedModel, **settings: Any) -> weights.LoadedModel:
        asked.append(settings)
        raise ModelError("--deterministic cannot be kept")

    monkeypatch.setattr(self_check, "proven", refuse)
    for cpu_threads in (0, 1):
        config = ServerConfig(model="tandem/mini", max_total_tokens=64, deterministic=True, cpu_threads=cpu_threads)
        launch = Launch(config, str(MINI), Incarnation("s", "1"), 0, 1, 0)
        node, worker = socket.socketpair()
        with node, worker, pytest.raises(ModelError, match="cannot be kept"):
            start(launch, BlockingChannel(worker, wire.NodeToWorker))

    settings = {"threads": 1, "page_size": 16, "attention": "auto", "part": None}
    assert asked == [{**settings, "may_lower": may_lower} for may_lower in (True, False)]


def test_the_attention_backend_is_the_one_that_was_asked_for() -> None:
    config = ServerConfig(model="tandem/mini", max_total_tokens=64, attention_backend="fastest")
    launch = Launch(config, str(MINI), Incarnation("s", "1"), 0, 1, 0)
    node, worker = socket.socketpair()
    with node, worker, pytest.raises(ModelError, match="the attention backend 'fastest' is not known"):
        start(launch, BlockingChannel(worker, wire.NodeToWorker))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"disaggregation_transfer_backend": "shm"},
            "--disaggregation-transfer-backend shm does not reach KV in memory",
        ),
        (
            {"disaggregation_transfer_backend": "nixl"},
            "--disaggregation-transfer-backend nixl does not reach KV in mem",
        ),
        (
            {"enable_hierarchical_cache": True},
            "--enable-hierarchical-cache copies pages on the CPU, and KV is in memory",
        ),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else "",
)
def test_what_cannot_reach_kv_of_a_device_is_refused_by_name(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TEST_STAGED_KV", "1")
    config = ServerConfig(model="tandem/mini", max_total_tokens=64, disaggregation_mode="decode", **settings)
    launch = Launch(config, str(MINI), Incarnation("s", "1"), 0, 1, 0)
    node, worker = socket.socketpair()
    node.close()  # a worker that is not refused ends with its node
    with worker, pytest.raises(ServerFailure, match=told):
        start(launch, BlockingChannel(worker, wire.NodeToWorker))


@pytest.mark.parametrize("other", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}])
def test_layouts_that_differ_anywhere_have_another_digest(other: dict[str, str]) -> None:
    assert layout_digest(other) != layout_digest({"a": "1", "b": "2"})
    assert layout_digest({"b": "2", "a": "1"}) == layout_digest({"a": "1", "b": "2"})
