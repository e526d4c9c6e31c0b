"""Progress as the watchdog sees it: who hangs, for how long, and what does not count."""

import asyncio
from collections.abc import Iterator

from api_fakes import REPLICA, FakeNode, says

from tandem.core.stall_detector import (
    NO_ANSWER,
    SICK_TICKS,
    TICKS,
    Liveness,
    ProgressReport,
    PulseQuestions,
    Stall,
    who_began,
)
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.client import NodeClient
from tandem.server.api.node_rank import NodeRank
from tandem.server.api.watchdog import Watchdog


def watched(*pulses: ProgressReport | None) -> Liveness:
    liveness = Liveness()
    for pulse in pulses:
        liveness.tick(pulse)
    return liveness


def idle(echoes: int) -> ProgressReport:
    return ProgressReport(launched=7, oldest=None, echoes=echoes)


def test_a_server_that_answers_and_has_nothing_to_do_does_not_hang() -> None:
    assert watched(*(idle(echoes) for echoes in range(100))).longest.ticks == 0


def test_a_server_that_computes_does_not_hang() -> None:
    assert watched(*(ProgressReport(number + 2, number, number) for number in range(100))).longest.ticks == 0


def test_a_node_that_does_not_answer_is_named_with_the_last_iteration_heard_of() -> None:
    longest = watched(idle(1), idle(2), None, None, None).longest
    assert (longest.who, longest.ticks) == ("node", 3)
    assert longest.describe(1.0) == "the node process hangs: no answer for 3 s, the last iteration heard of is 7"


def test_a_worker_that_does_not_answer_is_named_although_it_has_nothing_to_do() -> None:
    longest = watched(idle(1), idle(2), idle(2), idle(2)).longest
    assert (longest.who, longest.what, longest.ticks) == ("worker", "no answer", 2)


def test_a_batch_that_does_not_return_is_named_although_the_worker_answers() -> None:
    longest = watched(*(ProgressReport(launched=9, oldest=8, echoes=number) for number in range(5))).longest
    assert (longest.who, longest.what, longest.ticks) == ("worker", "iteration 8 has not returned", 4)


def test_a_batch_that_does_not_return_is_told_with_who_has_not_returned_it() -> None:
    stuck = [ProgressReport(9, 8, number, behind="worker TP0 PP1") for number in range(5)]
    said = "the worker TP0 PP1 process hangs: iteration 8 has not returned for 4 s, the last iteration heard of is 9"
    assert watched(*stuck).longest.describe(1.0) == said


def test_of_a_worker_that_falls_silent_within_a_batch_it_is_said_that_it_does_not_answer() -> None:
    """The batch is older than the silence, and there is one who was heard: it ends by the silence, not by the batch."""
    computes = [ProgressReport(launched=9, oldest=8, echoes=number) for number in range(4)]
    silent = [ProgressReport(launched=9, oldest=8, echoes=3, slowest="worker PP1")]
    longest = watched(*computes, *silent * (TICKS - 1)).longest
    assert not longest.is_final
    longest = watched(*computes, *silent * TICKS).longest
    assert (longest.name, longest.what, longest.is_final) == ("worker PP1", "no answer", True)


def test_only_the_oldest_batch_counts() -> None:
    """A window is never empty under load."""
    assert watched(ProgressReport(9, 8, 1), ProgressReport(9, 8, 2), ProgressReport(10, 9, 3)).longest.ticks == 0


def test_nothing_is_held_against_a_worker_while_the_node_is_silent() -> None:
    stuck = ProgressReport(9, 8, 1)
    longest = watched(stuck, stuck, stuck, *[None] * 10).longest
    assert (longest.who, longest.ticks) == ("node", 10)
    assert watched(stuck, stuck, stuck, *[None] * 10, stuck).longest.ticks == 3


def test_an_answer_ends_the_silence() -> None:
    assert watched(idle(1), None, None, idle(2)).longest.ticks == 0


