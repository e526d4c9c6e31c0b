"""The owner's side: a server from which peers read granted pages. It never reads anything into a page.

`DataListener` accepts, and hands on members of the cluster; here each of them has a thread that answers its Reads. Who
is admitted, and what may be read, `Lender` decides; it is called under one lock, and never while bytes move.

To a reader on this host that wants it the memory itself is given, for reading only, and it copies what it was lent.
Its thread here waits meanwhile for the word that the copy has ended, and nothing that happens here, other than the
timeout, cuts this short: the lease ends when nothing copies any more. The same goes for a reader that reads the memory
by NIXL (decision 034), for which it is registered when the first one comes that must.
"""

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.commands import PublishPages
from tandem.core.kv_parts import KvShard
from tandem.core.values import Incarnation, RequestId
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.handshake import OwnerHandshake
from tandem.transfer.lender import Grant, Lender
from tandem.transfer.listener import DataListener
from tandem.transfer.nixl_access import RegisteredMemory, Unavailable
from tandem.transfer.outbox import Outbox
from tandem.transfer.pages import PageAccess
from tandem.transfer.port import Backend, Held
from tandem.transfer.protocol import GRANT_SECRET_BYTES, Read, Registered, Status

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReaderLink:
    """The connection of a member. Lives in its own thread, which alone closes the link."""

    link: socket.socket
    reader: bytes  # digest of the worker
    has_memory: bool = False  # it copies, and gets no bytes
    way: str = ""  # how pages travel, in a word
    is_copying: bool = False  # and has not said yet that it has


