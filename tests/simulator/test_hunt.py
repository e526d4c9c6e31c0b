"""Fresh seeds for HUNT_SECONDS, drawn anew or from HUNT_SEED on."""

import os
import time
from unittest.mock import Mock

import pytest

from tandem.core.settings import AllocationPolicy, SchedulePolicy
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.faults.options import FIRST_OFF_RECORD, draw_options
from tandem.simulator.hunt import lived_ns, num_cores, run_seed, run_until
from tandem.simulator.oracle import Script
from tandem.simulator.report import SeedResult, Summary
from tandem.simulator.workload import WorkloadRequest
from tandem.transfer.puller import Puller
from told import Tell

SECONDS = float(os.environ.get("HUNT_SECONDS", "5"))
FIRST_SEED = int(os.environ["HUNT_SEED"])


def broken(results: list[SeedResult]) -> list[str]:
    return [f"{result.line}  # {result.invariant}: {result.detail}" for result in results if result.invariant]


def test_no_fresh_seed_breaks_an_invariant(tell: Tell) -> None:
    summary, began = Summary(FIRST_SEED), time.monotonic()
    tell(f"hunt: first seed {summary.first_seed}, {SECONDS:g} s on {num_cores()} cores")
    results: list[SeedResult] = []
    for result in run_until(summary.first_seed, lambda: time.monotonic() - began > SECONDS):
        summary.add(result)
        results.append(result)
    tell(summary.text())
    assert summary.seeds > 0
    assert not broken(results), "\n".join(broken(results))


def test_what_raises_beside_the_nodes_names_its_seed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Puller, "next_job", Mock(side_effect=KeyError("a bug")))
    result = run_seed(1)
    assert result.invariant == "S13"
    assert result.detail == "the product raised KeyError('a bug')"
    assert result.line.startswith("tandem simulate --seed 1 ")


def test_worlds_off_the_record_also_reserve_pages_late() -> None:
    seeds = range(FIRST_OFF_RECORD - 40, FIRST_OFF_RECORD + 40)
    drawn = [draw_options(seed).decode.allocation for seed in seeds]
    assert set(drawn[:40]) == {AllocationPolicy.EARLY}
    assert set(drawn[40:]) == set(AllocationPolicy)


def test_worlds_off_the_record_also_have_other_orders_of_queues() -> None:
    seeds = range(FIRST_OFF_RECORD - 200, FIRST_OFF_RECORD + 200)
    drawn = [(draw_options(seed).decode.schedule_policy, draw_options(seed).decode.priorities) for seed in seeds]
    assert set(drawn[:200]) == {(SchedulePolicy.FCFS, None)}
    assert {policy for policy, _ in drawn[200:]} == set(SchedulePolicy)
    assert {priorities is None for _, priorities in drawn[200:]} == {True, False}


def half(arrived_at: int, ended_at: int | None) -> Half:
    ask = WorkloadRequest(1, 0, Script((7,), 1, 0), 1, 0, None, None, repeats_room=False)
    exchange = RoutedRequest(ask, None)
    one = Half(exchange, ask, "unified", "unified-0", 1, 1, None, arrived_at, 100, 0, 0, ask.script)  # type: ignore[arg-type]  # no life is looked at
    one.ended_at = ended_at
    return one


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([], 0),
        ([(10, 30)], 20),
        ([(10, 30), (40, 50)], 30),
        ([(10, 30), (20, 50)], 40),
        ([(10, 50), (20, 30)], 40),
        ([(10, None)], 90),
    ],
)
def test_hours_count_only_while_a_request_lives(lives: list[tuple[int, int | None]], expected: int) -> None:
    assert lived_ns([half(*life) for life in lives], now=100) == expected
