"""One probe for all who ask: however many ask however often, it runs once at a time and once per interval."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class SharedProbe(Generic[Found]):
    """Belongs to one event loop. A failure that is a value is shared like any other; one that is raised, too."""

    def __init__(
        self,
        run: Callable[[], Awaitable[Found]],
        *,
        interval_ns: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._run = run
        self._interval_ns = interval_ns
        self._now_ns = now_ns
        self._latest: asyncio.Future[Found] | None = None  # under way, or what the last one found
        self._began_ns = 0

    async def answer(self) -> Found:
        """Of the probe that is under way or has just ended, else of a new one, which goes on when its asker leaves."""
        latest = self._latest
        if latest is None or (latest.done() and self._now_ns() - self._began_ns >= self._interval_ns):
            self._began_ns = self._now_ns()
            latest = self._latest = asyncio.ensure_future(self._run())
        return await asyncio.shield(latest)
