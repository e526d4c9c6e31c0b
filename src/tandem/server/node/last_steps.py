"""The node's last steps: always kept, and written as a flight record when something went wrong with them.

The node writes them itself: when it ends by an exception, after a step in which a request has ended with a cause of
ours, and when the watchdog asks, which it does before it ends a node that hangs. Python does what a signal asks for
between two instructions, also where a step never ends, and where the process was stopped until then.
"""

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tandem.core.commands import Effects, FailRequest
from tandem.core.events import Event
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings
from tandem.core.values import Nanos
from tandem.server.fault_records import OURS, FaultRecords
from tandem.server.node.ring import NodeRing

logger = logging.getLogger("tandem.node")


class NodeLastSteps:
    """An observer of the loop, the last one: what it does may take a moment."""

    def __init__(self, folder: Path, settings: NodeSettings, node: EngineNode) -> None:
        ring = NodeRing(settings, node.snapshot)
        self.before, self._keep, self.ring = ring.before, ring.after, ring.ring
        self._records = FaultRecords(folder, "node", settings.incarnation.id, ring.frames, logger)

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        self._keep(now, happened, effects)
        for command in effects.commands:
            if type(command) is FailRequest and command.cause in OURS:
                self.write(f"request {command.request} has ended with {command.cause}")

    def write(self, why: str) -> None:
        if self._records.is_due():
            self._records.write_now(why)

    def write_last(self, why: str) -> None:
        """The process ends."""
        self._records.write_now(why)

    def leave(self, *_: object) -> None:
        """A signal: the node hangs, and ends now."""
        self.write_last("the node hangs")
        os._exit(1)


def keep_last_steps(folder: Path | None, settings: NodeSettings, node: EngineNode) -> NodeLastSteps | None:
    """None: they are not to be kept."""
    if folder is None:
        return None
    kept = NodeLastSteps(folder, settings, node)
    signal.signal(signal.SIGUSR1, kept.leave)
    return kept
