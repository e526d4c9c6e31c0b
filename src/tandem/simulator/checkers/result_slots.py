"""Result slots of a prefill: one live owner, read for their own room, given back once, never in the way."""

from array import array
from itertools import chain

from tandem.core.commands import Tell
from tandem.core.disagg.messages import Offer
from tandem.core.disagg.sides import PrefillSide
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import where
from tandem.simulator.oracle import Violation


class SlotOwners:
    id = "S8"

    def after_step(self, life: Life) -> None:
        slots = life.node.state.results
        if len(slots.free_slots) + len(slots.owners) != slots.num_slots:
            raise Violation(
                self.id, f"{where(life)}: {len(slots.free_slots)} free + {len(slots.owners)} used of {slots.num_slots}"
            )

    def recount(self, life: Life) -> None:
        state = life.node.state
        for request in state.results.owners:
            progress = state.requests.get(request)
            if progress is None or progress.state in (State.DRAINING, State.DONE):
                raise Violation(self.id, f"{where(life, request)} has ended and holds a result slot")

    def told(self, life: Life, command: Tell) -> None:
        """A result leaves only from a slot that is held."""
        offer, state = command.message, life.node.state
        if not isinstance(offer, Offer) or offer.result is None:
            return
        request = state.rooms.get(offer.room)
        progress = state.requests.get(request) if request is not None else None
        if progress is None or progress.state is State.DRAINING:
            return
        if progress.id not in state.results.owners:
            raise Violation(self.id, f"{where(life, progress.id)} offers a result without a slot")


class SlotContents:
    id = "S9"

    def told(self, life: Life, command: Tell) -> None:
        """A result leaves for decode: it has to be that of its room."""
        offer = command.message
        if not isinstance(offer, Offer) or offer.result is None:
            return
        if offer.result.room != offer.room:
            raise Violation(self.id, f"{where(life)}: room {offer.room} is offered the slot of {offer.result.room}")
        request = life.node.state.rooms.get(offer.room)
        half = life.halves.get(request) if request is not None else None
        if half is None:
            return
        tokens = array("i", offer.result.token).tolist()
        right = [half.script.output_token(index) for index in range(len(tokens))]
        if not tokens or tokens != right:
            raise Violation(self.id, f"{where(life, half.request)}: slot holds {tokens}, not {right}")


class SlotsOnce:
    """Every slot is free, or used, once."""

    id = "S10"

    def recount(self, life: Life) -> None:
        results = life.node.state.results
        every_slot = sorted(chain(results.free_slots, results.owners.values()))
        if every_slot != list(range(results.num_slots)):
            raise Violation(self.id, f"{where(life)}: slots {every_slot}")


class SlotsNeverBlock:
    """Who lacks a slot is passed over: everybody behind it was looked at, up to the first who lacks something else."""

    id = "S11"

    def after_step(self, life: Life) -> None:
        state = life.node.state
        queue = state.queues[State.QUEUED]
        if len(queue) < 2 or state.results.free_slots:
            return
        is_behind = False
        for request in queue:
            progress = state.requests[request]
            if progress.blocked_on is WaitingFor.RESULT_SLOT:
                is_behind = True
            elif progress.blocked_on is not None or not is_behind:
                return
            elif progress.entered_at < state.now and isinstance(progress.side, PrefillSide) and progress.side.is_ready:
                raise Violation(
                    self.id, f"{where(life, request)} stands behind one that lacks a slot, and is not looked at"
                )
