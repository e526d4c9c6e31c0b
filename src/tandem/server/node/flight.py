"""The flight recorder: what a node was told and what it decided, so that `tandem replay` can decide it again.

A record is some segment files in a folder; a segment is frames of a 4-byte big-endian length and one msgpack object:
a `Head` (settings and a snapshot of the node), then per step an `Input`, written before the step so that a step that
raises is on record, and an `Output`. The bound is that of the folder: of all records there, the oldest segments go. A
segment takes a quarter of it, but holds at least as many bytes of steps as its snapshot takes, or a small bound would
turn the page every step; and the last two of a running node stay whatever the bound.

No text and no token is in it (`without_tokens.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.core.commands import Command, Effects, LaunchBatch
from tandem.core.events import Event
from tandem.core.settings import NodeSettings
from tandem.core.values import SECOND, Nanos
from tandem.ports import Node
from tandem.server.channel import append_frame
from tandem.server.node.without_tokens import command_without_tokens, event_without_tokens, snapshot_without_tokens
from tandem.server.record_file import (
    BrokenRecord,
    Difference,
    NothingWritten,
    RecordFrames,
    Replay,
    StepRaised,
    same_bytes,
)
from tandem.server.record_folder import FLIGHT_NAME, RecordFolder

FORMAT = 9
SEGMENTS = 4  # that fit into the bound
FLUSH_NS = 1 * SECOND  # at most so much is lost when the process is killed


class Head(Struct, frozen=True, tag=True):
    format: int
    first_step: int  # steps before this segment
    settings: NodeSettings
    snapshot: bytes


class Input(Struct, frozen=True, tag=True):
    now: Nanos
    happened: tuple[Event, ...]


class Output(Struct, frozen=True, tag=True):
    commands: tuple[Command, ...]
    wake_at: Nanos | None


Frame = Head | Input | Output


def given(now: Nanos, happened: Sequence[Event]) -> Input:
    return Input(now, tuple(event_without_tokens(event) for event in happened))


def recorded(effects: Effects) -> Output:
    return Output(tuple(command_without_tokens(command) for command in effects.commands), effects.wake_at)


class FlightRecorder:
    """An observer of the driver's loop. One per life of a node; names its files after it."""

    def __init__(
        self,
        folder: Path,
        settings: NodeSettings,
        snapshot: Callable[[], bytes],
        *,
        max_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        """Raises OSError when the folder cannot be written."""
        self._folder = RecordFolder(folder, FLIGHT_NAME)
        self._folder.prepare()
        self._settings = settings
        self._snapshot = snapshot
        self._max_bytes = max_bytes
        self._segment_bytes = max_bytes // SEGMENTS
        self._name = f"flight-{settings.incarnation.id}-{os.getpid()}-"
        self._num_segments = 0
        self._steps = 0
        self._written = 0
        self._head_bytes = 0
        self._flushed_at = Nanos(0)
        self._scratch = bytearray()
        self._note = note
        self._is_broken = False
        self._begin_segment()

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        if not self._is_broken:
            with self._given_up_on_error():
                self._write(given(now, happened))

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        if not self._is_broken:
            with self._given_up_on_error():
                self._write(recorded(effects))
                self._steps += 1
                self._turn_page(now, effects)

    def close(self) -> None:
        with self._given_up_on_error():
            self._file.close()

    def _turn_page(self, now: Nanos, effects: Effects) -> None:
        if self._written > max(self._segment_bytes, 2 * self._head_bytes):
            self._file.close()
            self._begin_segment()
        elif now - self._flushed_at > FLUSH_NS or not any(isinstance(c, LaunchBatch) for c in effects.commands):
            self._file.flush()  # a step that launches nothing may be the last for long
            self._flushed_at = now

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        """A full disk ends the record, not the server."""
        try:
            yield
        except OSError as error:
            self._is_broken = True
            self._note(f"the flight record ends here: {error}")

    def _begin_segment(self) -> None:
        last_two = [f"{self._name}{number:06}.tandem" for number in (self._num_segments, self._num_segments - 1)]
        self._num_segments += 1
        self._file = self._folder.create(last_two[0])
        self._written = 0
        self._write(Head(FORMAT, self._steps, self._settings, snapshot_without_tokens(self._snapshot())))
        self._head_bytes = self._written
        self._file.flush()  # before older ones go: whatever kills us now leaves a beginning
        room = self._max_bytes - self._segment_bytes + self._written  # for what is there; this one may grow
        self._folder.make_room(room, segment_bytes=self._segment_bytes, own=self._name, kept=last_two)

    def _write(self, frame: Frame) -> None:
        self._scratch.clear()
        append_frame(self._scratch, frame)
        self._file.write(self._scratch)
        self._written += len(self._scratch)


class FlightSegment:
    """One file of a record, read in order. Raises BrokenRecord if it does not begin as one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = RecordFrames[Frame](path, msgspec.msgpack.Decoder(Frame))
        self._ends_in_a_step = False  # known at the end
        head = next(self.frames, None)
        if head is None:
            raise NothingWritten(f"{path}: ends before its first step, so it is no flight record yet")
        if not isinstance(head, Head) or head.format != FORMAT:
            raise BrokenRecord(f"{path}: does not begin as a flight record of format {FORMAT}")
        self.head = head

    @property
    def is_cut(self) -> bool:
        """Known at the end: the process was killed while it wrote, or its last step raised."""
        return self.frames.is_cut or self._ends_in_a_step

    def steps(self, node: Node) -> Iterator["ReplayedStep"]:
        """Step a node through it, once. It is the one that was recorded, or restored from `head.snapshot`."""
        index = self.head.first_step
        for entry in self.frames:
            if not isinstance(entry, Input):
                raise BrokenRecord(f"{self.path}: step {index} has no input")
            expected = next(self.frames, None)
            if not isinstance(expected, Output | None):
                raise BrokenRecord(f"{self.path}: step {index} has no output")
            self._ends_in_a_step = expected is None
            try:
                got = recorded(node.step(entry.happened, entry.now))
            except Exception as error:
                raise StepRaised(index, error) from error
            yield ReplayedStep(index, entry, expected, got, node)
            index += 1


def segments_of(path: Path) -> list[Path]:
    """The segments of a record, oldest first: a file is itself, a folder is what recorders wrote there."""
    return [path] if path.is_file() else sorted(found for found in path.glob("flight-*.tandem") if found.is_file())


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step of a record, done again by `node`."""

    index: int
    input: Input
    expected: Output | None  # None: the record ends here
    got: Output
    node: Node

    @property
    def is_as_recorded(self) -> bool:
        return self.expected is None or same_bytes(self.expected, self.got)


def restored(segment: FlightSegment, make_node: Callable[[NodeSettings], Node]) -> Node:
    """Raises BrokenRecord."""
    settings, snapshot = segment.head.settings, segment.head.snapshot
    try:
        if (size := num_parts(settings)) > len(snapshot):  # each has a byte in it, or more
            raise ValueError(f"settings of {size} parts in {len(snapshot)} bytes")
        if _stated.decode(snapshot).settings != settings:
            raise ValueError("it was taken with other settings")
        node = make_node(settings)
        node.restore(snapshot)
    except Exception as error:  # whatever settings and a snapshot of other code, or with a flipped bit, lead to
        raise BrokenRecord(f"{segment.path}: no node can be made of its snapshot ({error!r})") from error
    return node


class Stated(Struct, frozen=True):
    """What a snapshot says of its node's settings; the rest of it is skipped."""

    settings: NodeSettings


_stated = msgspec.msgpack.Decoder(Stated)


def num_parts(settings: NodeSettings) -> int:
    """The largest number of equal parts that a node is made of from its start, or goes through in a step."""
    tier = settings.host_tier
    num_host_pages = 0 if tier is None else tier.num_pages
    return max(
        settings.num_pages,
        num_host_pages,
        settings.result_slots,
        settings.num_micro_batches,
        settings.cut.num_shards,
    )


def replay(path: Path, make_node: Callable[[NodeSettings], Node]) -> Replay:
    """Do one segment again, from its snapshot."""
    segment = FlightSegment(path)
    return compared(segment, restored(segment, make_node))


def compared(segment: FlightSegment, node: Node) -> Replay:
    """Compare every decision of a segment, byte for byte, up to the first difference."""
    steps = num_events = 0
    for step in segment.steps(node):
        steps += 1
        num_events += len(step.input.happened)
        if not step.is_as_recorded:
            assert step.expected is not None
            return Replay(steps, num_events, Difference(step.index, step.expected, step.got))
    return Replay(steps, num_events, None, segment.is_cut)
