"""What the start of a server costs: until `/ready` says yes, in turn with another checkout of Tandem.

A unified server with the bundled model, started and ended again; seconds of the wall, and of the processor in all of
its processes together. Bytecode is there for both, from a start that is not counted.

    python bench/start.py --before CHECKOUT [--repetitions 10] [--output FILE]

A ratio is the median of the ratios to the other checkout, each taken within one repetition. The last line is one JSON
document.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from conditions import conditions
from stages import sources

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

START_S = 120.0


def cpu_s() -> float:
    """Of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(checkout: Path | None) -> tuple[float, float]:
    """Seconds of the wall to `/ready`, and of the processor to the end."""
    (port,) = free_ports(1)
    before_s, began = cpu_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, sources(checkout), Fleet(Path(folder), engines=1) as fleet:
        fleet.start("server", serve_words("tandem/mini", port), port=port)
        fleet.wait_ready(timeout_s=START_S)
        ready_s = time.monotonic() - began
    return ready_s, cpu_s() - before_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, with its kernels built")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--output", type=Path, help="a file for the document")
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    under = conditions()
    for checkout in (args.before, None):
        start(checkout)
    pairs = [(start(args.before), start(None)) for _ in range(args.repetitions)]
    rows: list[dict[str, str | float]] = []
    for at, what in enumerate(("wall", "cpu")):
        ratios = sorted(now[at] / before[at] for before, now in pairs)
        row: dict[str, str | float] = {
            "what": what,
            "before_s": round(statistics.median(before[at] for before, _ in pairs), 3),
            "now_s": round(statistics.median(now[at] for _, now in pairs), 3),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(ratios[0], 3),
            "most": round(ratios[-1], 3),
        }
        rows.append(row)
        print(
            f"{what:<6}{row['before_s']:>8.2f} s -> {row['now_s']:.2f} s  {row['ratio']} ({row['least']}-{row['most']})"
        )
    document = json.dumps({"conditions": under, "repetitions": args.repetitions, "rows": rows})
    if args.output is not None:
        args.output.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
