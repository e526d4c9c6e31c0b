"""The flight records of a run: whatever was killed, paused or garbled, every node has to decide the same again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.core.scheduler.node import EngineNode
from tandem.server.node.flight import FlightSegment, replay
from tandem.server.node.record import Record, records_at, replay_through

FOLDER_BYTES = 4_000_000  # of one life of a server: the page is turned in the longer ones
LEAST_WINDOW_DEPTH = 2  # batches overlap


@dataclass(frozen=True)
class Told:
    """One life of one node, done again."""

    server: str
    record: Record
    steps: int
    is_cut: bool  # it was killed
    is_rotated: bool  # it had more than one segment
    differences: tuple[str, ...]


def flags(folder: Path, name: str) -> tuple[str, ...]:
    return ("--flight-record", str(folder / name), "--flight-record-max-bytes", str(FOLDER_BYTES))


def set_aside(folder: Path, name: str) -> None:
    """The life that has ended keeps its record: the next one, on the same flags, would make room by deleting it."""
    life = folder / name
    life.rename(folder / f"{name}.{len(list(folder.glob(f'{name}.*')))}")


def replayed(folder: Path) -> Iterator[Told]:
    """All lives of all servers: as one through their rotations, and each segment from its own snapshot."""
    for server in sorted(folder.iterdir()):
        for record in records_at(server):
            yield told(server.name.partition(".")[0], record)


def told(server: str, record: Record) -> Told:
    first = FlightSegment(record.segments[0]).head
    assert first.settings.window_depth >= LEAST_WINDOW_DEPTH
    whole = replay_through(record, EngineNode)
    parts = [whole, *(replay(path, EngineNode) for path in record.segments[: None if not whole.is_cut else -1])]
    differences = tuple(str(part.difference) for part in parts if part.difference is not None)
    is_rotated = len(record.segments) > 1 or first.first_step > 0
    return Told(server, record, whole.steps, whole.is_cut, is_rotated, differences)


def page(lives: list[Told]) -> str:
    steps = sum(life.steps for life in lives)
    rotated, cut = sum(life.is_rotated for life in lives), sum(life.is_cut for life in lives)
    return f"  records     {len(lives)} lives, {steps} steps decided again; {rotated} rotated, {cut} cut by a kill"
