"""Host memory of one simulated replica: the product's `HostMemory` of every worker, in virtual time, with its faults.

Each worker carries out what it is told in order, one copy at a time, beside its batches. A copy reads and writes at its
end: the latest moment, and so the one at which a page that was given away too early is somebody else's already.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from msgspec import structs

from tandem.core.commands import LoadPages, StorePages
from tandem.core.events import PagesCopied
from tandem.core.values import MILLISECOND, SECOND, PageHash, PageId, ShardId
from tandem.host_memory import HostMemory, carry_out
from tandem.simulator.actors.executor import ShardMemory
from tandem.simulator.clock import Clock

SLOT_BYTES = 8
THAW_NS = 50 * MILLISECOND


Seen = Callable[[PageId, PageHash, list[int]], None]


def see_nothing(page: PageId, page_hash: PageHash, contents: list[int]) -> None: ...


class TierWatcher(Protocol):
    """What the oracle wants to see of copies."""

    def page_is_stored(self, shard: ShardId, page: PageId, page_hash: PageHash, contents: list[int]) -> None: ...

    def page_is_loaded(self, shard: ShardId, page: PageId, page_hash: PageHash, contents: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class TierFaults:
    """F16, as shares of copies. None strikes once the world is healed."""

    slow: float = 0.0  # takes seconds
    short: float = 0.0  # ends before its last page: no memory, a device that errs
    stale: float = 0.0  # says that it is whole, and has left what was there
    corrupt: float = 0.0  # a byte changes afterwards


@dataclass(slots=True)
class SimulatedTier:
    memories: Sequence[ShardMemory]
    num_pages: int
    page_ns: int
    clock: Clock
    random: Random
    faults: TierFaults
    watcher: TierWatcher
    emit: Callable[[PagesCopied], None]
    is_alive: Callable[[], bool]
    is_frozen: Callable[[], bool]
    count: Callable[[str], None]
    is_healed: Callable[[], bool]
    hosts: list[HostMemory] = field(init=False)
    busy_until: dict[ShardId, int] = field(default_factory=dict)
    num_under_way: int = 0

    def __post_init__(self) -> None:
        self.hosts = [host_memory_of(memory, self.num_pages) for memory in self.memories]

    def begin(self, command: StorePages | LoadPages) -> None:
        for number in range(len(self.memories)):
            shard = ShardId(number)
            duration_ns = len(command.pages) * self.page_ns
            if self._strikes(self.faults.slow):
                duration_ns += self.random.randrange(20 * SECOND)
            done_at = max(self.clock.time, self.busy_until.get(shard, 0)) + 1 + duration_ns
            self.busy_until[shard] = done_at
            self.num_under_way += 1
            self.clock.at(done_at, self._end, shard, command)

    def _end(self, shard: ShardId, command: StorePages | LoadPages) -> None:
        if not self.is_alive():
            return
        if self.is_frozen():
            self.clock.after(THAW_NS, self._end, shard, command)
            return
        self.num_under_way -= 1
        told = command
        if self._strikes(self.faults.short):
            told = cut_short(command, self.random.randrange(len(command.pages)))
        if isinstance(command, StorePages) and self._strikes(self.faults.stale):
            copied = PagesCopied(command.copy, shard, len(command.pages))
        else:
            copied = self._carry_out(shard, told)
        if told is not command and not copied.detail:
            copied = structs.replace(copied, detail="no more, as drawn")
        if self._strikes(self.faults.corrupt):
            host_page = self.random.choice(command.host_pages)
            self.hosts[shard].page(host_page)[0] ^= 1
        self.emit(copied)

    def _carry_out(self, shard: ShardId, command: StorePages | LoadPages) -> PagesCopied:
        def seen(page: PageId, page_hash: PageHash, contents: list[int]) -> None:
            if isinstance(command, StorePages):
                self.watcher.page_is_stored(shard, page, page_hash, contents)
            else:
                self.watcher.page_is_loaded(shard, page, page_hash, contents)

        return copy_pages(command, self.hosts[shard], self.memories[shard], shard, seen)

    def _strikes(self, share: float) -> bool:
        if self.is_healed() or not share or self.random.random() >= share:
            return False
        self.count("F16")
        return True


def host_memory_of(memory: ShardMemory, num_pages: int) -> HostMemory:
    """Of the worker whose pages are in `memory`."""
    return HostMemory(num_pages, SLOT_BYTES * len(memory.copy_out(PageId(0))))


def copy_pages(
    command: StorePages | LoadPages, host: HostMemory, memory: ShardMemory, shard: ShardId, seen: Seen = see_nothing
) -> PagesCopied:
    """The product's `carry_out`, from or to simulated pages. `seen` is told of each page that was copied, before any of
    those that are loaded is there."""
    places: dict[PageId, memoryview] = {}

    def device_page(page: PageId) -> memoryview:
        places[page] = memoryview(bytearray(array("Q", memory.copy_out(page)).tobytes()))
        return places[page]

    copied = carry_out(command, host, device_page, shard)
    for page, page_hash in zip(command.pages[: copied.num_pages], command.hashes, strict=False):
        seen(page, page_hash, places[page].cast("Q").tolist())
    if isinstance(command, LoadPages):
        for page, place in places.items():
            memory.copy_in(page, place.cast("Q").tolist())
    return copied


def cut_short(command: StorePages | LoadPages, num_pages: int) -> StorePages | LoadPages:
    return structs.replace(
        command,
        hashes=command.hashes[:num_pages],
        pages=command.pages[:num_pages],
        host_pages=command.host_pages[:num_pages],
    )
