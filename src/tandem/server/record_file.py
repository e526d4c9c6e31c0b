"""The file of a record, of whatever machine: frames of a 4-byte big-endian length and one msgpack object.

The first is a head, which says which machine it is and holds a snapshot. Then come two frames for each step: what the
machine was given, and what it gave. The last step lacks its second one if it raised, or if the process was killed.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from tandem.server.frames import HEAD_BYTES
from tandem.server.wire import MAX_FRAME_BYTES

Frame = TypeVar("Frame")
Head = TypeVar("Head", bound="RecordHead")
Given = TypeVar("Given", bound=Struct)
Gave = TypeVar("Gave", bound=Struct)


class BrokenRecord(Exception):
    """The file is no record of this version."""


class NothingWritten(BrokenRecord):
    """Not even a snapshot is in the file."""


class StepRaised(Exception):
    """The machine raised, as it may have done when it was recorded: a bug of ours, found again."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__(f"step {step} raises {type(error).__name__}: {error}")


class RecordFrames(Generic[Frame]):
    """Of one file, in order. Never more than one in memory, and never more of it than the file has."""

    def __init__(self, path: Path, decoder: msgspec.msgpack.Decoder[Frame]) -> None:
        self.is_cut = False  # known at the end: the process was killed while it wrote
        self._path = path
        self._read = self._decoded(decoder)

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        """Raises BrokenRecord."""
        return next(self._read)

    def _decoded(self, decoder: msgspec.msgpack.Decoder[Frame]) -> Iterator[Frame]:
        with self._path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while head := file.read(HEAD_BYTES):
                size, left = int.from_bytes(head), left - HEAD_BYTES
                if len(head) < HEAD_BYTES or size > left:
                    self.is_cut = True
                    return
                if size > MAX_FRAME_BYTES:
                    raise BrokenRecord(f"{self._path}: a frame of {size} bytes; at most {MAX_FRAME_BYTES} are written")
                left -= size
                try:
                    yield decoder.decode(file.read(size))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise BrokenRecord(f"{self._path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Difference:
    step: int
    expected: Struct
    got: Struct


@dataclass(frozen=True, slots=True)
class Replay:
    steps: int
    events: int
    difference: Difference | None
    is_cut: bool = False  # the record ends within a frame or a step


def same_bytes(left: Struct, right: Struct) -> bool:
    return msgspec.msgpack.encode(left) == msgspec.msgpack.encode(right)


# --- machines whose record is one segment ----------------------------------------------------------------------------


class RecordHead(Struct, frozen=True):
    format: int
    first_step: int  # steps before this one


@dataclass(frozen=True, slots=True)
class RecordedMachine(Generic[Head, Given, Gave]):
    """How a record of this kind of machine is done again."""

    name: str
    head: type[Head]
    given: type[Given]
    gave: type[Gave]
    begin: Callable[[Head], Callable[[Given, Gave | None], Gave]]  # restores one, and does a step of it again

    def steps(self, path: Path) -> "Iterator[RedoneStep]":
        """Raises BrokenRecord, StepRaised."""
        frames = RecordFrames(path, msgspec.msgpack.Decoder(self.head | self.given | self.gave))
        head = next(frames, None)
        if head is None:
            raise NothingWritten(f"{path}: ends before its first step, so it is no record yet")
        if not isinstance(head, self.head):
            raise BrokenRecord(f"{path}: does not begin as a record of {self.name}")
        redo = self._restored(path, head)
        for index, given in enumerate(frames, head.first_step):
            expected = next(frames, None)
            if not isinstance(given, self.given) or not isinstance(expected, self.gave | None):
                raise BrokenRecord(f"{path}: step {index} has no input, or no output")
            try:
                got = redo(given, expected)
            except Exception as error:
                raise StepRaised(index, error) from error
            yield RedoneStep(index, given, expected, got)

    def replay(self, path: Path) -> Replay:
        """Compare every decision, byte for byte, up to the first difference."""
        num_steps, is_cut = 0, False
        for step in self.steps(path):
            num_steps, is_cut = num_steps + 1, step.expected is None
            if step.expected is not None and not same_bytes(step.expected, step.got):
                return Replay(num_steps, num_steps, Difference(step.index, step.expected, step.got))
        return Replay(num_steps, num_steps, None, is_cut)

    def _restored(self, path: Path, head: Head) -> Callable[[Given, Gave | None], Gave]:
        try:
            return self.begin(head)
        except Exception as error:  # whatever a snapshot of other code, or with a flipped bit, leads to
            raise BrokenRecord(f"{path}: no {self.name} can be made of its snapshot ({error!r})") from error


@dataclass(frozen=True, slots=True)
class RedoneStep:
    index: int
    given: Struct
    expected: Struct | None  # None: the record ends here
    got: Struct


class _AnyHead(Struct):
    type: str


def head_of(path: Path) -> str:
    """The tag of its first frame, which says what machine it is of. Empty: that cannot be read."""
    try:
        return next(RecordFrames(path, msgspec.msgpack.Decoder(_AnyHead)), _AnyHead("")).type
    except BrokenRecord:
        return ""