class PageOwner:
    def __init__(
        self,
        pages: PageAccess,
        kv: KvShard,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        host: str,
        unix_dir: str | None,
        outbox: Outbox,
        io_timeout_s: float,
        max_links: int,
        memory: int | None,
        backend: Backend,
        register: Callable[[], RegisteredMemory] | None,
    ) -> None:
        """memory: descriptor of the sealed memfd that the pages are in; None: they are in no such thing

        register: the pages with NIXL, which takes a second and may raise Unavailable; None: they must not be
        """
        self._memory = memory if backend in (Backend.AUTO, Backend.SHM) else None
        self._memory_only, self._nixl_only = backend is Backend.SHM, backend is Backend.NIXL
        self._has_nixl = register is not None and backend in (Backend.AUTO, Backend.NIXL)
        self._register = register
        self._nixl: RegisteredMemory | None = None  # once somebody has needed it
        self._nixl_failure: Unavailable | None = None
        self._nixl_lock, self._is_registering = threading.Lock(), False
        self._pages, self._kv, self._outbox = pages, kv, outbox
        self._incarnation, self._secret = protocol.incarnation_digest(incarnation), secret
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()
        self._lender: Lender[ReaderLink] = Lender(
            kv.shard,
            draw_secret=lambda command: secrets.token_bytes(GRANT_SECRET_BYTES),
            report=outbox.put,
            cut=_cut,
            max_links=max_links,
        )
        self._links: dict[ReaderLink, threading.Thread] = {}
        self._is_closed = False
        self._listener = DataListener(
            host=host, unix_dir=unix_dir, handshake=self._handshake, admit=self._admit, io_timeout_s=io_timeout_s
        )
        self.host, self.port, self.unix = self._listener.host, self._listener.port, self._listener.unix

    def publish(self, command: PublishPages) -> Grant[ReaderLink]:
        with self._lock:
            return self._lender.publish(command)

    def digested(self, grant: Grant[ReaderLink], command: PublishPages, digests: tuple[bytes, ...]) -> None:
        with self._lock:
            self._lender.digested(grant, command, digests)

    def unreadable(self, grant: Grant[ReaderLink], command: PublishPages, why: str) -> None:
        with self._lock:
            self._lender.unreadable(grant, command, why)

    def revoke(self, request: RequestId, attempt: int) -> None:
        with self._lock:
            self._lender.revoke(request, attempt)

    def held(self) -> Held:
        with self._lock:
            return self._lender.held()

    def connections(self) -> list[str]:
        """How pages travel on each."""
        with self._lock:
            return [known.way for known in self._links]

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
        with self._nixl_lock:
            if self._nixl is not None:
                self._nixl.close()

    def register(self) -> None:
        """With NIXL, unless it is done: takes a second, and more where much else runs. Raises Unavailable."""
        with self._nixl_lock:
            if self._is_closed:
                raise Unavailable("the data plane is closed")
            if self._nixl is None:
                assert self._register is not None, "memory that is given back in parts is not registered"
                self._nixl = self._register()

    def _registered(self) -> Registered | None:
        """None: that is begun. Raises Unavailable."""
        if self._nixl is not None:
            return self._nixl.registered
        with self._lock:
            if self._nixl_failure is not None:
                raise self._nixl_failure
            if not self._is_registering:
                threading.Thread(target=self._register_once, name="kv-nixl", daemon=True).start()
                self._is_registering = True  # not before: where the system has no thread left it is tried again
        return None

    def _register_once(self) -> None:
        try:
            self.register()
        except Unavailable as error:
            self._nixl_failure = error
            log.warning("readers that need NIXL are refused: %s", error)

    def _handshake(self, link: socket.socket) -> OwnerHandshake:
        return OwnerHandshake(
            self._secret,
            incarnation=self._incarnation,
            page_bytes=self._pages.page_bytes,
            has_memory=self._memory is not None and link.family == socket.AF_UNIX,
            memory_only=self._memory_only,
            has_nixl=self._has_nixl,
            nixl_only=self._nixl_only,
        )

    def _admit(self, link: socket.socket, reader: bytes, handshake: OwnerHandshake) -> bool:
        """Give the connection a thread, if there is a place or one can be made."""
        new = ReaderLink(link, reader, has_memory=handshake.brings_memory or handshake.brings_nixl)
        new.way = "nixl" if handshake.brings_nixl else "shm" if handshake.brings_memory else links.way(link)
        with self._lock:
            if self._is_closed or not self._lender.admit(new, reader, time.monotonic_ns()):
                return False
            thread = threading.Thread(target=self._serve, args=(new, handshake), name="kv-owner", daemon=True)
            self._links[new] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                log.warning("no thread for a reader: %s", error)
                self._forget(new)
                return False
            return True

    def _forget(self, known: ReaderLink) -> None:
        del self._links[known]
        self._lender.left(known)

    def _serve(self, known: ReaderLink, handshake: OwnerHandshake) -> None:
        link = known.link
        try:
            is_good = self._welcome(known, handshake) and self._answer(known, self._receive_read(link))
            while is_good:
                with self._lock:
                    self._lender.idle(known, time.monotonic_ns())
                _wait_readable(link)
                with self._lock:
                    self._lender.asked(known)
                is_good = self._answer(known, self._receive_read(link))
        except (links.LinkBroken, links.LinkFrozen, protocol.Malformed) as reason:
            log.debug("reader gone: %s", reason)
        except Exception:
            log.exception("a reader's connection ended by an error of ours")
        finally:
            with self._lock:
                self._forget(known)  # before the link is closed: `cut` must never meet a closed descriptor
            link.close()

    def _welcome(self, known: ReaderLink, handshake: OwnerHandshake) -> bool:
        """Returns whether the reader is welcome: what it needs may not be there yet, or turn out not to be there."""
        status, follows = Status.OK, b""
        if handshake.brings_nixl:
            try:
                registered = self._registered()
                if registered is None:
                    status = Status.BUSY
                else:
                    follows = handshake.registered(registered)
            except Unavailable:
                status = Status.OTHER_BACKEND
        welcome = handshake.welcome(status)
        if handshake.brings_memory and self._memory is not None:
            links.send_with_descriptor(known.link, welcome, self._memory, timeout_s=self._io_timeout_s)
        else:
            links.send(known.link, [welcome + follows], timeout_s=self._io_timeout_s)
        return status is Status.OK

    def _receive_read(self, link: socket.socket) -> tuple[Read, bytearray]:
        header = links.receive(link, protocol.READ_BYTES, timeout_s=self._io_timeout_s)
        read = protocol.unpack_read(header, self._kv)
        return read, links.receive(link, read.count * protocol.NAME_BYTES, timeout_s=self._io_timeout_s)

    def _answer(self, known: ReaderLink, asked: tuple[Read, bytearray]) -> bool:
        """Send the frames of one Read. Returns whether the connection may be used again."""
        read, body = asked
        pages, generations = protocol.unpack_names(body, read.count)
        frame_pages = protocol.pages_of_a_frame(read.runs, is_copied=known.has_memory)
        answer = self._lend_frame if known.has_memory else self._send_frame
        for start in range(0, read.count, frame_pages):
            span = slice(start, start + frame_pages)
            status = answer(known, read, pages[span], generations[span])
            if status is not Status.OK:
                links.send(known.link, [protocol.pack_frame(status, 0)], timeout_s=self._io_timeout_s)
                return False
        return True

    def _send_frame(
        self, known: ReaderLink, read: Read, pages: tuple[int, ...], generations: tuple[int, ...]
    ) -> Status:
        with self._lock:
            grant = self._lender.lease(known, read.room, secret=read.secret, pages=pages, generations=generations)
        if isinstance(grant, Status):
            return grant
        is_sent = False
        try:
            header = protocol.pack_frame(Status.OK, len(pages))
            with self._pages.reading(pages, read.runs) as there:
                pieces = there.pages.pieces(there.numbers, there.runs)
                links.send(known.link, [header, *pieces], timeout_s=self._io_timeout_s)
            is_sent = True
        finally:
            with self._lock:
                self._lender.end_lease(grant, known, time.monotonic_ns(), is_sent=is_sent)
            self._outbox.flush()
        return Status.OK

    def _lend_frame(
        self, known: ReaderLink, read: Read, pages: tuple[int, ...], generations: tuple[int, ...]
    ) -> Status:
        """Let the reader copy these pages, wait until it has, and say whether it might all the while."""
        with self._lock:
            grant = self._lender.lease(known, read.room, secret=read.secret, pages=pages, generations=generations)
            known.is_copying = isinstance(grant, Grant)
        if isinstance(grant, Status):
            return grant
        frame = protocol.pack_frame(Status.OK, len(pages))
        is_copied = was_lent = False
        try:
            links.send(known.link, [frame], timeout_s=self._io_timeout_s)
            word = links.receive(known.link, protocol.COPIED_BYTES, timeout_s=self._io_timeout_s)
            protocol.check_copied(word, count=len(pages))
            is_copied = True
        finally:
            with self._lock:
                known.is_copying = False
                was_lent = self._lender.end_lease(grant, known, time.monotonic_ns(), is_sent=is_copied)
            self._outbox.flush()
        if was_lent:
            links.send(known.link, [frame], timeout_s=self._io_timeout_s)
        return Status.OK if was_lent else Status.NOT_GRANTED


def _cut(known: ReaderLink) -> None:
    """Who copies is answered when it has: until then its thread must not take a connection that was cut here for a
    reader that has gone."""
    if not known.is_copying:
        links.cut(known.link)


def _wait_readable(link: socket.socket) -> None:
    """For as long as it takes: an idle connection costs nothing. Cutting the link ends it."""
    waiter = select.poll()
    waiter.register(link, select.POLLIN)
    waiter.poll()
