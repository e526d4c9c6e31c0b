"""Drives `EngineNode`s by hand: a fake worker beside each, and everything that is under way in plain sight.

    world = World()
    prefill, decode = world.prefill(), world.decode()
    ids = world.pair(prefill, decode, prompt_len=40, max_new_tokens=5)
    world.run()

Nothing happens by itself: `run` delivers what is under way until nothing is, `advance` lets time pass and wakes nodes.
`holds`, `drops` and `twice` of a replica name event or message types that are kept back, lost or doubled on their way.
After every step the books of the node are recounted (`check`).
"""

import hashlib
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.batch_tables import BatchTables, PlainDecodeSet, Sequence, TokenSpan
from tandem.core.batch import BatchOutcome, BatchPlan, TokenFlag
from tandem.core.commands import (
    AnnounceDpRank,
    AskDpRank,
    CancelPull,
    Command,
    Effects,
    EmitTokens,
    FailRequest,
    FetchPages,
    FinishRequest,
    ForgetRequests,
    FreeWindows,
    LaunchBatch,
    LearnPeer,
    LoadPages,
    LookUpPages,
    PublishPages,
    PullPages,
    RenderAgain,
    RevokePages,
    StartRequest,
    StorePages,
    Tell,
    WritePages,
)
from tandem.core.events import (
    AbortRequested,
    BatchReturned,
    DpRankAnswered,
    Event,
    PagesCopied,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerSaid,
    PeerUnknown,
    PromptRendered,
    RequestArrived,
    RoomElsewhere,
)
from tandem.core.kv.pool import NOBODY, PageState
from tandem.core.kv_parts import KvGrid, KvShard
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import InflightBatch, Progress, State
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Address, Cause, Incarnation, Nanos, PageId, RequestId, Room, ShardId, ceil_div
from tandem.host_memory import HostMemory, carry_out
from tandem.page_files import NAMESPACE_BYTES, Files, PageFiles
from tandem.page_storage import perform
from tandem.pagehash import hash_of, prompt_digest, prompt_links
from tandem.simulator.actors.storage import VirtualFolder
from tandem.simulator.checkers.tiers import disorder
from tandem.simulator.model_check.data_plane import Reader, new_lender
from tandem.transfer.digests import pack_digests
from tandem.transfer.jobs import Trouble
from tandem.transfer.lender import Lender
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

TICK_NS = 1_000
ROOT = b"root-of-tests..."
MASK = (1 << 61) - 1
SLOT_BYTES, FOLDER_BYTES = 8, 1 << 40
Copying = StorePages | LoadPages | FetchPages | WritePages
GRID = KvGrid(num_layers=4, num_kv_heads=4)  # of the model that all have; a page holds it whole on every shard


def prompt_tokens(length: int, seed: int) -> list[int]:
    """Prompts of one seed are prefixes of each other."""
    return [(seed * 7919 + index * 104_729 + 17) % 50_000 + 10 for index in range(length)]


def prompt_at(length: int, seed: int, rendered_at: int) -> list[int]:
    """A prompt whose template shows a time, which takes 1 to 4 tokens; 0: a prompt that shows none."""
    tokens = prompt_tokens(length, seed)
    if rendered_at:
        place = length // 2
        tokens[place : place + 1] = [60_000 + rendered_at % 1000] * (1 + rendered_at % 4)
    return tokens


def chain_after(before: int, token: int) -> int:
    """KV content of one position: it depends on every token before."""
    return (before * 1_000_003 + token * 2_654_435_761 + 12_345) & MASK


def sampled_after(chain: int) -> int:
    return (chain >> 7) % 50_000 + 10


def vector_of(chain: int) -> bytes:
    return struct.pack("<q", chain)


def expected_vector(prompt_len: int, *, seed: int) -> bytes:
    """What one engine alone gives."""
    chain = 0
    for token in prompt_at(prompt_len, seed, 0):
        chain = chain_after(chain, token)
    return vector_of(chain)


