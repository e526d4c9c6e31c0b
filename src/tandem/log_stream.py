"""Where log lines go, without waiting for whoever reads them.

A pipe or socket takes no more when its reader lags behind: a pager that nobody scrolls, a log collector that hangs. To
wait there stops the process in the middle of whatever it logs of, with all of its requests, and it hears no signal.
So lines are lost then, and the next one that is taken is behind one that says how many.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TextIO


class LogStream:
    """Takes a whole line, or some, at a time; in any thread."""

    def __init__(self, send: Callable[[bytes], int]) -> None:
        """send: writes some of it or raises OSError, at once."""
        self._send = send
        self._begun = b""  # the rest of a text of which a part is written already
        self._num_lost = 0
        self._lock = Lock()

    def write(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def _write(self, text: str) -> None:
        lost = f"({self._num_lost} log lines are lost here: their reader lags behind)\n" if self._num_lost else ""
        begun, data = self._begun, (lost + text).encode(errors="replace")
        left = self._written(begun + data)
        if len(left) < len(data):
            self._begun, self._num_lost = left, 0
        else:
            self._begun, self._num_lost = left[: len(left) - len(data)], self._num_lost + 1

    def flush(self) -> None:
        """Nothing is kept but what `write` could not write."""

    def _written(self, data: bytes) -> bytes:
        """What is left of it."""
        with contextlib.suppress(OSError):
            while data:
                data = data[self._send(data) :]
        return data


def log_stream(file: TextIO) -> LogStream | TextIO:
    """Of a pipe or socket; a file or terminal as it is.

    A pipe is opened anew: whoever has inherited it does not expect that it does not wait.
    """
    with contextlib.suppress(OSError):  # it has no number; there is no /proc, or the pipe is another user's
        number = file.fileno()
        kind = os.fstat(number).st_mode
        if stat.S_ISFIFO(kind):
            opened = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return LogStream(partial(os.write, opened))
        if stat.S_ISSOCK(kind):
            sock = socket.socket(fileno=os.dup(number))
            return LogStream(lambda data: sock.send(data, socket.MSG_DONTWAIT))
    return file
