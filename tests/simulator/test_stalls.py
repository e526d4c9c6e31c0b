"""What hangs in a simulated server is found by the product's watchdog, in the server's own time; nobody else is."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.stall_detector import SICK_TICKS, TICKS
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.oracle import Script, Violation
from tandem.simulator.scenario.parse import quiet_options
from tandem.simulator.workload import WorkloadRequest
from tandem.simulator.world import World

TICK_NS = 100 * MILLISECOND
TIMEOUT_NS = TICKS * TICK_NS
NAME = "prefill-0"


def a_world(**options: object) -> World:
    """One router in front of two pairs; everybody has registered, and it has found everybody."""
    quiet = replace(quiet_options(), num_prefills=2, num_decodes=2, num_gateways=1, direct_share=0.0)
    world = World(replace(quiet, watchdog_ns=TIMEOUT_NS, **options))  # type: ignore[arg-type]  # any of them
    world.run(SECOND)
    return world


def ask(world: World, *, max_new_tokens: int = 4) -> None:
    """A request of the router's client, now."""
    script = Script(tuple(range(100, 112)), max_new_tokens, 0)
    world.edge.num_to_come += 1
    world._ask(
        WorkloadRequest(0, world.clock.time, script, 60 * SECOND, 0, None, None, repeats_room=False, is_direct=False)
    )


def hang(world: World, what: Hang, *, duration_ns: int = 100 * SECOND) -> Life:
    """The life in which it hangs; with a batch under way where one is needed."""
    world.injector.hang(NAME, what, duration_ns=duration_ns)
    ask(world)
    life = world.replicas[NAME].life
    assert life is not None
    return life


def run_for(world: World, duration_ns: int) -> None:
    world.run(world.clock.time + duration_ns)


def is_healthy(world: World) -> bool:
    return world.servers[NAME].is_healthy


def ticks_until(world: World, happens: Callable[[], bool]) -> int:
    for ticks in range(2 * TICKS):
        if happens():
            return ticks
        run_for(world, TICK_NS)
    pytest.fail("it does not happen")


@pytest.mark.parametrize("what", Hang)
def test_a_server_in_which_something_hangs_ends_in_time(what: Hang) -> None:
    world = a_world()
    life = hang(world, what)
    assert TICKS <= ticks_until(world, lambda: not life.is_alive) <= TICKS + 2


@pytest.mark.parametrize("what", Hang)
def test_it_is_unhealthy_half_of_that_time_before(what: Hang) -> None:
    world = a_world()
    life = hang(world, what)
    assert SICK_TICKS <= ticks_until(world, lambda: not is_healthy(world)) <= SICK_TICKS + 2
    assert life.is_alive


@pytest.mark.parametrize("what", Hang)
def test_what_goes_on_in_time_makes_the_server_well_again(what: Hang) -> None:
    world = a_world()
    life = hang(world, what, duration_ns=(SICK_TICKS + 5) * TICK_NS)
    ticks_until(world, lambda: not is_healthy(world))
    ticks_until(world, lambda: is_healthy(world))
    run_for(world, 2 * TIMEOUT_NS)
    assert life.is_alive
    assert world.watchdogs.num_recovered == 1


def test_a_server_that_was_paused_as_a_whole_goes_on() -> None:
    world = a_world()
    life = world.replicas[NAME].life
    ask(world)
    world.injector.pause(NAME, duration_ns=5 * TIMEOUT_NS)
    run_for(world, 10 * TIMEOUT_NS)
    assert world.replicas[NAME].life is life
    assert world.watchdogs.num_recovered == 0


def test_a_pause_is_no_part_of_the_time_in_which_something_hangs() -> None:
    world = a_world()
    life = hang(world, Hang.WORKER, duration_ns=100 * TIMEOUT_NS)
    run_for(world, SICK_TICKS * TICK_NS)
    world.injector.pause(NAME, duration_ns=5 * TIMEOUT_NS)
    run_for(world, 5 * TIMEOUT_NS)
    assert life.is_alive
    ticks_until(world, lambda: not life.is_alive)


