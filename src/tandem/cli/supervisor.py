"""Keeps the members of a fleet running: one that ends is started anew on its ports, while the others serve.

    it had served for a while        at once
    it ended soon after its start    later each time, see `DELAYS_S`
    `MAX_UNREADY` times in a row     later and later, as long as another of its kind serves; else the fleet ends,
    it never became ready            with the member's own error

A router's listening socket stays open here: whoever connects while it starts anew waits for it and is not refused.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cli.fleet import Fleet, Member, is_ready
from tandem.server.processes import describe_exit

DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # by how many ends there were that came too soon
STEADY_S = 10.0  # who has served for so long did not end because of how it was started
MAX_UNREADY = 5
LOOK_EVERY_S = 0.1
NO_MEANS_S = 5.0  # until it is tried again, where the machine has no process or no place for a log left


@dataclass(slots=True)
class Restarts:
    """Of one member. Times are those of the supervisor's clock."""

    began_at: float  # this life
    ready_at: float | None
    too_soon: int = 0  # ends in a row
    unready: int = 0  # ends in a row before it was ready
    again_at: float | None = None  # when it is started anew; None: it runs

    def ended(self, now: float) -> float:
        """Seconds to wait before it is started anew."""
        self.unready = 0 if self.ready_at is not None else self.unready + 1
        is_steady = self.ready_at is not None and now - self.ready_at >= STEADY_S
        delay = 0.0 if is_steady else DELAYS_S[min(self.too_soon, len(DELAYS_S) - 1)]
        self.too_soon = 0 if is_steady else self.too_soon + 1
        self.again_at = now + delay
        return delay

    def began(self, now: float) -> None:
        self.began_at, self.ready_at, self.again_at = now, None, None


class Supervisor:
    """Of a fleet whose members are all ready. `tell` gets one line for everything that happens."""

    def __init__(self, fleet: Fleet, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._tell, self._clock = fleet, tell, clock
        now = clock()
        self._restarts = {member.name: Restarts(now, now) for member in fleet.members}

    def run(self) -> None:
        """Until Ctrl+C. Raises CommandFailed when a member does not come back."""
        while True:
            self.look()
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        for member in self._fleet.members:
            member.bound_log()
            self._look_at(member, self._restarts[member.name])

    def _look_at(self, member: Member, restarts: Restarts) -> None:
        now = self._clock()
        if restarts.again_at is not None:
            if now >= restarts.again_at:
                self._start(member, restarts, now)
        elif member.process.poll() is not None:
            delay = restarts.ended(now)
            if restarts.unready >= MAX_UNREADY and not self._has_substitute(member):
                self._fleet.check_alive(member)
            when = f"in {delay:.0f} s" if delay else "now"
            self._tell(f"{member.name} {describe_exit(member.process.returncode)}; starting it again {when}")
        elif restarts.ready_at is None and is_ready(member.port):
            member.is_ready, restarts.ready_at = True, now
            self._tell(f"{member.name} serves again after {now - restarts.began_at:.1f} s")

    def _has_substitute(self, member: Member) -> bool:
        """Whether another one of its kind serves: then so does the fleet."""
        return any(
            other is not member and other.kind == member.kind and other.is_ready and other.process.poll() is None
            for other in self._fleet.members
        )

    def _start(self, member: Member, restarts: Restarts, now: float) -> None:
        """The others serve on where it cannot be started."""
        try:
            self._fleet.restart(member)
        except OSError as error:
            restarts.again_at = now + NO_MEANS_S
            self._tell(f"{member.name} cannot be started: {error}; trying again in {NO_MEANS_S:.0f} s")
        else:
            restarts.began(now)
