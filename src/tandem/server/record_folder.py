"""A folder that records are written to: how its files are named and made, and which go when it is full.

Several servers, one after the other and at once, may write to one folder, and it may lie where others write too. So

- only regular files of this user whose names are those of records of this kind count, and only such are ever deleted;
- a segment is made anew, never opened or followed to what is there already, and nobody else can read it;
- who writes a segment holds a lock on it, which the kernel takes back when the process ends. What is locked stays.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FLIGHT_NAME = re.compile(r"flight-[0-9a-f]{1,32}-[0-9]{1,10}-[0-9]{6,12}\.tandem")
FAULT_NAME = re.compile(r"fault-(node|edge|router)-[0-9a-f]{1,32}-[0-9]{1,10}-[0-9]{6,12}\.tandem")
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file as it was found."""

    written_ns: int
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RecordFolder:
    path: Path
    name: re.Pattern[str]

    def prepare(self) -> None:
        """Make it where it is missing, for this user only. Raises OSError."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)

    def create(self, name: str) -> BinaryIO:
        """A new file, locked until it is closed. Raises OSError, also where the name is taken."""
        assert self.name.fullmatch(name)
        file = os.fdopen(os.open(self.path / name, NEW_FILE, 0o600), "wb", buffering=BUFFER_BYTES)
        with contextlib.suppress(OSError):  # a file system without locks: others may delete it when it is their oldest
            fcntl.flock(file, fcntl.LOCK_EX)  # who looks whether it is busy has it for a moment
        return file

    def make_room(self, wanted: int, *, segment_bytes: int, own: str, kept: Collection[str]) -> None:
        """Delete the oldest until the rest has at most `wanted` bytes, `kept` not at all.

        Those whose names begin with `own` go last. A segment that is being written counts as a whole one of
        `segment_bytes`. Never raises: a folder that cannot be read is not tidied.
        """
        found = self._segments()
        busy = {s.name for s in found if s.name not in kept and self._is_busy(s.name)}
        total = sum(max(s.size, segment_bytes) if s.name in busy else s.size for s in found)
        for segment in sorted(found, key=lambda s: (s.name.startswith(own), s.written_ns, s.name)):
            if total <= wanted:
                return
            if segment.name not in busy and segment.name not in kept and self._delete(segment.name):
                total -= segment.size

    def _segments(self) -> list[SegmentFile]:
        try:
            with os.scandir(self.path) as entries:
                found = [_segment(entry) for entry in entries if self.name.fullmatch(entry.name)]
        except OSError:
            return []
        return [segment for segment in found if segment is not None]

    def _is_busy(self, name: str) -> bool:
        """Somebody writes it, or it cannot be told."""
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def _delete(self, name: str) -> bool:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _segment(entry: os.DirEntry[str]) -> SegmentFile | None:
    """None: it is no regular file of this user, or gone by now."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return SegmentFile(status.st_mtime_ns, entry.name, status.st_size) if is_ours else None
