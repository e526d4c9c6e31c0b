"""Faults that are moments: a schedule draws when which of them strikes whom.

It knows a world by the names of what is in it, which follow from the options, so its draws depend on nothing that
happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.actors.servers import rank_names
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.clock import Clock
from tandem.simulator.faults.options import Options

HANG_SHARE = 0.5  # of the seeds with F9
SILENT_SHARE = 0.1  # of the connections that fail
FOR_GOOD_NS = 600 * SECOND  # longer than any watchdog waits


@dataclass(frozen=True, slots=True)
class Cast:
    """Who is in a world."""

    servers: dict[str, Role]
    ranks: tuple[str, ...]
    gateways: tuple[str, ...]

    @property
    def server_names(self) -> tuple[str, ...]:
        return tuple(self.servers)

    def servers_of(self, role: Role) -> list[str]:
        return [name for name, known in self.servers.items() if known is role]


def cast_of(options: Options) -> Cast:
    counts = (
        (Role.PREFILL, options.num_prefills, options.prefill_info.dp_size),
        (Role.DECODE, options.num_decodes, options.decode_info.dp_size),
        (Role.UNIFIED, options.num_unified, 1),
    )
    servers = {f"{role}-{index}": role for role, count, _ in counts for index in range(count)}
    sizes = {role: dp_size for role, _, dp_size in counts}
    ranks = [rank for name, role in servers.items() for rank in rank_names(name, sizes[role])]
    return Cast(servers, tuple(ranks), tuple(f"router-{index}" for index in range(options.num_gateways)))


class Target(Protocol):
    """What a fault schedule may do to the world."""

    clock: Clock

    def crash(self, name: str, *, down_ns: int) -> None: ...

    def lose_shard(self, name: str, *, down_ns: int) -> None: ...

    def lose_bootstrap(self, name: str, *, down_ns: int) -> None: ...

    def lose_gateway(self, name: str, *, down_ns: int) -> None: ...

    def drain(self, name: str, *, down_ns: int) -> None: ...

    def scale_down(self, name: str) -> None: ...

    def scale_up(self, name: str, *, after_ns: int) -> None:
        """The server is not there before."""
        ...

    def pause(self, name: str, *, duration_ns: int) -> None: ...

    def slow_down(self, name: str, *, factor: float, duration_ns: int) -> None: ...

    def slow_shard(self, name: str, shard: int, *, factor: float, duration_ns: int) -> None: ...

    def hang(self, name: str, what: Hang, *, duration_ns: int) -> None: ...

    def partition(self, source: str, target: str, *, duration_ns: int) -> None: ...

    def disconnect(self, share: float) -> None: ...

    def flicker(self, source: str, target: str, *, down_ns: int) -> None: ...

    def silence(self, source: str, target: str) -> None: ...

    def flush(self, name: str) -> None: ...

    def change_hooks(self, name: str, *, force_retry_prob: float) -> None: ...

    def swap_for_snapshot(self, name: str) -> None: ...


@dataclass(slots=True)
class FaultSchedule:
    """Puts the faults that are moments, not probabilities, on the clock."""

    target: Target
    random: Random
    options: Options
    cast: Cast = field(init=False)
    # Streams of their own: most seeds have none of these, and go on as without.
    hangs: Random = field(init=False)
    flickers: Random = field(init=False)
    operators: Random = field(init=False)

    def __post_init__(self) -> None:
        self.cast = cast_of(self.options)
        self.hangs = Random(f"hangs {self.options.seed}")
        self.flickers = Random(f"flickers {self.options.seed}")
        self.operators = Random(f"operators {self.options.seed}")

    def schedule(self, until_ns: int) -> None:
        if "F21" in self.options.classes and self.random.random() < 0.5:
            self.target.scale_up(self._any_server(), after_ns=self._duration_ns(30.0))
        for name, times, strike in self._plans():
            if name in self.options.classes:
                for _ in range(times):
                    self.target.clock.at(self.random.randrange(until_ns), strike)
        if "F9" in self.options.classes and self.hangs.random() < HANG_SHARE:
            for _ in range(self.hangs.randrange(1, 4)):
                self.target.clock.at(self.hangs.randrange(until_ns), self._hang)
        if "F23" in self.options.classes:
            for _ in range(self.flickers.randrange(5, 40)):
                self.target.clock.at(self.flickers.randrange(until_ns), self._flicker)
        if "F24" in self.options.classes:
            busy_ns = min(until_ns, self.options.workload.duration_ns)
            for _ in range(self.operators.randrange(6, 30)):
                self.target.clock.at(self.operators.randrange(busy_ns), self._operate)

    def _plans(self) -> list[tuple[str, int, Callable[[], None]]]:
        draw = self.random.randrange
        return [
            ("F5", draw(1, 6), self._partition),
            ("F6", draw(1, 4), self._crash),
            ("F7", draw(1, 3), self._lose_part),
            ("F8", draw(1, 4), self._pause),
            ("F9", draw(1, 3), self._slow_down),
            ("F18", draw(1, 3), lambda: self.target.disconnect(self.random.uniform(0.1, 0.9))),
            ("F22", draw(5, 20), lambda: self.target.swap_for_snapshot(self._any_rank())),
            ("F21", draw(1, 4), self._scale),
        ]

    def _any_rank(self) -> str:
        return self.random.choice(self.cast.ranks)

    def _any_server(self) -> str:
        return self.random.choice(self.cast.server_names)

    def _duration_ns(self, longest_s: float) -> int:
        """Short ones are as likely as long ones: what matters often happens just after a restart."""
        return int(longest_s * SECOND * 10 ** self.random.uniform(-3.0, 0.0))

    def _partition(self) -> None:
        places = [*self.cast.server_names, *self.cast.gateways]
        source, target = self.random.choice(places), self.random.choice(places)
        duration_ns = self._duration_ns(60.0)
        self.target.partition(source, target, duration_ns=duration_ns)
        if self.random.random() < 0.6:
            self.target.partition(target, source, duration_ns=duration_ns)

    def _crash(self) -> None:
        draw, down_ns = self.random.random(), self._duration_ns(120.0)
        if draw < 0.15 and self.cast.gateways:
            self.target.lose_gateway(self.random.choice(self.cast.gateways), down_ns=down_ns)
        elif draw < 0.3:
            self.target.lose_bootstrap(self.random.choice(self.cast.servers_of(Role.PREFILL)), down_ns=down_ns)
        else:
            self.target.crash(self._any_server(), down_ns=down_ns)

    def _lose_part(self) -> None:
        """One worker of several, or one rank."""
        self.target.lose_shard(self._any_rank(), down_ns=self._duration_ns(60.0))

    def _scale(self) -> None:
        draw, name = self.random.random(), self._any_server()
        if draw < 0.3:
            self.target.scale_down(name)
        else:
            self.target.drain(name, down_ns=self._duration_ns(60.0))

    def _pause(self) -> None:
        self.target.pause(self._any_rank(), duration_ns=self._duration_ns(60.0))

    def _slow_down(self) -> None:
        factor, name = self.random.uniform(2.0, 50.0), self._any_rank()
        duration_ns = self._duration_ns(60.0)
        if self.random.random() < 0.5:
            self.target.slow_down(name, factor=factor, duration_ns=duration_ns)
        else:
            shard = self.random.randrange(self.options.num_shards)
            self.target.slow_shard(name, shard, factor=factor, duration_ns=duration_ns)

    def _hang(self) -> None:
        """For good, or about as long as a watchdog waits."""
        draw = self.hangs
        what, name = draw.choice(tuple(Hang)), draw.choice(self.cast.ranks)
        duration_ns = FOR_GOOD_NS if draw.random() < 0.5 else int(self.options.watchdog_ns * draw.uniform(0.1, 1.2))
        self.target.hang(name, what, duration_ns=duration_ns)

    def _flicker(self) -> None:
        """Mostly the connection is back before its ends give up on it."""
        draw, cast = self.flickers, self.cast
        left, right = draw.choice(cast.servers_of(Role.PREFILL)), draw.choice(cast.servers_of(Role.DECODE))
        down_ns = int(6 * SECOND * 10 ** draw.uniform(-3.0, 0.0))
        if draw.random() < SILENT_SHARE:
            self.target.silence(left, right)
        else:
            self.target.flicker(left, right, down_ns=down_ns)

    def _operate(self) -> None:
        draw = self.operators
        name = draw.choice(self.cast.server_names)
        match draw.randrange(4):
            case 0 | 1:
                for each in self.cast.server_names:
                    self.target.flush(each)
            case 2:
                self.target.change_hooks(name, force_retry_prob=draw.choice((0.0, 0.3, 1.0)))
            case _:  # its peers find the next life at its address before they hear that this one is over
                self.target.crash(
                    draw.choice(self.cast.servers_of(Role.PREFILL)), down_ns=draw.randrange(5 * MILLISECOND)
                )
