"""The KV allocation of one worker as its peers on the same host see it: mapped, and never written by them.

The owner *seals* its memfd when its own mapping is there. From then on the file keeps its size: a reader of a mapping
whose file shrinks dies of SIGBUS, so a reader maps nothing that is not sealed so, whoever sent it. And the kernel
refuses every new writable mapping and every write, through whatever descriptor (F_SEAL_FUTURE_WRITE). An owner that
gives parts of its memory back cannot have that, for this counts as a write: readers get a descriptor for reading only.

A mapping shows all pages, not those that were granted: see docs/security.md.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.core.kv_parts import Runs
from tandem.transfer.pages import Pages, Reached
from tandem.transfer.protocol import Malformed

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python names it from 3.13 on
SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS = SIZE_SEALS | F_SEAL_FUTURE_WRITE


def seal(descriptor: int, *, gives_back: bool = False) -> int:
    """Of a memfd that may be sealed. Mappings that are there stay as they are. Raises OSError.

    Returns the descriptor that readers may have: this one, or where the owner `gives_back` parts of it a new one, the
    caller's, that nothing can be written through.
    """
    if not gives_back:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return descriptor
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PeerMemory:
    """The pages of another process, mapped for as long as this object is. A `CopySource`."""

    pages: Pages

    @classmethod
    def map(cls, descriptor: int, page_bytes: int) -> "PeerMemory":
        """The descriptor stays the caller's. Raises OSError, and Malformed where a mapping of it could do harm."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise Malformed("what the peer shares is no memfd") from error
        is_for_reading = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if seals & SIZE_SEALS != SIZE_SEALS or not (seals & F_SEAL_FUTURE_WRITE or is_for_reading):
            raise Malformed("what the peer shares is not sealed")
        found = os.fstat(descriptor)
        if found.st_size == 0 or found.st_size % page_bytes:
            raise Malformed(f"the peer shares {found.st_size} bytes, and says that pages have {page_bytes}")
        mapping = mmap.mmap(descriptor, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        return cls(Pages(memoryview(mapping), page_bytes))

    @property
    def way(self) -> str:
        return "shm"

    @property
    def is_spent(self) -> bool:
        return False

    @contextmanager
    def reach(self, sources: Sequence[int], runs: Runs, *, has_news: Callable[[], bool]) -> Iterator[Reached]:
        """They are there already."""
        if not self.pages.has_all(sources):
            raise Malformed("a frame of pages that the memory does not have")
        yield Reached(self.pages, sources, runs)


def file_of(descriptor: int) -> tuple[int, int]:
    """Which one it is, as long as somebody has it: device and inode."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
