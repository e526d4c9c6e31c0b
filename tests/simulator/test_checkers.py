"""The checkers are checked: one that loses count is caught by the recount, and whoever breaks a rule is named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.disagg.messages import Offer, Ready, Release
from tandem.core.events import LoadsGathered
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.delayer_policy import Decision, Estimation, Reason
from tandem.core.scheduler.state import DelayerState
from tandem.core.settings import DelayerSettings
from tandem.core.values import SECOND, Incarnation, Nanos, Room
from tandem.simulator.checkers.accounting import HitRate
from tandem.simulator.checkers.agreement import DelayerVetoes, OneSequence, OneVerdict, SameSet
from tandem.simulator.checkers.changes import PingPong, StateChanges
from tandem.simulator.checkers.intake import NoNewWork
from tandem.simulator.checkers.outside import malformed
from tandem.simulator.checkers.pages import TenantsApart
from tandem.simulator.checkers.stalls import StallChecker
from tandem.simulator.checkers.stream import StreamsInOrder
from tandem.simulator.clock import LocalClock
from tandem.simulator.faults.options import draw_options
from tandem.simulator.hunt import run_seed
from tandem.simulator.oracle import Violation
from tandem.simulator.world import RECOUNT_EVERY, World

SEEDS = range(60)
OFTEN = {"L7 misses a retraction": 8}  # events between recounts: one has to meet who is pushed back


def every_fifth(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, that now and then does not look."""
    calls = 0

    def looks(checker: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls % 5 == 0 else method(checker, *arguments, **named)

    return looks


def forgets_to_note(method: Callable[..., Any]) -> Callable[..., Any]:
    """`StateChanges` that finds the moves and then loses what it saw of this life."""
    calls = 0

    def looks(checker: StateChanges, life: Any) -> Any:
        nonlocal calls
        calls += 1
        moves = method(checker, life)
        if calls % 40 == 0:
            checker.seen[life.incarnation] = {}
        return moves

    return looks


@contextmanager
def broken(checker: type, name: str, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(checker, name)
    setattr(checker, name, how(original))
    try:
        yield
    finally:
        setattr(checker, name, original)


BROKEN = {
    "S13 forgets a step": (StateChanges, "after_step", forgets_to_note),
    "S20 misses a batch": (OneSequence, "launched", every_fifth),
    "S21 misses a batch": (SameSet, "launched", every_fifth),
    "S22 misses an answer": (OneVerdict, "drained", every_fifth),
    "S26 misses an admission": (HitRate, "moved", every_fifth),
    "S32 misses a batch": (TenantsApart, "launched", every_fifth),
    "L7 misses a retraction": (PingPong, "moved", lambda method: lambda checker, life, progress, before: None),
    "L8 misses a tick": (StallChecker, "ticked", every_fifth),
    "L9 misses a drain": (NoNewWork, "heard", lambda method: lambda checker, life, events: None),
}


def broken_in(seed: int, recount_every: int) -> str:
    """The invariant that its world breaks."""
    world = World(draw_options(seed), recount_every=recount_every)
    try:
        world.schedule_all()
        world.run()
    except Violation as violation:
        return violation.invariant
    return ""


@pytest.mark.parametrize("name", BROKEN)
def test_a_checker_that_loses_count_is_caught(name: str) -> None:
    """A quiet checker is not a passed check: its books are compared with the nodes' at every recount."""
    checker, method, how = BROKEN[name]
    found: set[str] = set()
    with broken(checker, method, how):
        for seed in SEEDS:
            found.add(broken_in(seed, OFTEN.get(name, RECOUNT_EVERY)))
            if name.split()[0] in found:
                return
    pytest.fail(f"{name}, and nobody sees it; found {found}")


def test_a_lost_count_of_tokens_is_caught() -> None:
    """`StreamsInOrder` keeps no count of its own; it compares the two that are there, the node's and the client's."""
    with broken(StreamsInOrder, "began", lambda method: lambda checker, life, command: None):
        assert run_seed(0).invariant == "S15"


def test_every_checker_with_books_of_its_own_has_a_recount() -> None:
    with_books = (
        StateChanges,
        OneSequence,
        SameSet,
        OneVerdict,
        HitRate,
        TenantsApart,
        PingPong,
        NoNewWork,
        StallChecker,
    )
    assert all(hasattr(checker, "recount") for checker in with_books)


def ready(**changes: Any) -> Ready:
    fields: dict[str, Any] = {
        "room": Room(1),
        "attempt": 1,
        "source": Incarnation("d", "1"),
        "target": Incarnation("p", "1"),
    }
    return Ready(**{**fields, "layout": "", "prompt_len": 8, **changes})


def offer(**changes: Any) -> Offer:
    fields: dict[str, Any] = {"room": Room(1), "attempt": 1, "source": Incarnation("p", "1"), "first_page": 0}
    pages: dict[str, Any] = {
        "pages": (1, 2),
        "generations": (0, 0),
        "digests": (bytes(16),),
        "secrets": (b"",),
        "total_pages": 2,
    }
    return Offer(**{**fields, **pages, "lease_ns": Nanos(SECOND), **changes})


@pytest.mark.parametrize("message", [ready(), offer(), Release(Room(1), Incarnation("d", "1"), "done")])
def test_what_keeps_the_protocol_is_well_formed(message: Ready | Offer | Release) -> None:
    assert malformed(message) is None


@pytest.mark.parametrize(
    "message",
    [
        ready(room=Room(0)),
        ready(room=Room(1 << 63)),
        ready(held_pages=-1),
        ready(held_pages=9),
        offer(generations=(0,)),
        offer(digests=(bytes(8),)),
        offer(total_pages=1),
        offer(first_page=-1),
    ],
)
def test_what_does_not_keep_the_protocol_is_not(message: Ready | Offer) -> None:
    assert malformed(message) is not None


@pytest.mark.parametrize("drift_ppm", [-200, 0, 200])
def test_a_local_clock_wakes_when_it_shows_the_time(drift_ppm: int) -> None:
    clock = LocalClock(offset_ns=7 * SECOND, drift_ppm=drift_ppm)
    for local_ns in (7 * SECOND, 8 * SECOND + 1, 3600 * SECOND):
        when = clock.when(local_ns)
        assert clock.read(when) >= local_ns
        assert clock.read(when - 2) < local_ns


# --- vetoes of the delayer -------------------------------------------------------------------------------------------

VETO = Decision(False, Reason.DELAY, Estimation.ALL)
CLOSED = (RankLoad(True, num_running=4, num_free_slots=1, usual_batch=2, num_waiting=1),) * 2
OPEN = (RankLoad(True, num_running=0, num_free_slots=16, usual_batch=1, num_waiting=2),) * 2


def held_by(checker: DelayerVetoes, *passes: tuple[RankLoad, ...], decided_on: tuple[RankLoad, ...]) -> None:
    """A rank of two has heard of `passes` one after the other, and has decided on one of them."""
    delayer = DelayerState(load=passes[-1][0], decision=VETO, ranks=decided_on)
    life: Any = SimpleNamespace(
        incarnation=Incarnation("prefill-0", "1"),
        replica=SimpleNamespace(name="prefill-0"),
        settings=SimpleNamespace(delayer=DelayerSettings(num_ranks=2)),
        node=SimpleNamespace(state=SimpleNamespace(delayer=delayer)),
    )
    for number, ranks in enumerate(passes):
        checker.heard(life, [LoadsGathered(number, ranks, DelayHistory())])
    checker.after_step(life)


def test_a_veto_is_judged_by_the_pass_that_it_was_made_from_and_by_no_later_one() -> None:
    held_by(DelayerVetoes(), CLOSED, decided_on=CLOSED)
    held_by(DelayerVetoes(), CLOSED, OPEN, decided_on=CLOSED)
    with pytest.raises(Violation, match="for no reason"):
        held_by(DelayerVetoes(), CLOSED, OPEN, decided_on=OPEN)
    with pytest.raises(Violation, match="what nobody has said"):
        held_by(DelayerVetoes(), OPEN, decided_on=CLOSED)


def test_the_seed_at_which_a_later_pass_was_taken_for_the_one_of_a_veto_is_clean() -> None:
    assert not run_seed(5052).invariant
