"""Events on their way out of a machine: said in order, by whoever has just made one, and never under its lock."""

import threading
from collections import deque
from collections.abc import Callable

from tandem.core.events import Event


class Outbox:
    """`put` in the order in which things happened, under the lock of the machine; then `flush` without it."""

    def __init__(self, say: Callable[[Event], None]) -> None:
        """say: may block; is never called by two threads at once"""
        self._say = say
        self._events: deque[Event] = deque()
        self._speaking = threading.Lock()
        self._is_closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def flush(self) -> None:
        """Say what is there. If somebody is at it already, he says the rest, too."""
        while self._events and self._speaking.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    if not self._is_closed:
                        self._say(event)
            finally:
                self._speaking.release()

    def close(self) -> None:
        """Nothing begins to be said after this."""
        self._is_closed = True
