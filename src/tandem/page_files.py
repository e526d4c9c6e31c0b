"""Pages of KV as files in one folder, which several servers share and which outlives them.

A file's name is a SHA-256 over a *namespace* (model, dtype, layout, the worker's part: whatever has to be equal before
bytes may be used again) and the page's hash, which is a chain over all tokens before, keyed by tenant and by a secret
of the folder (`pagehash.py`). So no name says anything, and none is chosen by a user. A file says again what it is:

    magic 8 | namespace 16 | page hash 16 | number of bytes 8 | xxh3-128 of all before and of the bytes 16 | the bytes

A file that says something else, is too short or has changed is no page: it is removed, and counted. One that is not
there any more is none either. Files appear whole or not at all (a temporary name, then rename); what a killed writer
has left is removed at the next start. They are not synced: after a power cut a torn one is found by its digest.

The folder holds about as many bytes as it was given, whoever writes: a writer looks at all of it from time to time and
removes what was used least recently. What n workers write between two looks, a thirty-second each, may come on top.
"""

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from xxhash import xxh3_128

from tandem.core.values import PageHash
from tandem.pagehash import HASH_BYTES

MAGIC = b"TNDPAGE1"
NAMESPACE_BYTES = 16
SIZE_AT = len(MAGIC) + NAMESPACE_BYTES + HASH_BYTES
DIGEST_AT = SIZE_AT + 8
HEADER_BYTES = DIGEST_AT + 16

PAGE_NAME = re.compile(r"[0-9a-f]{64}")
TEMPORARY = "tmp-"
TEMPORARY_SECONDS = 60  # a page is written in milliseconds: an older one has no writer
SECRET_NAME = "secret"
SECRET_BYTES = 32
LOOK_SHARE = 32  # a writer looks at the whole folder after so small a part of its bound
KEPT_SHARE = 7 / 8  # and leaves that much of it


class FolderRefused(Exception):
    """Why pages cannot be kept there, in a sentence."""


class FileEntry(Struct, frozen=True, gc=False):
    name: str
    num_bytes: int
    used_at: float  # seconds


