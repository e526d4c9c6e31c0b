"""What pipeline stages are worth to those who decode.

Unified servers with one random model: one worker, and `--pp 2` and `--pp 4`, every worker with one thread; with
`--before CHECKOUT` also those of another checkout of Tandem. All are alive at once and asked in turn, in a new order
every time, one with work at a time.

    step    milliseconds between two tokens of a stream, of 1, 2, 8 and 32 streams that run together

    python bench/stages.py [--model 380m] [--before CHECKOUT] [--repetitions 5] [--output FILE]

A ratio is the median of the ratios to the one worker, each taken within one repetition. Stages are worth as much as
there are cores for them: on two, `--pp 4` has half of what it could use. The last line is one JSON document.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # a row: text and numbers

from conditions import conditions
from peers.checkpoint import SHAPES, make

from ranks import ONE, SEED, new_client, step_rows
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

STAGES = {ONE: 1, "pp 2": 2, "pp 4": 4}
STREAMS = (1, 2, 8, 32)


@contextmanager
def sources(checkout: Path | None) -> Iterator[None]:
    """What starts inside runs from there."""
    kept = os.environ.get("PYTHONPATH")
    if checkout is not None:
        os.environ["PYTHONPATH"] = str(checkout / "src")
    try:
        yield
    finally:
        if kept is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = kept


def measure(model: Path, before: Path | None, repetitions: int) -> list[dict[str, Any]]:
    rng, urls = random.Random(SEED), dict[str, str]()
    servers: dict[str, tuple[int, Path | None]] = {name: (stages, None) for name, stages in STAGES.items()}
    if before is not None:
        servers |= {f"{name}, before": (stages, before) for name, stages in STAGES.items() if stages > 1}
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet, new_client() as client:
        for (name, (stages, checkout)), port in zip(servers.items(), free_ports(len(servers)), strict=True):
            words = serve_words(
                str(model), port, "--pp", str(stages), "--cpu-threads", "1", "--max-total-tokens", "8192"
            )
            with sources(checkout):
                urls[name] = fleet.start(f"server-{port}", words, port=port).url
        fleet.wait_ready(timeout_s=600)
        rows: list[dict[str, Any]] = []
        for streams in STREAMS:
            rows += step_rows(client, urls, streams, repetitions=repetitions, rng=rng)
            for row in rows[-len(urls) :]:
                print(f"{row['load']:<12}{row['server']:<16}{row['p50']:>10.1f} ms  {row['ratio']:.2f} {row['range']}")
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="380m", help="a random Llama in bf16")
    parser.add_argument("--before", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement")
    parser.add_argument("--output", type=Path, help="a file for the document")
    args = parser.parse_args()
    under = conditions()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(make(SHAPES[args.model], Path(folder)), args.before, args.repetitions)
    document = json.dumps({"benchmark": "stages", "model": args.model, **under, "rows": rows})
    if args.output is not None:
        args.output.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
