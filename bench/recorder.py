"""What keeping the last steps costs, always on, as a share of the step: with and without it in turn, in one run.

    python bench/recorder.py [--rounds 120] [--json]

Of the core's step: one node with all rows decoding (`step.py`); of its steps a block is not kept, two are, one is not.
What a block takes has in it that steps are encoded some at a time, and what the collector does about them. It is
`EngineNode.step` alone, so the share is an upper bound: the loop around it also reads and writes sockets.

    keeping     what the kept blocks of a round take more than the others, of what these take: the median of all rounds
    snapshots   what one takes, by the steps of the segment that it begins

CPU time of the thread. Of the served step: one server with the bundled model and one worker, one request at a time,
from its first token to its last one; what keeping a step of one row adds is divided by that. The last line is one JSON
document; `share` is that of the served step, `share_of_core` the largest of all lines; the goal of the first is 0.03.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any  # what a ring keeps

import httpx
from conditions import conditions
from step import WARM_UP, Bench

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.commands import LaunchBatch
from tandem.core.values import Nanos
from tandem.server.node.last_steps import NodeLastSteps
from tandem.server.ring import PACK_EVERY, SEGMENT_BYTES, SNAPSHOTS, Ring

ROWS = (1, 64, 256, 1024)
FEW_ROWS = 64  # with more of them a step takes longer, and is timed less often
GOAL = 0.03
BLOCK = 8 * PACK_EVERY  # steps
TOKENS, REQUESTS, PROMPT_TOKENS = 400, 9, 64  # of the served step


class Recorded(Bench):
    """A node some of whose steps are kept."""

    observers: tuple[NodeLastSteps, ...] = ()

    def step(self, events: list) -> tuple[int, int]:
        self.now += 1_000_000
        now, observers = Nanos(self.now), self.observers
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for observer in observers:
            observer.before(now, events)
        effects = self.node.step(events, now)
        for observer in observers:
            observer.after(now, events, effects)
        spent = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        self.plans += [command.plan for command in effects.commands if isinstance(command, LaunchBatch)]
        return spent

    def start(self) -> NodeLastSteps:
        self.arrive(1, self.num_rows)
        while self.node.state.micro_batches.num_members < self.num_rows or self.node.state.micro_batches.joining:
            self.turn()
        kept = NodeLastSteps(Path("never-written"), self.node.state.settings, self.node)
        self.observers = (kept,)
        for _ in range(WARM_UP):
            self.turn()
        age(encoded(kept.ring))
        return kept

    def block(self, *observers: NodeLastSteps) -> int:
        """CPU nanoseconds."""
        self.observers = observers
        return sum(self.turn()[1] for _ in range(BLOCK))


def measure(rows: int, rounds: int) -> dict[str, float]:
    bench = Recorded(rows, 4 * rounds * BLOCK + 2 * WARM_UP)
    kept = bench.start()
    gc.collect()
    gc.freeze()
    found = [(bench.block(), bench.block(kept), bench.block(kept), bench.block()) for _ in range(rounds)]
    gc.unfreeze()
    step_ns = statistics.median(first + last for first, _, _, last in found) / (2 * BLOCK)
    added_ns = statistics.median(one + two - first - last for first, one, two, last in found) / (2 * BLOCK)
    ring = kept.ring
    bytes_per_step = statistics.mean(map(len, encoded(ring))) / PACK_EVERY
    segment_steps = max(ring.segment_bytes, SNAPSHOTS * len(bench.node.snapshot())) / bytes_per_step
    snapshot_ns = best_of(bench.node.snapshot)
    shares = {"keeping": added_ns / step_ns, "snapshots": snapshot_ns / segment_steps / step_ns}
    share = sum(shares.values())
    return {
        "rows": rows,
        "step_us": step_ns / 1e3,
        "bytes_per_step": bytes_per_step,
        "segment_steps": segment_steps,
        "snapshot_ms": snapshot_ns / 1e6,
        **shares,
        "share": share,
        "added_us": share * step_ns / 1e3,
    }


def encoded(ring: Ring[Any, Any]) -> list[bytes]:
    """PACK_EVERY steps each."""
    return [part for segment in ring._segments for part in segment.parts if isinstance(part, bytes)]


def age(parts: list[bytes]) -> None:
    """As in a process that has dropped segments before: new parts take the memory of old ones."""
    size = len(parts[-1])
    dropped = [bytes(size) for _ in range(2 * SEGMENT_BYTES // size)]
    pins.append(bytes(size))  # behind them, or all of it would be given back to the system
    del dropped


pins: list[bytes] = []


def best_of(work: Callable[[], object], times: int = 9) -> int:
    """CPU nanoseconds."""
    found: list[int] = []
    for _ in range(times):
        before = time.thread_time_ns()
        work()
        found.append(time.thread_time_ns() - before)
    return min(found)


def served_step_us() -> float:
    """Microseconds of one iteration with one row, as a client sees it."""
    (port,) = free_ports(1)
    rng = random.Random(1)
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        server = fleet.start("unified", serve_words("tandem/mini", port), port=port)
        fleet.wait_ready(timeout_s=120)
        with httpx.Client(timeout=60) as client:
            for _ in range(REQUESTS + 2):
                found.append(_iteration_us(client, server.url, [rng.randrange(1, 500) for _ in range(PROMPT_TOKENS)]))
    return statistics.median(found[2:])


def _iteration_us(client: httpx.Client, url: str, prompt: list[int]) -> float:
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    with client.stream("POST", f"{url}/generate", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        chunks = reply.iter_raw()
        next(chunks)
        began = time.perf_counter()
        for _ in chunks:
            pass
        return (time.perf_counter() - began) / (TOKENS - 1) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120, help="of four blocks, per line")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = conditions()
    lines = []
    for rows in ROWS:
        lines.append(measure(rows, args.rounds if rows <= FEW_ROWS else args.rounds // 6))
        if not args.json:
            print("   ".join(f"{name} {value:.4g}" for name, value in lines[-1].items()), flush=True)
    served_us = served_step_us()
    share = lines[0]["added_us"] / served_us
    if not args.json:
        print(f"served step of one row {served_us:.0f} us   share {share:.4g}", flush=True)
    found = {
        "share": share,
        "share_of_core": max(line["share"] for line in lines),
        "goal": GOAL,
        "served_step_us": served_us,
    }
    print(json.dumps({"bench": "recorder", **found, "results": lines, **known}))


if __name__ == "__main__":
    main()
