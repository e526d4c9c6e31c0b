"""The last steps of a node are always kept, bounded, replay, and hold no token once they are written."""

import logging
from array import array
from pathlib import Path

import msgspec
import pytest

from core_driver import World as Pair
from tandem.core.batch import BatchOutcome, Row
from tandem.core.commands import Effects, FailRequest, LaunchBatch
from tandem.core.events import BatchFailed, BatchReturned, Event, PagesDigested, RequestArrived
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import InflightBatch
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, BatchId, Cause, Incarnation, Nanos, PageId, RequestId
from tandem.server import fault_records
from tandem.server.fault_records import FaultRecords
from tandem.server.node.flight import Frame, Head, given, recorded, replay
from tandem.server.node.last_steps import NodeLastSteps
from tandem.server.node.ring import NodeRing
from tandem.server.record_file import StepRaised
from tandem.server.ring import PACK_EVERY, SNAPSHOTS, Ring

SETTINGS = NodeSettings(Role.UNIFIED, Incarnation("server", "1"), num_pages=64)
SECRET_TOKEN = 1_234_567


class Served:
    """A node with its last steps kept, and a worker that answers every plan with the same token, or fails."""

    def __init__(self, folder: Path, *, segment_bytes: int = 1 << 20) -> None:
        self.node = EngineNode(SETTINGS)
        self.kept = NodeLastSteps(folder, SETTINGS, self.node)
        self.ring = NodeRing(SETTINGS, self.node.snapshot, segment_bytes=segment_bytes)
        self.now = Nanos(SECOND)
        self.steps = 0

    def step(self, *events: Event) -> Effects:
        self.now = Nanos(self.now + 1000)
        for observer in (self.kept, self.ring):
            observer.before(self.now, events)
        effects = self.node.step(events, self.now)
        for observer in (self.kept, self.ring):
            observer.after(self.now, events, effects)
        self.steps += 1
        return effects

    def serve(self, number: int, *, tokens: int, fails: bool = False) -> None:
        request = Request(RequestId(number + 1), f"rid-{number}", 20, (bytes(16),), tokens, Nanos(600 * SECOND))
        effects = self.step(RequestArrived(request))
        while launches := [command for command in effects.commands if isinstance(command, LaunchBatch)]:
            effects = self.step(*(self.answer(launch, request.id, fails=fails) for launch in launches))

    def answer(self, launch: LaunchBatch, request: RequestId, *, fails: bool) -> Event:
        plan = launch.plan
        if fails:
            return BatchFailed(plan.id, Cause.ENGINE_FAILED, "a kernel is broken")
        rows = sum(row.samples for row in plan.rows) + plan.decodes
        tokens = array("i", [SECRET_TOKEN] * rows).tobytes()
        extras = ((request, b"score"),) if rows else ()
        told = ((request, b"prompt score"),) if plan.rows else ()
        return BatchReturned(BatchOutcome(plan.id, plan.iteration, tokens, bytes(rows), (), extras, told))


def write(folder: Path, ring: NodeRing) -> Path:
    path = FaultRecords(folder, "node", "1", ring.frames, logging.getLogger("test")).write_now("a test")
    assert path is not None
    return path


def head(ring: NodeRing) -> Head:
    first: Frame = next(ring.frames())
    assert isinstance(first, Head)
    return first


