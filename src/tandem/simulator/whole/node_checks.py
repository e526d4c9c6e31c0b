"""The checkers of the fast worlds in the node processes of whole clusters: every step of every node is looked at.

They are those that ask for no more than a node with its events and commands, and the same objects. What needs an oracle
of tokens, other servers or the insides of a worker is left to the answers of clients (`verdict.py`). One checker is of
this world: who waits for the data plane to let go is told so at once, since to cut a link needs nobody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any  # a `Life` of the fast worlds, of which a node alone has a part

from tandem.core.commands import (
    CancelPull,
    Effects,
    EmitTokens,
    FailRequest,
    FinishRequest,
    ForgetRequests,
    LaunchBatch,
    LearnPeer,
    RenderAgain,
    RevokePages,
    StartRequest,
    Tell,
)
from tandem.core.events import (
    Event,
    PromptRendered,
    ReadsDrained,
    RequestArrived,
    TransferDrained,
    TransferFailed,
)
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import State
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Cause, Incarnation, Nanos, RequestId, Room
from tandem.simulator.checkers.accounting import FirstTokenClock, Gauges, HitRate
from tandem.simulator.checkers.agreement import DelayerVetoes, DelayIsBounded, OneSequence, OneVerdict, SameSet
from tandem.simulator.checkers.base import End, where
from tandem.simulator.checkers.changes import OneQueue, PingPong, QueueOrder, Retries, StateChanges
from tandem.simulator.checkers.intake import Bounds, NoNewWork, Refusals
from tandem.simulator.checkers.liveness import IdleSteps, PagesComeBack, Questions, Waits
from tandem.simulator.checkers.orders import Orders, Returns
from tandem.simulator.checkers.outside import OwnClock
from tandem.simulator.checkers.pages import PageAccounting, PageOwnership, PrefixTreePins, Quarantine
from tandem.simulator.checkers.result_slots import SlotOwners, SlotsNeverBlock, SlotsOnce
from tandem.simulator.checkers.stream import OneEnd, StreamsInOrder
from tandem.simulator.checkers.tiers import TierErrors, TierPages
from tandem.simulator.occurrences import Occurrences
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.peer_checks import Beside

RECOUNT_STEPS = 16
NONSENSE = "nonsense"
LETTING_GO_NS = 3 * SECOND  # for the threads of a worker that runs
Look = Callable[[Any, Any], None]


@dataclass(slots=True)
class Asked:
    """What of a client's request a node is told, as `Half` of the fast worlds."""

    request: RequestId
    room: Room | None
    role: Role
    prompt: range
    max_new_tokens: int
    terminal: End | None = None
    tokens: int = 0

    @property
    def script(self) -> "Asked":
        return self


@dataclass(slots=True)
class NodeLife:
    """What the checkers see of a node process, as `Life` of the fast worlds."""

    replica: Any  # has a name
    incarnation: Incarnation
    settings: NodeSettings
    node: EngineNode
    halves: dict[RequestId, Asked] = field(default_factory=dict)
    num_idle_steps: int = 0
    workers: tuple[()] = ()  # are processes of their own


@dataclass(slots=True)
class Named:
    name: str


