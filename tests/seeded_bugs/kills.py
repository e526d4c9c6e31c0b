"""Whether a seeded bug is noticed, and by what. All of them at once, on all cores."""

from collections.abc import Sequence

from seeded_bugs.base import MUTANTS
from tandem.simulator.hunt import run_each, run_seed
from tandem.simulator.report import SeedResult

PATIENCE = 12  # seeds after the recorded one: a change of the core may move the moment at which a bug shows


def kill(index: int) -> SeedResult:
    """The first of some seeds on which the invariant that this mutant is for breaks; else the last seed."""
    import seeded_bugs  # noqa: F401  # registers them all, in a process that has found this function alone

    mutant = list(MUTANTS.values())[index]
    with mutant.breaks():
        result = run_seed(mutant.seed)
        for seed in range(mutant.seed + 1, mutant.seed + PATIENCE):
            if result.invariant == mutant.killed_by[0]:
                break
            result = run_seed(seed)
    return result


def kill_all(names: Sequence[str]) -> dict[str, SeedResult]:
    order = list(MUTANTS)
    return dict(zip(names, run_each([order.index(name) for name in names], kill), strict=True))
