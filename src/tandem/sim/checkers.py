"""One small class per invariant. They look at the production node's own state after every step, and change nothing.

What is cheap is checked after every step; a full recount from nothing happens every 256 events and at the end, when
the cluster is idle. Ids are those of the reliability page; the id is the first word of every violation.

    S1  pages: free + owned + cached + quarantined = total      S16 a request is in exactly one queue
    S2  a page is used by its owner only                        S17 after its end nothing of a request is left
    S3  a page is read only under its grant                     S19 nothing is decoded before its KV is whole
    S4  nothing lands in or is read from a freed page           S24 iterations rise (executor)
    S5  no read beyond, or other than, what was computed        S25 retries stay within their budget
    S6  pins of the prefix tree are those of live requests      S30 gauges equal a recount
    S8  a result row has one live owner                         S33 a restored node decides the same
    S9  a result row is read only for its own room              W1  every wait has a name and a deadline
    S10 a result row is given back exactly once                 W2  no node wakes up for nothing for ever
    S12 exactly one terminal event, and nothing after it        L1  every request ends by its deadline + 1 s
    S13 state changes follow the tables; a step never raises    L2  after its end a request's resources come back
    S14 tokens equal the oracle's                               L5  after healing every pair works again
                                                                L6  nobody fails for pages that come back
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, Protocol  # Any: machines of any state and trigger type

from tandem.core.commands import Command, Effects, EmitTokens, FailRequest, FinishReason, FinishRequest, Tell
from tandem.core.events import Event
from tandem.core.kv.pool import NOBODY, PagePool, PageState
from tandem.core.machine import Machine
from tandem.core.pd.messages import Offer
from tandem.core.pd.transfer import RECEIVER, SENDER, TransferState
from tandem.core.sched import inspect
from tandem.core.sched.progress import LIFECYCLE, State
from tandem.core.settings import OptimisticPolicy, Role
from tandem.core.values import SECOND, Cause, Incarnation, Nanos, PageId, RequestId
from tandem.sim.clients import Half
from tandem.sim.clock import Clock
from tandem.sim.model import EOS_TOKEN
from tandem.sim.oracle import Violation
from tandem.sim.replica import Life, Replica
from tandem.sim.transfer import Grant, KvStore

GRACE_NS = SECOND  # "never hangs" = ended by deadline + 1 s
MAX_IDLE_STEPS = 1000


class Watched(Protocol):
    """What the checkers see of a `World`."""

    clock: Clock
    replicas: dict[str, Replica]

    def find(self, incarnation: Incarnation) -> Life | None: ...


def where(life: Life, request: RequestId | None = None) -> str:
    name = f"{life.replica.name}.{life.incarnation.epoch}"
    return name if request is None else f"{name} request {request}"


class PageAccounting:
    id = "S1"

    def after_step(self, life: Life) -> None:
        pool = life.node.state.pool
        if sum(pool.counts) != pool.num_pages or len(pool.free_pages) != pool.counts[PageState.FREE]:
            raise Violation(self.id, f"{where(life)}: counts {pool.counts}, {len(pool.free_pages)} in the free list")

    def recount(self, life: Life) -> None:
        pool = life.node.state.pool
        counted = Counter(pool.states)
        for state in PageState:
            if counted[state] != pool.counts[state]:
                raise Violation(
                    self.id, f"{where(life)}: {counted[state]} pages are {state.name}, not {pool.counts[state]}"
                )
        if any(pool.states[page] != PageState.FREE for page in pool.free_pages):
            raise Violation(self.id, f"{where(life)}: a page in the free list is not free")
        if len(frozenset(pool.free_pages)) != len(pool.free_pages):
            raise Violation(self.id, f"{where(life)}: a page is in the free list twice")


class PageOwnership:
    """A page belongs to one request, or to the prefix tree and then nobody writes it."""

    id = "S2"

    def memory_is_used(
        self, life: Life, request: RequestId, table: list[PageId], first_written: int, num_used: int
    ) -> None:
        pool = life.node.state.pool
        owners, states = pool.owners, pool.states
        for page in table[:first_written]:
            if owners[page] != request and states[page] != PageState.CACHED:
                raise Violation(self.id, f"{where(life, request)} reads page {page}, which is {_owner(pool, page)}")
        for page in table[first_written:num_used]:
            if owners[page] != request:
                raise Violation(self.id, f"{where(life, request)} writes page {page}, which is {_owner(pool, page)}")

    def recount(self, life: Life) -> None:
        state = life.node.state
        for page, owner in enumerate(state.pool.owners):
            owned = state.pool.states[page] in (PageState.OWNED, PageState.QUARANTINED)
            if owned != (owner != NOBODY):
                raise Violation(self.id, f"{where(life)}: page {page} is {_owner(state.pool, PageId(page))}")
        held: dict[PageId, RequestId] = {}
        for progress in state.requests.values():
            for page in progress.pages:
                if state.pool.states[page] == PageState.CACHED:
                    continue
                if held.setdefault(page, progress.id) != progress.id or state.pool.owners[page] != progress.id:
                    raise Violation(self.id, f"{where(life, progress.id)} has page {page}, {_owner(state.pool, page)}")


class Transfers:
    """What the data plane reads and writes, checked at the moment it does."""

    def page_is_read(self, life: Life, grant: Grant, page: PageId, generation: int, contents: list[int]) -> None:
        pool = life.node.state.pool
        if pool.generations[page] != generation:
            raise Violation("S3", f"{where(life, grant.request)}: page {page} is read under an old generation")
        if pool.owners[page] != grant.request and pool.states[page] != PageState.CACHED:
            raise Violation("S4", f"{where(life, grant.request)}: page {page} is read and is {_owner(pool, page)}")
        half = life.halves.get(grant.request)
        if half is None or not contents:
            return
        script = half.ask.script
        index, page_size = grant.page_indices[page], life.settings.page_size
        expected = script.page(index, page_size=page_size, length=len(script.prompt))
        if contents[: len(expected)] != expected:
            raise Violation(
                "S5", f"{where(life, grant.request)}: page {page} is sent and is not page {index} of the prompt"
            )

    def page_is_written(self, life: Life, request: RequestId, page: PageId) -> None:
        pool = life.node.state.pool
        if pool.owners[page] != request:
            raise Violation(
                "S4", f"{where(life, request)}: a pulled page lands in {page}, which is {_owner(pool, page)}"
            )


class PrefixTreePins:
    id = "S6"

    def recount(self, life: Life) -> None:
        state = life.node.state
        tree = state.tree
        locks = Counter(progress.locked for progress in state.requests.values() if progress.locked is not None)
        pinned_children = Counter(node.parent for node in tree.nodes.values() if node.pins)
        for page_hash, node in tree.nodes.items():
            if node.pins != locks[page_hash] + pinned_children[page_hash]:
                raise Violation(
                    self.id, f"{where(life)}: page {node.page} has {node.pins} pins, not {locks[page_hash]}"
                )
            if state.pool.states[node.page] != PageState.CACHED:
                raise Violation(self.id, f"{where(life)}: cached page {node.page} is {_owner(state.pool, node.page)}")
        if tree.num_pinned != sum(1 for node in tree.nodes.values() if node.pins):
            raise Violation(self.id, f"{where(life)}: {tree.num_pinned} nodes are not what is pinned")
        if len(tree.nodes) != state.pool.counts[PageState.CACHED]:
            raise Violation(self.id, f"{where(life)}: {len(tree.nodes)} nodes, {state.pool.counts} pages")


class ResultRows:
    def after_step(self, life: Life) -> None:
        rows = life.node.state.results
        if len(rows.free_rows) + len(rows.owners) != rows.num_rows:
            raise Violation(
                "S8", f"{where(life)}: {len(rows.free_rows)} free + {len(rows.owners)} used of {rows.num_rows}"
            )

    def recount(self, life: Life) -> None:
        state = life.node.state
        every_row = sorted(chain(state.results.free_rows, state.results.owners.values()))
        if every_row != list(range(state.results.num_rows)):
            raise Violation("S10", f"{where(life)}: rows {every_row}")
        for request in state.results.owners:
            progress = state.requests.get(request)
            if progress is None or progress.state in (State.DRAINING, State.DONE):
                raise Violation("S8", f"{where(life, request)} has ended and holds a result row")

    def told(self, life: Life, offer: Offer) -> None:
        """A result row leaves for decode."""
        if offer.result is None:
            return
        if offer.result.room != offer.room:
            raise Violation("S9", f"{where(life)}: room {offer.room} is offered the row of {offer.result.room}")
        request = life.node.state.rooms.get(offer.room)
        half = life.halves.get(request) if request is not None else None
        if half is None:
            return
        token = int.from_bytes(offer.result.token, "little")
        if token != half.ask.script.output_token(0):
            raise Violation(
                "S9", f"{where(life, half.request)}: row holds {token}, not {half.ask.script.output_token(0)}"
            )
        is_live = life.node.state.requests[half.request].state is not State.DRAINING
        if is_live and half.request not in life.node.state.results.owners:
            raise Violation("S8", f"{where(life, half.request)} offers a result without a row")


class Answers:
    """What clients get: S12 and S14."""

    def emitted(self, life: Life, command: EmitTokens) -> None:
        for index, request in enumerate(command.requests):
            half = life.halves.get(request)
            if half is None or half.terminal is not None:
                raise Violation("S12", f"{where(life, request)}: a token after the end")
            token = int.from_bytes(command.tokens[4 * index : 4 * index + 4], "little")
            script = half.ask.script
            if half.tokens >= script.output_length():
                raise Violation("S14", f"{where(life, request)}: token {half.tokens} after the last one")
            if token != script.output_token(half.tokens):
                right = script.output_token(half.tokens)
                raise Violation("S14", f"{where(life, request)}: token {half.tokens} is {token}, must be {right}")
            half.tokens += 1

    def ended(self, life: Life, command: FinishRequest | FailRequest) -> None:
        half = life.halves.get(command.request)
        if half is None or half.terminal is not None:
            raise Violation("S12", f"{where(life, command.request)}: a second terminal event {type(command).__name__}")
        half.terminal = command
        if isinstance(command, FailRequest):
            let_go = half.role is Role.PREFILL and command.cause in (Cause.ABORTED, Cause.PEER_ABORTED, Cause.PEER_LOST)
            if half.must_finish and not let_go:
                raise Violation(
                    "L5", f"{where(life, half.request)} fails after healing: {command.cause} ({command.detail})"
                )
            script = half.ask.script
            total = len(script.prompt) + script.max_new_tokens
            if command.cause is Cause.OUT_OF_PAGES and total <= life.settings.num_pages * life.settings.page_size:
                raise Violation("L6", f"{where(life, half.request)} fails for lack of pages and would fit alone")
            if not command.stage:
                raise Violation("W1", f"{where(life, half.request)} fails in no stage")
        elif half.role is Role.PREFILL:
            if half.tokens > 1:
                raise Violation("S14", f"{where(life, half.request)}: a prefill gave {half.tokens} tokens")
        elif command.reason is FinishReason.LENGTH:
            if half.tokens != half.ask.script.max_new_tokens:
                raise Violation("S14", f"{where(life, half.request)} ends after {half.tokens} tokens for length")
        elif not half.stop_sent and half.ask.script.output_token(half.tokens - 1) != EOS_TOKEN:
            raise Violation("S14", f"{where(life, half.request)} ends after {half.tokens} tokens for no reason")


class StateChanges:
    """Between two steps a state moves along the table, and never out of an end."""

    id = "S13"

    def __init__(self) -> None:
        self.reach_of_request = reach(LIFECYCLE)
        self.reach_of_sender = reach(SENDER)
        self.reach_of_receiver = reach(RECEIVER)
        self.seen: dict[tuple[str, int], dict[RequestId, tuple[State, Any]]] = {}

    def after_step(self, life: Life) -> None:
        key = (life.replica.name, life.incarnation.epoch)
        before, after = self.seen.get(key, {}), {}
        for request, progress in life.node.state.requests.items():
            end = progress.sender or progress.receiver
            now = (progress.state, end.state if end is not None else None)
            known = before.get(request)
            if known is not None and known != now:
                self._check(
                    life, request, known, now, self.reach_of_sender if progress.sender else self.reach_of_receiver
                )
            after[request] = now
        self.seen[key] = after

    def _check(
        self,
        life: Life,
        request: RequestId,
        known: tuple[State, TransferState | None],
        now: tuple[State, TransferState | None],
        reach_of_end: Mapping[Any, frozenset[Any]],
    ) -> None:
        if now[0] is not known[0] and now[0] not in self.reach_of_request[known[0]]:
            raise Violation(self.id, f"{where(life, request)} goes from {known[0]} to {now[0]}")
        if None not in (known[1], now[1]) and now[1] is not known[1] and now[1] not in reach_of_end[known[1]]:
            raise Violation(self.id, f"{where(life, request)}: its transfer goes from {known[1]!r} to {now[1]!r}")


def reach(machine: "Machine[Any, Any]") -> dict[Enum, frozenset[Enum]]:
    """States that can come after each state, directly or not."""
    edges: dict[Enum, set[Enum]] = {}
    for (left, _), right in machine.rules.items():
        edges.setdefault(left, set()).add(right)
        edges.setdefault(right, set())
    grown = True
    while grown:
        grown = False
        for after in edges.values():
            further = set(chain.from_iterable(edges[state] for state in after))
            if not further <= after:
                after |= further
                grown = True
    return {state: frozenset(after) for state, after in edges.items()}


class OneQueue:
    id = "S16"

    def recount(self, life: Life) -> None:
        state = life.node.state
        queued = [(request, queue) for queue, requests in state.queues.items() for request in requests]
        if len(queued) != len(state.requests):
            raise Violation(self.id, f"{where(life)}: {len(queued)} places for {len(state.requests)} requests")
        for request, queue in queued:
            if state.requests[request].state is not queue:
                raise Violation(self.id, f"{where(life, request)} is in {queue} and is {state.requests[request].state}")
        running = [request for request in state.decode_set if state.requests[request].state is not State.RUNNING]
        if running:
            raise Violation(self.id, f"{where(life, running[0])} is in the decode set and not running")


class NothingLeft:
    """At idle: no request, page, slot, lock, timer, grant or transfer is left of anybody."""

    id = "S17"

    def at_idle(self, life: Life) -> None:
        state, store = life.node.state, life.store
        left = {
            "requests": len(state.requests),
            "queued": sum(map(len, state.queues.values())),
            "rooms": len(state.rooms),
            "result rows": len(state.results.owners),
            "owned pages": state.pool.counts[PageState.OWNED],
            "quarantined pages": state.pool.counts[PageState.QUARANTINED],
            "pinned pages": state.tree.num_pinned,
            "batches in flight": len(state.window),
            "decode rows": len(state.decode_set) + len(state.joins),
            "seats of the worker": len(life.executor.seats),
            "decode rows of the worker": len(life.executor.decode_set),
            "grants": sum(1 for grant in store.grants.values() if not grant.is_revoked),
            "pulls": sum(1 for pull in store.pulls.values() if any(stream.is_moving for stream in pull.streams)),
        }
        held = [f"{count} {what}" for what, count in left.items() if count]
        if held:
            raise Violation(self.id, f"{where(life)} still holds {', '.join(held)}")


class Retries:
    id = "S25"

    def recount(self, life: Life) -> None:
        settings = life.settings
        if settings.optimistic is not OptimisticPolicy.RETRY:
            return
        for progress in life.node.state.requests.values():
            if progress.prefill_retry_count > settings.optimistic_retries + 1:
                raise Violation(self.id, f"{where(life, progress.id)} was retried {progress.prefill_retry_count} times")


class Gauges:
    id = "S30"

    def recount(self, life: Life) -> None:
        state = life.node.state
        shown = inspect.gauges(life.node)
        states = Counter(progress.state for progress in state.requests.values())
        senders = Counter(progress.state for progress in state.requests.values() if progress.sender is not None)
        counted = {
            "num_running_reqs": states[State.RUNNING] + states[State.COMPUTING],
            "num_queue_reqs": states[State.QUEUED],
            "num_prefill_bootstrap_queue_reqs": senders[State.BOOTSTRAPPING],
            "num_prefill_inflight_queue_reqs": states[State.SENDING] + states[State.PARKED],
            "num_decode_transfer_queue_reqs": states[State.ARRIVING] + states[State.RECOVERING],
        }
        for name, value in counted.items():
            if shown[name] != value:
                raise Violation(self.id, f"{where(life)}: {name} shows {shown[name]}, is {value}")

    def at_idle(self, life: Life) -> None:
        for name, value in inspect.gauges(life.node).items():
            if name.startswith("num_") and (name.endswith("_reqs") or name == "num_used_tokens") and value:
                raise Violation(self.id, f"{where(life)}: {name} shows {value} at idle")


class Waits:
    id = "W1"

    def recount(self, life: Life) -> None:
        named = {wait["request"]: wait for wait in inspect.waits(life.node, Nanos(life.node.state.now))}
        for request, progress in life.node.state.requests.items():
            if progress.state is State.RUNNING:
                continue
            wait = named.get(request)
            if wait is None or not wait["waiting_for"]:
                raise Violation(
                    self.id, f"{where(life, request)} is {progress.state} and waits for nothing that has a name"
                )
            if progress.state is not State.DRAINING and progress.deadline <= life.node.state.now:
                raise Violation(self.id, f"{where(life, request)} waits for {wait['waiting_for']} beyond its deadline")


class IdleSteps:
    id = "W2"

    def after_step(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        life.num_idle_steps = 0 if events or commands else life.num_idle_steps + 1
        if life.num_idle_steps > MAX_IDLE_STEPS:
            raise Violation(self.id, f"{where(life)} has woken {MAX_IDLE_STEPS} times for nothing")


class Deadlines:
    """L1 and L2, by looking again at the latest moment at which a request may still be there."""

    def __init__(self, world: Watched) -> None:
        self.world = world

    def watch(self, life: Life, half: Half) -> None:
        self.world.clock.at(self._latest_end(life, half), self._look, life, half)

    def _latest_end(self, life: Life, half: Half) -> int:
        """Before the first token the deadline counts, after it the stall timeout; pauses are given back."""
        paused_ns = life.replica.pauses_ns - half.pauses_before_ns
        if half.last_token_at is None:
            return half.deadline + paused_ns + GRACE_NS
        return half.last_token_at + life.settings.stall_timeout_ns + paused_ns + GRACE_NS

    def _look(self, life: Life, half: Half) -> None:
        if not half.is_open or not life.is_alive:
            return
        latest = max(self._latest_end(life, half), life.replica.paused_until)
        if latest > self.world.clock.time:
            self.world.clock.at(latest, self._look, life, half)
        else:
            progress = life.node.state.requests.get(half.request)
            state = progress.state if progress is not None else "unknown to its node"
            raise Violation("L1", f"{where(life, half.request)} is {state} and has not ended by its deadline")

    def watch_release(self, life: Life, half: Half) -> None:
        self.world.clock.after(GRACE_NS, self._look_for_rest, life, half)

    def _look_for_rest(self, life: Life, half: Half) -> None:
        if not life.is_alive or half.request not in life.node.state.requests:
            return
        if life.touches(half.request) or life.replica.paused_until > self.world.clock.time - GRACE_NS:
            self.watch_release(life, half)
            return
        progress = life.node.state.requests[half.request]
        raise Violation(
            "L2",
            f"{where(life, half.request)} has ended and keeps {len(progress.pages)} pages: "
            f"{progress.in_flight} batches, {len(progress.drains)} drains",
        )


@dataclass(slots=True)
class Checkers:
    """All of them, wired to the moments at which they look. Also the data plane's `Watcher`."""

    world: Watched
    pages: PageAccounting = field(default_factory=PageAccounting)
    ownership: PageOwnership = field(default_factory=PageOwnership)
    transfers: Transfers = field(default_factory=Transfers)
    rows: ResultRows = field(default_factory=ResultRows)
    answers: Answers = field(default_factory=Answers)
    changes: StateChanges = field(default_factory=StateChanges)
    idle_steps: IdleSteps = field(default_factory=IdleSteps)
    nothing_left: NothingLeft = field(default_factory=NothingLeft)
    gauges: Gauges = field(default_factory=Gauges)
    deadlines: Deadlines = field(init=False)
    recounters: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.world)
        others = (PrefixTreePins(), OneQueue(), Retries(), Waits())
        self.recounters = (self.pages, self.ownership, self.rows, self.gauges, *others)

    def after_step(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        self.pages.after_step(life)
        self.rows.after_step(life)
        self.changes.after_step(life)
        self.idle_steps.after_step(life, events, commands)
        for command in commands:
            if isinstance(command, EmitTokens):
                self.answers.emitted(life, command)
            elif isinstance(command, FinishRequest | FailRequest):
                self.answers.ended(life, command)
                self.deadlines.watch_release(life, life.halves[command.request])
            elif isinstance(command, Tell) and isinstance(command.message, Offer):
                self.rows.told(life, command.message)

    def compare_with_twin(self, life: Life, events: tuple[Event, ...], now: Nanos, effects: Effects) -> None:
        """The restored copy has to want the same; after a while it takes over."""
        if life.twin is None:
            return
        if life.twin.step(events, now) != effects:
            raise Violation("S33", f"{where(life)}: a node restored from a snapshot decides otherwise")
        life.twin_steps -= 1
        if life.twin_steps == 0:
            life.node, life.twin = life.twin, None

    def recount(self) -> None:
        for replica in self.world.replicas.values():
            if replica.life is not None:
                for checker in self.recounters:
                    checker.recount(replica.life)

    def at_idle(self) -> None:
        self.recount()
        for replica in self.world.replicas.values():
            if replica.life is not None:
                self.nothing_left.at_idle(replica.life)
                self.gauges.at_idle(replica.life)

    def watch_deadline(self, life: Life, half: Half) -> None:
        self.deadlines.watch(life, half)

    def memory_is_used(
        self, life: Life, request: RequestId, table: list[PageId], first_written: int, num_used: int
    ) -> None:
        self.ownership.memory_is_used(life, request, table, first_written, num_used)

    def page_is_read(self, store: KvStore, grant: Grant, page: PageId, generation: int, contents: list[int]) -> None:
        life = self.world.find(store.incarnation)
        if life is not None:
            self.transfers.page_is_read(life, grant, page, generation, contents)

    def page_is_written(self, store: KvStore, request: RequestId, page: PageId) -> None:
        life = self.world.find(store.incarnation)
        if life is not None:
            self.transfers.page_is_written(life, request, page)


def _owner(pool: PagePool, page: PageId) -> str:
    owner = pool.owners[page]
    return (
        f"{pool.states[page].name.lower()} by request {owner}"
        if owner != NOBODY
        else PageState(pool.states[page]).name.lower()
    )
