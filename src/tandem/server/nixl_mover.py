"""Moves the bytes of page files by NIXL: `--hicache-storage-backend nixl`, as SGLang names it.

One transfer for each file, by NIXL's POSIX plugin, between the file and memory that is registered once. The files are
those of `file`, so servers of both kinds share a folder. A transfer that fails, or has not ended in time, is an OSError
like any fault of a device; the agent and the memory that it may still write into are not used again then. They are kept
until it has ended and no longer: a disk that is full fails every write.

Two threads call, one reads and one writes (`page_storage.py`): each direction has an agent and memory of its own.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import nixl
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

PLUGIN = "POSIX"
POLL_SECONDS = 20e-6  # between two looks at a transfer, which takes about as long; later, up to
MAX_POLL_SECONDS = 2e-3
MAX_ABANDONED = 8  # transfers that do not end: with so many of them nothing is moved
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(  # they have nothing in common but where they are
    found for found in vars(nixl).values() if isinstance(found, type) and issubclass(found, Exception)
)

Direction = Literal["READ", "WRITE"]


class NixlMover:
    """`page_files.Mover`, for files of at most `file_bytes`."""

    def __init__(self, file_bytes: int, *, timeout_seconds: float) -> None:
        """timeout_seconds: of one transfer. Raises OSError where NIXL cannot be had."""
        keep_quiet()
        self._reads = NixlLane("READ", file_bytes, timeout_seconds)
        self._writes = NixlLane("WRITE", file_bytes, timeout_seconds)

    def read(self, fd: int, most: int) -> bytes:
        size = min(most, os.fstat(fd).st_size)
        if size == 0:
            return b""
        self._reads.move(fd, size)
        return self._reads.memory[:size].tobytes()

    def write(self, fd: int, parts: Iterable[bytes | memoryview]) -> None:
        size = 0
        for part in parts:
            self._writes.memory[size : size + len(part)] = np.frombuffer(part, np.uint8)
            size += len(part)
        self._writes.move(fd, size)


class NixlLane:
    """One direction. Used by one thread at a time."""

    def __init__(self, direction: Direction, num_bytes: int, timeout_seconds: float) -> None:
        self._direction: Direction = direction
        self._timeout_seconds = timeout_seconds
        self._name = f"pages {direction.lower()} {os.getpid()}"
        self._abandoned: list[tuple[np.ndarray, Any, Any]] = []  # memory, agent and transfer: may be under way
        self._transfer: Any = None  # of the move under way, once it is begun
        self._begin(num_bytes)

    def move(self, fd: int, num_bytes: int) -> None:
        """Between the beginning of the file and that of `memory`. Raises OSError."""
        self._abandoned = [one for one in self._abandoned if is_under_way(*one[1:])]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise OSError(errno.EIO, f"NIXL does not end {len(self._abandoned)} transfers")
        try:
            self._move(fd, num_bytes)
        except (*NIXL_ERRORS, OSError) as error:
            self._abandoned.append((self.memory, self._agent, self._transfer))
            self._begin(len(self.memory))
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"NIXL could not {self._direction.lower()}: {error}") from error

    def _begin(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)
        try:
            self._agent = nixl_agent(self._name, nixl_agent_config(backends=[]))
            self._agent.create_backend(PLUGIN)
            self._agent.register_memory([(self.memory.ctypes.data, num_bytes, 0, "")], "DRAM")
        except NIXL_ERRORS as error:
            raise OSError(errno.EIO, f"NIXL has no {PLUGIN} plugin for files: {error}") from error

    def _move(self, fd: int, num_bytes: int) -> None:
        agent, until, self._transfer = self._agent, time.monotonic() + self._timeout_seconds, None
        registered = agent.register_memory([(0, num_bytes, fd, "")], "FILE")
        here = agent.get_xfer_descs([(self.memory.ctypes.data, num_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(0, num_bytes, fd)], "FILE")
        transfer = self._transfer = agent.initialize_xfer(self._direction, here, there, self._name)
        state, pause = agent.transfer(transfer), POLL_SECONDS
        while state == "PROC":
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"NIXL has not ended after {self._timeout_seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL could not {self._direction.lower()}: {state}")
        agent.release_xfer_handle(transfer)
        agent.deregister_memory(registered)


def is_under_way(agent: Any, transfer: Any) -> bool:
    """None: it was never begun."""
    try:
        return transfer is not None and agent.check_xfer_state(transfer) == "PROC"
    except NIXL_ERRORS:
        return False


def keep_quiet() -> None:
    """NIXL writes of its own accord, to standard output: only what is wrong, where everything is logged."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
