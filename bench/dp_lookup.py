"""What it costs decode to find the DP rank of prefill that holds a room (decisions 007 and 016): time to first token.

Two pairs on this machine's cores, with the bundled model; each prefill has two DP ranks. The halves of a request are
sent directly, as by a router that names ranks by itself, with fresh random prompts, one request at a time, the ways in
turn:

    implied      the room names the rank, decode says READY there
    named        the body names it (`disagg_prefill_dp_rank`)
    elsewhere    the room names the other rank, which tells decode where to say READY
    asked        decode asks the bootstrap server (SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1), as it did by
                 007 for every request

    python bench/dp_lookup.py [--repetitions 100] [--json]
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from conditions import conditions
from pd_tax import SEED, Pair, body_of, drawn_room

from tandem.cli.fleet import Fleet, start_pd
from tandem.environment import FORCE_QUERY

WAYS = ("implied", "named", "elsewhere", "asked")
DP_SIZE, LENGTH, WARM_UP = 2, 16, 5


@contextmanager
def pair(folder: str, *, asks: bool) -> Iterator[Pair]:
    name = f"TANDEM_{FORCE_QUERY.name}"
    os.environ[name] = str(int(asks))
    with Fleet(Path(folder), engines=4) as fleet:
        flags = ("--dp-size", str(DP_SIZE), "--max-total-tokens", "8192")
        start_pd(fleet, "tandem/mini", prefills=1, decodes=1, router_port=0, prefill_flags=flags)
        fleet.wait_ready(timeout_s=120)
        del os.environ[name]
        yield Pair.of(fleet)


def ask(clients: tuple[httpx.Client, httpx.Client], pair: Pair, way: str, rng: random.Random) -> float:
    room = drawn_room(rng)
    rank = room % DP_SIZE
    return pair.ttft_ms(
        clients,
        body_of(rng, LENGTH),
        room,
        prefill_fields={"data_parallel_rank": 1 - rank if way == "elsewhere" else rank},
        decode_fields={"disagg_prefill_dp_rank": rank} if way == "named" else {},
    )


def measure(repetitions: int) -> list[dict[str, float | str]]:
    rng = random.Random(SEED)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        pair(one, asks=False) as usual,
        pair(other, asks=True) as asking,
        httpx.Client(timeout=60) as left,
        httpx.Client(timeout=60) as right,
    ):
        for repetition in range(repetitions + WARM_UP):
            for way in rng.sample(WAYS, len(WAYS)):
                elapsed = ask((left, right), asking if way == "asked" else usual, way, rng)
                if repetition >= WARM_UP:
                    found[way].append(elapsed)
    base = statistics.median(found["implied"])
    return [
        {
            "way": way,
            "p50_ms": round(statistics.median(times), 3),
            "p25_ms": round(statistics.quantiles(times, n=4)[0], 3),
            "p75_ms": round(statistics.quantiles(times, n=4)[2], 3),
            "more_ms": round(statistics.median(times) - base, 3),
        }
        for way, times in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.repetitions)
    if not args.json:
        print(f"{'way':<10} {'p50 ms':>8} {'p25':>8} {'p75':>8} {'more ms':>8}")
        for row in rows:
            print(f"{row['way']:<10} {row['p50_ms']:>8} {row['p25_ms']:>8} {row['p75_ms']:>8} {row['more_ms']:>8}")
    settings = {"model": "tandem/mini", "prompt": LENGTH, "repetitions": args.repetitions, "seed": SEED}
    print(json.dumps({"bench": "dp_lookup", "rows": rows, **settings, **conditions()}))


if __name__ == "__main__":
    main()