def test_what_is_kept_replays_from_the_beginning_of_a_short_life(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for number in range(3):
        served.serve(number, tokens=5)
    result = replay(write(tmp_path, served.ring), EngineNode)
    assert (result.difference, result.steps) == (None, served.steps)


def test_a_long_life_leaves_its_last_steps_and_they_replay(tmp_path: Path) -> None:
    served = Served(tmp_path, segment_bytes=50_000)
    for number in range(40):
        served.serve(number, tokens=20)
    result = replay(write(tmp_path, served.ring), EngineNode)
    assert result.difference is None
    assert head(served.ring).first_step > 0
    assert head(served.ring).first_step + result.steps == served.steps
    assert result.steps >= PACK_EVERY


def test_memory_is_bounded_however_long_it_lives(tmp_path: Path) -> None:
    served = Served(tmp_path, segment_bytes=50_000)
    sizes = []
    for number in range(100):
        served.serve(number, tokens=20)
        sizes.append(sum(1 for _ in served.ring.frames()))
    assert max(sizes[50:]) <= max(sizes[:50])


def test_a_large_node_has_segments_that_are_worth_its_snapshot(tmp_path: Path) -> None:
    served = Served(tmp_path, segment_bytes=1)
    for number in range(40):
        served.serve(number, tokens=20)
    frames = list(served.ring.frames())
    kept = sum(len(msgspec.msgpack.encode(frame)) for frame in frames[1:])
    assert kept > SNAPSHOTS * len(served.node.snapshot()) / 2


def test_whoever_reads_while_steps_go_on_has_those_that_are_over() -> None:
    ring = numbers()
    count(ring, PACK_EVERY + 3)
    ring.given.append(PACK_EVERY + 3)
    _, steps = ring.kept()
    ring.gave.append("over by now")
    count(ring, 3 * PACK_EVERY)
    assert list(steps) == [*((number, str(number)) for number in range(PACK_EVERY + 3)), (PACK_EVERY + 3, None)]


def test_what_cannot_be_encoded_costs_what_was_kept_and_nothing_else() -> None:
    ring = numbers()
    count(ring, PACK_EVERY - 1)
    ring.given.append(1 << 70)
    ring.gave.append("")
    ring.pack()
    count(ring, 2)
    oldest, steps = ring.kept()
    assert (oldest.first_step, list(steps)) == (PACK_EVERY, [(0, "0"), (1, "1")])


def numbers() -> Ring[int, str]:
    """Of a machine that spells numbers."""
    return Ring(lambda: b"", msgspec.msgpack.Decoder(tuple[list[int], list[str]]))


def count(ring: Ring[int, str], steps: int) -> None:
    for number in range(steps):
        ring.given.append(number)
        ring.gave.append(str(number))
        if len(ring.gave) >= PACK_EVERY:
            ring.pack()


def test_no_token_and_no_score_is_written(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.serve(0, tokens=5)
    data = write(tmp_path, served.ring).read_bytes()
    assert array("i", [SECRET_TOKEN]).tobytes() not in data
    assert b"score" not in data


def test_no_token_is_in_the_snapshot_of_a_node_that_hands_one_over() -> None:
    """A snapshot of either half after every step of a pair's story."""
    world = Pair()
    replicas = (world.prefill(chunk_tokens=48), world.decode())
    world.pair(*replicas, prompt_len=100, max_new_tokens=3)
    tokens: set[bytes] = set()
    masked: list[bytes] = []
    for _ in range(40):
        world.turn_all()
        for replica in replicas:
            found = handed_over(replica.node)
            tokens |= found
            if found:
                ring = NodeRing(replica.state.settings, replica.node.snapshot)
                masked.append(head(ring).snapshot)
                again = EngineNode(replica.state.settings)
                again.restore(masked[-1])
                assert not any(any(token) for token in handed_over(again))
    assert tokens
    assert masked


def test_no_token_that_goes_with_a_row_is_in_the_snapshot_of_a_node() -> None:
    """The first one of a request that was retracted before it joined."""
    node, token = EngineNode(SETTINGS), array("i", [SECRET_TOKEN]).tobytes()
    row = Row(RequestId(1), 0, 16, 0, (PageId(0),), samples=False, token=token)
    node.state.inflight.append(InflightBatch(BatchId(1), 1, (row,), (row.request,)))
    assert token in node.snapshot()
    assert token not in head(NodeRing(SETTINGS, node.snapshot)).snapshot


def test_no_secret_of_a_grant_is_in_the_records_of_a_pair() -> None:
    """Nor in a snapshot on the way. Both records replay."""
    world = Pair()
    replicas = (world.prefill(chunk_tokens=48), world.decode())
    world.pair(*replicas, prompt_len=100, max_new_tokens=3)
    snapshots: list[bytes] = []
    for _ in range(40):
        world.turn_all()
        snapshots += [head(NodeRing(one.state.settings, one.node.snapshot)).snapshot for one in replicas]
    events = [event for one in replicas for _, happened, _ in one.log for event in happened]
    secrets = {event.secret for event in events if isinstance(event, PagesDigested)}
    written = b"".join(
        [msgspec.msgpack.encode(given(now, happened)) for one in replicas for now, happened, _ in one.log]
        + [msgspec.msgpack.encode(recorded(effects)) for one in replicas for _, _, effects in one.log]
        + snapshots
    )
    assert any(secrets)
    assert not any(secret in written for secret in secrets if secret)


def handed_over(node: EngineNode) -> set[bytes]:
    """First tokens that a node knows."""
    found = [progress.untold_token for progress in node.state.requests.values()]
    found += [join.token for one in node.state.micro_batches.each for join in one.joins.values()]
    for progress in node.state.requests.values():
        result = getattr(progress.side, "result", None) or getattr(
            getattr(progress.side, "arrival", None), "result", None
        )
        found += [result.token] if result is not None else []
    return {token for token in found if token}


def test_a_request_that_ends_with_a_cause_of_ours_leaves_a_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tmp_path)
    served.serve(0, tokens=5)
    assert list(tmp_path.iterdir()) == []
    served.serve(1, tokens=5, fails=True)
    (path,) = tmp_path.iterdir()
    assert replay(path, EngineNode).difference is None
    assert f"request 2 has ended with engine_failed; what led there is on record: tandem replay {path}" in caplog.text


def test_many_faults_at_once_leave_one_record(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for number in range(5):
        served.serve(number, tokens=5, fails=True)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_last_word_is_written_however_soon_it_follows(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.serve(0, tokens=5, fails=True)
    served.now = Nanos(0)  # a clock that goes backwards: our bug
    with pytest.raises(AssertionError):
        served.step()
    served.kept.write_last("the node ends")
    last = sorted(tmp_path.iterdir())[-1]
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(StepRaised, match="the clock is monotonic"):
        replay(last, EngineNode)


def test_a_disk_that_takes_nothing_costs_the_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    served = Served(tmp_path / "file" / "below")
    served.serve(0, tokens=5, fails=True)
    served.serve(1, tokens=5)
    assert "there is no record of it: NotADirectoryError" in caplog.text


def test_a_folder_that_was_named_and_takes_no_file_is_complained_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert f"--fault-records {folder} takes no file" in (fault_records.complaint(str(folder)) or "")
    for fine in (None, "off", str(tmp_path / "new" / "folder")):
        assert fault_records.complaint(fine) is None


def test_the_folder_is_bounded_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_records, "PAUSE_S", -1.0)
    served = Served(tmp_path)
    served.serve(0, tokens=5, fails=True)
    (first,) = tmp_path.iterdir()
    monkeypatch.setattr(fault_records, "MAX_BYTES", 4 * first.stat().st_size)
    for number in range(1, 8):
        served.serve(number, tokens=5, fails=True)
    left = sorted(tmp_path.iterdir())
    assert 1 <= len(left) <= 4
    assert left[-1].name.endswith("000007.tandem")
    assert first not in left


def test_causes_that_others_give_leave_none(tmp_path: Path) -> None:
    served = Served(tmp_path)
    request = Request(RequestId(1), "rid", 20 * 16 * 64, (bytes(16),) * 20 * 64, 5, Nanos(600 * SECOND))
    (failed,) = [c for c in served.step(RequestArrived(request)).commands if isinstance(c, FailRequest)]
    assert failed.cause is not Cause.ENGINE_FAILED
    assert list(tmp_path.iterdir()) == []
