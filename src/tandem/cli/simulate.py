"""`tandem simulate`: the production core under faults, in virtual time. Every failure replays from one seed."""

import argparse
import re
import sys

from tandem.core.values import SECOND
from tandem.sim.faults import draw_options
from tandem.sim.hunt import draw_first_seed, run_seed, run_seeds
from tandem.sim.report import SeedResult, Summary

DEFAULT_SEEDS = 100
PROGRESS_EVERY = 50  # seeds
UNITS_NS = {"ms": 1_000_000, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND, "": SECOND}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=seed, metavar="K", help="first seed (default: drawn and printed)")
    parser.add_argument(
        "--seeds", type=count, metavar="N", help=f"how many (default 1 with --seed, else {DEFAULT_SEEDS})"
    )
    parser.add_argument(
        "--until", type=duration_ns, metavar="TIME", help="stop each seed at this virtual time, such as 4.2s"
    )
    parser.add_argument("--trace", action="store_true", help="print what every node is told and what it wants")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")


def run(args: argparse.Namespace) -> int:
    first = draw_first_seed() if args.seed is None else args.seed
    num_seeds = args.seeds or (DEFAULT_SEEDS if args.seed is None else 1)
    note(f"first seed {first}, {num_seeds} seeds")
    summary = Summary(first)
    results = traced(first, num_seeds, args) if args.trace else run_seeds(first, num_seeds, args.until)
    for result in results:
        summary.add(result)
        show(result, summary, num_seeds, as_json=args.json)
    print(summary.json() if args.json else summary.text())
    return 1 if summary.violations else 0


def traced(first: int, num_seeds: int, args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """With a trace, seeds run one after the other in this process; with --json the trace goes to stderr."""
    stream = sys.stderr if args.json else sys.stdout
    for number in range(first, first + num_seeds):
        note(draw_options(number).describe())
        yield run_seed(number, args.until, lambda line: print(line, file=stream))


def show(result: SeedResult, summary: Summary, num_seeds: int, *, as_json: bool) -> None:
    """A violation is one line that can be pasted into a shell; what is broken stands behind it as a comment."""
    if result.invariant:
        print(f"{result.line}  # {result.invariant}: {result.detail}", file=sys.stderr if as_json else sys.stdout)
    elif num_seeds == 1:
        note(draw_options(result.seed).describe())
    if num_seeds >= PROGRESS_EVERY and summary.seeds % PROGRESS_EVERY == 0:
        note(f"{summary.seeds} of {num_seeds} seeds, {len(summary.violations)} violations")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seed(text: str) -> int:
    return whole(text, least=0)


def count(text: str) -> int:
    return whole(text, least=1)


def whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def duration_ns(text: str) -> int:
    """`4.2s`, `300ms`, `2m`, `1h`; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 4.2s or 300ms")
    return int(float(match[1]) * UNITS_NS[match[2]])
