"""Who hangs is found in time, and nobody else is: the watchdog of a server, held against what really hangs."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.core.stall_detector import SICK_TICKS, TICKS
from tandem.core.values import Incarnation
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.servers import server_of
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.checkers.base import Watched, where
from tandem.simulator.oracle import Violation

LATE_TICKS = 2  # the tick in which it begins, and the one in which the answer is under way


Standing = tuple[str, int]
"""What stands still, and which of its kind."""


@dataclass(slots=True)
class Counted:
    """Ticks for which something has stood still in one life."""

    ticks: dict[Standing, int] = field(default_factory=dict[Standing, int])
    longest: int = 0  # of these
    before: int = 0  # the longest at the tick before: what goes on between two ticks is seen at the second
    unhealthy: int = 0  # ticks in a row


NOTHING_COUNTED = Counted()


class StallChecker:
    """A life in which something stands still is unhealthy after half of its watchdog's time and ends after all of it.

    Who makes progress, or was only paused with its whole server, is and does neither.
    """

    id = "L8"

    def __init__(self, world: Watched) -> None:
        self.world = world
        self.counted: dict[Incarnation, Counted] = {}

    def ticked(self, life: Life) -> None:
        """The watchdog has heard what this tick says, and has not acted on it yet."""
        counted = self.counted.get(life.incarnation)
        if counted is None:
            counted = self.counted[life.incarnation] = Counted()
        counted.before = counted.longest
        if counted.ticks or life.vitals.hang is not None or life.store.dead or life.node.state.inflight:
            counted.ticks = dict(self._count(life, counted.ticks))
            counted.longest = max(counted.ticks.values(), default=0)
        is_healthy = self.world.servers[server_of(life.replica.name)].trusts(life.replica)
        counted.unhealthy = 0 if is_healthy else counted.unhealthy + 1
        at_least, at_most = self._bounds(counted)
        if at_least >= SICK_TICKS + LATE_TICKS and is_healthy:
            raise Violation(self.id, f"{where(life)} hangs for {at_least} ticks, and its server says it is healthy")
        if at_least >= TICKS + LATE_TICKS and not life.vitals.liveness.longest.is_final:
            raise Violation(self.id, f"{where(life)} hangs for {at_least} ticks and lives on")
        if at_most < SICK_TICKS and life.vitals.liveness.longest.is_sick:
            raise Violation(self.id, f"{where(life)} is unhealthy after {at_most} ticks without progress")

    def _count(self, life: Life, before: dict[Standing, int]) -> Iterator[tuple[Standing, int]]:
        """While the node is silent nobody knows what else goes on: that count stays. A worker that hangs again has
        answered in between."""
        hang = life.vitals.hang
        if hang is Hang.NODE:
            yield from ((what, ticks) for what, ticks in before.items() if what[0] is not hang)
            yield (hang, 0), before.get((hang, 0), -1) + 1
            return
        window = life.node.state.inflight
        standing: list[Standing] = [(hang, life.vitals.num_hangs)] if hang is Hang.WORKER else []
        if life.store.dead:
            standing.append(("lost shards", 0))  # what hung before went on as it died
        if window:
            standing.append(("batch", window[0].batch))
        for what in standing:
            yield what, before.get(what, -1) + 1

    def _bounds(self, counted: Counted) -> tuple[int, int]:
        """Of what its watchdog may have counted: two answers in one tick show one batch twice."""
        before, now = counted.before, counted.longest
        return min(before, now), max(before, now) + 1

    def fired(self, life: Life) -> None:
        counted = self.counted.pop(life.incarnation)
        _, at_most = self._bounds(counted)
        if at_most < TICKS:
            raise Violation(self.id, f"{where(life)} is ended after {at_most} ticks without progress")
        if counted.unhealthy < TICKS - SICK_TICKS:
            raise Violation(self.id, f"{where(life)} is ended after {counted.unhealthy} unhealthy ticks")

    def recount(self, life: Life) -> None:
        """Everything that hangs is watched, and both counts say the same."""
        if life.vitals.hang is not None and not life.vitals.is_watched:
            raise Violation(self.id, f"recount: {where(life)} hangs, and no watchdog looks")
        at_least, at_most = self._bounds(self.counted.get(life.incarnation, NOTHING_COUNTED))
        ticks = life.vitals.liveness.longest.ticks
        if not at_least - LATE_TICKS <= ticks <= at_most:
            raise Violation(
                self.id, f"recount: {where(life)} stands still for {ticks} ticks, not {at_least}..{at_most}"
            )
