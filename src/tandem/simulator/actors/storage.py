"""Storage below the host memory of simulated servers: the product's files of pages in one folder, in virtual time.

The folder belongs to nobody's life: every server of the world shares it, and finds there what an earlier life has
written. Each worker has two lanes, one for what is read and one for what is written, in which one thing happens at a
time, at its end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from tandem.core.commands import FetchPages, WritePages
from tandem.core.events import Event, PagesCopied
from tandem.core.values import MILLISECOND, SECOND, Cut, PageHash, PageId, ShardId
from tandem.host_memory import HostMemory
from tandem.page_files import HEADER_BYTES, FileEntry, PageFiles, namespace_of
from tandem.page_storage import StorageAnswer, StorageCommand, StorageLane, perform
from tandem.simulator.clock import Clock

THAW_NS = 50 * MILLISECOND
FOLDER_PAGES = 256  # of one worker, about


@dataclass(frozen=True, slots=True)
class StorageFaults:
    """F16 below host memory, as shares of what is read or written. None strikes once the world is healed."""

    slow: float = 0.0  # takes seconds
    full: float = 0.0  # no space left
    short: float = 0.0  # a file ends before its page does
    stale: float = 0.0  # what lies under a name is another page
    corrupt: float = 0.0  # a byte has changed
    vanished: float = 0.0  # another server has removed it since the look-up
    broken: float = 0.0  # the device errs


@dataclass(slots=True)
class VirtualFolder:
    """`Files` that all servers of a world share."""

    random: Random
    faults: StorageFaults
    strikes: Callable[[float], bool]
    now: Callable[[], int]
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    used_at: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def without_faults(cls, contents: dict[str, bytes]) -> "VirtualFolder":
        """In which no time passes."""
        used_at = dict.fromkeys(contents, 0)
        return cls(Random(0), StorageFaults(), lambda share: False, lambda: 0, contents, used_at)

    def entries(self) -> Iterable[FileEntry]:
        return [FileEntry(name, len(content), self.used_at[name]) for name, content in self.contents.items()]

    def has(self, name: str) -> bool:
        self._fail_if_broken()
        return name in self.contents

    def read(self, name: str, most: int) -> bytes:
        self._fail_if_broken()
        if name in self.contents and self.strikes(self.faults.vanished):
            self.remove(name)
        if name not in self.contents:
            raise FileNotFoundError(2, "No such file or directory")
        self.used_at[name] = self.now()
        return self.contents[name][:most]

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self._fail_if_broken()
        if self.strikes(self.faults.full):
            raise OSError(28, "No space left on device")
        self.contents[name] = self._spoiled(b"".join(map(bytes, parts)))
        self.used_at[name] = self.now()

    def remove(self, name: str) -> None:
        if name not in self.contents:
            raise FileNotFoundError(2, "No such file or directory")
        del self.contents[name]
        del self.used_at[name]

    def _spoiled(self, content: bytes) -> bytes:
        if self.strikes(self.faults.short):
            return content[: self.random.randrange(len(content))]
        if self.contents and self.strikes(self.faults.stale):
            return self.random.choice(list(self.contents.values()))
        if self.strikes(self.faults.corrupt):
            at = self.random.randrange(len(content))
            return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        return content

    def _fail_if_broken(self) -> None:
        if self.strikes(self.faults.broken):
            raise OSError(5, "Input/output error")


@dataclass(slots=True)
class Way:
    """One lane of one worker."""

    lane: StorageLane
    busy_until: int = 0
    started_at: int = 0  # what runs now, or what is put


@dataclass(slots=True)
class SimulatedStorage:
    """What the workers of one life do with the folder."""

    hosts: list[HostMemory]
    folder: VirtualFolder
    cut: Cut
    page_ns: int
    io_timeout_ns: int
    clock: Clock
    random: Random
    emit: Callable[[Event], None]
    is_alive: Callable[[], bool]
    is_frozen: Callable[[], bool]
    fetched: Callable[[ShardId, PageId, PageHash], None]
    num_under_way: int = 0
    files: list[PageFiles] = field(init=False)
    ways: dict[tuple[ShardId, bool], Way] = field(default_factory=dict[tuple[ShardId, bool], Way])

    def __post_init__(self) -> None:
        self.files = [self._open(ShardId(number), memory) for number, memory in enumerate(self.hosts)]

    def _open(self, shard: ShardId, memory: HostMemory) -> PageFiles:
        namespace = namespace_of({"cut": self.cut.name, "shard": str(shard)})
        max_bytes = FOLDER_PAGES * len(self.hosts) * (HEADER_BYTES + memory.page_bytes)
        return PageFiles(self.folder, namespace, memory.page_bytes, max_bytes, now=self.folder.now)

    def begin(self, command: StorageCommand) -> None:
        for number in range(len(self.hosts)):
            shard, writes = ShardId(number), isinstance(command, WritePages)
            way = self.ways.get((shard, writes))
            if way is None:
                way = self.ways[shard, writes] = self._new_way(shard)
            duration_ns = len(command.hashes) * self.page_ns // (1 if writes else 2)
            if self.folder.strikes(self.folder.faults.slow):
                duration_ns += self.random.randrange(20 * SECOND)
            begins_at = max(self.clock.time, way.busy_until)
            way.busy_until = begins_at + 1 + duration_ns
            way.started_at = self.clock.time
            self.num_under_way += 1
            way.lane.put(command)
            self.clock.at(way.busy_until, self._end, way, begins_at)

    def _new_way(self, shard: ShardId) -> Way:
        def act(command: StorageCommand) -> StorageAnswer:
            answer = perform(command, self.files[shard], self.hosts[shard], shard)
            if isinstance(command, FetchPages) and isinstance(answer, PagesCopied):
                for page_hash, host_page in zip(command.hashes, command.host_pages[: answer.num_pages], strict=False):
                    self.fetched(shard, host_page, page_hash)
            return answer

        def started_at() -> float:
            return way.started_at / SECOND

        lane = StorageLane(act, self.emit, shard=shard, timeout_seconds=self.io_timeout_ns / SECOND, now=started_at)
        way = Way(lane)
        return way

    def _end(self, way: Way, began_at: int) -> None:
        if not self.is_alive():
            return
        if self.is_frozen():
            self.clock.after(THAW_NS, self._end, way, began_at)
            return
        self.num_under_way -= 1
        way.started_at = began_at
        way.lane.run_one()
