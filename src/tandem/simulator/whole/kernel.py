"""Virtual time and threads of which exactly one runs: the same seed gives the same order of everything.

A virtual thread is a thread of Python that waits for its baton. It runs until it calls something that waits (`block`);
then whoever is next in virtual time gets a baton, and nobody else runs in between. So code of the product runs as it
is, with its loops, locks and blocking calls, and nothing depends on the operating system's scheduler. Computing takes
no virtual time; what takes time says so (`block`, or a latency of its own).

The order of events is (time, number of the event). Who is woken runs a few drawn microseconds later, so another seed
gives another interleaving of threads that are ready at the same time.
"""

import _thread
import heapq
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any, Protocol  # Any: a tracer, as `sys` has it

from tandem.core.values import SECOND

START_NS = 1_000 * SECOND  # of the monotonic clock
EPOCH_NS = 1_800_000_000 * SECOND  # of the wall clock, at START_NS
WAKE_NS = 20_000  # at most, from a wake-up until the thread runs
MAX_SPINS = 20_000  # turns of one thread without any virtual time in between: it will never end


class Killed(SystemExit):
    """Ends the threads of a process that is gone. asyncio passes a SystemExit on, as it must."""


class Deadlock(Exception):
    """Nothing will ever happen again."""


class Description(Protocol):
    """What a file descriptor refers to; several may refer to the same."""

    refs: int

    def release(self) -> None:
        """No descriptor refers to it any more."""
        ...


@dataclass(eq=False, slots=True)
class Process:
    """One virtual process. `exit_code` is None as long as it lives; negative: the signal that has ended it."""

    name: str
    pid: int
    parent: "Process | None"
    host: str  # the machine it runs on, as an address
    random: Random
    fds: dict[int, Description] = field(default_factory=dict)
    threads: list["VirtualThread"] = field(default_factory=list)
    children: list["Process"] = field(default_factory=list)
    handlers: dict[int, Callable[[], None]] = field(default_factory=dict)  # of signals
    exit_code: int | None = None
    is_frozen: bool = False
    held: list[tuple["VirtualThread", int]] = field(default_factory=list)  # wake-ups that came while it was frozen
    max_fds: int = 1 << 20
    error: BaseException | None = None  # that no one in it has caught

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None


