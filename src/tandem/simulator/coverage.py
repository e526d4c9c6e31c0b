"""Rare states that a simulation has to reach: what it never reaches, it does not check.

Each has a name, a seed that reaches it and its rate, the share of seeds that do: `coverage.json`, measured by
`python -m tandem.simulator.record_coverage 2000`. A rate lies between 1e-5 and 0.5: what nearly
every seed does is not rare, what none does is not tested. `Watch` is an observer of a `World`: attached as its trace,
it sees what every node is told, wants, and was before the step; it costs nothing where nobody asks for it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from msgspec import Struct

from tandem.core.batch import TokenFlag
from tandem.core.commands import CancelPull, Command, FailRequest, FinishRequest, Path, RenderAgain, RevokePages, Tell
from tandem.core.disagg.messages import Abort, Message, Moved, Offer, Ready, Release
from tandem.core.disagg.sides import DecodeSide, PrefillSide
from tandem.core.events import (
    BatchFailed,
    BatchReturned,
    DrainRequested,
    Event,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerSaid,
    PromptRendered,
    StopMatched,
    TransferFailed,
)
from tandem.core.scheduler.delayer_policy import Reason
from tandem.core.scheduler.request_state import Progress, State, WaitingFor
from tandem.core.settings import OptimisticPolicy, Role
from tandem.core.values import Cause, RequestId
from tandem.simulator.actors.replica import Life
from tandem.simulator.world import World

RATE_MIN, RATE_MAX = 1e-5, 0.5


class Rare(Struct, frozen=True):
    seed: int
    rate: float


class Watch:
    """Counts the rare states of one seed. Use: `world.trace = Watch(world).look`."""

    def __init__(self, world: World) -> None:
        self.seen = world.checkers.changes.seen  # where everybody was after the step before
        self.reached: Counter[str] = Counter()
        self.incarnations: dict[tuple[str, str], str] = {}
        self.watchdogs = world.watchdogs

    def look(self, now: int, life: Life, events: Sequence[Event], commands: Sequence[Command]) -> None:
        for event in events:
            self.reached.update(self._of_event(life, event))
        for command in commands:
            self.reached.update(self._of_command(life, command))
        self.reached.update(of_node(life))
        self.reached.update(self._of_watchdogs())
        for progress in life.node.state.requests.values():
            self.reached.update(of_request(life, progress))

    def before(self, life: Life, request: RequestId) -> State | None:
        seen = self.seen.get(life.incarnation, {}).get(request)
        return seen[0] if seen is not None else None

    def _of_event(self, life: Life, event: Event) -> Iterator[str]:
        state = life.node.state
        match event:
            case PeerSaid(peer, message):
                yield from self._of_message(life, message)
            case PeerLearned(address, peer):
                known = self.incarnations.get((life.replica.name, address.host))
                if known is not None and peer.id != known:
                    yield "decode learns of a peer's next life"
                self.incarnations[(life.replica.name, address.host)] = peer.id
            case PeerLost(peer):
                if any(isinstance(p.side, DecodeSide) and p.side.peer == peer for p in state.requests.values()):
                    yield "a lost peer is still somebody's"
            case PagesLanded(request, attempt, shard, _):
                progress = state.requests.get(request)
                if progress is None or progress.state is State.DRAINING:
                    yield "pages land after the end"
                elif not isinstance(progress.side, DecodeSide) or progress.side.attempt != attempt:
                    yield "pages land after the transfer was given up"
                elif shard > 0 and progress.side.arrival is not None and 0 not in progress.side.arrival.reports:
                    yield "a later shard lands first"
            case TransferFailed(request, _, shard):
                progress = state.requests.get(request)
                if progress is None or progress.state is State.DRAINING:
                    yield "a transfer fails after the end"
                elif shard > 0:
                    yield "a later shard fails"
            case BatchFailed():
                yield "a batch fails"
            case BatchReturned(outcome):
                if any(flag & TokenFlag.INVALID for flag in outcome.flags):
                    yield "a row's logits are not finite"
            case StopMatched(request):
                if request not in state.requests:
                    yield "a stop string comes after the end"
            case PromptRendered(request):
                if request.id not in state.requests:
                    yield "a prompt is rendered anew after the end"
            case DrainRequested():
                if state.requests:
                    yield "a drain begins with requests under way"
            case _:
                pass

    def _of_message(self, life: Life, message: Message) -> Iterator[str]:
        state = life.node.state
        progress = state.requests.get(state.rooms.get(message.room, RequestId(-1)))
        match message:
            case Ready():
                if message.target != life.incarnation:
                    yield "READY for another life"
                if progress is None and message.room in state.stash:
                    yield "READY overtakes its request"
                if progress is not None and progress.state is State.DRAINING:
                    yield "READY after the end"
                reader = progress.side.reader if progress and isinstance(progress.side, PrefillSide) else None
                if reader is not None and reader.peer != message.source:
                    yield "a second decode says READY"
            case Offer():
                if progress is None or not isinstance(progress.side, DecodeSide):
                    yield "an OFFER that nobody wants"
                elif message.attempt != progress.side.attempt:
                    yield "an OFFER of another attempt"
                elif message.first_page > progress.side.offered:
                    yield "an OFFER after a gap"
            case Release(outcome=outcome):
                if progress is None and message.room in state.stash:
                    yield "RELEASE overtakes its request"
                if outcome == "not_needed":
                    yield "prefill is not needed"
            case Abort():
                if progress is not None and self.before(life, progress.id) is State.ARRIVING:
                    yield "prefill gives up while pages arrive"
            case Moved():
                yield (
                    "READY is sent on to another rank" if progress is not None else "an end is sent on to another rank"
                )

    def _of_command(self, life: Life, command: Command) -> Iterator[str]:
        role = life.replica.role
        match command:
            case FailRequest(request, cause, stage):
                yield f"{role} fails: {cause}"
                yield f"a request ends while it waits for {stage}"
                if cause in _WHY and (before := self.before(life, request)) is not None:
                    yield f"{role} {_WHY[cause]} {before}"
            case RenderAgain(request):
                yield "a prompt is rendered anew"
                if (before := self.before(life, request)) is not None:
                    yield f"a prompt is rendered anew while {before}"
            case FinishRequest():
                yield f"{role} finishes {command.path}"
                yield from of_finish(life, command)
            case Tell(_, Abort(cause=Cause.PEER_LOST, detail=detail)) if detail.startswith(
                "READY is for another incarnation"
            ):
                yield "READY for another incarnation is rejected"
            case Tell(_, Release(outcome="aborted", room=room)):
                progress = life.node.state.requests.get(life.node.state.rooms.get(room, RequestId(-1)))
                arrival = progress.side.arrival if progress and isinstance(progress.side, DecodeSide) else None
                if arrival is not None and any(report.landed for report in arrival.reports.values()):
                    yield "a transfer is given up after pages have landed"
            case RevokePages(request) if request in life.node.state.requests:
                yield "an end waits for readers"
            case CancelPull(request) if request in life.node.state.requests:
                yield "an end, or a fallback, waits for pages on their way"
            case _:
                pass

    def _of_watchdogs(self) -> Iterator[str]:
        for who in self.watchdogs.fired:
            yield f"a watchdog fired on a {who}"
        if self.watchdogs.num_recovered:
            yield "a server was unhealthy and recovered"


_WHY = {Cause.ABORTED: "is aborted", Cause.DEADLINE_EXCEEDED: "meets its deadline", Cause.PEER_LOST: "loses its peer"}


def of_finish(life: Life, command: FinishRequest) -> Iterator[str]:
    half = life.halves[command.request]
    if command.retries >= 2:
        yield f"{life.replica.role} finishes after two retries or retractions"
    if half.role is Role.DECODE and command.path is Path.REMOTE and command.kv_pages == 0:
        yield "decode held every page"
    if half.role is Role.DECODE and command.path is Path.REMOTE and command.retries:
        yield "a request that came from a peer is pushed back and finishes"
    if life.node.state.draining:
        yield "a draining server finishes a request"


def of_node(life: Life) -> Iterator[str]:
    state, settings = life.node.state, life.settings
    if life.twin is not None and state.queues[State.ARRIVING]:
        yield "a restored copy decides while pages arrive"
    if len(state.tombstones) == settings.tombstones:
        yield "the oldest tombstone is dropped"
    if state.stash and len(state.stash) == settings.stashed_messages:
        yield "the stash is full"
    if len(state.queues[State.QUEUED]) + len(state.queues[State.BOOTSTRAPPING]) >= settings.max_queued:
        yield "the queue is full"
    if not state.pool.num_free and not state.tree.num_evictable:
        yield "not a page is left"
    if len(state.queues[State.RETRACTING]) > 1:
        yield "two are pushed back at once"
    if len(state.queues[State.DRAINING]) > 2:
        yield "three ended ones still hold pages"
    if state.queues[State.PARKED] and not state.results.free_slots:
        yield "parked requests hold the result slots"
    if state.held_back:
        yield "who would pull the same waits"
    if len(state.queues[State.RECOVERING]) > 1:
        yield "two transfers have failed and drain"
    decision = state.delayer.decision
    if decision is not None and not decision.allows:
        yield "the delayer holds prompts"
    if decision is not None and decision.reason is Reason.WAIT_TIMEOUT:
        yield "the delayer gives up"
    yield from of_queue(state.live(State.QUEUED), state.results.owners)


def of_queue(queue: Iterable[Progress], rows: dict[RequestId, int]) -> Iterator[str]:
    is_behind = False
    for progress in queue:
        if is_behind and progress.id in rows:
            yield "no result slot is left, with a holder behind"
        if is_behind and isinstance(progress.side, PrefillSide) and progress.side.is_ready:
            yield "no result slot is left, with a READY one behind"
        is_behind = is_behind or progress.blocked_on is WaitingFor.RESULT_SLOT
        waits = progress.blocked_on is WaitingFor.PREFIX
        if waits and isinstance(progress.side, PrefillSide) and progress.side.is_ready:
            yield "who is READY waits for a prefix that another computes"


def of_request(life: Life, progress: Progress) -> Iterator[str]:
    settings = life.settings
    retries = progress.side.prefill_retry_count if isinstance(progress.side, PrefillSide) else 0
    if settings.optimistic is OptimisticPolicy.RETRY and retries >= settings.optimistic_retries:
        yield "the retry budget is exhausted"
    if progress.retractions == 2:
        yield "somebody is pushed back twice"
    if progress.untold_token:
        yield "a first token is not told to the worker yet"
    if progress.state is State.RETRACTING and progress.in_flight:
        yield "who is pushed back waits for a batch"
    if progress.state is State.PARKED and retries:
        yield "a request is parked a second time"
    if isinstance(progress.side, DecodeSide) and progress.side.search.unanswered > 1:
        yield "a bootstrap server knows nobody, twice"


# --- the list --------------------------------------------------------------------------------------------------------


def load() -> dict[str, Rare]:
    """Name -> a seed that reaches it, and its rate."""
    text = files("tandem.simulator").joinpath("coverage.json").read_text()
    return {name: Rare(seed, rate) for name, (seed, rate) in json.loads(text).items()}


def table(num_seeds: int, reached_by: Counter[str]) -> Iterator[str]:
    """One line per state of the list: the share of these seeds that have reached it, and the rate on record."""
    yield f"{'seeds':>6} {'rate':>8} {'on record':>10}  of {num_seeds} seeds"
    for name, rare in load().items():
        count = reached_by[name]
        yield f"{count:6} {count / num_seeds:8.5f} {rare.rate:10.5f}  {name}{'' if count else ': not reached'}"
