"""HTTP between a gateway and a server, in virtual time: one connection per request, a way up and a way down.

Within a connection nothing is lost, repeated or overtaken, as TCP has it. While the way is cut, what is said waits;
after `BREAK_AFTER_NS` the connection breaks for whoever has something to say. Whoever has nothing to say does not
notice: half-open connections are left to the time-outs of the gateway.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any  # arguments of what is carried are whatever it takes

from tandem.core.values import SECOND
from tandem.simulator.clock import Clock
from tandem.simulator.network.links import Network

CONNECT_NS = 5 * SECOND
BREAK_AFTER_NS = 15 * SECOND
LOOK_EVERY_NS = SECOND // 5  # whether a way that was cut is there again

Said = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(slots=True)
class Way:
    """One direction of one connection."""

    source: str
    target: str
    on_broken: Callable[[], None]  # the one who speaks learns it
    patience_ns: int = BREAK_AFTER_NS
    waiting: deque[Said] = field(default_factory=deque)  # said while the way was cut
    last_arrival: int = 0
    is_broken: bool = False


@dataclass(slots=True)
class Http:
    """Carries what is said on all connections of a world."""

    clock: Clock
    network: Network
    random: Random
    count: Callable[[str], None]  # a fault of this class has happened
    break_share: float = 0.0  # of what is said: the connection breaks instead
    silent_share: float = 0.0  # of what is said: nothing arrives any more, and nobody is told
    is_calm: bool = False  # healed: nothing breaks any more

    def say(self, way: Way, action: Callable[..., None], *arguments: Any) -> None:
        """`action(*arguments)` happens at the other end, after everything that was said before."""
        if way.is_broken:
            return
        if self.break_share and not self.is_calm and self.random.random() < self.break_share:
            self.count("F1")
            self._break(way)
        elif self.silent_share and not self.is_calm and self.random.random() < self.silent_share:
            self.count("F23")
            way.is_broken = True
            way.waiting.clear()
        elif way.waiting:
            way.waiting.append((action, arguments))
        elif self.network.is_cut(way.source, way.target):
            way.waiting.append((action, arguments))
            self.clock.after(LOOK_EVERY_NS, self._look, way, self.clock.time + way.patience_ns)
        else:
            self._carry(way, action, arguments)

    def _carry(self, way: Way, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        delay_ns = self.delay_ns()
        way.last_arrival = max(way.last_arrival + 1, self.clock.time + delay_ns)
        self.clock.at(way.last_arrival, action, *arguments)

    def delay_ns(self) -> int:
        settings = self.network.settings
        delay_ns = int(settings.base_ns * self.random.lognormvariate(0.0, settings.spread))
        if settings.clog and self.random.random() < settings.clog:
            self.count("F2")
            delay_ns += self.random.randrange(settings.clog_ns)
        return delay_ns

    def _look(self, way: Way, give_up_at: int) -> None:
        if not self.network.is_cut(way.source, way.target):
            while way.waiting:
                self._carry(way, *way.waiting.popleft())
        elif self.clock.time >= give_up_at:
            self._break(way)
        else:
            self.clock.after(LOOK_EVERY_NS, self._look, way, give_up_at)

    def _break(self, way: Way) -> None:
        way.is_broken = True
        way.waiting.clear()
        way.on_broken()
