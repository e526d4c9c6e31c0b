"""The last steps of a machine, always in memory: what a fault leaves on record though nobody had asked for one.

Two segments, each a snapshot and the steps after it. When the newer one is full, the older one goes and another begins;
so there is always a snapshot with all steps since, which replays.

Kept are the objects of the steps themselves, which are frozen: to encode them in every step would cost a tenth of a
small one. Only when something went wrong they are encoded, and then tokens are taken out (`fault_records.py`). For the
same reason steps are weighed some at a time, and what a step weighs is an estimate of its bytes in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Generic, TypeVar

Given = TypeVar("Given")
Gave = TypeVar("Gave")

SEGMENT_BYTES = 16 << 20
SNAPSHOTS = 6  # a segment holds at least so many times what its snapshot takes, or snapshots would cost too much
WEIGH_EVERY = 32  # steps
BYTES_PER_ENCODED = 4  # about so much larger is an object than its encoding


class Segment(Generic[Given, Gave]):
    __slots__ = ("first_step", "gave", "given", "snapshot")

    def __init__(self, first_step: int, snapshot: bytes) -> None:
        self.first_step = first_step
        self.snapshot = snapshot
        self.given: list[Given] = []
        self.gave: list[Gave] = []  # one less than `given` while a step runs, or where it raised


class Ring(Generic[Given, Gave]):
    """Before a step its input goes to `given`, after it its output to `gave`; `unweighed` is one more, and `weigh` due.

    Whoever records does this by himself: a call costs as much as all of it.

    snapshot: of the machine, between two steps. weigh: bytes of some steps, about.
    """

    __slots__ = ("_left", "_segments", "_snapshot", "_weigh", "gave", "given", "segment_bytes", "unweighed")

    def __init__(
        self,
        snapshot: Callable[[], bytes],
        weigh: Callable[[Sequence[Given], Sequence[Gave]], int],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._snapshot = snapshot
        self._weigh = weigh
        self._segments: list[Segment[Given, Gave]] = []
        self.segment_bytes = segment_bytes
        self._begin(0)

    def count(self) -> None:
        """A step is over: for who has the time for a call."""
        self.unweighed += 1
        if self.unweighed >= WEIGH_EVERY:
            self.weigh()

    def weigh(self) -> None:
        """Between two steps, when WEIGH_EVERY of them were not weighed yet. May begin a segment."""
        self._left -= self._weigh(self.given[-self.unweighed :], self.gave[-self.unweighed :])
        self.unweighed = 0
        if self._left < 0:
            self._begin(self._segments[-1].first_step + len(self.gave))

    def kept(self) -> tuple[Segment[Given, Gave], Iterator[tuple[Given, Gave | None]]]:
        """The oldest segment, and all steps from its snapshot on. The last gave None if it raised, or still runs.

        May be read by another thread while steps go on: some of those are in it, then.
        """
        segments = self._segments
        return segments[0], chain.from_iterable(zip_longest(each.given, each.gave) for each in segments)

    def begin_anew(self) -> None:
        """A step has raised and the machine goes on: what was kept is over."""
        first_step = self._segments[-1].first_step + len(self.given)
        self._segments = []
        self._begin(first_step)

    def _begin(self, first_step: int) -> None:
        newer = Segment[Given, Gave](first_step, self._snapshot())
        self._segments = [*self._segments[-1:], newer]
        self.given, self.gave, self.unweighed = newer.given, newer.gave, 0
        self._left = max(self.segment_bytes, SNAPSHOTS * len(newer.snapshot))
