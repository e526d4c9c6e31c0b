"""What a router with one prefill and one decode server does under more than it can serve.

    streams     so many clients at once, each with a stream of its own that it reads to the end
    requests    so many one-token requests at once, each on a connection of its own
    bodies      the large bodies of `large_bodies.py`, one after the other, to the router or to its decode server

For each of the first two: answers by status, the time until a refusal was there, `/health` of the router meanwhile, and
memory and file descriptors of all processes at their highest. Of bodies: `/health` of the router and of decode, asked
all the while. The last line is JSON. Clients and servers share the machine's cores.

    refusal_ms    of the burst, from the moment in which the client began to connect. All its clients live in one loop,
                  which begins thousands of connections before it reads the first answer: mostly their own time
    sent_ms       the same, from the moment in which the request was handed to the kernel
    reached_ms    of that, until the refusal was in the client's kernel, which keeps account: what the servers took;
                  0 where it was there before the request was sent
    router_ms     by the router itself: from the last byte that it got, or the connection, until its event loop has the
                  refusal, also while the kernel held what came; each is the next bound of a histogram above. Who was
                  waited for, and gave way, is not in it
    beside_ms     of somebody in another process, who asks now and then while the burst lasts: connects, sends and reads
"""

import argparse
import asyncio
import http.client
import json
import re
import resource
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from bench import large_bodies
from bench.beside import PROBE_SECONDS, Beside, Watch, asked, milliseconds, started, watch
from bench.conditions import conditions

from tandem.server.api.connections import waited_s

HEALTH_SECONDS = 0.1  # between two probes
CLIENT_SECONDS = 300.0
REFUSAL_SECONDS = 0.05  # between two requests that are to be refused
REFUSAL_BUCKET = re.compile(r'^tandem:router_refusal_seconds_bucket{le="([^"]+)"} (\S+)$', re.MULTILINE)


@dataclass
class Figures:
    """Of one burst. Durations are seconds."""

    name: str
    statuses: Counter[str] = field(default_factory=Counter[str])
    refusals: list[float] = field(default_factory=list[float])
    sent: list[float] = field(default_factory=list[float])
    reached: list[float] = field(default_factory=list[float])
    router: dict[str, float] = field(default_factory=dict[str, float])
    beside: list[float] = field(default_factory=list[float])
    answers: list[float] = field(default_factory=list[float])
    seen: Watch = field(default_factory=Watch)
    seconds: float = 0.0

    def row(self) -> dict[str, object]:
        return {
            "burst": self.name,
            "answers": dict(self.statuses),
            "refusal_ms": milliseconds(self.refusals),
            "sent_ms": milliseconds(self.sent),
            "reached_ms": milliseconds(self.reached),
            "router_ms": self.router,
            "beside_ms": milliseconds(self.beside),
            "answer_ms": milliseconds(self.answers),
            "seconds": round(self.seconds, 1),
        } | self.seen.row()


def request_bytes(body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def client(port: int, request: bytes, figures: Figures) -> None:
    """Reads its answer to the end."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                sent = time.monotonic()
                writer.write(request)
                status = (await reader.readline()).split()[1].decode()
                now = time.monotonic()
                reached = now - (waited_s(writer.get_extra_info("socket")) or 0.0)
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()
    except (OSError, IndexError, TimeoutError) as error:
        figures.statuses[type(error).__name__] += 1
        return
    figures.statuses[status] += 1
    (figures.answers if status == "200" else figures.refusals).append(now - began)
    if status != "200":
        figures.sent.append(now - sent)
        figures.reached.append(max(0.0, reached - sent))


def refused(port: int, body: bytes, caller: Connection) -> None:
    """In a process of its own: one request after the other, and how long a refusal takes."""
    seconds: list[float] = []
    caller.send(None)
    while not caller.poll():
        began = time.monotonic()
        try:
            status = asked(port, "POST", "/generate", body)
        except OSError:
            status = 0
        if status == 503:
            seconds.append(time.monotonic() - began)
        time.sleep(max(0.0, began + REFUSAL_SECONDS - time.monotonic()))
    caller.send(seconds)


async def burst(name: str, count: int, port: int, roots: list[int], body: dict[str, object]) -> Figures:
    figures, request = Figures(name), request_bytes(body)
    watching = Beside(watch, port, roots, HEALTH_SECONDS)
    refusals = Beside(refused, port, json.dumps({**body, "stream": False}).encode())
    before = refusals_at(port)
    began = time.monotonic()
    await asyncio.gather(*(client(port, request, figures) for _ in range(count)))
    figures.seconds = time.monotonic() - began
    figures.router = bounds_above(refusals_at(port) - before)
    figures.beside = refusals.end()
    figures.seen = watching.end()
    return figures


def refusals_at(port: int) -> Counter[float]:
    """How many refusals the router has made so far, by the bound of their bucket in seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_SECONDS)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    counts = [(float(bound), int(float(count))) for bound, count in REFUSAL_BUCKET.findall(page)]
    return Counter(
        {bound: count - below for (bound, count), (_, below) in zip(counts, [(0.0, 0), *counts[:-1]], strict=True)}
    )


def bounds_above(counts: Counter[float]) -> dict[str, float]:
    """Milliseconds: p50, p99 and the longest, each as the bound of its bucket; empty where there were none."""
    return milliseconds([bound for bound, count in sorted(counts.items()) for _ in range(count)])


async def measure(port: int, roots: list[int], options: argparse.Namespace) -> list[Figures]:
    stream: dict[str, object] = {
        "text": "Once upon a time",
        "stream": True,
        "sampling_params": {"max_new_tokens": options.tokens, "ignore_eos": True},
    }
    short: dict[str, object] = {"text": "Once", "sampling_params": {"max_new_tokens": 1}}
    return [
        await burst(f"{options.streams} streams", options.streams, port, roots, stream),
        await burst(f"{options.requests} requests", options.requests, port, roots, short),
    ]


def table(rows: list[dict[str, object]]) -> str:
    lines = []
    for row in rows:
        lines += [f"{name:16} {value}" for name, value in row.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    up = started(options.port, Path(tempfile.mkdtemp()) / "up.log")
    try:
        bursts = [figures.row() for figures in asyncio.run(measure(options.port, [up.pid], options))]
        bodies = large_bodies.measure(options.port, [up.pid])
    finally:
        up.send_signal(signal.SIGINT)
        up.wait()
    print(table(bursts + bodies))
    print(json.dumps({"bench": "load", "bursts": bursts, "bodies": bodies} | conditions()))


if __name__ == "__main__":
    main()
