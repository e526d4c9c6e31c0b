"""A worker that is ready: the engine and the KV transfer over one allocation. Executes; decides nothing.

    reader thread    takes messages from the node. Transfers go to the data plane at once, which has its own threads;
                     what concerns the engine goes into one queue, in order. Grammars are compiled here, beside batches
    host tier        copies pages to host memory and back, in order, beside batches; where there is such memory
    storage          two threads below that (`worker_storage.py`), where it has something below it
    main thread      runs the queue: tokens of new requests, batches, requests to forget

A forward pass that raises is an event, not the end: the requests of that batch end, the worker goes on. One of several
workers ends, and says so: the others stand in the middle of that batch.
"""

import tandem.engine.lean_torch  # noqa: F401  # before torch

# isort: split
import logging
import queue
import threading
from collections.abc import Iterable
from typing import Protocol

import msgspec

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.commands import (
    CancelPull,
    FetchPages,
    ForgetRequests,
    FreeWindows,
    LaunchBatch,
    LoadPages,
    LookUpPages,
    PublishPages,
    PullPages,
    RevokePages,
    StorePages,
    WritePages,
)
from tandem.core.events import BatchFailed, BatchReturned
from tandem.core.lockstep import Lockstep
from tandem.core.values import Cause, PageId
from tandem.engine.parallel import WorkerGone
from tandem.host_memory import HostMemory, carry_out
from tandem.page_files import PageFiles
from tandem.ranks import Rank
from tandem.sampling import Payload
from tandem.server import wire
from tandem.server.channel import BlockingChannel, ChannelClosed
from tandem.server.frames import MalformedFrame
from tandem.server.processes import ServerFailure
from tandem.server.worker_storage import WorkerStorage
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.port import KvTransfer
from tandem.transfer.staged_pages import HostCopies

EngineWork = Payload | ForgetRequests | LaunchBatch | wire.BatchLaunched

logger = logging.getLogger("tandem.worker")


class KvBytes(Protocol):
    """KV memory, as far as the data plane is concerned."""

    page_bytes: int  # of one page
    window_bytes: int  # of it, what `free_windows` gives back
    cell_bytes: int  # of it, for one head and layer (`core/kv_parts.py`)
    buffer: memoryview | None  # all pages, one behind the other; None where the host cannot see them
    fd: int | None  # of the memfd that the buffer is a mapping of

    @property
    def copies(self) -> HostCopies | None:
        """Of pages, where there is no buffer."""
        ...

    def free_windows(self, pages: Iterable[PageId]) -> None:
        """Of layers with a window: give back the memory of what they have in these pages. From the reader thread."""
        ...


class WorkerEngine(Protocol):
    """What a worker process asks of an engine: `engine.Engine`, or one that a simulation puts in its place."""

    @property
    def kv(self) -> KvBytes: ...

    def add(self, payload: Payload) -> None: ...

    def prepare(self, payload: Payload) -> None:
        """Do ahead of `add` what would hold up others there. Called from the reader thread."""
        ...

    def forget(self, requests: Iterable[int]) -> None: ...

    def run(self, plan: BatchPlan) -> BatchOutcome: ...

    def accompany(self) -> None:
        """Take part in a step of all DP ranks without a batch."""
        ...


