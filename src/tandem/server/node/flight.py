"""The flight recorder: what a node was told and what it decided, so that `tandem replay` can decide it again.

A record is some segment files in a folder; a segment is frames of a 4-byte big-endian length and one msgpack object:
a `Head` (settings and a snapshot of the node), then per step an `Input`, written before the step so that a step that
raises is on record, and an `Output`. The bound is that of the folder: of all records there, the oldest segments go. A
segment takes a quarter of it, but holds at least as many bytes of steps as its snapshot takes, or a small bound would
turn the page every step; and the last two of a running node stay whatever the bound.

No text is in it: token ids and their scores are replaced by zeros of the same length. The core never looks at them,
so a replay decides the same. (A snapshot may hold the first token of a request that was being handed over.)
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from tandem.core.batch import BatchPlan
from tandem.core.commands import Command, Effects, EmitTokens, LaunchBatch, Tell
from tandem.core.disagg.messages import Message, Offer
from tandem.core.events import BatchReturned, Event, PeerSaid
from tandem.core.settings import NodeSettings
from tandem.core.values import SECOND, Nanos, RequestId
from tandem.ports import Node
from tandem.server.channel import HEAD_BYTES, append_frame
from tandem.server.node.record_folder import RecordFolder
from tandem.server.wire import MAX_FRAME_BYTES

FORMAT = 3
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


def event_without_tokens(event: Event) -> Event:
    """The same with every token id and score zeroed, lengths kept."""
    match event:
        case BatchReturned(outcome):
            return BatchReturned(
                structs.replace(outcome, tokens=bytes(len(outcome.tokens)), extras=_zeroed(outcome.extras))
            )
        case PeerSaid():
            return structs.replace(event, message=_without_result(event.message))
        case _:
            return event


def command_without_tokens(command: Command) -> Command:
    """The same with every token id and score zeroed, lengths kept."""
    match command:
        case EmitTokens():
            return structs.replace(command, tokens=bytes(len(command.tokens)), extras=_zeroed(command.extras))
        case LaunchBatch(plan) if plan.join or any(row.token for row in plan.rows):
            return LaunchBatch(_without_first_tokens(plan))
        case Tell():
            return structs.replace(command, message=_without_result(command.message))
        case _:
            return command


def _zeroed(extras: tuple[tuple[RequestId, bytes], ...]) -> tuple[tuple[RequestId, bytes], ...]:
    return tuple((key, bytes(len(extra))) for key, extra in extras)


def _without_first_tokens(plan: BatchPlan) -> BatchPlan:
    """A first token that another node sampled comes with the join, or with the row after a retraction."""
    return structs.replace(
        plan,
        rows=tuple(structs.replace(row, token=bytes(len(row.token))) if row.token else row for row in plan.rows),
        join=tuple(structs.replace(join, token=bytes(len(join.token))) for join in plan.join),
    )


def _without_result(message: Message) -> Message:
    if not isinstance(message, Offer) or message.result is None:
        return message
    result = message.result
    masked = structs.replace(result, token=bytes(len(result.token)), extra=bytes(len(result.extra)))
    return structs.replace(message, result=masked)


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
        self._folder = RecordFolder(folder)
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
                self._write(Input(now, tuple(event_without_tokens(event) for event in happened)))

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
        self._write(Head(FORMAT, self._steps, self._settings, self._snapshot()))
        self._head_bytes = self._written
        self._file.flush()  # before older ones go: whatever kills us now leaves a beginning
        room = self._max_bytes - self._segment_bytes + self._written  # for what is there; this one may grow
        self._folder.make_room(room, segment_bytes=self._segment_bytes, own=self._name, kept=last_two)

    def _write(self, frame: Frame) -> None:
        self._scratch.clear()
        append_frame(self._scratch, frame)
        self._file.write(self._scratch)
        self._written += len(self._scratch)


class BrokenRecord(Exception):
    """The file is no flight record of this version."""


class NothingWritten(BrokenRecord):
    """Not even a snapshot is in the file."""


class StepRaised(Exception):
    """The node raised, as it may have done when it was recorded: a bug of ours, found again."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__(f"step {step} raises {type(error).__name__}: {error}")


