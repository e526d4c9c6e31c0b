"""How many bootstrap servers are asked at a time, so that those who keep silent delay nobody else.

    known      an address whose last question was answered has a lane of its own
    unknown    the others share `max_unknown` lanes. Where all are taken, the one that has been silent longest makes
               room if it had `patience_s` to answer; else the newcomer is refused, and may ask again

Nobody waits for a lane, so nobody waits for another address. Whoever fails to answer is unknown from then on; and so
is, while `max_known` others answer, who is new. A flood of silent addresses thus costs an address that answers
nothing, and one that is asked for the first time at most a refusal, which its node repeats.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tandem.core.values import Address

MAX_UNKNOWN = 512
MAX_KNOWN = 1024
PATIENCE_SECONDS = 0.5


class LaneRefused(Exception):
    """One line: why this address is not asked, or not any more."""


@dataclass(slots=True, eq=False)
class Lane:
    """One question under way."""

    limit: asyncio.Timeout
    since: float
    has_answered: bool = False  # set by whoever asks
    is_given_up: bool = False


@dataclass(slots=True)
class Lanes:
    """Of one event loop."""

    max_unknown: int = MAX_UNKNOWN
    max_known: int = MAX_KNOWN
    patience_s: float = PATIENCE_SECONDS
    _unknown: dict[Lane, None] = field(default_factory=dict)  # the oldest first
    _known: dict[Address, None] = field(default_factory=dict)

    @asynccontextmanager
    async def lane(self, address: Address) -> AsyncIterator[Lane]:
        """Raises LaneRefused, at once or when this question has to make room."""
        now = asyncio.get_running_loop().time()
        is_known = address in self._known
        if not is_known:
            self._make_room(now)
        lane = Lane(asyncio.timeout(None), now)
        try:
            async with lane.limit:
                if not is_known:
                    self._unknown[lane] = None
                try:
                    yield lane
                finally:
                    self._unknown.pop(lane, None)
                    self._remember(address, has_answered=lane.has_answered)
        except TimeoutError:
            if lane.is_given_up:
                raise LaneRefused("it kept silent while others had to be asked") from None
            raise

    def _make_room(self, now: float) -> None:
        if len(self._unknown) < self.max_unknown:
            return
        oldest = next(iter(self._unknown))
        if now < oldest.since + self.patience_s:
            raise LaneRefused(f"{self.max_unknown} other bootstrap servers are being asked; try again")
        del self._unknown[oldest]
        oldest.is_given_up = True
        if not oldest.limit.expired():
            oldest.limit.reschedule(0.0)

    def _remember(self, address: Address, *, has_answered: bool) -> None:
        if not has_answered:
            self._known.pop(address, None)
        elif len(self._known) < self.max_known:
            self._known[address] = None
