"""Shared memory of virtual machines: KV pages that have a descriptor, which passes over unix sockets, and copies that
take their time. Everything above that is the product's: who gets memory, when a copy counts, and who waits for whom.

Checked here: while somebody copies a page, its owner does not say that it is drained. Who was kept from running until
the owner's timeout is not waited for.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from random import Random

from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.network import Watched
from tandem.simulator.whole.virtual_process import Replacement
from tandem.transfer import link, pages, reader, shared_memory
from tandem.transfer.pages import Pages
from tandem.transfer.shared_memory import PeerMemory

COPY_NS = 2 * MILLISECOND  # half of one, at most; and a few take ten times as long
UNSHARED = 0.25  # of all workers
PATIENCE_NS = 5 * SECOND  # of an owner, for a reader that copies


@dataclass(eq=False, slots=True)
class SharedPages(Watched):
    """What a descriptor of KV memory refers to."""

    buffer: memoryview
    number: int


@dataclass(eq=False, slots=True)
class CopyUnderWay:
    source: object  # the memory itself, whoever has a view of it
    starts: Sequence[int]  # in it, of the pieces
    process: Process  # that copies
    began: int


class Memories:
    """Of all virtual machines of a world."""

    def __init__(self, kernel: Kernel, random: Random) -> None:
        self._kernel, self._random = kernel, random
        self._copies: list[CopyUnderWay] = []
        self._num_shared = 0
        self.num_copies = 0  # that have ended
        self._copy = pages.copy_pieces

    def share(self, buffer: memoryview) -> int | None:
        """A descriptor for it, of the process that runs. Some have none: there bytes are sent on unix sockets, too."""
        if self._random.random() < UNSHARED:
            return None
        self._num_shared += 1
        shared = SharedPages(self._kernel, buffer, self._num_shared)
        return self._kernel.open_fd(self._kernel.current().process, shared)

    @property
    def num_under_way(self) -> int:
        return len(self._copies)

    def replacements(self) -> list[Replacement]:
        return [
            (shared_memory, "seal", lambda descriptor, gives_back: descriptor),  # nobody here could write to it anyway
            (reader, "file_of", lambda descriptor: (0, self._of(descriptor).number)),
            (PeerMemory, "map", self._map),
            (link, "close_descriptor", self._close),
            (pages, "copy_pieces", self._copy_slowly),
        ]

    def is_copied(self, buffer: memoryview, numbers: Set[int], page_bytes: int) -> bool:
        """Whether somebody who has run all the while copies one of these pages now."""
        now = self._kernel.now
        return any(
            copy.source is buffer.obj
            and copy.process.is_alive
            and not copy.process.is_frozen
            and now - copy.began < PATIENCE_NS
            and any(at // page_bytes in numbers for at in copy.starts)
            for copy in self._copies
        )

    def _of(self, descriptor: int) -> SharedPages:
        found = self._kernel.current().process.fds[descriptor]
        assert isinstance(found, SharedPages)
        return found

    def _map(self, descriptor: int, page_bytes: int) -> PeerMemory:
        return PeerMemory(Pages(self._of(descriptor).buffer.toreadonly(), page_bytes))

    def _close(self, descriptor: int) -> None:
        self._kernel.close_fd(self._kernel.current().process, descriptor)

    def _copy_slowly(
        self, target: memoryview, to_at: Sequence[int], source: memoryview, from_at: Sequence[int], *, size: int
    ) -> None:
        kernel, half = self._kernel, len(to_at) // 2
        copy = CopyUnderWay(source.obj, from_at, kernel.current().process, kernel.now)
        self._copies.append(copy)
        try:
            for part in (slice(0, half), slice(half, None)):
                self._copy(target, to_at[part], source, from_at[part], size=size)
                longest = COPY_NS * (10 if self._random.random() < 0.1 else 1)
                kernel.sleep(self._random.randrange(longest) / SECOND)
        finally:
            self._copies.remove(copy)
        self.num_copies += 1
