"""All situations of one replica of the small world, and where each move leads from them.

`Stage.apply` takes a replica apart, lets one thing happen, lets the node step, checks what came of it, and puts it
together again. The same thing happens to the same replica only once; the outcome is remembered. That is why all
interleavings of two replicas can be afforded: there are many of those, and few situations of each replica alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast  # Any: the arguments of moves

import msgspec

from tandem.core.commands import Command
from tandem.core.disagg.messages import Message
from tandem.core.events import Event
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings
from tandem.core.values import ZERO_NS, Incarnation, Nanos, PageId, RequestId
from tandem.simulator import checkers
from tandem.simulator.actors.executor import Executor, empty_page
from tandem.simulator.actors.replica import Life
from tandem.simulator.model_check.commands import dispatch
from tandem.simulator.model_check.data_plane import SHARD, thaw_reader
from tandem.simulator.model_check.forks import Forks
from tandem.simulator.model_check.replica_value import (
    Cast,
    Draft,
    Numbered,
    SmallReplica,
    Stored,
    WorkerValue,
    frozen,
    frozen_host,
    frozen_lender,
    thaw,
    thaw_host,
    thaw_lender,
)
from tandem.simulator.model_check.transitions import TRANSITIONS
from tandem.simulator.oracle import Violation

Move = tuple[Any, ...]  # what happens, and to what
Witness = Callable[[Nanos, str, tuple[Event, ...], tuple[Command, ...]], None]
START = Nanos(10**12)


@dataclass(slots=True)
class Outcome:
    """What came of a move: the replica after it, what it tells its peer, and an answer to whoever made the move."""

    replica: int
    told: tuple[tuple[Incarnation, Message], ...] = ()
    answer: Any = None  # of "read begins": why not; of "page is sent": the contents, and whether it is the last one


@dataclass(frozen=True, slots=True)
class Look:
    """The part of a `Life` that checkers look at."""

    replica: Any
    incarnation: Incarnation
    settings: NodeSettings
    node: EngineNode


@dataclass(frozen=True, slots=True)
class Name:
    name: str


RECOUNTERS = (
    checkers.PageAccounting(),
    checkers.PageOwnership(),
    checkers.SlotOwners(),
    checkers.SlotsOnce(),
    checkers.PrefixTreePins(),
    checkers.OneQueue(),
    checkers.Retries(),
    checkers.Gauges(),
    checkers.Waits(),
)


@dataclass(slots=True)
class Stage:
    """All replicas that one side of the small world can be, by index, and where each move leads from them."""

    cast: Cast
    witness: Witness | None = None
    forks: Forks = field(init=False)
    known: Numbered[SmallReplica] = field(default_factory=Numbered[SmallReplica])
    outcomes: dict[tuple[int, Move], Outcome] = field(default_factory=dict[tuple[int, Move], Outcome])

    def __post_init__(self) -> None:
        self.forks = Forks(self.cast.settings)

    def begin(self, *, number: int, to_come: tuple[RequestId, ...], stored: Stored = ()) -> int:
        """A new life: an empty node and empty memory, and what the one before has written to storage."""
        settings = self.cast.settings
        life = Incarnation(self.cast.name, str(number))
        node = EngineNode(msgspec.structs.replace(settings, incarnation=life))
        node.step((), START)
        fork, _ = self.forks.keep(node, None)
        empty = (empty_page(settings.page_size),) * settings.num_pages
        return self.known.number(SmallReplica(life, fork, WorkerValue(empty), to_come, stored=stored))

    def replica(self, index: int) -> SmallReplica:
        return self.known.values[index]

    def wake_in(self, index: int) -> Nanos | None:
        """How long until the node wants to be woken."""
        replica = self.known.values[index]
        wake_in = self.forks.forks[replica.node].wake_in
        return Nanos(max(0, wake_in - replica.age_ns)) if wake_in is not None else None

    # -- what happens

    def apply(self, index: int, move: Move) -> Outcome:
        """Raises `Violation` if an invariant breaks."""
        known = self.outcomes.get((index, move))
        if known is None:
            known = self.outcomes[(index, move)] = self._apply(index, move)
        return known

    def _apply(self, index: int, move: Move) -> Outcome:
        replica = self.known.values[index]
        draft = self._draft(replica)
        events = TRANSITIONS[move[0]](draft, *move[1:])
        fork, age_ns = replica.node, Nanos(draft.now - self.forks.forks[replica.node].now)
        if events is not None:
            fork, age_ns = self._step(draft, events), ZERO_NS
        after = self.known.number(self._value(draft, fork, age_ns))
        return Outcome(after, tuple(draft.told), draft.answer)

    def _draft(self, replica: SmallReplica) -> Draft:
        node = self.forks.node(replica.node)
        guard = self._guard(self._look(replica.life, node))
        settings = self.cast.settings
        executor = Executor(settings.num_pages, settings.page_size, SHARD, guard, block_tokens=settings.block_tokens)
        thaw(executor, replica.worker, self.cast)
        inbox = list(replica.inbox)
        return Draft(
            self.cast,
            replica.life,
            node,
            Nanos(node.state.now + replica.age_ns),
            executor,
            list(replica.to_come),
            {half.request: half for half in replica.halves},
            list(replica.work),
            list(replica.to_digest),
            list(replica.copies),
            thaw_host(replica.host, executor.memory, settings),
            list(replica.asked),
            dict(replica.stored),
            thaw_lender(replica.grants, inbox),
            thaw_reader(replica.reader, inbox),
            list(replica.lookups),
            list(replica.to_render),
            inbox,
        )

    def _value(self, draft: Draft, fork: int, age_ns: Nanos) -> SmallReplica:
        return SmallReplica(
            draft.life,
            fork,
            frozen(draft.executor, draft.node, draft.cast),
            tuple(draft.to_come),
            age_ns,
            tuple(draft.halves.values()),
            tuple(draft.work),
            tuple(draft.to_digest),
            tuple(draft.copies),
            frozen_host(draft),
            tuple(draft.asked),
            tuple(sorted(draft.stored.items())),
            frozen_lender(draft.lender),
            draft.reader.frozen(),
            tuple(draft.lookups),
            tuple(draft.to_render),
            tuple(draft.inbox),
        )

    def _look(self, life: Incarnation, node: EngineNode) -> Life:
        return cast(Life, Look(Name(self.cast.name), life, self.cast.settings, node))

    def _guard(self, look: Life) -> Callable[[RequestId, list[PageId], int, int], None]:
        def guard(request: RequestId, table: list[PageId], first_written: int, num_used: int) -> None:
            checkers.PageOwnership().memory_is_used(look, request, table, first_written, num_used)

        return guard

    # -- the step

    def _step(self, draft: Draft, events: tuple[Event, ...]) -> int:
        try:
            effects = draft.node.step(events, draft.now)
        except Exception as error:
            raise Violation("S13", f"{self.cast.name} raised {type(error).__name__}: {error}") from error
        if self.witness is not None:
            self.witness(draft.now, f"{self.cast.name}.{draft.life.id}", events, effects.commands)
        for command in effects.commands:
            dispatch(draft, command)
        draft.forget_first()
        fork, is_new = self.forks.keep(draft.node, effects.wake_at)
        if is_new:
            self._check(draft)
        return fork

    def _check(self, draft: Draft) -> None:
        look, state = self._look(draft.life, draft.node), draft.node.state
        for checker in RECOUNTERS:
            checker.recount(look)
        if state.num_slots_used > state.settings.max_running:
            raise Violation("S7", f"{self.cast.name}: {state.num_slots_used} of {state.settings.max_running} slots")
        if len(state.inflight) > state.settings.window_depth:
            raise Violation(
                "S7", f"{self.cast.name}: {len(state.inflight)} batches in a window of {state.settings.window_depth}"
            )
        for room, request in state.rooms.items():
            if request not in state.requests or state.requests[request].request.room != room:
                raise Violation("S11", f"{self.cast.name}: room {room} is that of request {request}")

    def check_idle(self, index: int) -> None:
        """After everything has ended: nothing is held, and every client has its end."""
        replica = self.known.values[index]
        state = self.forks.node(replica.node).state
        held = {
            "requests": len(state.requests),
            "rooms": len(state.rooms),
            "result slots": len(state.results.owners),
            "owned pages": state.pool.counts[PageState.OWNED],
            "quarantined pages": state.pool.counts[PageState.QUARANTINED],
            "pinned pages": state.tree.num_pinned,
            "batches": len(state.inflight) + len(replica.work),
            "decode rows": sum(len(one.members) + len(one.leaves) for one in state.micro_batches.each),
            "worker requests": len(replica.worker.requests),
            "decode rows of the worker": sum(map(len, replica.worker.decode_sets)),
            "copies": len(state.host.copies) + len(replica.copies),
            "questions to storage": len(state.storage.operations) + len(replica.asked),
            "prefetches": len(state.storage.prefetches),
            "pages on their way": state.pool.counts[PageState.LOADING] + state.host.pool.counts[PageState.OWNED],
            "grants": len(replica.grants),
            "pulls": len(replica.reader.readings),
        }
        left = [f"{count} {what}" for what, count in held.items() if count]
        if left:
            raise Violation("S17", f"{self.cast.name} holds {', '.join(left)} when everything has ended")
        for half in replica.halves:
            if not half.end:
                raise Violation("L1", f"{self.cast.name} has never ended request {half.request}")