def expected_tokens(prompt_len: int, num_tokens: int, *, seed: int, rendered_at: int = 0) -> list[int]:
    """What one engine alone gives."""
    chain, tokens = 0, []
    for token in prompt_at(prompt_len, seed, rendered_at):
        chain = chain_after(chain, token)
    for _ in range(num_tokens):
        tokens.append(sampled_after(chain))
        chain = chain_after(chain, tokens[-1])
    return tokens


@dataclass(slots=True, kw_only=True)
class WorkerRequest(Sequence):
    """What the worker knows of one request."""

    content_of: list[int] = field(default_factory=list)  # KV content per token, as far as it was needed
    eos_after: int | None  # outputs
    invalid_after: int | None
    logprobs_from: int | None = None
    is_broken: bool = False  # a batch with it failed: what follows is garbage that the node has to drop

    def content(self, length: int) -> list[int]:
        known = self.content_of
        while len(known) < length:
            known.append(chain_after(known[-1] if known else 0, self.tokens[len(known)]))
        return known[:length]

    def cut(self, stop: int) -> None:
        Sequence.cut(self, stop)
        del self.content_of[stop:]


def said_of_prompt(span: TokenSpan[WorkerRequest]) -> bytes:
    """In place of log-probabilities: the positions in whose place they would stand."""
    row = span.sequence
    if row.logprobs_from is None:
        return b""
    return array("i", range(max(span.start, row.logprobs_from), min(span.stop, row.prompt_len - 1))).tobytes()


