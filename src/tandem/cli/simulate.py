"""`tandem simulate`: the production core under faults, in virtual time. Every failure replays from one seed.

`--whole`: the same for whole clusters, router, servers and all their processes, byte by byte (`simulator/whole`).
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TextIO

from tandem.cgroups import num_cores
from tandem.cli.failure import CommandFailed
from tandem.cli.flags import count, natural
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator import occurrences
from tandem.simulator.coverage import table
from tandem.simulator.faults.options import draw_options
from tandem.simulator.hunt import (
    draw_first_seed,
    run_each,
    run_each_until,
    run_seed,
    run_seeds,
    run_until,
)
from tandem.simulator.report import SeedResult, Summary
from tandem.simulator.scenario.shrink import shrink_seed

DEFAULT_SEEDS = 100
PROGRESS_EVERY = 50  # seeds
UNITS_NS = {"ms": MILLISECOND, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND, "": SECOND}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=natural, metavar="K", help="first seed (default: drawn and printed)")
    parser.add_argument(
        "--seeds", type=count, metavar="N", help=f"how many (default 1 with --seed, else {DEFAULT_SEEDS})"
    )
    parser.add_argument(
        "--until", type=duration_ns, metavar="TIME", help="stop each seed at this virtual time, such as 4.2s"
    )
    parser.add_argument(
        "--for",
        dest="hunt_ns",
        type=duration_ns,
        metavar="TIME",
        help="seed after seed for so long, or to Ctrl+C",
    )
    parser.add_argument(
        "--shrink", action="store_true", help="make what breaks an invariant small: a scenario of a few lines"
    )
    parser.add_argument(
        "--whole", action="store_true", help="whole clusters: router, API, node and worker processes, byte by byte"
    )
    parser.add_argument(
        "--engine",
        choices=("plain", "torch"),
        default="plain",
        help="of the workers of --whole: one whose tokens are a formula's, or Tandem's own with the bundled model",
    )
    parser.add_argument("--trace", action="store_true", help="print what every node is told and what it wants")
    parser.add_argument("--coverage", action="store_true", help="print rare states reached, and what has occurred")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")


def run(args: argparse.Namespace) -> int:
    if reasons := contradictions(args):
        raise CommandFailed("; ".join(reasons), is_wrong_usage=True)
    if args.engine != "plain" and not args.whole:
        raise CommandFailed("--engine is of the workers of whole clusters: give --whole, too", is_wrong_usage=True)
    first = draw_first_seed() if args.seed is None else args.seed
    num_seeds = args.seeds or (DEFAULT_SEEDS if args.seed is None else 1)
    note(f"first seed {first}, " + (f"for {args.hunt_ns / SECOND:g} s" if args.hunt_ns else f"{num_seeds} seeds"))
    summary, began = Summary(first), time.monotonic()
    shrunk: set[str] = set()
    try:
        for result in results(first, num_seeds, args):
            summary.add(result)
            show(result, summary, args)
            if args.shrink and result.invariant not in {"", *shrunk}:
                shrunk.add(result.invariant)  # one of a kind: the others are mostly the same bug
                show_shrunk(result, args)
    except KeyboardInterrupt:
        note("stopped; so far:")
    if args.coverage:
        lines = (*table(summary.seeds, summary.rare), *occurrences.table(summary.occurred))
        print("\n".join(lines), file=stream_of_texts(args))
    print(summary.json() if args.json else summary.text())
    if args.hunt_ns:
        note(rates_text(summary, time.monotonic() - began))
    return 1 if summary.violations else 0


def contradictions(args: argparse.Namespace) -> list[str]:
    """Options of which one would be ignored."""
    hunts = args.hunt_ns is not None
    rules = (
        (hunts and args.seeds is not None, "--for goes on until its time is over, --seeds until there are so many"),
        (hunts and args.until is not None, "--for runs whole seeds, --until stops them"),
        (hunts and args.trace, "--for runs seeds side by side, --trace one after the other"),
        (args.whole and args.until is not None, "--whole runs whole seeds, --until stops them"),
        (args.whole and args.shrink, "--whole has no scenarios, which --shrink makes"),
        (args.whole and args.coverage, "--whole does not watch for the rare states of --coverage"),
        (args.trace and args.coverage, "--trace does not watch for the rare states of --coverage"),
    )
    return [f"{reason}: give one of them" for is_broken, reason in rules if is_broken]


def results(first: int, num_seeds: int, args: argparse.Namespace) -> Iterator[SeedResult]:
    if args.whole:
        return whole_results(first, num_seeds, args)
    if args.trace:
        return traced(first, num_seeds, args)
    if args.hunt_ns:
        over_at = time.monotonic() + args.hunt_ns / SECOND
        return run_until(first, lambda: time.monotonic() > over_at, watches=args.coverage)
    return run_seeds(first, num_seeds, args.until, watches=args.coverage)


def whole_results(first: int, num_seeds: int, args: argparse.Namespace) -> Iterator[SeedResult]:
    # Why not at the top: the server and its libraries are two seconds of imports.
    from tandem.simulator.whole import world

    run = partial(world.run_seed, engine=args.engine)
    if args.trace:
        trace = partial(print, file=stream_of_texts(args))
        return (run(seed, trace) for seed in range(first, first + num_seeds))
    if args.hunt_ns:
        over_at = time.monotonic() + args.hunt_ns / SECOND
        return run_each_until(first, lambda: time.monotonic() > over_at, run)
    return run_each(range(first, first + num_seeds), run, are_long=True)


def rates_text(summary: Summary, seconds: float) -> str:
    rates = summary.rates(seconds, num_cores())
    return (
        f"in {seconds:.0f} s on {num_cores()} cores: {rates['seeds_per_minute']:.0f} seeds and "
        f"{rates['simulated_hours_per_minute']:.0f} simulated hours per minute, "
        f"{rates['events_per_second_per_core']:.0f} events per second and core"
    )


def traced(first: int, num_seeds: int, args: argparse.Namespace) -> Iterator[SeedResult]:
    """With a trace, seeds run one after the other in this process."""
    trace = partial(print, file=stream_of_texts(args))
    for number in range(first, first + num_seeds):
        note(draw_options(number).describe())
        yield run_seed(number, args.until, trace)


def show(result: SeedResult, summary: Summary, args: argparse.Namespace) -> None:
    """A violation is one line that can be pasted into a shell; what is broken stands behind it as a comment."""
    if result.invariant:
        print(f"{result.line}  # {result.invariant}: {result.detail}", file=stream_of_texts(args))
    elif args.seed is not None and not args.seeds and not args.hunt_ns and not args.whole:
        note(draw_options(result.seed).describe())
    if summary.seeds % PROGRESS_EVERY == 0:
        note(f"{summary.seeds} seeds, {len(summary.violations)} violations")


def show_shrunk(result: SeedResult, args: argparse.Namespace) -> None:
    """The scenario that is left, which a file in tests/scenarios may keep."""
    note("shrinking")
    found = shrink_seed(result.seed)
    if found is None:
        note("it does not break when it is told as a scenario; the line above reproduces it")
        return
    note(f"shrunk to {found.num_events} events")
    print(found.text(), file=stream_of_texts(args))


def stream_of_texts(args: argparse.Namespace) -> TextIO:
    """With --json stdout has nothing but the document."""
    return sys.stderr if args.json else sys.stdout


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def duration_ns(text: str) -> int:
    """`4.2s`, `300ms`, `2m`, `1h`; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    found_ns = float(match[1]) * UNITS_NS[match[2]] if match is not None else 0.0
    if not 1 <= found_ns < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 4.2s or 300ms")
    return int(found_ns)
