"""The owner's side: a server from which peers read granted pages. It never reads anything into a page.

One thread accepts, one thread per connection answers; there are at most `max_links` of them. When all are taken, the
one that has been silent for longest makes room; when none is silent the newcomer is told BUSY, or nothing at all when
as many have to be told already.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.events import Event, PageRead, ReadsDrained
from tandem.core.values import Incarnation, ShardId
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.grants import Grants
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import Status

log = logging.getLogger(__name__)
_ACCEPT_PAUSE_S = 0.05  # after an accept that failed, for lack of descriptors


@dataclass(slots=True, eq=False)
class Reader:
    """One accepted connection. Lives in its own thread, which alone closes the link."""

    link: socket.socket
    is_refused: bool = False  # all others are at work: this one will be told so
    silent_since: float | None = field(default_factory=time.monotonic)  # None: at work, or about to end


class PageOwner:
    def __init__(
        self,
        pages: Pages,
        grants: Grants,
        *,
        incarnation: Incarnation,
        shard: ShardId,
        host: str,
        unix_dir: str | None,
        report: Callable[[Event], None],
        io_timeout_s: float,
        max_links: int,
    ) -> None:
        self._pages, self._grants = pages, grants
        self._shard = shard
        self._incarnation = protocol.incarnation_digest(incarnation)
        self._report = report
        self._io_timeout_s, self._max_links = io_timeout_s, max_links
        self._frame_pages = min(max(1, protocol.FRAME_BYTES // pages.page_bytes), protocol.MAX_FRAME_PAGES)
        self._lock = threading.Lock()
        self._readers: dict[Reader, threading.Thread] = {}
        self._is_closed = False
        self._tcp = links.listen_tcp(host)
        self.host, self.port = host, self._tcp.getsockname()[1]
        self.unix = _unix_path(unix_dir)
        self._unix = links.listen_unix(self.unix)
        self._wake, self._waker = socket.socketpair()
        self._accepter = threading.Thread(target=self._accept_loop, name="kv-accept", daemon=True)
        self._accepter.start()

    def close(self, *, grace_s: float) -> None:
        """Stop listening, cut all readers, and wait for their threads for `grace_s` at most."""
        give_up_at = time.monotonic() + grace_s
        with self._lock:
            self._is_closed = True
        self._waker.close()
        self._accepter.join(grace_s)
        with self._lock:
            threads = list(self._readers.values())
            for reader in self._readers:
                links.cut(reader.link)
        for thread in threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _accept_loop(self) -> None:
        with self._tcp, self._unix, self._wake, select.epoll() as ready:
            listeners = {listener.fileno(): listener for listener in (self._tcp, self._unix)}
            for descriptor in (*listeners, self._wake.fileno()):
                ready.register(descriptor, select.EPOLLIN)
            while not self._is_closed:
                for descriptor, _ in ready.poll():
                    if descriptor in listeners:
                        self._accept(listeners[descriptor])
        if not self.unix.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.unix)

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            time.sleep(_ACCEPT_PAUSE_S)
            return
        try:
            if link.family == socket.AF_UNIX and not links.is_same_user(link):
                link.close()
                return
            links.prepare(link, timeout_s=self._io_timeout_s)
        except OSError:  # it left again
            link.close()
            return
        if not self._admit(Reader(link)):
            link.close()

    def _admit(self, reader: Reader) -> bool:
        with self._lock:
            if self._is_closed or len(self._readers) >= 2 * self._max_links:
                return False
            if len(self._readers) >= self._max_links and not self._make_room():
                reader.is_refused, reader.silent_since = True, None
            thread = threading.Thread(target=self._answer_loop, args=(reader,), name="kv-owner", daemon=True)
            self._readers[reader] = thread
            thread.start()
            return True

    def _make_room(self) -> bool:
        """Cut the reader that has been silent for longest, if any. It counts until its thread has ended."""
        silent = [r for r in self._readers if r.silent_since is not None]
        if not silent:
            return False
        oldest = min(silent, key=lambda r: r.silent_since or 0.0)
        oldest.silent_since = None  # not to be chosen twice
        links.cut(oldest.link)
        return True

    def _answer_loop(self, reader: Reader) -> None:
        try:
            is_welcome = self._welcome(reader.link, is_refused=reader.is_refused)
            while is_welcome and self._answer(reader):
                pass
        except (links.LinkBroken, links.LinkFrozen, protocol.Malformed) as reason:
            log.debug("reader gone: %s", reason)
        except Exception:
            log.exception("a reader's connection ended by an error of ours")
        finally:
            with self._lock:
                del self._readers[reader]  # before the link is closed: `cut` must never meet a closed descriptor
            reader.link.close()

    def _welcome(self, link: socket.socket, *, is_refused: bool) -> bool:
        hello = protocol.unpack_hello(links.receive(link, protocol.HELLO_BYTES, timeout_s=self._io_timeout_s))
        if hello.version != protocol.VERSION:
            status = Status.WRONG_VERSION
        elif hello.incarnation != self._incarnation:
            status = Status.OTHER_INCARNATION
        elif hello.page_bytes != self._pages.page_bytes:
            status = Status.WRONG_PAGE_BYTES
        else:
            status = Status.BUSY if is_refused else Status.OK
        links.send(link, [protocol.pack_welcome(status)], timeout_s=self._io_timeout_s)
        return status is Status.OK

    def _answer(self, reader: Reader) -> bool:
        """Wait for one Read and send its frames. Returns whether the connection may be used again."""
        link, timeout_s = reader.link, self._io_timeout_s
        reader.silent_since = time.monotonic()
        _wait_readable(link)
        reader.silent_since = None
        read = protocol.unpack_read(links.receive(link, protocol.READ_BYTES, timeout_s=timeout_s))
        body = links.receive(link, read.count * protocol.NAME_BYTES, timeout_s=timeout_s)
        pages, generations = protocol.unpack_names(body, read.count)
        if not self._pages.has_all(pages):
            raise protocol.Malformed("a page that is not there")
        for start in range(0, read.count, self._frame_pages):
            span = slice(start, start + self._frame_pages)
            status = self._send_frame(link, read.room, pages[span], generations[span])
            if status is not Status.OK:
                links.send(link, [protocol.pack_frame(status, 0)], timeout_s=timeout_s)
                return False
        return True

    def _send_frame(
        self, link: socket.socket, room: int, pages: tuple[int, ...], generations: tuple[int, ...]
    ) -> Status:
        grant = self._grants.lease(room, pages=pages, generations=generations, reader=link)
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


def _unix_path(unix_dir: str | None) -> str:
    """A name nobody else has: abstract, or a file in `unix_dir`, which only this user may enter if it is made here."""
    name = f"tandem-kv-{os.getpid()}-{secrets.token_hex(8)}"
    if unix_dir is None:
        return "@" + name
    os.makedirs(unix_dir, mode=0o700, exist_ok=True)
    return os.path.join(unix_dir, name)


def _wait_readable(link: socket.socket) -> None:
    """For as long as it takes: an idle connection costs nothing. Cutting the link ends it."""
    waiter = select.poll()
    waiter.register(link, select.POLLIN)
    waiter.poll()
