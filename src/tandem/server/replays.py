"""Any record decided again: of a node, of a server's edge, of a router. Its head says whose it is."""

from pathlib import Path
from typing import Any  # records of any machine

from tandem.core.scheduler.node import EngineNode
from tandem.server.api.edge_record import EDGE
from tandem.server.node.flight import replay
from tandem.server.record_file import RecordedMachine, Replay, head_of
from tandem.server.router.record import ROUTER

AnyMachine = RecordedMachine[Any, Any, Any]
MACHINES: dict[str, AnyMachine] = {"EdgeHead": EDGE, "RouterHead": ROUTER}  # by the first word of their records


def machine_of(segment: Path) -> AnyMachine | None:
    """None: a node, or nothing that is known."""
    return MACHINES.get(head_of(segment))


def replay_alone(segment: Path) -> Replay:
    """One segment, from its own snapshot. Raises BrokenRecord, StepRaised."""
    machine = machine_of(segment)
    return replay(segment, EngineNode) if machine is None else machine.replay(segment)
