"""Whether the node and its worker make progress, and the end of a server in which one of them hangs.

Every tick the node is asked for its pulse, and the node asks its worker. Ticks are counted

    of the node      while it does not answer
    of the worker    while the node answers, and the worker does not: its reader does, whatever the engine computes
    of a batch       while the oldest launched iteration has not returned

After `SICK_TICKS` the server calls itself unhealthy, after `TICKS` it ends. No clock is read: a server that is frozen
as a whole counts nothing meanwhile, so it does not find itself dead when it goes on. What cannot be seen is not
counted: while the node is silent nothing is held against the worker.
"""

import asyncio
from collections.abc import Callable

import msgspec
from msgspec import Struct

from tandem.server import wire
from tandem.server.api.client import NodeClient
from tandem.server.api.errors import Refusal
from tandem.server.processes import ChildName

TICKS = 30
SICK_TICKS = TICKS // 2


class Standstill(Struct, frozen=True):
    who: ChildName
    what: str
    ticks: int
    launched: int  # the last iteration heard of

    def describe(self, tick_s: float) -> str:
        return (
            f"the {self.who} process hangs: {self.what} for {self.ticks * tick_s:.3g} s, "
            f"the last iteration heard of is {self.launched}"
        )


class Progress:
    """What the pulses say, tick by tick."""

    def __init__(self) -> None:
        self._last: wire.Pulse | None = None
        self._node_ticks = 0
        self._worker_ticks = 0
        self._batch_ticks = 0

    def tick(self, pulse: wire.Pulse | None) -> None:
        """A tick has gone by; None: without an answer of the node."""
        if pulse is None:
            self._node_ticks += 1
            return
        last, self._last = self._last, pulse
        self._node_ticks = 0
        has_same_echoes = last is not None and last.echoes == pulse.echoes
        has_same_batch = last is not None and pulse.oldest is not None and last.oldest == pulse.oldest
        self._worker_ticks = self._worker_ticks + 1 if has_same_echoes else 0
        self._batch_ticks = self._batch_ticks + 1 if has_same_batch else 0

    @property
    def longest(self) -> Standstill:
        launched = 0 if self._last is None else self._last.launched
        oldest = None if self._last is None else self._last.oldest
        return max(
            Standstill("node", "no answer", self._node_ticks, launched),
            Standstill("worker", "no answer", self._worker_ticks, launched),
            Standstill("worker", f"iteration {oldest} has not returned", self._batch_ticks, launched),
            key=lambda standstill: standstill.ticks,
        )


class Watchdog:
    """`fire` is called once, with who hangs and the line for the user."""

    def __init__(self, client: NodeClient, *, timeout_s: float, fire: Callable[[ChildName, str], None]) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._tick_s = timeout_s / TICKS
        self._fire = fire

    async def run(self) -> None:
        """Until somebody hangs. Begin when the node is ready."""
        progress = Progress()
        asked = asyncio.ensure_future(self._ask())
        try:
            while progress.longest.ticks < TICKS:
                await asyncio.sleep(self._tick_s)
                if asked.done():
                    progress.tick(asked.result())
                    asked = asyncio.ensure_future(self._ask())
                else:
                    progress.tick(None)
                self._client.trouble = self._trouble(progress.longest)
        finally:
            asked.cancel()
        self._fire(progress.longest.who, self._client.trouble)

    async def _ask(self) -> wire.Pulse | None:
        try:
            return msgspec.json.decode(await self._client.query("pulse", timeout=self._timeout_s), type=wire.Pulse)
        except Refusal:
            return None

    def _trouble(self, longest: Standstill) -> str:
        return longest.describe(self._tick_s) if longest.ticks >= SICK_TICKS else ""
