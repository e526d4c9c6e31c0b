"""Every interleaving of the small worlds holds, every table entry is visited, and a broken core is found there.

TANDEM_EXHAUSTIVE_DEPTH searches the worlds that are cut at a depth to that depth instead.
"""

import os
import subprocess
import sys
from collections.abc import Iterable

import msgspec
import pytest

from seeded_bugs import MUTANTS
from tandem.core.commands import FetchPages
from tandem.core.disagg import decode_side
from tandem.core.events import Event, PagesCopied, RequestArrived
from tandem.core.kv.storage_tier import StorageTier
from tandem.core.machine import Machine
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Incarnation, Nanos, RequestId, Room
from tandem.simulator.model_check.data_plane import SHARD
from tandem.simulator.model_check.exhaustive import MACHINES, Found, entries, explore, explore_all, report
from tandem.simulator.model_check.forks import world_state
from tandem.simulator.model_check.replica_value import Draft
from tandem.simulator.model_check.transitions import TRANSITIONS
from tandem.simulator.model_check.worlds import SMALL_WORLDS, TO_THE_END
from told import Tell

DEPTH = int(os.environ.get("TANDEM_EXHAUSTIVE_DEPTH", "0"))
WORLDS = {small.name: small for small in SMALL_WORLDS}
LONGEST = ("aborts", "timers", "times and failures", "blocks")  # more than half of the time of all


def searched(names: Iterable[str]) -> list[Found]:
    worlds = [WORLDS[name] for name in names]
    return explore_all([msgspec.structs.replace(small, depth=max(small.depth, DEPTH)) for small in worlds])


@pytest.fixture(scope="module")
def founds() -> list[Found]:
    return searched(name for name in WORLDS if name not in LONGEST)


def test_no_interleaving_breaks_an_invariant_or_leaves_anything_behind(founds: list[Found], tell: Tell) -> None:
    tell(report(founds))
    assert [found.violation for found in founds if found.violation] == []


@pytest.mark.slow
def test_no_interleaving_of_the_worlds_that_take_longest_does() -> None:
    """The first has two requests and an abort at every point, to the end."""
    founds = searched(LONGEST)
    assert [(found.name, found.is_whole, found.violation) for found in founds] == [(name, True, "") for name in LONGEST]
    assert len(WORLDS["aborts"].prompts) == 2
    assert founds[0].states >= 50_000


def test_the_search_is_deep_and_wide_enough(founds: list[Found]) -> None:
    assert sum(found.states for found in founds) >= 50_000
    assert all(found.depth >= 12 for found in founds)
    assert [found.name for found in founds if not found.is_whole] == [
        small.name for small in SMALL_WORLDS if small.depth < TO_THE_END
    ]


def test_every_entry_of_the_tables_is_visited(founds: list[Found]) -> None:
    visited = set().union(*(found.visited for found in founds))
    assert [entry for entry in entries() if entry not in visited] == []


# --- a search that finds nothing in a broken core is worth nothing ----------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "world", "invariants"),
    [
        ("pages_freed_with_a_batch_in_flight", "failures", {"S2"}),
        ("source_pages_freed_without_waiting_for_readers", "failures", {"S3", "S4"}),
        ("destination_pages_freed_without_waiting_for_the_transfer", "failures", {"S4"}),
        ("cancelled_pull_is_drained_while_a_page_may_still_land", "failures", {"S4"}),
        ("last_page_leaks", "messages", {"S1", "S17"}),
        ("terminal_event_comes_twice", "messages", {"S12"}),
        ("decode_starts_before_the_last_page_has_landed", "messages", {"S19"}),
        ("release_is_forgotten", "messages", {"L5"}),
        ("iteration_is_used_twice", "messages", {"S24"}),
        ("stall_timeout_has_no_timer", "messages", {"L1", "S17"}),
        ("forget_comes_after_the_next_batch", "cached", {"S2", "S5"}),
        ("leaving_the_decode_set_is_not_told", "overlap", {"S2", "S5"}),
        ("first_token_of_a_retracted_request_is_lost", "pressure", {"S5"}),
    ],
)
def test_a_broken_core_is_found(mutant: str, world: str, invariants: set[str]) -> None:
    with MUTANTS[mutant].breaks():
        found = explore(WORLDS[world])
    assert found.violation.startswith(tuple(f"{world}: {invariant}: " for invariant in invariants)), found.violation


