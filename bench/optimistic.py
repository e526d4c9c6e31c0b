"""What optimistic prefill saves when decode's READY is late: TTFT under off, retry and park (sglang#26780).

Prompts of 4,096 tokens of which 80 % are in prefill's prefix tree. The body goes to prefill at once and to decode after
a delay of 0, 0.5, 1 and 2 times the measured prefill time: that is how READY comes late. One request at a time, so the
utilisation stays low. TTFT counts from the body to prefill until decode's first byte. The ceiling at a delay of one
prefill time is 2x (the two waits overlap instead of adding up), less what transfer and HTTP take.

    python bench/optimistic.py [--repetitions 12] [--json]
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

PROMPT, CACHED = 4096, 3264  # tokens; a whole number of pages is cached
POLICIES = ("off", "retry", "park")
DELAYS = (0.0, 0.5, 1.0, 2.0)  # in prefill times
SEED = 3


class Pair:
    """One prefill and one decode, asked by hand as a router would."""

    def __init__(self, fleet: Fleet, policy: str) -> None:
        prefill_port, decode_port, self.bootstrap_port = free_ports(3)
        common = ["--max-total-tokens", "65536"]
        prefill_words = ["--disaggregation-mode", "prefill", "--optimistic-prefill-policy", policy, *common]
        prefill_words += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        decode_words = ["--disaggregation-mode", "decode", *common]
        self.prefill = fleet.start(
            f"prefill-{policy}", serve_words("tandem/mini", prefill_port, *prefill_words), port=prefill_port
        )
        self.decode = fleet.start(
            f"decode-{policy}", serve_words("tandem/mini", decode_port, *decode_words), port=decode_port
        )
        self.clients = httpx.Client(timeout=120), httpx.Client(timeout=120)

    def ttft_s(self, prompt: list[int], delay_s: float, rng: random.Random) -> float:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": rng.getrandbits(62) + 1,
        }
        to_prefill, to_decode = self.clients
        send = threading.Thread(target=lambda: to_prefill.post(f"{self.prefill.url}/generate", json=body))
        began = time.perf_counter()
        send.start()
        time.sleep(delay_s)  # the measured quantity, not a wait for something
        with to_decode.stream("POST", f"{self.decode.url}/generate", json=body) as reply:
            chunks = reply.iter_raw()
            next(chunks)
            elapsed = time.perf_counter() - began
            for _ in chunks:
                pass
        send.join()
        return elapsed


def prompt_of(shared: list[int], rng: random.Random) -> list[int]:
    return shared + [rng.randrange(3, 500) for _ in range(PROMPT - CACHED)]


def flush(pair: Pair) -> None:
    """Decode keeps no prefix, so that every KV travels."""
    httpx.post(f"{pair.decode.url}/flush_cache", timeout=30)


def measure(repetitions: int) -> tuple[float, list[dict[str, float | str]]]:
    rng = random.Random(SEED)
    shared = [rng.randrange(3, 500) for _ in range(CACHED)]
    samples: dict[tuple[str, float], list[float]] = {(p, d): [] for p in POLICIES for d in DELAYS}
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=2) as fleet:
        pairs = {policy: Pair(fleet, policy) for policy in POLICIES}
        fleet.wait_ready(timeout_s=180)
        for pair in pairs.values():
            for _ in range(3):  # warm up, and cache the shared prefix
                pair.ttft_s(prompt_of(shared, rng), 0.0, rng)
        prefill_s = statistics.median(pairs["off"].ttft_s(prompt_of(shared, rng), 0.0, rng) for _ in range(5))
        for _ in range(repetitions):
            for delay in DELAYS:
                for policy, pair in pairs.items():  # in turn, so that noise hits all alike
                    flush(pair)
                    samples[policy, delay].append(pair.ttft_s(prompt_of(shared, rng), delay * prefill_s, rng))
    rows: list[dict[str, float | str]] = []
    for (policy, delay), times in samples.items():
        ordered = sorted(times)
        off = statistics.mean(samples["off", delay])
        rows.append(
            {
                "policy": policy,
                "delay": delay,
                "mean_ms": statistics.mean(times) * 1000,
                "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1000,
                "gain": off / statistics.mean(times),
            }
        )
    return prefill_s, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prefill_s, rows = measure(args.repetitions)
    if not args.json:
        print(f"prefill time {prefill_s * 1000:.0f} ms")
        print(f"{'delay':>6} {'policy':>7} {'mean ms':>9} {'P99 ms':>9} {'off/this':>9}")
        for row in sorted(rows, key=lambda row: (row["delay"], POLICIES.index(str(row["policy"])))):
            print(
                f"{row['delay']:>6} {row['policy']:>7} {row['mean_ms']:>9.0f} {row['p99_ms']:>9.0f} {row['gain']:>9.2f}"
            )
    settings = {"prompt": PROMPT, "cached": CACHED, "repetitions": args.repetitions, "seed": SEED}
    print(json.dumps({"bench": "optimistic", "prefill_s": prefill_s, "rows": rows, **settings, **conditions()}))


if __name__ == "__main__":
    main()
