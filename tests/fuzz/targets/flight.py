"""InflightBatch records, as somebody sends them with a bug report: `tandem replay FILE`."""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from engine import Run, Target
from mutators import framed, mutate_msgpack, mutate_typed

from core_driver import World
from tandem.cli import replay
from tandem.cli.failure import CommandFailed
from tandem.core.values import SECOND
from tandem.server.node.flight import BrokenRecord, FlightRecorder, read_segment


def seeds() -> Mapping[str, bytes]:
    """A pair's story, recorded on both sides from the beginning, and from the middle on."""
    found: dict[str, bytes] = {}
    for story, before in (("whole", 0), ("second_half", 6)):
        world = World()
        replicas = {"prefill": world.prefill(chunk_tokens=48), "decode": world.decode()}
        world.pair(replicas["prefill"], replicas["decode"], prompt_len=100, max_new_tokens=3)
        for _ in range(before):
            world.turn_all()
        snapshots = {name: replica.node.snapshot() for name, replica in replicas.items()}
        starts = {name: len(replica.log) for name, replica in replicas.items()}
        world.run()
        world.advance(2 * SECOND)
        for name, replica in replicas.items():
            found[f"{name}_{story}"] = recorded(
                replica.state.settings, lambda s=snapshots[name]: s, replica.log[starts[name] :]
            )
    return found


def recorded(settings: object, snapshot: Callable[[], bytes], log: list) -> bytes:
    folder = Path(tempfile.mkdtemp())
    recorder = FlightRecorder(folder, settings, snapshot, max_bytes=1 << 30, note=print)  # type: ignore[arg-type]  # settings of any node
    for now, events, effects in log:
        recorder.before(now, events)
        recorder.after(now, events, effects)
    recorder.close()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.unlink()
    folder.rmdir()
    return content


def flight_record() -> Run:
    path = Path(tempfile.mkdtemp()) / "flight-fuzz.tandem"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(BrokenRecord):  # `replay` has a net of its own
            for _ in read_segment(path):
                pass
        with contextlib.redirect_stdout(io.StringIO()):
            for at in (None, 3):
                replay.run(argparse.Namespace(record=path, at=at, json=at is None))

    return run


def mutate(random: Random, entry: bytes, other: bytes) -> bytes:
    return framed(mutate_typed if random.random() < 0.7 else mutate_msgpack)(random, entry, other)


TARGETS = (Target("flight_record", flight_record, mutate, 700, answers=(CommandFailed,), seeds=seeds),)
