"""Storage below a worker's host memory: two threads beside its batches, one that reads and one that writes."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from msgspec import structs

from tandem.config import ServerConfig
from tandem.core.commands import WritePages
from tandem.core.settings import StorageSettings
from tandem.core.values import SECOND
from tandem.host_memory import HostMemory
from tandem.page_files import HEADER_BYTES, DiskFolder, FolderRefused, Mover, PageFiles, SystemCalls, namespace_of
from tandem.page_storage import StorageAnswer, StorageCommand, StorageLane, perform
from tandem.ranks import Rank
from tandem.server.channel import ChannelClosed
from tandem.server.processes import ServerFailure
from tandem.server.repeated_lines import RepeatedLines

GIGABYTE = 1e9
TIMEOUT_SECONDS = StorageSettings().io_timeout_ns / SECOND  # the node waits no longer for an answer
LINE_EVERY_SECONDS = 10.0  # while a disk is full or fails every request may meet it

logger = logging.getLogger("tandem.storage")


class WorkerStorage:
    def __init__(
        self, files: PageFiles, memory: HostMemory, rank: Rank, answer: Callable[[StorageAnswer], None]
    ) -> None:
        self._files = files
        self._memory = memory
        self._rank = rank
        self._answer = answer
        self._complaints = RepeatedLines(logger, every_s=LINE_EVERY_SECONDS)
        self._reads, self._writes = self._new_lane(), self._new_lane()

    def start(self) -> None:
        for name, lane in (("storage reads", self._reads), ("storage writes", self._writes)):
            threading.Thread(target=self._run, args=(lane,), name=name, daemon=True).start()

    def begin(self, command: StorageCommand) -> None:
        """Does not wait."""
        (self._writes if isinstance(command, WritePages) else self._reads).put(command)

    def numbers(self) -> Mapping[str, int]:
        """Sums since the start, in files."""
        return {f"storage_{name}_total": count for name, count in structs.asdict(self._files.counters).items()}

    def _new_lane(self) -> StorageLane:
        return StorageLane(
            self._perform, self._say, shard=self._rank.shard, timeout_seconds=TIMEOUT_SECONDS, now=time.monotonic
        )

    def _perform(self, command: StorageCommand) -> StorageAnswer:
        return perform(command, self._files, self._memory, self._rank.shard)

    def _say(self, answer: StorageAnswer) -> None:
        if answer.detail:
            self._complaints.note(answer.detail)
        self._answer(answer)

    def _run(self, lane: StorageLane) -> None:
        with contextlib.suppress(ChannelClosed):  # the node is gone; this process is about to notice
            while True:
                lane.run_one()


def open_page_files(
    config: ServerConfig, fields: dict[str, str], kernels: str, rank: Rank, page_bytes: int
) -> PageFiles:
    """The files of one worker. fields: what two servers must have in common before KV may travel between them.

    kernels: how it computes, which counts where rows have to come out bit by bit. Raises ServerFailure.
    """
    assert config.hicache_storage_dir is not None
    part = {"cut": rank.cut.name, "shard": str(rank.shard)}
    bits = {"deterministic": kernels} if config.deterministic else {}
    try:
        folder = DiskFolder(Path(config.hicache_storage_dir), open_mover(config, page_bytes))
        max_bytes = int(config.hicache_storage_size * GIGABYTE)
        files = PageFiles(folder, namespace_of({**fields, **part, **bits}), page_bytes, max_bytes)
        folder.secret()
        files.clean()
    except (OSError, FolderRefused) as error:
        raise ServerFailure(f"no storage of pages in {config.hicache_storage_dir}: {error}") from error
    return files


def open_mover(config: ServerConfig, page_bytes: int) -> Mover:
    """What moves the bytes of page files. Raises OSError."""
    if config.hicache_storage_backend == "file":
        return SystemCalls()
    nixl = import_module("tandem.server.nixl_mover")  # only here: an extra brings what it imports
    file_bytes = HEADER_BYTES + page_bytes + 1  # one more than a page that is whole
    return nixl.NixlMover(file_bytes, timeout_seconds=TIMEOUT_SECONDS)
