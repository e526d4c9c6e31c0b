"""What a node has from outside: dispatches of the router, messages of peers, its clock, its own snapshot."""

from tandem.core.commands import Effects, PullPages, Tell
from tandem.core.disagg.messages import Abort, Message, Moved, Offer, Ready, Release
from tandem.core.disagg.sides import AnySide, PrefillSide
from tandem.core.events import Event
from tandem.core.kv_parts import parts
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import has_ended
from tandem.core.values import SECOND, Incarnation, Nanos
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import Watched, where
from tandem.simulator.oracle import Violation

MAX_ROOM = (1 << 63) - 1
LONGEST_NS = 48 * 3600 * SECOND  # no duration in this world is longer; every node's clock starts later
DIGEST_BYTES = 8


class OneDispatch:
    """A room is dispatched once to each role; a request's new attempt has a new room, and its old one is let go."""

    id = "S29"

    def arrived(self, life: Life, half: Half) -> None:
        for other in half.exchange.halves:
            if other is half or other.role is not half.role or half.abort_sent_at is not None:
                continue
            if other.room == half.room:
                raise Violation(
                    self.id, f"{where(life, half.request)}: room {half.room} is dispatched again as {half.role}"
                )
            if other.is_open and other.abort_sent_at is None:
                raise Violation(
                    self.id, f"{where(life, half.request)}: attempt in room {other.room} is still under way"
                )


class WellFormed:
    """What is ill-formed, or said by nobody we know, becomes no pull and no peer; what a node says is well-formed."""

    id = "S31"

    def __init__(self, world: Watched) -> None:
        self.world = world

    def told(self, life: Life, command: Tell) -> None:
        complaint = malformed(command.message)
        if complaint is not None:
            raise Violation(self.id, f"{where(life)} says something malformed: {complaint}: {command.message}")

    def pulled(self, life: Life, command: PullPages) -> None:
        count = len(command.sources)
        if command.peer.name not in self.world.replicas:
            raise Violation(self.id, f"{where(life, command.request)} pulls from {command.peer}, whom nobody knows")
        if len(command.generations) != count or len(command.destinations) != count:
            raise Violation(
                self.id,
                f"{where(life, command.request)} pulls {count} pages of {len(command.generations)} generations "
                f"into {len(command.destinations)}",
            )
        cut = self.world.cut_of(command.peer)
        assert cut is not None
        num_parts = len(parts(life.grid, cut, life.settings.cut))
        if [len(digests) for digests in command.digests] != [DIGEST_BYTES * count] * num_parts:
            raise Violation(self.id, f"{where(life, command.request)} pulls {count} pages without a digest each")
        if len(command.secrets) != cut.num_shards:
            raise Violation(self.id, f"{where(life, command.request)} pulls pages without a secret for each shard")

    def recount(self, life: Life) -> None:
        for progress in life.node.state.requests.values():
            peer = bound_peer(progress.side)
            if peer is not None and peer.name not in self.world.replicas:
                raise Violation(self.id, f"{where(life, progress.id)} is paired with {peer}")


def bound_peer(side: AnySide) -> Incarnation | None:
    """Whom a side exchanges pages with, or will. Not who has said a READY that waits to be checked."""
    if isinstance(side, PrefillSide):
        return side.reader.peer if side.reader is not None else None
    return side.counterpart


def malformed(message: Message) -> str | None:
    """Why no receiver should believe this, or None."""
    if not 0 < message.room <= MAX_ROOM:
        return "no such room"
    match message:
        case Ready():
            if not 0 <= message.held_pages <= message.prompt_len or message.known_pages < message.held_pages:
                return "pages that are not there"
        case Offer():
            count = len(message.pages)
            if len(message.generations) != count or any(len(one) != DIGEST_BYTES * count for one in message.digests):
                return "pages without generation or digest"
            if message.first_page < 0 or message.first_page + count > message.total_pages:
                return "more pages than there are"
        case Release():
            if message.outcome not in ("done", "aborted", "not_needed"):
                return "no such outcome"
        case Abort():
            if not message.cause:
                return "no cause"
        case Moved():
            if message.dp_rank < 0:
                return "no such rank"
    return None


class SameAfterRestore:
    """A node that was restored from a snapshot wants the same; after a while it takes over."""

    id = "S33"

    def compare(self, life: Life, twin: EngineNode, events: tuple[Event, ...], now: Nanos, effects: Effects) -> None:
        if twin.step(events, now) != effects:
            raise Violation(self.id, f"{where(life)}: a node restored from a snapshot decides otherwise")
        life.twin_steps -= 1
        if life.twin_steps == 0:
            life.node, life.twin = twin, None


class OwnClock:
    """Every node has a clock of its own, so a time that came from another one is years away; durations are not."""

    id = "S34"

    def told(self, life: Life, command: Tell) -> None:
        offer = command.message
        if not isinstance(offer, Offer):
            return
        durations = [offer.lease_ns]
        if offer.result is not None:
            durations += [offer.result.queue_ns, offer.result.compute_ns, offer.result.overlapped_ns]
        if any(not 0 <= duration <= LONGEST_NS for duration in durations):
            raise Violation(self.id, f"{where(life)} tells a time of its own clock: {durations}")

    def recount(self, life: Life) -> None:
        """What a node waits for lies on its own clock."""
        now = life.node.state.now
        for progress in life.node.state.requests.values():
            times = [progress.deadline, progress.arrived_at, progress.entered_at]
            reader = progress.side.reader if isinstance(progress.side, PrefillSide) else None
            if reader is not None and not has_ended(progress):
                times += [reader.lease_until, reader.resend_at]
            if any(abs(time - now) > LONGEST_NS for time in times):
                raise Violation(self.id, f"{where(life, progress.id)} has times of another clock at {now}: {times}")