class Pulses(FakeNode):
    """Answers the n-th question for its pulse with the n-th pulse; no answer when there are no more."""

    pulses: Iterator[ProgressReport] = iter(())
    asked = 0

    def send(self, message: wire.ApiToNode) -> None:
        if isinstance(message, wire.Query) and message.what == "pulse":
            self.asked += 1
            pulse = next(self.pulses, None)
            self.answers = {} if pulse is None else {"pulse": pulse}
        super().send(message)


def fired_at(pulses: Iterator[ProgressReport], *, timeout_s: float = 0.3) -> tuple[list[tuple[str, str]], list[str]]:
    """What the watchdog says in the end, and what troubles of the rank were told of until then."""
    told: list[tuple[str, str]] = []
    troubles: list[str] = []

    async def story() -> None:
        node = Pulses(says("x"))
        node.pulses = pulses
        node.client = client = NodeClient(node, stall_timeout=1.0)
        state = client.ranks[0].state

        def see_trouble(trouble: str) -> None:
            state.trouble = trouble
            troubles.append(trouble)

        client.ranks = [rank := NodeRank(0, node, AllowedHosts(), state, see_trouble)]
        client.receive(wire.NodeReady(REPLICA, 10, 10))
        await Watchdog(rank, timeout_s=timeout_s, fire=lambda who, reason: told.append((who, reason))).run()

    asyncio.run(story())
    return told, troubles


def test_a_silent_node_makes_the_server_sick_and_later_ends_it() -> None:
    told, troubles = fired_at(iter([idle(0), idle(1)]))
    assert told == [("node", troubles[-1])]
    assert troubles[-1] == "the node process hangs: no answer for 0.3 s, the last iteration heard of is 7"
    sick = [trouble for trouble in troubles if trouble]
    assert len(sick) == TICKS - SICK_TICKS + 1
    assert len({*sick}) == len(sick)


def test_a_batch_that_never_returns_ends_the_server_while_everybody_answers() -> None:
    told, _ = fired_at(ProgressReport(9, 8, echoes) for echoes in range(10_000))
    assert [who for who, _ in told] == ["worker"]
    assert "iteration 8 has not returned" in told[0][1]


def test_who_recovers_in_time_is_well_again() -> None:
    stuck = [ProgressReport(9, 8, echoes) for echoes in range(SICK_TICKS + 5)]
    _, troubles = fired_at(iter([*stuck, ProgressReport(9, None, 99)]))
    first_sick = next(index for index, trouble in enumerate(troubles) if trouble)
    assert "" in troubles[first_sick:]


def test_one_question_is_under_way_at_a_time_and_the_next_is_put_when_it_is_answered() -> None:
    questions = PulseQuestions()
    assert not questions.tick()
    assert not questions.tick()
    assert (questions.liveness.longest.who, questions.liveness.longest.ticks) == ("node", 2)
    questions.answered(ProgressReport(5, None, 1))
    assert questions.tick()
    assert questions.liveness.longest.ticks == 0
    assert not questions.tick(), "the next one has not been answered"
    assert questions.liveness.longest.ticks == 1


def test_a_question_that_was_given_up_is_put_again_and_counts_as_no_answer() -> None:
    questions = PulseQuestions()
    questions.answered(None)
    assert questions.tick()
    assert questions.liveness.longest.ticks == 1


def test_of_ranks_that_hang_together_the_one_that_does_not_answer_has_begun() -> None:
    waits = Stall("worker", "iteration 7 has not returned", TICKS, 8, "worker")
    silent = Stall("worker", NO_ANSWER, SICK_TICKS, 7, "worker")
    late = Stall("node", NO_ANSWER, 2, 7, "node")
    assert who_began([waits, silent]) == 1
    assert who_began([waits, late]) == 0, "an answer that is two ticks late keeps nobody"
    assert who_began([silent, waits, waits]) == 0
