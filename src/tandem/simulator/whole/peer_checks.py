"""What a node process owes its local peers and its clock, looked at from outside at every step.

causes     nobody is given up, no connection has to return and no pull loses its peer, unless something has gone wrong
punctual   who has asked to be woken takes a step at that time
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.commands import Effects
from tandem.core.events import Event, PeerLost, PeerReturned, TransferFailed
from tandem.core.values import MILLISECOND, SECOND, Cause
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.kernel import Kernel, Process

REMEMBERED_NS = 10 * SECOND  # for so long something that went wrong may have consequences
LATE_NS = 5 * MILLISECOND  # a node process waits for nothing else


class Beside(Protocol):
    """Looks at the steps of one node process."""

    def after_step(self, events: Sequence[Event], effects: Effects) -> None:
        """Raises Violation."""
        ...


@dataclass(slots=True)
class Causes:
    """has_cause: whether since then something has gone wrong; with True, something that lasts: what is over at once
    costs a connection, which is made anew, and no peer."""

    id = "W6"
    process: Process
    kernel: Kernel
    has_cause: Callable[[int, bool], bool]

    def after_step(self, events: Sequence[Event], effects: Effects) -> None:
        for event in events:
            match event:
                case PeerLost():
                    self._look(event, must_last=True)
                case PeerReturned() | TransferFailed(cause=Cause.PEER_LOST):
                    self._look(event, must_last=False)
                case _:
                    pass

    def _look(self, event: Event, *, must_last: bool) -> None:
        if not self.has_cause(self.kernel.now - REMEMBERED_NS, must_last):
            raise Violation(self.id, f"{self.process.name}: {event}, and nothing has gone wrong")


@dataclass(slots=True)
class Punctual:
    process: Process
    kernel: Kernel
    report: Callable[[Violation], None]
    is_held_up: Callable[[int], bool]
    _due: int | None = None
    _is_looking: bool = False

    def after_step(self, events: Sequence[Event], effects: Effects) -> None:
        self._due = effects.wake_at
        self._look_later()

    def _look_later(self) -> None:
        if self._due is not None and not self._is_looking:
            self._is_looking = True
            self.kernel.at(self._due + LATE_NS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        due = self._due
        if due is None or not self.process.is_alive:
            return
        if due + LATE_NS > self.kernel.now:
            self._look_later()
        elif not self.process.is_frozen and not self.is_held_up(due):
            late_ms = (self.kernel.now - due) // MILLISECOND
            self.report(Violation("W1", f"{self.process.name} wanted to be woken {late_ms} ms ago, and sleeps"))