def test_a_server_without_requests_is_not_taken_for_one_that_hangs() -> None:
    world = a_world()
    ask(world)
    run_for(world, 10 * TIMEOUT_NS)
    assert not world.watchdogs.fired
    assert is_healthy(world)


def test_an_idle_server_whose_worker_hangs_is_found_too() -> None:
    world = a_world()
    world.injector.hang(NAME, Hang.WORKER, duration_ns=100 * SECOND)
    ticks_until(world, lambda: bool(world.watchdogs.fired))
    assert dict(world.watchdogs.fired) == {"worker": 1}


@pytest.mark.parametrize("what", Hang)
def test_its_requests_are_tried_again_elsewhere(what: Hang) -> None:
    world = a_world()
    hang(world, what)
    (caller,) = world.gateways["router-0"].callers.values()
    run_for(world, 50 * SECOND)
    assert caller.outcome == "finished"


def test_the_server_is_started_again_and_hangs_no_more() -> None:
    world = a_world()
    life = hang(world, Hang.NODE)
    ticks_until(world, lambda: not life.is_alive)
    run_for(world, 70 * SECOND)
    again = world.replicas[NAME].life
    assert again is not None
    assert again.incarnation.id != life.incarnation.id
    assert world.replicas[NAME].paused_until <= world.clock.time
    assert is_healthy(world)


def test_healing_ends_what_hangs() -> None:
    world = a_world()
    life = hang(world, Hang.BATCH)
    run_for(world, TICK_NS)
    world.num_planned += 1
    world.injector.heal()
    run_for(world, 2 * TIMEOUT_NS)
    assert world.replicas[NAME].life is life
    assert life.vitals.hang is None


def test_a_worker_that_hangs_says_what_it_has_to_say_when_it_goes_on() -> None:
    world = a_world()
    life = hang(world, Hang.WORKER, duration_ns=5 * TICK_NS)
    run_for(world, TICK_NS)
    assert life.workers.sampling.held is not None
    run_for(world, 10 * SECOND)
    assert life.workers.sampling.held is None
    assert not life.store.held
    assert life.is_alive


# --- the checker -----------------------------------------------------------------------------------------------------


def test_a_server_that_is_ended_while_it_makes_progress_breaks_the_invariant() -> None:
    world = a_world()
    ask(world)
    run_for(world, TICK_NS)
    life = world.replicas[NAME].life
    assert life is not None
    world.checkers.stalls.ticked(life)
    with pytest.raises(Violation, match=r"L8.*ended after"):
        world.checkers.stalls.fired(life)


def test_a_watchdog_that_never_fires_breaks_the_invariant() -> None:
    world = a_world()
    life = hang(world, Hang.NODE)
    life.vitals.liveness.tick = lambda pulse: None  # type: ignore[method-assign]  # the bug itself
    with pytest.raises(Violation, match="L8"):
        run_for(world, 2 * TIMEOUT_NS)


def test_who_hangs_and_is_not_watched_breaks_the_invariant() -> None:
    world = a_world()
    life = hang(world, Hang.NODE)
    life.vitals.is_watched = False
    with pytest.raises(Violation, match=r"L8.*no watchdog looks"):
        world.checkers.stalls.recount(life)


def test_a_worker_that_hangs_again_a_moment_after_it_went_on_is_counted_anew() -> None:
    """Between two ticks of the watchdog, which has its answer all the same."""
    world = a_world()
    life = hang(world, Hang.WORKER, duration_ns=15 * TICK_NS // 2)
    run_for(world, 15 * TICK_NS // 2 + MILLISECOND)
    assert life.vitals.hang is None
    world.injector.hang(NAME, Hang.WORKER, duration_ns=12 * TICK_NS)
    run_for(world, 20 * TICK_NS)
    assert life.vitals.num_hangs == 2
    assert is_healthy(world)
    assert not world.watchdogs.fired
