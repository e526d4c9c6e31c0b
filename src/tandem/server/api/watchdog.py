"""Asks the node of a DP rank for its pulse, tick by tick, and has a rank ended in which a process hangs.

What the pulses mean is decided in `core/stall_detector.py`; here are the timer, the questions, and whom to tell.
"""

import asyncio
from collections.abc import Callable

import msgspec

from tandem.core.stall_detector import TICKS, ProgressReport, PulseQuestions, Stall
from tandem.server.api.errors import Refusal
from tandem.server.api.node_rank import NodeRank
from tandem.server.processes import ChildName


class Watchdog:
    """`fire` is called once, with who hangs and the line for the user."""

    def __init__(self, rank: NodeRank, *, timeout_s: float, fire: Callable[[ChildName, str], None]) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._tick_s = timeout_s / TICKS
        self._fire = fire
        self._questions = PulseQuestions()

    async def run(self) -> None:
        """Until somebody hangs. Begin when the node is ready."""
        questions = self._questions
        liveness = questions.liveness
        asked = asyncio.ensure_future(self._ask(questions))
        try:
            while not liveness.longest.is_final:
                await asyncio.sleep(self._tick_s)
                if questions.tick():
                    asked = asyncio.ensure_future(self._ask(questions))
                self._rank.trouble = self._trouble(liveness.longest)
        finally:
            asked.cancel()
        self._fire(liveness.longest.who, self._rank.trouble)

    async def _ask(self, questions: PulseQuestions) -> None:
        try:
            answer = await self._rank.query("pulse", timeout=self._timeout_s)
            questions.answered(msgspec.json.decode(answer, type=ProgressReport))
        except Refusal:
            questions.answered(None)

    @property
    def longest(self) -> Stall:
        """Who makes no progress, for how long."""
        return self._questions.liveness.longest

    def describe(self) -> str:
        return self.longest.describe(self._tick_s)

    def _trouble(self, longest: Stall) -> str:
        return longest.describe(self._tick_s) if longest.is_sick else ""
