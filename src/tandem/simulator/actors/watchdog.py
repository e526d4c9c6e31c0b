"""The watchdogs of all servers: for each rank the product's `PulseQuestions`, and a node that answers or hangs.

A rank is watched by the API process of its server, in that server's time, and not while the server is frozen as a
whole. A tick reads the answer to the question that was asked at the tick before. Where nothing is under way and nothing
hangs the ticks say the same for ever: after `QUIET_TICKS` of that, and after a few the next time, none is put on the
clock until the next batch.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.stall_detector import TICKS, ProgressReport
from tandem.core.values import SECOND
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.servers import Server, rank_number, server_of
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.clock import Clock

QUIET_TICKS = TICKS + 2  # whoever takes quiet for a stall has said so by then
QUIET_AGAIN_TICKS = 3  # once some life has been quiet for so long


@dataclass(slots=True)
class Watchdogs:
    clock: Clock
    servers: dict[str, Server]
    tick_ns: int
    see: Callable[[Life], None]  # a tick has gone by
    tell: Callable[[Server, int, str], None]  # an API process, what is wrong with a rank; empty: nothing is
    fire: Callable[[Life], None]  # its time is over
    fired: Counter[str] = field(default_factory=Counter)  # by the process that hung
    num_recovered: int = 0  # sick ones that went on in time
    was_quiet: bool = False  # a life, for `QUIET_TICKS`

    def watch(self, life: Life) -> None:
        """It has something to do, or begins to hang."""
        life.vitals.quiet_ticks = 0
        if not life.vitals.is_watched:
            life.vitals.is_watched = True
            self._sleep(life, self._server_of(life))

    def _sleep(self, life: Life, server: Server) -> None:
        clock = server.clock
        self.clock.at(clock.when(clock.read(self.clock.time) + self.tick_ns), self._tick, life)

    def _server_of(self, life: Life) -> Server:
        return self.servers[server_of(life.replica.name)]

    def _tick(self, life: Life) -> None:
        if not life.is_alive:
            return
        server = self._server_of(life)
        if server.frozen_until > self.clock.time:
            self._sleep(life, server)
            return
        self._hear(server, life)
        self.see(life)
        longest = life.vitals.liveness.longest
        if longest.is_final:
            self.fired[longest.who] += 1
            self.fire(life)
            return
        life.vitals.quiet_ticks = 0 if longest.ticks or life.vitals.hang else life.vitals.quiet_ticks + 1
        enough = QUIET_AGAIN_TICKS if self.was_quiet else QUIET_TICKS
        life.vitals.is_watched = life.vitals.quiet_ticks < enough
        if life.vitals.is_watched:
            self._sleep(life, server)
        else:
            self.was_quiet = True

    def _hear(self, server: Server, life: Life) -> None:
        """The answer, and the next question; a node that could not answer does so as soon as it goes on."""
        vitals = life.vitals
        was_sick = vitals.liveness.longest.is_sick
        if not vitals.questions.is_answered:
            answer_if_it_can(life)
        if vitals.questions.tick():
            answer_if_it_can(life)
        longest = vitals.liveness.longest
        is_sick = longest.is_sick
        if was_sick or is_sick:
            trouble = longest.describe(self.tick_ns / SECOND) if is_sick else ""
            self.tell(server, rank_number(life.replica.name), trouble)
        self.num_recovered += was_sick and not is_sick


def answer_if_it_can(life: Life) -> None:
    pulse = pulse_of(life)
    if pulse is not None:
        life.vitals.questions.answered(pulse)


def pulse_of(life: Life) -> ProgressReport | None:
    """What the node answers, which asks its worker when it does; None while it hangs."""
    vitals, state = life.vitals, life.node.state
    if vitals.hang is Hang.NODE:
        return None
    oldest = state.inflight[0].forward_iter if state.inflight else None
    pulse = ProgressReport(state.forward_ct, oldest, vitals.echoes)
    vitals.pings += 1
    if vitals.hang is not Hang.WORKER and not life.store.dead:
        vitals.echoes = vitals.pings
    return pulse
