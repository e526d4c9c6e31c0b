"""The owner's side: a server from which peers read granted pages. It never reads anything into a page.

`Listener` accepts, and hands on members of the cluster; here each of them has a thread that answers its Reads. There
are at most `max_links`, and one reader may have a quarter of them, so that one with many connections, or a frozen one,
leaves room for the others. When there is no room, the connection that has been idle for longest is cut: of the reader
itself when it has its share already, else of anybody. It has to have been idle for `IDLE_GRACE_S` since its last Read,
and one that was just welcomed is not idle: it was made because there is something to ask, and has one timeout to do so.
If there is none the newcomer is told BUSY, and asks again.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.events import Event, PageRead, ReadsDrained
from tandem.core.values import Incarnation, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.grants import Grants
from tandem.transfer.handshake import OwnerHandshake
from tandem.transfer.listener import Listener
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import Read, Status

log = logging.getLogger(__name__)
IDLE_GRACE_S = 0.1  # readers ask again at once while they pull; breaking an idle connection costs them a handshake
SHARE = 4  # one reader may have this part of the connections


@dataclass(slots=True, eq=False)
class ReaderLink:
    """The connection of a member. Lives in its own thread, which alone closes the link."""

    link: socket.socket
    reader: bytes  # digest of its incarnation
    idle_since: float | None = None  # None: at work, or has not asked for anything yet
    is_cut: bool = False  # its place is another one's already


class PageOwner:
    def __init__(
        self,
        pages: Pages,
        grants: Grants,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        shard: ShardId,
        host: str,
        unix_dir: str | None,
        report: Callable[[Event], None],
        io_timeout_s: float,
        max_links: int,
    ) -> None:
        self._pages, self._grants = pages, grants
        self._shard = shard
        self._incarnation, self._secret = protocol.incarnation_digest(incarnation), secret
        self._report = report
        self._io_timeout_s, self._max_links = io_timeout_s, max_links
        self._frame_pages = min(max(1, protocol.FRAME_BYTES // pages.page_bytes), protocol.MAX_FRAME_PAGES)
        self._lock = threading.Lock()
        self._links: dict[ReaderLink, threading.Thread] = {}
        self._is_closed = False
        self._listener = Listener(
            host=host, unix_dir=unix_dir, handshake=self._handshake, admit=self._admit, io_timeout_s=io_timeout_s
        )
        self.host, self.port, self.unix = self._listener.host, self._listener.port, self._listener.unix

    def close(self, *, grace_s: float) -> None:
        """Stop listening, cut all readers, and wait for their threads for `grace_s` at most."""
        give_up_at = time.monotonic() + grace_s
        with self._lock:
            self._is_closed = True
        self._listener.close(grace_s=grace_s)
        with self._lock:
            threads = list(self._links.values())
            for known in self._links:
                links.cut(known.link)
        for thread in threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _handshake(self) -> OwnerHandshake:
        return OwnerHandshake(self._secret, incarnation=self._incarnation, page_bytes=self._pages.page_bytes)

    def _admit(self, link: socket.socket, reader: bytes, welcome: bytes) -> bool:
        """Give the connection a thread, if there is a place or one can be made."""
        new = ReaderLink(link, reader)
        with self._lock:
            if self._is_closed or not self._has_place(reader):
                return False
            thread = threading.Thread(target=self._serve, args=(new, welcome), name="kv-owner", daemon=True)
            self._links[new] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                log.warning("no thread for a reader: %s", error)
                del self._links[new]
                return False
            return True

    def _has_place(self, reader: bytes) -> bool:
        """Whether `reader` may have one more connection. Cuts one that is idle, where that makes the place."""
        if len(self._links) >= 2 * self._max_links:  # those that were cut have not left yet
            return False
        places = [known for known in self._links if not known.is_cut]
        own = [known for known in places if known.reader == reader]
        if len(own) >= max(1, self._max_links // SHARE):
            return self._cut_idle(own)
        return len(places) < self._max_links or self._cut_idle(places)

    def _cut_idle(self, places: list[ReaderLink]) -> bool:
        """Cut the one that has been idle for longest, if it has been for long enough."""
        idle = [(since, known) for known in places if (since := known.idle_since) is not None]
        since, oldest = min(idle, key=lambda pair: pair[0], default=(0.0, None))
        if oldest is None or time.monotonic() - since < IDLE_GRACE_S:
            return False
        oldest.is_cut = True
        links.cut(oldest.link)
        return True

    def _serve(self, known: ReaderLink, welcome: bytes) -> None:
        link, timeout_s = known.link, self._io_timeout_s
        try:
            links.send(link, [welcome], timeout_s=timeout_s)
            is_good = self._answer(link, self._receive_read(link))
            while is_good:
                known.idle_since = time.monotonic()
                _wait_readable(link)
                known.idle_since = None
                is_good = self._answer(link, self._receive_read(link))
        except (links.LinkBroken, links.LinkFrozen, protocol.Malformed) as reason:
            log.debug("reader gone: %s", reason)
        except Exception:
            log.exception("a reader's connection ended by an error of ours")
        finally:
            with self._lock:
                del self._links[known]  # before the link is closed: `cut` must never meet a closed descriptor
            link.close()

    def _receive_read(self, link: socket.socket) -> tuple[Read, bytearray]:
        read = protocol.unpack_read(links.receive(link, protocol.READ_BYTES, timeout_s=self._io_timeout_s))
        return read, links.receive(link, read.count * protocol.NAME_BYTES, timeout_s=self._io_timeout_s)

    def _answer(self, link: socket.socket, asked: tuple[Read, bytearray]) -> bool:
        """Send the frames of one Read. Returns whether the connection may be used again."""
        read, body = asked
        pages, generations = protocol.unpack_names(body, read.count)
        for start in range(0, read.count, self._frame_pages):
            span = slice(start, start + self._frame_pages)
            status = self._send_frame(link, read, pages[span], generations[span])
            if status is not Status.OK:
                links.send(link, [protocol.pack_frame(status, 0)], timeout_s=self._io_timeout_s)
                return False
        return True

    def _send_frame(
        self, link: socket.socket, read: Read, pages: tuple[int, ...], generations: tuple[int, ...]
    ) -> Status:
        grant = self._grants.lease(read.room, secret=read.secret, pages=pages, generations=generations, reader=link)
        if isinstance(grant, Status):
            return grant
        try:
            header = protocol.pack_frame(Status.OK, len(pages))
            links.send(link, [header, *self._pages.runs(pages)], timeout_s=self._io_timeout_s)
        finally:
            if self._grants.end_lease(grant, link):
                self._report(ReadsDrained(grant.request, grant.attempt, self._shard))
        if self._grants.is_report_due(grant):
            self._report(PageRead(grant.request, self._shard))
        return Status.OK


def _wait_readable(link: socket.socket) -> None:
    """For as long as it takes: an idle connection costs nothing. Cutting the link ends it."""
    waiter = select.poll()
    waiter.register(link, select.POLLIN)
    waiter.poll()
