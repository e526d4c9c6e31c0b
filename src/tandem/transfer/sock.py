"""The data plane: two-sided pull over sockets, AF_UNIX on one host, TCP between hosts (see `port.py`).

Two-sided means that each side touches only its own memory: the owner sends from its pages while it lends them, the
reader receives into its own; where pages are in memory of a device, from and into copies of them (`staged_pages.py`,
decision 036). A byte that is late meets a closed socket, never a reused page. The digests are made and the answers to
commands are given by one thread, the digest thread, in the order of the commands.

On one host the reader may be lent the owner's memory instead, mapped read-only (`shared_memory.py`, decision 032). Then
it asks, as before, and copies while the owner waits; everything but who moves the bytes is the same. So it is where
NIXL reads the memory, on whatever network it knows (`nixl_memory.py`, decision 034).
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event
from tandem.core.kv_parts import KvShard
from tandem.core.values import Cut, Incarnation
from tandem.membership import ClusterSecret
from tandem.transfer import nixl_access
from tandem.transfer.digests import pack_digests
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.lender import Grant
from tandem.transfer.outbox import Outbox
from tandem.transfer.owner import PageOwner, ReaderLink
from tandem.transfer.pages import PageAccess
from tandem.transfer.port import Backend, Held
from tandem.transfer.puller import STALLED_JOBS
from tandem.transfer.reader import PageReader

log = logging.getLogger(__name__)
_CLOSE_GRACE_S = 2.0
IO_TIMEOUT_S, MAX_TRANSFERS, MAX_LINKS = 5.0, 4, 64
MOST_FRAMES = MAX_LINKS + STALLED_JOBS * MAX_TRANSFERS + 1  # that move at once: to readers, to us, and to be digested


class SockTransfer:
    """One worker's data plane over the pages of its KV. See `KvTransfer` for what the calls promise."""

    def __init__(
        self,
        pages: PageAccess,
        kv: KvShard,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        host: str,
        report: Callable[[Event], None],
        unix_dir: str | None = None,
        io_timeout_s: float = IO_TIMEOUT_S,
        max_transfers: int = MAX_TRANSFERS,
        max_links: int = MAX_LINKS,
        memory: int | None = None,
        gives_back: bool = False,
        backend: Backend = Backend.AUTO,
    ) -> None:
        """pages: of kv.page_bytes each, the caller's, valid until `close` has returned

        kv: what of every page lies here
        incarnation: of the server this shard belongs to; a reader that means another life is refused
        secret: what both ends of every connection have to prove
        host: TCP address to listen on; the port is free choice
        report: called from several threads, with events; must be thread-safe
        unix_dir: folder of the unix socket (made with mode 0700 if missing); None: an abstract socket, no file
        io_timeout_s: a peer that moves no byte for so long is lost
        max_transfers: pulls that move at the same time, each by one thread; an attempt has one for each of its sources
        max_links: connections of readers, each with one thread; one reader may have a quarter of them
        memory: a sealed memfd that the pages are a mapping of, the caller's, valid as long; None: bytes are sent to all
        gives_back: parts of the pages, which NIXL may have pinned: it cannot be read by NIXL
        """
        buffer = pages.buffer
        assert buffer is None or not buffer.readonly
        assert pages.page_bytes == kv.page_bytes
        register = partial(nixl_access.register, buffer, host=host) if buffer is not None and not gives_back else None
        self._pages = pages
        self._kv = kv
        self._is_closed = False
        self._outbox = Outbox(report)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._owner = PageOwner(
            self._pages,
            kv,
            incarnation=incarnation,
            secret=secret,
            host=host,
            unix_dir=unix_dir,
            outbox=self._outbox,
            io_timeout_s=io_timeout_s,
            max_links=max_links,
            memory=memory,
            backend=backend,
            register=register,
        )
        self._reader = PageReader(
            self._pages,
            kv,
            incarnation=incarnation,
            secret=secret,
            outbox=self._outbox,
            flush_later=self._flush_later,
            io_timeout_s=io_timeout_s,
            max_transfers=max_transfers,
            host=host,
            backend=backend,
        )
        self.host, self.port, self.unix = self._owner.host, self._owner.port, self._owner.unix
        self._digest_thread = threading.Thread(target=self._run_digests, name="kv-digests", daemon=True)
        self._digest_thread.start()

    def start_nixl(self, *, lends: bool) -> None:
        """Where NIXL is to be used from the start. lends: peers read here. Raises Unavailable."""
        if lends:
            self._owner.register()
        else:
            nixl_access.try_out()

    def connect(self, peer: Incarnation, cut: Cut, shards: Sequence[PeerAddress]) -> None:
        self._reader.learn(peer, cut, shards)

    def disconnect(self, peer: Incarnation) -> None:
        self._reader.forget(peer)

    def publish(self, command: PublishPages) -> None:
        assert len(command.pages) == len(command.generations)
        assert self._pages.has_all(command.pages)
        grant = self._owner.publish(command)
        self._tasks.put(lambda: self._digest(grant, command))

    def revoke(self, command: RevokePages) -> None:
        self._owner.revoke(command.request, command.attempt)
        self._flush_later()

    def pull(self, command: PullPages) -> None:
        self._reader.pull(command)

    def cancel(self, command: CancelPull) -> None:
        self._reader.cancel(command)

    def held(self) -> Held:
        lent, pulled = self._owner.held(), self._reader.held()
        return Held(
            lent.live_rooms + pulled.live_rooms,
            lent.pinned_pages + pulled.pinned_pages,
            lent.open_transfers + pulled.open_transfers,
        )

    def connections(self) -> dict[str, int]:
        found = Counter({"shm": 0, "nixl": 0, "unix": 0, "tcp": 0})
        found.update(self._owner.connections() + self._reader.connections())
        return dict(found)

    def close(self) -> None:
        """End all transfers and threads and remove the unix socket. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.close()
        self._reader.close(grace_s=_CLOSE_GRACE_S)
        self._owner.close(grace_s=_CLOSE_GRACE_S)
        self._tasks.put(None)
        self._digest_thread.join(_CLOSE_GRACE_S)

    def _digest(self, grant: Grant[ReaderLink], command: PublishPages) -> None:
        if grant.is_revoked:
            return
        pages, names = command.pages, {"sources": command.pages, "generations": command.generations}
        try:
            digests = [
                self._pages.digests(pages, runs, room=command.room, **names) for runs in self._kv.lends(command.reader)
            ]
        except Exception as error:  # of a device, which has no memory left, say
            log.exception("pages of request %d cannot be read", command.request)
            self._owner.unreadable(grant, command, repr(error))
            self._outbox.flush()
            return
        self._owner.digested(grant, command, tuple(map(pack_digests, digests)))
        self._outbox.flush()

    def _flush_later(self) -> None:
        self._tasks.put(self._outbox.flush)

    def _run_digests(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("the digest thread of the KV transfer met an error of ours")
