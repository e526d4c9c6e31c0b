"""Storage below a worker's host memory: two threads beside its batches, one that reads and one that writes."""

import contextlib
import logging
import math
import re
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
from tandem.page_storage import Lane, StorageAnswer, StorageCommand, perform
from tandem.ranks import Rank
from tandem.server.channel import ChannelClosed
from tandem.server.processes import ServerFailure

GIGABYTE = 1e9
TIMEOUT_SECONDS = StorageSettings().io_timeout_ns / SECOND  # the node waits no longer for an answer
LINE_EVERY_SECONDS = 10.0

logger = logging.getLogger("tandem.storage")


class Complaints:
    """Lines of the log for what every request may meet while a disk is full or fails.

    Of each kind, which is a text but for its numbers, one line at a time, with how many there were since the last one.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when there was a line, and how many complaints since

    def note(self, text: str) -> None:
        """From any thread."""
        kind, now = re.sub(r"[0-9]+", "", text), self._now()
        with self._lock:
            last, since = self._kinds.get(kind, (-math.inf, 0))
            is_due = now - last >= LINE_EVERY_SECONDS
            self._kinds[kind] = (now, 0) if is_due else (last, since + 1)
        if is_due:
            logger.warning("%s%s", text, f" (and {since} times since this was last said)" if since else "")


class WorkerStorage:
    def __init__(
        self, files: PageFiles, memory: HostMemory, rank: Rank, answer: Callable[[StorageAnswer], None]
    ) -> None:
        self._files = files
        self._memory = memory
        self._rank = rank
        self._answer = answer
        self._complaints = Complaints(time.monotonic)
        self._reads, self._writes = self._new_lane(), self._new_lane()

    def start(self) -> None:
        for name, lane in (("storage reads", self._reads), ("storage writes", self._writes)):
            threading.Thread(target=self._run, args=(lane,), name=name, daemon=True).start()

    def begin(self, command: StorageCommand) -> None:
        """Does not wait."""
        (self._writes if isinstance(command, WritePages) else self._reads).put(command)

    def numbers(self) -> Mapping[str, int]:
        """Sums since the start, in files."""
        return {f"storage_{name}": count for name, count in structs.asdict(self._files.counters).items()}

    def _new_lane(self) -> Lane:
        return Lane(
            self._perform, self._say, shard=self._rank.shard, timeout_seconds=TIMEOUT_SECONDS, now=time.monotonic
        )

    def _perform(self, command: StorageCommand) -> StorageAnswer:
        return perform(command, self._files, self._memory, self._rank.shard)

    def _say(self, answer: StorageAnswer) -> None:
        if answer.detail:
            self._complaints.note(answer.detail)
        self._answer(answer)

    def _run(self, lane: Lane) -> None:
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
