"""How many bootstrap servers are asked at a time, so that those who keep silent delay nobody else. No I/O, no clock.

    known      an address whose last question was answered has a lane of its own
    unknown    the others share `max_unknown` lanes. Where all are taken, the one that has been silent longest makes
               room if it had `patience_ns` to answer; else the newcomer is refused, and may ask again

Nobody waits for a lane, so nobody waits for another address. Whoever fails to answer is unknown from then on; and so
is, while `max_known` others answer, who is new. A flood of silent addresses thus costs an address that answers
nothing, and one that is asked for the first time at most a refusal, which its node repeats.
"""

from dataclasses import dataclass, field

from tandem.core.values import MILLISECOND, Address, Nanos

MAX_UNKNOWN = 512
MAX_KNOWN = 1024
PATIENCE_NS = Nanos(500 * MILLISECOND)


class LaneRefused(Exception):
    """One line: why this address is not asked."""


@dataclass(slots=True)
class Lanes:
    max_unknown: int = MAX_UNKNOWN
    max_known: int = MAX_KNOWN
    patience_ns: Nanos = PATIENCE_NS
    _unknown: dict[int, Nanos] = field(default_factory=dict[int, Nanos])  # question: since when; the oldest first
    _known: dict[Address, None] = field(default_factory=dict[Address, None])

    def enter(self, question: int, address: Address, now: Nanos) -> int | None:
        """Until `leave`. Returns the question that has to make room: it has left already. Raises LaneRefused."""
        if address in self._known:
            return None
        oldest = self._room(now)
        self._unknown[question] = now
        return oldest

    def leave(self, question: int, address: Address, *, has_answered: bool) -> None:
        self._unknown.pop(question, None)
        if not has_answered:
            self._known.pop(address, None)
        elif len(self._known) < self.max_known:
            self._known[address] = None

    def _room(self, now: Nanos) -> int | None:
        if len(self._unknown) < self.max_unknown:
            return None
        oldest, since = next(iter(self._unknown.items()))
        if now < since + self.patience_ns:
            raise LaneRefused(f"{self.max_unknown} other bootstrap servers are being asked; try again")
        del self._unknown[oldest]
        return oldest