class Segment:
    """One file of a record, read in order. Raises BrokenRecord if it does not begin as one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_cut = False  # known at the end: the process was killed while it wrote
        self.frames = self._read()
        head = next(self.frames, None)
        if head is None:
            raise NothingWritten(f"{path}: ends before its first step, so it is no flight record yet")
        if not isinstance(head, Head) or head.format != FORMAT:
            raise BrokenRecord(f"{path}: does not begin as a flight record of format {FORMAT}")
        self.head = head

    def steps(self, node: Node) -> Iterator["Step"]:
        """Step a node through it, once. It is the one that was recorded, or restored from `head.snapshot`."""
        index = self.head.first_step
        for entry in self.frames:
            if not isinstance(entry, Input):
                raise BrokenRecord(f"{self.path}: step {index} has no input")
            expected = next(self.frames, None)
            if not isinstance(expected, Output | None):
                raise BrokenRecord(f"{self.path}: step {index} has no output")
            self.is_cut = self.is_cut or expected is None
            try:
                got = recorded(node.step(entry.happened, entry.now))
            except Exception as error:
                raise StepRaised(index, error) from error
            yield Step(index, entry, expected, got, node)
            index += 1

    def _read(self) -> Iterator[Frame]:
        """Never more than a frame in memory, and never more of it than the file has."""
        decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
        with self.path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while head := file.read(HEAD_BYTES):
                size, left = int.from_bytes(head), left - HEAD_BYTES
                if len(head) < HEAD_BYTES or size > left:
                    self.is_cut = True
                    return
                if size > MAX_FRAME_BYTES:
                    raise BrokenRecord(f"{self.path}: a frame of {size} bytes; at most {MAX_FRAME_BYTES} are written")
                left -= size
                try:
                    yield decoder.decode(file.read(size))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BrokenRecord(f"{self.path}: {error}") from error


def read_segment(path: Path) -> Iterator[Frame]:
    """Frames in order. A last frame that was cut, because the process was killed, is left out."""
    segment = Segment(path)
    yield segment.head
    yield from segment.frames


def segments_of(path: Path) -> list[Path]:
    """The segments of a record, oldest first: a file is itself, a folder is what recorders wrote there."""
    return [path] if path.is_file() else sorted(found for found in path.glob("flight-*.tandem") if found.is_file())


@dataclass(frozen=True, slots=True)
class Difference:
    step: int
    expected: Output
    got: Output


@dataclass(frozen=True, slots=True)
class Replay:
    steps: int
    events: int
    difference: Difference | None
    is_cut: bool = False  # the record ends within a frame or a step


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a record, done again by `node`."""

    index: int
    input: Input
    expected: Output | None  # None: the record ends here
    got: Output
    node: Node

    @property
    def is_as_recorded(self) -> bool:
        return self.expected is None or _same_bytes(self.expected, self.got)


def replayed_steps(path: Path, make_node: Callable[[NodeSettings], Node]) -> Iterator[Step]:
    """Restore the node of one segment and step it through again. Raises BrokenRecord, StepRaised."""
    segment = Segment(path)
    yield from segment.steps(restored(segment, make_node))


def restored(segment: Segment, make_node: Callable[[NodeSettings], Node]) -> Node:
    """Raises BrokenRecord."""
    try:
        node = make_node(segment.head.settings)
        node.restore(segment.head.snapshot)
    except Exception as error:  # whatever settings and a snapshot of other code, or with a flipped bit, lead to
        raise BrokenRecord(f"{segment.path}: no node can be made of its snapshot ({error!r})") from error
    return node


def replay(path: Path, make_node: Callable[[NodeSettings], Node]) -> Replay:
    """Do one segment again, from its snapshot."""
    segment = Segment(path)
    return compared(segment, restored(segment, make_node))


def compared(segment: Segment, node: Node) -> Replay:
    """Compare every decision of a segment, byte for byte, up to the first difference."""
    steps = num_events = 0
    for step in segment.steps(node):
        steps += 1
        num_events += len(step.input.happened)
        if not step.is_as_recorded:
            assert step.expected is not None
            return Replay(steps, num_events, Difference(step.index, step.expected, step.got))
    return Replay(steps, num_events, None, segment.is_cut)


def _same_bytes(left: Output, right: Output) -> bool:
    return msgspec.msgpack.encode(left) == msgspec.msgpack.encode(right)
