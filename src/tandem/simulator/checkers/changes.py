"""Requests between two steps: where each may go, and what some of the moves mean.

`StateChanges` finds the moves, once per step; checkers with `moved` hear of each.
"""

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from itertools import chain
from typing import Any  # machines of any state and trigger type

from tandem.core.commands import RenderAgain
from tandem.core.disagg.sides import PrefillSide
from tandem.core.disagg.transfer_state import RECEIVER, SENDER, TransferState
from tandem.core.machine import Machine
from tandem.core.scheduler.request_state import LIFECYCLE, Progress, State, WaitingFor
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import OptimisticPolicy, SchedulePolicy
from tandem.core.values import Incarnation, RequestId
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import where
from tandem.simulator.oracle import Violation

Seen = tuple[State, TransferState | None]
Move = tuple[Progress, State | None]  # the request, and where it was after the step before; None: not there yet


def reach(machine: Machine[Any, Any]) -> dict[Enum, frozenset[Enum]]:
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


REACH_OF_REQUEST = reach(LIFECYCLE)
REACH_OF_SENDER = reach(SENDER)
REACH_OF_RECEIVER = reach(RECEIVER)


class StateChanges:
    """Between two steps a state moves along the table, and never out of an end."""

    id = "S13"

    def __init__(self) -> None:
        self.seen: dict[Incarnation, dict[RequestId, Seen]] = {}

    def after_step(self, life: Life) -> list[Move]:
        requests = life.node.state.requests
        seen = self.seen.setdefault(life.incarnation, {})
        moves: list[Move] = []
        for request, progress in requests.items():
            side = progress.side
            now, known = (progress.state, side.state), seen.get(request)
            if known == now:
                continue
            seen[request] = now
            if known is None:
                moves.append((progress, None))
                continue
            self._check(
                life,
                request,
                known,
                now,
                REACH_OF_SENDER if isinstance(side, PrefillSide) else REACH_OF_RECEIVER,
            )
            if known[0] is not now[0]:
                moves.append((progress, known[0]))
        if len(seen) > len(requests):
            for request in seen.keys() - requests.keys():
                del seen[request]
        return moves

    def _check(
        self,
        life: Life,
        request: RequestId,
        known: Seen,
        now: Seen,
        reach_of_end: Mapping[Any, frozenset[Any]],
    ) -> None:
        if now[0] is not known[0] and now[0] not in REACH_OF_REQUEST[known[0]]:
            raise Violation(self.id, f"{where(life, request)} goes from {known[0]} to {now[0]}")
        if None not in (known[1], now[1]) and now[1] is not known[1] and now[1] not in reach_of_end[known[1]]:
            raise Violation(self.id, f"{where(life, request)}: its transfer goes from {known[1]!r} to {now[1]!r}")

    def recount(self, life: Life) -> None:
        """What was seen last is what is there."""
        seen = self.seen.get(life.incarnation, {})
        for request, progress in life.node.state.requests.items():
            if request not in seen or seen[request][0] is not progress.state:
                raise Violation(
                    self.id, f"recount: {where(life, request)} is {progress.state}, seen {seen.get(request)}"
                )


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
        members = state.micro_batches.members
        others = [request for request in members if not has_token_to_come(state.requests[request])]
        if others:
            raise Violation(self.id, f"{where(life, others[0])} is in a decode set and not running")


def has_token_to_come(progress: Progress) -> bool:
    """It runs, or its first token is being sampled."""
    is_launched = progress.state is State.COMPUTING and progress.launched == progress.length and progress.in_flight > 0
    return progress.state is State.RUNNING or is_launched


class Retries:
    """Within the budget of the policy; beyond it one, for a prompt that was rendered anew."""

    id = "S25"

    def __init__(self) -> None:
        self.rendered_anew: defaultdict[Incarnation, set[RequestId]] = defaultdict(set)

    def asked(self, life: Life, command: RenderAgain) -> None:
        rendered = self.rendered_anew[life.incarnation]
        if command.request in rendered:
            raise Violation(self.id, f"{where(life, command.request)} is to be rendered anew a second time")
        rendered.add(command.request)

    def recount(self, life: Life) -> None:
        settings = life.settings
        if settings.optimistic is not OptimisticPolicy.RETRY:
            return
        for progress in life.node.state.requests.values():
            retries = progress.side.prefill_retry_count if isinstance(progress.side, PrefillSide) else 0
            if retries > settings.optimistic_retries + 1:
                raise Violation(self.id, f"{where(life, progress.id)} was retried {retries} times")


