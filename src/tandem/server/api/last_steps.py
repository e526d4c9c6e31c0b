"""The last steps of an API process: always kept, and written when something went wrong with them.

That is when a request has ended with a cause of ours, when a handler has raised, when a node or a worker is lost or the
watchdog has ended it, and when the process itself ends by an error. Frames are made and written beside the event loop,
but for the last word.
"""

import logging
import secrets
from pathlib import Path

from tandem.server.api.edge_record import EdgeRing
from tandem.server.api.live_requests import LiveRequests
from tandem.server.fault_records import FaultRecords

logger = logging.getLogger("tandem.api")


class EdgeLastSteps:
    """folder: None: nothing is kept, and nothing written."""

    def __init__(self, requests: LiveRequests, folder: Path | None) -> None:
        self._records: FaultRecords | None = None
        if folder is not None:
            ring = requests.recorder = EdgeRing(requests, failed=self.write)
            self._records = FaultRecords(folder, "edge", secrets.token_hex(16), ring.frames, logger)

    def write(self, why: str) -> None:
        """Within the event loop, which does not wait for it."""
        if self._records is not None:
            self._records.write_soon(why)

    def write_last(self, why: str) -> None:
        """The process ends."""
        if self._records is not None:
            self._records.write_now(why)
