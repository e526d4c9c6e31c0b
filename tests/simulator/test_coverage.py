"""Rare states: those on record are rare, and not so rare that nobody would ever see them.

That their seeds reach them is in `test_known_seeds.py`.
"""

from collections import Counter

import pytest

from tandem.cli.main import main
from tandem.simulator.coverage import RATE_MAX, RATE_MIN, load, table
from tandem.simulator.hunt import run_seed
from tandem.simulator.occurrences import every_name

MUST_BE_RECORDED = (
    "prefill is aborted parked",
    "no result slot is left, with a READY one behind",
    "READY for another incarnation is rejected",
    "a transfer is given up after pages have landed",
    "pages land after the transfer was given up",
    "a restored copy decides while pages arrive",
    "the delayer holds prompts",
    "a drain begins with requests under way",
    "a later shard fails",
    "a watchdog fired on a node",
    "a watchdog fired on a worker",
    "a server was unhealthy and recovered",
)
AGAIN = "python -m tandem.simulator.record_coverage"


def test_about_sixty_states_or_more_are_on_record() -> None:
    assert len(load()) >= 60
    assert set(MUST_BE_RECORDED) - set(load()) == set(), AGAIN


def test_what_is_on_record_is_rare_and_not_too_rare() -> None:
    assert [name for name, rare in load().items() if not RATE_MIN <= rare.rate <= RATE_MAX] == []


def test_watching_changes_nothing() -> None:
    assert run_seed(7, watches=True).log_hash == run_seed(7).log_hash


def test_the_table_names_what_was_not_reached() -> None:
    name = next(iter(load()))
    lines = list(table(10, Counter({name: 3})))
    assert any(line.endswith(f"  {name}") and line.split()[0] == "3" for line in lines)
    assert sum("not reached" in line for line in lines) == len(load()) - 1


def test_simulate_prints_the_rare_states_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "7", "--coverage", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert all(name in printed.err for name in MUST_BE_RECORDED)
    assert all(f"  {name}" in printed.err for name in every_name())
    assert "  Status NOT_A_MEMBER: never" in printed.err
