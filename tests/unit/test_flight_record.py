"""The flight record of a real node replays to the same decisions, and says so when they are not the same."""

import json
import os
import random
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any  # what a type is made of

import msgspec
import pytest
from msgspec import structs

from tandem.cli.main import main
from tandem.core.batch import BatchOutcome, TokenFlag
from tandem.core.commands import Effects, LaunchBatch
from tandem.core.events import BatchReturned, Event, RequestArrived
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import State
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import NodeSettings, Role, TierSettings
from tandem.core.values import SECOND, Cut, Incarnation, Nanos, RequestId
from tandem.server.channel import frame
from tandem.server.node.flight import (
    FORMAT,
    FlightRecorder,
    FlightSegment,
    Frame,
    Head,
    Input,
    Output,
    replay,
    segments_of,
)
from tandem.server.node.record import NoSuchStep, Record, records_at, replay_through, steps_from
from tandem.server.record_file import BrokenRecord, StepRaised
from tandem.server.record_folder import FLIGHT_NAME, RecordFolder

SETTINGS = NodeSettings(Role.UNIFIED, Incarnation("server", "1"), num_pages=64)
SECRET_TOKEN = 1_234_567
NESTED = b"\x82\xa4type\xa4Head\xa1x" + b"\x91" * 100_000 + b"\xc0"  # in a field that nobody knows
DEEP = len(NESTED).to_bytes(4) + NESTED
HEAD = frame(Head(FORMAT, 0, SETTINGS, EngineNode(SETTINGS).snapshot()))
BOUND = 48_000
STEP = 2_000  # more than any step here takes


class World:
    """A node and a worker that answers every plan with the same token."""

    def __init__(self, folder: Path, *, max_bytes: int = 1 << 20, life: int = 1) -> None:
        settings = msgspec.structs.replace(SETTINGS, incarnation=Incarnation("server", str(life)))
        self.node = EngineNode(settings)
        self.notes: list[str] = []
        self.recorder = FlightRecorder(
            folder, settings, self.node.snapshot, max_bytes=max_bytes, note=self.notes.append
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
            self.serve_one(number, tokens=tokens)

    def serve_one(self, number: int, *, tokens: int) -> None:
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
                    prompt_extras=((request.id, b"prompt score"),) if launch.plan.rows else (),
                )
                returned.append(BatchReturned(outcome))
            effects = self.step(*returned)


def frames_of(path: Path) -> list[Frame]:
    segment = FlightSegment(path)
    return [segment.head, *segment.frames]


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
    frames = frames_of(segment)
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


def test_segments_are_kept_within_the_bound_and_each_replays_alone(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=BOUND)
    world.serve(requests=40, tokens=8)
    world.recorder.close()
    segments = segments_of(tmp_path)
    assert len(segments) > 2
    assert BOUND // 2 < sum(segment.stat().st_size for segment in segments) <= BOUND + STEP
    steps = 0
    for segment in segments:
        result = replay(segment, EngineNode)
        assert result.difference is None
        steps += result.steps
    assert FlightSegment(segments[0]).head.first_step + steps == world.steps


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


def test_what_a_node_that_rests_has_done_is_on_disk(tmp_path: Path) -> None:
    """It may rest for long, and whatever kills it then leaves a whole record."""
    world = World(tmp_path)
    (segment,) = segments_of(tmp_path)
    for requests in (0, 1, 2):
        world.serve(requests=requests, tokens=5)
        result = replay(segment, EngineNode)
        assert (result.steps, result.is_cut) == (world.steps, False)
    world.recorder.close()


def test_a_record_that_ends_within_a_step_is_cut_and_one_that_ends_behind_it_is_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=1, tokens=5)
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    assert not replay(segment, EngineNode).is_cut
    segment.write_bytes(b"".join(map(frame, frames_of(segment)[:-1])))  # without what it came to
    result = replay(segment, EngineNode)
    assert (result.is_cut, result.difference, result.steps) == (True, None, world.steps)


def test_a_step_that_raises_is_on_record_and_raises_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serve(requests=1, tokens=2)
    world.now = Nanos(0)  # a clock that goes backwards: our bug
    with pytest.raises(AssertionError):
        world.step()
    world.recorder.close()
    (segment,) = segments_of(tmp_path)
    assert isinstance(frames_of(segment)[-1], Input)
    with pytest.raises(StepRaised, match=f"step {world.steps} raises AssertionError"):
        replay(segment, EngineNode)


