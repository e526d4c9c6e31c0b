"""What the edge has decided is decided again from its record."""

import json
from pathlib import Path

import msgspec
import pytest

from tandem.cli.main import main
from tandem.core.commands import FailRequest
from tandem.core.request import Request
from tandem.core.values import SECOND, Cause, Nanos, RequestId, Room
from tandem.server.api.edge_record import EDGE, EdgeRing, restored, snapshot
from tandem.server.api.live_requests import IncomingRequest, LiveRequests, Placed
from tandem.server.channel import frame
from tandem.server.record_file import BrokenRecord, StepRaised, head_of

STALL_NS = 5 * SECOND


class Edge:
    def __init__(self, *, num_ranks: int = 2, segment_bytes: int = 1 << 20) -> None:
        self.requests = LiveRequests(num_ranks, STALL_NS)
        self.faults: list[str] = []
        self.ring = EdgeRing(self.requests, failed=self.faults.append, segment_bytes=segment_bytes)
        self.requests.recorder = self.ring
        self.now = Nanos(SECOND)
        for rank in range(num_ranks):
            self.requests.ready(rank)

    def submit(self, name: str = "") -> Placed:
        number = self.requests.next_id()
        request = Request(number, "rid", 20, (bytes(16),), 5, Nanos(60 * SECOND), room=Room(number))
        placed = self.requests.submit([IncomingRequest(request, (name,) if name else ())], self.now)
        assert isinstance(placed, Placed)
        return placed

    def story(self) -> None:
        """Most of what there is to call."""
        requests = self.requests
        first, second = self.submit("mine"), self.submit()
        self.submit("other")
        requests.emitted((RequestId(1), RequestId(2), RequestId(9)), self.now)
        requests.emitted((RequestId(1),), self.now)
        requests.blocked(first.client, self.now)
        requests.reads(first.client)
        requests.see_trouble(1, "the worker hangs", self.now)
        requests.stop(RequestId(2), self.now)
        requests.abort_named("mine", self.now)
        requests.withdraw(second.client, [0], Cause.QUEUE_FULL, "full")
        requests.submit([IncomingRequest(Request(RequestId(7), "r", 1, (), 1, Nanos(1)), ("other",))], self.now)
        requests.ended(FailRequest(RequestId(1), Cause.ABORTED, "window"), self.now)
        requests.lose("its process ended", 1)
        requests.drain()
        requests.wake(Nanos(100 * SECOND))

    @property
    def num_calls(self) -> int:
        _, calls = self.ring.ring.kept()
        return sum(1 for _ in calls)

    def write(self, folder: Path) -> Path:
        path = folder / "fault-edge-1-1-000000.tandem"
        path.write_bytes(b"".join(map(frame, self.ring.frames())))
        return path


def test_every_call_gives_the_same_again(tmp_path: Path) -> None:
    edge = Edge()
    edge.story()
    path = edge.write(tmp_path)
    result = EDGE.replay(path)
    assert (head_of(path), result.difference, result.is_cut) == ("EdgeHead", None, False)
    assert result.steps == edge.num_calls > 15


def test_a_long_life_replays_from_its_last_snapshots(tmp_path: Path) -> None:
    edge = Edge(segment_bytes=20_000)
    for number in range(200):
        placed = edge.submit(f"name-{number}")
        edge.requests.emitted((RequestId(number + 1),), edge.now)
        if number % 3:
            edge.requests.leave(placed.client, edge.now)
            edge.requests.ended(FailRequest(RequestId(number + 1), Cause.ABORTED, "window"), edge.now)
    oldest, _ = edge.ring.ring.kept()
    assert oldest.first_step > 0
    assert EDGE.replay(edge.write(tmp_path)).difference is None


def test_a_snapshot_holds_everything() -> None:
    edge = Edge()
    edge.submit("mine")
    edge.requests.emitted((RequestId(1),), edge.now)
    assert snapshot(restored(snapshot(edge.requests))) == snapshot(edge.requests)
    assert restored(snapshot(edge.requests)).abort_named("mine", edge.now) == edge.requests.abort_named(
        "mine", edge.now
    )


def test_another_decision_is_found_at_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    edge.story()
    path = edge.write(tmp_path)
    monkeypatch.setattr("tandem.server.api.live_requests.SILENCE_GRACE_NS", 1000 * SECOND)
    difference = EDGE.replay(path).difference
    assert difference is not None
    assert difference.step == edge.num_calls - 1  # the last look finds nobody to give up


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_command_says_which_decision_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    edge = Edge()
    edge.story()
    path = edge.write(tmp_path)
    monkeypatch.setattr("tandem.server.api.live_requests.SILENCE_GRACE_NS", 1000 * SECOND)
    assert main(["replay", str(path), *flags]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    if flags:
        (found,) = json.loads(printed.out)["segments"]
        assert (found["step"], found["identical"]) == (edge.num_calls - 1, False)
        assert found["expected"] != found["got"]
    else:
        assert f"DIFFERENT at step {edge.num_calls - 1}" in printed.out


def test_a_folder_is_replayed_to_its_end_whatever_one_file_of_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = Edge()
    edge.story()
    edge.write(tmp_path)
    (tmp_path / "fault-edge-0-1-000000.tandem").write_bytes(frame(b"no head"))
    assert main(["replay", str(tmp_path)]) == 1
    broken, whole = capsys.readouterr().out.splitlines()
    assert not broken.endswith("identical")
    assert whole.endswith("identical")


def test_a_call_that_raises_is_on_record_and_what_follows_is_recorded_anew(tmp_path: Path) -> None:
    edge = Edge()
    edge.story()
    ring = edge.ring
    frames: list[bytes] = []
    edge.ring._failed = lambda why: frames.extend(map(frame, ring.frames()))
    with pytest.raises(IndexError):
        edge.requests.ready(99)
    path = tmp_path / "raised.tandem"
    path.write_bytes(b"".join(frames))
    with pytest.raises(StepRaised, match="IndexError"):
        EDGE.replay(path)
    edge.requests.next_id()
    assert EDGE.replay(edge.write(tmp_path)).difference is None


def test_only_ends_that_are_our_fault_are_told(tmp_path: Path) -> None:
    edge = Edge(num_ranks=1)
    for _ in range(4):
        edge.submit()
    edge.requests.ended(FailRequest(RequestId(1), Cause.OUT_OF_PAGES, "window"), edge.now)
    assert edge.faults == []
    edge.requests.ended(FailRequest(RequestId(2), Cause.ENGINE_FAILED, "window"), edge.now)
    edge.requests.wake(Nanos(100 * SECOND))
    assert edge.faults[0] == "request 2 has ended with engine_failed"
    assert edge.faults[1] == "the node kept silent of request 3"


@pytest.mark.parametrize("field", ["snapshot", "format"])
def test_a_head_of_something_else_is_refused(tmp_path: Path, field: str) -> None:
    edge = Edge()
    head, *calls = edge.ring.frames()
    broken = msgspec.structs.replace(head, **{field: {"snapshot": b"\x80", "format": 9}[field]})
    path = tmp_path / "x.tandem"
    path.write_bytes(b"".join(map(frame, (broken, *calls))))
    with pytest.raises(BrokenRecord):
        EDGE.replay(path)
