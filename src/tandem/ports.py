"""What a shell implements around the core: the server with sockets and processes, the simulator with a heap."""

from collections.abc import Sequence
from typing import Protocol

from tandem.core.commands import Effects
from tandem.core.events import Event
from tandem.core.values import Nanos


class Node(Protocol):
    """A deterministic participant. One thread calls it; it never blocks, and never raises for a peer, user or device.

    The same configuration and the same `(now, events)` log give the same commands, byte for byte, on any machine.
    """

    def step(self, events: Sequence[Event], now: Nanos) -> Effects: ...

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...


class Clock(Protocol):
    """Monotonic integer nanoseconds."""

    def now(self) -> Nanos: ...
