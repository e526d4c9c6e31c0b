"""Puts the virtual machine in the place of Python's own while one simulation runs, and takes it away again.

Why process-wide: uvicorn, httpcore, anyio and asyncio read the clock, draw randomness and open sockets as the product
does, by the names of the standard library. Nobody else computes meanwhile: the thread that called `Kernel.run` waits.

What a virtual process has of its own: identity, randomness, descriptors, signal handlers, arguments and standard input.
What all share is the interpreter: modules, caches and counters of classes. So a program of the product must not keep
anything there that it decides by; that two runs of one seed give the same hash, in any order, is a test.
"""

import asyncio
import gc
import io
import logging
import os
import queue
import random
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any  # what is put in the place of a function of the standard library

import uvicorn
import uvicorn.server

from tandem.core.values import SECOND
from tandem.server import logs
from tandem.simulator.whole import polling, sockets, threads
from tandem.simulator.whole.kernel import EPOCH_NS, START_NS, Kernel, Killed, Process
from tandem.simulator.whole.loop import VirtualLoop
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.order import OrderedState
from tandem.simulator.whole.sockets import Machine

Program = Callable[[], int | None]
Replacement = tuple[object, str, Any]  # module, name, what takes its place
GMTIME, STRFTIME = time.gmtime, time.strftime
ALWAYS = 1 << 20  # descriptors


class Programs:
    """What can be started by `subprocess.Popen([python, "-m", NAME, ...])`, by its name."""

    def __init__(
        self, table: Mapping[str, Program], fails_to_fork: Callable[[Process], bool] = lambda parent: False
    ) -> None:
        self.table, self.fails_to_fork = table, fails_to_fork


class StandardInput:
    """Of a child: what is written until it is closed is what the child reads."""

    def __init__(self, start: Callable[[bytes], None]) -> None:
        self._start = start
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def close(self) -> None:
        self._start(bytes(self._written))


class VirtualPopen:
    """`subprocess.Popen`, as far as the product uses it."""

    programs: Programs

    def __init__(self, args: Sequence[str], *, pass_fds: Sequence[int] = (), **_: object) -> None:
        parent = Machine.kernel.current().process
        if self.programs.fails_to_fork(parent):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._program = self.programs.table[args[2]]
        name = f"{parent.name}/{args[2].rsplit('.', 1)[-1]}"
        self._words = [args[2], *args[3:]]
        self._input = b""
        self._is_fed = False
        self.process = Machine.kernel.start(name, self._run, host=parent.host, parent=parent, max_fds=parent.max_fds)
        for number in pass_fds:
            Machine.kernel.open_fd(self.process, parent.fds[number], number)
        self.pid = self.process.pid
        self.stdin = StandardInput(self._feed)

    def _feed(self, data: bytes) -> None:
        if not self.process.is_alive:
            raise BrokenPipeError(32, "Broken pipe")
        self._input, self._is_fed = data, True

    def _run(self) -> None:
        while not self._is_fed:
            Machine.kernel.sleep(0.001)
        sys.argv = self._words
        sys.stdin = io.TextIOWrapper(io.BytesIO(self._input))  # both are read before the program first waits
        raise SystemExit(self._program())

    @property
    def returncode(self) -> int | None:
        return self.process.exit_code

    def poll(self) -> int | None:
        return self.process.exit_code

    def kill(self) -> None:
        Machine.kernel.kill(self.process)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else Machine.kernel.now + int(timeout * SECOND)
        while self.process.exit_code is None:
            if deadline is not None and Machine.kernel.now >= deadline:
                raise subprocess.TimeoutExpired("", timeout or 0)
            Machine.kernel.sleep(0.001)
        return self.process.exit_code


class Output(io.TextIOBase):
    """Standard output of all virtual processes: part of the trace."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def write(self, text: str) -> int:
        if self._kernel.trace is not None and text.strip():
            self._kernel.trace(f"    {name_of(self._kernel)} prints {text.strip()}")
        return len(text)

    def fileno(self) -> int:
        return -1  # what is written there is lost


class LogLines(logging.Handler):
    """What the processes log: part of the trace, and of what is looked at when a seed fails."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(logging.INFO)
        self._kernel = kernel
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{name_of(self._kernel)} {record.name} {record.levelname}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        if record.levelno >= logging.ERROR:
            self.errors.append(line)
        if self._kernel.trace is not None:
            self._kernel.trace(f"    {line}")


def name_of(kernel: Kernel) -> str:
    return "" if kernel.running is None else kernel.running.process.name


