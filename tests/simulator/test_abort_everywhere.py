"""F13: an abort after every single step of a small story, on either half, leaves nothing behind.

The stories are those of `tests/scenarios`; the checkers of the simulation look on, and the world has to be empty at
the end. So every state of both lifecycles meets an abort, a peer that is lost, and a deadline that is over.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.core.events import AbortRequested, Event, PeerLost, StopMatched
from tandem.core.values import RequestId
from tandem.simulator.actors.replica import Life
from tandem.simulator.scenario.play import DIVIDER, Scenario
from tandem.simulator.world import World

STORIES = Path(__file__).parent.parent / "scenarios"
NAMES = (
    "one_request_disaggregated",
    "peer_ready_overtakes_request",
    "failed_transfer_is_recomputed",
    "ready_withheld_tells_off_retry_park_apart",
    "retraction_recomputes",
    "overlapped_batch_keeps_its_iteration",
)
RECOUNT_EVERY = 16  # events, mostly heartbeats; what a step does is checked after each, and all at the end
Meddle = Callable[[World, Life], list[Event]]


def abort(world: World, life: Life) -> list[Event]:
    return [AbortRequested(request) for request in life.halves]


def stop(world: World, life: Life) -> list[Event]:
    for half in life.halves.values():
        half.stop_sent = True
    return [StopMatched(request) for request in life.halves]


def lose_all_peers(world: World, life: Life) -> list[Event]:
    others = [replica.life.incarnation for replica in world.replicas.values()]
    return [PeerLost(other) for other in others]


def play_with(script: str, at_step: int, name: str, meddle: Meddle) -> int:
    """Play a story in which `name` gets extra events after the step number `at_step`; returns the number of steps.

    Counted are its own and those of the other role. What another replica of its own role does is not about it.
    """
    scenario = Scenario()
    scenario.read(script)
    world, steps = scenario.world, 0
    world.recount_every = RECOUNT_EVERY
    record, role = world.trace, world.replicas[name].role

    def look(now, life, events, commands) -> None:  # type: ignore[no-untyped-def]
        nonlocal steps
        record(now, life, events, commands)
        counts = life.replica.name == name or life.replica.role is not role
        steps += counts
        if counts and steps == at_step:
            target = world.replicas[name].life
            for event in meddle(world, target):
                world.push(target, event)

    world.trace = look
    scenario.until_ns = 1300 * 10**9  # beyond every deadline
    scenario.run()
    world.checkers.at_idle()
    halves = [half for replica in world.replicas.values() for half in replica.life.halves.values()]
    assert halves
    assert all(half.terminal is not None for half in halves)
    return steps


@pytest.mark.parametrize("meddle", [abort, stop, lose_all_peers], ids=["abort", "stop", "peer lost"])
@pytest.mark.parametrize("story", NAMES)
def test_after_every_step_of_a_story(story: str, meddle: Meddle) -> None:
    script = (STORIES / f"{story}.txt").read_text().partition(DIVIDER)[0]
    scenario = Scenario()
    scenario.read(script)
    names = list(scenario.world.replicas)
    for name in names:
        step, num_steps = 1, 2
        while step <= num_steps:
            num_steps = play_with(script, step, name, meddle)
            step += 1
            if step > 80:
                break
    assert step > 8, "a story of a few steps says little"


def test_an_abort_of_a_request_that_is_not_there_changes_nothing() -> None:
    script = (STORIES / "one_request_unified.txt").read_text().partition(DIVIDER)[0]
    assert play_with(script, 1, "unified-0", lambda world, life: [AbortRequested(RequestId(99))]) > 3
