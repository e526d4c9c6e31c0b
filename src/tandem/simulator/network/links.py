"""The network between nodes: connections with latency, and everything that becomes of connections.

What a node makes of that (hello, redial, lost, returned) is decided by the product's `Links`, one for each life; here
are only the connections below. On one connection bytes come in order and as they were written, unless one is flipped.
A short cut delays them, as TCP would; a long one resets the connection at both ends. A connection may be reset at once
and be impossible to make for a while, or go silent: what is written to it is gone, and nobody is told. Who connects to
an address where a process has ended is refused; where a host has gone nothing answers.

Besides, above connections, a message may be lost before it is sealed, or come again much later and in any order: more
than a sealed connection allows, for nodes have to bear it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.disagg.messages import Message
from tandem.core.values import MILLISECOND, SECOND, Incarnation
from tandem.server.node.candidates import Endpoint
from tandem.server.node.links import DialFailure, Link
from tandem.simulator.clock import Clock
from tandem.simulator.network.host import End, Host

CALM_SPREAD = 0.1
AGAIN_NS = SECOND // 2  # between two attempts of a kernel to connect to where nothing answers
KEEPALIVE_NS = 25 * SECOND  # after so long a kernel finds out that the other host has gone
REFUSED = DialFailure("refuses connections", is_final=True)
UNREACHABLE = DialFailure("no route to host", is_final=False)


@dataclass(slots=True)
class LinkSettings:
    base_ns: int = MILLISECOND // 4
    spread: float = 0.5  # sigma of the lognormal factor on `base_ns`
    loss: float = 0.0
    duplication: float = 0.0
    duplicate_delay_ns: int = 30 * SECOND
    duplicate_class: str = "F3"  # F4: so late that another connection may be in between
    clog: float = 0.0  # share of messages that clog their link
    clog_ns: int = 5 * SECOND
    flips: float = 0.0  # share of writes to a connection in which one bit arrives flipped
    break_after_ns: int = 3 * SECOND  # a partition that lasts longer breaks connections


@dataclass(slots=True)
class Way:
    """One direction between two places."""

    is_cut: bool = False
    cut_id: int = 0


@dataclass(slots=True)
class Network:
    clock: Clock
    random: Random
    settings: LinkSettings
    deliver: Callable[[Incarnation, Incarnation, Message], None]  # (from, to, a copy of an earlier message)
    is_unreachable: Callable[[str], bool]  # this place is down with its host
    count: Callable[[str], None]  # a fault of this class has happened
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)
    num_cuts: int = 0
    heard: Counter[str] = field(default_factory=Counter)  # by all links, by name
    listeners: dict[Endpoint, Host] = field(default_factory=dict)
    places: dict[Endpoint, str] = field(default_factory=dict)  # also where nobody listens any more
    dials: dict[End, Endpoint] = field(default_factory=dict)  # under way, or waiting to be accepted
    ends: dict[End, None] = field(default_factory=dict)  # of connections, both
    down_until: dict[tuple[str, str], int] = field(default_factory=dict)  # no connection can be made

    # -- messages

    def send(self, host: Host, source: Incarnation, target: Incarnation, message: Message) -> None:
        settings = self.settings
        if settings.loss and self.random.random() < settings.loss:
            self.count("F1")
            return
        if settings.duplication and self.random.random() < settings.duplication:
            self.count(settings.duplicate_class)
            self.clock.after(
                self.random.randrange(settings.duplicate_delay_ns), self._redeliver, source, target, message
            )
        host.tell(target, message)

    def _redeliver(self, source: Incarnation, target: Incarnation, message: Message) -> None:
        """A copy from an earlier connection: in no order with anything else."""
        if not self.way(source.name, target.name).is_cut:
            self.deliver(source, target, message)

    # -- what a host does

    def listen(self, host: Host, endpoint: Endpoint) -> None:
        self.listeners[endpoint] = host
        self.places[endpoint] = host.place

    def dial(self, host: Host, link: Link, endpoint: Endpoint) -> End:
        end = End(host, link)
        self.dials[end] = endpoint
        self.clock.after(self.latency_ns(), self._knock, end)
        return end

    def write(self, end: End) -> None:
        """Take all that its session wants to say."""
        if not (end.is_connected and end.is_open):
            return
        data = bytes(end.link.session.outgoing)
        end.link.session.outgoing.clear()
        if data and not end.is_silent:
            self._carry(end, data)

    def close(self, end: End) -> None:
        """By its own host."""
        end.is_open = False
        self.dials.pop(end, None)
        if end.other is not None and not end.is_silent:
            self._carry(end, None)
        self.ends.pop(end, None)

    # -- connecting

    def _knock(self, end: End) -> None:
        """The first packet arrives, or does not."""
        endpoint = self.dials.get(end)
        if endpoint is None:
            return  # given up
        there = self.places.get(endpoint, "")
        here = end.host.place
        target = self.listeners.get(endpoint)
        if self.is_cut(here, there) or (target is None and self.is_unreachable(there)):
            self.clock.after(AGAIN_NS, self._knock, end)
        elif max(self.down_until.get((here, there), 0), self.down_until.get((there, here), 0)) > self.clock.time:
            self._fail(end, UNREACHABLE)
        elif target is None:
            self._fail(end, REFUSED)
        else:
            target.hear(self._accept, end, target)

    def _fail(self, end: End, failure: DialFailure) -> None:
        del self.dials[end]
        self.clock.after(self.latency_ns(), end.host.hear, end.host.dial_failed, end, failure)

    def _accept(self, end: End, target: Host) -> None:
        if self.dials.pop(end, None) is None:
            return
        other = End(target, target.links.accepted(target.now()), end, is_connected=True)
        end.other = target.ends[other.link] = other
        self.ends[end] = self.ends[other] = None
        other.last_arrival = end.last_arrival = self.clock.time + self.latency_ns()
        self.clock.at(end.last_arrival, self._connected, end)
        self.write(other)

    def _connected(self, end: End) -> None:
        if end.is_open:
            end.is_connected = True
            end.host.hear(self.write, end)

    # -- bytes

    def _carry(self, end: End, data: bytes | None) -> None:
        if self.way(end.host.place, self._other(end).host.place).is_cut:
            end.stalled.append(data)
            return
        settings = self.settings
        delay_ns = self.latency_ns()
        if settings.clog and self.random.random() < settings.clog:
            self.count("F2")
            delay_ns += self.random.randrange(settings.clog_ns)
        if data and settings.flips and self.random.random() < settings.flips:
            self.count("F14")
            data = flipped(data, self.random)
            self._other(end).may_be_deaf = True
        end.last_arrival = max(end.last_arrival + 1, self.clock.time + delay_ns)
        self.clock.at(end.last_arrival, self._arrive, self._other(end), data)

    def _arrive(self, end: End, data: bytes | None) -> None:
        if not end.is_open:
            if not self.is_unreachable(end.host.place):
                self._break(self._other(end), "reset by peer")
        elif data is None:
            self._break(end, "closed by the other end")
        else:
            end.host.hear(end.host.received, end, data)

    def _break(self, end: End, reason: str) -> None:
        if end.is_open:
            end.is_open = False
            self.ends.pop(end, None)
            end.host.hear(end.host.broken, end, reason)

    def _other(self, end: End) -> End:
        assert end.other is not None
        return end.other

    # -- what becomes of it

    def way(self, source: str, target: str) -> Way:
        found = self.ways.get((source, target))
        if found is None:
            found = self.ways[(source, target)] = Way()
        return found

    def is_cut(self, left: str, right: str) -> bool:
        """In either direction: a connection needs both."""
        return self.way(left, right).is_cut or self.way(right, left).is_cut

    def latency_ns(self) -> int:
        settings = self.settings
        return (
            int(settings.base_ns * self.random.lognormvariate(0.0, settings.spread))
            if settings.spread
            else settings.base_ns
        )

    def cut(self, source: str, target: str) -> None:
        """One direction. Connections are reset when it lasts too long."""
        way = self.way(source, target)
        if way.is_cut:
            return
        self.num_cuts += 1
        way.is_cut, way.cut_id = True, self.num_cuts
        after_ns = self.settings.break_after_ns + self.random.randrange(SECOND)
        self.clock.after(after_ns, self._cut_is_long, source, target, way.cut_id)

    def _cut_is_long(self, source: str, target: str, cut_id: int) -> None:
        way = self.way(source, target)
        if way.is_cut and way.cut_id == cut_id:
            self._reset(source, target, "timed out")

    def heal(self, source: str, target: str) -> None:
        way = self.way(source, target)
        if not way.is_cut:
            return
        way.is_cut = False
        for end in self._ends_between(source, target):
            writer = self._other(end)
            if writer.host.place == source:
                stalled, writer.stalled = writer.stalled, []
                for data in stalled:
                    self._carry(writer, data)

    def break_off(self, left: str, right: str, *, down_ns: int) -> None:
        """Connections are reset, and none can be made for so long."""
        self.down_until[(left, right)] = self.clock.time + down_ns
        self._reset(left, right, "reset by peer")

    def silence(self, left: str, right: str) -> None:
        """What is written to their connections from now on arrives nowhere."""
        for end in self._ends_between(left, right):
            end.is_silent = True

    def _reset(self, left: str, right: str, reason: str) -> None:
        for end in self._ends_between(left, right):
            self._break(end, reason)

    def _ends_between(self, left: str, right: str) -> list[End]:
        places = {left, right}
        return [end for end in self.ends if {end.host.place, self._other(end).host.place} == places]

    def die(self, host: Host, *, with_host: bool) -> None:
        """A process has ended. Its kernel closes its connections, if that is still there."""
        host.is_gone = True
        for endpoint in [endpoint for endpoint, known in self.listeners.items() if known is host]:
            del self.listeners[endpoint]
            for end in [end for end, dialled in self.dials.items() if dialled == endpoint and not with_host]:
                self._fail(end, REFUSED)
        for end in list(host.ends.values()):
            other = end.other
            if with_host and other is not None:
                end.is_open = False
                self.clock.after(self.random.randrange(KEEPALIVE_NS), self._break, other, "timed out")
                self.dials.pop(end, None)
                self.ends.pop(end, None)
            else:
                self.close(end)
        host.ends.clear()
        host.inbound.clear()

    def heal_all(self) -> None:
        """No new faults from here on. Who waits behind what is clogged, or for what is silent or deaf, dials anew."""
        for source, target in list(self.ways):
            self.heal(source, target)
        self.down_until.clear()
        self.settings.loss = self.settings.duplication = self.settings.clog = self.settings.flips = 0.0
        self.settings.spread = min(self.settings.spread, CALM_SPREAD)
        for end in list(self.ends):
            other = self._other(end)
            if end.is_silent or end.may_be_deaf or not other.is_open or end.last_arrival > self.clock.time + SECOND:
                self._break(end, "reset by peer")
                self._break(other, "reset by peer")


def flipped(data: bytes, random: Random) -> bytes:
    bit = random.randrange(8 * len(data))
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
