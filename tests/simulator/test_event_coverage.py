"""Every event, command, message, status and code of the product occurs in random worlds, or is named with a reason.

Worlds are of two kinds: fast ones around the core, and whole clusters, which have bodies, handshakes and processes.
A short list of seeds covers all of them. With TANDEM_ALL_EVENTS=1 a thousand random seeds have to, so that whoever
hunts meets each of them without knowing the list.
"""

import os
from collections.abc import Iterator
from functools import cache, partial
from inspect import getmembers, isclass
from types import ModuleType

import pytest
from msgspec import Struct

from tandem.core.commands import FailRequest, Tell
from tandem.core.disagg.messages import Offer, Release, ResultSlot
from tandem.core.events import PeerSaid
from tandem.core.values import Cause, Incarnation, Nanos, RequestId, Room
from tandem.server import wire
from tandem.server.api.errors import RULES
from tandem.server.api.live_requests import LiveRequests
from tandem.server.node import session
from tandem.simulator.faults.fault_injector import FaultInjector
from tandem.simulator.hunt import draw_first_seed, run_all, run_each, run_seed
from tandem.simulator.occurrences import Occurrences, every_name
from tandem.simulator.report import SeedResult
from tandem.simulator.whole import world
from tandem.transfer import protocol

SEEDS = (
    8,
    11,
    14,
    27,
    77,
    106,
    117,
    120,
    144,
    166,
    249,
    315,
    347,
    389,
    432,
    481,
    492,
    557,
    602,
    614,
    620,
    626,
    631,
    772,
    10_000,
)  # every name in one of them
WHOLE_SEEDS = (10, 16, 24, 38, 74, 112)  # every name of whole clusters
MANY, MANY_WHOLE = 800, 200
PEER, ROOM = Incarnation("decode-0", "1"), Room(7)

INSIDE = "travels as JSON inside of an Answer"

NOT_SIMULATED: dict[str, str] = {
    "code no_chat_template": "the bundled model has one",
    "code busy": "takes thousands of connections",
    "code internal_error": "a bug of ours: in a simulation it is a violation of S13, not an answer",
    "data plane Registered": "NIXL is code of others, whose reads no virtual network sees",
    "Status OTHER_BACKEND": "servers of whole clusters leave it to each connection how pages come",
    "process Faults": INSIDE,
    "process Rendered": "clients of whole clusters send no template that shows a time",
    "process WorkerNumbers": INSIDE,
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


def seeds() -> list[int]:
    if not os.environ.get("TANDEM_ALL_EVENTS"):
        return list(SEEDS)
    first = draw_first_seed()
    return list(range(first, first + MANY))


@cache
def results() -> list[SeedResult]:
    return list(run_all(seeds(), watches=True))


@cache
def whole_results() -> list[SeedResult]:
    first = draw_first_seed()
    drawn = range(first, first + MANY_WHOLE) if os.environ.get("TANDEM_ALL_EVENTS") else WHOLE_SEEDS
    return list(run_each(drawn, partial(world.run_seed, watches=True), are_long=True))


def everything() -> list[SeedResult]:
    return [*results(), *whole_results()]


def occurred() -> set[str]:
    return {name for result in everything() for name in result.occurred}


def missing(results: list[SeedResult]) -> set[str]:
    return set(names()) - set(NOT_SIMULATED) - set(SELDOM) - {name for result in results for name in result.occurred}


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
    before = results()
    monkeypatch.setattr(owner, source, lambda *arguments, **named: ())
    after = [run_seed(result.seed, watches=True) if name in result.occurred else result for result in before]
    assert missing(after) >= {name}


def test_what_is_said_not_to_be_simulated_never_occurs() -> None:
    assert set(NOT_SIMULATED) & occurred() == set()
    assert {*NOT_SIMULATED, *SELDOM} - set(names()) == set(), "there is no such thing any more"


def test_whatever_occurs_has_a_name_that_is_asked_for() -> None:
    assert occurred() - set(names()) == set()


def test_none_of_these_seeds_breaks_an_invariant() -> None:
    broken = [f"{result.line}  # {result.invariant}: {result.detail}" for result in everything() if result.invariant]
    assert not broken, "\n".join(broken)


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
