"""Records of nodes, edges and routers, as somebody sends them with a bug report: `tandem replay FILE`."""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from random import Random

from engine import Run, Target
from mutators import framed, mutate_msgpack, mutate_typed

from core_driver import World
from tandem.cli import replay
from tandem.cli.failure import CommandFailed
from tandem.core.request import Request
from tandem.core.router.messages import ClientAsked, HalfFailed, HalfFailure, RouterEvent, Side, WorkerProbed
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.routing import PolicySettings
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import SECOND, Nanos, RequestId, Room
from tandem.server.api.edge_record import EdgeRing
from tandem.server.api.live_requests import IncomingRequest, LiveRequests
from tandem.server.channel import frame
from tandem.server.node.flight import FlightRecorder, FlightSegment
from tandem.server.record_file import BrokenRecord
from tandem.server.router.record import Draws, RouterRing


def seeds() -> Mapping[str, bytes]:
    """A pair's story, recorded on both sides from the beginning, and from the middle on; an edge's and a router's."""
    found = {"edge": edge_record(), "router": router_record()}
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


def edge_record() -> bytes:
    requests = LiveRequests(2, 5 * SECOND)
    ring = requests.recorder = EdgeRing(requests)
    for rank in range(2):
        requests.ready(rank)
    request = Request(requests.next_id(), "rid", 20, (bytes(16),), 5, Nanos(60 * SECOND), room=Room(7))
    requests.submit([IncomingRequest(request, ("name",))], Nanos(SECOND))
    requests.emitted((request.id,), Nanos(SECOND))
    requests.abort_named("name", Nanos(SECOND))
    requests.lose("it is gone", 0)
    requests.wake(Nanos(100 * SECOND))
    return b"".join(map(frame, ring.frames()))


def router_record() -> bytes:
    workers = [
        RegisteredWorker(WorkerId(number), role, f"http://h{number}", f"h{number}", 8998)
        for number, role in enumerate((Role.PREFILL, Role.DECODE))
    ]
    rooms = count(1)
    draws, settings = Draws(lambda: next(rooms)), RouterSettings(prefill_policy=PolicySettings("cache_aware"))
    router = Router(workers, draw=draws, settings=settings, now=Nanos(0))
    ring = RouterRing(router, draws, settings=settings)
    story: list[tuple[RouterEvent, ...]] = [
        (),
        tuple(WorkerProbed(worker.id, ProbeResult.OK) for worker in workers),
        (ClientAsked(RequestId(1), None, Nanos(5 * SECOND), blocks=(b"12345678",)),),
        (HalfFailed(RequestId(1), 1, Side.DECODE, HalfFailure.BROKEN, "it is gone"),),
        (),
    ]
    for number, events in enumerate(story):
        now = Nanos(number * SECOND)
        ring.before(now, events)
        ring.after(router.step(events, now))
    return b"".join(map(frame, ring.frames()))


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
            for _ in FlightSegment(path).frames:
                pass
        with contextlib.redirect_stdout(io.StringIO()):
            for at in (None, 3):
                replay.run(argparse.Namespace(record=path, at=at, json=at is None))

    return run


def mutate(random: Random, entry: bytes, other: bytes) -> bytes:
    return framed(mutate_typed if random.random() < 0.7 else mutate_msgpack)(random, entry, other)


TARGETS = (Target("flight_record", flight_record, mutate, 700, answers=(CommandFailed,), seeds=seeds),)