def test_a_disk_that_is_full_ends_the_record_and_not_the_node(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=4000)
    world.recorder._folder = RecordFolder(tmp_path / "gone", FLIGHT_NAME)  # where the next segment cannot be written
    world.serve(requests=3, tokens=20)
    world.recorder.close()
    (note,) = world.notes
    assert "the flight record ends here" in note
    assert replay(segments_of(tmp_path)[0], EngineNode).difference is None


@pytest.mark.parametrize("data", [b"", b"hello, this is no record", frame(Input(Nanos(0), ())), DEEP])
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


def test_a_snapshot_of_other_fields_or_states_is_a_new_format() -> None:
    """One without a queue for a state makes a node that raises at its first request; one without a field, a node that
    decides otherwise. If this fails, FORMAT has to be a new number, and then these two are what they are now."""
    assert (FORMAT, fingerprint(NodeState), len(State)) == (9, "7f78bc47ce7e1f07", 13)


def fingerprint(kind: type) -> str:
    """Of the names of all fields of what it is made of."""
    found: dict[str, list[str]] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(kind)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, tuple):
            waiting += one
        elif isinstance(one, msgspec.inspect.Field):
            waiting.append(one.type)
        elif hasattr(one, "cls") and hasattr(one, "fields"):
            name = one.cls.__qualname__
            waiting += () if name in found else one.fields
            found[name] = [field.name for field in one.fields]
        elif isinstance(one, msgspec.inspect.Type):
            waiting += structs.astuple(one)
    return sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


