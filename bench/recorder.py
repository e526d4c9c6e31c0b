"""What keeping the last steps costs, always on, as a share of the step: in pairs, with and without it, in one run.

    python bench/recorder.py [--steps 4000] [--json]

One node with all rows decoding (`step.py`); of its steps a random half is kept, so that both halves meet the same
memory and the same neighbours on the machine. A step is `EngineNode.step` alone, so the share is an upper bound: the
loop around it also reads and writes sockets.

    keeping     what every step pays: the median of those that are kept over that of the others
    weighing    of some steps at once, by the number of these
    snapshots   what one takes, by the steps of the segment that it begins

CPU time of the thread. The last line is one JSON document; `share` is the largest of all lines with at least 64 rows,
the goal 0.03.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from conditions import conditions
from step import WARM_UP, Bench

from tandem.core.commands import LaunchBatch
from tandem.core.values import Nanos
from tandem.server.node.last_steps import LastSteps
from tandem.server.node.ring import weight
from tandem.server.ring import SNAPSHOTS, WEIGH_EVERY

ROWS = (1, 64, 256, 1024)
LEAST_ROWS = 64  # the step of a smaller batch takes a fraction of what its socket calls take
GOAL = 0.03


class Recorded(Bench):
    """A node some of whose steps are kept."""

    kept: LastSteps | None = None
    keeps: bool = False

    def step(self, events: list) -> tuple[int, int]:
        self.now += 1_000_000
        now, kept = Nanos(self.now), self.kept if self.keeps else None
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        if kept is None:
            effects = self.node.step(events, now)
        else:
            kept.before(now, events)
            effects = self.node.step(events, now)
            kept.after(now, events, effects)
        spent = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        self.plans += [command.plan for command in effects.commands if isinstance(command, LaunchBatch)]
        return spent

    def start(self) -> None:
        self.arrive(1, self.num_rows)
        while len(self.node.state.decode_set) < self.num_rows or self.node.state.joins:
            self.turn()
        self.kept = LastSteps(Path("never-written"), self.node.state.settings, self.node)
        for _ in range(WARM_UP):
            self.keeps = not self.keeps
            self.turn()

    def halves(self, steps: int) -> dict[bool, list[int]]:
        """CPU nanoseconds of each step, by whether it was kept."""
        random, found = Random(self.num_rows), {True: list[int](), False: list[int]()}
        for _ in range(steps):
            self.keeps = random.random() < 0.5
            found[self.keeps].append(self.turn()[1])
        return found


def measure(rows: int, steps: int) -> dict[str, float]:
    bench = Recorded(rows, 2 * steps)
    bench.start()
    gc.collect()
    gc.freeze()
    halves = bench.halves(steps)
    gc.unfreeze()
    step_ns = statistics.median(halves[False])
    assert bench.kept is not None
    ring = bench.kept.ring
    inputs, outputs = ring.given[-WEIGH_EVERY:], ring.gave[-WEIGH_EVERY:]
    bytes_per_step = weight(inputs, outputs) / WEIGH_EVERY
    segment_steps = max(ring.segment_bytes, SNAPSHOTS * len(bench.node.snapshot())) / bytes_per_step
    snapshot_ns = best_of(bench.node.snapshot)
    shares = {
        "keeping": statistics.median(halves[True]) / step_ns - 1,
        "weighing": best_of(lambda: weight(inputs, outputs)) / WEIGH_EVERY / step_ns,
        "snapshots": snapshot_ns / segment_steps / step_ns,
    }
    return {
        "rows": rows,
        "step_us": step_ns / 1e3,
        "segment_steps": segment_steps,
        "snapshot_ms": snapshot_ns / 1e6,
        **shares,
        "share": sum(shares.values()),
    }


def best_of(work: Callable[[], object], times: int = 9) -> int:
    """CPU nanoseconds."""
    found: list[int] = []
    for _ in range(times):
        before = time.thread_time_ns()
        work()
        found.append(time.thread_time_ns() - before)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000, help="timed steps per line")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = conditions()
    lines = []
    for rows in ROWS:
        lines.append(measure(rows, args.steps))
        if not args.json:
            print("   ".join(f"{name} {value:.4g}" for name, value in lines[-1].items()), flush=True)
    share = max(line["share"] for line in lines if line["rows"] >= LEAST_ROWS)
    print(json.dumps({"bench": "recorder", "share": share, "goal": GOAL, "results": lines, **known}))


if __name__ == "__main__":
    main()
