"""Writes what a process has in its ring when something went wrong, to a folder where nobody has to look before that.

Written are the ring of the process that ends by a fault of ours, those of a server in which a watchdog fires, and that
of a process whose request ends with a cause that is ours (`OURS`). Never more than one in `PAUSE_S`, but for the last
word of a process; never more than `MAX_BYTES` in the folder. Whatever goes wrong here costs the record only.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from errno import EACCES
from pathlib import Path

from msgspec import Struct

from tandem.core.values import Cause
from tandem.server.channel import append_frame
from tandem.server.record_folder import FAULT_NAME, RecordFolder

OFF = "off"
FOLDER = Path("tandem") / "faults"  # below the user's state folder
PAUSE_S = 10.0
MAX_BYTES = 256 << 20  # of all records in the folder; the oldest go
OURS = frozenset(
    {Cause.ENGINE_FAILED, Cause.INVALID_LOGITS, Cause.WORKER_LOST, Cause.CORRUPT_PAGES, Cause.PROTOCOL}
)  # causes that nobody outside has given


class FaultRecords:
    """Of one process. frames: what is written, from its ring; made only when it is wanted."""

    def __init__(
        self,
        folder: Path,
        machine: str,
        identity: str,
        frames: Callable[[], Iterable[Struct]],
        logger: logging.Logger,
    ) -> None:
        """machine: node, edge or router. identity: hex digits that no other process has."""
        self._folder = RecordFolder(folder, FAULT_NAME)
        self._name = f"fault-{machine}-{identity}-{os.getpid()}-"
        self._frames = frames
        self._logger = logger
        self._count = 0
        self._begun_at: float | None = None

    def is_due(self) -> bool:
        """Not so soon after another one; if so, somebody writes it now."""
        now = time.monotonic()
        if self._begun_at is not None and now < self._begun_at + PAUSE_S:
            return False
        self._begun_at = now
        return True

    def write_soon(self, why: str) -> None:
        """If one is due, in another thread than that of the running event loop."""
        if self.is_due():
            asyncio.get_running_loop().run_in_executor(None, self.write_now, why)

    def write_now(self, why: str) -> Path | None:
        """One file, and one line in the log that says how to replay it."""
        try:
            path = self._write()
        except Exception as error:  # a full disk, or a bug in what makes the frames
            self._logger.warning("%s; there is no record of it: %s %s", why, type(error).__name__, error)
            return None
        self._logger.warning("%s; what led there is on record: tandem replay %s", why, path)
        return path

    def _write(self) -> Path:
        """Raises OSError."""
        self._folder.prepare()
        name = f"{self._name}{self._count:06}.tandem"
        self._count += 1
        path = self._folder.path / name
        file = self._folder.create(name)
        try:
            with file:
                buffer = bytearray()
                for frame in self._frames():
                    buffer.clear()
                    append_frame(buffer, frame)
                    file.write(buffer)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._folder.make_room(MAX_BYTES, segment_bytes=0, own=self._name, kept=(name,))
        return path


def complaint(flag: str | None) -> str | None:
    """A sentence where the folder that was named takes no file. What nobody has named costs its records only."""
    if flag is None or flag == OFF:
        return None
    try:
        RecordFolder(Path(flag), FAULT_NAME).prepare()
        os.listdir(flag)
        reason = "" if os.access(flag, os.W_OK | os.X_OK) else os.strerror(EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
    return f"--fault-records {flag} takes no file: {reason}; choose another, or off" if reason else None


def folder_of(flag: str | None) -> Path | None:
    """Where the flag has records written; None: nowhere."""
    if flag == OFF:
        return None
    if flag is not None:
        return Path(flag)
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / FOLDER
    try:
        return Path.home() / ".local" / "state" / FOLDER
    except RuntimeError:
        return None  # this user has no home