class Files(Protocol):
    """A folder. All raise OSError; what is not there FileNotFoundError."""

    def entries(self) -> Iterable[FileEntry]: ...

    def read(self, name: str, most: int) -> bytes:
        """The first `most` bytes. The file counts as used now."""
        ...

    def has(self, name: str) -> bool: ...

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Whole or not at all."""
        ...

    def remove(self, name: str) -> None: ...


class Mover(Protocol):
    """Moves bytes between memory and an open file, from its beginning. Both raise OSError."""

    def read(self, fd: int, most: int) -> bytes:
        """As many as there are, up to `most`."""
        ...

    def write(self, fd: int, parts: Iterable[bytes | memoryview]) -> None: ...


class SystemCalls:
    """`Mover` by read and write."""

    def read(self, fd: int, most: int) -> bytes:
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            return file.read(most)

    def write(self, fd: int, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]


class DiskFolder:
    """`Files` on a disk: one flat folder of this user's own."""

    def __init__(self, path: Path, mover: Mover | None = None) -> None:
        """Make it where it is not there. Raises FolderRefused where others could write into it.

        mover: what moves the bytes of its files, system calls unless told.
        """
        self._mover = mover if mover is not None else SystemCalls()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise FolderRefused(f"no folder for pages at {path}: {error.strerror}") from error
        about = os.fstat(self._fd)
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FolderRefused(f"others can write into {path}: pages of KV need a folder of one's own (chmod 700)")

    def entries(self) -> Iterable[FileEntry]:
        with os.scandir(self._fd) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):  # another server has removed it meanwhile
                    about = one.stat(follow_symlinks=False)
                    yield FileEntry(one.name, about.st_size, about.st_mtime)

    def read(self, name: str, most: int) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            with contextlib.suppress(OSError):  # of use for eviction only
                os.utime(fd)
            return self._mover.read(fd, most)
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self._put(name, parts, replaces=True)

    def secret(self) -> bytes:
        """Of all servers that share the folder: the first one draws it."""
        with contextlib.suppress(FileExistsError):
            if not self.has(SECRET_NAME):
                self._put(SECRET_NAME, [secrets.token_bytes(SECRET_BYTES)], replaces=False)
        found = self.read(SECRET_NAME, SECRET_BYTES + 1)
        if len(found) != SECRET_BYTES:
            raise FolderRefused(f"{SECRET_NAME} in the folder of pages has {len(found)} bytes: empty the folder")
        return found

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def _put(self, name: str, parts: Iterable[bytes | memoryview], *, replaces: bool) -> None:
        temporary = TEMPORARY + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            try:
                self._mover.write(fd, parts)
            finally:
                os.close(fd)
            if replaces:
                os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            else:
                os.link(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise
        if not replaces:
            self.remove(temporary)


class FileCounters(Struct):
    """Sums since the start."""

    read: int = 0
    missing: int = 0
    written: int = 0
    removed_damaged: int = 0
    evicted: int = 0
    errors: int = 0


@dataclass(slots=True)
class PageFiles:
    """The pages of one worker among those files. Used by two threads: one reads, one writes."""

    files: Files
    namespace: bytes
    page_bytes: int
    max_bytes: int
    now: Callable[[], float] = time.time
    counters: FileCounters = field(default_factory=FileCounters)
    written_since: int = 0  # bytes, since the last look at the folder

    def __post_init__(self) -> None:
        assert len(self.namespace) == NAMESPACE_BYTES
        self.written_since = self.max_bytes  # what others have left is not known yet

    def has(self, page_hash: PageHash) -> bool:
        """It is there, which says nothing of what it holds. Raises OSError."""
        return self.files.has(self.name(page_hash))

    def read(self, page_hash: PageHash) -> bytes | None:
        """The bytes of a page, or None: no such file, or one that is removed for what is wrong with it."""
        name = self.name(page_hash)
        try:
            content = self.files.read(name, HEADER_BYTES + self.page_bytes + 1)
        except FileNotFoundError:
            self.counters.missing += 1
            return None
        page = self.page_in(content, page_hash)
        if page is None:
            self.counters.removed_damaged += 1
            with contextlib.suppress(OSError):
                self.files.remove(name)
            return None
        self.counters.read += 1
        return page

    def page_in(self, content: bytes, page_hash: PageHash) -> bytes | None:
        """What a file holds, if it is that page."""
        head, page = content[:DIGEST_AT], content[HEADER_BYTES:]
        if head != self.head(page_hash) or len(page) != self.page_bytes:
            return None
        return page if digest(head, page) == content[DIGEST_AT:HEADER_BYTES] else None

    def write(self, page_hash: PageHash, page: bytes | memoryview) -> None:
        """Raises OSError. What is there already is not written again."""
        name = self.name(page_hash)
        if self.files.has(name):
            return
        if self.written_since >= self.max_bytes // LOOK_SHARE:
            self.bound()
        head = self.head(page_hash)
        self.files.write(name, [head + digest(head, page), page])
        self.counters.written += 1
        self.written_since += HEADER_BYTES + self.page_bytes

    def bound(self) -> None:
        """Remove what was used least recently until there is room again."""
        self.written_since = 0
        pages = [one for one in self.files.entries() if PAGE_NAME.fullmatch(one.name)]
        pages.sort(key=lambda one: (one.used_at, one.name))
        total = sum(one.num_bytes for one in pages)
        if total < self.max_bytes - self.max_bytes // LOOK_SHARE:
            return
        for one in pages:
            if total <= self.max_bytes * KEPT_SHARE:
                return
            with contextlib.suppress(FileNotFoundError):
                self.files.remove(one.name)
                self.counters.evicted += 1
            total -= one.num_bytes

    def clean(self) -> None:
        """Remove what a killed writer has left."""
        for one in self.files.entries():
            if one.name.startswith(TEMPORARY) and one.used_at < self.now() - TEMPORARY_SECONDS:
                with contextlib.suppress(FileNotFoundError):
                    self.files.remove(one.name)

    def name(self, page_hash: PageHash) -> str:
        return hashlib.sha256(self.namespace + page_hash).hexdigest()

    def head(self, page_hash: PageHash) -> bytes:
        return MAGIC + self.namespace + page_hash + self.page_bytes.to_bytes(8, "little")


def digest(head: bytes, page: bytes | memoryview) -> bytes:
    state = xxh3_128(head)
    state.update(page)
    return state.digest()


def namespace_of(fields: dict[str, str]) -> bytes:
    """Everything that two workers must have in common before one may use what the other one has written."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return hashlib.sha256(text.encode()).digest()[:NAMESPACE_BYTES]
