"""The sockets under `links.py`: listens and dials, hands on what is read, writes what the kernel takes.

Everything here runs on the node's one thread and never waits.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tandem.core.disagg.message_checks import Bounds
from tandem.core.disagg.messages import Message
from tandem.core.events import Event
from tandem.core.values import Address, Cut, Incarnation, Nanos
from tandem.membership import ClusterSecret, new_challenge
from tandem.server.channel import READ_BYTES, ChannelClosed, receive_some, write_some
from tandem.server.node.candidates import Endpoint
from tandem.server.node.links import DialFailure, Heartbeat, Link, Links
from tandem.server.node.listener import ControlListener, Poller
from tandem.server.node.session import GREETING_BYTES
from tandem.server.wire import DataEndpoint, ReplicaInfo

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(slots=True, eq=False)
class _Wire:
    """The socket of one link."""

    link: Link
    sock: socket.socket
    connected: bool  # False while a dial is under way
    mask: int = 0


@dataclass(slots=True)
class Peers:
    me: Incarnation
    layout: str
    secret: ClusterSecret
    shards: tuple[DataEndpoint, ...]  # of this server
    bounds: Bounds  # of what peers may say
    poller: Poller
    report: Callable[[Event], None]
    reach: Callable[[Incarnation, Cut, tuple[DataEndpoint, ...]], None]  # here a dialled peer's KV can be pulled
    clock: Callable[[], Nanos]
    note: Callable[[str], None]  # one line for the log
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    links: Links = field(init=False)
    _listener: ControlListener | None = None
    _wires: dict[Link, _Wire] = field(default_factory=dict[Link, _Wire])
    _unwritten: dict[Link, None] = field(default_factory=dict[Link, None])

    def __post_init__(self) -> None:
        self.links = Links(
            self.me,
            self.layout,
            self.secret,
            self.shards,
            self.bounds,
            self,
            self.report,
            self.reach,
            self.note,
            new_challenge,
            self.heartbeat,
        )

    # -- for the node ---------------------------------------------------------------------------------------------

    def listen(self, host: str) -> int:
        """Accept peers on a free port, which is returned. Raises OSError."""
        self._listener = ControlListener.open(host, self.poller, self.clock, self._accepted, self._make_room)
        return self._listener.port

    def connect(self, replica: ReplicaInfo, address: Address) -> None:
        """Have a connection to this life of a prefill, for which the bootstrap server at `address` vouches."""
        endpoint = (replica.control_host, replica.control_port)
        self.links.connect(replica.incarnation, (address, replica.dp_rank), endpoint, self.clock())

    def tell(self, who: Incarnation, message: Message) -> None:
        self.links.tell(who, message, self.clock())

    def flush(self) -> None:
        """Write what was said since the last call."""
        unwritten, self._unwritten = self._unwritten, {}
        for link in unwritten:
            wire = self._wires.get(link)
            if wire is not None and wire.connected:
                self._flush(wire)

    def next_deadline(self) -> Nanos | None:
        """When `tick` has something to do, if nothing comes."""
        resume_at = self._listener.resume_at if self._listener is not None else None
        times = [time for time in (self.links.next_deadline(), resume_at) if time is not None]
        return min(times, default=None)

    def tick(self) -> None:
        if self._listener is not None:
            self._listener.tick()
        self.links.tick(self.clock())

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.links.close()

    # -- for the links --------------------------------------------------------------------------------------------

    def dial(self, link: Link, endpoint: Endpoint) -> DialFailure | None:
        host, _port = endpoint
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            return DialFailure(str(error), is_final=False)
        try:
            set_up(sock)
            code = sock.connect_ex(endpoint)
        except (OSError, OverflowError) as error:  # no port, no address of this family
            sock.close()
            return DialFailure(str(error), is_final=True)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return refused(code)
        self._watch(self._wire(link, sock, connected=False))
        return None

    def write(self, link: Link) -> None:
        self._unwritten[link] = None

    def hang_up(self, link: Link) -> None:
        wire = self._wires.pop(link, None)
        if wire is not None:
            self.poller.unwatch(wire.sock)
            wire.sock.close()

    # -- connections ----------------------------------------------------------------------------------------------

    def _accepted(self, sock: socket.socket) -> None:
        try:
            set_up(sock)
        except OSError:
            sock.close()  # reset while it waited
            return
        self._flush(self._wire(self.links.accepted(self.clock()), sock, connected=True))

    def _make_room(self) -> bool:
        return self.links.make_room(self.clock())

    def _wire(self, link: Link, sock: socket.socket, *, connected: bool) -> _Wire:
        wire = self._wires[link] = _Wire(link, sock, connected)
        return wire

    def _watch(self, wire: _Wire) -> None:
        """Wait for bytes, and for room where some could not be written."""
        wants_to_write = bool(wire.link.session.outgoing) or not wire.connected
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_to_write else 0)
        if mask != wire.mask:
            wire.mask = mask
            self.poller.watch(wire.sock, mask, partial(self._ready, wire))

    def _ready(self, wire: _Wire, mask: int) -> None:
        link = wire.link
        if not link.is_open:
            return  # closed by what was ready before it
        if not wire.connected and not self._finish_dial(wire):
            return
        if mask & selectors.EVENT_READ:
            self._read(wire)
        if link.is_open:
            self._flush(wire)

    def _finish_dial(self, wire: _Wire) -> bool:
        code = wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        wire.connected = code == 0
        if code != 0:
            self.links.dial_failed(wire.link, refused(code), self.clock())
        return wire.connected

    def _read(self, wire: _Wire) -> None:
        max_bytes = READ_BYTES if wire.link.session.is_member else GREETING_BYTES
        try:
            data = receive_some(wire.sock, max_bytes)
        except ChannelClosed as error:
            self.links.broken(wire.link, str(error), self.clock())
        else:
            self.links.received(wire.link, data, self.clock())

    def _flush(self, wire: _Wire) -> None:
        try:
            write_some(wire.sock, wire.link.session.outgoing)
            self._watch(wire)
        except ChannelClosed as error:
            self.links.broken(wire.link, str(error), self.clock())


def set_up(sock: socket.socket) -> None:
    """Raises OSError."""
    sock.setblocking(False)
    for option in KEEPALIVE:
        sock.setsockopt(*option)


def refused(code: int) -> DialFailure:
    if code == errno.ECONNREFUSED:
        return DialFailure("refuses connections", is_final=True)
    return DialFailure(errno.errorcode.get(code, str(code)), is_final=False)


def numeric_host(host: str) -> str:
    """An address to bind to. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
