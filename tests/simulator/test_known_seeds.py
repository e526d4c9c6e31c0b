"""Seeds that are on record for something: each is run once, none breaks an invariant, and together they reach all.

On record are what once found something (corpus.txt), what kills a seeded bug, and what reaches a rare state. Every
event, command, message, status and code of the product occurs in one of them, or is named with a reason.

Worlds are of two kinds: fast ones around the core, and whole clusters, which have bodies, handshakes and processes.
With TANDEM_ALL_EVENTS=1 a thousand random seeds have to cover all names, so that whoever hunts meets each of them
without knowing the list.
"""

import os
from collections.abc import Iterator
from functools import cache, partial
from inspect import getmembers, isclass
from pathlib import Path
from types import ModuleType

import pytest
from msgspec import Struct

from seeded_bugs import MUTANTS
from tandem.core.commands import FailRequest, Tell
from tandem.core.disagg.messages import Offer, Release, ResultSlot
from tandem.core.events import PeerSaid
from tandem.core.values import Cause, Incarnation, Nanos, RequestId, Room
from tandem.server import wire
from tandem.server.api.errors import RULES
from tandem.server.api.live_requests import LiveRequests
from tandem.server.node import session
from tandem.simulator.coverage import load
from tandem.simulator.faults.fault_injector import FaultInjector
from tandem.simulator.hunt import draw_first_seed, run_all, run_each, run_seed
from tandem.simulator.occurrences import Occurrences, every_name
from tandem.simulator.report import SeedResult
from tandem.simulator.whole import world
from tandem.transfer import protocol

CORPUS = Path(__file__).with_name("corpus.txt")
MORE_SEEDS = (144, 866, 10_000)  # every name occurs in one of these, or of those that are on record for something else
WHOLE_SEEDS = (10, 16, 24, 38, 74, 112, 10_008, 10_046, 10_121, 10_244)  # every name of whole clusters
NEIGHBOURS = 8  # seeds after the one of a rare state: a change of the core may move the moment at which it comes up
MANY, MANY_WHOLE = 800, 200
PEER, ROOM = Incarnation("decode-0", "1"), Room(7)

AGAIN = "python -m tandem.simulator.record_coverage"

NOT_SIMULATED: dict[str, str] = {
    "code internal_error": "a bug of ours: in a simulation it is a violation of S13, not an answer",
    "data plane Registered": "NIXL is code of others, whose reads no virtual network sees",
}

SELDOM: dict[str, str] = {  # that no seed of the short list has to have
    "code node_silent": "somebody has to ask a node that hangs before the watchdog has ended it",
}


def names() -> Iterator[str]:
    """Of the simulated parts, and of those that are not: a new class or code is asked for as soon as it is there."""
    yield from every_name()
    yield from (f"code {code}" for code in RULES)
    yield from (f"data plane {name}" for name in messages_of(protocol))
    yield from (f"link {name}" for name in messages_of(session))
    yield from (f"process {name}" for name in messages_of(wire))


def messages_of(module: ModuleType) -> list[str]:
    return [
        name for name, it in getmembers(module, isclass) if issubclass(it, Struct) and it.__module__ == module.__name__
    ]


def corpus() -> list[tuple[int, str]]:
    """(seed, what it once found)"""
    lines = [line for line in CORPUS.read_text().splitlines() if line and not line.startswith("#")]
    return [(int(line.split(maxsplit=1)[0]), line.split(maxsplit=1)[1]) for line in lines]


def seeds() -> list[int]:
    once_found = {seed for seed, _ in corpus()}
    kill = {mutant.seed for mutant in MUTANTS.values()}
    reach = {rare.seed for rare in load().values()}
    return sorted({*once_found, *kill, *reach, *MORE_SEEDS})


@cache
def known_results() -> list[SeedResult]:
    return list(run_all(seeds(), watches=True))


@cache
def results() -> list[SeedResult]:
    if not os.environ.get("TANDEM_ALL_EVENTS"):
        return known_results()
    first = draw_first_seed()
    return list(run_all(range(first, first + MANY), watches=True))


@cache
def whole_results() -> list[SeedResult]:
    first = draw_first_seed()
    drawn = range(first, first + MANY_WHOLE) if os.environ.get("TANDEM_ALL_EVENTS") else WHOLE_SEEDS
    return list(run_each(drawn, partial(world.run_seed, watches=True), are_long=True))


def everything() -> list[SeedResult]:
    return [*results(), *whole_results()]


def occurred() -> set[str]:
    return {name for result in everything() for name in result.occurred}


def broken(results: list[SeedResult]) -> list[str]:
    return [f"{result.line}  # {result.invariant}: {result.detail}" for result in results if result.invariant]


def missing(results: list[SeedResult]) -> set[str]:
    return set(names()) - set(NOT_SIMULATED) - set(SELDOM) - {name for result in results for name in result.occurred}


def test_no_known_seed_breaks_an_invariant() -> None:
    assert broken(everything()) == []


def test_every_line_of_the_corpus_says_what_its_seed_found() -> None:
    found = [seed for seed, _ in corpus()]
    assert found == sorted(set(found))
    assert all(says for _, says in corpus())


def test_every_rare_state_is_reached() -> None:
    """By its own seed, or by one shortly after it."""
    missing = set(load())
    run = {result.seed for result in known_results()}
    missing -= {name for result in known_results() for name in result.rare}
    for step in range(1, NEIGHBOURS):
        neighbours = sorted({load()[name].seed + step for name in missing} - run)
        run.update(neighbours)
        for result in run_all(neighbours, watches=True):
            missing -= set(result.rare)
    assert missing == set(), AGAIN


def test_everything_that_is_simulated_occurs() -> None:
    firsts = f"{len(results())} seeds from {results()[0].seed}, {len(whole_results())} from {whole_results()[0].seed}"
    assert missing(everything()) == set(), firsts


@pytest.mark.parametrize(
    ("name", "owner", "source"),
    [("HooksChanged", FaultInjector, "change_hooks"), ("RequestRefused", LiveRequests, "_close_room")],
)
def test_an_event_is_missed_when_its_source_falls_silent(
    name: str, owner: type, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = next(result.seed for result in known_results() if name in result.occurred)
    monkeypatch.setattr(owner, source, lambda *arguments, **named: ())
    assert name not in run_seed(seed, watches=True).occurred


def test_what_is_said_not_to_be_simulated_never_occurs() -> None:
    assert set(NOT_SIMULATED) & occurred() == set()
    assert {*NOT_SIMULATED, *SELDOM} - set(names()) == set(), "there is no such thing any more"


def test_whatever_occurs_has_a_name_that_is_asked_for() -> None:
    assert occurred() - set(names()) == set()


def test_a_message_counts_with_what_it_carries_and_a_cause_only_where_a_request_ends_with_it() -> None:
    row = ResultSlot(ROOM, b"", 0, b"", 0)
    offer = Offer(ROOM, 1, PEER, 0, (), (), (), (), Nanos(1), 1, row)
    release = Release(ROOM, PEER, "aborted", Cause.PEER_LOST)
    failure = FailRequest(RequestId(1), Cause.PEER_LOST, "transfer")
    seen = Occurrences()
    seen.see_step((PeerSaid(PEER, release),), (Tell(PEER, offer), Tell(PEER, offer)))
    assert seen.counts == {
        "PeerSaid": 1,
        "Release": 1,
        "Release aborted": 1,
        "Tell": 2,
        "Offer": 2,
        "ResultSlot": 2,
    }
    seen.see_step((), (failure,))
    assert (seen.counts["FailRequest"], seen.counts["code peer_lost"]) == (1, 1)
