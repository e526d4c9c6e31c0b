"""One life on the network: the product's `Links`, with virtual connections in place of sockets.

What arrives while the process is frozen waits in its kernel; when it goes on, that comes before its timers, as in
`node/driver.py`.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol  # arguments of what arrives are whatever it takes

from tandem.core.disagg.messages import Message
from tandem.core.values import Incarnation, Nanos
from tandem.server.node.candidates import Endpoint, Voucher
from tandem.server.node.links import DialFailure, Link, Links
from tandem.server.node.session import Frame, Greeting, PeerHello
from tandem.simulator.clock import Clock, LocalClock


@dataclass(slots=True, eq=False)
class End:
    """One end of one connection; `other` is the one that hears what is written here."""

    host: "Host"
    link: Link
    other: "End | None" = None  # None: nobody has accepted yet
    is_connected: bool = False  # as far as this end knows
    is_open: bool = True
    is_silent: bool = False  # what is written here does not arrive, ever
    may_be_deaf: bool = False  # a bit was flipped on its way here: of a frame's size, and it waits for the rest of that
    last_arrival: int = 0  # nothing overtakes within a connection
    stalled: list[bytes | None] = field(default_factory=list)  # written while the way was cut; None: closed


@dataclass(slots=True)
class CountedLinks(Links):
    """The product's; besides, what they hear is counted by name."""

    counts: Counter[str] = field(default_factory=Counter)

    def _heard(self, link: Link, message: Greeting | Frame, now: Nanos) -> None:
        self.counts[type(message).__name__] += 1
        if isinstance(message, Greeting):
            self.counts[PeerHello.__name__] += 1  # without which it could not be opened
        Links._heard(self, link, message, now)


class Wires(Protocol):
    """What lies between hosts."""

    def dial(self, host: "Host", link: Link, endpoint: Endpoint) -> End: ...

    def write(self, end: End) -> None: ...

    def close(self, end: End) -> None: ...


@dataclass(slots=True, eq=False)
class Host:
    place: str  # the name of the replica
    clock: Clock
    local_clock: LocalClock
    wires: Wires
    frozen_until: Callable[[], int]
    ends: dict[Link, End] = field(default_factory=dict)
    inbound: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)
    wakes_at: int | None = None
    is_gone: bool = False
    links: Links = field(init=False)  # put in right after

    def now(self) -> Nanos:
        return self.local_clock.read(self.clock.time)

    # -- for the node

    def connect(self, who: Incarnation, voucher: Voucher, endpoint: Endpoint) -> None:
        self.links.connect(who, voucher, endpoint, self.now())
        self._plan()

    def tell(self, who: Incarnation, message: Message) -> None:
        self.links.tell(who, message, self.now())

    # -- for its links

    def dial(self, link: Link, endpoint: Endpoint) -> DialFailure | None:
        self.ends[link] = self.wires.dial(self, link, endpoint)
        return None

    def write(self, link: Link) -> None:
        if link in self.ends:
            self.wires.write(self.ends[link])

    def hang_up(self, link: Link) -> None:
        end = self.ends.pop(link, None)
        if end is not None:
            self.wires.close(end)

    # -- what comes

    def hear(self, action: Callable[..., None], *arguments: Any) -> None:
        """At once, or when the process goes on."""
        if self.is_gone:
            return
        self.inbound.append((action, arguments))
        if len(self.inbound) == 1 or self.frozen_until() <= self.clock.time:
            self.go_on()

    def received(self, end: End, data: bytes) -> None:
        if end.link.is_open:
            self.links.received(end.link, data, self.now())

    def broken(self, end: End, reason: str) -> None:
        if end.link.is_open:
            self.links.broken(end.link, reason, self.now())

    def dial_failed(self, end: End, failure: DialFailure) -> None:
        if end.link.is_open:
            self.links.dial_failed(end.link, failure, self.now())

    def go_on(self) -> None:
        """Take what has come, if nothing holds the process up."""
        if self.is_gone:
            return
        if self.frozen_until() > self.clock.time:
            self.clock.at(self.frozen_until(), self.go_on)
            return
        self._take()
        self._plan()

    def _take(self) -> None:
        while self.inbound:
            action, arguments = self.inbound.popleft()
            action(*arguments)

    # -- time

    def _plan(self) -> None:
        """Wake for the next timer. A wake that is too early does no harm."""
        deadline = self.links.next_deadline()
        if deadline is None:
            return
        at = max(self.local_clock.when(deadline), self.clock.time + 1)
        if self.wakes_at is None or at < self.wakes_at:
            self.wakes_at = at
            self.clock.in_background(at, self._wake, at)

    def _wake(self, at: int) -> None:
        if self.is_gone or self.wakes_at != at:
            return
        if self.frozen_until() > self.clock.time:
            self.wakes_at = self.frozen_until()
            self.clock.in_background(self.wakes_at, self._wake, self.wakes_at)
            return
        self.wakes_at = None
        self._take()
        self.links.tick(self.now())
        self._plan()
