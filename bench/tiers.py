"""What the tiers below the KV pool are worth: prefixes loaded instead of computed, and a trace with and without them.

    loads   prompts of several lengths, one at a time: TTFT of one that is computed, in the pool, in host memory, and in
            storage (by a second server with the same folder); beside it what a page costs to load and to compute, as
            the nodes have measured it: by these they choose (`core/kv/load_policy.py`)
    trace   the committed part of Mooncake's conversation trace, each block of 512 tokens as a page of 16: hit rate and
            TTFT of three servers, asked in turn, one request at a time, in the trace's order. The KV pool is a fifth of
            the working set, host memory twice as much (the default), and storage has room for all

One token is generated, so TTFT is the time of the whole answer. Files come from the operating system's page cache: a
disk costs more.

    python bench/tiers.py [--repetitions 7] [--requests 1000] [--json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.values import ceil_div
from tandem.pagehash import prompt_hashes

MODEL, PAGE = "tandem/mini", 16
LENGTHS = (256, 512, 1024, 2048, 4096)
POOL, ROOM = 8192, 8  # tokens; host memory in pools
SOURCES = ("computed", "device", "host", "storage")
TRACE = Path(__file__).parent / "data" / "mooncake" / "conversation.jsonl"
BLOCK = 512  # tokens, of the trace
SEED = 5

HOST = ("--enable-hierarchical-cache", "--hicache-ratio")


def storage(folder: Path) -> list[str]:
    """Everything that is there is waited for, however short."""
    return [
        *("--hicache-storage-backend", "file", "--hicache-storage-dir", str(folder)),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]


class Server:
    def __init__(self, fleet: Fleet, name: str, *flags: str) -> None:
        (port,) = free_ports(1)
        self._url = fleet.start(name, serve_words(MODEL, port, "--page-size", str(PAGE), *flags), port=port).url
        self._client = httpx.Client(timeout=120)

    def ask(self, prompt: Sequence[int]) -> tuple[float, Counter[str]]:
        """ms until the answer, and tokens of the prompt that were cached, by tier."""
        body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        began = time.perf_counter()
        answer = self._client.post(f"{self._url}/generate", json=body).raise_for_status().json()
        elapsed_ms = (time.perf_counter() - began) * 1000
        meta = answer["meta_info"]
        return elapsed_ms, +Counter(meta["cached_tokens_details"])

    def ask_of(self, source: str, prompt: Sequence[int]) -> float:
        """ms; the prompt is in this tier."""
        elapsed_ms, cached = self.ask(prompt)
        assert set(cached) == {source} - {"computed"}, f"{cached} of {len(prompt)} tokens, and not from {source}"
        return elapsed_ms

    def state(self) -> dict[str, Any]:
        return self._client.get(f"{self._url}/debug/state").raise_for_status().json()

    def wait_until_written(self) -> None:
        while (state := self.state())["copies"] or state["storage"]:
            time.sleep(0.01)


def drawn(length: int, random: Random) -> list[int]:
    return [random.randrange(3, 500) for _ in range(length)]


# --- a prefix, loaded or computed ------------------------------------------------------------------------------------


def loads(repetitions: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    random = Random(SEED)
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=2) as fleet:
        tiers = [*HOST, str(ROOM), *storage(Path(folder) / "kv"), "--max-total-tokens", str(POOL)]
        first, second = Server(fleet, "first", *tiers), Server(fleet, "second", *tiers)
        fleet.wait_ready(timeout_s=180)
        for server in (first, second):
            server.ask(drawn(LENGTHS[-1], random))  # warm up
        rows = [
            row(length, [once(first, second, drawn(length, random), random) for _ in range(repetitions)])
            for length in LENGTHS
        ]
        costs = {
            name: server.state()["costs"][name]
            for server, name in (
                (first, "prompt_token_us"),
                (first, "load_page_from_host_us"),
                (second, "load_page_from_storage_us"),
            )
        }
    return rows, costs


def once(first: Server, second: Server, prompt: list[int], random: Random) -> dict[str, float]:
    """ms by where the prompt was."""
    found = {"computed": first.ask_of("computed", prompt), "device": first.ask_of("device", prompt)}
    first.wait_until_written()
    for _ in range(2 * POOL // LENGTHS[-1] - 1):  # together they push it out
        first.ask(drawn(LENGTHS[-1], random))
    return found | {"host": first.ask_of("host", prompt), "storage": second.ask_of("storage", prompt)}


def row(length: int, samples: list[dict[str, float]]) -> dict[str, Any]:
    ms = {source: statistics.median(sample[source] for sample in samples) for source in SOURCES}
    return {"tokens": length, "ms": ms, "of_computed": {source: ms[source] / ms["computed"] for source in SOURCES[1:]}}


# --- a trace ---------------------------------------------------------------------------------------------------------


def prompts_of(trace: Path, count: int) -> list[list[int]]:
    """A thirty-second of their lengths, with the same prefixes in common."""
    with trace.open() as lines:
        requests = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    return [
        [token for block in request["hash_ids"] for token in drawn(PAGE, Random(block))][
            : ceil_div(request["input_length"] * PAGE, BLOCK)
        ]
        for request in requests
    ]


def pages_of(prompts: list[list[int]]) -> int:
    """Of all that is not in common, each full page once."""
    return len({page for prompt in prompts for page in prompt_hashes(b"", prompt, page_size=PAGE)})


def replay(prompts: list[list[int]], pool: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=3) as fleet:
        tiers = {"off": [], "host": [*HOST, "2"], "host and storage": [*HOST, "2", *storage(Path(folder) / "kv")]}
        size = ("--max-total-tokens", str(pool))
        servers = {name: Server(fleet, name.split()[-1], *size, *flags) for name, flags in tiers.items()}
        fleet.wait_ready(timeout_s=180)
        ms: dict[str, list[float]] = {name: [] for name in tiers}
        cached: dict[str, Counter[str]] = {name: Counter() for name in tiers}
        for server in servers.values():
            server.ask(drawn(LENGTHS[0], Random(SEED)))  # warm up
        for prompt in prompts:
            for name, server in servers.items():
                elapsed_ms, found = server.ask(prompt)
                server.wait_until_written()
                ms[name].append(elapsed_ms)
                cached[name].update(found)
        mean_off = statistics.mean(ms["off"])
        total = sum(map(len, prompts))
        return [
            {
                "tiers": name,
                "hit_rate": cached[name].total() / total,
                "hits": {tier: tokens / total for tier, tokens in cached[name].items()},
                "mean_ms": statistics.mean(ms[name]),
                "p50_ms": statistics.median(ms[name]),
                "of_off": statistics.mean(ms[name]) / mean_off,
            }
            for name in tiers
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found, costs = loads(args.repetitions)
    prompts = prompts_of(TRACE, args.requests)
    working_set = pages_of(prompts)
    replayed = replay(prompts, working_set // 5 * PAGE)
    if not args.json:
        print(f"{'tokens':>6} " + " ".join(f"{source + ' ms':>12}" for source in SOURCES))
        for each in found:
            print(f"{each['tokens']:>6} " + " ".join(f"{each['ms'][source]:>12.1f}" for source in SOURCES))
        for name, cost in costs.items():
            print(f"{name} {cost:.0f}")
        for each in replayed:
            print(f"{each['tiers']:>17}: {each['hit_rate']:.1%} cached, mean TTFT {each['mean_ms']:.0f} ms, ", end="")
            print(f"{each['of_off']:.2f} of the one without")
    settings = {
        "repetitions": args.repetitions,
        "requests": len(prompts),
        "working_set_pages": working_set,
        "seed": SEED,
    }
    results = {"loads": found, "costs": costs, "trace": replayed}
    print(json.dumps({"bench": "tiers", **results, **settings, **conditions()}))


if __name__ == "__main__":
    main()
