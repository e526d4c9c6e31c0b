"""Every seeded bug is noticed, by the checker that it is there for. A simulator that stays silent fails."""

import pytest

from tandem.simulator.catalog import checked
from tandem.simulator.hunt import run_seed
from tandem.simulator.mutants import MUTANTS
from tandem.simulator.report import SeedResult

PATIENCE = 12  # seeds after the recorded one: a change of the core may move the moment at which a bug shows


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    noticed: list[SeedResult] = []
    with mutant.breaks():
        for seed in range(mutant.seed, mutant.seed + PATIENCE):
            noticed.append(run_seed(seed))
            if noticed[-1].invariant == mutant.killed_by[0]:
                return
    others = {f"{result.invariant}: {result.detail}" for result in noticed if result.invariant}
    pytest.fail(f"{name} survives {PATIENCE} seeds from {mutant.seed}; noticed: {others or 'nothing'}")


def test_the_seeds_that_kill_are_clean_without_a_mutant() -> None:
    for seed in sorted({mutant.seed for mutant in MUTANTS.values()}):
        result = run_seed(seed)
        assert not result.invariant, f"{result.line}  # {result.invariant}: {result.detail}"


def test_leaving_a_mutant_mends_the_core() -> None:
    before = run_seed(1).log_hash
    for mutant in MUTANTS.values():
        with mutant.breaks():
            pass
    assert run_seed(1).log_hash == before


def test_every_checked_invariant_is_the_one_that_kills_a_mutant() -> None:
    """An invariant that is never the first to notice anything does not count."""
    assert set(checked()) - {mutant.killed_by[0] for mutant in MUTANTS.values()} == set()
