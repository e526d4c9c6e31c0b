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
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words, start_pd
from tandem.cli.ports import free_ports

LENGTHS = (16, 64, 256, 1024, 4096)
VOCABULARY = 500
SEED = 1


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


def direct_ttft_ms(
    client: httpx.Client,
    other: httpx.Client,
    *,
    prefill: str,
    decode: str,
    body: dict[str, object],
    bootstrap_port: int,
    rng: random.Random,
) -> float:
    """As a router would, without one: the same body with a new room to both halves."""
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": rng.getrandbits(62) + 1}
    send = threading.Thread(target=lambda: other.post(f"{prefill}/generate", json=body | pair))
    send.start()
    elapsed = ttft_ms(client, decode, body | pair)
    send.join()
    return elapsed


def bootstrap_port_of(prefill: str) -> int:
    return int(httpx.get(f"{prefill}/server_info").json()["disaggregation_bootstrap_port"])


def measure(repetitions: int) -> list[dict[str, float]]:
    rng = random.Random(SEED)
    rows: list[dict[str, float]] = []
    router_port, unified_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=3) as fleet:
        router = start_pd(fleet, "tandem/mini", prefills=1, decodes=1, router_port=router_port)
        unified = fleet.start("unified", serve_words("tandem/mini", unified_port), port=unified_port)
        fleet.wait_ready(timeout_s=120)
        prefill = next(member for member in fleet.members if member.name.startswith("prefill"))
        decode = next(member for member in fleet.members if member.name.startswith("decode"))
        port = bootstrap_port_of(prefill.url)
        with httpx.Client(timeout=60) as client, httpx.Client(timeout=60) as other:
            for length in LENGTHS:
                pd, direct, alone = [], [], []
                for repetition in range(repetitions + 2):
                    samples = []
                    for way in range(3):
                        prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                        body = {
                            "input_ids": prompt,
                            "stream": True,
                            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
                        }
                        if way == 0:
                            samples.append(ttft_ms(client, router.url, body))
                        elif way == 1:
                            samples.append(
                                direct_ttft_ms(
                                    client,
                                    other,
                                    prefill=prefill.url,
                                    decode=decode.url,
                                    body=body,
                                    bootstrap_port=port,
                                    rng=rng,
                                )
                            )
                        else:
                            samples.append(ttft_ms(client, unified.url, body))
                    if repetition >= 2:  # the first two warm up
                        for kept, sample in zip((pd, direct, alone), samples, strict=True):
                            kept.append(sample)
                rows.append(
                    {
                        "prompt_tokens": length,
                        "pd_ms": statistics.median(pd),
                        "pd_direct_ms": statistics.median(direct),
                        "unified_ms": statistics.median(alone),
                        "tax_ms": statistics.median(pd) - statistics.median(alone),
                        "ratio": statistics.median(pd) / statistics.median(alone),
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
