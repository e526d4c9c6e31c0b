"""A listening socket of the node's one thread: takes connections one at a time, so that the others are heard between.

A process without a free file descriptor cannot accept, and the socket stays ready: it would be called again at once,
for ever. So a connection is given up for the new one, or it stops listening for a moment.
"""

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.core.values import MILLISECOND, Nanos
from tandem.server.exposure import takes_ipv4

PAUSE_NS = 100 * MILLISECOND
BACKLOG = 1024  # the kernel keeps them; a flood is taken one by one


class Poller(Protocol):
    """The part of `selectors` that is needed, with a callback for every socket."""

    def watch(self, sock: socket.socket, mask: int, ready: Callable[[int], None]) -> None: ...

    def unwatch(self, sock: socket.socket) -> None: ...


@dataclass(slots=True)
class ControlListener:
    sock: socket.socket
    poller: Poller
    clock: Callable[[], Nanos]
    take: Callable[[socket.socket], None]  # owns the connection from then on
    make_room: Callable[[], bool]  # give a file descriptor back; False: none can be spared
    resume_at: Nanos | None = None  # when it listens again

    @classmethod
    def open(
        cls,
        host: str,
        poller: Poller,
        clock: Callable[[], Nanos],
        take: Callable[[socket.socket], None],
        make_room: Callable[[], bool],
    ) -> "ControlListener":
        """On a free port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=BACKLOG, dualstack_ipv6=takes_ipv4(host))
        sock.setblocking(False)
        listener = cls(sock, poller, clock, take, make_room)
        listener._watch()
        return listener

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def tick(self) -> None:
        if self.resume_at is not None and self.clock() >= self.resume_at:
            self.resume_at = None
            self._watch()

    def close(self) -> None:
        self.poller.unwatch(self.sock)
        self.sock.close()

    def _watch(self) -> None:
        self.poller.watch(self.sock, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # it left while it waited
        except OSError:  # no file descriptor, or no memory
            if not self.make_room():
                self.resume_at = Nanos(self.clock() + PAUSE_NS)
                self.poller.unwatch(self.sock)
            return
        self.take(sock)
