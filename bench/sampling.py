"""What drawing tokens costs beside taking the largest logit, in turn with another checkout of Tandem.

    python bench/sampling.py [--before CHECKOUT] [--rows 32] [--rounds 5] [--output FILE]

Random logits whose best forty stand out, as a model's do, for vocabularies of several sizes. Each checkout runs in a
process of its own, one behind the other in each round; what is printed are the least times of all rounds, since others
on the machine can only add to them. The last line is one JSON document.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from conditions import conditions

HERE = Path(__file__).resolve().parents[1]
VOCABULARIES = (512, 32_000, 151_936)
WAYS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-p 0.95": {"temperature": 0.8, "seed": 1, "top_p": 0.95},
    "top-k 20": {"temperature": 0.8, "seed": 1, "top_k": 20},
}
SCRIPT = """
import json, sys, time
import torch
from tandem.engine.sampler import Draw, sample
from tandem.sampling import SamplingParams
torch.set_num_threads(1)
rows, vocabularies, ways = json.loads(sys.argv[1])
found = []
for vocab in vocabularies:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2.5
    logits[:, :40] += torch.linspace(16, 4, 40)
    for way in ways:
        draws = [Draw(SamplingParams(**way), 100 + row) for row in range(rows)]
        times = []
        for _ in range(12):
            began = time.perf_counter()
            sample(logits, draws, eos_ids=(0,))
            times.append(time.perf_counter() - began)
        found.append(1e3 * min(times))
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    checkouts = {"now": HERE} | ({"before": options.before} if options.before else {})
    runs: dict[str, list[list[float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(times(checkout, options.rows))
    best = {name: [min(each) for each in zip(*found, strict=True)] for name, found in runs.items()}
    cases: list[dict[str, object]] = []
    for number, (vocab, way) in enumerate((vocab, way) for vocab in VOCABULARIES for way in WAYS):
        case = {"vocab": vocab, "way": way} | {f"{name}_ms": round(best[name][number], 3) for name in checkouts}
        if options.before:
            case["ratio"] = round(best["now"][number] / best["before"][number], 3)
        print(" ".join(f"{key} {value}" for key, value in case.items()), flush=True)
        cases.append(case)
    line = json.dumps(
        {"bench": "sampling", "rows": options.rows, "rounds": options.rounds, "cases": cases} | conditions()
    )
    if options.output:
        options.output.write_text(line + "\n")
    print(line)


def times(checkout: Path, rows: int) -> list[float]:
    """Milliseconds for all rows, of each vocabulary and way."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([rows, VOCABULARIES, list(WAYS.values())])],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
