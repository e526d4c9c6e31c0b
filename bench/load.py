"""What a router with one prefill and one decode server does under more than it can serve.

    streams     so many clients at once, each with a stream of its own that it reads to the end
    requests    so many one-token requests at once, each on a connection of its own

For each: answers by status, the time until a refusal was there, `/health` of the router meanwhile, and memory and file
descriptors of all processes at their highest. The last line is JSON. Clients and servers share the machine's cores.

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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any  # what a process beside has seen

from bench.conditions import conditions

from tandem.server.api.connections import waited_s

HEALTH_SECONDS = 0.1  # between two probes
CLIENT_SECONDS = 300.0
PROBE_SECONDS = 30.0
REFUSAL_SECONDS = 0.05  # between two requests that are to be refused
READY_SECONDS = 120.0
REFUSAL_BUCKET = re.compile(r'^tandem:router_refusal_seconds_bucket{le="([^"]+)"} (\S+)$', re.MULTILINE)
PAGE_BYTES = resource.getpagesize()


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
    health: list[float] = field(default_factory=list[float])
    health_failures: int = 0
    memory_bytes: int = 0
    descriptors: int = 0
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
            "health_ms": milliseconds(self.health),
            "health_failures": self.health_failures,
            "memory_mb": round(self.memory_bytes / 1e6),
            "fds": self.descriptors,
            "seconds": round(self.seconds, 1),
        }


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the longest; empty where there were none."""
    found = sorted(seconds)
    if not found:
        return {}
    places = {"p50": len(found) // 2, "p99": len(found) * 99 // 100, "max": len(found) - 1}
    return {name: round(found[place] * 1000, 1) for name, place in places.items()}


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


def watch(port: int, roots: list[int], caller: Connection) -> None:
    """In a process of its own, whose clock does not wait for the clients: probes and counts until it is told to end."""
    figures = Figures("watch")
    caller.send(None)
    while not caller.poll():
        began = time.monotonic()
        try:
            status = asked(port, "GET", "/health")
        except OSError:
            status = 0
        figures.health_failures += status != 200
        figures.health.append(time.monotonic() - began)
        memory_bytes, descriptors = usage(roots)
        figures.memory_bytes = max(figures.memory_bytes, memory_bytes)
        figures.descriptors = max(figures.descriptors, descriptors)
        time.sleep(max(0.0, began + HEALTH_SECONDS - time.monotonic()))
    caller.send(figures)


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


def asked(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """The status. Raises OSError where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_SECONDS)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


class Beside:
    """Somebody in a process of its own while a burst lasts, who tells in the end what it has seen."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=work, args=(*arguments, there))
        self._process.start()
        self._here.recv()

    def end(self) -> Any:
        self._here.send(None)
        seen = self._here.recv()
        self._process.join()
        return seen


async def burst(name: str, count: int, port: int, roots: list[int], body: dict[str, object]) -> Figures:
    figures, request = Figures(name), request_bytes(body)
    watching = Beside(watch, port, roots)
    refusals = Beside(refused, port, json.dumps({**body, "stream": False}).encode())
    before = refusals_at(port)
    began = time.monotonic()
    await asyncio.gather(*(client(port, request, figures) for _ in range(count)))
    figures.seconds = time.monotonic() - began
    figures.router = bounds_above(refusals_at(port) - before)
    figures.beside = refusals.end()
    seen: Figures = watching.end()
    figures.health, figures.health_failures = seen.health, seen.health_failures
    figures.memory_bytes, figures.descriptors = seen.memory_bytes, seen.descriptors
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


def family(process: int) -> list[int]:
    """It and all that it has started."""
    try:
        told = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(member for child in told for member in family(int(child)))]


def usage(roots: list[int]) -> tuple[int, int]:
    """Resident bytes, shared ones counted by each, and open file descriptors of these processes."""
    memory_bytes = descriptors = 0
    for process in (member for root in roots for member in family(root)):
        try:
            memory_bytes += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_BYTES
            descriptors += len(list(Path(f"/proc/{process}/fd").iterdir()))
        except OSError:
            continue  # it has just ended
    return memory_bytes, descriptors


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


def started(port: int, log: Path) -> "subprocess.Popen[bytes]":
    """`tandem up`, ready."""
    command = [sys.executable, "-c", "import sys; from tandem.cli.main import main; sys.exit(main())"]
    with log.open("wb") as output:
        up = subprocess.Popen([*command, "up", "--port", str(port)], stdout=output, stderr=output)
    deadline = time.monotonic() + READY_SECONDS
    while "tandem: ready" not in log.read_text(errors="replace"):
        if up.poll() is not None or time.monotonic() > deadline:
            up.kill()
            sys.exit(f"tandem up did not start: see {log}")
        time.sleep(0.1)
    return up


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
        rows = [figures.row() for figures in asyncio.run(measure(options.port, [up.pid], options))]
    finally:
        up.send_signal(signal.SIGINT)
        up.wait()
    print(table(rows))
    print(json.dumps({"bench": "load", "bursts": rows} | conditions()))


if __name__ == "__main__":
    main()
