"""What a worker does with storage below its host memory: look pages up, fetch them into host memory, write them.

Executes, in two lanes that each do one thing at a time, in order: reads are waited for, writes are not. Each lane is
bounded; what finds it full, or has waited there until its deadline, is answered at once with nothing. So a slow device
costs time only, and never that of a batch: neither lane is in the way of copies to and from the KV pool.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.commands import FetchPages, LookUpPages, WritePages
from tandem.core.events import PagesCopied, PagesFound
from tandem.core.values import ShardId
from tandem.host_memory import HostMemory
from tandem.page_files import PageFiles

MAX_WAITING = 256  # commands in a lane
StorageCommand = LookUpPages | FetchPages | WritePages
StorageAnswer = PagesFound | PagesCopied


def perform(command: StorageCommand, files: PageFiles, memory: HostMemory, shard: ShardId) -> StorageAnswer:
    """As far as it goes. Whatever a device does is an answer, too."""
    match command:
        case LookUpPages():
            return look_up(command, files, shard)
        case FetchPages():
            return fetch(command, files, memory, shard)
        case WritePages():
            return write(command, files, memory, shard)


def look_up(command: LookUpPages, files: PageFiles, shard: ShardId) -> PagesFound:
    num_found = 0
    try:
        while num_found < len(command.hashes) and files.has(command.hashes[num_found]):
            num_found += 1
    except OSError as error:
        files.counters.errors += 1
        return PagesFound(command.number, shard, num_found, told(error))
    return PagesFound(command.number, shard, num_found)


def fetch(command: FetchPages, files: PageFiles, memory: HostMemory, shard: ShardId) -> PagesCopied:
    for index, (page_hash, host_page) in enumerate(zip(command.hashes, command.host_pages, strict=True)):
        try:
            page = files.read(page_hash)
            if page is None:
                return PagesCopied(command.copy, shard, index, "storage: a page is not there, or not as it was written")
            memory.store(host_page, page_hash, memoryview(page))
        except (OSError, MemoryError) as error:
            files.counters.errors += 1
            return PagesCopied(command.copy, shard, index, told(error))
    return PagesCopied(command.copy, shard, len(command.hashes))


def write(command: WritePages, files: PageFiles, memory: HostMemory, shard: ShardId) -> PagesCopied:
    """A page that has left host memory meanwhile is not written: `HostMemory` knows it by its label."""
    index = 0
    try:
        place = memoryview(bytearray(memory.page_bytes))
        for index, (page_hash, host_page) in enumerate(zip(command.hashes, command.host_pages, strict=True)):
            complaint = memory.load(host_page, page_hash, place)
            if complaint:
                return PagesCopied(command.copy, shard, index, f"storage: page {host_page} of host memory: {complaint}")
            files.write(page_hash, place)
    except (OSError, MemoryError) as error:
        files.counters.errors += 1
        return PagesCopied(command.copy, shard, index, told(error))
    return PagesCopied(command.copy, shard, len(command.hashes))


def told(error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"storage: {type(error).__name__}: {why}"


def nothing(command: StorageCommand, shard: ShardId, why: str) -> StorageAnswer:
    if isinstance(command, LookUpPages):
        return PagesFound(command.number, shard, 0, why)
    return PagesCopied(command.copy, shard, 0, why)


@dataclass(frozen=True, slots=True)
class Waiting:
    command: StorageCommand
    until: float  # seconds of `now`


class StorageLane:
    """One queue, and what the thread behind it does."""

    def __init__(
        self,
        act: Callable[[StorageCommand], StorageAnswer],
        answer: Callable[[StorageAnswer], None],
        *,
        shard: ShardId,
        timeout_seconds: float,
        now: Callable[[], float],
    ) -> None:
        """answer: called from both threads. Raises what `answer` raises."""
        self._act = act
        self._answer = answer
        self._shard = shard
        self._timeout_seconds = timeout_seconds
        self._now = now
        self._waiting: queue.Queue[Waiting] = queue.Queue(MAX_WAITING)

    def put(self, command: StorageCommand) -> None:
        try:
            self._waiting.put_nowait(Waiting(command, self._now() + self._timeout_seconds))
        except queue.Full:
            self._answer(nothing(command, self._shard, "storage: too much is waiting"))

    def run_one(self) -> None:
        """Waits for a command."""
        waiting = self._waiting.get()
        if waiting.until < self._now():
            self._answer(nothing(waiting.command, self._shard, "storage: too late"))
        else:
            self._answer(self._act(waiting.command))
