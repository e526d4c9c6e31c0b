"""Digests of tensors that were read before, by the state of the file they lie in.

A small file in the user's cache folder. An entry holds only for the same path, device, inode, size and both times; what
was changed within the last moments is not kept, because a second change might leave its times as they are. A cache that
cannot be read or written, is somebody else's, or was cut or changed is no cache, and never an error.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

VERSION = 1
MOST_FILES = 1024
MOST_BYTES = 64 << 20
SETTLED_NS = 2_000_000_000  # file systems keep times as coarse as this

Stamp = tuple[int, ...]


class DigestEntry(Struct, frozen=True):
    stamp: Stamp
    digests: dict[str, str]


class Contents(Struct, frozen=True):
    version: int
    files: dict[str, DigestEntry]


def default_path() -> Path | None:
    """None where there is no home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):
        base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
        return base / "tandem" / "weights"
    return None


class DigestCache:
    """Read at once; `write` puts back what was added."""

    def __init__(self, path: Path | None, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns
        self._files = _read(path) if path is not None else {}
        self._is_changed = False

    def find(self, file: Path, stamp: Stamp) -> dict[str, str]:
        """Digests by tensor name; empty where the file is not known in this state."""
        entry = self._files.get(_key(file))
        return entry.digests if entry is not None and entry.stamp == stamp else {}

    def keep(self, file: Path, stamp: Stamp, digests: dict[str, str]) -> None:
        """stamp: of the file, times in its last two places."""
        if self._now_ns() - max(stamp[-2:]) < SETTLED_NS:
            return
        self._files.pop(_key(file), None)
        self._files[_key(file)] = DigestEntry(stamp, digests)
        self._is_changed = True

    def write(self) -> None:
        if self._path is None or not self._is_changed:
            return
        files = {**_read(self._path), **self._files}  # others write too
        body = msgspec.json.encode(Contents(VERSION, dict(list(files.items())[-MOST_FILES:])))
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._path, _checksum(body) + b"\n" + body)
            self._is_changed = False


def _key(file: Path) -> str:
    return os.fsencode(file.resolve()).decode("utf-8", "backslashreplace")


def _read(path: Path) -> dict[str, DigestEntry]:
    try:
        checksum, _, body = _own_bytes(path).partition(b"\n")
        contents = msgspec.json.decode(body, type=Contents)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return {}
    return contents.files if contents.version == VERSION and checksum == _checksum(body) else {}


def _own_bytes(path: Path) -> bytes:
    """Raises OSError for what is not there, ValueError for what nobody else should have been able to write."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not is_own or status.st_size > MOST_BYTES:
            raise ValueError("not a cache of this user")
        return file.read(MOST_BYTES)


def _replace(path: Path, data: bytes) -> None:
    """Whole or not at all; for this user only, as the file is made."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
