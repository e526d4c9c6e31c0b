"""Notices that the API process's event loop hangs, from a thread of its own, and ends the server with the named cause.

Nobody stands above the API process who could: the others are its children, and its own watchdog over them runs on the
loop that hangs. Turns are counted in ticks of this thread, not in time: a process that was stopped as a whole, and goes
on, has hung no more than its watchdog has. What the loop hangs in may be the log, whose lock it holds then, or a disk:
so the end waits for its log lines only so long, and for none that fails.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial

from tandem.core.stall_detector import TICKS

LOG_LINE_S = 2.0

logger = logging.getLogger("tandem.api")


class LoopWatchdog:
    """Made and started on the loop that it watches; `stop` belongs there, too."""

    def __init__(self, *, timeout_s: float, fire: Callable[[str], None]) -> None:
        """fire: called once, in the thread of the watchdog, with the line for the user."""
        self._timeout_s = timeout_s
        self._fire = fire
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._missed = 0  # ticks since the loop has had its last turn
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def tick(self) -> bool:
        """Whether the loop has had no turn for `timeout_s`."""
        if self._missed >= TICKS:
            return True
        self._missed += 1
        self._loop.call_soon_threadsafe(self._turn)
        return False

    def _turn(self) -> None:
        self._missed = 0

    def _run(self) -> None:
        while not self._stopped.wait(self._timeout_s / TICKS):
            if self.tick():
                try_to(partial(logger.critical, "the event loop hangs here:\n%s", stack_of(self._watched)))
                self._fire(f"the API process hangs: no turn of its event loop for {self._timeout_s:g} s")
                return


def stack_of(thread: int) -> str:
    """Where it is now, the innermost call last."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(nowhere: it has ended)"


def end_process(line: str) -> None:
    """At once: what would end it in order runs on the loop. The kernel ends the children."""
    said = f"tandem: {line} (--watchdog-timeout); start the server again"
    try_to(partial(print, said, file=sys.stderr, flush=True))
    os._exit(1)


def try_to(say: Callable[[], object]) -> None:
    """In a thread of its own, which is left alone where it waits for ever. Never raises."""

    def run() -> None:
        with contextlib.suppress(Exception):
            say()

    thread = threading.Thread(target=run, name="final log line", daemon=True)
    with contextlib.suppress(RuntimeError):  # there is no thread left to be had
        thread.start()
        thread.join(LOG_LINE_S)
