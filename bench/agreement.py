"""What it costs that the workers of a replica have to agree: a pair in simulation, with 1 to 64 workers on either side.

Agreement is no round of messages here (decision 014): every worker reports to its node, which joins the reports. So in
virtual time, where workers and messages take as long whatever their number, the first token of a prompt comes as early
from 64 workers as from one, and what two nodes say to each other is as much. What grows with the workers is the work of
the nodes, which is measured: CPU of all their steps, of both sides, by request. Reports that come in the same instant
are one step, as in a server; where no two come together there are more steps than here.

    first_token_ms   virtual, from the request's arrival to its first token on decode
    messages         between the two nodes
    steps, cpu_us    of both nodes

    python bench/agreement.py [--requests 40] [--repetitions 5] [--json]

The cuts take turns in every repetition; a ratio is the median of those to one worker within a repetition.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from conditions import conditions

from tandem.core.scheduler.node import EngineNode
from tandem.core.values import Cut
from tandem.simulator.scenario.play import Scenario

CUTS = (Cut(), Cut(1, 2), Cut(2, 2), Cut(2, 4), Cut(4, 4), Cut(4, 8), Cut(8, 8))
PROMPT, TOKENS = 32, 4  # four chunks
APART_MS = 200


class Meter:
    """CPU and number of the steps of all nodes."""

    def __init__(self) -> None:
        self.cpu_ns = self.steps = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        step = EngineNode.step

        def measured(node: EngineNode, *told):  # type: ignore[no-untyped-def]  # as `step`
            began = time.thread_time_ns()
            try:
                return step(node, *told)
            finally:
                self.cpu_ns += time.thread_time_ns() - began
                self.steps += 1

        EngineNode.step = measured  # type: ignore[method-assign]  # for as long as it is measured
        try:
            yield
        finally:
            EngineNode.step = step  # type: ignore[method-assign]  # as it was


def script(cut: Cut, requests: int) -> str:
    words = f'cut={{"tp_size":{cut.tp_size},"pp_size":{cut.pp_size}}}'
    lines = [f"node prefill-0 prefill {words}", f"node decode-0 decode {words}", "recount every 1000000 events"]
    for number in range(requests):
        asked = f"at {1 + number * APART_MS}ms {{}} request {PROMPT}+{TOKENS} prompt {number} room {number + 1}"
        lines += [asked.format("prefill-0"), asked.format("decode-0") + " from prefill-0"]
    return "\n".join([*lines, f"until {(requests + 2) * APART_MS}ms"])


def measure(cut: Cut, requests: int) -> dict[str, float]:
    meter, scenario = Meter(), Scenario()
    scenario.read(script(cut, requests))
    with meter.running():
        trace = scenario.run().splitlines()
    arrived, first, where, now = list[float](), list[float](), "", 0.0
    for line in trace:
        if not line.startswith(" "):
            where, now = line.partition(" ")[2], float(line.partition(" ")[0])
        elif where.startswith("decode") and "< request" in line and "arrived" in line:
            arrived.append(now)
        elif where.startswith("decode") and "> start request" in line:
            assert ": remote" in line, line
            first.append(now)
    assert len(arrived) == len(first) == requests
    return {
        "first_token_ms": statistics.median(at - since for since, at in zip(arrived, first, strict=True)) * 1000,
        "messages": sum("> tell" in line for line in trace) / requests,
        "steps": meter.steps / requests,
        "cpu_us": meter.cpu_ns / requests / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = conditions()
    measure(CUTS[0], args.requests)  # warm
    turns = [{cut: measure(cut, args.requests) for cut in CUTS} for _ in range(args.repetitions)]
    rows = []
    for cut in CUTS:
        found = [turn[cut] for turn in turns]
        ratio = statistics.median(turn[cut]["cpu_us"] / turn[CUTS[0]]["cpu_us"] for turn in turns)
        exact = {name: round(found[0][name], 3) for name in ("first_token_ms", "messages", "steps")}
        cpu_us = round(statistics.median(one["cpu_us"] for one in found), 1)
        rows.append(
            {"cut": cut.name, "workers": cut.num_shards, **exact, "cpu_us": cpu_us, "cpu_ratio": round(ratio, 2)}
        )
        if not args.json:
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="   ", flush=True)
    settings = {"requests": args.requests, "repetitions": args.repetitions, "prompt": PROMPT}
    print(json.dumps({"bench": "agreement", "rows": rows, **settings, **known}))


if __name__ == "__main__":
    main()
