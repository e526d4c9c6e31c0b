"""What may be left when everything is over: nothing. Asked of the servers, of the kernel and of the disk."""

import contextlib
import os
from pathlib import Path

from arena import Arena
from cluster import HttpError, Server, children_of

from tandem.simulator.whole.idle import ROUTER_GAUGES, held_by_node

MARK = "TANDEM_CHAOS"  # in the environment of every process of a run
SLACK_FDS = 10  # connections that come and go


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


def descriptors(it: Arena) -> dict[str, int]:
    """Open files and sockets of every process, by server and module."""
    return {
        f"{member.name} {name}": len(os.listdir(f"/proc/{pid}/fd"))
        for member in it.fleet.members
        if member.process.poll() is None
        for name, pid in processes(member.process.pid).items()
    }


def processes(pid: int) -> dict[str, int]:
    return {"api": pid} | {command_of(child): child for child in children_of(pid)}


def command_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word.rpartition(".")[2] for word in words if word.startswith("tandem.server.")), "other")


def memory(it: Arena) -> dict[str, int]:
    """Bytes that each process has for itself: not the KV pool, and no file that is mapped."""
    found: dict[str, int] = {}
    for member in it.fleet.members:
        if member.process.poll() is None:
            for name, pid in processes(member.process.pid).items():
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found[f"{member.name} {name}"] = next(int(line.split()[1]) << 10 for line in lines if "RssAnon" in line)
    return found


def grown(before: dict[str, int], after: dict[str, int], *, slack: int) -> dict[str, str]:
    return {name: f"{before[name]} -> {after[name]}" for name in before if after[name] > before[name] + slack}


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
