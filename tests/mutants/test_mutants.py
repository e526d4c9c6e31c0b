"""Every seeded bug is noticed by one of the checkers that should notice it. A simulator that stays silent fails."""

import pytest

from tandem.sim.hunt import run_seed
from tandem.sim.mutants import MUTANTS
from tandem.sim.report import SeedResult

PATIENCE = 12  # seeds after the recorded one: a change of the core may move the moment at which a bug shows


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    noticed: list[SeedResult] = []
    with mutant.breaks():
        for seed in range(mutant.seed, mutant.seed + PATIENCE):
            noticed.append(run_seed(seed))
            if noticed[-1].invariant in mutant.killed_by:
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


def test_every_invariant_that_is_claimed_has_a_mutant() -> None:
    killed = {invariant for mutant in MUTANTS.values() for invariant in mutant.killed_by}
    claimed = {
        "S1", "S2", "S3", "S4", "S5", "S6", "S8", "S9", "S10", "S12", "S13", "S14", "S16", "S17", "S19", "S24",
        "S25", "S30", "S33", "W1", "W2", "L1", "L2", "L5", "L6",
    }  # fmt: skip
    assert claimed <= killed