class PingPong:
    """A request that was pushed back makes at least one token before it is pushed back again."""

    id = "L7"

    def __init__(self) -> None:
        self.pushed: defaultdict[Incarnation, dict[RequestId, tuple[int, int]]] = defaultdict(dict)

    def moved(self, life: Life, progress: Progress, before: State | None) -> None:
        if not progress.retractions:
            return
        pushed = self.pushed[life.incarnation]
        retractions, generated = pushed.get(progress.id, (0, -1))
        if progress.retractions == retractions:
            return
        if progress.retractions > retractions + 1 or progress.generated <= generated:
            raise Violation(
                self.id, f"{where(life, progress.id)} is pushed back again, after {progress.generated} tokens as before"
            )
        pushed[progress.id] = (progress.retractions, progress.generated)

    def recount(self, life: Life) -> None:
        pushed = self.pushed.get(life.incarnation, {})
        for progress in life.node.state.requests.values():
            if pushed.get(progress.id, (0, 0))[0] != progress.retractions:
                raise Violation(
                    self.id, f"recount: {where(life, progress.id)} was pushed back {progress.retractions} times"
                )


PASSED_OVER = (WaitingFor.RESULT_SLOT, WaitingFor.STORAGE, WaitingFor.PREFIX)


class QueueOrder:
    """Nobody who waits is overtaken, and nobody waits for a node that has nothing else to do.

    Where priorities count they come first, and before them that a decode is READY. Who is equally urgent stands as it
    came, unless the policy says else.
    Overtaken may be who lacks a result slot, since those behind it may not need one; whose prefix is on its
    way from storage or computed by another; and who would start before its decode is READY, but not by another such.
    """

    id = "L4"

    def __init__(self) -> None:
        self.waiting: dict[Incarnation, list[RequestId]] = {}

    def after_step(self, life: Life, moves: list[Move]) -> None:
        state = life.node.state
        queue = state.queues[State.QUEUED]
        waiting = self.waiting.get(life.incarnation)
        if waiting:
            admitted = {
                progress.id
                for progress, before in moves
                if before is State.QUEUED and progress.state in (State.LOADING, State.COMPUTING, State.ARRIVING)
            }
            if admitted:
                self._check_order(life, waiting, admitted)
        if queue or waiting:
            self.waiting[life.incarnation] = list(queue)
        if not queue or state.inflight or state.num_slots_used or state.queues[State.DRAINING]:
            return
        waits = [one for one in queue if state.requests[one].blocked_on is not WaitingFor.STORAGE]
        if waits and not state.host.copies:  # which pin pages
            raise Violation(self.id, f"{where(life)} has nothing to do, and {len(waits)} requests wait")

    def _check_order(self, life: Life, waiting: list[RequestId], admitted: set[RequestId]) -> None:
        state = life.node.state
        is_in_turn = state.settings.schedule_policy is SchedulePolicy.FCFS
        behind = set(admitted)
        for request in sorted(waiting, key=lambda request: urgency(state, request)):
            behind.discard(request)
            if not behind:
                return
            if request in admitted:
                continue
            progress = state.requests.get(request)
            if progress is None or progress.state is not State.QUEUED or progress.entered_at == state.now:
                continue
            own = urgency(state, request)
            after = [one for one in behind if (at := urgency(state, one)) > own or (is_in_turn and at == own)]
            if not after:
                continue
            is_passed = is_early(progress) and not any(is_early(state.requests[other]) for other in after)
            if progress.blocked_on not in PASSED_OVER and not is_passed:
                raise Violation(
                    self.id, f"{where(life, request)} lacks {progress.blocked_on}, and those behind it are admitted"
                )


def urgency(state: NodeState, request: RequestId) -> tuple[bool, int]:
    """By the settings alone: smaller is first. Of one that has gone it does not matter."""
    progress, priorities = state.requests.get(request), state.settings.priorities
    if progress is None or priorities is None:
        return False, 0
    return is_early(progress), progress.request.priority * (1 if priorities.low_values_first else -1)


def is_early(progress: Progress) -> bool:
    return isinstance(progress.side, PrefillSide) and progress.side.reader is None