class Worker:
    """Executes plans over page memory that is never cleared, and refuses to compute on KV that is not the request's."""

    def __init__(self, settings: NodeSettings, folder: Files) -> None:
        self.page_size, self.block_tokens = settings.page_size, settings.block_tokens
        self.window_tokens = settings.windows.tokens if settings.windows is not None else 0
        self.width = self.page_size + 1
        self.kv = memoryview(bytearray(SLOT_BYTES * self.width * settings.num_pages)).cast("q")
        self.host = HostMemory(settings.host_tier.num_pages if settings.host_tier else 0, SLOT_BYTES * self.width)
        self.files = PageFiles(folder, bytes(NAMESPACE_BYTES), self.host.page_bytes, FOLDER_BYTES, now=lambda: 0)
        self.tables = BatchTables[WorkerRequest](defaultdict(PlainDecodeSet), block_tokens=self.block_tokens)
        self.orders: list[LaunchBatch | ForgetRequests] = []
        self.rows_run: dict[RequestId, int] = {}  # sampling rows per request
        self.breaks_copies = False  # from here on nothing can be copied
        self.token_ns = 0  # that a prompt token takes
        self.batch_ns = 0  # and a batch of prompts beside them

    def page(self, page: PageId) -> memoryview:
        """What was written at each of its positions; behind them whether nothing of it that layers with a window have
        written was given back."""
        return self.kv[page * self.width : (page + 1) * self.width]

    def forget_first(self) -> None:
        while self.orders and isinstance(self.orders[0], ForgetRequests):
            self.tables.forget(self.orders.pop(0).requests)

    def run_next(self) -> BatchOutcome:
        order = self.orders.pop(0)
        assert isinstance(order, LaunchBatch)
        return self.run(order.plan)

    @property
    def requests(self) -> dict[RequestId, WorkerRequest]:
        return self.tables.sequences

    @property
    def decoding(self) -> list[RequestId]:
        return [member.request for decode_set in self.tables.decode_sets.values() for member in decode_set.members]

    def break_off(self, plan: BatchPlan) -> None:
        """The forward pass raised: sets and tables have changed, nothing was sampled."""
        for span in self.tables.apply(plan):
            span.sequence.is_broken = True
        for member in self.tables.members(plan):
            member.is_broken = True

    def run(self, plan: BatchPlan) -> BatchOutcome:
        spans = self.tables.apply(plan)
        for span in self.tables.inputs(plan, spans):
            self.forward(span.sequence, span.start, span.stop)
        out = [self.sample(sequence) for sequence in self.tables.sampling(plan, spans)]
        hashes = self.tables.finish(plan, spans, [token for block, _, _ in out for token in block])
        told_tokens = [token for block, count, _ in out for token in block[:count]]
        tokens = struct.pack(f"<{len(told_tokens)}i", *told_tokens)
        flags = bytes(flags for _, _, flags in out)
        counts = tuple(count for _, count, _ in out) if self.block_tokens > 1 else ()
        told = tuple((span.sequence.request, said) for span in spans if (said := said_of_prompt(span)))
        vectors = tuple((span.sequence.request, self.vector(span.sequence)) for span in spans if span.pools)
        vectors = tuple((request, vector) for request, vector in vectors if vector)
        took_ns = Nanos(self.token_ns * sum(span.stop - span.start for span in spans) + self.batch_ns * bool(plan.rows))
        outcome = BatchOutcome(plan.id, plan.iteration, tokens, flags, tuple(hashes), duration_ns=took_ns)
        return msgspec.structs.replace(outcome, prompt_extras=told, vectors=vectors, counts=counts)

    def vector(self, one: WorkerRequest) -> bytes:
        """Of the whole prompt; empty: there is none."""
        if one.is_broken or one.invalid_after == 0:
            return b""
        return vector_of(one.content(one.prompt_len)[-1])

    def forward(self, one: WorkerRequest, start: int, stop: int) -> None:
        size = self.page_size
        if one.is_broken:
            return
        assert stop <= len(one.tokens), f"span [{start}, {stop}) of {len(one.tokens)} tokens"
        assert stop <= len(one.pages) * size, f"{stop} tokens in {len(one.pages)} pages"
        content = one.content(stop)
        held = [content for page in one.pages[: ceil_div(start, size)] for content in self.page(page)[:size]]
        assert held[:start] == content[:start], "the KV before this span is not that of its tokens"
        seen = one.pages[max(0, start + 1 - self.window_tokens) // size : ceil_div(start, size)]
        assert not self.window_tokens or all(self.page(page)[size] for page in seen), "the window is not there"
        for page in one.pages[start // size : ceil_div(stop, size)]:
            self.page(page)[size] = True
        for position in range(start, stop):
            self.page(one.pages[position // size])[position % size] = content[position]

    def sample(self, one: WorkerRequest) -> tuple[list[int], int, int]:
        """The tokens up to the border of the block, as if they were sampled one after the other; how many of them are
        told; the flags.
        """
        num_tokens = self.tables.num_sampled(one)
        if one.is_broken:
            return [0] * num_tokens, num_tokens, 0
        chain, tokens = one.content(len(one.tokens))[-1], list[int]()
        self.rows_run[one.request] = self.rows_run.get(one.request, 0) + 1
        for _ in range(num_tokens):
            tokens.append(sampled_after(chain))
            chain = chain_after(chain, tokens[-1])
        outputs = range(one.num_outputs + 1, one.num_outputs + num_tokens + 1)
        if one.invalid_after in outputs:
            return tokens, num_tokens, TokenFlag.INVALID
        if one.eos_after in outputs:
            return tokens, one.eos_after - one.num_outputs, TokenFlag.EOS
        return tokens, num_tokens, 0

    def digest(self, page: PageId) -> int:
        return int.from_bytes(hashlib.sha256(self.page(page)).digest()[:8], "little")


@dataclass
class Parcel:
    """Something on its way to a replica; made when it arrives, so that it sees the world as it is then."""

    kind: type
    make: Callable[[], list[Event]]


@dataclass
class Replica:
    node: EngineNode
    worker: Worker
    address: Address
    lenders: list[Lender[int]] = field(default_factory=list)  # by shard
    readers: list[Reader] = field(default_factory=list)
    parcels: list[Parcel] = field(default_factory=list)
    held: list[Parcel] = field(default_factory=list)
    holds: set[type] = field(default_factory=set)
    drops: set[type] = field(default_factory=set)
    twice: set[type] = field(default_factory=set)  # arrive once more, right after
    commands: list[Command] = field(default_factory=list)
    log: list[tuple[Nanos, list[Event], Effects]] = field(default_factory=list)
    tokens: dict[RequestId, list[int]] = field(default_factory=dict)
    started: dict[RequestId, StartRequest] = field(default_factory=dict)
    started_at: dict[RequestId, Nanos] = field(default_factory=dict)
    arrived_at: dict[RequestId, Nanos] = field(default_factory=dict)
    ended: dict[RequestId, FinishRequest | FailRequest] = field(default_factory=dict)
    windows: list[list[InflightBatch]] = field(default_factory=list)  # after each step
    render: dict[RequestId, Callable[[int], Request]] = field(default_factory=dict)  # gives the worker that prompt
    wake_at: Nanos | None = None
    is_dead: bool = False
    next_id: int = 1

    @property
    def name(self) -> Incarnation:
        return self.node.state.settings.incarnation

    @property
    def state(self) -> Any:  # NodeState: tests look at everything
        return self.node.state

    def progress(self, request: RequestId) -> Progress:
        return self.node.state.requests[request]

    def state_of(self, request: RequestId) -> State:
        progress = self.node.state.requests.get(request)
        return progress.state if progress is not None else State.DONE

    def said(self, kind: type) -> list[Any]:
        """Every command of this type so far, or every message of this type that was told."""
        found = [command for command in self.commands if isinstance(command, kind)]
        told = [c.message for c in self.commands if isinstance(c, Tell) and isinstance(c.message, kind)]
        return found or told

    def plans(self) -> list[BatchPlan]:
        return [command.plan for command in self.said(LaunchBatch)]

    def cause(self, request: RequestId) -> Cause:
        end = self.ended[request]
        assert isinstance(end, FailRequest), end
        return end.cause

    def release(self, *kinds: type) -> None:
        """What was kept back comes now (all of it when no kind is named), in the order in which it would have come."""
        chosen = set(kinds) or set(self.holds)
        self.holds -= chosen
        due = [parcel for parcel in self.held if parcel.kind in chosen]
        self.held = [parcel for parcel in self.held if parcel.kind not in chosen]
        self.parcels = due + self.parcels


class World:
    def __init__(self) -> None:
        self.now = Nanos(TICK_NS)
        self.replicas: dict[Incarnation, Replica] = {}
        self.directory: dict[Address, tuple[Incarnation, str]] = {}
        self.ranks: dict[Address, list[PeerLearned]] = {}  # of prefills that have several, and no others
        self.announced: dict[Room, int] = {}
        self.next_room = 100
        self.folder = VirtualFolder.without_faults({})  # of storage, for all replicas

    # --- building ------------------------------------------------------------------------------------------------

    def unified(self, **settings: Any) -> Replica:
        return self.add(Role.UNIFIED, "unified", **settings)

    def prefill(self, name: str = "prefill", **settings: Any) -> Replica:
        return self.add(Role.PREFILL, name, **settings)

    def decode(self, name: str = "decode", **settings: Any) -> Replica:
        return self.add(Role.DECODE, name, **settings)

    def add(self, role: Role, name: str, *, life: int = 1, is_known: bool = True, **settings: Any) -> Replica:
        asked = {"role": role, "incarnation": {"name": name, "id": str(life)}, "num_pages": 64, "chunk_tokens": 64}
        made = msgspec.convert({**asked, **settings}, NodeSettings)
        replica = Replica(EngineNode(made), Worker(made, self.folder), Address(f"{name}.host", 8998))
        replica.lenders = [new_lender(shard, lambda event: self.send(replica, event)) for shard in made.shards]
        replica.readers = [Reader(KvShard(GRID, made.cut, shard, cell_bytes=1)) for shard in made.shards]
        self.replicas[made.incarnation] = replica
        if role is Role.PREFILL and is_known:
            self.directory[replica.address] = (made.incarnation, made.layout)
        return replica

    def submit(
        self,
        replica: Replica,
        *,
        prompt_len: int = 40,
        max_new_tokens: int = 4,
        seed: int = 1,
        eos_after: int | None = None,
        invalid_after: int | None = None,
        timeout_ns: int = 600 * SECOND,
        room: int | None = None,
        peer: Address | None = None,
        rid: str | None = None,
        dp_rank_hint: int | None = None,
        rendered_at: int = 0,
        logprobs_from: int | None = None,
        wants_vector: bool = False,
    ) -> RequestId:
        """Tell the request to the worker and put its arrival on the way."""
        request = RequestId(replica.next_id)
        replica.next_id += 1

        def render(rendered_at: int) -> Request:
            tokens = prompt_at(prompt_len, seed, rendered_at)
            page_size = replica.worker.page_size
            links = prompt_links(ROOT, tokens, page_size=page_size)
            replica.worker.tables.add(
                WorkerRequest(
                    request=request,
                    prompt_len=len(tokens),
                    page_size=page_size,
                    tokens=array("i", tokens),
                    prompt_hash=links[-1] if links else ROOT,
                    eos_after=eos_after,
                    invalid_after=invalid_after,
                    logprobs_from=logprobs_from,
                )
            )
            hashes = tuple(hash_of(link) for link in links)
            return Request(
                request,
                rid or f"rid-{request}",
                len(tokens),
                hashes,
                max_new_tokens,
                Nanos(timeout_ns),
                Room(room) if room is not None else None,
                peer,
                dp_rank_hint,
                prompt_digest=prompt_digest(tokens, secret=ROOT),
                prompt_logprobs_from=logprobs_from,
                rendered_at=rendered_at,
                wants_vector=wants_vector,
            )

        replica.render[request] = render
        self.send(replica, RequestArrived(render(rendered_at)))
        return request

    def pair(self, prefill: Replica, decode: Replica, **asked: Any) -> tuple[RequestId, RequestId]:
        """Both halves of one request; the ids at prefill and at decode."""
        room = self.room()
        left = self.submit(prefill, room=room, **asked)
        return left, self.submit(decode, room=room, peer=prefill.address, **asked)

    def room(self) -> int:
        self.next_room += 1
        return self.next_room

    # --- running -------------------------------------------------------------------------------------------------

    def send(self, replica: Replica, event: Event) -> None:
        kind = type(event.message) if isinstance(event, PeerSaid) else type(event)
        replica.parcels.append(Parcel(kind, lambda: [event]))

    def run(self, max_steps: int = 20_000) -> None:
        """Deliver what is under way until nothing moves any more."""
        for _ in range(max_steps):
            if not self.turn_all():
                return
        raise AssertionError("the nodes never come to rest")

    def run_until(self, is_so: Callable[[], bool], max_steps: int = 5_000) -> None:
        """Deliver step by step, and stop as soon as `is_so`."""
        for _ in range(max_steps):
            if is_so():
                return
            assert self.turn_all(), "everything rests before it is so"
        raise AssertionError("it never becomes so")

    def turn_all(self) -> bool:
        """One turn of everybody; False if nobody had anything to do."""
        moved = [self.turn(replica) for replica in list(self.replicas.values())]
        return any(moved)

    def turn(self, replica: Replica) -> bool:
        """One step of one replica with everything that has arrived; at most one batch returns. False: nothing there."""
        if replica.is_dead:
            return False
        events = self.collect(replica)
        replica.worker.forget_first()
        if replica.worker.orders and BatchReturned not in replica.holds:
            plan = replica.worker.orders[0].plan
            events.append(BatchReturned(replica.worker.run_next()))
            check_tables(replica, plan)
        if not events and not (replica.wake_at is not None and replica.wake_at <= self.now):
            return False
        self.step(replica, events)
        return True

    def collect(self, replica: Replica) -> list[Event]:
        parcels, replica.parcels = replica.parcels, []
        events: list[Event] = []
        for parcel in parcels:
            if parcel.kind in replica.drops:
                continue
            if parcel.kind in replica.holds:
                replica.held.append(parcel)
                continue
            events += [event for event in parcel.make() for _ in range(1 + (parcel.kind in replica.twice))]
        return events

    def step(self, replica: Replica, events: list[Event]) -> Effects:
        self.now = Nanos(self.now + TICK_NS)
        for event in events:
            if isinstance(event, RequestArrived):
                replica.arrived_at.setdefault(event.request.id, self.now)
        effects = replica.node.step(events, self.now)
        replica.log.append((self.now, events, effects))
        replica.wake_at = effects.wake_at
        replica.windows.append(list(replica.state.inflight))
        for command in effects.commands:
            replica.commands.append(command)
            self.dispatch(replica, command)
        check(replica)
        return effects

    def advance(self, duration_ns: int) -> None:
        """Let time pass; nodes are woken when they asked for it."""
        until = self.now + duration_ns
        while True:
            self.run()
            wakes = [r.wake_at for r in self.replicas.values() if r.wake_at is not None and not r.is_dead]
            if not wakes or min(wakes) > until:
                break
            self.now = max(self.now, min(wakes))
        self.now = Nanos(max(self.now, until))

    def kill(self, replica: Replica) -> None:
        """The process is gone; everybody else finds out."""
        replica.is_dead = True
        self.directory.pop(replica.address, None)
        for other in self.replicas.values():
            if not other.is_dead:
                self.send(other, PeerLost(replica.name))

    def _who_is(self, address: Address, dp_rank: int | None) -> PeerLearned | PeerUnknown:
        ranks = self.ranks.get(address)
        if ranks is None:
            known = self.directory.get(address)
            return PeerLearned(address, *known) if known else PeerUnknown(address, "nobody listens")
        if dp_rank in (None, *range(len(ranks))):
            return ranks[dp_rank or 0]
        return PeerUnknown(address, f"there is no rank {dp_rank}", dp_rank)

    def abort(self, replica: Replica, request: RequestId) -> None:
        self.send(replica, AbortRequested(request))

    # --- what a shell does with commands -------------------------------------------------------------------------

    def dispatch(self, replica: Replica, command: Command) -> None:
        match command:
            case LaunchBatch() | ForgetRequests():
                replica.worker.orders.append(command)
            case StartRequest(request):
                assert request not in replica.started
                replica.started[request] = command
                replica.started_at[request] = self.now
            case EmitTokens(requests, tokens):
                for request, token in zip(requests, struct.unpack(f"<{len(requests)}i", tokens), strict=True):
                    assert request in replica.started, "tokens before StartRequest"
                    assert request not in replica.ended, "tokens after the end"
                    replica.tokens.setdefault(request, []).append(token)
            case FinishRequest(request) | FailRequest(request):
                assert request not in replica.ended, "a second terminal event"
                replica.ended[request] = command
            case RenderAgain(request, rendered_at):
                assert not any(request == row.request for flight in replica.state.inflight for row in flight.rows)
                render = replica.render[request]
                replica.parcels.append(Parcel(PromptRendered, lambda: [PromptRendered(render(rendered_at))]))
            case LearnPeer(address, dp_rank):
                self.send(replica, self._who_is(address, dp_rank))
            case AskDpRank(address, room):
                ranks = self.ranks.get(address)
                prefill = None if ranks is None else ranks[0].prefill
                self.send(replica, DpRankAnswered(address, room, self.announced.get(room), prefill))
            case AnnounceDpRank(room, rank, sought):
                self.announced[room] = rank
                for other in self.replicas.values():
                    settings = other.state.settings
                    if settings.dp_rank == sought and settings.prefill_info == replica.state.settings.prefill_info:
                        self.send(other, RoomElsewhere(room, rank))
            case Tell(peer, message):
                if peer in self.replicas:
                    self.send(self.replicas[peer], PeerSaid(replica.name, message))
            case PublishPages():
                digests = pack_digests([replica.worker.digest(page) for page in command.pages])
                for lender, reader in zip(replica.lenders, replica.readers, strict=True):
                    num_parts = len(reader.kv.lends(command.reader))
                    lender.digested(lender.publish(command), command, (digests,) * num_parts)
            case RevokePages(request, attempt):
                for lender in replica.lenders:
                    lender.revoke(request, attempt)
            case PullPages(peer=peer):
                for reader in replica.readers:
                    reader.pull(command, self.replicas[peer].state.settings.cut)
                    replica.parcels.append(Parcel(PagesLanded, lambda reader=reader: self.land(replica, reader)))
            case CancelPull():
                for reader in replica.readers:
                    reader.cancel(command)
                    for event in reader.heard():
                        self.send(replica, event)
            case FreeWindows(pages):
                for page in pages:
                    replica.worker.page(page)[-1] = False
            case LookUpPages():
                for shard in replica.state.settings.shards:
                    self.send(replica, perform(command, replica.worker.files, replica.worker.host, shard))
            case StorePages() | LoadPages() | FetchPages() | WritePages():
                for shard in replica.state.settings.shards:
                    replica.parcels.append(Parcel(PagesCopied, lambda shard=shard: self.copy(replica, command, shard)))

    def copy(self, replica: Replica, command: Copying, shard: ShardId) -> list[Event]:
        """Between the pool, host memory and storage, which all replicas share: the bytes move when this is called."""
        worker, state = replica.worker, replica.state

        def device_page(page: PageId) -> memoryview:
            if worker.breaks_copies:
                raise OSError("nothing can be copied")
            expected = PageState.CACHED if isinstance(command, StorePages) else PageState.LOADING
            assert state.pool.states[page] == expected
            return worker.page(page).cast("B")

        if isinstance(command, StorePages | LoadPages):
            return [carry_out(command, worker.host, device_page, shard)]
        copied = perform(command, worker.files, worker.host, shard)
        for page in command.host_pages[: copied.num_pages]:
            if isinstance(command, FetchPages):
                assert state.host.pool.states[page] == PageState.OWNED
            else:
                assert not state.windows.are_there or worker.host.page(page).cast("q")[-1]
        return [copied]

    def land(self, replica: Replica, reader: Reader) -> list[Event]:
        """Whatever is pulled is read when this is called: the latest moment, which is the one that finds mistakes."""
        reader.go_on()
        while reader.jobs:
            self.read(replica, reader)
        return reader.heard()

    def read(self, replica: Replica, reader: Reader) -> None:
        """The first job, from the dial to the last page of its Read."""
        source = self.replicas[reader.jobs[0].origin.peer]
        if source.is_dead:
            return reader.fails(0, Trouble.BROKEN)
        job = reader.connects(0)
        command, asked = job.command, slice(job.start, job.stop)
        pages, generations = command.sources[asked], command.generations[asked]
        lender = source.lenders[job.origin.shard]
        grant = lender.lease(job.link, command.room, secret=job.offer.secret, pages=pages, generations=generations)
        if isinstance(grant, Status):
            return reader.fails(0, Trouble.REFUSED, grant)
        assert generations == tuple(source.state.pool.generations[page] for page in pages), "lent, and given away"
        here = command.destinations[asked]
        for page, destination in zip(pages, here, strict=True):
            replica.worker.page(destination)[:] = source.worker.page(page)
        lender.end_lease(grant, job.link, self.now, is_sent=True)
        if tuple(map(replica.worker.digest, here)) != job.offer.digests[asked]:
            return reader.fails(0, Trouble.CORRUPT)
        return reader.lands(0, count=len(pages), is_last_sent=True)

    @staticmethod
    def assert_same_but_for_the_step_number(before: bytes, replica: Replica) -> None:
        was, now = NodeState.decode(before), NodeState.decode(replica.node.snapshot())
        was.now, was.steps, was.tree.step = now.now, now.steps, now.tree.step
        assert was == now


# --- the books ----------------------------------------------------------------------------------------------------


def check(replica: Replica) -> None:
    """Recount everything that a node keeps twice, and the bounds it has promised."""
    node, settings = replica.state, replica.state.settings
    check_pages(replica)
    assert len(node.inflight) <= settings.window_depth
    assert node.num_slots_used <= settings.max_running
    assert len(node.stash) <= settings.stashed_messages
    assert len(node.tombstones) <= settings.tombstones
    for state, queue in node.queues.items():
        for request in queue:
            assert node.requests[request].state is state
    assert sum(map(len, node.queues.values())) == len(node.requests)
    known = [[row.request for row in flight.rows] + list(flight.members) for flight in node.inflight]
    for progress in node.requests.values():
        assert progress.in_flight == sum(requests.count(progress.id) for requests in known)
        assert progress.pending <= progress.in_flight * settings.block_tokens
        assert progress.state is State.DRAINING or progress.waiting_for is not None
        if progress.state is not State.DRAINING:
            assert replica.wake_at is not None
            assert replica.wake_at <= progress.deadline
        else:
            assert progress.in_flight or progress.drains
    assert all(node.requests[request].state is State.RUNNING for request in node.micro_batches.members)
    assert all(one.joins.keys() <= one.members.keys() for one in node.micro_batches.each)
    assert len(set(node.micro_batches.members)) == node.micro_batches.num_members, "each in one of them"
    assert all(node.requests[request].request.room == room for room, request in node.rooms.items())
    slots = node.results
    assert sorted([*slots.free_slots, *slots.owners.values()]) == list(range(slots.num_slots))
    assert all(request in node.requests for request in slots.owners)


def check_pages(replica: Replica) -> None:
    node, pool = replica.state, replica.state.pool
    for state in PageState:
        assert pool.counts[state] == pool.states.count(state), state
    assert sum(pool.counts) == pool.num_pages
    assert sorted(pool.free_pages) == [page for page, state in enumerate(pool.states) if state is PageState.FREE]
    cached = sorted(entry.page for entry in node.tree.nodes.values() if entry.is_landed)
    assert cached == [page for page, state in enumerate(pool.states) if state is PageState.CACHED]
    held = {progress.id: progress for progress in node.requests.values()}
    for page, state in enumerate(pool.states):
        owner = pool.owners[page]
        if state in (PageState.FREE, PageState.CACHED, PageState.LOADING):
            assert owner == NOBODY
        else:
            assert held[owner].pages.count(page) == 1
            assert (state is PageState.QUARANTINED) == (held[owner].state is State.DRAINING)
    for progress in held.values():
        for page in progress.pages:
            assert pool.states[page] in (PageState.CACHED, PageState.LOADING) or pool.owners[page] == progress.id
    assert node.tree.num_pinned == sum(entry.pins > 0 and entry.is_landed for entry in node.tree.nodes.values())
    assert not any(has_part and pool.states[page] is PageState.FREE for page, has_part in enumerate(pool.has_part))
    assert pool.num_parts == sum(pool.has_part) <= pool.max_parts
    assert disorder(node.tree, node.host, node.storage) == ""


def check_tables(replica: Replica, plan: BatchPlan) -> None:
    """The page tables with which a batch has just run are beginnings of the node's."""
    members = [member.request for member in replica.worker.tables.members(plan)]
    for request in [*(row.request for row in plan.rows), *members]:
        table = replica.worker.requests[request].pages
        assert table == replica.progress(request).pages[: len(table)]


def assert_who_is_pushed_back_goes_on(world: "World", node: "Replica") -> None:
    """Four whose answers do not fit beside each other get the tokens that each gets alone."""
    ids = [world.submit(node, prompt_len=9 + n, max_new_tokens=40, seed=n) for n in range(4)]
    world.run()
    assert node.state.counters.retractions > 0
    for n, request in enumerate(ids):
        assert node.tokens[request] == expected_tokens(9 + n, 40, seed=n)
    assert_nothing_is_held(node)


def assert_nothing_is_held(replicas: Replica | Iterable[Replica]) -> None:
    """No request has left a page, slot, row, room, timer or queue entry behind, here or at the worker."""
    for replica in [replicas] if isinstance(replicas, Replica) else replicas:
        node = replica.state
        assert node.requests == {}
        assert not any(node.queues.values())
        assert node.rooms == {}
        assert node.inflight == []
        assert node.timers == []
        assert replica.wake_at is None
        assert node.forgotten == []
        assert all((one.members, one.joins, one.leaves) == ({}, {}, []) for one in node.micro_batches.each)
        assert node.pool.counts[PageState.OWNED] == node.pool.counts[PageState.QUARANTINED] == 0
        assert node.tree.num_pinned == 0
        assert node.windows.pins == {}
        assert node.host.copies == node.storage.prefetches == node.storage.operations == {}
        assert node.host.pool.counts[PageState.OWNED] == node.pool.counts[PageState.LOADING] == 0
        assert node.results.owners == {}
        replica.worker.forget_first()
        assert replica.worker.orders == []
        assert replica.worker.requests == {}
        assert replica.worker.decoding == []
        assert [lender.held() for lender in replica.lenders] == [Held()] * len(replica.lenders)
        assert [reader.puller.held() for reader in replica.readers] == [Held()] * len(replica.readers)


def finished(replica: Replica, request: RequestId) -> FinishRequest:
    end = replica.ended[request]
    assert isinstance(end, FinishRequest), end
    return end
