"""Whether a server makes progress: what its pulses say, tick by tick, and when one in which somebody hangs is over.

Every tick the node is asked for its pulse, and the node asks its workers. Ticks are counted

    of the node      while it does not answer
    of the workers   while the node answers, and one of them does not: its reader does, whatever the engine computes
    of a batch       while the oldest launched iteration has not returned

After `SICK_TICKS` the server calls itself unhealthy, after `TICKS` it ends. No clock is read: a server that is frozen
as a whole counts nothing meanwhile, so it does not find itself dead when it goes on. What cannot be seen is not
counted: while the node is silent nothing is held against the worker. Nor is a batch against a worker that is silent:
the batch may have begun long before the worker fell silent, and so have the greater count.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

TICKS = 30
SICK_TICKS = TICKS // 2
NO_ANSWER = "no answer"


class ProgressReport(Struct, frozen=True):
    """How far a node and its workers are. The same one twice means that nothing moves."""

    launched: int  # the last iteration
    oldest: int | None  # the first iteration that has not returned; None: all have
    echoes: int  # how often the worker that has answered least has answered
    slowest: str = "worker"  # its name
    behind: str = "worker"  # who has not returned the oldest iteration


class Stall(Struct, frozen=True):
    who: Literal["node", "worker"]
    what: str
    ticks: int
    launched: int  # the last iteration heard of
    name: str  # of the process

    @property
    def is_sick(self) -> bool:
        """Long enough to be told: who asks for the server's health hears of it."""
        return self.ticks >= SICK_TICKS

    @property
    def is_silent(self) -> bool:
        """A process does not answer; else a batch has not returned."""
        return self.what == NO_ANSWER

    @property
    def is_final(self) -> bool:
        return self.ticks >= TICKS

    def describe(self, tick_s: float) -> str:
        return (
            f"the {self.name} process hangs: {self.what} for {self.ticks * tick_s:.3g} s, "
            f"the last iteration heard of is {self.launched}"
        )


def who_began(stalls: Sequence[Stall]) -> int:
    """Of ranks that step together, and of which one hangs for good, the index of the one that keeps the others.

    Who does not answer is it: the batches of all others wait for it. Where all answer it is one of the longest.
    """
    silent = [index for index, stall in enumerate(stalls) if stall.is_sick and stall.is_silent]
    return max(silent or range(len(stalls)), key=lambda index: stalls[index].ticks)


class Liveness:
    """What the pulses of one life say."""

    def __init__(self) -> None:
        self._last: ProgressReport | None = None
        self._node_ticks = 0
        self._worker_ticks = 0
        self._batch_ticks = 0
        self.longest = self._find_longest()

    def tick(self, pulse: ProgressReport | None) -> None:
        """A tick has gone by; None: without an answer of the node."""
        self._count(pulse)
        self.longest = self._find_longest()

    def _count(self, pulse: ProgressReport | None) -> None:
        if pulse is None:
            self._node_ticks += 1
            return
        last, self._last = self._last, pulse
        self._node_ticks = 0
        has_same_echoes = last is not None and last.echoes == pulse.echoes
        has_same_batch = last is not None and pulse.oldest is not None and last.oldest == pulse.oldest
        self._worker_ticks = self._worker_ticks + 1 if has_same_echoes else 0
        self._batch_ticks = self._batch_ticks + 1 if has_same_batch else 0

    def _find_longest(self) -> Stall:
        is_silent = self._worker_ticks >= SICK_TICKS
        ticks = max(self._node_ticks, self._worker_ticks, 0 if is_silent else self._batch_ticks)
        launched = 0 if self._last is None else self._last.launched
        if ticks == self._node_ticks:
            return Stall("node", NO_ANSWER, ticks, launched, "node")
        last = self._last
        if ticks == self._worker_ticks:
            return Stall("worker", NO_ANSWER, ticks, launched, "worker" if last is None else last.slowest)
        oldest, name = (None, "worker") if last is None else (last.oldest, last.behind)
        return Stall("worker", f"iteration {oldest} has not returned", ticks, launched, name)


class PulseQuestions:
    """One question for the pulse is under way at a time; each tick reads what has become of it.

    The first is put by whoever begins. A question that is answered is followed by the next one at the next tick, so
    that an answer is never older than that; one that is not stays, and the node answers it when it goes on.
    """

    def __init__(self) -> None:
        self.liveness = Liveness()
        self._answer: ProgressReport | None = None
        self.is_answered = False

    def answered(self, pulse: ProgressReport | None) -> None:
        """What has come of the question; None: it was given up without an answer."""
        self._answer, self.is_answered = pulse, True

    def tick(self) -> bool:
        """A tick has gone by. Whether the next question is to be put."""
        is_next, pulse = self.is_answered, self._answer
        self._answer, self.is_answered = None, False
        self.liveness.tick(pulse)
        return is_next
