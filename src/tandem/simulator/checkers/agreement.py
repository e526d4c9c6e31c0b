"""All shards of a replica, and all that it plans: one sequence, one set, one verdict. And the delayer's veto.

A replica has one node, so its shards agree because they are told the same in the same order; these checkers hold the
node to that. `OneSequence` and `SameSet` follow every plan as a shard would.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tandem.core.batch import BatchPlan
from tandem.core.commands import AnnounceDpRank, CancelPull, ForgetRequests, LaunchBatch, RevokePages, Tell
from tandem.core.disagg.messages import Ready
from tandem.core.disagg.sides import DecodeSide
from tandem.core.events import Event, LoadsGathered, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.rank_load import RankLoad
from tandem.core.request import Request
from tandem.core.scheduler.request_state import State
from tandem.core.settings import Role
from tandem.core.values import Incarnation, Nanos, RequestId, Room, ShardId
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.executor import Executor
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server
from tandem.simulator.checkers.base import Watched, where
from tandem.simulator.oracle import Violation


class OneSequence:
    """Plans are numbered without a gap, and nobody is forgotten whom the node still has."""

    id = "S20"

    def __init__(self) -> None:
        self.last: defaultdict[Incarnation, int] = defaultdict(int)

    def launched(self, life: Life, command: LaunchBatch) -> None:
        last, number = self.last[life.incarnation], command.plan.id
        if number != last + 1:
            raise Violation(self.id, f"{where(life)}: batch {number} is told after batch {last}")
        self.last[life.incarnation] = number

    def forgot(self, life: Life, command: ForgetRequests) -> None:
        for request in command.requests:
            if request in life.node.state.requests:
                raise Violation(self.id, f"{where(life, request)} is to be forgotten, and is still here")

    def recount(self, life: Life) -> None:
        """What the worker has not done yet is the end of what it was told."""
        last = self.last[life.incarnation]
        if last != life.node.state.forward_ct:
            raise Violation(self.id, f"recount: {where(life)}: told up to {last}, made {life.node.state.forward_ct}")
        for worker in life.workers:
            waiting = [order.id for order in worker.work if isinstance(order, BatchPlan)]
            if waiting != list(range(last - len(waiting) + 1, last + 1)):
                raise Violation(self.id, f"{where(life)}: batches {waiting} wait, {last} was told last")


class SameSet:
    """A shard that follows joins and leaves decodes exactly those rows that the node counts on, in that order."""

    id = "S21"

    def __init__(self) -> None:
        # by micro-batch
        self.members: defaultdict[Incarnation, defaultdict[int, dict[RequestId, None]]] = defaultdict(
            lambda: defaultdict(dict)
        )

    def launched(self, life: Life, command: LaunchBatch) -> None:
        plan = command.plan
        members = self.members[life.incarnation][plan.micro_batch]
        for request in plan.leave:
            members.pop(request, None)
        for join in plan.join:
            members[join.request] = None
        if not plan.decodes:
            return
        flight = next((flight for flight in life.node.state.inflight if flight.batch == plan.id), None)
        if flight is None or tuple(members) != flight.members:
            meant = flight.members if flight is not None else ()
            raise Violation(self.id, f"{where(life)}: batch {plan.id} decodes {tuple(members)}, the node means {meant}")

    def forgot(self, life: Life, command: ForgetRequests) -> None:
        for members in self.members[life.incarnation].values():
            for request in command.requests:
                members.pop(request, None)

    def recount(self, life: Life) -> None:
        """When a worker has done all that it was told, it has these members and the node's page tables."""
        for worker in life.workers:
            if worker.is_idle:
                self._compare(life, worker.executor)

    def _compare(self, life: Life, executor: Executor) -> None:
        state, told = life.node.state, sorted(self.members[life.incarnation].items())
        members = [request for _, of_one in told for request in of_one]
        if executor.decoding != members:
            raise Violation(self.id, f"recount: {where(life)} decodes {executor.decoding}, told {members}")
        joining = state.micro_batches.joining
        for progress in state.requests.values():
            sequence = executor.requests.get(progress.id)
            if not progress.synced_pages or progress.id in joining or sequence is None:
                continue
            if sequence.pages[: progress.synced_pages] != progress.pages[: progress.synced_pages]:
                raise Violation(
                    self.id, f"{where(life, progress.id)}: table {sequence.pages} is to be {progress.pages}"
                )