class Worker:
    """Everything of this process once the model is loaded."""

    def __init__(
        self,
        rank: Rank,
        engine: WorkerEngine,
        transfer: KvTransfer | None,
        channel: BlockingChannel[wire.NodeToWorker],
        *,
        lockstep: Lockstep,
        dp_rank: int = 0,
        host: HostMemory | None = None,
        files: PageFiles | None = None,
    ) -> None:
        """lockstep: of the DP ranks that step together; this one alone where none do."""
        self._rank = rank
        self._lockstep = lockstep
        self._dp_rank = dp_rank
        self._engine = engine
        self._transfer = transfer
        self._channel = channel
        self._work: queue.SimpleQueue[EngineWork | None] = queue.SimpleQueue()
        self._reader_error: Exception | None = None
        self._host = host
        self._copies: queue.SimpleQueue[StorePages | LoadPages] = queue.SimpleQueue()
        self._storage: WorkerStorage | None = None
        if host is not None and files is not None:
            self._storage = WorkerStorage(files, host, rank, channel.send)

    def run(self) -> None:
        """Until the node says Shutdown or is gone. Raises what the reader has met."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        if self._host is not None:
            threading.Thread(target=self._copy, args=(self._host,), name="host tier", daemon=True).start()
        if self._storage is not None:
            self._storage.start()
        while (work := self._work.get()) is not None:
            match work:
                case Payload():
                    self._engine.add(work)
                case ForgetRequests(requests):
                    self._engine.forget(requests)
                case LaunchBatch():
                    self._channel.send(self._launch(work))
                case wire.BatchLaunched(dp_rank):
                    self._lockstep.launched(dp_rank)
            while self._lockstep.is_awaited and self._work.empty():  # with a batch of its own it would come anyway
                self._engine.accompany()
        if self._reader_error is not None:
            raise self._reader_error

    def _launch(self, command: LaunchBatch) -> BatchReturned | BatchFailed:
        try:
            return BatchReturned(self._engine.run(command.plan))
        except WorkerGone:
            raise
        except Exception as error:  # whatever torch raises: this batch's requests end, the others go on
            number, why = command.plan.iteration, f"{type(error).__name__}: {error}"
            logger.exception("batch %d failed", number)
            if self._rank.num_shards > 1 or self._lockstep.num_ranks > 1:  # the others wait in this batch, or will
                raise ServerFailure(f"the {self._rank.name} process failed in batch {number}: {why}") from error
            return BatchFailed(command.plan.id, Cause.ENGINE_FAILED, why)

    def _copy(self, host: HostMemory) -> None:
        try:
            while True:
                copied = carry_out(self._copies.get(), host, self._page, self._rank.shard)
                if copied.detail:
                    logger.warning("%s", copied.detail)
                self._channel.send(copied)
        except ChannelClosed as error:
            logger.debug("the node is gone: %s", error)

    def _page(self, page: PageId) -> memoryview:
        kv = self._engine.kv
        assert kv.buffer is not None, "host memory is below the memory of a CPU"
        return kv.buffer[page * kv.page_bytes : (page + 1) * kv.page_bytes]

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    if isinstance(message, wire.Shutdown):
                        return
                    self._take(message)
        except ChannelClosed as error:
            logger.debug("the node is gone: %s", error)
        except MalformedFrame as error:
            self._reader_error = ServerFailure(f"its node says something that is no message: {error}")
        except Exception as error:
            self._reader_error = error
        finally:
            self._work.put(None)

    def _take(self, message: wire.NodeToWorker) -> None:
        match message:
            case Payload():
                if message.sampling.grammar:
                    self._engine.prepare(message)
                self._work.put(message)
            case ForgetRequests() | LaunchBatch() | wire.BatchLaunched():
                self._work.put(message)
            case wire.Reach(peer, cut, shards):
                self._data_plane.connect(peer, cut, [PeerAddress(end.host, end.port, end.unix) for end in shards])
            case wire.Disconnect(peer):
                self._data_plane.disconnect(peer)
            case PublishPages():
                self._data_plane.publish(message)
            case RevokePages():
                self._data_plane.revoke(message)
            case PullPages():
                self._data_plane.pull(message)
            case CancelPull():
                self._data_plane.cancel(message)
            case FreeWindows(pages):  # at once: what writes there next may be on its way already
                self._engine.kv.free_windows(pages)
            case StorePages() | LoadPages():
                self._copies.put(message)
            case LookUpPages() | FetchPages() | WritePages():
                assert self._storage is not None, "a node without storage asks for something of it"
                self._storage.begin(message)
            case wire.Query(id):
                self._channel.send(wire.Answer(id, msgspec.json.encode(self._numbers())))
            case wire.Ping():
                self._channel.send(wire.Echo())
            case wire.Shutdown():
                pass

    def _numbers(self) -> wire.WorkerNumbers:
        connections: dict[str, int] = {}
        held: dict[str, int] = {}
        if self._transfer is not None:
            held, connections = msgspec.structs.asdict(self._transfer.held()), self._transfer.connections()
        if self._storage is not None:
            held |= self._storage.numbers()
        return wire.WorkerNumbers(self._rank.number_in_stage, self._rank.pp_rank, self._dp_rank, held, connections)

    @property
    def _data_plane(self) -> KvTransfer:
        assert self._transfer is not None, "a unified node moves no KV"
        return self._transfer
