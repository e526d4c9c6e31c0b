"""What the simulation is worth on this machine: seeds, simulated hours and events, with all checkers on.

    python bench/simulate.py [--seconds 60] [--first-seed K] [--table] [--output bench/results/simulate.json]

Fresh seeds run for so long on all cores, each to its end. Hours count only while a request lives. The last line is one
JSON document with the conditions; `--table` prints the rows of docs/numbers.md before it.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

from conditions import conditions

from tandem.simulator.faults.options import draw_options
from tandem.simulator.hunt import draw_first_seed, num_cores, run_until
from tandem.simulator.report import SeedResult, Summary

TARGETS = {"seeds_per_minute": 600, "simulated_hours_per_minute": 100, "events_per_second_per_core": 10_000}


def hunt(first_seed: int, seconds: float) -> tuple[Summary, list[SeedResult], float]:
    """(totals, each seed, wall seconds)"""
    summary, results, began = Summary(first_seed), [], time.monotonic()
    for result in run_until(first_seed, lambda: time.monotonic() - began > seconds):
        summary.add(result)
        results.append(result)
    return summary, results, time.monotonic() - began


def medians(results: list[SeedResult]) -> dict[str, float]:
    """Of the seeds: a seed that asks little is cheap, so what the typical one asks belongs to every rate."""
    options = [draw_options(result.seed) for result in results]
    return {
        "requests": median(result.num_requests for result in results),
        "events": median(result.num_events for result in results),
        "prefill_servers": median(each.num_prefills for each in options),
        "decode_servers": median(each.num_decodes for each in options),
    }


def table(document: dict) -> str:
    rates, typical = document["rates"], document["median_seed"]
    rows = [
        ("seeds per minute", f"{rates['seeds_per_minute']:,.0f}"),
        ("simulated hours per minute, counted while a request lives", f"{rates['simulated_hours_per_minute']:,.0f}"),
        ("events per second and core", f"{rates['events_per_second_per_core']:,.0f}"),
        ("requests, events of the median seed", f"{typical['requests']:,.0f}, {typical['events']:,.0f}"),
        (
            "servers of the median seed",
            f"{typical['prefill_servers']:.0f} prefill, {typical['decode_servers']:.0f} decode",
        ),
        (
            "faults injected",
            f"{sum(document['totals']['faults'].values()):,} of {len(document['totals']['faults'])} classes",
        ),
        ("violations", f"{len(document['totals']['violations'])}"),
    ]
    head = f"| {document['seconds']:.0f} s on {document['cores']} cores, commit {document['commit']} | |\n|---|---:|"
    return "\n".join([head, *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first-seed", type=int, default=None)
    parser.add_argument("--table", action="store_true", help="print the table of docs/numbers.md")
    parser.add_argument("--output", type=Path, help="also write the JSON line there")
    args = parser.parse_args()
    first_seed = draw_first_seed() if args.first_seed is None else args.first_seed
    known = conditions()
    summary, results, seconds = hunt(first_seed, args.seconds)
    rates = summary.rates(seconds, num_cores())
    document = {
        "bench": "simulate",
        "seconds": round(seconds, 1),
        "rates": {name: round(rate, 1) for name, rate in rates.items()},
        "targets": TARGETS,
        "median_seed": medians(results),
        "totals": summary.document(),
        **known,
    }
    print(table(document) if args.table else summary.text())
    print(json.dumps(document))
    if args.output is not None:
        args.output.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