class OneVerdict:
    """What one shard reports is the node's decision: a failure is acted on at once, an end waits for every shard."""

    id = "S22"

    def __init__(self) -> None:
        self.open: defaultdict[Incarnation, dict[RequestId, set[ShardId]]] = defaultdict(dict)

    def asked(self, life: Life, command: RevokePages | CancelPull) -> None:
        self.open[life.incarnation][command.request] = set(life.settings.shards)

    def drained(self, life: Life, event: ReadsDrained | TransferDrained) -> None:
        waiting = self.open[life.incarnation].get(event.request)
        if waiting is not None:
            waiting.discard(event.shard)

    def failed(self, life: Life, event: TransferFailed) -> None:
        """After the step: whoever was waiting for these pages does so no more."""
        progress = life.node.state.requests.get(event.request)
        if progress is None or progress.state is not State.ARRIVING or not isinstance(progress.side, DecodeSide):
            return
        if progress.side.attempt == event.attempt and event.shard in life.settings.shards:
            raise Violation(self.id, f"{where(life, progress.id)}: shard {event.shard} has failed, and it waits on")

    def forgot(self, life: Life, command: ForgetRequests) -> None:
        for request in command.requests:
            waiting = self.open[life.incarnation].pop(request, None)
            if waiting:
                raise Violation(
                    self.id, f"{where(life, request)} is forgotten before shards {sorted(waiting)} are drained"
                )

    def recount(self, life: Life) -> None:
        waiting = self.open[life.incarnation]
        for progress in life.node.state.requests.values():
            if set(progress.drains) != waiting.get(progress.id, set()):
                known = sorted(waiting.get(progress.id, set()))
                raise Violation(
                    self.id, f"{where(life, progress.id)} waits for drains of {list(progress.drains)}, not {known}"
                )


class RightRank:
    """Decode asks the very replica that has the prefill's half, or first the one that the room implies; and a rank
    announces no room but its own.

    Who names a wrong rank may send decode astray, but then the rank that has the request refuses it.
    """

    id = "S23"

    def __init__(self, world: Watched) -> None:
        self.world = world
        # DP ranks to which a prefill half of it has come, or which answer for one that was refused
        self.homes: defaultdict[Room, set[str]] = defaultdict(set)

    def arrived(self, life: Life, half: Half) -> None:
        if half.role is Role.PREFILL and half.room is not None:
            self.homes[half.room].add(half.replica)

    def refused(self, server: Server, rank: Replica, request: Request) -> None:
        """Whoever looks for its room is led to this rank and told there; not where another request runs in it."""
        others = [half for half in server.halves.values() if half.room == request.room and half.request != request.id]
        if server.role is Role.PREFILL and request.room is not None and not others:
            self.homes[request.room].add(rank.name)

    def announced(self, life: Life, command: AnnounceDpRank) -> None:
        if command.dp_rank != life.settings.dp_rank:
            raise Violation(self.id, f"{where(life)} is rank {life.settings.dp_rank} and announces {command.dp_rank}")

    def told(self, life: Life, command: Tell) -> None:
        ready = command.message
        if not isinstance(ready, Ready):
            return
        request = life.node.state.rooms.get(ready.room)
        half = life.halves.get(request) if request is not None else None
        if half is None:
            return
        side = life.node.state.requests[half.request].side
        if isinstance(side, DecodeSide) and side.is_unmet:
            return  # it is sent on from there
        homes = [other for other in half.exchange.halves if other.role is Role.PREFILL and other.room == ready.room]
        if any(home.replica == ready.target.name for home in homes):
            return
        if ready.target.name in self.homes[ready.room]:
            return  # a room that was used twice: the other use is or was there
        target = self.world.replicas[ready.target.name].life
        if target is None or target.incarnation != ready.target:
            return  # that life has ended, and its server may have other ranks by now: decode is about to hear of it
        for home in homes:
            there = self.world.replicas[home.replica].life
            progress = there.node.state.requests.get(home.request) if there is not None and home.is_open else None
            if progress is not None and progress.state is not State.DRAINING:
                wrong = ready.target.name
                raise Violation(
                    self.id, f"{where(life, half.request)}: READY goes to {wrong}, the KV is at {home.replica}"
                )


