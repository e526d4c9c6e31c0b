"""Who lives in a random world can be recorded: nodes, edges and routers decide the same again from their records."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any  # what the simulator makes a router with

import pytest

from tandem.core.commands import Effects
from tandem.core.events import Event
from tandem.core.router.messages import RouterEvent
from tandem.core.router.router import Router, RouterEffects
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings
from tandem.core.values import Nanos
from tandem.server import ring
from tandem.server.api.edge_record import EDGE, EdgeRing
from tandem.server.api.live_requests import LiveRequests
from tandem.server.channel import frame
from tandem.server.node import flight
from tandem.server.node.ring import NodeRing
from tandem.server.record_file import Replay
from tandem.server.router.record import ROUTER, Draws, RouterRing
from tandem.simulator import world
from tandem.simulator.actors import gateway, servers
from tandem.simulator.hunt import run_seed

SEEDS = (3, 7, 17, 29, 53, 1007, 1021)
LEAST_STEPS = 20  # of all lives of a kind
SEGMENT_BYTES = 5_000  # so that long lives drop what was first


class Rings:
    """Of all lives in a world."""

    def __init__(self) -> None:
        self.of: dict[str, list[NodeRing | EdgeRing | RouterRing]] = {"node": [], "edge": [], "router": []}

    def live_requests(self, *args: object) -> LiveRequests:
        requests = LiveRequests(*args)  # type: ignore[arg-type]  # as the simulator makes it
        ring = EdgeRing(requests, segment_bytes=SEGMENT_BYTES)
        requests.recorder = ring
        self.of["edge"].append(ring)
        return requests

    def router(self, workers: Sequence[RegisteredWorker], **how: Any) -> Router:
        draws = Draws(how.pop("draw"))
        router = RecordedRouter(workers, draw=draws, **how)
        ring = RouterRing(router, draws, settings=how["settings"], segment_bytes=SEGMENT_BYTES)
        router.ring = ring
        self.of["router"].append(ring)
        return router

    def node(self, settings: NodeSettings) -> EngineNode:
        return RecordedNode(settings, self.of["node"])


class RecordedRouter(Router):
    ring: RouterRing

    def step(self, events: Sequence[RouterEvent], now: Nanos) -> RouterEffects:
        self.ring.before(now, events)
        effects = super().step(events, now)
        self.ring.after(effects)
        return effects


class RecordedNode(EngineNode):
    def __init__(self, settings: NodeSettings, rings: list[NodeRing | EdgeRing | RouterRing]) -> None:
        super().__init__(settings)
        self.rings = rings
        self.ring: NodeRing | None = None

    def step(self, events: Sequence[Event], now: Nanos) -> Effects:
        if self.ring is None:  # a copy is restored before its first step
            self.ring = NodeRing(self.state.settings, self.snapshot, segment_bytes=SEGMENT_BYTES)
            self.rings.append(self.ring)
        self.ring.before(now, events)
        effects = super().step(events, now)
        self.ring.after(now, events, effects)
        return effects


REPLAYS: dict[str, Callable[[Path], Replay]] = {
    "node": lambda path: flight.replay(path, EngineNode),
    "edge": EDGE.replay,
    "router": ROUTER.replay,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_lives_in_a_random_world_decides_the_same_again(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = Rings()
    with monkeypatch.context() as patched:
        patched.setattr(ring, "SNAPSHOTS", 1)
        patched.setattr(servers, "LiveRequests", rings.live_requests)
        patched.setattr(gateway, "Router", rings.router)
        patched.setattr(world, "EngineNode", rings.node)
        assert not run_seed(seed).invariant
    path = tmp_path / "record"
    for machine, kept in rings.of.items():
        steps = 0
        for one in kept:
            path.write_bytes(b"".join(map(frame, one.frames())))
            result = REPLAYS[machine](path)
            assert result.difference is None, machine
            steps += result.steps
        assert steps > LEAST_STEPS, machine
    assert any(one.ring.kept()[0].first_step for kept in rings.of.values() for one in kept), "nobody lived long"
