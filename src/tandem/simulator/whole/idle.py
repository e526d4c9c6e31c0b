"""What may be left when nobody asks for anything any more: nothing. Asked of each server on its own machine."""

import asyncio
from typing import Any  # JSON documents

from tandem.simulator.whole.clients import Answer, simple
from tandem.simulator.whole.cluster import Server
from tandem.simulator.whole.kernel import Kernel
from tandem.simulator.whole.network import DIALLED, Listening, Stream

ROUTER_GAUGES = ("tandem:router_active", "tandem:router_worker_a")
WORKER_GAUGES = ("tandem:worker_live_rooms", "tandem:worker_pinned_pages", "tandem:worker_open_transfers")
FIRST_GAUGE = WORKER_GAUGES[0].encode() + b"{"
UNIFIED = "unified"  # moves no KV
ROUTER = "router"


def held_open(kernel: Kernel, server: Server) -> str:
    """Connections whose other end is gone, and descriptors that nobody knows any more; in words.

    A worker that pulls keeps idle connections to peers that live, and looks at them when it wants to use them; so does
    a router's pool.
    """
    for process in kernel.processes:
        if not process.is_alive or process.name.partition(".")[0] != server.name:
            continue
        for number, found in process.fds.items():
            if isinstance(found, Stream) and (found.has_end or found.is_broken):
                pulls = process.name.endswith("worker_process") and not found.is_widowed
                is_kept = found.side == DIALLED and (pulls or server.name == ROUTER)
                if not is_kept:
                    return f"{process.name}: descriptor {number} of {found.line.name}, which the other end has closed"
            if isinstance(found, Listening) and found.waiting:
                return f"{process.name}: somebody waits at {found.address}, and is not accepted"
    for process, number, found in kernel.lost:
        if process.is_alive and process.fds.get(number) is found:
            return f"{process.name}: descriptor {number}, which nobody closes any more"
    return ""


async def held_by_router(server: Server) -> str:
    """In words; empty: nothing."""
    return _not_zero(await simple(server.host, server.port, "GET", "/metrics"), ROUTER_GAUGES)


async def held_by_server(kernel: Kernel, server: Server, key: str) -> str:
    """By its nodes and its workers."""
    state = await asked_there(kernel, server, "/debug/state", key)
    if state is None or not state.events():
        return "does not tell its state"
    (found,) = state.events()
    for one in found if isinstance(found, list) else [found]:
        if held := held_by_node(one):
            return str(held)
    told = await asked_there(kernel, server, "/metrics", key)
    return _not_zero(told, WORKER_GAUGES) or _untold(told, num_workers(kernel, server))


def num_workers(kernel: Kernel, server: Server) -> int:
    """That move KV, on all hosts of the server."""
    alive = [process.name for process in kernel.processes if process.is_alive and server.name != UNIFIED]
    return sum(name.endswith("worker_process") and name.partition(".")[0] == server.name for name in alive)


def _untold(told: Answer | None, count: int) -> str:
    """Every worker counts for itself: what is held by one that is not asked would not be seen."""
    lines = [] if told is None else [line for line in bytes(told.body).split(b"\n") if line.startswith(FIRST_GAUGE)]
    return "" if len(lines) == count else f"{len(lines)} of {count} workers tell what they hold"


async def asked_there(kernel: Kernel, server: Server, path: str, key: str) -> Answer | None:
    """By a process on the server's machine: debug pages are for nobody else. key: of an operator"""
    found: list[Answer | None] = []

    def run() -> None:
        found.append(asyncio.run(simple("127.0.0.1", server.port, "GET", path, key=key)))

    process = kernel.start("operator", run, host=server.host)
    while process.is_alive:
        await asyncio.sleep(0.02)
    return found[0] if found else None


def held_by_node(state: dict[str, Any]) -> dict[str, object]:
    """state: one node's part of `/debug/state`. Empty when it is idle."""
    if "queues" not in state:
        return {"answer": state}
    slots = state["result_slots"]
    numbers: dict[str, object] = {
        **{f"requests {queue}": ids for queue, ids in state["queues"].items()},
        "pages owned": state["pages"]["owned"],
        "pages quarantined": state["pages"]["quarantined"],
        "pages loading": state["pages"]["loading"],
        "pages being stored": state["host_pages"]["owned"],
        "pages pinned": state["pages_pinned_by_tree"],
        "result slots": slots["total"] - slots["free"],
        "rooms": state["rooms"],
        "batches": len(state["window"]),
    }
    return {name: number for name, number in numbers.items() if number}


def _not_zero(answer: Answer | None, names: tuple[str, ...]) -> str:
    if answer is None or answer.status != 200:
        return "no metrics"
    lines = bytes(answer.body).decode().splitlines()
    return ", ".join(line for line in lines if line.startswith(names) and float(line.rsplit(" ", 1)[1]))
