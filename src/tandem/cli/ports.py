"""Ports on loopback for servers that are about to start.

Between the moment at which a port is found free and the one at which a server listens there somebody else may find it
too. So a process takes a block of ports for itself and gives out those. A block is taken by its name in the abstract
namespace of Unix sockets, which the kernel gives to one process and takes back when that ends, however it ends.
"""

import random
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from threading import Lock

PORTS = range(20_000, 32_000)  # below what the kernel gives to outgoing connections
BLOCK = 20  # ports


@dataclass(slots=True)
class PortBlocks:
    """Of one process. A port is given out once, as long as it has not given out all of them."""

    _names: list[socket.socket] = field(default_factory=list[socket.socket])  # of its blocks, for as long as it runs
    _ports: deque[int] = field(default_factory=deque[int])  # of its last block that it has not given out
    _lock: Lock = field(default_factory=Lock)

    def take(self, count: int) -> list[int]:
        """So many that nobody listens on now."""
        with self._lock:
            taken: list[int] = []
            while len(taken) < count:
                if not self._ports:
                    self._ports.extend(self._next_block())
                port = self._ports.popleft()
                if is_free(port):
                    taken.append(port)
            return taken

    def _next_block(self) -> range:
        starts = list(PORTS[::BLOCK])
        random.shuffle(starts)
        for start in starts:
            name = hold(f"tandem-ports-{start}")
            if name is not None:
                self._names.append(name)
                return range(start, start + BLOCK)
        block = random.choice(starts)  # all are taken, by whoever else or by ourselves: then as luck has it
        return range(block, block + BLOCK)


def hold(name: str) -> socket.socket | None:
    """None: another one has it. Where there is no such namespace everybody gets it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            held.bind(f"\0{name}")
    except OSError:
        held.close()
        return None
    return held


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


_OURS = PortBlocks()


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody uses now and that no other process of Tandem is about to use."""
    return _OURS.take(count)
