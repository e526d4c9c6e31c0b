"""What `--max-prefill-stall-ms` and `--enable-mixed-chunk` give and cost: servers with several values, asked in turn.

16 clients with prompts of 128 tokens and answers of 64, through `/v1/completions`, on a random checkpoint in bf16 whose
chunks take about a second: requests per second, TTFT p50 and ITL p99, as medians over rounds and as ratios to whole
chunks in batches of their own (0, apart). The load and the checkpoint are those of `bench.peers`.

    python -m bench.prefill_stall [MS ...] [--shape 380m] [--rounds 5] [--json]
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.conditions import conditions
from bench.peers import checkpoint, load
from bench.peers.load import Address, Served

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

CLIENTS, REQUESTS, PROMPT, ANSWER = 16, 32, 128, 64  # as bench.peers


@dataclass(frozen=True)
class Setting:
    max_prefill_stall_ms: int
    mixed: bool

    @property
    def flags(self) -> tuple[str, ...]:
        mixed = "--enable-mixed-chunk" if self.mixed else "--no-enable-mixed-chunk"
        return mixed, "--max-prefill-stall-ms", str(self.max_prefill_stall_ms)


WHOLE_CHUNKS = Setting(0, mixed=False)


def measure(shape: checkpoint.Shape, settings: list[Setting], rounds: int) -> dict[Setting, list[Served]]:
    found: dict[Setting, list[Served]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        model = checkpoint.make(shape, Path(folder) / "peer")
        ports = dict(zip(settings, free_ports(len(settings)), strict=True))
        usual = ("--context-length", "4096", "--dtype", "bfloat16", "--served-model-name", "peer")
        for number, (setting, port) in enumerate(ports.items()):
            fleet.start(f"stall-{number}", serve_words(str(model), port, *usual, *setting.flags), port=port)
        fleet.wait_ready(timeout_s=180)
        for number in range(rounds):
            prompts = [checkpoint.prompt(shape, PROMPT, number * REQUESTS + index) for index in range(REQUESTS)]
            for setting in random.Random(number).sample(settings, len(settings)):
                asked = load.served(Address(ports[setting], "peer"), list(prompts), ANSWER, CLIENTS)
                found[setting].append(asyncio.run(asked))
    return found


def row(setting: Setting, found: dict[Setting, list[Served]]) -> dict[str, float]:
    def median(of: Setting, name: str) -> float:
        return statistics.median(asdict(one)[name] for one in found[of])

    figures = {name: median(setting, name) for name in asdict(found[setting][0])}
    ratios = {f"{name}_of_whole_chunks": figure / median(WHOLE_CHUNKS, name) for name, figure in figures.items()}
    return {**asdict(setting), **figures, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("values", nargs="*", type=int, default=[80, 150], metavar="MS")
    parser.add_argument("--shape", choices=tuple(checkpoint.SHAPES), default="380m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = [WHOLE_CHUNKS, *(Setting(ms, mixed) for ms in args.values for mixed in (False, True))]
    found = measure(checkpoint.SHAPES[args.shape], settings, args.rounds)
    rows = [row(setting, found) for setting in found]
    if not args.json:
        print(f"{'stall ms':>14} {'requests/s':>16} {'TTFT p50 ms':>16} {'ITL p99 ms':>16}   (of whole chunks apart)")
        for each in rows:
            print(f"{each['max_prefill_stall_ms']:>8} {'mixed' if each['mixed'] else 'apart'}", end="")
            for name, scale in (("requests_per_s", 1), ("ttft_p50_s", 1000), ("itl_p99_s", 1000)):
                print(f" {each[name] * scale:>9.2f} ({each[f'{name}_of_whole_chunks']:.2f})", end="")
            print()
    usual = {"shape": args.shape, "rounds": args.rounds, "clients": CLIENTS, "prompt": PROMPT, "answer": ANSWER}
    print(json.dumps({"bench": "prefill_stall", "rows": rows, **usual, **conditions()}))


if __name__ == "__main__":
    main()
