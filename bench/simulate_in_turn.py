"""Two checkouts simulate the same fast seeds in turn: what this one makes of a second of CPU, against the other.

    python bench/simulate_in_turn.py OTHER [--seeds 60] [--rounds 5] [--first-seed K] [--output FILE]

OTHER is another checkout of Tandem, with the simulator at `src/tandem/simulator`. Both run every block of seeds once a
round, one behind the other and each in a process of its own that has simulated a seed before. What counts is a block's
least CPU time over the rounds, since others on the machine can only add to it. A seed may come to more or fewer events
in one of the two, so events say what a step costs and seeds what a world costs. The last line is one JSON document.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from conditions import conditions

HERE = Path(__file__).resolve().parents[1]
BLOCK = 10  # seeds
SCRIPT = """
import json, os, sys
from tandem.simulator.hunt import run_seed
first, count = int(sys.argv[1]), int(sys.argv[2])
run_seed(first)
began, events = os.times(), 0
for seed in range(first, first + count):
    events += run_seed(seed).num_events
ended = os.times()
print(json.dumps([ended.user + ended.system - began.user - began.system, events]))
"""


def block(checkout: Path, first: int) -> tuple[float, int]:
    """(CPU seconds, events) of these seeds."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(first), str(BLOCK)],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    cpu_s, events = json.loads(done.stdout)
    return cpu_s, events


def in_turn(checkouts: dict[str, Path], first: int, num_blocks: int, rounds: int) -> dict[str, tuple[float, int]]:
    """(CPU seconds, events) of all seeds, by checkout."""
    totals: dict[str, tuple[float, int]] = dict.fromkeys(checkouts, (0.0, 0))
    for start in range(first, first + num_blocks * BLOCK, BLOCK):
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in checkouts}
        for number in range(rounds):
            for name in sorted(checkouts, reverse=number % 2 == 1):
                runs[name].append(block(checkouts[name], start))
        for name, found in runs.items():
            cpu_s, events = min(found)
            totals[name] = (totals[name][0] + cpu_s, totals[name][1] + events)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=5000)
    parser.add_argument("--output", type=Path, help="also write the JSON line there")
    args = parser.parse_args()
    known = conditions()
    other = subprocess.run(
        ["git", "-C", str(args.other), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    num_blocks = -(-args.seeds // BLOCK)
    totals = in_turn({"this": HERE, "other": args.other.resolve()}, args.first_seed, num_blocks, args.rounds)
    num_seeds = num_blocks * BLOCK
    rates = {
        name: {"seeds_per_cpu_second": num_seeds / cpu_s, "events_per_cpu_second": events / cpu_s}
        for name, (cpu_s, events) in totals.items()
    }
    document = {
        "bench": "simulate_in_turn",
        "other_commit": other,
        "first_seed": args.first_seed,
        "seeds": num_seeds,
        "rounds": args.rounds,
        "events_per_seed": {name: round(events / num_seeds) for name, (_, events) in totals.items()},
        "rates": {name: {unit: round(rate, 1) for unit, rate in of.items()} for name, of in rates.items()},
        "ratios": {unit: round(rates["this"][unit] / rates["other"][unit], 3) for unit in rates["this"]},
        **known,
    }
    print(json.dumps(document))
    if args.output is not None:
        args.output.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