@contextmanager
def virtual_machine(
    kernel: Kernel, network: Network, programs: Programs, instead: Sequence[Replacement] = ()
) -> Iterator[LogLines]:
    """Inside of the block `kernel.run` runs programs; at its end nothing of them is left. instead: further ones."""
    lines = LogLines(kernel)
    VirtualPopen.programs = programs
    Machine.kernel, Machine.network = kernel, network
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    environment = dict(os.environ)  # a server forgets the keys in it
    is_collecting = gc.isenabled()
    collect = gc.collect
    collect()
    gc.freeze()  # what stays is half a million objects of modules, which nothing of a world is among
    gc.disable()  # what it would close, it would close at a moment that no seed decides
    puts = [*replacements(kernel), *instead]
    put = [(owner, name, getattr(owner, name)) for owner, name, _ in puts]
    try:
        for owner, name, value in puts:
            setattr(owner, name, value)
        root.handlers[:] = [lines]
        root.setLevel(logging.INFO)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a killed process leaves open
            yield lines
            kernel.shut_down()
            for process in kernel.processes:
                process.threads.clear()
                process.handlers.clear()
            collect()
    finally:
        for owner, name, value in put:
            setattr(owner, name, value)
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        if is_collecting:
            gc.enable()


def replacements(kernel: Kernel) -> list[Replacement]:
    return [
        *((time, name, value) for name, value in clocks(kernel).items()),
        *((os, name, value) for name, value in identities(kernel).items()),
        (random, "_urandom", partial(drawn, kernel)),  # below `secrets`
        (socket, "socket", sockets.VirtualSocket),
        *(
            (socket, name, getattr(sockets, name))
            for name in ("socketpair", "create_server", "create_connection", "getaddrinfo", "gethostname")
        ),
        (selectors, "DefaultSelector", polling.VirtualSelector),
        (select, "epoll", polling.VirtualEpoll),
        (select, "poll", polling.VirtualPoll),
        *((threading, name, getattr(threads, name)) for name in ("Thread", "Lock", "RLock", "Condition", "Event")),
        (threading, "current_thread", threads.current_thread),
        (queue, "SimpleQueue", threads.SimpleQueue),
        (queue, "time", clocks(kernel)["monotonic"]),
        (subprocess, "Popen", VirtualPopen),
        (signal, "signal", partial(handle_signal, kernel)),
        (signal, "pthread_sigmask", lambda how, mask: set()),
        (resource, "getrlimit", lambda what: (ALWAYS, ALWAYS)),
        (gc, "freeze", lambda: None),
        (gc, "collect", lambda generation=2: 0),
        (asyncio.events, "new_event_loop", VirtualLoop),
        (asyncio, "new_event_loop", VirtualLoop),
        (uvicorn.Config, "get_loop_factory", lambda config: VirtualLoop),
        (uvicorn.server, "ServerState", OrderedState),
        (logs, "set_up", lambda log_format, *, process: None),
        *((sys, name, Output(kernel)) for name in ("stdout", "stderr")),
        (sys, "unraisablehook", lambda broken: None),  # of coroutines of processes that were killed
        (sys, "stdin", sys.stdin),
        (sys, "argv", sys.argv),
    ]


def clocks(kernel: Kernel) -> dict[str, Callable[..., Any]]:
    def wall() -> float:
        return (kernel.now - START_NS + EPOCH_NS) / SECOND

    def strftime(text: str, at: Any = None) -> str:
        return STRFTIME(text, GMTIME(wall()) if at is None else at)

    return {
        "monotonic_ns": lambda: kernel.now,
        "monotonic": lambda: kernel.now / SECOND,
        "perf_counter_ns": lambda: kernel.now,
        "perf_counter": lambda: kernel.now / SECOND,
        "time_ns": lambda: kernel.now - START_NS + EPOCH_NS,
        "time": wall,
        "gmtime": lambda seconds=None: GMTIME(wall() if seconds is None else seconds),
        "localtime": lambda seconds=None: GMTIME(wall() if seconds is None else seconds),
        "strftime": strftime,
        "sleep": kernel.sleep,
    }


def identities(kernel: Kernel) -> dict[str, Callable[..., Any]]:
    def parent_pid() -> int:
        parent = kernel.current().process.parent
        return 1 if parent is None or not parent.is_alive else parent.pid

    def end_at_once(code: int) -> None:
        kernel.exit(kernel.current().process, code)
        raise Killed(code)

    return {
        "getpid": lambda: kernel.current().process.pid,
        "getppid": parent_pid,
        "_exit": end_at_once,
        "urandom": partial(drawn, kernel),
    }


def drawn(kernel: Kernel, size: int) -> bytes:
    source = kernel.random if kernel.running is None else kernel.running.process.random
    return source.randbytes(size)


def handle_signal(kernel: Kernel, number: int, handler: Any) -> None:
    kernel.current().process.handlers[int(number)] = partial(handler, number, None)
