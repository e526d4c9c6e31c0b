"""Virtual time: integer nanoseconds, and a heap of what is going to happen.

Two things that are due at the same instant happen in the order in which they were put in, so a run is a function of
the seed alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any  # arguments of scheduled actions are whatever the action takes

from tandem.core.values import Nanos

Action = Callable[..., None]
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class LocalClock:
    """What one life takes for the time: it began at another moment, and runs a little fast or slow."""

    offset_ns: int = 0
    drift_ppm: int = 0  # above -MILLION

    def read(self, time_ns: int) -> Nanos:
        return Nanos(self.offset_ns + time_ns + time_ns * self.drift_ppm // MILLION)

    def when(self, local_ns: int) -> int:
        """The first moment at which this clock shows `local_ns`."""
        passed, rate = local_ns - self.offset_ns, MILLION + self.drift_ppm
        return -(-passed * MILLION // rate)


@dataclass(slots=True)
class Clock:
    time: int = 0
    num_scheduled: int = 0
    num_in_background: int = 0
    heap: list[tuple[int, int, Action, tuple[Any, ...]]] = field(default_factory=list)

    def now(self) -> Nanos:
        return Nanos(self.time)

    def at(self, time_ns: int, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` at `time_ns`, or now if that has passed."""
        self.num_scheduled += 1
        due = time_ns if time_ns > self.time else self.time
        heappush(self.heap, (due, self.num_scheduled, action, arguments))

    def after(self, delay_ns: float, action: Action, *arguments: Any) -> None:
        self.num_scheduled += 1
        due = self.time + int(delay_ns) if delay_ns > 0 else self.time
        heappush(self.heap, (due, self.num_scheduled, action, arguments))

    def in_background(self, time_ns: int, action: Action, *arguments: Any) -> None:
        """As `at`. Where only such things are left to happen, nothing does: they happen for ever."""
        self.num_in_background += 1
        self.at(time_ns, self._run_in_background, action, arguments)

    def _run_in_background(self, action: Action, arguments: tuple[Any, ...]) -> None:
        self.num_in_background -= 1
        action(*arguments)

    def next_time(self) -> int | None:
        """When the next thing happens; None when nothing is left."""
        return self.heap[0][0] if len(self.heap) > self.num_in_background else None

    def run(self, until_ns: int | None = None) -> Iterator[int]:
        """Go to the next thing and do it, again and again, until nothing is left, or nothing up to `until_ns`. Yields
        each time."""
        heap = self.heap
        while len(heap) > self.num_in_background and (until_ns is None or heap[0][0] <= until_ns):
            self.time, _, action, arguments = heappop(heap)
            action(*arguments)
            yield self.time

    def run_next(self) -> bool:
        """Only the next one. False: nothing is left."""
        return next(self.run(), None) is not None