class NodeChecks:
    """Of one node process."""

    def __init__(self, node: EngineNode, settings: NodeSettings, name: str, *, may_be_spoilt: bool) -> None:
        self.life = NodeLife(Named(name), settings.incarnation, settings, node)
        self.num_steps = 0
        self.unspoilt = Unspoilt(may_be_spoilt=may_be_spoilt)
        self.changes, self.queue_order, self.idle_steps = StateChanges(), QueueOrder(), IdleSteps()
        self.first_token, self.hit_rate, self.ping_pong = FirstTokenClock(), HitRate(), PingPong()
        self.one_end, self.stream, self.verdict = OneEnd(), StreamsInOrder(), OneVerdict()
        self.refusals, self.no_new_work, self.orders, self.returns = Refusals(), NoNewWork(), Orders(), Returns()
        self.vetoes, self.delay, self.retries = DelayerVetoes(), DelayIsBounded(), Retries()
        self.pages, self.slot_owners = PageAccounting(), SlotOwners()
        waits, sequence, same_set, clock = Waits(), OneSequence(), SameSet(), OwnClock()
        tier_errors = TierErrors()
        self.of_states = (self.pages, self.slot_owners, SlotsNeverBlock(), Bounds())
        ends: tuple[Look, ...] = (
            self.one_end.ended,
            tier_errors.ended,
            PagesComeBack().ended,
            self.refusals.ended,
            waits.ended,
            self.hit_rate.ended,
        )
        self.of_command: dict[type, tuple[Look, ...]] = {
            StartRequest: (self.stream.began, self.first_token.began),
            EmitTokens: (self.one_end.emitted, self._count_tokens, self.stream.emitted),
            FinishRequest: ends,
            FailRequest: ends,
            LaunchBatch: (sequence.launched, same_set.launched),
            ForgetRequests: (self.verdict.forgot, sequence.forgot, same_set.forgot),
            RenderAgain: (self.retries.asked,),
            RevokePages: (self.verdict.asked,),
            CancelPull: (self.verdict.asked,),
            LearnPeer: (Questions().put,),
            Tell: (self.slot_owners.told, clock.told),
        }
        self.recounters = (
            *(self.pages, PageOwnership(), PrefixTreePins(), Quarantine(), self.slot_owners, SlotsOnce(), OneQueue()),
            *(self.retries, self.ping_pong, self.changes, self.hit_rate, Gauges(), waits, clock, self.no_new_work),
            *(sequence, same_set, self.verdict, self.stream, TierPages(), tier_errors),
        )

    def after_step(self, events: Sequence[Event], effects: Effects) -> None:
        """Raises Violation."""
        life: Any = self.life
        self._meet(events)
        self.unspoilt.heard(self.life, events)
        for checker in self.of_states:
            checker.after_step(life)
        moves = self.changes.after_step(life)
        for progress, before in moves:
            self.first_token.moved(life, progress, before)
            self.hit_rate.moved(life, progress, before)
            self.ping_pong.moved(life, progress, before)
        self.queue_order.after_step(life, moves)
        self.idle_steps.after_step(life, tuple(events), effects.commands)
        for event in events:
            if isinstance(event, ReadsDrained | TransferDrained):
                self.verdict.drained(life, event)
        for command in effects.commands:
            for look in self.of_command.get(type(command), ()):
                look(life, command)
        self._look_back(events, effects)
        self.num_steps += 1
        if self.num_steps % RECOUNT_STEPS == 0:
            for checker in self.recounters:
                checker.recount(life)

    def _meet(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RequestArrived | PromptRendered):
                it = event.request
                role = self.life.settings.role
                prompt = range(it.prompt_len)
                self.life.halves.setdefault(it.id, Asked(it.id, it.room, role, prompt, it.max_new_tokens))
                self.life.halves[it.id].prompt = prompt

    def _look_back(self, events: Sequence[Event], effects: Effects) -> None:
        """At what the whole step has made of its events."""
        life: Any = self.life
        if any(isinstance(command, EmitTokens) for command in effects.commands):
            self.stream.settled(life)
        for event in events:
            if isinstance(event, TransferFailed):
                self.verdict.failed(life, event)
        self.refusals.heard(life, events)
        self.no_new_work.heard(life, events)
        self.orders.after_step(life, events)
        self.returns.after_step(life, events, effects.commands)
        self.vetoes.heard(life, events)
        self.vetoes.after_step(life)
        self.delay.after_step(life, events, sum(isinstance(each, LaunchBatch) for each in effects.commands))

    def _count_tokens(self, life: NodeLife, command: EmitTokens) -> None:
        for request in command.requests:
            life.halves[request].tokens += 1


class Unspoilt:
    """Bytes that nobody changes arrive as they were sent."""

    id = "S5"

    def __init__(self, *, may_be_spoilt: bool) -> None:
        self._may_be_spoilt = may_be_spoilt

    def heard(self, life: NodeLife, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, TransferFailed) or self._may_be_spoilt:
                continue
            if event.cause is Cause.CORRUPT_PAGES or NONSENSE in event.detail:
                name = where(life, event.request)  # type: ignore[arg-type]  # has what `where` reads
                raise Violation(self.id, f"{name}: {event.cause} ({event.detail}), and nobody has changed a byte")


class LettingGo:
    """Who has ended waits for readers and writers of its pages, which are cut off at once."""

    id = "L2"

    def __init__(self, kernel: Kernel, report: Callable[[Violation], None], is_held_up: Callable[[int], bool]) -> None:
        """is_held_up: whether the server has been kept from running since then"""
        self._kernel, self._report, self._is_held_up = kernel, report, is_held_up
        self._seen: set[RequestId] = set()

    def after_step(self, process: Process, life: NodeLife) -> None:
        for progress in life.node.state.live(State.DRAINING):
            if progress.drains and progress.id not in self._seen:
                self._seen.add(progress.id)
                since = self._kernel.now
                self._kernel.after(
                    LETTING_GO_NS, lambda request=progress.id, since=since: self._look(process, life, request, since)
                )

    def _look(self, process: Process, life: NodeLife, request: RequestId, since: int) -> None:
        progress = life.node.state.requests.get(request)
        if progress is None or not progress.drains or not process.is_alive or self._is_held_up(since):
            return
        drains, name = dict.fromkeys(progress.drains), where(life, request)  # type: ignore[arg-type]  # has what `where` reads
        self._report(Violation(self.id, f"{name} has ended, and shards {list(drains)} do not let its pages go"))


class CheckedNode(EngineNode):
    """A node whose steps are looked at from outside; it decides nothing else for it."""

    def __init__(
        self,
        settings: NodeSettings,
        process: Process,
        letting_go: LettingGo,
        beside: Sequence[Beside],
        report: Callable[[Violation], None],
        *,
        may_be_spoilt: bool,
        seen: Occurrences | None,
    ) -> None:
        """beside: further checkers; seen: is told what occurs."""
        super().__init__(settings)
        self._checks: NodeChecks | None = NodeChecks(self, settings, process.name, may_be_spoilt=may_be_spoilt)
        self._process, self._letting_go, self._beside, self._report = process, letting_go, beside, report
        self._seen = seen

    def step(self, events: Sequence[Event], now: Nanos) -> Effects:
        effects = super().step(events, now)
        if self._seen is not None:
            self._seen.see_step(events, effects.commands)
            self._seen.see_transfers(self)
        if self._checks is not None:
            try:
                self._checks.after_step(events, effects)
                self._letting_go.after_step(self._process, self._checks.life)
                for checker in self._beside:
                    checker.after_step(events, effects)
            except Violation as violation:
                self._checks = None
                self._report(violation)
        return effects
