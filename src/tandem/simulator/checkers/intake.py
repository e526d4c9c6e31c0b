"""At the door: who is refused, what a refusal leaves behind, and what stays bounded however many come."""

from collections.abc import Sequence
from operator import itemgetter

from tandem.core.commands import FailRequest
from tandem.core.events import DrainRequested, Event, RequestArrived, RequestRefused
from tandem.core.scheduler.request_state import State
from tandem.core.values import Cause, Incarnation, RequestId, Room
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import End, where
from tandem.simulator.oracle import Violation

INTAKE = "intake"
waiting_of = itemgetter(State.BOOTSTRAPPING, State.AWAITING, State.QUEUED)


class Refusals:
    """A refused request holds nothing here, and the other half hears of it as soon as it speaks of the room."""

    id = "S18"

    def ended(self, life: Life, command: End) -> None:
        if not isinstance(command, FailRequest) or command.stage != INTAKE:
            return
        half, state = life.halves[command.request], life.node.state
        if command.request in state.requests or command.request in state.results.owners:
            raise Violation(self.id, f"{where(life, command.request)} is refused and is still here")
        if half.room is None or may_be_unanswered(life, half.room):
            return
        if sum(other.room == half.room for other in life.halves.values()) > 1:
            return  # a room that was used twice: the other use may have had its answer
        if half.room not in state.tombstones:
            raise Violation(
                self.id, f"{where(life, half.request)} is refused, and room {half.room} will not be answered"
            )

    def heard(self, life: Life, events: Sequence[Event]) -> None:
        """What the edge has refused by itself."""
        for event in events:
            if isinstance(event, RequestRefused):
                room = event.request.room
                if room is not None and room not in life.node.state.tombstones and not may_be_unanswered(life, room):
                    raise Violation(
                        self.id, f"{where(life)}: the edge has refused room {room}, and it will not be answered"
                    )


def may_be_unanswered(life: Life, room: Room) -> bool:
    """The room is another request's, or so many have ended that some are forgotten."""
    state = life.node.state
    return room in state.rooms or len(state.tombstones) >= state.settings.tombstones


class NoNewWork:
    """Who drains accepts no more: what arrives is refused in the same step, by that name."""

    id = "L9"

    def __init__(self) -> None:
        self.draining: set[Incarnation] = set()

    def heard(self, life: Life, events: Sequence[Event]) -> None:
        """After the commands of the step were seen, so that an end in the same step is known."""
        is_draining = life.incarnation in self.draining
        for event in events:
            if isinstance(event, DrainRequested):
                self.draining.add(life.incarnation)
                is_draining = True
            elif is_draining and isinstance(event, RequestArrived):
                self._check(life, event.request.id)

    def _check(self, life: Life, request: RequestId) -> None:
        terminal = life.halves[request].terminal
        if not isinstance(terminal, FailRequest) or terminal.cause is not Cause.DRAINING:
            raise Violation(
                self.id, f"{where(life, request)} arrives at a server that drains, and is not refused: {terminal}"
            )

    def recount(self, life: Life) -> None:
        if (life.incarnation in self.draining) != life.node.state.draining:
            raise Violation(self.id, f"recount: {where(life)} drains: {life.node.state.draining}")


class Bounds:
    """Overload: queues and stashes have their bound, and who is too many is told so at once."""

    id = "L10"

    def after_step(self, life: Life) -> None:
        state, settings = life.node.state, life.settings
        queues = state.queues
        waiting, draining = sum(map(len, waiting_of(queues))), len(queues[State.DRAINING])
        # Who was pushed back, or fell back, waits again beside those who were let in: at most one per slot.
        if waiting > settings.max_queued + settings.max_running:
            raise Violation(self.id, f"{where(life)}: {waiting} requests wait, bound {settings.max_queued}")
        if len(state.inflight) > settings.window_depth:
            raise Violation(self.id, f"{where(life)}: {len(state.inflight)} batches in flight")
        if len(state.stash) > settings.stashed_messages or len(state.tombstones) > settings.tombstones:
            raise Violation(self.id, f"{where(life)}: {len(state.stash)} stashed, {len(state.tombstones)} tombstones")
        if (used := len(state.requests) - waiting - draining) > settings.max_running:
            raise Violation(self.id, f"{where(life)}: {used} of {settings.max_running} slots")
