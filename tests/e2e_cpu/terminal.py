"""A terminal with a program in it: what it shows, which title its window has, and somebody who types.

The screen is pyte's, so what a program does with control sequences is seen as a user would see it.
"""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pyte
from router_fakes import eventually

TANDEM = (sys.executable, "-m", "tandem.cli.main")
CTRL_C, CTRL_D, ENTER, UP = "\x03", "\x04", "\r", "\x1b[A"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"


class Terminal:
    """`tandem WORDS` in it. Use as a context: it is killed at the end."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.screen = pyte.HistoryScreen(120, 60, history=1000)
        self.screen.write_process_input = self.type  # type: ignore[method-assign]  # answers to what a program asks it
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            [*TANDEM, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def text(self) -> str:
        """All lines that it shows now."""
        with contextlib.suppress(BlockingIOError, OSError):  # OSError: the program has ended
            while data := os.read(self._ours, 1 << 16):
                self.raw += data
                self._stream.feed(data)
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def shows(self, text: str, *, times: int = 1) -> str:
        """All of it, once `text` stands on it so often."""
        return eventually(lambda: self.text().count(text) >= times and self.text(), f"{text!r} on the screen")

    def waits(self) -> None:
        """Until it asks for a line and none is typed."""
        eventually(lambda: self.text().splitlines()[-1:] == [">"], "an empty prompt")

    def ends(self) -> int:
        """Its exit code."""
        ended: Callable[[], Any] = lambda: self.text() is not None and self.process.poll() is not None  # noqa: E731
        eventually(ended, "the end of the program")
        assert self.process.returncode is not None
        return self.process.returncode

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def take_terminal() -> None:
    """Make it the one whose Ctrl+C is a signal to us: in a new session the first that is opened is."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
