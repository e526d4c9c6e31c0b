"""A circuit breaker of one worker: who fails what it is given, though it is alive, is left alone for a while.

    CLOSED      used; `failures` of them within `window_ns`, with no success in between, open it
    OPEN        not used until `until`
    HALF_OPEN   tried: one request at a time, or one every `timeout_ns` where no answer comes; the first failure opens
                it again, `successes` of them close it

What counts is for the caller to say. While OPEN nothing does: it is news of requests from before. A worker that was
dead and lives again is tried at once: what has opened its breaker was most often its end, and the process is a new one.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from tandem.core.values import SECOND, Nanos


class BreakerSettings(Struct, frozen=True):
    failures: int = 10
    successes: int = 3
    timeout_ns: Nanos = Nanos(60 * SECOND)
    window_ns: Nanos = Nanos(120 * SECOND)


NEVER_OPENED = Nanos(0)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class CircuitBreaker:
    settings: BreakerSettings
    state: BreakerState = BreakerState.CLOSED
    failed_at: list[Nanos] = field(default_factory=list[Nanos])  # while CLOSED, at most `failures`
    num_successes: int = 0  # while HALF_OPEN
    until: Nanos = NEVER_OPENED  # unless CLOSED: from when on it may be tried

    def allows(self, now: Nanos) -> bool:
        return self.state is BreakerState.CLOSED or now >= self.until

    def chosen(self, now: Nanos) -> None:
        """A request goes there."""
        if self.state is not BreakerState.CLOSED and now >= self.until:
            self.state = BreakerState.HALF_OPEN
            self.until = Nanos(now + self.settings.timeout_ns)

    def succeeded(self, now: Nanos) -> None:
        match self.state:
            case BreakerState.CLOSED:
                self.failed_at.clear()
            case BreakerState.HALF_OPEN:
                self.num_successes += 1
                self.until = now
                if self.num_successes >= self.settings.successes:
                    self._enter(BreakerState.CLOSED)
            case BreakerState.OPEN:
                pass

    def failed(self, now: Nanos) -> None:
        match self.state:
            case BreakerState.CLOSED:
                self.failed_at = [at for at in self.failed_at if now - at < self.settings.window_ns] + [now]
                if len(self.failed_at) >= self.settings.failures:
                    self._open(now)
            case BreakerState.HALF_OPEN:
                self._open(now)
            case BreakerState.OPEN:
                pass

    def came_back(self, now: Nanos) -> None:
        """It was dead and lives again. While CLOSED its failures still count: who dies again and again opens it."""
        if self.state is not BreakerState.CLOSED:
            self._enter(BreakerState.OPEN)
            self.until = now

    def _open(self, now: Nanos) -> None:
        self._enter(BreakerState.OPEN)
        self.until = Nanos(now + self.settings.timeout_ns)

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self.failed_at.clear()
        self.num_successes = 0