class DelayerVetoes:
    """A veto has a reason that this checker finds again in what it was made from: what the ranks told each other."""

    id = "S28"

    def __init__(self) -> None:
        self.gathered: defaultdict[Incarnation, set[tuple[RankLoad, ...]]] = defaultdict(set)  # whatever was heard

    def heard(self, life: Life, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, LoadsGathered):
                self.gathered[life.incarnation].add(event.loads)

    def after_step(self, life: Life) -> None:
        settings = life.settings.delayer
        if settings is None:
            return
        delayer = life.node.state.delayer
        decision, ranks = delayer.decision, delayer.ranks
        if decision is None or decision.allows:
            return
        told = self.gathered[life.incarnation] if settings.num_ranks > 1 else {(delayer.load,)}
        if ranks not in told:
            raise Violation(self.id, f"{where(life)}: prompts are held for what nobody has said: {ranks}")
        if not any(rank.is_prefillable for rank in ranks):
            raise Violation(self.id, f"{where(life)}: prompts are held where there are none: {ranks}")
        if any(rank.is_prefillable and rank.is_under_watermark for rank in ranks):
            raise Violation(self.id, f"{where(life)}: prompts are held although the pool is empty enough: {ranks}")
        if not all(rank.is_prefillable for rank in ranks):
            return  # some ranks have prompts and some have none: reason enough
        usual = max(rank.usual_batch for rank in ranks)
        cap = usual if settings.prompt_batch_max is None else settings.prompt_batch_max
        most_running = max(rank.num_running for rank in ranks)
        wanted = int(most_running * settings.queue_min_ratio) if settings.queue_min_ratio is not None else 0
        slots_closed = min(rank.num_free_slots for rank in ranks) < usual
        is_short = max(rank.num_waiting for rank in ranks) < min(wanted, cap)
        if settings.tunes_itself:
            is_short = is_cheaper_to_wait(ranks)
        queue_closed = is_short and not any(rank.is_timed_out for rank in ranks)
        if not most_running or not (slots_closed or queue_closed):
            raise Violation(self.id, f"{where(life)}: prompts are held for no reason: {ranks}")


def is_cheaper_to_wait(ranks: tuple[RankLoad, ...]) -> bool:
    """By the time that slots lose: all who decode, to one more prompt batch; those who wait, until one more comes."""
    stall = Fraction(max(rank.batch_ns for rank in ranks)) * sum(rank.num_running for rank in ranks)
    come = sum((Fraction(1, rank.next_prompt_ns) for rank in ranks if rank.next_prompt_ns), Fraction(0))
    waiting = sum(rank.num_waiting for rank in ranks)
    can_grow = not any(rank.gets_no_larger for rank in ranks)
    has_patience = sum(rank.waited_ns for rank in ranks) < stall / 2
    return can_grow and has_patience and waiting * (waiting + 1) < 3 * stall * come


@dataclass(slots=True)
class Held:
    since: Nanos
    passes: int = 0


@dataclass(slots=True)
class DelayIsBounded:
    """Prompts are held for at most so many passes, and by the queue gate for at most so long."""

    id = "L3"
    held: dict[Incarnation, Held] = field(default_factory=dict)

    def after_step(self, life: Life, events: Sequence[Event], num_launched: int) -> None:
        settings = life.settings.delayer
        if settings is None:
            return
        delayer = life.node.state.delayer
        if delayer.since is None:
            self.held.pop(life.incarnation, None)
            return
        held = self.held.get(life.incarnation)
        if held is None or held.since != delayer.since:
            held = self.held[life.incarnation] = Held(delayer.since)
        # Several ranks delay by passes that all of them hear; one that misses a pass may miss the one that lets it go.
        is_alone = settings.num_ranks == 1
        if not is_alone and not any(one.synced_pages == 0 for one in life.node.state.live(State.COMPUTING)):
            self.held.pop(life.incarnation)
            return
        # Passes that it slept through come all at once, and it decides once.
        held.passes += num_launched if is_alone else any(isinstance(event, LoadsGathered) for event in events)
        if held.passes > settings.max_delay_passes * (1 if is_alone else 2):
            raise Violation(self.id, f"{where(life)}: prompts are held for {held.passes} passes")
        seen = delayer.load
        is_late = life.node.state.now - delayer.since >= settings.max_delay_ns
        is_excused = seen is None or seen.is_timed_out or seen.num_free_slots < seen.usual_batch
        if num_launched and is_late and not is_excused:
            raise Violation(self.id, f"{where(life)}: the queue gate holds prompts since {held.since}, and goes on")
