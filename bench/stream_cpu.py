"""CPU per streamed token in the API process, as a ratio to a bare ASGI app that streams chunks of the same size.

Both run under uvicorn in a process of their own and are read by the same client. The bare app sends ready-made bytes,
one chunk per stream and tick, at the pace at which Tandem's tokens came: the floor of what streaming costs here.
Tandem's process parses, tokenizes, talks to its node, detokenizes and formats. CPU seconds are the operating system's
account of that one process.

    python bench/stream_cpu.py [--requests 16] [--tokens 256] [--json]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

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


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def measure_tandem(requests: int, tokens: int) -> tuple[float, int, float]:
    """CPU microseconds per token of the API process, bytes per chunk, and seconds between two tokens of a stream."""
    (port,) = free_ports(1)
    words = [*serve_words("tandem/mini", port), "--max-running-requests", str(requests)]
    body = {
        "model": "tandem/mini",
        "prompt": "Question: What is 12 + 30?\nAnswer:",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        server = fleet.start("unified", words, port=port)
        fleet.wait_ready(timeout_s=120)

        def ask(client: httpx.Client):
            return client.stream("POST", f"{server.url}/v1/completions", json=body)

        stream_all(2, ask)  # warm-up
        before, began = cpu_seconds(server.process.pid), time.perf_counter()
        chunks, size = stream_all(requests, ask)
        pace_s = (time.perf_counter() - began) / tokens
        return (cpu_seconds(server.process.pid) - before) / (requests * tokens) * 1e6, size // chunks, pace_s


def measure_bare(requests: int, tokens: int, chunk_bytes: int, pace_s: float) -> float:
    """CPU microseconds per chunk of the bare app."""
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", BARE_APP, str(port), str(chunk_bytes), str(pace_s)])
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/1")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        before = cpu_seconds(process.pid)
        stream_all(requests, lambda client: client.stream("POST", f"http://127.0.0.1:{port}/{tokens}"))
        return (cpu_seconds(process.pid) - before) / (requests * tokens) * 1e6
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tandem_us, chunk_bytes, pace_s = measure_tandem(args.requests, args.tokens)
    bare_us = measure_bare(args.requests, args.tokens, chunk_bytes, pace_s)
    if not args.json:
        print(f"{'':>10} {'CPU us per token':>17}")
        for name, value in (("tandem", tandem_us), ("bare ASGI", bare_us), ("ratio", tandem_us / bare_us)):
            print(f"{name:>10} {value:>17.2f}")
    result = {
        "tandem_us": tandem_us,
        "bare_us": bare_us,
        "ratio": tandem_us / bare_us,
        "chunk_bytes": chunk_bytes,
        "pace_s": pace_s,
    }
    settings = {"requests": args.requests, "tokens": args.tokens}
    print(json.dumps({"bench": "stream_cpu", **result, **settings, **conditions()}))


if __name__ == "__main__":
    main()
