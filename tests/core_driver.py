"""Drives `EngineNode`s by hand: the simulator's workers beside each, and everything that is under way in plain sight.

    world = World()
    prefill, decode = world.prefill(), world.decode()
    ids = world.pair(prefill, decode, prompt_len=40, max_new_tokens=5)
    world.run()

Nothing happens by itself: `run` delivers what is under way until nothing is, `advance` lets time pass and wakes nodes.
`holds`, `drops` and `twice` of a replica name event or message types that are kept back, lost or doubled on their way.
Batches, copies and pages on their way are run when their end is delivered: the latest moment, which is the one that
finds mistakes. After every step the books of the node are recounted (`check`).
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

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
from tandem.core.values import SECOND, Address, Cause, Incarnation, Nanos, PageHash, PageId, RequestId, Room, ShardId
from tandem.host_memory import HostMemory
from tandem.page_files import PageFiles, namespace_of
from tandem.page_storage import perform
from tandem.pagehash import hash_of, prompt_digest, prompt_links
from tandem.simulator.actors.executor import CostModel, Executor, digests
from tandem.simulator.actors.host_tier import copy_pages, host_memory_of
from tandem.simulator.actors.storage import VirtualFolder
from tandem.simulator.actors.workers import Workers
from tandem.simulator.checkers.changes import has_token_to_come
from tandem.simulator.checkers.tiers import disorder
from tandem.simulator.model import EOS_TOKEN
from tandem.simulator.model_check.data_plane import Reader, new_lender
from tandem.simulator.oracle import Script
from tandem.transfer.jobs import Trouble
from tandem.transfer.lender import Lender
from tandem.transfer.port import Held

TICK_NS = 1_000
ROOT = b"root-of-tests..."
FOLDER_BYTES = 1 << 40
Copying = StorePages | LoadPages | FetchPages | WritePages
GRID = KvGrid(num_layers=2, num_kv_heads=2)  # of the model that all have


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


@dataclass(slots=True)
class Answer(Script):
    """Says end-of-sequence after so many outputs, and not by chance."""

    eos_after: int | None = None

    def sampled(self, *, kv_sum: int, position: int) -> int:
        if self.eos_after is not None and position + 2 == len(self.prompt) + self.eos_after:
            return EOS_TOKEN
        return Script.sampled(self, kv_sum=kv_sum, position=position)


def answer(
    prompt_len: int,
    *,
    seed: int,
    rendered_at: int = 0,
    eos_after: int | None = None,
    logprobs_from: int | None = None,
    max_new_tokens: int = 0,
) -> Answer:
    """What one engine alone gives."""
    prompt = tuple(prompt_at(prompt_len, seed, rendered_at))
    return Answer(prompt, max_new_tokens, eos_one_in=0, logprobs_from=logprobs_from, eos_after=eos_after)


def expected_tokens(prompt_len: int, num_tokens: int, **asked: Any) -> list[int]:
    """What one engine alone gives; `asked` as of `answer`."""
    script = answer(prompt_len, **asked)
    return [script.output_token(index) for index in range(num_tokens)]


@dataclass
class Parcel:
    """Something on its way to a replica; made when it arrives, so that it sees the world as it is then."""

    kind: type
    make: Callable[[], list[Event]]


@dataclass
class Replica:
    node: EngineNode
    workers: Workers
    address: Address
    hosts: list[HostMemory]  # of each worker
    files: list[PageFiles]
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
    rows_run: dict[RequestId, int] = field(default_factory=lambda: defaultdict(int))  # sampling rows per request
    invalid_rows: dict[RequestId, int] = field(default_factory=dict)  # which of them gets no token
    no_token: int = TokenFlag.INVALID  # the flags of these
    cost: CostModel = field(default_factory=lambda: CostModel(0, 0, 0, 0.0))
    breaks_copies: bool = False  # from here on nothing can be copied

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

    # --- its workers, which begin and end every batch together

    @property
    def executor(self) -> Executor:
        """Of the worker that samples."""
        return self.workers.sampling.executor

    def begin(self) -> BatchPlan | None:
        """The batch that they are in; they begin it now if they have ended the one before. Who is to be forgotten in
        front of it is."""
        for worker in self.workers:
            worker.held = worker.held or self.workers.next_batch(worker)
        return self.workers.sampling.held

    def end(self) -> BatchOutcome:
        """Of the batch that they are in."""
        plan = self.begin()
        assert plan is not None
        outcome = None
        for worker in self.workers:
            worker.held = None
            outcome = self.workers.returned(worker, worker.executor.run(plan, invalid=self.invalid(plan)))
        assert outcome is not None
        for request in self.sampling(plan):
            self.rows_run[request] += 1
        check_tables(self, plan)
        duration_ns = Nanos(self.cost.batch_ns(plan, 0, Random(0)))
        return msgspec.structs.replace(outcome, duration_ns=duration_ns)

    def break_off(self) -> BatchPlan | None:
        """The forward pass that they are in raises, if they are in one."""
        plan = self.begin()
        for worker in self.workers if plan is not None else ():
            worker.executor.break_off(plan)
            worker.held, worker.is_working = None, False
        return plan

    def sampling(self, plan: BatchPlan) -> list[RequestId]:
        """By row of the outcome."""
        flight = next(flight for flight in self.state.inflight if flight.batch == plan.id)
        return [row.request for row in plan.rows if row.samples] + list(flight.members)

    def invalid(self, plan: BatchPlan) -> dict[int, int]:
        rows = enumerate(self.sampling(plan) if self.invalid_rows else ())
        return {row: self.no_token for row, one in rows if self.rows_run[one] + 1 == self.invalid_rows.get(one)}

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
        kv = [KvShard(GRID, made.cut, shard, cell_bytes=1) for shard in made.shards]
        workers = Workers(
            kv,
            num_pages=made.num_pages,
            page_size=made.page_size,
            guard=lambda *_: None,
            seed="",
            block_tokens=made.block_tokens,
            window_tokens=made.windows.tokens if made.windows is not None else 0,
        )
        host_pages = made.host_tier.num_pages if made.host_tier else 0
        hosts = [host_memory_of(memory, host_pages) for memory in workers.memories]
        files = [self.open(shard, host) for shard, host in enumerate(hosts)]
        replica = Replica(EngineNode(made), workers, Address(f"{name}.host", 8998), hosts, files)
        replica.log.append((self.now, [], replica.node.step((), self.now)))  # its life begins
        replica.lenders = [new_lender(shard, lambda event: self.send(replica, event)) for shard in made.shards]
        replica.readers = [Reader(one) for one in kv]
        self.replicas[made.incarnation] = replica
        if role is Role.PREFILL and is_known:
            self.directory[replica.address] = (made.incarnation, made.layout)
        return replica

    def open(self, shard: int, host: HostMemory) -> PageFiles:
        namespace = namespace_of({"shard": str(shard)})
        return PageFiles(self.folder, namespace, host.page_bytes, FOLDER_BYTES, now=lambda: 0)

    def submit(
        self,
        replica: Replica,
        *,
        prompt_len: int = 40,
        max_new_tokens: int = 4,
        seed: int = 1,
        eos_after: int | None = None,
        invalid_row: int | None = None,
        timeout_ns: int = 600 * SECOND,
        room: int | None = None,
        peer: Address | None = None,
        rid: str | None = None,
        dp_rank_hint: int | None = None,
        rendered_at: int = 0,
        logprobs_from: int | None = None,
        wants_vector: bool = False,
        priority: int = 0,
    ) -> RequestId:
        """Tell the request to the workers and put its arrival on the way."""
        request = RequestId(replica.next_id)
        replica.next_id += 1

        def render(rendered_at: int) -> Request:
            asked = {"eos_after": eos_after, "logprobs_from": logprobs_from, "max_new_tokens": max_new_tokens}
            script = answer(prompt_len, seed=seed, rendered_at=rendered_at, **asked)
            tokens = script.prompt
            links = prompt_links(ROOT, tokens, page_size=replica.state.settings.page_size)
            replica.workers.add(request, script, links[-1] if links else ROOT)
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
                priority=priority,
            )

        replica.render[request] = render
        if invalid_row is not None:
            replica.invalid_rows[request] = invalid_row
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
        if replica.begin() is not None and BatchReturned not in replica.holds:
            events.append(BatchReturned(replica.end()))
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
            case LaunchBatch(order) | ForgetRequests(order):
                replica.workers.tell(order)
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
                for lender, reader, memory in zip(
                    replica.lenders, replica.readers, replica.workers.memories, strict=True
                ):
                    lender.digested(lender.publish(command), command, digests(command, reader.kv, memory))
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
                replica.workers.free_windows(pages)
            case LookUpPages():
                for shard in replica.state.settings.shards:
                    self.send(replica, perform(command, replica.files[shard], replica.hosts[shard], shard))
            case StorePages() | LoadPages() | FetchPages() | WritePages():
                for shard in replica.state.settings.shards:
                    replica.parcels.append(Parcel(PagesCopied, lambda shard=shard: self.copy(replica, command, shard)))

    def copy(self, replica: Replica, command: Copying, shard: ShardId) -> list[Event]:
        """Between the pool, host memory and storage, which all replicas share: the bytes move when this is called."""
        state, host = replica.state, replica.hosts[shard]
        if isinstance(command, StorePages | LoadPages):
            if replica.breaks_copies:
                return [PagesCopied(command.copy, shard, 0, "nothing can be copied")]

            def seen(page: PageId, page_hash: PageHash, contents: list[int]) -> None:
                expected = PageState.CACHED if isinstance(command, StorePages) else PageState.LOADING
                assert state.pool.states[page] == expected

            return [copy_pages(command, host, replica.workers.memories[shard], shard, seen)]
        copied = perform(command, replica.files[shard], host, shard)
        for page in command.host_pages[: copied.num_pages]:
            if isinstance(command, FetchPages):
                assert state.host.pool.states[page] == PageState.OWNED
            else:
                assert not state.windows.are_there or host.page(page).cast("Q")[-1]
        return [copied]

    def land(self, replica: Replica, reader: Reader) -> list[Event]:
        """Whatever is pulled is read when this is called."""
        reader.go_on()
        memory = replica.workers.memories[reader.kv.shard]
        while reader.jobs:
            origin = reader.jobs[0].origin
            source = self.replicas[origin.peer]
            if source.is_dead:
                reader.fails(0, Trouble.BROKEN)
            else:
                reader.reads(0, source.lenders[origin.shard], source.workers.memories[origin.shard], memory)
        return reader.heard()

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
    assert all(has_token_to_come(node.requests[request]) for request in node.micro_batches.members)
    assert all(one.joins.keys() <= one.members.keys() for one in node.micro_batches.each)
    assert len(set(node.micro_batches.members)) == node.micro_batches.num_members, "each in one of them"
    assert all(node.requests[request].request.room == room for room, request in node.rooms.items())
    for grant in [grant for lender in replica.lenders for grant in lender.grants() if not grant.is_revoked]:
        assert all(node.pool.generations[page] == lent for page, lent in grant.generations.items()), "given away"
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
    members = [member.request for member in replica.executor.tables.members(plan)]
    for request in [*(row.request for row in plan.rows), *members]:
        table = replica.executor.requests[request].pages
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
        assert replica.begin() is None
        assert replica.workers.is_idle
        for worker in replica.workers:
            assert worker.executor.requests == {}
            assert worker.executor.decoding == []
        assert [lender.held() for lender in replica.lenders] == [Held()] * len(replica.lenders)
        assert [reader.puller.held() for reader in replica.readers] == [Held()] * len(replica.readers)


def finished(replica: Replica, request: RequestId) -> FinishRequest:
    end = replica.ended[request]
    assert isinstance(end, FinishRequest), end
    return end
