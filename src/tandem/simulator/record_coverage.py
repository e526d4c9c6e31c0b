"""Measures the rare states anew: `python -m tandem.simulator.record_coverage [SEEDS]` writes coverage.json beside it.

To be run when the core or the faults have changed so much that the seeds on record do not reach their states any more.
A state that was on record and is not reached keeps its row out, and is named: somebody has to look why.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.simulator.coverage import RATE_MAX
from tandem.simulator.hunt import run_seeds
from tandem.simulator.report import SeedResult

RECORD = Path(__file__).with_name("coverage.json")
SEEDS = 2000
MIN_SEEDS = 2  # that reach a state, or it is left to chance


def measure(num_seeds: int) -> dict[str, tuple[int, float]]:
    """Name -> a seed that reaches it, rate; the most frequent first."""
    results = list(run_seeds(0, num_seeds, watches=True))
    count = Counter(name for result in results for name in result.rare)
    rare = [name for name in count if MIN_SEEDS <= count[name] <= RATE_MAX * num_seeds]
    rare.sort(key=lambda name: (-count[name], name))
    seeds = cover(results, rare)
    return {name: (seeds[name], round(count[name] / num_seeds, 5)) for name in rare}


def cover(results: Sequence[SeedResult], names: Iterable[str]) -> dict[str, int]:
    """A seed for each name: of few seeds with few events, since tests run all of them."""
    missing, seeds = set(names), dict[str, int]()
    while missing:
        best = max(results, key=lambda result: len(missing & set(result.rare)) / result.num_events)
        found = missing & set(best.rare)
        seeds.update(dict.fromkeys(found, best.seed))
        missing -= found
    return seeds


def main(num_seeds: int) -> None:
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now = measure(num_seeds)
    rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in now.items())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    for name in before.keys() - now.keys():
        print(f"not rare, or not reached any more: {name}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
