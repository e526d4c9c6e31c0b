"""The default data plane: two-sided pull over sockets, AF_UNIX on one host, TCP between hosts (see `port.py`).

Two-sided means that each side touches only its own memory: the owner sends from its pages while it lends them, the
reader receives into its own. A byte that is late meets a closed socket, never a reused page. The digests are made and
the answers to commands are said by one thread, the desk, in the order of the commands.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event, PagesDigested, ReadsDrained
from tandem.core.values import Incarnation, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer.grants import Grants
from tandem.transfer.owner import PageOwner
from tandem.transfer.pages import Pages, pack_digests
from tandem.transfer.port import Held
from tandem.transfer.reader import PageReader

log = logging.getLogger(__name__)
_CLOSE_GRACE_S = 2.0


class SockTransfer:
    """One shard's data plane over one KV allocation. See `KvTransfer` for what the calls promise."""

    def __init__(
        self,
        buffer: memoryview,
        page_bytes: int,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        shard: ShardId,
        host: str,
        report: Callable[[Event], None],
        unix_dir: str | None = None,
        io_timeout_s: float = 5.0,
        max_transfers: int = 4,
        max_links: int = 64,
    ) -> None:
        """buffer: num_pages * page_bytes writable bytes, the caller's, valid until `close` has returned

        incarnation: of the server this shard belongs to; a reader that means another life is refused
        secret: what both ends of every connection have to prove
        host: TCP address to listen on; the port is free choice
        report: called from several threads, with events; must be thread-safe
        unix_dir: folder of the unix socket (made with mode 0700 if missing); None: an abstract socket, no file
        io_timeout_s: a peer that moves no byte for so long is lost
        max_transfers: attempts that are pulled at the same time, each by one thread
        max_links: connections of readers, each with one thread; one reader may have a quarter of them
        """
        self._pages = Pages(buffer, page_bytes)
        self._grants = Grants(clock=time.monotonic)
        self._shard = shard
        self._deliver = report
        self._is_closed = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._owner = PageOwner(
            self._pages,
            self._grants,
            incarnation=incarnation,
            secret=secret,
            shard=shard,
            host=host,
            unix_dir=unix_dir,
            report=self._report,
            io_timeout_s=io_timeout_s,
            max_links=max_links,
        )
        self._reader = PageReader(
            self._pages,
            incarnation=incarnation,
            secret=secret,
            shard=shard,
            report=self._report,
            report_later=self._report_later,
            io_timeout_s=io_timeout_s,
            max_transfers=max_transfers,
        )
        self.host, self.port, self.unix = self._owner.host, self._owner.port, self._owner.unix
        self._desk = threading.Thread(target=self._desk_loop, name="kv-desk", daemon=True)
        self._desk.start()

    def connect(self, peer: Incarnation, host: str, port: int, unix: str) -> None:
        self._reader.learn(peer, host=host, port=port, unix=unix)

    def disconnect(self, peer: Incarnation) -> None:
        self._reader.forget(peer)

    def publish(self, command: PublishPages) -> None:
        assert len(command.pages) == len(command.generations)
        assert self._pages.has_all(command.pages)
        self._tasks.put(partial(self._publish, command))

    def revoke(self, command: RevokePages) -> None:
        # Behind the publications that came before it, in the same queue: a grant cannot arise after its revocation.
        self._tasks.put(partial(self._revoke, command))

    def pull(self, command: PullPages) -> None:
        self._reader.pull(command)

    def cancel(self, command: CancelPull) -> None:
        self._reader.cancel(command)

    def held(self) -> Held:
        lent, pulled = self._grants.held(), self._reader.held()
        return Held(
            lent.live_rooms + pulled.live_rooms,
            lent.pinned_pages + pulled.pinned_pages,
            lent.open_transfers + pulled.open_transfers,
        )

    def close(self) -> None:
        """End all transfers and threads and remove the unix socket. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.close(grace_s=_CLOSE_GRACE_S)
        self._owner.close(grace_s=_CLOSE_GRACE_S)
        self._tasks.put(None)
        self._desk.join(_CLOSE_GRACE_S)

    def _publish(self, command: PublishPages) -> None:
        digests = self._pages.digests(
            command.pages, room=command.room, sources=command.pages, generations=command.generations
        )
        secret = self._grants.extend(
            command.request,
            command.attempt,
            room=command.room,
            pages=command.pages,
            generations=command.generations,
        )
        packed = pack_digests(digests)
        self._report(PagesDigested(command.request, command.attempt, self._shard, command.first_page, packed, secret))

    def _revoke(self, command: RevokePages) -> None:
        if self._grants.revoke(command.request, command.attempt):
            self._report(ReadsDrained(command.request, command.attempt, self._shard))

    def _report(self, event: Event) -> None:
        if not self._is_closed:
            self._deliver(event)

    def _report_later(self, event: Event) -> None:
        self._tasks.put(partial(self._report, event))

    def _desk_loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("the desk of the KV transfer met an error of ours")
