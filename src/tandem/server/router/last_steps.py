"""The last steps of a router process: always kept, and written when something went wrong with them.

That is when a step or a handler has raised, and when a request has ended with a cause that is a server's own fault:
what was decided for it, and for its other half, is here. Frames are made and written beside the event loop.
"""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from tandem.core.router.messages import RouterEvent
from tandem.core.router.router import Router, RouterEffects, RouterSettings
from tandem.core.values import Nanos
from tandem.server.fault_records import FaultRecords
from tandem.server.router.record import Draws, RouterRing, fault_of

logger = logging.getLogger("tandem.router")


class RouterLastSteps:
    """folder: None: nothing is kept, and nothing written."""

    def __init__(self, router: Router, draws: Draws, folder: Path | None, *, settings: RouterSettings) -> None:
        self._router = router
        self._draws = draws
        self.ring: RouterRing | None = None
        self._records: FaultRecords | None = None
        if folder is not None:
            ring = self.ring = RouterRing(router, draws, settings=settings)
            self._records = FaultRecords(folder, "router", secrets.token_hex(16), ring.frames, logger)

    def step(self, events: Sequence[RouterEvent], now: Nanos) -> RouterEffects:
        """`Router.step`, kept."""
        if self.ring is None:
            self._draws.take()
            return self._router.step(events, now)
        self.ring.before(now, events)
        try:
            effects = self._router.step(events, now)
        except Exception as error:
            self.write_last(f"a step of the router raised {type(error).__name__} {error}")
            self.ring.raised()
            raise
        self.ring.after(effects)
        if why := fault_of(events, effects):
            self.write(why)
        return effects

    def write(self, why: str) -> None:
        """Within the event loop, which does not wait for it."""
        if self._records is not None:
            self._records.write_soon(why)

    def write_last(self, why: str) -> None:
        """Before anything else happens."""
        if self._records is not None and self._records.is_due():
            self._records.write_now(why)
