"""What a server says: its log lines, and how they look.

Every process logs through one of two formatters, so that a record is one line whatever it quotes (`logtext.py`). The
trace of an exception follows its line, each line of it marked as such; as JSON it is a part of the one line.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from numbers import Number
from types import TracebackType

from tandem.log_stream import log_stream
from tandem.logtext import MAX_LINE_CHARS, visible

TRACE_MARK = "  | "  # before each line of a trace: no line of ours begins so
MAX_TRACE_LINES = 100  # of each end


def say(line: str) -> None:
    """On standard output, if that takes it: a full disk, or a reader that has left, does not keep a server from
    serving.
    """
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


class LineFormatter(logging.Formatter):
    """One record, one line; what it quotes is visible and bounded."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, "%H:%M:%S")
        lines = [f"[{clock} {self._process}] {message_of(record)}", *self.trace(record)]
        return f"\n{TRACE_MARK}".join(lines)

    def trace(self, record: logging.LogRecord) -> list[str]:
        """Line by line. Its end says what went wrong, so of a long one the middle is left out."""
        if not record.exc_info:
            return []
        lines = self.formatException(record.exc_info).split("\n")
        if len(lines) > 2 * MAX_TRACE_LINES:
            lines[MAX_TRACE_LINES:-MAX_TRACE_LINES] = ["..."]
        return [visible(line, most=MAX_LINE_CHARS) for line in lines]


class JsonFormatter(LineFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": message_of(record),
        }
        if trace := self.trace(record):
            line["exception"] = "\n".join(trace)
        return json.dumps(line)


def message_of(record: logging.LogRecord) -> str:
    """The text of a record, with each value that it is made of and the whole within bounds. Never raises."""
    args = record.args
    if isinstance(args, tuple):
        bounded = tuple(arg if isinstance(arg, Number) else _Bounded(arg) for arg in args)
        record = logging.makeLogRecord(record.__dict__ | {"args": bounded})
    try:
        return visible(record.getMessage(), most=MAX_LINE_CHARS)
    except Exception as error:  # a mistake in a log call costs the text and nothing else
        return visible(f"{record.msg} ({type(error).__name__} while it was written)", most=MAX_LINE_CHARS)


class _Bounded:
    """A value as `%s` and `%r` show it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(str(self._value))

    def __repr__(self) -> str:
        return visible(repr(self._value))


def set_up(log_format: str, *, process: str) -> None:
    """Lines of this process go to stderr, as text or as JSON; also what no one has caught."""
    handler = logging.StreamHandler(log_stream(sys.stderr))
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else LineFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = log_uncaught
    threading.excepthook = lambda args: log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger("tandem").critical("not caught", exc_info=(kind, error, trace))
