"""The flight record of a real node replays to the same decisions, and says so when they are not the same."""

from array import array
from pathlib import Path

import msgspec
import pytest

from tandem.core.batch import BatchOutcome, TokenFlag
from tandem.core.commands import Effects, LaunchBatch
from tandem.core.events import BatchReturned, Event, RequestArrived
from tandem.core.request import Request
from tandem.core.sched.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Incarnation, Nanos, RequestId
from tandem.server.channel import frame
from tandem.server.node.flight import (
    BrokenRecord,
    FlightRecorder,
    Head,
    Input,
    Output,
    StepRaised,
    read_segment,
    replay,
    segments_of,
)

SETTINGS = NodeSettings(Role.UNIFIED, Incarnation("server", 1), num_pages=64)
SECRET_TOKEN = 1_234_567


class World:
    """A node and a worker that answers every plan with the same token."""

    def __init__(self, folder: Path, *, max_bytes: int = 1 << 20) -> None:
        self.node = EngineNode(SETTINGS)
        self.notes: list[str] = []
        self.recorder = FlightRecorder(
            folder, SETTINGS, self.node.snapshot, max_bytes=max_bytes, note=self.notes.append
        )
        self.now = Nanos(SECOND)
        self.steps = 0

    def step(self, *events: Event) -> Effects:
        self.now = Nanos(self.now + 1000)
        self.recorder.before(self.now, events)
        effects = self.node.step(events, self.now)
        self.recorder.after(self.now, events, effects)
        self.steps += 1
        return effects

    def serve(self, *, requests: int, tokens: int) -> None:
        """`requests` one after the other, each to its end."""
        for number in range(requests):
            request = Request(RequestId(number + 1), f"rid-{number}", 20, (bytes(16),), tokens, Nanos(600 * SECOND))
            effects = self.step(RequestArrived(request))
            while launches := [command for command in effects.commands if isinstance(command, LaunchBatch)]:
                returned = []
                for launch in launches:
                    rows = sum(row.samples for row in launch.plan.rows) + launch.plan.decodes
                    outcome = BatchOutcome(
                        launch.plan.id,
                        launch.plan.iteration,
                        array("i", [SECRET_TOKEN] * rows).tobytes(),
                        bytes(rows),
                        extras=((request.id, b"score"),) if rows else (),
                    )
                    returned.append(BatchReturned(outcome))
                effects = self.step(*returned)


def test_a_record_replays_to_the_same_decisions(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=3, tokens=5)
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    result = replay(segment, EngineNode)
    assert result.difference is None
    assert result.steps == world.steps


def test_another_decision_is_found_at_its_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=1, tokens=5)
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    frames = list(read_segment(segment))
    outputs = [index for index, entry in enumerate(frames) if isinstance(entry, Output)]
    changed = frames[outputs[2]]
    assert isinstance(changed, Output)
    frames[outputs[2]] = Output((), changed.wake_at)
    segment.write_bytes(b"".join(map(frame, frames)))
    difference = replay(segment, EngineNode).difference
    assert difference is not None
    assert difference.step == 2
    assert difference.expected.commands == ()
    assert difference.got == changed


def test_no_token_and_no_score_is_in_a_record(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=2, tokens=5)
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    data = segment.read_bytes()
    assert array("i", [SECRET_TOKEN]).tobytes() not in data
    assert b"score" not in data


def test_two_segments_are_kept_within_the_bound_and_each_replays_alone(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=24_000)
    world.serve(requests=40, tokens=8)
    world.recorder.close()
    segments = segments_of(tmp_path)
    assert len(segments) == 2
    assert sum(segment.stat().st_size for segment in segments) < 2 * 24_000
    steps = 0
    for segment in segments:
        result = replay(segment, EngineNode)
        assert result.difference is None
        steps += result.steps
    head = next(read_segment(segments[0]))
    assert isinstance(head, Head)
    assert head.first_step + steps == world.steps


def test_a_record_that_was_cut_replays_up_to_the_cut(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=1, tokens=5)
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    data = segment.read_bytes()
    segment.write_bytes(data[:-3])
    result = replay(segment, EngineNode)
    assert result.difference is None
    assert result.steps == world.steps


def test_a_step_that_raises_is_on_record_and_raises_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=1, tokens=2)
    world.now = Nanos(0)  # a clock that goes backwards: our bug
    with pytest.raises(AssertionError):
        world.step()
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    assert isinstance(list(read_segment(segment))[-1], Input)
    with pytest.raises(StepRaised, match=f"step {world.steps} raises AssertionError"):
        replay(segment, EngineNode)


def test_a_disk_that_is_full_ends_the_record_and_not_the_node(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=4000)
    world.recorder._folder = tmp_path / "gone"  # where the next segment cannot be written
    world.serve(requests=3, tokens=20)
    world.recorder.close()
    (note,) = world.notes
    assert "the flight record ends here" in note
    assert replay(segments_of(tmp_path)[0], EngineNode).difference is None


@pytest.mark.parametrize("data", [b"", b"hello, this is no record", frame(Input(Nanos(0), ()))])
def test_what_is_no_record_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "flight-x.tandem"
    path.write_bytes(data)
    with pytest.raises(BrokenRecord):
        replay(path, EngineNode)


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flight-x.tandem"
    path.write_bytes(frame(Head(99, 0, SETTINGS, msgspec.msgpack.encode(None))))
    with pytest.raises(BrokenRecord, match="format"):
        replay(path, EngineNode)


def test_flags_tell_the_node_what_it_needs_and_stay_in_the_record(tmp_path: Path) -> None:
    world = World(tmp_path)
    request = Request(RequestId(1), "rid", 20, (bytes(16),), 50, Nanos(600 * SECOND))
    (launch,) = world.step(RequestArrived(request)).commands[:1]
    assert isinstance(launch, LaunchBatch)
    outcome = BatchOutcome(launch.plan.id, launch.plan.iteration, bytes(4), bytes([TokenFlag.EOS]))
    world.step(BatchReturned(outcome))
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    assert replay(segment, EngineNode).difference is None
