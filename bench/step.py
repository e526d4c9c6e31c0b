"""What one step of the core costs: settle the batch that returned and plan the next one, in pure Python.

All rows decode, with contexts of about 1,000 tokens, overlap on (window of two), prefix tree on. The fake worker is not
timed: it answers with a token per row and the hashes of the pages that filled up, as a real one does. The rows are
spread over the positions of a page, so a sixteenth of them needs a new page in every step.

    python bench/step.py [--steps 2000] [--json]

CPU times leave out what other processes on the machine took away. The last line is one JSON document with the
conditions. Budget: 0.3 ms at 256 rows, 1 ms at 1,024.
"""

import argparse
import gc
import json
import time
from array import array
from dataclasses import dataclass, field
from random import Random

from conditions import conditions

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.commands import LaunchBatch
from tandem.core.events import BatchReturned, RequestArrived
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import SECOND, Incarnation, Nanos, RequestId

PAGE_SIZE = 16
CONTEXT = 1_000
WARM_UP = 200
BUDGET_MS = {256: 0.3, 1024: 1.0}


@dataclass
class FakeWorker:
    """Knows who decodes and how long each row is; nothing else is needed to answer."""

    random: Random
    decode_set: dict[RequestId, None] = field(default_factory=dict)
    lengths: dict[RequestId, int] = field(default_factory=dict)

    def run(self, plan: BatchPlan) -> BatchOutcome:
        hashes: list[tuple[RequestId, bytes]] = []
        num_sampled = sum(row.samples for row in plan.rows)
        for row in plan.rows:
            self.lengths[row.request] = row.stop + row.samples
        for request in plan.leave:
            self.decode_set.pop(request, None)
        for join in plan.join:
            self.decode_set[join.request] = None
        if plan.decodes:
            num_sampled += len(self.decode_set)
            for request in self.decode_set:
                if self.lengths[request] % PAGE_SIZE == 0:
                    hashes.append((request, self.random.randbytes(16)))
                self.lengths[request] += 1
        tokens = array("i", [7]) * num_sampled
        return BatchOutcome(plan.id, plan.iteration, tokens.tobytes(), bytes(num_sampled), tuple(hashes))


@dataclass
class Bench:
    """One node with its fake worker, driven by hand."""

    num_rows: int
    num_steps: int
    num_waiting: int = 0
    now: int = 0
    plans: list[BatchPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.num_rows)
        self.worker = FakeWorker(self.random)
        pages_per_row = (CONTEXT + PAGE_SIZE + self.num_steps + WARM_UP) // PAGE_SIZE + 2
        settings = NodeSettings(
            Role.UNIFIED,
            Incarnation("bench", "1"),
            num_pages=self.num_rows * pages_per_row,
            max_running=self.num_rows,
            max_queued=self.num_waiting + self.num_rows,
            chunk_tokens=8 * (CONTEXT + PAGE_SIZE),
            conservativeness=0.0,
        )
        self.node = EngineNode(settings)

    def step(self, events: list) -> tuple[int, int]:
        """Nanoseconds of the step alone: on the clock, and of this thread's CPU."""
        self.now += 1_000_000
        before, cpu_before = time.perf_counter_ns(), time.thread_time_ns()
        effects = self.node.step(events, Nanos(self.now))
        spent = time.perf_counter_ns() - before, time.thread_time_ns() - cpu_before
        self.plans += [command.plan for command in effects.commands if isinstance(command, LaunchBatch)]
        return spent

    def arrive(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            prompt_len = CONTEXT + number % PAGE_SIZE
            hashes = tuple(self.random.randbytes(16) for _ in range(prompt_len // PAGE_SIZE))
            timeout = Nanos(10_000 * SECOND)
            self.step([RequestArrived(Request(RequestId(number), f"r{number}", prompt_len, hashes, 10**6, timeout))])

    def turn(self) -> tuple[int, int]:
        outcome = self.worker.run(self.plans.pop(0))
        return self.step([BatchReturned(outcome)])

    def run(self) -> dict[str, float]:
        """Milliseconds per step, every row decoding in each."""
        self.arrive(1, self.num_rows)
        while self.node.state.micro_batches.num_members < self.num_rows or self.node.state.micro_batches.joining:
            self.turn()
        self.arrive(self.num_rows + 1, self.num_waiting)
        for _ in range(WARM_UP):
            self.turn()
        gc.collect()
        gc.freeze()
        wall, cpu = map(sorted, zip(*(self.turn() for _ in range(self.num_steps)), strict=True))
        assert self.node.state.micro_batches.num_members == self.num_rows
        gc.unfreeze()
        half, most = self.num_steps // 2, self.num_steps * 99 // 100
        found = {"p50_ms": wall[half], "p99_ms": wall[most], "cpu_p50_ms": cpu[half], "cpu_p99_ms": cpu[most]}
        return {name: nanos / 1e6 for name, nanos in found.items()}


SETTING = {
    "warm_up_steps": WARM_UP,
    "context_tokens": CONTEXT,
    "page_size": PAGE_SIZE,
    "window_depth": 2,
    "prefix_cache": True,
    "gc": "on, start-up objects frozen",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000, help="timed steps per line")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = {**conditions(), **SETTING}
    lines = []
    for rows, waiting in ((1, 0), (64, 0), (256, 0), (256, 100_000), (1024, 0)):
        found = Bench(rows, args.steps, waiting).run()
        lines.append({"rows": rows, "waiting": waiting, "steps": args.steps, **found})
        if not args.json:
            numbers = "   ".join(f"{name.removesuffix('_ms')} {value:.4f}" for name, value in found.items())
            budget = f"   budget {BUDGET_MS[rows]}" if rows in BUDGET_MS else ""
            print(f"{rows:>5} rows {waiting:>7} waiting, ms:   {numbers}{budget}", flush=True)
    p50s = {(line["rows"], line["waiting"]): line["p50_ms"] for line in lines}
    ratios = {"256/1": p50s[256, 0] / p50s[1, 0], "1024/256": p50s[1024, 0] / p50s[256, 0]}
    if not args.json:
        print("   ".join(f"{name} rows: {ratio:.2f}x" for name, ratio in ratios.items()))
    print(json.dumps({"bench": "step", "results": lines, "p50_ratios": ratios, **known}))


if __name__ == "__main__":
    main()
