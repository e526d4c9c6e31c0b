"""The API of `threading` and `queue` for virtual threads. Whoever waits here waits in virtual time.

Taking a free lock is now and then a place where others run first, so that a seed finds what two threads do to each
other between two locks.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import Empty
from typing import Any  # what a thread's function is given

from tandem.core.values import SECOND
from tandem.simulator.whole.kernel import VirtualThread
from tandem.simulator.whole.sockets import Machine

YIELDS = 0.1  # of all locks that are taken


def wait_until(is_done: Callable[[], bool], waiting: dict[VirtualThread, None], timeout: float | None) -> bool:
    """Whether it came to be. Who makes it so wakes `waiting`."""
    if is_done():
        return True
    kernel = Machine.kernel
    deadline = None if timeout is None else kernel.now + int(timeout * SECOND)
    thread = kernel.current()
    while not is_done():
        if deadline is not None and kernel.now >= deadline:
            return False
        waiting[thread] = None
        try:
            kernel.block(deadline)
        finally:
            waiting.pop(thread, None)
    return True


def wake_all(waiting: dict[VirtualThread, None]) -> None:
    for thread in list(waiting):
        Machine.kernel.wake(thread)


class Lock:
    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[VirtualThread, None] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if Machine.kernel.is_virtual() and Machine.kernel.random.random() < YIELDS:
            Machine.kernel.pause()
        if self._is_held:
            limit = (None if timeout < 0 else timeout) if blocking else 0.0
            if not wait_until(lambda: not self._is_held, self._waiting, limit):
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        """Others may run, and find it held, after all that was done under it."""
        kernel = Machine.kernel
        if not self._is_held and not kernel.is_ending():
            raise RuntimeError("release unlocked lock")
        if kernel.is_virtual() and not kernel.is_ending() and kernel.random.random() < YIELDS:
            kernel.pause()
        self._is_held = False
        wake_all(self._waiting)

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._lock = Lock()
        self._owner = 0
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner != me and not self._lock.acquire(blocking, timeout):
            return False
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Told:
    """One wait for a condition. Equal to itself only: who gives up must not take another's place with him."""

    is_told: bool = False


class Condition:
    def __init__(self, lock: "Lock | RLock | None" = None) -> None:
        self._lock = lock or RLock()
        self._waiting: deque[Told] = deque()
        self._threads: dict[VirtualThread, None] = {}
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        told = Told()
        self._waiting.append(told)
        self._lock.release()
        try:
            return wait_until(lambda: told.is_told, self._threads, timeout)
        finally:
            if not told.is_told:
                self._waiting.remove(told)
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else Machine.kernel.now + int(timeout * SECOND)
        while not (result := predicate()):
            left = None if deadline is None else (deadline - Machine.kernel.now) / SECOND
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft().is_told = True
        wake_all(self._threads)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: dict[VirtualThread, None] = {}

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        wake_all(self._waiting)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return wait_until(self.is_set, self._waiting, timeout)


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: dict[VirtualThread, None] = {}

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        wake_all(self._waiting)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not wait_until(lambda: bool(self._items), self._waiting, timeout if block else 0.0):
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def __class_getitem__(cls, _item: object) -> "type[SimpleQueue]":
        return cls


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._thread: VirtualThread | None = None

    def start(self) -> None:
        kernel = Machine.kernel
        process = kernel.current().process
        if kernel.refuses_threads(process):
            raise RuntimeError("can't start new thread")
        self._thread = kernel.start_thread(process, self.name, self.run)
        self._thread.handle = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    @property
    def ident(self) -> int | None:
        return self._thread.ident if self._thread is not None else None

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_done

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        if thread is not None:
            wait_until(lambda: thread.is_done, thread.joiners, timeout)


def current_thread() -> Any:
    """What was started as a `Thread` is found as that."""
    thread = Machine.kernel.current()
    return thread.handle or thread
