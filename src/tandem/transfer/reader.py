"""The reader's side: threads that pull pages of peers into own pages, and check them.

What is pulled next, on which connection, and what follows from what happens, `Puller` decides; it is called under one
lock, and never while bytes move. A thread takes one job after the other. There is always one thread that has none while
somebody waits for a job, so that it finds one as soon as there is one.

The owner proves that it is a member of the cluster before anything is asked (`handshake.py`). What it says afterwards
is checked like what anybody says: a frame that cannot be ends the attempt, and nothing else.

Where the owner gives its memory with its welcome, a frame is copied from there, or from where NIXL has read it to
(`copy_source.py`). Its pages count when the owner has said afterwards that they were lent all the while. Such a
connection is never closed in the middle of a copy, not even to cut it: its end tells the owner that nothing copies any
more.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from tandem.core.commands import CancelPull, PullPages
from tandem.core.kv_parts import KvShard
from tandem.core.values import SECOND, Cut, Incarnation
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import nixl_access, protocol
from tandem.transfer.copy_source import CopySource
from tandem.transfer.handshake import NotProven, ReaderHandshake
from tandem.transfer.jobs import Dial, JobFailure, Origin, PeerAddress, Receive, Trouble
from tandem.transfer.nixl_access import NixlSource
from tandem.transfer.outbox import Outbox
from tandem.transfer.pages import PageAccess, Reached
from tandem.transfer.port import Backend, Held
from tandem.transfer.protocol import Registered, Status
from tandem.transfer.puller import Puller, is_stalled
from tandem.transfer.shared_memory import PeerMemory, file_of

log = logging.getLogger(__name__)
MAX_RESTLESS = 8  # agents of NIXL whose reads have not ended: with more of them no further one is made
CACHED_BYTES = 1 << 20  # of pages that are still in a processor's cache when they have been copied
WAYS = {
    "shm": "through shared memory (shm)",
    "nixl": "read by NIXL (nixl)",
    "unix": "over a unix socket (sock)",
    "tcp": "over TCP (sock)",
}
WAY_OF = {Backend.SHM: "shm", Backend.NIXL: "nixl"}  # of these no other is taken
Job = Dial[socket.socket] | Receive[socket.socket]


class PullFailed(Exception):
    """The job of a thread has ended, and not because its link broke, froze, or carries nonsense."""

    def __init__(self, trouble: Trouble, detail: str = "", *, status: Status = Status.OK) -> None:
        super().__init__(detail)
        self.failure = JobFailure(trouble, detail, status)


@dataclass(frozen=True, slots=True)
class OwnerLink:
    """What is known of an open connection."""

    origin: Origin
    memory: CopySource | None  # of the owner, if it gives it

    def way(self, link: socket.socket) -> str:
        """How pages travel, in a word."""
        return links.way(link) if self.memory is None else self.memory.way


class PageReader:
    def __init__(
        self,
        pages: PageAccess,
        kv: KvShard,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        outbox: Outbox,
        flush_later: Callable[[], None],
        io_timeout_s: float,
        max_transfers: int,
        host: str,
        backend: Backend,
    ) -> None:
        """host: the server's address, which NIXL listens on

        `flush_later` flushes the outbox in another thread, and never blocks. RuntimeError: no thread is left."""
        self._backend, self._host = backend, host
        self._nixl: dict[Registered, NixlSource] = {}  # for new connections
        self._restless: list[NixlSource] = []  # not for new ones, and not ended yet
        self._nixl_lock = threading.Lock()  # held while one is made or ended; before the other one
        self._known: dict[socket.socket, OwnerLink] = {}
        self._mapped: WeakValueDictionary[tuple[int, int, int], PeerMemory] = WeakValueDictionary()  # by file
        self._pages, self._outbox, self._flush_later = pages, outbox, flush_later
        self._reader, self._secret = protocol.reader_digest(incarnation, kv.shard), secret
        self._io_timeout_s, self._max_transfers = io_timeout_s, max_transfers
        self._puller: Puller[socket.socket] = Puller(
            kv,
            report=outbox.put,
            cut=self._cut,
            close=self._close,
            timeout_ns=int(io_timeout_s * SECOND),
            max_jobs=max_transfers,
        )
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._num_free = 0  # threads that wait for a job
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        with self._lock:
            self._add_thread()  # which stays: where the system has no other left, pulls go on one after the other

    def learn(self, incarnation: Incarnation, cut: Cut, shards: Sequence[PeerAddress]) -> None:
        with self._lock:
            self._puller.learn(incarnation, cut, shards)

    def forget(self, incarnation: Incarnation) -> None:
        with self._lock:
            self._puller.forget(incarnation)
        self._end_nixl()

    def pull(self, command: PullPages) -> None:
        assert self._pages.has_all(command.destinations)
        with self._lock:
            self._puller.pull(command, time.monotonic_ns())
            self._call_for_help()
            if self._outbox.has_events:
                self._flush_later()

    def cancel(self, command: CancelPull) -> None:
        with self._lock:
            self._puller.cancel(command)
        self._flush_later()

    def held(self) -> Held:
        with self._lock:
            return self._puller.held()

    def connections(self) -> list[str]:
        """How pages travel on each."""
        with self._lock:
            return [known.way(link) for link, known in self._known.items()]

    def close(self, *, grace_s: float) -> None:
        """No byte lands after this. Threads that still dial end by themselves: they find nothing to arm."""
        give_up_at = time.monotonic() + grace_s
        with self._lock:
            self._is_closed = True
            self._puller.close()
            self._has_work.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        self._end_nixl()

    # -- threads

    def _call_for_help(self) -> None:
        """With the lock: wake a thread that has no job, or make one, if somebody waits for one."""
        if not self._puller.has_waiting or self._is_closed:
            return
        if self._num_free:
            self._has_work.notify()
            return
        try:
            self._add_thread()
        except RuntimeError as error:  # the system has no thread left
            log.warning("no other thread for a pull: %s", error)

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work_loop, name="kv-pull", daemon=True)
        thread.start()
        self._threads.append(thread)
        self._num_free += 1  # from now on, and until it has a job

    def _work_loop(self) -> None:
        while (job := self._take_job()) is not None:
            while job is not None:
                job = self._work(job)
                self._outbox.flush()
            self._end_nixl()
            if not self._stays():
                return

    def _take_job(self) -> Job | None:
        """The next one, however long it takes; None when all is closed. The thread, which was free, is not any more."""
        with self._lock:
            job = None
            while job is None and not self._is_closed:
                now = time.monotonic_ns()
                job = self._puller.next_job(now)
                if self._outbox.has_events:
                    self._flush_later()
                if job is None:
                    wake_at = self._puller.wake_at(now)
                    self._has_work.wait(None if wake_at is None else (wake_at - now) / SECOND)
            self._num_free -= 1
            self._call_for_help()
            return job

    def _stays(self) -> bool:
        """Whether this thread, which has ended a job, is free now; if not there are enough that are."""
        with self._lock:
            is_wanted = self._num_free < self._max_transfers
            if is_wanted:
                self._num_free += 1
            else:
                self._threads.remove(threading.current_thread())
                self._call_for_help()  # it will not ask what may begin now that its job has ended
            return is_wanted

    def _work(self, job: Job) -> Job | None:
        """Do it, say what came of it, and return what this thread is to do next with the same attempt."""
        try:
            if isinstance(job, Dial):
                link = self._dial(job)
                with self._lock:
                    following = self._puller.dialled(job, link, time.monotonic_ns())
                    self._call_for_help()  # a peer that answers may have another job
                    return following
            self._receive(job)
            with self._lock:
                return self._puller.received(job, time.monotonic_ns())
        except PullFailed as failed:
            failure = failed.failure
        except links.LinkBroken as error:
            failure = JobFailure(Trouble.BROKEN, str(error))
        except links.LinkFrozen as error:
            failure = JobFailure(Trouble.FROZEN, str(error))
        except protocol.Malformed as error:
            failure = JobFailure(Trouble.NONSENSE, str(error))
        except Exception as error:
            log.exception("a pull ended by an error of ours")
            failure = JobFailure(Trouble.OURS, repr(error))
        with self._lock:
            self._puller.failed(job, failure, time.monotonic_ns())
        return None

    # -- bytes

    def _receive(self, job: Receive[socket.socket]) -> None:
        """Read what the job names, in order. Raises when the rest of it cannot be had from this link."""
        memory = self._known[job.link].memory if job.link in self._known else None
        if job.was_idle and (_has_news(job.link) or (memory is not None and memory.is_spent)):
            raise links.LinkBroken("closed while it was idle")
        command, span = job.command, slice(job.start, job.stop)
        pages, generations = command.sources[span], command.generations[span]
        request = protocol.pack_read(command.room, job.offer.secret, job.tile.there, pages, generations)
        links.send(job.link, [request], timeout_s=self._io_timeout_s)
        while job.start < job.stop:
            count = self._receive_frame(job)
            with self._lock:
                now = time.monotonic_ns()
                was_stalled = is_stalled(job, now)
                is_wanted = self._puller.landed(job, count, now)
                if was_stalled:
                    self._call_for_help()  # a peer that moves again may have another job
            self._outbox.flush()
            if not is_wanted:
                raise links.LinkBroken("cancelled")

    def _receive_frame(self, job: Receive[socket.socket]) -> int:
        """Receive the frame that begins at page `start` of the job, check it, and return how many pages it has."""
        link = job.link
        header = bytearray(protocol.FRAME_HEADER_BYTES)
        links.receive_into(link, [memoryview(header)], timeout_s=self._io_timeout_s)
        frame = protocol.unpack_frame(header, count_max=job.stop - job.start)
        if frame.status is not Status.OK:
            raise PullFailed(Trouble.REFUSED, status=frame.status)
        span = slice(job.start, job.start + frame.count)
        memory = self._known[link].memory if link in self._known else None
        if memory is None:
            with self._pages.landing(job.command.destinations[span], job.tile.here) as here:
                links.receive_into(link, here.pages.pieces(here.numbers, here.runs), timeout_s=self._io_timeout_s)
                self._compare(job, span, here)
        else:
            self._copy_frame(job, memory, span)
            self._hear_that_it_was_lent(link, frame)
        return frame.count

    def _compare(self, job: Receive[socket.socket], span: slice, here: Reached) -> None:
        """What has come for the destinations, with what was offered."""
        command = job.command
        names = {"sources": command.sources[span], "generations": command.generations[span]}
        landed = here.pages.digests(here.numbers, here.runs, room=command.room, **names)
        if tuple(landed) != job.offer.digests[span]:
            raise PullFailed(Trouble.CORRUPT)

    def _copy_frame(self, job: Receive[socket.socket], memory: CopySource, span: slice) -> None:
        """A few pages at a time, whose digests are made while they are in the processor's cache. The last ones are
        compared after the word that all have been copied, while the owner answers."""
        command, tile = job.command, job.tile
        few = max(1, CACHED_BYTES // tile.here.num_bytes)
        with memory.reach(command.sources[span], tile.there, has_news=lambda: _has_news(job.link)) as reached:
            for start in range(span.start, span.stop, few):
                part = slice(start, min(start + few, span.stop))
                with self._pages.landing(command.destinations[part], tile.here) as here:
                    here.pages.copy_from(
                        reached.pages,
                        pages=here.numbers,
                        runs=here.runs,
                        sources=reached.numbers[part.start - span.start : part.stop - span.start],
                        source_runs=reached.runs,
                    )
                    if part.stop == span.stop:
                        copied = protocol.pack_copied(span.stop - span.start)
                        links.send(job.link, [copied], timeout_s=self._io_timeout_s)
                    self._compare(job, part, here)

    def _hear_that_it_was_lent(self, link: socket.socket, frame: protocol.Frame) -> None:
        header = links.receive(link, protocol.FRAME_HEADER_BYTES, timeout_s=self._io_timeout_s)
        answer = protocol.unpack_frame(header, count_max=frame.count)
        if answer.status is not Status.OK:
            raise PullFailed(Trouble.REFUSED, status=answer.status)
        if answer.count != frame.count:
            raise protocol.Malformed(f"{frame.count} pages were copied, and {answer.count} confirmed")

    def _dial(self, job: Dial[socket.socket]) -> socket.socket:
        """A new connection whose two ends have proved themselves. The handshake has one deadline for all of it."""
        give_up_at = time.monotonic() + self._io_timeout_s
        to = job.address
        link = links.dial(to.host, to.port, to.unix, timeout_s=self._io_timeout_s)
        try:
            status, memory = self._shake_hands(job, link, give_up_at)
            known = OwnerLink(job.origin, memory)
            if status is Status.OK and known.way(link) != WAY_OF.get(self._backend, known.way(link)):
                status = Status.OTHER_BACKEND
            if status is not Status.OK:
                raise PullFailed(Trouble.REFUSED, status=status)
        except BaseException:
            link.close()
            raise
        with self._lock:
            is_first = all(other.origin != job.origin for other in self._known.values())
            self._known[link] = known
        if is_first:
            log.info("KV of %s, worker %d: %s", job.origin.peer.name, job.origin.shard, WAYS[known.way(link)])
        return link

    def _shake_hands(
        self, job: Dial[socket.socket], link: socket.socket, give_up_at: float
    ) -> tuple[Status, CopySource | None]:
        """What the owner answers, and its memory, if it gives it."""
        handshake = ReaderHandshake(
            self._secret,
            peer=job.origin.peer,
            reader=self._reader,
            page_bytes=job.tile.page_bytes,
            wants_memory=self._backend in (Backend.AUTO, Backend.SHM) and link.family == socket.AF_UNIX,
            takes_nixl=self._backend in (Backend.AUTO, Backend.NIXL),
            needs_nixl=self._backend is Backend.NIXL,
        )

        def left_s() -> float:
            return give_up_at - time.monotonic()

        try:
            challenge = links.receive(link, protocol.CHALLENGE_MESSAGE_BYTES, timeout_s=left_s())
            links.send(link, [handshake.hello(challenge)], timeout_s=left_s())
            welcome, descriptor = links.receive_with_descriptor(link, protocol.WELCOME_BYTES, timeout_s=left_s())
            with _closed(descriptor):
                status = handshake.hear(welcome)
                if handshake.brings_memory:
                    return status, self._map(job, descriptor)
            if not handshake.brings_nixl:
                return status, None
            header = links.receive(link, protocol.REGISTERED_HEADER_BYTES, timeout_s=left_s())
            left = protocol.size_of_registered(header) - len(header)
            registered = handshake.hear_registered(header + links.receive(link, left, timeout_s=left_s()))
            return status, self._read_by_nixl(job, registered)
        except links.LinkBroken as error:
            raise PullFailed(Trouble.HANDSHAKE_BROKEN, str(error)) from error
        except NotProven as error:
            raise PullFailed(Trouble.NOT_PROVEN, str(error)) from error
        except nixl_access.Unavailable as error:
            raise PullFailed(Trouble.OURS, str(error)) from error

    def _map(self, job: Dial[socket.socket], descriptor: int | None) -> PeerMemory:
        """One mapping for all connections to a worker. Raises Malformed and OSError."""
        if descriptor is None:
            raise protocol.Malformed("no memory came with the welcome")
        key = (*file_of(descriptor), job.tile.page_bytes)
        with self._lock:
            memory = self._mapped.get(key)
            if memory is None:
                memory = self._mapped[key] = PeerMemory.map(descriptor, job.tile.page_bytes)
            return memory

    def _read_by_nixl(self, job: Dial[socket.socket], registered: Registered) -> NixlSource:
        """One for all connections to a worker, until something does not go well with it. Raises Malformed and
        Unavailable."""
        with self._nixl_lock:
            with self._lock:
                known = self._nixl.get(registered)
                if known is not None and not known.is_spent:
                    known.num_links += 1
                    return known
                if known is not None:
                    self._restless.append(self._nixl.pop(registered))
            self._end_restless()
            if len(self._restless) >= MAX_RESTLESS:
                raise nixl_access.Unavailable(f"reads of {len(self._restless)} agents of NIXL do not end")
            new = nixl_access.source(
                registered,
                page_bytes=job.tile.page_bytes,
                host=self._host,
                slot_bytes=max(protocol.COPIED_FRAME_BYTES, self._pages.page_bytes),
                timeout_s=self._io_timeout_s,
            )
            with self._lock:
                self._nixl[registered] = new
                new.num_links += 1
            return new

    def _end_nixl(self) -> None:
        """Of what no connection needs any more, whatever has no read under way. Whoever makes one meanwhile does it."""
        if not (self._nixl or self._restless) or not self._nixl_lock.acquire(blocking=False):
            return
        try:
            with self._lock:
                for registered, known in list(self._nixl.items()):
                    if known.num_links == 0 or known.is_spent:
                        self._restless.append(self._nixl.pop(registered))
            self._end_restless()
        finally:
            self._nixl_lock.release()

    def _end_restless(self) -> None:
        for known in list(self._restless):
            if known.may_end():
                self._restless.remove(known)
                known.end()

    # -- links: both are called by the puller, with the lock

    def _cut(self, link: socket.socket) -> None:
        if link in self._known and self._known[link].memory is not None:
            links.stop_hearing(link)
        else:
            links.cut(link)

    def _close(self, link: socket.socket) -> None:
        known = self._known.pop(link, None)
        for source in self._nixl.values():
            if known is not None and known.memory is source:
                source.num_links -= 1
        with contextlib.suppress(OSError):
            link.close()


@contextlib.contextmanager
def _closed(descriptor: int | None) -> Iterator[None]:
    """At the end."""
    try:
        yield
    finally:
        if descriptor is not None:
            links.close_descriptor(descriptor)


def _has_news(link: socket.socket) -> bool:
    """Whether an idle link was closed by the peer, or says what nobody asked for: useless either way."""
    waiter = select.poll()
    waiter.register(link, select.POLLIN)
    return bool(waiter.poll(0))
