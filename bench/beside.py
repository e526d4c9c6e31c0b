"""Who looks at a running server from beside it while it is under load: processes with clocks of their own."""

import http.client
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any  # what a process beside has seen

PROBE_SECONDS = 30.0
READY_SECONDS = 120.0
PAGE_BYTES = resource.getpagesize()


@dataclass
class Watch:
    """What `watch` has seen: probes in seconds, and the most that all processes held at one time."""

    health: list[float] = field(default_factory=list[float])
    health_failures: int = 0
    memory_bytes: int = 0
    descriptors: int = 0

    def row(self) -> dict[str, object]:
        return {
            "health_ms": milliseconds(self.health),
            "health_failures": self.health_failures,
            "memory_mb": round(self.memory_bytes / 1e6),
            "fds": self.descriptors,
        }


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the longest; empty where there were none."""
    found = sorted(seconds)
    if not found:
        return {}
    places = {"p50": len(found) // 2, "p99": len(found) * 99 // 100, "max": len(found) - 1}
    return {name: round(found[place] * 1000, 1) for name, place in places.items()}


def watch(port: int, roots: list[int], pause_s: float, caller: Connection) -> None:
    """In a process of its own, whose clock does not wait for the clients: probes and counts until it is told to end."""
    seen = Watch()
    caller.send(None)
    while not caller.poll():
        began = time.monotonic()
        try:
            status = asked(port, "GET", "/health")
        except OSError:
            status = 0
        seen.health_failures += status != 200
        seen.health.append(time.monotonic() - began)
        memory_bytes, descriptors = usage(roots)
        seen.memory_bytes = max(seen.memory_bytes, memory_bytes)
        seen.descriptors = max(seen.descriptors, descriptors)
        time.sleep(max(0.0, began + pause_s - time.monotonic()))
    caller.send(seen)


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
    """Somebody in a process of its own while there is load, who tells in the end what it has seen."""

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
