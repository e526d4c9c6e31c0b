"""What `--max-prefill-stall-ms` gives and costs: servers with several values of it, asked in turn.

16 clients with prompts of 128 tokens and answers of 64, through `/v1/completions`, on a random checkpoint in bf16 whose
chunks take about a second: requests per second, TTFT p50 and ITL p99, as medians over rounds and as ratios to 0 (whole
chunks). The load and the checkpoint are those of `bench.peers`.

    python -m bench.prefill_stall [MS ...] [--shape 380m] [--rounds 5] [--json]
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.conditions import conditions
from bench.peers import checkpoint, load
from bench.peers.load import Address, Served

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

CLIENTS, REQUESTS, PROMPT, ANSWER = 16, 32, 128, 64  # as bench.peers
WHOLE_CHUNKS = 0


def measure(shape: checkpoint.Shape, values: list[int], rounds: int) -> dict[int, list[Served]]:
    found: dict[int, list[Served]] = {ms: [] for ms in values}
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        model = checkpoint.make(shape, Path(folder) / "peer")
        ports = dict(zip(values, free_ports(len(values)), strict=True))
        for ms, port in ports.items():
            flags = ("--dtype", "bfloat16", "--served-model-name", "peer", "--max-prefill-stall-ms", str(ms))
            fleet.start(f"stall-{ms}", serve_words(str(model), port, "--context-length", "4096", *flags), port=port)
        fleet.wait_ready(timeout_s=180)
        for number in range(rounds):
            prompts = [checkpoint.prompt(shape, PROMPT, number * REQUESTS + index) for index in range(REQUESTS)]
            for ms in random.Random(number).sample(values, len(values)):
                asked = load.served(Address(ports[ms], "peer"), list(prompts), ANSWER, CLIENTS)
                found[ms].append(asyncio.run(asked))
    return found


def row(ms: int, found: dict[int, list[Served]]) -> dict[str, float]:
    def median(of: int, name: str) -> float:
        return statistics.median(asdict(one)[name] for one in found[of])

    figures = {name: median(ms, name) for name in asdict(found[ms][0])}
    ratios = {f"{name}_of_whole_chunks": figure / median(WHOLE_CHUNKS, name) for name, figure in figures.items()}
    return {"max_prefill_stall_ms": ms, **figures, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("values", nargs="*", type=int, default=[100, 250, 500], metavar="MS")
    parser.add_argument("--shape", choices=tuple(checkpoint.SHAPES), default="380m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(checkpoint.SHAPES[args.shape], [WHOLE_CHUNKS, *args.values], args.rounds)
    rows = [row(ms, found) for ms in found]
    if not args.json:
        print(f"{'stall ms':>8} {'requests/s':>16} {'TTFT p50 ms':>16} {'ITL p99 ms':>16}   (of whole chunks)")
        for each in rows:
            print(f"{each['max_prefill_stall_ms']:>8}", end="")
            for name, scale in (("requests_per_s", 1), ("ttft_p50_s", 1000), ("itl_p99_s", 1000)):
                print(f" {each[name] * scale:>9.2f} ({each[f'{name}_of_whole_chunks']:.2f})", end="")
            print()
    settings = {"shape": args.shape, "rounds": args.rounds, "clients": CLIENTS, "prompt": PROMPT, "answer": ANSWER}
    print(json.dumps({"bench": "prefill_stall", "rows": rows, **settings, **conditions()}))


if __name__ == "__main__":
    main()
