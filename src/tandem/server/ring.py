"""The last steps of a machine, always in memory: what a fault leaves on record though nobody had asked for one.

Two segments, each a snapshot and the steps after it. When the newer one is full, the older one goes and another begins;
so there is always a snapshot with all steps since, which replays.

A step costs two appends; some steps at a time are encoded together. Their objects die young: to keep them instead costs
no encoding, but memory that no cache holds, and a pause of 13 ms where a segment goes. Tokens are taken out where steps
are written (`fault_records.py`).
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Generic, TypeVar

import msgspec

Given = TypeVar("Given")
Gave = TypeVar("Gave")

SEGMENT_BYTES = 4 << 20
SNAPSHOTS = 6  # a segment holds at least so many times what its snapshot takes, or snapshots would cost too much
PACK_EVERY = 8  # steps

_encode = msgspec.msgpack.Encoder().encode
Steps = tuple[list[object], list[object]]  # what they were given, and what they gave


class RingSegment:
    __slots__ = ("first_step", "num_packed", "parts", "snapshot")

    def __init__(self, first_step: int, snapshot: bytes) -> None:
        self.first_step = first_step
        self.snapshot = snapshot
        self.num_packed = 0  # steps
        self.parts: list[bytes | Steps] = []  # of the newest segment the last one grows, the others are encoded


class Ring(Generic[Given, Gave]):
    """Before a step its input goes to `given`, after it its output to `gave`; with PACK_EVERY of these `pack` is due.

    Whoever records does this by himself: a call costs as much as all of it. What goes in is not changed any more, and
    no output is None.

    snapshot: of the machine, between two steps. decoder: of what `kept` gives.
    """

    __slots__ = ("_decoder", "_left", "_segments", "_snapshot", "gave", "given", "segment_bytes")

    def __init__(
        self,
        snapshot: Callable[[], bytes],
        decoder: msgspec.msgpack.Decoder[tuple[list[Given], list[Gave]]],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._snapshot = snapshot
        self._decoder = decoder
        self._segments: list[RingSegment] = []
        self.segment_bytes = segment_bytes
        self._begin(0)

    def pack(self) -> None:
        """Between two steps. May begin a segment."""
        newest = self._segments[-1]
        try:
            packed = _encode((self.given, self.gave))
        except Exception:  # what cannot be encoded cannot be written: it costs the record, and nothing else
            self.begin_anew()
            return
        newest.num_packed += len(self.gave)
        newest.parts[-1] = packed  # at once: somebody may be reading
        self._left -= len(packed)
        if self._left < 0:
            self._begin(newest.first_step + newest.num_packed)
        else:
            self._open(newest)

    def kept(self) -> tuple[RingSegment, Iterator[tuple[Given, Gave | None]]]:
        """The oldest segment, and all steps from its snapshot on. The last gave None if it raised, or still runs.

        May be called by another thread while steps go on: it has those that are over by now.
        """
        segments = self._segments
        parts = [_packed(part) for segment in segments for part in list(segment.parts)]
        decoded = map(self._decoder.decode, parts)
        return segments[0], (step for given, gave in decoded for step in zip_longest(given, gave))

    def begin_anew(self) -> None:
        """A step has raised and the machine goes on: what was kept is over."""
        newest = self._segments[-1]
        self._segments = []
        self._begin(newest.first_step + newest.num_packed + len(self.given))

    def _begin(self, first_step: int) -> None:
        newer = RingSegment(first_step, self._snapshot())
        self._left = max(self.segment_bytes, SNAPSHOTS * len(newer.snapshot))
        self._open(newer)
        self._segments = [*self._segments[-1:], newer]

    def _open(self, segment: RingSegment) -> None:
        self.given: list[object] = []
        self.gave: list[object] = []  # one less than `given` while a step runs, or where it raised
        segment.parts.append((self.given, self.gave))


def _packed(part: bytes | Steps) -> bytes:
    if isinstance(part, bytes):
        return part
    given, gave = part
    outputs = gave[:]  # first: both may grow meanwhile
    return _encode((given[: len(outputs) + 1], outputs))
