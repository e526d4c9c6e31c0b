"""What prefix affinity in the router is worth: hit rate, prompt tokens computed and TTFT against taking turns.

Two parts, each as a ratio of `cache_aware` to `round_robin`:

    traces      conversations (drawn here, and of --trace in Mooncake's format: `hash_ids` of 512-token blocks) through
                the product's policies, in front of prefills that each cache so many blocks and drop the oldest. No
                process, no clock: requests follow each other, 16 at a time, and the numbers are the same anywhere
    processes   two prefills and a decode with the bundled model; conversations in turn, one request at a time

    python bench/affinity.py [--trace FILE] [--json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, start_pd
from tandem.core.router.routing import Candidate, PolicySettings, make_policy
from tandem.core.router.worker_registry import WorkerId

POLICIES = ("round_robin", "cache_aware")
NUM_PREFILLS = 4
CACHED_BLOCKS = 2_000  # of 512 tokens, per prefill: about a million tokens
UNDER_WAY = 16  # requests at a time, each of which ends when so many others have begun
TURNS, CONVERSATIONS = 6, 5  # an odd number of conversations: turns alternate between two prefills
SEED = 1


def drawn_conversations(count: int = 400) -> Iterator[list[int]]:
    """Of 3 to 12 turns that each bring 1 to 4 blocks, and begin with one of a few system prompts."""
    random = Random(SEED)
    under_way: list[tuple[list[int], int]] = []
    next_block, begun = 1000, 0
    while begun < count or under_way:
        if begun < count and (len(under_way) < 40 or random.random() < 0.1):
            under_way.append(([random.randrange(5)], random.randint(3, 12)))
            begun += 1
        index = random.randrange(len(under_way))
        blocks, turns = under_way.pop(index)
        size = random.randint(1, 4)
        blocks = [*blocks, *range(next_block, next_block + size)]
        next_block += size
        yield blocks
        if turns > 1:
            under_way.append((blocks, turns - 1))


def trace_of(path: Path | None) -> Iterator[list[int]]:
    if path is None:
        yield from drawn_conversations()
        return
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def hit_rate(name: str, prompts: Iterable[list[int]]) -> float:
    """Share of the blocks of all prompts that the chosen prefill had cached."""
    policy = make_policy(PolicySettings(name), Random(SEED).getrandbits)  # type: ignore[arg-type]  # draws nothing here
    caches = [OrderedDict[int, None]() for _ in range(NUM_PREFILLS)]
    under_way: list[WorkerId] = []
    hits = total = 0
    for prompt in prompts:
        candidates = [Candidate(WorkerId(i), under_way.count(WorkerId(i))) for i in range(NUM_PREFILLS)]
        chosen = policy.choose(candidates, tuple(block.to_bytes(8, "big") for block in prompt))
        cache = caches[chosen]
        hits += next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))
        total += len(prompt)
        for block in prompt:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHED_BLOCKS:
            cache.popitem(last=False)
        under_way = [*under_way, chosen][-UNDER_WAY:]
    return hits / total


def conversation(client: httpx.Client, url: str, messages: list[dict[str, str]]) -> tuple[float, int, int]:
    """One turn: ms to the first bytes of the answer, tokens of the prompt, and how many of them were cached."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began = time.perf_counter()
    text, usage, first_ms = "", {}, 0.0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            first_ms = first_ms or (time.perf_counter() - began) * 1000
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then 2 more? " * 40}]
    return first_ms, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def served(policy: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=3) as fleet:
        decode_flags = ("--disable-radix-cache",)  # what is cached, prefill has cached
        flags = ("--prefill-policy", policy)
        router = start_pd(
            fleet,
            "tandem/mini",
            prefills=2,
            decodes=1,
            router_port=0,
            router_flags=flags,
            decode_flags=decode_flags,
        )
        fleet.wait_ready(timeout_s=120)
        first_ms: list[float] = []
        prompt_tokens = cached_tokens = 0
        with httpx.Client(timeout=60) as client:
            talks = [
                [{"role": "user", "content": f"Person {number} has a shop. " + "It sells apples and pears. " * 30}]
                for number in range(CONVERSATIONS)
            ]
            for turn in range(TURNS):
                for messages in talks:
                    ms, prompt, cached = conversation(client, router.url, messages)
                    if turn:  # the first one is nowhere
                        first_ms.append(ms)
                        prompt_tokens += prompt
                        cached_tokens += cached
        return {
            "hit_rate": round(cached_tokens / prompt_tokens, 3),
            "computed_tokens": prompt_tokens - cached_tokens,
            "ttft_ms_p50": round(statistics.median(first_ms), 1),
        }


def replayed(path: Path | None) -> dict[str, str | float]:
    turns, affine = (hit_rate(name, trace_of(path)) for name in POLICIES)
    return {
        "name": path.name if path else "drawn",
        "prefills": NUM_PREFILLS,
        "hit_rate_round_robin": round(turns, 4),
        "hit_rate_cache_aware": round(affine, 4),
        "hit_rate_ratio": round(affine / turns, 2),
        "computed_ratio": round((1 - affine) / (1 - turns), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    traces = [replayed(path) for path in dict.fromkeys((None, args.trace))]
    by_turns, by_affinity = (served(name) for name in POLICIES)
    result = {
        "bench": "affinity",
        "conditions": conditions(),
        "traces": traces,
        "processes": {
            "round_robin": by_turns,
            "cache_aware": by_affinity,
            "ttft_ratio": round(by_affinity["ttft_ms_p50"] / by_turns["ttft_ms_p50"], 2),
            "computed_ratio": round(by_affinity["computed_tokens"] / by_turns["computed_tokens"], 2),
        },
    }
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
