"""The network between replicas: latency, loss, duplicates, clogs and partitions, as distributions.

Within a live connection messages arrive in order. A short partition only delays them, as TCP would; a long one breaks
the connection: what was under way is lost and both ends learn that the other is lost. A connection may also break at
once and be made again, which both ends learn. Copies of old messages may come back much later, in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.disagg.messages import Message
from tandem.core.values import MILLISECOND, SECOND, Incarnation
from tandem.simulator.clock import Clock

CALM_SPREAD = 0.1


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
    break_after_ns: int = 3 * SECOND  # a partition that lasts longer breaks connections


@dataclass(slots=True)
class Link:
    """One direction between two replicas."""

    is_cut: bool = False
    is_broken: bool = False  # no connection: what is said is lost
    num_breaks: int = 0
    last_arrival: int = 0  # nothing overtakes within a connection
    stalled: list[tuple[Incarnation, Incarnation, Message]] = field(default_factory=list)


@dataclass(slots=True)
class Network:
    clock: Clock
    random: Random
    settings: LinkSettings
    deliver: Callable[[Incarnation, Incarnation, Message], None]  # (from, to, message)
    lose: Callable[[str, str], None]  # (who learns it, whom it has lost)
    count: Callable[[str], None]  # a fault of this class has happened
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    num_cuts: int = 0
    cut_ids: dict[tuple[str, str], int] = field(default_factory=dict)

    def link(self, source: str, target: str) -> Link:
        found = self.links.get((source, target))
        if found is None:
            found = self.links[(source, target)] = Link()
        return found

    def is_cut(self, left: str, right: str) -> bool:
        """In either direction: a connection needs both."""
        return self.link(left, right).is_cut or self.link(right, left).is_cut

    def latency_ns(self) -> int:
        settings = self.settings
        return (
            int(settings.base_ns * self.random.lognormvariate(0.0, settings.spread))
            if settings.spread
            else settings.base_ns
        )

    def send(self, source: Incarnation, target: Incarnation, message: Message) -> None:
        settings, link = self.settings, self.link(source.name, target.name)
        if settings.loss and self.random.random() < settings.loss:
            self.count("F1")
            return
        if settings.duplication and self.random.random() < settings.duplication:
            self.count(settings.duplicate_class)
            self.clock.after(
                self.random.randrange(settings.duplicate_delay_ns), self._redeliver, source, target, message
            )
        if link.is_broken:
            return
        if link.is_cut:
            link.stalled.append((source, target, message))
            return
        delay_ns = self.latency_ns()
        if settings.clog and self.random.random() < settings.clog:
            self.count("F2")
            delay_ns += self.random.randrange(settings.clog_ns)
        link.last_arrival = max(link.last_arrival + 1, self.clock.time + delay_ns)
        self.clock.at(link.last_arrival, self._deliver, link, link.num_breaks, source, target, message)

    def break_off(self, left: str, right: str) -> None:
        """The connection breaks, in both directions: what is under way is lost, and so is what is said until `connect`.

        Whoever orders it tells both ends.
        """
        for link in (self.link(left, right), self.link(right, left)):
            link.is_broken = True
            link.num_breaks += 1
            link.stalled.clear()

    def connect(self, left: str, right: str) -> None:
        for link in (self.link(left, right), self.link(right, left)):
            link.is_broken = False
            link.last_arrival = self.clock.time

    def cut(self, source: str, target: str) -> None:
        """One direction. Both ends learn of it when it lasts too long."""
        link = self.link(source, target)
        if link.is_cut:
            return
        link.is_cut = True
        self.num_cuts += 1
        self.cut_ids[(source, target)] = self.num_cuts
        after_ns = self.settings.break_after_ns + self.random.randrange(SECOND)
        self.clock.after(after_ns, self._break, source, target, self.num_cuts)

    def heal(self, source: str, target: str) -> None:
        link = self.link(source, target)
        if not link.is_cut:
            return
        link.is_cut = False
        self.cut_ids.pop((source, target), None)
        stalled, link.stalled = link.stalled, []
        for origin, destination, message in stalled:
            link.last_arrival = max(link.last_arrival + 1, self.clock.time + self.latency_ns())
            self.clock.at(link.last_arrival, self._deliver, link, link.num_breaks, origin, destination, message)

    def heal_all(self) -> None:
        """No new faults from here on, nor messages that take a hundred times as long; copies under way still come."""
        for (source, target), link in list(self.links.items()):
            self.heal(source, target)
            link.last_arrival = self.clock.time  # a new connection does not wait behind a clogged one
        self.settings.loss = self.settings.duplication = self.settings.clog = 0.0
        self.settings.spread = min(self.settings.spread, CALM_SPREAD)

    def drop_stalled(self, instance: str) -> None:
        """A replica has died: what was under way from it or to it is gone."""
        for (source, target), link in self.links.items():
            if instance in (source, target):
                link.stalled.clear()

    def _break(self, source: str, target: str, cut_id: int) -> None:
        if self.cut_ids.get((source, target)) != cut_id:
            return
        self.link(source, target).stalled.clear()
        self.lose(source, target)
        self.lose(target, source)

    def _deliver(self, link: Link, num_breaks: int, source: Incarnation, target: Incarnation, message: Message) -> None:
        if link.num_breaks == num_breaks:
            self.deliver(source, target, message)

    def _redeliver(self, source: Incarnation, target: Incarnation, message: Message) -> None:
        """A copy from an earlier connection: in no order with anything else."""
        if not self.link(source.name, target.name).is_cut:
            self.deliver(source, target, message)
