"""Every seeded bug is noticed, by the checker that it is there for. A simulator that stays silent fails.

That their seeds are clean without them is in `tests/simulator/test_known_seeds.py`.
"""

import pytest

from seeded_bugs import MUTANTS
from seeded_bugs.kills import PATIENCE, kill_all
from tandem.simulator.catalog import INVARIANTS
from tandem.simulator.hunt import run_seed
from tandem.simulator.report import SeedResult


@pytest.fixture(scope="module")
def noticed() -> dict[str, SeedResult]:
    return kill_all(tuple(MUTANTS))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(noticed: dict[str, SeedResult], name: str) -> None:
    mutant, result = MUTANTS[name], noticed[name]
    last = f"{result.invariant}: {result.detail}" if result.invariant else "nothing"
    assert result.invariant == mutant.killed_by[0], f"survives {PATIENCE} seeds from {mutant.seed}; the last: {last}"


def test_leaving_a_mutant_mends_the_core() -> None:
    before = run_seed(1).log_hash
    for mutant in MUTANTS.values():
        with mutant.breaks():
            pass
    assert run_seed(1).log_hash == before


def test_every_invariant_is_the_one_that_kills_a_mutant() -> None:
    """An invariant that is never the first to notice anything does not count."""
    assert {row.id for row in INVARIANTS} - {mutant.killed_by[0] for mutant in MUTANTS.values()} == set()
