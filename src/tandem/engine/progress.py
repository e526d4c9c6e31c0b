"""How far something has come that takes long with large models, for the log."""

import logging
import time
from collections.abc import Callable

EVERY_S = 5.0

logger = logging.getLogger("tandem.engine")


class LoggedProgress:
    """Says it every few seconds; of what is done before that, nothing."""

    def __init__(self, what: str, total: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._now = now
        self._says_at = now() + EVERY_S

    def at(self, done: int) -> None:
        """done: of the total; a part that is counted twice takes nothing beyond it."""
        if self._now() >= self._says_at:
            self._says_at = self._now() + EVERY_S
            logger.info("%s: %d of %d", self._what, min(done, self._total), self._total)