def test_a_decode_that_expects_one_token_of_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "num_sampled", lambda length, block_tokens: 1)
    assert explore(WORLDS["blocks"]).violation


def test_a_decode_that_does_not_say_ready_again_when_it_has_pages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "want_pages", lambda *_: None)
    assert explore(WORLDS["late pages"]).violation


def test_pages_from_storage_that_are_neither_kept_nor_freed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageTier, "finish_fetch", lambda *_: 0)
    told = explore(WORLDS["storage"]).violation
    assert told.startswith("storage: S17: "), told
    assert "pages on their way" in told


def test_what_was_written_before_a_side_died_is_fetched_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[object, ...]] = []
    answers = TRANSITIONS["storage answers"]

    def watched(draft: Draft) -> tuple[Event, ...] | None:
        asked, events = draft.asked[0], answers(draft)
        if isinstance(asked, FetchPages):
            assert events == (PagesCopied(asked.copy, SHARD, len(asked.hashes)),)
            fetched.append((draft.cast.name, draft.life.id, len(asked.hashes)))
        return events

    monkeypatch.setitem(TRANSITIONS, "storage answers", watched)
    assert explore(WORLDS["storage"]).violation == ""
    assert set(fetched) == {("prefill", "2", 1), ("decode", "2", 1)}, "by the second life of each"


def test_a_violation_is_told_as_the_shortest_way_there() -> None:
    with MUTANTS["terminal_event_comes_twice"].breaks():
        told = explore(WORLDS["messages"]).violation.splitlines()
    assert told[0].startswith("messages: S12: ")
    assert told[1] == "after 2 moves:"
    moves = [line.strip() for line in told if line.startswith("  ") and line.strip()[0].isdigit() and ". " in line[:6]]
    assert moves == ["1. prefill: request 1 arrives", "2. prefill: request 1 aborts"]
    assert any("< request 1 arrived: 5+2 tokens room 11" in line for line in told)
    assert told[-1].strip() == told[0].removeprefix("messages: ")  # replayed from the start, it is there again


# --- what the search rests on ----------------------------------------------------------------------------------------


def node_after(start: int, *, steps: int, timeout_ns: int = 20 * SECOND) -> EngineNode:
    """A prefill with one request, after some more steps."""
    node = EngineNode(NodeSettings(Role.PREFILL, Incarnation("prefill", "1"), num_pages=4, page_size=4))
    node.step(
        [RequestArrived(Request(RequestId(1), "rid", 5, (b"x" * 16,), 2, Nanos(timeout_ns), Room(7)))], Nanos(start)
    )
    for _ in range(steps):
        node.step((), Nanos(start))
    return node


def test_a_situation_does_not_depend_on_the_clock_or_the_number_of_steps() -> None:
    early, late = node_after(10**12, steps=1), node_after(3 * 10**12, steps=9)
    assert early.snapshot() != late.snapshot()
    assert world_state(early.snapshot(), Nanos(10**12)) == world_state(late.snapshot(), Nanos(3 * 10**12))


def test_a_situation_depends_on_how_long_a_request_may_still_wait() -> None:
    one, other = node_after(10**12, steps=1), node_after(10**12, steps=1, timeout_ns=21 * SECOND)
    assert world_state(one.snapshot(), Nanos(10**12)) != world_state(other.snapshot(), Nanos(10**12))
    later = Nanos(10**12 + SECOND)
    assert world_state(one.snapshot(), later) != world_state(one.snapshot(), Nanos(10**12))


def test_a_search_leaves_the_tables_as_they_were() -> None:
    before: list[tuple[Machine, object]] = [(machine, machine.rules) for machine in MACHINES]
    assert explore(WORLDS["queued"], depth=6).visited
    assert all(machine.rules is rules for machine, rules in before)


@pytest.mark.slow
def test_a_search_is_the_same_whatever_the_hash_seed() -> None:
    said = set()
    for hash_seed in ("0", "4711"):
        command = [sys.executable, "-m", "tandem.simulator.model_check.exhaustive", "--world", "queued"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said.add(done.stdout.partition(", run to the end")[0])
    (line,) = said
    assert line.startswith("queued ")
