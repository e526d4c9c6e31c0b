"""Where readers connect: accepts them, and hands on those that have proved that they are members of the cluster.

One thread, which never waits for one connection. Who has not proved anything yet costs a socket and a buffer of one
Hello, no thread and no place among the members: there are at most `MAX_UNPROVEN` such connections, each for one timeout
at most, and a newcomer takes the place of the oldest. Whoever has said something is heard before the next is accepted,
so that a reader that answers at once gets in, however many others are silent or speak byte by byte.
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

from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.handshake import OwnerHandshake
from tandem.transfer.protocol import Status

log = logging.getLogger(__name__)
MAX_UNPROVEN = 64
_ACCEPT_PAUSE_S = 0.05  # after an accept that failed, for lack of descriptors

Admit = Callable[[socket.socket, bytes, OwnerHandshake], bool]


@dataclass(slots=True, eq=False)
class Unproven:
    """A connection before its Hello is complete."""

    link: socket.socket
    handshake: OwnerHandshake
    give_up_at: float
    heard: bytearray = field(default_factory=bytearray)


class DataListener:
    def __init__(
        self,
        *,
        host: str,
        unix_dir: str | None,
        handshake: Callable[[socket.socket], OwnerHandshake],
        admit: Admit,
        io_timeout_s: float,
    ) -> None:
        """`admit` is given a connection, the digest of its reader and the handshake, whose Welcome is to be sent to it.
        It returns whether the connection is its own from now on; if not, there is no place."""
        self._handshake, self._admit = handshake, admit
        self._io_timeout_s = io_timeout_s
        self._unproven: dict[int, Unproven] = {}  # by descriptor, oldest first
        self._is_closed = False
        self._tcp = links.listen_tcp(host)
        self.host, self.port = host, self._tcp.getsockname()[1]
        self.unix = _unix_path(unix_dir)
        self._unix = links.listen_unix(self.unix)
        self._wake, self._waker = socket.socketpair()
        self._poll = select.epoll()
        self._thread = threading.Thread(target=self._loop, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self, *, grace_s: float) -> None:
        """Nobody is admitted after this, unless the thread hangs for longer than `grace_s`."""
        self._is_closed = True
        self._waker.close()
        self._thread.join(grace_s)

    def _loop(self) -> None:
        with self._tcp, self._unix, self._wake, self._poll:
            listeners = {listener.fileno(): listener for listener in (self._tcp, self._unix)}
            for descriptor in (*listeners, self._wake.fileno()):
                self._poll.register(descriptor, select.EPOLLIN)
            while not self._is_closed:
                ready = [descriptor for descriptor, _ in self._poll.poll(self._patience_s())]
                for descriptor in ready:
                    if descriptor in self._unproven:
                        self._hear(self._unproven[descriptor])
                self._drop_late()
                for descriptor in ready:
                    if descriptor in listeners:
                        self._accept(listeners[descriptor])
            for unproven in list(self._unproven.values()):
                self._forget(unproven).close()
        if not self.unix.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.unix)

    def _patience_s(self) -> float | None:
        """Until the oldest connection has had its time."""
        oldest = next(iter(self._unproven.values()), None)
        return None if oldest is None else max(0.0, oldest.give_up_at - time.monotonic())

    def _drop_late(self) -> None:
        while self._unproven and self._patience_s() == 0:
            self._forget(next(iter(self._unproven.values()))).close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            time.sleep(_ACCEPT_PAUSE_S)
            return
        try:
            self._greet(link)
        except OSError:  # it left again
            link.close()
        except Exception:
            log.exception("a connection was not accepted for an error of ours")
            link.close()

    def _greet(self, link: socket.socket) -> None:
        if link.family == socket.AF_UNIX and not links.is_same_user(link):
            link.close()
            return
        if len(self._unproven) >= MAX_UNPROVEN:
            self._forget(next(iter(self._unproven.values()))).close()
        unproven = Unproven(link, self._handshake(link), time.monotonic() + self._io_timeout_s)
        link.setblocking(False)
        link.send(unproven.handshake.challenge, socket.MSG_NOSIGNAL)  # fits any empty send buffer
        self._poll.register(link, select.EPOLLIN)
        self._unproven[link.fileno()] = unproven

    def _forget(self, unproven: Unproven) -> socket.socket:
        """Its connection, which is nobody's now."""
        del self._unproven[unproven.link.fileno()]
        self._poll.unregister(unproven.link)
        return unproven.link

    def _hear(self, unproven: Unproven) -> None:
        link = unproven.link
        try:
            heard = link.recv(protocol.HELLO_BYTES - len(unproven.heard))
            unproven.heard += heard
            if heard and len(unproven.heard) < protocol.HELLO_BYTES:
                return
            self._forget(unproven)
            if heard and self._judge(unproven):
                return
        except BlockingIOError:
            return
        except (OSError, protocol.Malformed) as reason:
            log.debug("not a reader: %s", reason)
        except Exception:
            log.exception("a connection ended by an error of ours")
        if unproven.link.fileno() in self._unproven:
            self._forget(unproven)
        link.close()

    def _judge(self, unproven: Unproven) -> bool:
        """Answer a Hello. Returns whether the connection was handed on."""
        link, handshake = unproven.link, unproven.handshake
        hello, status = handshake.hear(unproven.heard)
        if status is Status.OK:
            links.prepare(link, timeout_s=self._io_timeout_s)
            if self._admit(link, hello.reader, handshake):
                return True
            link.setblocking(False)
            status = Status.BUSY
        link.send(handshake.welcome(status), socket.MSG_NOSIGNAL)
        return False


def _unix_path(unix_dir: str | None) -> str:
    """A name nobody else has: abstract, or a file in `unix_dir`, which only this user may enter if it is made here."""
    name = f"tandem-kv-{os.getpid()}-{secrets.token_hex(8)}"
    if unix_dir is None:
        return "@" + name
    os.makedirs(unix_dir, mode=0o700, exist_ok=True)
    return os.path.join(unix_dir, name)
