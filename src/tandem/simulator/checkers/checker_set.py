"""All checkers, wired to the moments at which they look. Also the data plane's `Watcher`.

What a step has told and wants is handed out by type, so a checker costs nothing where it has nothing to see. The full
recount compares the checkers' own books with the nodes', too: a checker that has lost count is a violation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any  # a checker's methods take the command or event that they are wired to

from tandem.core.commands import (
    AnnounceCleared,
    AnnounceDpRank,
    AnnounceRemoved,
    AnnounceStored,
    AskDpRank,
    CancelPull,
    Command,
    Effects,
    EmitTokens,
    FailRequest,
    FetchPages,
    FinishRequest,
    ForgetRequests,
    LaunchBatch,
    LearnPeer,
    LoadPages,
    PullPages,
    RenderAgain,
    RevokePages,
    StartRequest,
    StorePages,
    Tell,
    WritePages,
)
from tandem.core.events import (
    DrainRequested,
    Event,
    FlushRequested,
    HooksChanged,
    LoadsGathered,
    PeerReturned,
    ReadsDrained,
    RequestArrived,
    RequestRefused,
    TransferDrained,
    TransferFailed,
)
from tandem.core.request import Request
from tandem.core.values import Incarnation, Nanos, PageId, RequestId
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.kv_reader import SimulatedGrant
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server
from tandem.simulator.actors.transfer import KvStore
from tandem.simulator.checkers.accounting import FirstTokenClock, Gauges, HitRate
from tandem.simulator.checkers.agreement import (
    DelayerVetoes,
    DelayIsBounded,
    OneSequence,
    OneVerdict,
    RightRank,
    SameSet,
)
from tandem.simulator.checkers.base import End, Watched
from tandem.simulator.checkers.changes import OneQueue, PingPong, QueueOrder, Retries, StateChanges
from tandem.simulator.checkers.edges import EdgeDeadlines, EdgeEnds
from tandem.simulator.checkers.intake import Bounds, NoNewWork, Refusals
from tandem.simulator.checkers.liveness import (
    Deadlines,
    IdleSteps,
    NothingLeft,
    PagesComeBack,
    Questions,
    Releases,
    Waits,
    WorksWhenHealed,
)
from tandem.simulator.checkers.orders import Orders, Returns
from tandem.simulator.checkers.outside import OneDispatch, OwnClock, SameAfterRestore, WellFormed
from tandem.simulator.checkers.pages import (
    AnnouncedPages,
    FreedPages,
    PageAccounting,
    PageOwnership,
    PrefixTreePins,
    Quarantine,
    SentPages,
    StaleReads,
    TenantsApart,
    WindowParts,
)
from tandem.simulator.checkers.result_slots import SlotContents, SlotOwners, SlotsNeverBlock, SlotsOnce
from tandem.simulator.checkers.stalls import StallChecker
from tandem.simulator.checkers.stream import OneEnd, StreamsInOrder, Tokens
from tandem.simulator.checkers.tiers import TierErrors, TierPages

Look = Callable[[Life, Any], None]

DRAINED = (ReadsDrained, TransferDrained)
HEARD = frozenset(  # what a checker has something to see in; most steps are told nothing of it
    {
        DrainRequested,
        FlushRequested,
        HooksChanged,
        PeerReturned,
        ReadsDrained,
        RequestArrived,
        RequestRefused,
        LoadsGathered,
        TransferDrained,
        TransferFailed,
    }
)


@dataclass(slots=True)
class Checkers:
    world: Watched
    pages: PageAccounting = field(default_factory=PageAccounting)
    ownership: PageOwnership = field(default_factory=PageOwnership)
    stale_reads: StaleReads = field(default_factory=StaleReads)
    freed_pages: FreedPages = field(default_factory=FreedPages)
    sent_pages: SentPages = field(default_factory=SentPages)
    pins: PrefixTreePins = field(default_factory=PrefixTreePins)
    window_parts: WindowParts = field(default_factory=WindowParts)
    tenants: TenantsApart = field(default_factory=TenantsApart)
    announced: AnnouncedPages = field(default_factory=AnnouncedPages)
    quarantine: Quarantine = field(default_factory=Quarantine)
    tier_pages: TierPages = field(default_factory=TierPages)
    tier_errors: TierErrors = field(default_factory=TierErrors)
    slot_owners: SlotOwners = field(default_factory=SlotOwners)
    slot_contents: SlotContents = field(default_factory=SlotContents)
    slots_once: SlotsOnce = field(default_factory=SlotsOnce)
    slots_never_block: SlotsNeverBlock = field(default_factory=SlotsNeverBlock)
    one_end: OneEnd = field(default_factory=OneEnd)
    tokens: Tokens = field(default_factory=Tokens)
    stream: StreamsInOrder = field(default_factory=StreamsInOrder)
    changes: StateChanges = field(default_factory=StateChanges)
    one_queue: OneQueue = field(default_factory=OneQueue)
    retries: Retries = field(default_factory=Retries)
    ping_pong: PingPong = field(default_factory=PingPong)
    queue_order: QueueOrder = field(default_factory=QueueOrder)
    refusals: Refusals = field(default_factory=Refusals)
    no_new_work: NoNewWork = field(default_factory=NoNewWork)
    bounds: Bounds = field(default_factory=Bounds)
    orders: Orders = field(default_factory=Orders)
    returns: Returns = field(default_factory=Returns)
    one_sequence: OneSequence = field(default_factory=OneSequence)
    same_set: SameSet = field(default_factory=SameSet)
    one_verdict: OneVerdict = field(default_factory=OneVerdict)
    right_rank: RightRank = field(init=False)
    vetoes: DelayerVetoes = field(default_factory=DelayerVetoes)
    delay_bound: DelayIsBounded = field(default_factory=DelayIsBounded)
    hit_rate: HitRate = field(default_factory=HitRate)
    first_token: FirstTokenClock = field(default_factory=FirstTokenClock)
    gauges: Gauges = field(default_factory=Gauges)
    one_dispatch: OneDispatch = field(default_factory=OneDispatch)
    same_after_restore: SameAfterRestore = field(default_factory=SameAfterRestore)
    own_clock: OwnClock = field(default_factory=OwnClock)
    nothing_left: NothingLeft = field(default_factory=NothingLeft)
    waits: Waits = field(default_factory=Waits)
    idle_steps: IdleSteps = field(default_factory=IdleSteps)
    questions: Questions = field(default_factory=Questions)
    works_when_healed: WorksWhenHealed = field(default_factory=WorksWhenHealed)
    pages_come_back: PagesComeBack = field(default_factory=PagesComeBack)
    well_formed: WellFormed = field(init=False)
    deadlines: Deadlines = field(init=False)
    edge_one_end: EdgeEnds = field(init=False)
    edge_deadlines: EdgeDeadlines = field(init=False)
    releases: Releases = field(init=False)
    stalls: StallChecker = field(init=False)

    recounted_at: dict[Incarnation, int] = field(default_factory=dict)  # by life, how many steps it had made

    # Not part of the constructor: who looks when.
    of_command: dict[type, tuple[Look, ...]] = field(init=False)
    recounters: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.well_formed = WellFormed(self.world)
        self.right_rank = RightRank(self.world)
        self.deadlines = Deadlines(self.world)
        self.edge_one_end, self.edge_deadlines = EdgeEnds(self.world), EdgeDeadlines(self.world)
        self.releases = Releases(self.world)
        self.stalls = StallChecker(self.world)
        self.of_command = self._wires()
        self.recounters = tuple(checker for checker in self.all() if hasattr(checker, "recount"))

    def all(self) -> list[Any]:
        return [
            getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("world", "recounted_at", "of_command", "recounters")
        ]

    def _wires(self) -> dict[type, tuple[Look, ...]]:
        """In this order; the first that finds something names the violation."""
        ends: tuple[Look, ...] = (
            self.one_end.ended,
            self.tier_errors.ended,
            self.works_when_healed.ended,
            self.pages_come_back.ended,
            self.refusals.ended,
            self.waits.ended,
            self.tokens.ended,
            self.hit_rate.ended,
            self.releases.ended,
        )
        return {
            StartRequest: (self.stream.began, self.tokens.began, self.first_token.began),
            EmitTokens: (self.one_end.emitted, self.tokens.emitted, self.stream.emitted),
            FinishRequest: ends,
            FailRequest: ends,
            LaunchBatch: (self.one_sequence.launched, self.same_set.launched, self.tenants.launched),
            ForgetRequests: (self.one_verdict.forgot, self.one_sequence.forgot, self.same_set.forgot),
            RenderAgain: (self.retries.asked,),
            RevokePages: (self.one_verdict.asked,),
            CancelPull: (self.one_verdict.asked,),
            PullPages: (self.well_formed.pulled, self.tenants.pulled),
            StorePages: (self.tenants.copied,),
            LoadPages: (self.tenants.copied,),
            FetchPages: (self.tenants.filed_or_fetched,),
            WritePages: (self.tenants.filed_or_fetched,),
            LearnPeer: (self.questions.put,),
            AskDpRank: (self.questions.put,),
            AnnounceDpRank: (self.right_rank.announced,),
            AnnounceStored: (self.announced.stored,),
            AnnounceRemoved: (self.announced.removed,),
            AnnounceCleared: (self.announced.cleared,),
            Tell: (
                self.slot_contents.told,
                self.slot_owners.told,
                self.right_rank.told,
                self.well_formed.told,
                self.own_clock.told,
            ),
        }

    def after_step(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        self.pages.after_step(life)
        self.slot_owners.after_step(life)
        self.slots_never_block.after_step(life)
        self.bounds.after_step(life)
        moves = self.changes.after_step(life)
        for progress, before in moves:
            self.first_token.moved(life, progress, before)
            self.hit_rate.moved(life, progress, before)
            self.ping_pong.moved(life, progress, before)
        self.queue_order.after_step(life, moves)
        self.idle_steps.after_step(life, events, commands)
        self._see(life, events, commands)

    def _see(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        concerns_us = not HEARD.isdisjoint(map(type, events))
        if concerns_us:
            for event in events:
                if isinstance(event, DRAINED):
                    self.one_verdict.drained(life, event)
        kinds = list(map(type, commands))
        for kind, command in zip(kinds, commands, strict=True):
            for look in self.of_command.get(kind, ()):
                look(life, command)
        if EmitTokens in kinds:
            self.stream.settled(life)
        if concerns_us:
            self._hear(life, events, commands)
        self.vetoes.after_step(life)
        self.delay_bound.after_step(life, events, kinds.count(LaunchBatch))
        self.announced.after_step(life)

    def _hear(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        """What was told, when all that is wanted was seen. Of other types than `HEARD` nobody here takes notice."""
        for event in events:
            if isinstance(event, TransferFailed):
                self.one_verdict.failed(life, event)
        self.refusals.heard(life, events)
        self.no_new_work.heard(life, events)
        self.orders.after_step(life, events)
        self.returns.after_step(life, events, commands)
        self.vetoes.heard(life, events)

    def compare_with_twin(self, life: Life, events: tuple[Event, ...], now: Nanos, effects: Effects) -> None:
        if life.twin is not None:
            self.same_after_restore.compare(life, life.twin, events, now, effects)

    def recount(self) -> None:
        """Of every life that has made a step since the last time: nothing of a node changes in between."""
        for life in self._lives():
            if self.recounted_at.get(life.incarnation) != life.num_steps:
                self._recount(life)

    def _recount(self, life: Life) -> None:
        self.recounted_at[life.incarnation] = life.num_steps
        for checker in self.recounters:
            checker.recount(life)

    def _lives(self) -> list[Life]:
        return [replica.life for replica in self.world.replicas.values() if replica.life is not None]

    def at_idle(self) -> None:
        for life in self._lives():
            self._recount(life)
        for life in self._lives():
            self.nothing_left.at_idle(life)
            self.gauges.at_idle(life)
            self.tier_pages.at_idle(life)

    def watch_deadline(self, life: Life, half: Half) -> None:
        """A half has reached the edge of its replica."""
        self.one_dispatch.arrived(life, half)
        self.right_rank.arrived(life, half)
        self.deadlines.watch(life, half)
        self.edge_deadlines.watch(half)

    def edge_refuses(self, server: Server, rank: Replica, request: Request) -> None:
        """Or ends it without its node: this rank answers for it."""
        self.right_rank.refused(server, rank, request)

    def edge_ends(self, server: Server, half: Half | None, terminal: End) -> None:
        self.edge_one_end.ended(server, half, terminal)

    def watchdog_has_ticked(self, life: Life) -> None:
        self.stalls.ticked(life)

    def watchdog_fires(self, life: Life) -> None:
        self.stalls.fired(life)

    def memory_is_used(
        self, life: Life, request: RequestId, table: list[PageId], first_written: int, num_used: int
    ) -> None:
        self.ownership.memory_is_used(life, request, table, first_written, num_used)

    def page_is_read(
        self,
        store: KvStore,
        grant: SimulatedGrant,
        page: PageId,
        generation: int,
        contents: list[int],
        *,
        is_own: bool,
    ) -> None:
        life = self.world.find(store.incarnation)
        if life is not None:
            self.stale_reads.page_is_read(life, grant, page, generation, is_own=is_own)
            self.freed_pages.page_is_read(life, grant, page)
            index = store.page_indices[grant.request, grant.attempt][page]
            self.window_parts.page_is_read(life, grant, page, index)
            self.sent_pages.page_is_read(life, grant, page, index, contents)

    def page_is_written(self, store: KvStore, request: RequestId, page: PageId) -> None:
        life = self.world.find(store.incarnation)
        if life is not None:
            self.freed_pages.page_is_written(life, request, page)
