"""Lines of the log for what may happen thousands of times: one in a while, with how often it was since the last one."""

import logging
import re
import threading
import time
from collections.abc import Callable


class RepeatedLine:
    def __init__(self, logger: logging.Logger, *, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._every_s = every_s
        self._now = now
        self._count = 0
        self._last: float | None = None

    def note(self, what: str) -> None:
        """It has happened."""
        self._count += 1
        now = self._now()
        if self._last is None or now - self._last >= self._every_s:
            self._logger.warning("%s%s", what, f" ({self._count} times)" if self._count > 1 else "")
            self._count, self._last = 0, now


class RepeatedLines:
    """One for each kind of text: what the text is but for its numbers. There are few kinds."""

    def __init__(self, logger: logging.Logger, *, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._lines: dict[str, RepeatedLine] = {}
        self._new_line = lambda: RepeatedLine(logger, every_s=every_s, now=now)
        self._lock = threading.Lock()

    def note(self, what: str) -> None:
        """From any thread."""
        kind = re.sub(r"[0-9]+", "", what)
        with self._lock:
            if kind not in self._lines:
                self._lines[kind] = self._new_line()
            self._lines[kind].note(what)
