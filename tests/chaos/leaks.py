"""What may be left when everything is over: nothing. Asked of the servers, of the kernel and of the disk."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from arena import Arena
from cluster import HttpError, Server, children_of

from tandem.simulator.whole.idle import ROUTER_GAUGES, held_by_node
from tandem.transfer.sock import MAX_TRANSFERS

MARK = "TANDEM_CHAOS"  # in the environment of every process of a run
API, NODE, WORKER = "api", "process", "worker_process"  # what a process runs: the last word of its module
SLACK_FDS = 10  # connections that come and go
STORAGE_THREADS = 2  # of a worker, with a page file each


class Place(NamedTuple):
    """Processes of one server that run the same module: of several workers or DP ranks there are several."""

    server: str
    module: str

    @property
    def role(self) -> str:
        return self.server.partition("-")[0]


Counts = dict[Place, list[int]]  # of each process, the least first: which of them is which rank is not asked


def held(server: Server) -> dict[str, object]:
    """What an idle server still holds; empty when all is well."""
    try:
        states = server.states()
    except (OSError, HttpError) as error:
        return {"state": repr(error)}
    return {name: number for state in states for name, number in held_by_node(state).items()}


def held_by_router(router: Server) -> dict[str, object]:
    """Requests that the router believes to be under way."""
    with router.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    gauges = [line.rsplit(" ", 1) for line in lines if line.startswith(ROUTER_GAUGES)]
    return {name: float(value) for name, value in gauges if float(value)}


def descriptors(it: Arena) -> Counts:
    """Open files and sockets of every process."""
    return counted(it, lambda pid: len(os.listdir(f"/proc/{pid}/fd")))


def memory(it: Arena) -> Counts:
    """Bytes that each process has for itself: not the KV pool, and no file that is mapped."""
    return counted(it, own_bytes)


def own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if "RssAnon" in line)


def counted(it: Arena, count: Callable[[int], int]) -> Counts:
    found: Counts = {}
    for member in it.fleet.members:
        if member.process.poll() is None:
            for module, pid in processes(member.process.pid):
                found.setdefault(Place(member.name, module), []).append(count(pid))
    return {place: sorted(counts) for place, counts in found.items()}


def processes(pid: int) -> list[tuple[str, int]]:
    return [(API, pid), *((command_of(child), child) for child in children_of(pid))]


def command_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word.rpartition(".")[2] for word in words if word.startswith("tandem.server.")), "other")


def grown(before: Counts, after: Counts, *, slack: Callable[[Place], int]) -> dict[str, str]:
    """Where a process has more than it had, and some. Where each has at most `slack` more than before, so has each of
    them in order of their counts, whichever rank that was and is."""
    return {
        f"{place.server} {place.module}": f"{counts} -> {now}"
        for place, counts in before.items()
        if len(now := after.get(place, [])) != len(counts)
        or any(late > early + slack(place) for early, late in zip(counts, now, strict=True))
    }


def slack_fds(counts: Counts) -> Callable[[Place], int]:
    """What each process may have more than before, by the number of its peers: its like in servers of the other role.

    A worker that pulls keeps, of every worker there, so many connections that idle as it makes transfers at a time, and
    its memory once mapped; one that is pulled from has the other ends. A node has a link to every replica there.
    """

    def slack(place: Place) -> int:
        like = {other: len(found) for other, found in counts.items() if other.module == place.module}
        peers = sum(number for other, number in like.items() if other.role != place.role)
        if place.module == WORKER:
            return (MAX_TRANSFERS + 1) * peers + STORAGE_THREADS
        return SLACK_FDS + (peers if place.module == NODE else 0)

    return slack


def left_running(mark: str) -> list[str]:
    """Processes of this run that live on."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(f"{folder.name} {command_of(int(folder.name))}")
    return found


def left_sockets(pids: set[int]) -> list[str]:
    """Unix sockets that carry the id of one of these processes."""
    names = [f"tandem-kv-{pid}-" for pid in pids]
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if any(name in line for name in names)]
