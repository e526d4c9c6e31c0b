"""The node's connections to the nodes of other servers: what carries the messages of the rendezvous.

Decode dials prefill, and both talk on that connection. Each side begins with a `Hello` that says which life of which
server it is; whatever comes later belongs to that life.

    a frame that is no message or was changed on its way        the connection is dropped
    a message in another's name                                 the same
    a connection that broke is there again                      `PeerReturned`
    a dialled connection breaks                                 dialled again for `RETURN_NS`, then `PeerLost`; at once
                                                                when refused: a life listens from its start to its end
    an accepted connection breaks                               it may return for `RETURN_NS`, then `PeerLost`
    its address is vouched for another life by now              `PeerLost` for the old one, at once
    nothing at all was heard for as long as `Heartbeat` says    `PeerLost`; who has nothing to say says `Ping`

Everything here runs on the node's one thread and never waits. `Tell` to a peer without a connection is dropped: who
waits for an answer says its message again.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from ipaddress import ip_address
from typing import Protocol, assert_never

from msgspec import Struct

from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.pd.messages import Abort, Message, Offer, Ready, Release
from tandem.core.values import MILLISECOND, SECOND, Address, Incarnation, Nanos
from tandem.server.channel import ChannelClosed, ChannelFull, MalformedFrame, PolledChannel
from tandem.server.wire import ReplicaInfo

CONTROL_PROTOCOL = 2
RETURN_NS = 2 * SECOND  # how long a broken connection may take to return
MAX_PING_NS = 60 * SECOND  # more than that is not believed
HELLO_NS = 5 * SECOND  # a connection that has not said who it is by then is dropped
FIRST_RETRY_NS = Nanos(20 * MILLISECOND)
MAX_STRANGERS = 64  # accepted connections that have not said who they are
MAX_PEERS = 1024
HELLO_BYTES = 4 << 10
MESSAGE_BYTES = 16 << 20  # an offer of 100,000 tokens is about 150 KB
PENDING_BYTES = 32 << 20

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Heartbeat(Struct, frozen=True):
    """How often who has nothing to say says so, and how many such words may be missing."""

    interval_ns: Nanos = Nanos(1 * SECOND)
    max_failure: int = 4

    def silence_ns(self, peer_interval_ns: Nanos) -> Nanos:
        """How long a peer may be silent that pings in its own rhythm. One interval more: the last word may be late."""
        return Nanos((self.max_failure + 1) * max(self.interval_ns, min(peer_interval_ns, MAX_PING_NS)))


class Hello(Struct, frozen=True, tag="hello"):
    """First on every connection, in both directions."""

    protocol: int
    source: Incarnation
    layout: str
    ping_ns: Nanos = Heartbeat().interval_ns


class Ping(Struct, frozen=True, tag="ping"):
    """I am here and have nothing to say."""


Frame = Hello | Ping | Ready | Offer | Release | Abort


class Poller(Protocol):
    """The part of `selectors` that is needed, with a callback for every socket."""

    def watch(self, sock: socket.socket, mask: int, ready: Callable[[int], None]) -> None: ...

    def unwatch(self, sock: socket.socket) -> None: ...


class Side(Enum):
    DIALLED = "dialled"
    ACCEPTED = "accepted"


@dataclass(slots=True)
class _Wire:
    """One connection."""

    channel: PolledChannel[Frame]
    side: Side
    heard_ns: Nanos
    said_ns: Nanos
    silence_ns: Nanos  # after so much of it the peer is lost
    connected: bool  # False while a dial is under way
    greeted: bool = False  # the peer's hello is here
    mask: int = 0
    peer: "_Peer | None" = None  # None: a stranger still


@dataclass(slots=True)
class _Peer:
    """One life of one peer, as long as its connection is there or may return."""

    who: Incarnation
    dial: tuple[str, int] | None = None  # where to dial; None: the peer dials us
    found_at: tuple[Address, int] | None = None  # bootstrap server and DP rank under which it was learned
    wire: _Wire | None = None
    lost_at: Nanos | None = None  # when it is given up, once the connection is broken
    retry_at: Nanos | None = None
    retry_ns: Nanos = FIRST_RETRY_NS


@dataclass(slots=True)
class Peers:
    me: Incarnation
    layout: str
    poller: Poller
    report: Callable[[Event], None]
    clock: Callable[[], Nanos]
    note: Callable[[str], None]  # one line for the log
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _listener: socket.socket | None = None
    _peers: dict[Incarnation, _Peer] = field(default_factory=dict)
    _strangers: list[_Wire] = field(default_factory=list)  # accepted, not greeted

    def listen(self, host: str) -> int:
        """Accept peers on a free port, which is returned. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.poller.watch(self._listener, selectors.EVENT_READ, self._accept)
        return self._listener.getsockname()[1]

    def connect(self, replica: ReplicaInfo, address: Address) -> None:
        """Have a connection to this life of a prefill. Says PeerLost for the one that was at this address before it."""
        found_at = (address, replica.dp_rank)
        for other in list(self._peers.values()):
            if other.found_at == found_at and other.who != replica.incarnation:
                self._lose(other, "was replaced by another life")
        peer = self._peers.setdefault(replica.incarnation, _Peer(replica.incarnation))
        peer.found_at = found_at
        peer.dial = (replica.control_host, replica.control_port)
        if peer.wire is None:
            self._dial(peer)

    def tell(self, who: Incarnation, message: Message) -> None:
        peer = self._peers.get(who)
        if peer is not None and peer.wire is not None:  # while a dial is under way this comes behind the hello
            self._say(peer.wire, message)
        elif peer is None and isinstance(message, Ready):  # lost before the node had learned of it
            self.report(PeerLost(who))

    def flush(self) -> None:
        """Write what was said since the last call."""
        for peer in list(self._peers.values()):
            if peer.wire is not None and peer.wire.connected:
                self._flush(peer.wire)

    def next_deadline(self) -> Nanos | None:
        """When `tick` has something to do, if nothing comes."""
        times = [wire.heard_ns + HELLO_NS for wire in self._strangers]
        for peer in self._peers.values():
            times += [time for time in (peer.lost_at, peer.retry_at) if time is not None]
            if peer.wire is not None:
                times.append(peer.wire.heard_ns + peer.wire.silence_ns)
            if peer.wire is not None and peer.wire.connected:
                times.append(peer.wire.said_ns + self.heartbeat.interval_ns)
        return Nanos(min(times)) if times else None

    def tick(self) -> None:
        """Redial, give up, say that we are here, and notice who is not."""
        now = self.clock()
        for wire in [wire for wire in self._strangers if now >= wire.heard_ns + HELLO_NS]:
            self._drop(wire, "did not say who it is")
        for peer in list(self._peers.values()):
            if peer.wire is not None and now >= peer.wire.heard_ns + peer.wire.silence_ns:
                self._lose(peer, "silent")
            elif (
                peer.wire is not None and peer.wire.connected and now >= peer.wire.said_ns + self.heartbeat.interval_ns
            ):
                self._say(peer.wire, Ping())
            elif peer.lost_at is not None and now >= peer.lost_at:
                self._lose(peer, "did not return")
            elif peer.retry_at is not None and now >= peer.retry_at:
                self._dial(peer)

    def close(self) -> None:
        if self._listener is not None:
            self.poller.unwatch(self._listener)
            self._listener.close()
        for wire in [*self._strangers, *(peer.wire for peer in self._peers.values() if peer.wire is not None)]:
            self._close(wire)

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left while it waited, or we have no file descriptor for it
        if len(self._strangers) >= MAX_STRANGERS or len(self._peers) >= MAX_PEERS:
            sock.close()
            return
        wire = self._wire(sock, Side.ACCEPTED, connected=True)
        self._strangers.append(wire)
        self._watch(wire)
        self._say(wire, self._hello())
        self._flush(wire)

    def _dial(self, peer: _Peer) -> None:
        assert peer.dial is not None
        assert peer.wire is None
        peer.retry_at = None
        host, port = peer.dial
        if not is_numeric(host):  # a lookup would hold up the node
            self._lose(peer, f"names {host}, which is no address")
            return
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            code = sock.connect_ex((host, port))
        except (OSError, OverflowError) as error:
            sock.close()
            self._broken(peer, str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._dial_failed(peer, code)
            return
        peer.wire = self._wire(sock, Side.DIALLED, connected=False)
        peer.wire.peer = peer
        self._say(peer.wire, self._hello())
        self._watch(peer.wire)

    def _hello(self) -> Hello:
        return Hello(CONTROL_PROTOCOL, self.me, self.layout, self.heartbeat.interval_ns)

    def _wire(self, sock: socket.socket, side: Side, *, connected: bool) -> _Wire:
        for option in KEEPALIVE:
            sock.setsockopt(*option)
        now = self.clock()
        channel: PolledChannel[Frame] = PolledChannel(
            sock, Frame, max_frame_bytes=HELLO_BYTES, max_pending_bytes=PENDING_BYTES, is_checked=True
        )
        silence_ns = self.heartbeat.silence_ns(self.heartbeat.interval_ns)
        return _Wire(channel, side, heard_ns=now, said_ns=now, silence_ns=silence_ns, connected=connected)

    def _watch(self, wire: _Wire) -> None:
        """Wait for bytes, and for room where some could not be written."""
        wants_to_write = wire.channel.pending_bytes > 0 or not wire.connected
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_to_write else 0)
        if mask != wire.mask:
            wire.mask = mask
            self.poller.watch(wire.channel.sock, mask, partial(self._ready, wire))

    def _close(self, wire: _Wire) -> None:
        if wire in self._strangers:
            self._strangers.remove(wire)
        self.poller.unwatch(wire.channel.sock)
        wire.channel.close()

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _ready(self, wire: _Wire, mask: int) -> None:
        if wire.channel.sock.fileno() < 0:
            return  # closed by what was ready before it
        try:
            if not wire.connected and not self._finish_dial(wire):
                return
            if mask & selectors.EVENT_WRITE:
                wire.channel.flush()
            if mask & selectors.EVENT_READ:
                for message in wire.channel.receive():
                    wire.heard_ns = self.clock()
                    self._heard(wire, message)
                    if wire.channel.sock.fileno() < 0:
                        return
            self._watch(wire)
        except (ChannelClosed, MalformedFrame) as error:
            self._drop(wire, str(error))

    def _finish_dial(self, wire: _Wire) -> bool:
        code = wire.channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            wire.connected = True
            return True
        assert wire.peer is not None
        self._close(wire)
        self._dial_failed(wire.peer, code)
        return False

    def _say(self, wire: _Wire, message: Frame) -> None:
        try:
            wire.channel.send(message)
            wire.said_ns = self.clock()
        except ChannelFull as error:
            self._drop(wire, str(error))

    def _flush(self, wire: _Wire) -> None:
        if wire.channel.pending_bytes == 0:
            return
        try:
            wire.channel.flush()
            self._watch(wire)
        except ChannelClosed as error:
            self._drop(wire, str(error))

    # -- who is there -----------------------------------------------------------------------------------------------

    def _heard(self, wire: _Wire, message: Frame) -> None:
        match message:
            case Hello():
                self._greet(wire, message)
            case Ping():
                pass
            case Ready() | Offer() | Release() | Abort():
                if not wire.greeted or wire.peer is None or message.source != wire.peer.who:
                    raise MalformedFrame("a message in another's name")
                self.report(PeerSaid(wire.peer.who, message))
            case never:
                assert_never(never)

    def _greet(self, wire: _Wire, hello: Hello) -> None:
        if wire.greeted or hello.protocol != CONTROL_PROTOCOL:
            raise MalformedFrame(f"control protocol {hello.protocol}, here {CONTROL_PROTOCOL}")
        if wire.side is Side.DIALLED:
            peer = wire.peer
            assert peer is not None
            if hello.source != peer.who:  # restarted, or another server took the port
                self._lose(peer, "is another life now")
                return
        else:
            self._strangers.remove(wire)
            peer = self._peers.setdefault(hello.source, _Peer(hello.source))
            if peer.wire is not None:  # its old connection broke without our noticing
                peer.wire.peer = None
                self._close(peer.wire)
            peer.wire, wire.peer = wire, peer
        wire.greeted = True
        wire.silence_ns = self.heartbeat.silence_ns(hello.ping_ns)
        if peer.lost_at is not None:
            self.report(PeerReturned(peer.who))
        wire.channel.frames.max_frame_bytes = MESSAGE_BYTES
        peer.lost_at = peer.retry_at = None
        peer.retry_ns = FIRST_RETRY_NS

    def _drop(self, wire: _Wire, reason: str) -> None:
        """The connection is of no use any more; the peer may come back on another."""
        self._close(wire)
        if wire.peer is not None:
            self._broken(wire.peer, reason)

    def _dial_failed(self, peer: _Peer, code: int) -> None:
        peer.wire = None
        if code == errno.ECONNREFUSED:
            self._lose(peer, "refuses connections")
        else:
            self._broken(peer, errno.errorcode.get(code, str(code)))

    def _broken(self, peer: _Peer, reason: str) -> None:
        now = self.clock()
        peer.wire = None
        if peer.lost_at is None:
            self.note(f"connection to {peer.who.name} broke: {reason}")
            peer.lost_at = Nanos(now + RETURN_NS)
        if peer.dial is not None:
            peer.retry_at = Nanos(now + peer.retry_ns)
            peer.retry_ns = Nanos(2 * peer.retry_ns)

    def _lose(self, peer: _Peer, reason: str) -> None:
        self.note(f"peer {peer.who.name} is lost: {reason}")
        if peer.wire is not None:
            self._close(peer.wire)
            peer.wire = None
        del self._peers[peer.who]
        self.report(PeerLost(peer.who))


def is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def numeric_host(host: str) -> str:
    """An address to bind to. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