@pytest.mark.parametrize("snapshot", [b"", b"nope", msgspec.msgpack.encode({})])
def test_a_snapshot_that_makes_no_node_is_told_in_one_line(
    tmp_path: Path, snapshot: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flight-1-1-000000.tandem"
    path.write_bytes(frame(Head(FORMAT, 0, SETTINGS, snapshot)))
    assert main(["replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert "no node can be made of its snapshot" in error
    assert error.count("\n") == 1


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


# --- a record of several segments ------------------------------------------------------------------------------------


def rotated(tmp_path: Path) -> tuple[World, Record]:
    """Served long enough that segments have gone."""
    world = World(tmp_path, max_bytes=BOUND)
    world.serve(requests=40, tokens=8)
    world.recorder.close()
    (record,) = records_at(tmp_path)
    return world, record


def first_step(segment: Path) -> int:
    return FlightSegment(segment).head.first_step


def test_one_node_goes_through_a_rotation_with_the_same_decisions(tmp_path: Path) -> None:
    world, record = rotated(tmp_path)
    result = replay_through(record, EngineNode)
    assert len(record.segments) > 2
    assert result.difference is None
    assert not result.is_cut
    assert first_step(record.segments[0]) + result.steps == world.steps


def test_a_bound_below_the_size_of_a_snapshot_does_not_turn_the_page_at_every_step(tmp_path: Path) -> None:
    world = World(tmp_path, max_bytes=100)
    world.serve(requests=20, tokens=8)
    world.recorder.close()
    (record,) = records_at(tmp_path)
    assert replay(record.segments[0], EngineNode).steps > 5
    assert replay_through(record, EngineNode).difference is None


def test_any_segment_stands_for_its_record(tmp_path: Path) -> None:
    _, record = rotated(tmp_path)
    another_life = tmp_path / "flight-2-77-000000.tandem"
    another_life.write_bytes(record.segments[0].read_bytes())
    assert [records_at(segment) for segment in record.segments] == [[record]] * len(record.segments)
    assert [found.name for found in records_at(tmp_path)] == [record.name, "flight-2-77"]


def test_a_difference_behind_the_rotation_is_found_at_its_step(tmp_path: Path) -> None:
    _, record = rotated(tmp_path)
    frames = frames_of(record.segments[1])
    number = next(index for index, entry in enumerate(frames) if isinstance(entry, Output) and entry.commands)
    changed = frames[number]
    assert isinstance(changed, Output)
    frames[number] = Output((), changed.wake_at)
    record.segments[1].write_bytes(b"".join(map(frame, frames)))
    difference = replay_through(record, EngineNode).difference
    assert difference is not None
    assert difference.step == first_step(record.segments[1]) + (number - 2) // 2


def test_a_segment_that_is_missing_between_two_is_named(tmp_path: Path) -> None:
    _, record = rotated(tmp_path)
    frames = frames_of(record.segments[0])
    record.segments[0].write_bytes(b"".join(map(frame, frames[:-2])))
    with pytest.raises(BrokenRecord, match=r"000\d+.tandem: begins at step \d+; \d+ is the next"):
        replay_through(record, EngineNode)


@pytest.mark.parametrize("kept", [-3, -30])
def test_a_record_of_a_killed_node_says_that_it_is_cut(tmp_path: Path, kept: int) -> None:
    world, record = rotated(tmp_path)
    data = record.segments[-1].read_bytes()
    record.segments[-1].write_bytes(data[:kept])
    result = replay_through(record, EngineNode)
    assert result.is_cut
    assert result.difference is None
    assert first_step(record.segments[0]) + result.steps in (world.steps, world.steps - 1)


def test_a_node_that_was_killed_while_it_turned_the_page_has_a_record(tmp_path: Path) -> None:
    _, record = rotated(tmp_path)
    record.segments[-1].write_bytes(record.segments[-1].read_bytes()[:100])  # within the snapshot
    result = replay_through(record, EngineNode)
    assert result.is_cut
    assert result.difference is None
    assert result.steps == sum(replay(segment, EngineNode).steps for segment in record.segments[:-1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_is_reached_from_the_nearest_snapshot_before_it(tmp_path: Path, which: int) -> None:
    _, record = rotated(tmp_path)
    built: list[bytes] = []

    class Watched(EngineNode):
        def restore(self, snapshot: bytes) -> None:
            built.append(snapshot)
            super().restore(snapshot)

    wanted = first_step(record.segments[which]) + 1  # inside the segment
    steps = list(steps_from(record, wanted, Watched))
    assert built == [FlightSegment(record.segments[which]).head.snapshot]
    assert steps[0].index == wanted
    assert [step.index for step in steps] == list(range(wanted, wanted + len(steps)))
    assert all(step.is_as_recorded for step in steps)


def test_a_step_that_the_record_has_lost_or_never_had_is_told_from_one_it_has(tmp_path: Path) -> None:
    world, record = rotated(tmp_path)
    with pytest.raises(NoSuchStep, match="no step 0 any more: it begins at"):
        next(steps_from(record, 0, EngineNode))
    with pytest.raises(NoSuchStep, match=f"it ends at {world.steps - 1}"):
        next(steps_from(record, world.steps, EngineNode))


def test_replay_at_a_step_prints_it_and_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, record = rotated(tmp_path)
    wanted = world.steps - 3
    assert main(["replay", str(tmp_path), "--at", str(wanted)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(f" server.1 step {wanted}")
    assert f"state after step {wanted}:" in printed
    assert any(line.endswith(f" server.1 step {world.steps - 1}") for line in printed)
    assert main(["replay", str(record.segments[0]), "--at", str(wanted), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == wanted
    assert document["is_as_recorded"] is True


def test_replay_says_what_each_segment_and_the_whole_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, record = rotated(tmp_path)
    record.segments[-1].write_bytes(record.segments[-1].read_bytes()[:-3])
    assert main(["replay", str(tmp_path)]) == 0
    *others, last, whole = capsys.readouterr().out.splitlines()
    assert len(others) == len(record.segments) - 1
    assert all(line.endswith("events: identical") for line in others)
    assert last.endswith("events: identical, then it is cut: the process was killed while it wrote")
    assert whole.startswith(f"{record.name}, {len(record.segments)} segments as one: ")
    assert main(["replay", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["identical"] is True
    assert [segment["cut"] for segment in document["segments"]] == [False] * len(others) + [True]
    assert document["records"][0]["steps"] == world.steps - first_step(record.segments[0])


def test_replay_of_a_folder_of_several_records_asks_which_one_has_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, record = rotated(tmp_path)
    (tmp_path / "flight-2-77-000000.tandem").write_bytes(record.segments[0].read_bytes())
    assert main(["replay", str(tmp_path), "--at", "3"]) == 1
    assert capsys.readouterr().err.startswith("tandem: error: 2 records are here")


def test_who_was_killed_before_a_step_was_written_makes_no_difference_among_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rotated(tmp_path)
    empty = tmp_path / "fault-node-2-77-000000.tandem"
    empty.write_bytes(b"")
    assert main(["replay", str(tmp_path)]) == 0
    assert f"{empty}: ends before its first step" in capsys.readouterr().out
    assert main(["replay", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True
    assert main(["replay", str(empty)]) == 1
    empty.write_bytes(frame(Head(FORMAT, 0, SETTINGS, b"nope")))
    assert main(["replay", str(tmp_path)]) == 1


# --- the folder ------------------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("flight-*"))


def test_the_bound_is_the_folders_over_many_lives(tmp_path: Path) -> None:
    for life in range(1, 8):
        world = World(tmp_path, max_bytes=BOUND, life=life)
        world.serve(requests=30, tokens=8)
        world.recorder.close()
        assert size_of(tmp_path) <= BOUND + STEP
        newest = records_at(tmp_path)[-1]
        assert newest.name.startswith(f"flight-{life}-")
        assert replay_through(newest, EngineNode).difference is None


def test_the_oldest_go_first_and_the_running_nodes_own_last(tmp_path: Path) -> None:
    for life, age in ((900, 3), (800, 2), (700, 1)):  # by their age, not by their names
        path = tmp_path / f"flight-{life}-5-000000.tandem"
        path.write_bytes(bytes(BOUND // 4))
        os.utime(path, ns=(10**9 * (10 - age), 10**9 * (10 - age)))
    world = World(tmp_path, max_bytes=BOUND, life=1)
    gone = []
    for number in range(60):
        world.serve_one(number, tokens=8)
        there = {path.name for path in tmp_path.iterdir()}
        for life in (900, 800, 700):
            if life not in gone and f"flight-{life}-5-000000.tandem" not in there:
                gone.append(life)
        own = sorted(name for name in there if name.startswith("flight-1-"))
        assert len(gone) == 3 or own[0].endswith("-000000.tandem"), "its own goes when nothing else is left"
    world.recorder.close()
    assert gone == [900, 800, 700]


def test_two_that_write_at_once_leave_each_other_what_they_write(tmp_path: Path) -> None:
    worlds = [World(tmp_path, max_bytes=BOUND, life=life) for life in (1, 2)]
    for number in range(60):
        for world in worlds:
            world.serve_one(number, tokens=8)
        assert size_of(tmp_path) <= BOUND + 2 * STEP
    for world in worlds:
        world.recorder.close()
        assert world.notes == []
    records = records_at(tmp_path)
    assert [replay_through(record, EngineNode).difference for record in records] == [None, None]


def test_what_another_node_is_writing_stays_however_old_it_is(tmp_path: Path) -> None:
    quiet = World(tmp_path, max_bytes=BOUND, life=1)
    quiet.serve_one(0, tokens=2)
    (segment,) = segments_of(tmp_path)
    os.utime(segment, ns=(1, 1))
    busy = World(tmp_path, max_bytes=BOUND, life=2)
    busy.serve(requests=60, tokens=8)
    assert segment.exists()
    quiet.recorder.close()
    busy.serve(requests=20, tokens=8)
    assert not segment.exists(), "nobody writes it any more"
    busy.recorder.close()


def test_what_is_somebody_elses_is_never_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(BOUND))
    folder = tmp_path / "records"
    folder.mkdir()
    names = [
        "notes.txt",
        "flight-1.tandem",
        "flight-1-1-1.tandem",
        "flight-g-1-000000.tandem",
        "flight-1-1-000000.tandem~",
    ]
    names += ["xflight-1-1-000000.tandem", "flight-1-1-000000.tandem.gz", "flight-1-1-000001\n.tandem"]
    for name in names:
        (folder / name).write_bytes(bytes(BOUND))
        os.utime(folder / name, ns=(1, 1))
    (folder / "flight-1-2-000000.tandem").symlink_to(outside)
    (folder / "flight-1-3-000000.tandem").mkdir()
    os.mkfifo(folder / "flight-1-4-000000.tandem")
    world = World(folder, max_bytes=BOUND, life=9)
    world.serve(requests=40, tokens=8)
    world.recorder.close()
    there = {path.name for path in folder.iterdir()}
    assert there >= {*names, *(f"flight-1-{number}-000000.tandem" for number in (2, 3, 4))}
    assert outside.stat().st_size == BOUND


def test_a_segment_is_made_anew_and_for_its_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        world = World(folder)
    finally:
        os.umask(before)
    (segment,) = segments_of(folder)
    assert segment.stat().st_mode & 0o777 == 0o600
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}
    world.recorder.close()


@pytest.mark.parametrize("is_link", [False, True])
def test_what_waits_under_the_name_of_the_next_segment_is_not_written_to(tmp_path: Path, is_link: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "records"
    folder.mkdir()
    trap = folder / f"flight-1-{os.getpid()}-000001.tandem"
    if is_link:
        trap.symlink_to(victim)
    else:
        os.link(victim, trap)
    world = World(folder, max_bytes=BOUND)
    world.serve(requests=40, tokens=8)
    world.recorder.close()
    assert victim.read_text() == "precious"
    (note,) = world.notes
    assert "the flight record ends here" in note


# --- records of others -----------------------------------------------------------------------------------------------


def told(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that `tandem replay` ends with."""
    assert main(["replay", str(path), *flags]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("tandem: error: ")
    assert printed.err.count("\n") == 1
    assert printed.err[:-1].isprintable()
    assert len(printed.err) < 10_000
    return printed.err


HUGE = [
    msgspec.structs.replace(SETTINGS, **changed)
    for changed in (
        {"num_pages": 1 << 50},
        {"result_slots": 1 << 50},
        {"num_micro_batches": 1 << 50},
        {"cut": Cut(1 << 50)},
        {"host_tier": TierSettings(1 << 50)},
    )
]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff" + b"x" * 100,
        (1 << 31).to_bytes(4) + b"x" * 100,
        frame(Input(Nanos(0), ())),
        DEEP,
        (5).to_bytes(4) + b"\xdd\xff\xff\xff\xff",
        (5).to_bytes(4) + b"\xc6\xff\xff\xff\xff",
        b"\0\0\0\0" * 1000,
        frame(Head(FORMAT, -(1 << 62), SETTINGS, b"")),
        *(frame(Head(FORMAT, 0, settings, EngineNode(SETTINGS).snapshot())) for settings in HUGE),
        frame(Head(FORMAT, 0, SETTINGS, EngineNode(msgspec.structs.replace(SETTINGS, cut=Cut(1 << 50))).snapshot())),
        HEAD + frame(Input(Nanos(0), ())) + frame(Input(Nanos(0), ())),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--at", "0")])
def test_a_record_that_was_made_to_do_harm_is_told_in_one_line(
    tmp_path: Path,
    data: bytes,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.cli.replay.MAX_MEMORY_BYTES", 64 << 20)
    path = tmp_path / "flight-1-1-000000.tandem"
    path.write_bytes(data)
    told(path, capsys, *flags)


def test_a_file_that_claims_to_be_huge_is_not_read_into_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flight-1-1-000000.tandem"
    with path.open("wb") as file:
        file.write((0xFFFFFFF0).to_bytes(4))
        file.truncate(8 << 30)  # sparse: takes no space
    assert "a frame of 4294967280 bytes" in told(path, capsys)


def test_every_flipped_byte_of_a_record_is_told_in_a_line_or_makes_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "good")
    world.serve(requests=2, tokens=3)
    world.recorder.close()
    (segment,) = segments_of(tmp_path / "good")
    data = bytearray(segment.read_bytes())
    path = tmp_path / "flight-1-1-000000.tandem"
    draw = random.Random(7)
    for _ in range(150):
        place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        data[place] ^= bit
        path.write_bytes(data)
        assert main(["replay", str(path)]) in (0, 1)
        error = capsys.readouterr().err
        assert error.count("\n") <= 1
        assert "Traceback" not in error
        data[place] ^= bit


def test_names_in_a_record_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = msgspec.structs.replace(SETTINGS, incarnation=Incarnation("\x1b[2J\nforged", 1))
    node = EngineNode(settings)
    path = tmp_path / "flight-1-1-000000.tandem"
    step = frame(Input(Nanos(5), ())) + frame(Output((), None))
    path.write_bytes(frame(Head(FORMAT, 0, settings, node.snapshot())) + step)
    main(["replay", str(path), "--at", "0"])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert not any(line.startswith("forged") for line in printed.splitlines())
