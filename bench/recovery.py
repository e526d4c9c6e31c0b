"""What clients see of kills: two prefills and two decodes, one of which is killed every so often and started again.

Streams of which somebody else can go on with the rest are asked for in turn with streams of which nobody can
(`return_logprob`), under the same kills: what decision 022 is worth, within one run.

    python bench/recovery.py [--seconds 60] [--every 10] [--clients 4] [--json]
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, Member, start_pd

PROMPT, TOKENS = list(range(20, 60)), 300
READY_S = 120.0
KINDS = {"resumable": False, "not_resumable": True}


def body_of(kind: str) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "return_logprob": KINDS[kind]}


def ask(url: str, kind: str) -> tuple[str, list[int]]:
    """How it ended, and its tokens."""
    last: dict[str, object] = {}
    try:
        with httpx.stream("POST", f"{url}/generate", json=body_of(kind), timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
    except httpx.HTTPError as error:
        return type(error).__name__, []
    error = last.get("error")
    if isinstance(error, dict):
        return str(error.get("code")), []
    ids = last.get("output_ids")
    return "success", ids if isinstance(ids, list) else []


class Clients:
    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._right = {kind: ask(url, kind)[1] for kind in KINDS}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.successes: list[tuple[float, float]] = []  # began, ended
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        kinds = list(KINDS)
        while not self._is_over.is_set():
            kind, began = kinds[index % 2], time.monotonic()
            outcome, ids = ask(self._url, kind)
            if outcome == "success" and ids != self._right[kind]:
                outcome = "wrong"
            self.outcomes[kind, outcome] += 1
            if outcome == "success":
                self.successes.append((began, time.monotonic()))
            index += 1


def kill(member: Member) -> None:
    os.kill(member.process.pid, signal.SIGKILL)
    member.process.wait()


def measure(seconds: float, every: float, num_clients: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=4) as fleet:
        router = start_pd(fleet, "tandem/mini", prefills=2, decodes=2, router_port=0, server_flags=("--deterministic",))
        fleet.wait_ready(timeout_s=READY_S)
        victims = [member for member in fleet.members if member.name.startswith(("prefill", "decode"))]
        kills: list[float] = []
        with Clients(router.url, num_clients) as clients:
            over_at = time.monotonic() + seconds
            while time.monotonic() < over_at:
                time.sleep(every)
                victim = victims[len(kills) * 2 % len(victims) + len(kills) // 2 % 2]  # both roles, one after another
                kill(victim)
                kills.append(time.monotonic())
                fleet.restart(victim)
                fleet.wait_ready(timeout_s=READY_S)
        lines = httpx.get(f"{router.url}/metrics").text.splitlines()
        resumed = next(line for line in lines if line.startswith("tandem:router_resumes_total"))
    waits = [min((end - at for began, end in clients.successes if end > at), default=float("inf")) for at in kills]
    found: dict[str, object] = {"kills": len(kills), "resumed": float(resumed.split()[-1]), "to_next_success_s": waits}
    for kind in KINDS:
        counts = {outcome: count for (asked, outcome), count in clients.outcomes.items() if asked == kind}
        found[kind] = counts | {"share": counts.get("success", 0) / max(1, sum(counts.values()))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.seconds, args.every, args.clients)
    result = {**found, "every_s": args.every, "clients": args.clients, "tokens": TOKENS, **conditions()}
    print(json.dumps(result, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
