"""Every event, command, message, status and code of the product occurs in random worlds, or is named with a reason.

A short list of seeds covers all of them. With TANDEM_ALL_EVENTS=1 a thousand random seeds have to, so that whoever
hunts meets each of them without knowing the list.
"""

import os
from collections.abc import Iterator
from functools import cache
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
from tandem.server.node import session
from tandem.simulator.actors.edge import Edge
from tandem.simulator.faults.fault_injector import FaultInjector
from tandem.simulator.hunt import draw_first_seed, run_all, run_seed
from tandem.simulator.occurrences import Occurrences, every_name
from tandem.simulator.report import SeedResult
from tandem.transfer import protocol

SEEDS = (8, 11, 14, 27, 106, 117, 144, 249, 315, 347, 389, 432, 481, 492, 557)  # every name in two of them
MANY = 1000
PEER, ROOM = Incarnation("decode-0", "1"), Room(7)

EDGE = "made by the HTTP edge of a server or of the router, which is not simulated: it has no bodies, paths and headers"
HANDSHAKE = "the simulated data plane has calls instead of connections: no handshake, no admission, no frames"
LINKS = "the simulated links of nodes carry messages of the rendezvous between peers that know each other"
PROCESSES = "said between the processes of one server; a simulated server calls its worker and its node"

NOT_SIMULATED: dict[str, str] = {
    "code invalid_json": EDGE,
    "code invalid_value": EDGE,
    "code unsupported": EDGE,
    "code no_chat_template": EDGE,
    "code model_not_found": EDGE,
    "code not_found": EDGE,
    "code method_not_allowed": EDGE,
    "code unauthorized": EDGE,
    "code unsigned": "made by the bootstrap server's HTTP shell; the simulated one has calls instead",
    "code forbidden": EDGE,
    "code malformed_request": EDGE,
    "code unknown_host": EDGE,
    "code cross_site": EDGE,
    "code head_too_large": EDGE,
    "code body_too_large": EDGE,
    "code not_ready": "the simulated edge of a server that loads its model answers with the status alone",
    "code node_silent": EDGE,
    "code internal_error": "a bug of ours: in a simulation it is a violation of S13, not an answer",
    "Status BUSY": HANDSHAKE,
    "Status NOT_A_MEMBER": HANDSHAKE,
    "Status WRONG_PAGE_BYTES": HANDSHAKE,
    "Status WRONG_VERSION": HANDSHAKE,
    "data plane Frame": HANDSHAKE,
    "data plane Hello": HANDSHAKE,
    "data plane Read": HANDSHAKE,
    "data plane Welcome": HANDSHAKE,
    "link Greeting": LINKS,
    "link Hello": LINKS,
    "link Ping": LINKS,
    "process Answer": PROCESSES,
    "process Connect": PROCESSES,
    "process DataEndpoint": PROCESSES,
    "process Died": PROCESSES,
    "process Disconnect": PROCESSES,
    "process Echo": PROCESSES,
    "process EngineReady": PROCESSES,
    "process FailTransfers": PROCESSES,
    "process Faults": PROCESSES,
    "process NodeReady": PROCESSES,
    "process Ping": PROCESSES,
    "process Query": PROCESSES,
    "process Reach": PROCESSES,
    "process Rendered": PROCESSES,
    "process ReplicaInfo": PROCESSES,
    "process Shutdown": PROCESSES,
    "process Submit": PROCESSES,
    "process SubmitAll": PROCESSES,
    "process WorkerNumbers": PROCESSES,
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


def occurred() -> set[str]:
    return {name for result in results() for name in result.occurred}


def missing(results: list[SeedResult]) -> set[str]:
    return set(names()) - set(NOT_SIMULATED) - {name for result in results for name in result.occurred}


def test_everything_that_is_simulated_occurs() -> None:
    assert missing(results()) == set(), f"in {len(results())} seeds from {results()[0].seed}"


@pytest.mark.parametrize(
    ("name", "owner", "source"), [("PeerReturned", FaultInjector, "flicker"), ("RequestRefused", Edge, "refuse")]
)
def test_an_event_is_missed_when_its_source_falls_silent(
    name: str, owner: type, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results()
    monkeypatch.setattr(owner, source, lambda *arguments, **named: None)
    after = [run_seed(result.seed, watches=True) if name in result.occurred else result for result in before]
    assert missing(after) >= {name}


def test_what_is_said_not_to_be_simulated_never_occurs() -> None:
    assert set(NOT_SIMULATED) & occurred() == set()
    assert set(NOT_SIMULATED) - set(names()) == set(), "there is no such thing any more"


def test_whatever_occurs_has_a_name_that_is_asked_for() -> None:
    assert occurred() - set(names()) == set()


def test_none_of_these_seeds_breaks_an_invariant() -> None:
    broken = [f"{result.line}  # {result.invariant}: {result.detail}" for result in results() if result.invariant]
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
