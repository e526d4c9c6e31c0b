"""A flight record as a whole: the segments that one life of a node has left, oldest first.

The first segment that is still there begins with a snapshot, and so does every later one. A replay goes through all of
them with one node; to see one step, it begins at the nearest snapshot before that step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.core.settings import NodeSettings
from tandem.ports import Node
from tandem.server.node.flight import FlightSegment, ReplayedStep, compared, restored, segments_of
from tandem.server.record_file import BrokenRecord, NothingWritten, Replay

MakeNode = Callable[[NodeSettings], Node]


class NoSuchStep(Exception):
    """The record does not have it, or not any more."""


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    segments: tuple[Path, ...]


def records_at(path: Path) -> list[Record]:
    """All records of a folder, those that faults have left at the end; of a segment the record that it belongs to."""
    folder, wanted = (path.parent, _name(path)) if path.is_file() else (path, None)
    found: dict[str, list[Path]] = {}
    for segment in segments_of(folder):
        found.setdefault(_name(segment), []).append(segment)
    if wanted is not None and wanted not in found:  # it was given a name of its own
        return [Record(path.name, (path,))]
    records = [Record(name, tuple(segments)) for name, segments in found.items() if wanted in (None, name)]
    faults = folder.glob("fault-*.tandem") if wanted is None else ()
    return records + [Record(path.name, (path,)) for path in sorted(faults) if path.is_file()]


def replay_through(record: Record, make_node: MakeNode) -> Replay:
    """One node from the first snapshot to the end: what a rotation left out would show. Raises as `replay` does."""
    node: Node | None = None
    total, next_step = Replay(0, 0, None), 0
    for segment in _segments(record):
        if node is None:
            node, next_step = restored(segment, make_node), segment.head.first_step
        if segment.head.first_step != next_step:
            raise BrokenRecord(
                f"{segment.path}: begins at step {segment.head.first_step}; {next_step} is the next of its record"
            )
        part = compared(segment, node)
        next_step += part.steps
        total = replace(part, steps=total.steps + part.steps, events=total.events + part.events)
        if part.difference is not None:
            return total
    return replace(total, is_cut=total.is_cut or _has_torn_end(record))


def steps_from(record: Record, index: int, make_node: MakeNode) -> Iterator[ReplayedStep]:
    """Step `index` and those after it, from the nearest snapshot before it. Raises NoSuchStep."""
    segments = list(_segments(record))
    starts = [number for number, segment in enumerate(segments) if segment.head.first_step <= index]
    if not starts:
        raise NoSuchStep(f"{record.name} has no step {index} any more: it begins at {segments[0].head.first_step}")
    node = restored(segments[starts[-1]], make_node)
    last = segments[starts[-1]].head.first_step - 1
    for segment in segments[starts[-1] :]:
        for step in segment.steps(node):
            last = step.index
            if last >= index:
                yield step
    if last < index:
        raise NoSuchStep(f"{record.name} has no step {index}: it ends at {last}")


def _segments(record: Record) -> Iterator[FlightSegment]:
    """A last one that was just being begun when the process was killed is left out."""
    for path in record.segments:
        try:
            yield FlightSegment(path)
        except NothingWritten:
            if path != record.segments[-1] or len(record.segments) == 1:
                raise


def _has_torn_end(record: Record) -> bool:
    try:
        FlightSegment(record.segments[-1])
    except NothingWritten:
        return True
    return False


def _name(segment: Path) -> str:
    """`flight-INCARNATION-PROCESS-NUMBER.tandem` without the number: one life of one node."""
    return segment.stem.rpartition("-")[0]
