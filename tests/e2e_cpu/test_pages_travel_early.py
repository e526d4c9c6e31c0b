"""Pages are pulled while later chunks compute: with prefill stopped before its last chunk, the earlier ones are there.
With prefill stopped before its first, what it had cached is there.

Real engines, real sockets, real nodes, in one process, so that the test can stop exactly one batch.
"""

import queue
import time
from array import array
from pathlib import Path

import pytest
import torch

import tandem
from data_planes import introduce
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
from tandem.core.disagg.sides import DecodeSide
from tandem.core.events import BatchReturned, Event, FlushRequested, PeerLearned, PeerSaid, RequestArrived
from tandem.core.kv_parts import KvShard
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Address, Incarnation, Nanos, RequestId, Room, ShardId
from tandem.engine import weights
from tandem.engine.engine import Engine
from tandem.membership import ClusterSecret
from tandem.pagehash import prompt_hashes, root_hash
from tandem.sampling import Payload, SamplingParams
from tandem.transfer.pages import Pages
from tandem.transfer.sock import SockTransfer

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
PAGE, CHUNK, NUM_PAGES = 16, 32, 64
PROMPT = [5 + (7 * i) % 400 for i in range(3 * CHUNK + 9)]
ADDRESS = Address("127.0.0.1", 1)


class Half:
    """One server without its processes: node, engine and data plane, pumped by hand."""

    def __init__(self, role: Role, model: weights.LoadedModel) -> None:
        self.me = Incarnation(role.value, "1")
        self.node = EngineNode(NodeSettings(role, self.me, num_pages=NUM_PAGES, page_size=PAGE, chunk_tokens=CHUNK))
        self.engine = Engine(model, page_size=PAGE, num_pages=NUM_PAGES)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        assert self.engine.kv.buffer is not None
        self.transfer = SockTransfer(
            Pages(self.engine.kv.buffer, self.engine.kv.page_bytes),
            KvShard.whole(self.engine.kv.page_bytes),
            incarnation=self.me,
            secret=ClusterSecret(b"the secret of these two"),
            host="127.0.0.1",
            report=self.events.put,
        )
        self.held: list[LaunchBatch] = []  # batches that are not run until the test says so
        self.holds_after: int | None = None
        self.out: list[object] = []
        self.other: Half | None = None

    def submit(self, max_new_tokens: int, peer: Address | None, *, number: int = 1) -> None:
        root = root_hash(secret=b"test", tenant="")
        hashes = tuple(prompt_hashes(root, PROMPT, page_size=PAGE))
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        self.engine.add(Payload(number, array("i", PROMPT).tobytes(), greedy, hashes[-1]))
        mine, room = RequestId(number), Room(6 + number)
        request = Request(mine, "r", len(PROMPT), hashes, max_new_tokens, Nanos(60 * SECOND), room, peer)
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
                introduce(self.transfer, self.other.me, far.host, far.port, far.unix)
                self.events.put(PeerLearned(address, self.other.me, ""))
            case _:
                self.out.append(command)

    def release(self) -> None:
        self.holds_after = None
        for command in self.held:
            self.carry_out(command)
        self.held = []

    def landed(self, number: int = 1) -> int:
        progress = self.node.state.requests.get(RequestId(number))
        side = progress.side if progress is not None else None
        if not isinstance(side, DecodeSide) or side.arrival is None:
            return 0
        report = side.arrival.reports.get(ShardId(0))
        return report.landed if report is not None else 0

    def has_finished(self, number: int) -> bool:
        return any(isinstance(command, FinishRequest) and command.request == number for command in self.out)

    def kv(self, num_pages: int, number: int = 1) -> list[bytes]:
        pages = self.node.state.requests[RequestId(number)].pages[:num_pages]
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


def submit_to_both(prefill: Half, decode: Half, *, number: int = 1) -> None:
    """READY is there before the request is: what prefill hands out then, it hands out of its own accord."""
    decode.submit(5, ADDRESS, number=number)
    pump_until(prefill, decode, lambda: prefill.node.state.stash)
    prefill.submit(5, None, number=number)


def test_earlier_pages_have_landed_before_the_last_chunk_is_computed(pair) -> None:
    prefill, decode = pair
    prefill.holds_after = 3  # of 4 chunks
    submit_to_both(prefill, decode)
    early = 3 * CHUNK // PAGE
    pump_until(prefill, decode, lambda: decode.landed() == early)
    assert [command.plan.iteration for command in prefill.held] == [4]
    assert decode.kv(early) == prefill.kv(early)
    assert decode.out == [], "nothing is committed before everything has landed"

    prefill.release()
    pump_until(prefill, decode, lambda: decode.has_finished(1))
    start = next(command for command in decode.out if isinstance(command, StartRequest))
    assert start.path is KvPath.REMOTE
    assert sum(len(command.requests) for command in decode.out if isinstance(command, EmitTokens)) == 5


def test_a_cached_prefix_has_landed_before_the_first_chunk_is_computed(pair) -> None:
    prefill, decode = pair
    submit_to_both(prefill, decode)
    pump_until(prefill, decode, lambda: prefill.has_finished(1) and decode.has_finished(1))
    decode.events.put(FlushRequested())
    decode.pump()

    prefill.holds_after = prefill.node.state.forward_ct
    submit_to_both(prefill, decode, number=2)
    cached = len(PROMPT) // PAGE
    pump_until(prefill, decode, lambda: decode.landed(2) == cached)
    (first,) = prefill.held
    assert first.plan.rows[0].start == cached * PAGE, "only what is not cached waits to be computed"
    assert decode.kv(cached, 2) == prefill.kv(cached, 2)

    prefill.release()
    pump_until(prefill, decode, lambda: decode.has_finished(2))