class VirtualThread:
    """One thread of a virtual process. Made by `Kernel.start_thread`."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.run = run
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ident = 0
        self.turn = 0  # a wake-up is for the wait that it was made in, and for no later one
        self.is_blocked = True
        self.is_woken = False
        self.is_done = False
        self.joiners: dict[VirtualThread, None] = {}
        self.handle: object | None = None  # as the program that has started it knows it
        self.spins = 0
        self.ran_at = -1
        self.refusals = 0
        self.refused_at = -1


class Kernel:
    """The virtual machine. `run` belongs to the thread that made it, everything else to virtual threads."""

    refuses_threads: Callable[[Process], bool] = staticmethod(lambda process: False)
    tracer: Any = None  # for `sys.settrace` in each new thread: which lines run

    def __init__(self, seed: int) -> None:
        self.now = START_NS
        self.random = Random(f"kernel {seed}")
        self.seed = seed
        self.running: VirtualThread | None = None
        self.processes: list[Process] = []
        self.log = blake2b(digest_size=16)
        self.num_events = 0
        self.trace: Callable[[str], None] | None = None
        self._heap: list[tuple[int, int, VirtualThread | None, int, Callable[[], None] | None]] = []
        self._count = count()
        self._main = _thread.allocate_lock()
        self._main.acquire()
        self._stops = False
        self._failure: BaseException | None = None
        self.is_exiting = False  # descriptors are closed for a process that is gone
        self.lost: list[tuple[Process, int, Description]] = []  # descriptors that nobody holds who could close them
        self._pids = count(100)
        self._fds = count(1_000)

    # --- what happens when -------------------------------------------------------------------------------------------

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        """`call` must not wait. It runs between threads and belongs to none."""
        heapq.heappush(self._heap, (max(when_ns, self.now), next(self._count), None, 0, call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        self.at(self.now + delay_ns, call)

    def note(self, line: str) -> None:
        """Part of the hash of the run."""
        self.log.update(f"{self.now} {line}\n".encode())
        if self.trace is not None:
            self.trace(f"{(self.now - START_NS) / SECOND:12.6f} {line}")

    def run(self, until_ns: int) -> None:
        """Let time pass until then, or until `stop`. Raises what `at` has raised, and Deadlock."""
        self._stops = False
        self.at(until_ns, self.stop)
        self._hand_over(self._next())
        self._main.acquire()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """`run` returns when the thread that runs now waits."""
        self._stops = True

    def fail(self, failure: BaseException) -> None:
        """`run` raises this when the thread that runs now waits."""
        self._failure = self._failure or failure
        self._stops = True

    def shut_down(self) -> None:
        """Kill everything; no virtual thread is left then."""
        self._heap = [event for event in self._heap if event[2] is not None]  # nobody starts anything any more
        heapq.heapify(self._heap)
        for process in self.processes:
            self.kill(process)
        while any(not thread.is_done for process in self.processes for thread in process.threads):
            self.run(self.now + SECOND)

    # --- threads -----------------------------------------------------------------------------------------------------

    def start_thread(self, process: Process, name: str, run: Callable[[], None]) -> VirtualThread:
        thread = VirtualThread(process, name, run)
        process.threads.append(thread)
        _thread.start_new_thread(self._bootstrap, (thread,))
        self._schedule(thread, self.now + self._latency())
        return thread

    def current(self) -> VirtualThread:
        running = self.running
        assert running is not None, "only a virtual thread can wait in virtual time"
        return running

    def is_virtual(self) -> bool:
        """Whether the caller is the virtual thread that runs."""
        running = self.running
        return running is not None and running.ident == _thread.get_ident()

    def is_ending(self) -> bool:
        """Whether the caller is a thread of a process that is gone, on its way out."""
        running = self.running
        return running is None or not running.process.is_alive

    def block(self, deadline_ns: int | None = None) -> None:
        """Wait for `wake` or the deadline; may return early. Raises Killed."""
        thread = self.current()
        self.check_alive(thread)
        thread.turn += 1
        thread.is_blocked, thread.is_woken = True, False
        if deadline_ns is not None:
            self._schedule(thread, max(deadline_ns, self.now))
        found = self._next()
        if found is not thread:
            self._hand_over(found)
            thread.baton.acquire()
        self.running = thread
        thread.is_blocked = False
        self.check_alive(thread)
        self._check_progress(thread)

    def pause(self) -> None:
        """Others run before this thread goes on."""
        thread = self.current()
        self.check_alive(thread)
        deadline = self.now + self._latency()
        while self.now < deadline:
            self.block(deadline)

    def sleep(self, seconds: float) -> None:
        deadline = self.now + int(seconds * SECOND)
        while self.now < deadline:
            self.block(deadline)

    def wake(self, thread: VirtualThread | None) -> None:
        if thread is not None and thread.is_blocked and not thread.is_woken:
            thread.is_woken = True
            self._schedule(thread, self.now + self._latency())

    def check_alive(self, thread: VirtualThread) -> None:
        if thread.process.exit_code is not None:
            raise Killed(1)

    def check_alive_process(self, process: Process) -> None:
        """For calls on what belongs to `process`. Its own threads end where it is gone; others find nothing open."""
        running = self.running
        if process.exit_code is not None and running is not None and running.process is process:
            raise Killed(1)

    def _check_progress(self, thread: VirtualThread) -> None:
        thread.spins = thread.spins + 1 if thread.ran_at == self.now else 0
        thread.ran_at = self.now
        if thread.spins > MAX_SPINS:
            raise Deadlock(f"{thread.process.name} {thread.name} spins")

    def check_patience(self) -> None:
        """The thread that runs has asked for what is not there, and does not wait for it: not for ever at one time."""
        thread = self.current()
        thread.refusals = thread.refusals + 1 if thread.refused_at == self.now else 0
        thread.refused_at = self.now
        if thread.refusals > MAX_SPINS:
            self.fail(Deadlock(f"{thread.process.name} {thread.name} asks again and again, and waits for nothing"))
            raise Killed(1)

    def _latency(self) -> int:
        return self.random.randrange(1, WAKE_NS)

    def _schedule(self, thread: VirtualThread, when_ns: int) -> None:
        heapq.heappush(self._heap, (when_ns, next(self._count), thread, thread.turn, None))

    def _next(self) -> VirtualThread | None:
        """Who runs next; None: the thread that called `run`."""
        try:
            while not self._stops:
                if not self._heap:
                    raise Deadlock(self.describe())
                when, _, thread, turn, call = heapq.heappop(self._heap)
                self.num_events += 1
                if thread is None:
                    self.now = when
                    assert call is not None
                    call()
                elif thread.turn == turn and not thread.is_done:
                    if thread.process.is_frozen and thread.process.is_alive:
                        thread.process.held.append((thread, turn))
                        continue
                    self.now = when
                    return thread
        except BaseException as error:
            self._failure = error
        return None

    def _hand_over(self, thread: VirtualThread | None) -> None:
        self.running = thread
        if thread is None:
            self._main.release()
        else:
            thread.baton.release()

    def _bootstrap(self, thread: VirtualThread) -> None:
        thread.baton.acquire()
        thread.ident = _thread.get_ident()
        thread.is_blocked = False
        self.running = thread
        process = thread.process
        sys.settrace(self.tracer)
        code = 0
        try:
            if process.is_alive:
                thread.run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException as error:
            code = 1
            process.error = process.error or error
            if isinstance(error, Deadlock):
                self._failure = error
            self.note(f"{process.name} {thread.name} raised {type(error).__name__}")
        thread.is_done = True
        if thread is process.threads[0]:
            self.exit(process, code)
        for joiner in thread.joiners:
            self.wake(joiner)
        self._hand_over(None if self._failure is not None else self._next())

    def describe(self) -> str:
        """Who is there and what each waits for."""
        lines = [
            f"{process.name}: {', '.join(thread.name for thread in process.threads if not thread.is_done)}"
            for process in self.processes
            if process.is_alive
        ]
        return "; ".join(lines) or "no process is left"

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(
        self, name: str, run: Callable[[], None], *, host: str, parent: Process | None = None, max_fds: int = 1 << 20
    ) -> Process:
        pid = next(self._pids)
        process = Process(name, pid, parent, host, Random(f"process {self.seed} {pid} {name}"), max_fds=max_fds)
        self.processes.append(process)
        if parent is not None:
            parent.children.append(process)
        self.note(f"{name} starts")
        self.start_thread(process, "main", run)
        return process

    def exit(self, process: Process, code: int) -> None:
        """The process is gone: its descriptors are closed, its children killed, its threads end when they wake."""
        if process.exit_code is not None:
            return
        process.exit_code = code
        self.note(f"{process.name} ends {code}")
        for thread in process.threads:
            if not thread.is_done:
                self._schedule(thread, self.now)
        self.is_exiting = True
        for descriptor in list(process.fds):
            self.close_fd(process, descriptor)
        self.is_exiting = False
        for child in process.children:
            self.exit(child, -signal.SIGKILL)

    def kill(self, process: Process) -> None:
        self.exit(process, -signal.SIGKILL)

    def signal(self, process: Process, number: int) -> None:
        if process.exit_code is not None:
            return
        handler = process.handlers.get(number)
        if number == signal.SIGKILL or handler is None:
            self.exit(process, -number)
        else:
            self.note(f"{process.name} gets signal {number}")
            handler()

    def freeze(self, process: Process) -> None:
        process.is_frozen = True
        self.note(f"{process.name} freezes")

    def thaw(self, process: Process) -> None:
        if not process.is_frozen:
            return
        process.is_frozen = False
        self.note(f"{process.name} goes on")
        held, process.held = process.held, []
        for thread, turn in held:
            if thread.turn == turn:
                self._schedule(thread, self.now + self._latency())

    # --- descriptors -------------------------------------------------------------------------------------------------

    def open_fd(self, process: Process, description: Description, number: int | None = None) -> int:
        """Raises OSError where the process has too many."""
        if len(process.fds) >= process.max_fds:
            raise OSError(24, "Too many open files")
        number = next(self._fds) if number is None else number
        process.fds[number] = description
        description.refs += 1
        return number

    def close_fd(self, process: Process, number: int) -> None:
        description = process.fds.pop(number, None)
        if description is None:
            return
        description.refs -= 1
        if description.refs == 0:
            description.release()
