"""What prefill on another worker costs the client until its first token: TTFT of PD minus TTFT of one unified engine.

One router, one prefill, one decode and one unified server, all on this machine's cores, with the bundled model. For
each prompt length the two ways are asked in turn, one request at a time, with fresh random prompts (no prefix hits),
greedy, after warm-up. Reported: medians, the difference, and the ratio; and PD without the router in between.

    python bench/pd_tax.py [--repetitions 15] [--json]
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words, start_pd
from tandem.cli.ports import free_ports

LENGTHS = (16, 64, 256, 1024, 4096)
VOCABULARY = 500
WARM_UP = 2  # repetitions
SEED = 1
NO_FIELDS: dict[str, object] = {}


def ttft_ms(client: httpx.Client, url: str, body: dict[str, object]) -> float:
    """Milliseconds from sending the request to the first bytes of the streamed answer."""
    began = time.perf_counter()
    with client.stream("POST", f"{url}/generate", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        chunks = reply.iter_raw()
        next(chunks)
        elapsed = time.perf_counter() - began
        for _ in chunks:
            pass
    return elapsed * 1000


@dataclass(frozen=True)
class Pair:
    """Two halves that are asked by hand, as a router would. URLs."""

    prefill: str
    decode: str
    bootstrap_port: int

    @classmethod
    def of(cls, fleet: Fleet) -> "Pair":
        """The first of each, once they are ready."""
        prefill, decode = (
            next(member.url for member in fleet.members if member.name.startswith(role))
            for role in ("prefill", "decode")
        )
        info = httpx.get(f"{prefill}/server_info").json()
        return cls(prefill, decode, int(info["disaggregation_bootstrap_port"]))

    def ttft_ms(
        self,
        clients: tuple[httpx.Client, httpx.Client],
        body: dict[str, object],
        room: int,
        *,
        prefill_fields: dict[str, object] = NO_FIELDS,
        decode_fields: dict[str, object] = NO_FIELDS,
    ) -> float:
        """The same body, with this room, to both halves; but for the fields of one."""
        to_prefill, to_decode = clients
        body = body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}
        url, sent = f"{self.prefill}/generate", body | prefill_fields
        half = threading.Thread(target=lambda: to_prefill.post(url, json=sent))
        half.start()
        elapsed = ttft_ms(to_decode, self.decode, body | decode_fields)
        half.join()
        return elapsed


def body_of(rng: random.Random, prompt_tokens: int) -> dict[str, object]:
    """Of a prompt of which nothing is cached."""
    return {
        "input_ids": [rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)],
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }


def drawn_room(rng: random.Random) -> int:
    return rng.getrandbits(62) + 1


def measure(repetitions: int) -> list[dict[str, float]]:
    rng = random.Random(SEED)
    rows: list[dict[str, float]] = []
    router_port, unified_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=3) as fleet:
        router = start_pd(fleet, "tandem/mini", prefills=1, decodes=1, router_port=router_port)
        unified = fleet.start("unified", serve_words("tandem/mini", unified_port), port=unified_port)
        fleet.wait_ready(timeout_s=120)
        pair = Pair.of(fleet)
        with httpx.Client(timeout=60) as client, httpx.Client(timeout=60) as other:
            ways: dict[str, Callable[[dict[str, object]], float]] = {
                "pd": lambda body: ttft_ms(client, router.url, body),
                "direct": lambda body: pair.ttft_ms((other, client), body, drawn_room(rng)),
                "unified": lambda body: ttft_ms(client, unified.url, body),
            }
            for length in LENGTHS:
                found: dict[str, list[float]] = {name: [] for name in ways}
                for repetition in range(WARM_UP + repetitions):
                    for name, sample in ways.items():
                        elapsed = sample(body_of(rng, length))
                        if repetition >= WARM_UP:
                            found[name].append(elapsed)
                p50 = {name: statistics.median(times) for name, times in found.items()}
                rows.append(
                    {
                        "prompt_tokens": length,
                        "pd_ms": p50["pd"],
                        "pd_direct_ms": p50["direct"],
                        "unified_ms": p50["unified"],
                        "tax_ms": p50["pd"] - p50["unified"],
                        "ratio": p50["pd"] / p50["unified"],
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.repetitions)
    if not args.json:
        print(f"{'prompt':>7} {'PD ms':>8} {'direct':>8} {'unified':>8} {'tax ms':>8} {'ratio':>6}")
        for row in rows:
            print(
                f"{row['prompt_tokens']:>7} {row['pd_ms']:>8.1f} {row['pd_direct_ms']:>8.1f} {row['unified_ms']:>8.1f}"
                f" {row['tax_ms']:>8.1f} {row['ratio']:>6.2f}"
            )
    settings = {"model": "tandem/mini", "repetitions": args.repetitions, "seed": SEED}
    print(json.dumps({"bench": "pd_tax", "rows": rows, **settings, **conditions()}))


if __name__ == "__main__":
    main()
