"""What context parallelism, DP attention, and the same bits over several workers cost, against one worker.

Unified servers with the bundled model, as `ranks.py` has them: all alive at once, asked in turn, one with work at a
time, ratios taken within one repetition. `exact` is `--deterministic`: its rows are beside the same cut without it.

    ttft    milliseconds until the first token of one prompt on an idle server
    step    milliseconds between two tokens of a stream, of 1 and of 8 streams

    python bench/ways.py [--repetitions 5] [--json]

Where workers have no core of their own, what they cost is seen here, and not what they are worth.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any  # a row: text and numbers

from conditions import conditions

from ranks import CHUNK, MODEL, ONE, SEED, STREAMS, new_client, step_rows, ttft_rows
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

WAYS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "cp 2": ("--attn-cp-size", "2"),
    "tp 2": ("--tp", "2"),
    "dp attention 2": ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
}
EXACT = (ONE, "cp 2", "tp 2")
PROMPTS = (512, 2048)


def servers() -> dict[str, tuple[str, ...]]:
    return WAYS | {f"{name}, exact": (*WAYS[name], "--deterministic") for name in EXACT}


def measure(repetitions: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(SEED), list[dict[str, Any]]()
    common = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384")
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet, new_client() as client:
        urls: dict[str, str] = {}
        for (name, flags), port in zip(servers().items(), free_ports(len(servers())), strict=True):
            words = serve_words(MODEL, port, *common, *flags)
            urls[name] = fleet.start(f"server-{port}", words, port=port).url
        fleet.wait_ready(timeout_s=240)
        for length in PROMPTS:
            rows += ttft_rows(client, urls, length, repetitions=repetitions, rng=rng)
        for streams in STREAMS:
            rows += step_rows(client, urls, streams, repetitions=repetitions, rng=rng)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = conditions()  # the load before ours
    rows = measure(args.repetitions)
    for row in rows if not args.json else ():
        least, most = row["range"]
        print(f"{row['what']:<5} {row['load']:<19} {row['server']:<16} {row['p50']:>9} ms", end="")
        print(f" {row['ratio']:>6.2f}x ({least:.2f} to {most:.2f})")
    settings = {"model": MODEL, "chunk": CHUNK, "repetitions": args.repetitions, "seed": SEED}
    print(json.dumps({"bench": "ways", "rows": rows, **settings, **known}))


if __name__ == "__main__":
    main()
