"""CPU per streamed token of each process of a server, and the API process as a ratio to a bare ASGI app.

The bare app streams chunks of the same size under uvicorn, in a process of its own, to the same client: ready-made
bytes, one chunk per stream and tick, at the pace at which Tandem's tokens came. It is the floor of what streaming costs
here. Tandem's API process parses, tokenizes, talks to its node, detokenizes and formats. The node decides what runs,
the worker computes the bundled model. CPU seconds are the operating system's account of each process.

    python bench/stream_cpu.py [--streams 1 8 64] [--tokens 4096] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.values import ceil_div

BARE_APP = """
import asyncio, sys, uvicorn
CHUNK = b"data: " + b"x" * int(sys.argv[2]) + b"\\n\\n"
tick = asyncio.Event()
ticker = None
async def run_ticker():
    global tick
    while True:
        await asyncio.sleep(float(sys.argv[3]))
        last, tick = tick, asyncio.Event()
        last.set()
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    global ticker
    ticker = ticker or asyncio.ensure_future(run_ticker())
    tokens = int(scope["path"].strip("/") or 0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(tokens):
        await tick.wait()
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", lifespan="off")
"""


def cpu_ns(pid: int) -> int:
    """Of all of its threads that live."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def processes_of(server: int) -> dict[str, int]:
    """By what they are for: the API process has started the other two."""
    found = {"API": server}
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in (task / "children").read_text().split():
            line = Path(f"/proc/{child}/cmdline").read_text()
            found |= {name: int(child) for name in ("node", "worker") if f"tandem.server.{name}" in line}
    return found


def stream_all(requests: int, ask) -> tuple[int, int]:  # ask: callable taking a client, returning a stream context
    """Run the streams at once; (chunks, bytes) that came."""
    chunks, size = [0] * requests, [0] * requests

    def one(index: int) -> None:
        with httpx.Client(timeout=120) as client, ask(client) as reply:
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    chunks[index] += 1
                    size[index] += len(line) + 2

    threads = [threading.Thread(target=one, args=(index,)) for index in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(chunks), sum(size)


@dataclass(frozen=True)
class Cost:
    """Of a number of streams at once, in CPU microseconds per token of them all."""

    streams: int
    by_process: dict[str, float]
    chunk_bytes: int
    pace_s: float  # between two tokens of a stream


def measure_tandem(all_streams: Sequence[int], total: int) -> list[Cost]:
    (port,) = free_ports(1)
    words = [*serve_words("tandem/mini", port), "--max-running-requests", str(max(all_streams))]
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        server = fleet.start("unified", words, port=port)
        fleet.wait_ready(timeout_s=120)
        processes = processes_of(server.process.pid)

        def cost(streams: int) -> Cost:
            tokens = ceil_div(total, streams)
            body = {
                "model": "tandem/mini",
                "prompt": "Question: What is 12 + 30?\nAnswer:",
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }

            def ask(client: httpx.Client):
                return client.stream("POST", f"{server.url}/v1/completions", json=body)

            stream_all(streams, ask)  # warm-up
            before, began = {name: cpu_ns(pid) for name, pid in processes.items()}, time.perf_counter()
            chunks, size = stream_all(streams, ask)
            pace_s = (time.perf_counter() - began) / tokens
            spent = {name: (cpu_ns(pid) - before[name]) / 1e3 / (streams * tokens) for name, pid in processes.items()}
            return Cost(streams, spent, size // chunks, pace_s)

        return [cost(streams) for streams in all_streams]


def measure_bare(cost: Cost, total: int) -> float:
    """CPU microseconds per chunk of the bare app, for as many streams at the same pace."""
    (port,) = free_ports(1)
    tokens = ceil_div(total, cost.streams)
    process = subprocess.Popen([sys.executable, "-c", BARE_APP, str(port), str(cost.chunk_bytes), str(cost.pace_s)])
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/1")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        before = cpu_ns(process.pid)
        stream_all(cost.streams, lambda client: client.stream("POST", f"http://127.0.0.1:{port}/{tokens}"))
        return (cpu_ns(process.pid) - before) / 1e3 / (cost.streams * tokens)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=4096, help="of all streams together")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for cost in measure_tandem(args.streams, args.tokens):
        bare = measure_bare(cost, args.tokens)
        us = {name.lower(): value for name, value in cost.by_process.items()} | {"bare": bare}
        ratio = cost.by_process["API"] / bare
        results.append({"streams": cost.streams, "us": us, "ratio": ratio, "pace_s": cost.pace_s})
        if not args.json:
            shown = "  ".join(f"{name} {value:6.1f}" for name, value in us.items())
            print(f"{cost.streams:3} streams, CPU us per token:  {shown}  API / bare {ratio:.2f}")
    print(json.dumps({"bench": "stream_cpu", "streams": results, "tokens": args.tokens, **conditions()}))


if __name__ == "__main__":
    main()
