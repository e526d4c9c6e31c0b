"""Pages are pulled while later chunks compute: with prefill stopped before its last chunk, the earlier ones are there.

Real engines, real sockets, real nodes, in one process, so that the test can stop exactly one batch.
"""

import queue
import time
from array import array
from pathlib import Path

import pytest
import torch

import tandem
from tandem.core.commands import (
    CancelPull,
    EmitTokens,
    FinishRequest,
    ForgetRequests,
    LaunchBatch,
    LearnPeer,
    PublishPages,
    PullPages,
    RevokePages,
    StartRequest,
    Tell,
)
from tandem.core.commands import (
    Path as KvPath,
)
from tandem.core.events import BatchReturned, Event, PeerLearned, PeerSaid, RequestArrived
from tandem.core.request import Request
from tandem.core.sched.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Address, Incarnation, Nanos, RequestId, Room, ShardId
from tandem.engine import weights
from tandem.engine.engine import Engine
from tandem.pagehash import prompt_hashes, root_hash
from tandem.sampling import Payload, SamplingParams
from tandem.transfer.sock import SockTransfer

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
PAGE, CHUNK, NUM_PAGES = 16, 32, 64
PROMPT = [5 + (7 * i) % 400 for i in range(3 * CHUNK + 9)]
ADDRESS = Address("127.0.0.1", 1)


class Half:
    """One server without its processes: node, engine and data plane, pumped by hand."""

    def __init__(self, role: Role, model: weights.LoadedModel) -> None:
        self.me = Incarnation(role.value, 1)
        self.node = EngineNode(NodeSettings(role, self.me, num_pages=NUM_PAGES, page_size=PAGE, chunk_tokens=CHUNK))
        self.engine = Engine(model, page_size=PAGE, num_pages=NUM_PAGES)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        assert self.engine.kv.buffer is not None
        self.transfer = SockTransfer(
            self.engine.kv.buffer,
            self.engine.kv.page_bytes,
            incarnation=self.me,
            shard=ShardId(0),
            host="127.0.0.1",
            report=self.events.put,
        )
        self.held: list[LaunchBatch] = []  # batches that are not run until the test says so
        self.holds_after: int | None = None
        self.out: list[object] = []
        self.other: Half | None = None

    def submit(self, max_new_tokens: int, peer: Address | None) -> None:
        root = root_hash(secret=b"test", tenant="")
        hashes = tuple(prompt_hashes(root, PROMPT, page_size=PAGE))
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        self.engine.add(Payload(1, array("i", PROMPT).tobytes(), greedy, hashes[-1]))
        request = Request(RequestId(1), "r", len(PROMPT), hashes, max_new_tokens, Nanos(60 * SECOND), Room(7), peer)
        self.events.put(RequestArrived(request))

    def pump(self) -> None:
        """Everything that has happened, one step, and what it asks for."""
        happened: list[Event] = []
        while not self.events.empty():
            happened.append(self.events.get())
        for command in self.node.step(happened, Nanos(time.monotonic_ns())).commands:
            self.carry_out(command)

    def carry_out(self, command: object) -> None:
        assert self.other is not None
        match command:
            case LaunchBatch(plan):
                if self.holds_after is not None and plan.iteration > self.holds_after:
                    self.held.append(command)
                else:
                    self.events.put(BatchReturned(self.engine.run(plan)))
            case ForgetRequests(requests):
                self.engine.forget(requests)
            case PublishPages():
                self.transfer.publish(command)
            case RevokePages():
                self.transfer.revoke(command)
            case PullPages():
                self.transfer.pull(command)
            case CancelPull():
                self.transfer.cancel(command)
            case Tell(_, message):
                self.other.events.put(PeerSaid(self.me, message))
            case LearnPeer(address):
                far = self.other.transfer
                self.transfer.connect(self.other.me, far.host, far.port, far.unix)
                self.events.put(PeerLearned(address, self.other.me, ""))
            case _:
                self.out.append(command)

    def release(self) -> None:
        self.holds_after = None
        for command in self.held:
            self.carry_out(command)
        self.held = []

    @property
    def landed(self) -> int:
        receiver = self.node.state.requests[RequestId(1)].receiver
        assert receiver is not None
        report = receiver.reports.get(ShardId(0))
        return report.landed if report is not None else 0

    def kv(self, num_pages: int) -> list[bytes]:
        pages = self.node.state.requests[RequestId(1)].pages[:num_pages]
        return [bytes(self.engine.kv.page(page)) for page in pages]


@pytest.fixture
def pair():
    torch.set_num_threads(1)
    model = weights.load(MINI, dtype="auto", device="cpu")
    prefill, decode = Half(Role.PREFILL, model), Half(Role.DECODE, model)
    prefill.other, decode.other = decode, prefill
    yield prefill, decode
    prefill.transfer.close()
    decode.transfer.close()


def pump_until(prefill: Half, decode: Half, reached, deadline_s: float = 20) -> None:
    give_up_at = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < give_up_at, (prefill.node.state.queues, decode.node.state.queues)
        prefill.pump()
        decode.pump()


def test_earlier_pages_have_landed_before_the_last_chunk_is_computed(pair) -> None:
    prefill, decode = pair
    prefill.holds_after = 3  # of 4 chunks
    prefill.submit(5, None)
    decode.submit(5, ADDRESS)
    early = 3 * CHUNK // PAGE
    pump_until(prefill, decode, lambda: RequestId(1) in decode.node.state.requests and decode.landed == early)
    assert [command.plan.iteration for command in prefill.held] == [4]
    assert decode.kv(early) == prefill.kv(early)
    assert decode.out == [], "nothing is committed before everything has landed"

    prefill.release()
    pump_until(prefill, decode, lambda: any(isinstance(command, FinishRequest) for command in decode.out))
    start = next(command for command in decode.out if isinstance(command, StartRequest))
    assert start.path is KvPath.REMOTE
    assert sum(len(command.requests) for command in decode.out if isinstance(command, EmitTokens)) == 5
