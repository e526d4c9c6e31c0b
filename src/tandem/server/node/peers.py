"""The node's connections to the nodes of other servers: what carries the messages of the rendezvous.

Decode dials prefill, and both talk on that connection. Each side proves that it holds the cluster's secret
(`session.py`) and says which life of which server it is; whatever comes later belongs to that life. Until then a
connection is unidentified: it takes nobody's place and costs little, and what is to be said to a peer waits.

    an accepted connection is unidentified for `HELLO_NS`       dropped; of too many, the oldest is
    a frame that is no message or was changed on its way        the connection is dropped
    a message in another's name                                 the same
    a message that is out of bounds                             its room fails, the connection stays
    a connection that broke is there again                      `PeerReturned`
    somebody else answers where a peer was to be dialled        the next endpoint is tried; after the last, `PeerLost`
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
from functools import partial
from typing import assert_never

from msgspec import Struct

from tandem.core.disagg.message_checks import Bounds, admitted
from tandem.core.disagg.messages import Abort, Message, Offer, Ready, Release
from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.values import MILLISECOND, SECOND, Address, Incarnation, Nanos
from tandem.membership import ClusterSecret, new_challenge
from tandem.server.channel import READ_BYTES, ChannelClosed, MalformedFrame, receive_some, write_some
from tandem.server.documents import one_line
from tandem.server.node.candidates import Candidates, Endpoint
from tandem.server.node.listener import Listener, Poller
from tandem.server.node.session import (
    CONTROL_PROTOCOL,
    GREETING_BYTES,
    Frame,
    Greeting,
    Hello,
    Ping,
    Session,
    is_numeric,
    reachable_shards,
)
from tandem.server.wire import DataEndpoint, ReplicaInfo

RETURN_NS = 2 * SECOND  # how long a broken connection may take to return
MAX_PING_NS = 60 * SECOND  # more than that is not believed
HELLO_NS = 5 * SECOND  # from its first moment; a connection that has not proven who it is by then is dropped
FIRST_RETRY_NS = Nanos(20 * MILLISECOND)
MAX_UNIDENTIFIED = 256  # accepted connections; and as many lives that are dialled and were never reached
MAX_PEERS = 1024
MAX_WAITING = 1024  # messages to a peer that is being dialled
PENDING_BYTES = 32 << 20
NOTE_NS = 10 * SECOND  # between two log lines about connections that proved nothing

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


@dataclass(slots=True, eq=False)
class _Wire:
    """One connection."""

    sock: socket.socket
    session: Session
    endpoint: Endpoint | None  # where it was dialled; None: it was accepted
    since_ns: Nanos
    heard_ns: Nanos
    said_ns: Nanos
    silence_ns: Nanos  # after so much of it the peer is lost
    connected: bool  # False while a dial is under way
    mask: int = 0
    peer: "_Peer | None" = None  # None: accepted and unidentified

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0


@dataclass(slots=True, eq=False)
class _Peer:
    """One life of one peer, as long as its connection is there or may return."""

    who: Incarnation
    candidates: Candidates = field(default_factory=Candidates)  # empty: the peer dials us
    dials: dict[Endpoint, _Wire] = field(default_factory=dict[Endpoint, _Wire])  # which prove nothing yet
    waiting: list[Message] = field(default_factory=list[Message])  # to be said when one of them does
    wire: _Wire | None = None  # the one that has
    was_reached: bool = False
    lost_at: Nanos | None = None  # when it is given up, once the connection is broken
    retry_at: Nanos | None = None
    retry_ns: Nanos = FIRST_RETRY_NS
    trouble: str = ""  # the last, with its connections


@dataclass(slots=True)
class Peers:
    me: Incarnation
    layout: str
    secret: ClusterSecret
    shards: tuple[DataEndpoint, ...]  # of this server
    bounds: Bounds  # of what peers may say
    poller: Poller
    report: Callable[[Event], None]
    reach: Callable[[Incarnation, tuple[DataEndpoint, ...]], None]  # here a dialled peer's KV can be pulled
    clock: Callable[[], Nanos]
    note: Callable[[str], None]  # one line for the log
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _listener: Listener | None = None
    _peers: dict[Incarnation, _Peer] = field(default_factory=dict[Incarnation, _Peer])
    _unidentified: dict[_Wire, None] = field(default_factory=dict[_Wire, None])  # accepted; the oldest first
    _unnoted: int = 0  # connections that proved nothing since the last line about one
    _noted_at: Nanos | None = None

    def listen(self, host: str) -> int:
        """Accept peers on a free port, which is returned. Raises OSError."""
        self._listener = Listener.open(host, self.poller, self.clock, self._accepted, self._drop_oldest)
        return self._listener.port

    def connect(self, replica: ReplicaInfo, address: Address) -> None:
        """Have a connection to this life of a prefill, for which the bootstrap server at `address` vouches.

        Says PeerLost for one for which nobody else vouches but this address, before. One that is connected stays
        so, whatever is said here of where it may be dialled.
        """
        who, voucher = replica.incarnation, (address, replica.dp_rank)
        for other in [other for other in self._peers.values() if other.who != who]:
            if other.candidates.is_vouched_by(voucher):
                other.candidates.withdraw(voucher)
                self._lose_if_nowhere(other, "was replaced by another life")
        peer = self._peers.get(who) or self._new_peer(who)
        if peer is None:
            self.report(PeerLost(who, detail=f"{MAX_PEERS} others are connected"))
            return
        peer.candidates.vouch(voucher, (replica.control_host, replica.control_port))
        if peer.wire is None:
            if not peer.was_reached:
                peer.lost_at = None  # what others say of it, and is wrong, does not count against this address
            self._dial(peer)

    def tell(self, who: Incarnation, message: Message) -> None:
        peer = self._peers.get(who)
        if peer is None:
            if isinstance(message, Ready):  # lost before the node had learned of it
                self.report(PeerLost(who))
        elif peer.wire is not None:
            self._say(peer.wire, message)
        elif peer.dials and len(peer.waiting) < MAX_WAITING:
            peer.waiting.append(message)

    def flush(self) -> None:
        """Write what was said since the last call."""
        for peer in list(self._peers.values()):
            if peer.wire is not None:
                self._flush(peer.wire)

    def next_deadline(self) -> Nanos | None:
        """When `tick` has something to do, if nothing comes."""
        oldest = next(iter(self._unidentified), None)
        times = [oldest.since_ns + HELLO_NS] if oldest is not None else []
        if self._listener is not None and self._listener.resume_at is not None:
            times.append(self._listener.resume_at)
        for peer in self._peers.values():
            times += [time for time in (peer.lost_at, peer.retry_at) if time is not None]
            times += [wire.since_ns + HELLO_NS for wire in peer.dials.values()]
            if peer.wire is not None:
                times.append(peer.wire.heard_ns + peer.wire.silence_ns)
                times.append(peer.wire.said_ns + self.heartbeat.interval_ns)
        return Nanos(min(times)) if times else None

    def tick(self) -> None:
        """Redial, give up, say that we are here, and notice who is not."""
        now = self.clock()
        if self._listener is not None:
            self._listener.tick()
        while (oldest := next(iter(self._unidentified), None)) is not None and now >= oldest.since_ns + HELLO_NS:
            self._drop(oldest, "does not prove who it is")
        for peer in list(self._peers.values()):
            self._tick_peer(peer, now)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for wire in list(self._unidentified):
            self._close(wire)
        for peer in self._peers.values():
            self._close_all(peer)

    def _tick_peer(self, peer: _Peer, now: Nanos) -> None:
        for wire in [wire for wire in peer.dials.values() if now >= wire.since_ns + HELLO_NS]:
            self._close(wire)
            self._dial_failed(peer, wire.endpoint, "does not prove who it is", is_final=True)
        if self._peers.get(peer.who) is not peer:
            return
        wire = peer.wire
        if wire is not None and now >= wire.heard_ns + wire.silence_ns:
            self._lose(peer, "silent")
        elif wire is not None and now >= wire.said_ns + self.heartbeat.interval_ns:
            self._say(wire, Ping())
        elif peer.lost_at is not None and now >= peer.lost_at:
            self._lose(peer, f"did not return: {peer.trouble}")
        elif peer.retry_at is not None and now >= peer.retry_at:
            self._dial(peer)

    # -- connections ----------------------------------------------------------------------------------------------

    def _accepted(self, sock: socket.socket) -> None:
        if len(self._unidentified) >= MAX_UNIDENTIFIED:
            self._drop_oldest()  # not the newcomer: silent ones must not shut out a peer
        try:
            wire = self._wire(sock, None, connected=True)
        except OSError:
            sock.close()  # reset while it waited
            return
        self._unidentified[wire] = None
        self._flush(wire)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._unidentified), None)
        if oldest is not None:
            self._drop(oldest, "gives way to a newer connection")
        return oldest is not None

    def _new_peer(self, who: Incarnation) -> _Peer | None:
        """None: there are too many. Of those that were never reached the oldest gives way."""
        never_reached = [peer for peer in self._peers.values() if not peer.was_reached]
        if len(never_reached) >= MAX_UNIDENTIFIED:
            self._lose(never_reached[0], "gives way to others that are dialled")
        if len(self._peers) >= MAX_PEERS:
            return None
        peer = self._peers[who] = _Peer(who)
        return peer

    def _dial(self, peer: _Peer) -> None:
        """Everywhere where it may be, at once: an endpoint that only somebody claims must not hold up a right one."""
        peer.retry_at = None
        for endpoint in peer.candidates.endpoints:
            if endpoint not in peer.dials and endpoint in peer.candidates.endpoints:
                self._dial_at(peer, endpoint)

    def _dial_at(self, peer: _Peer, endpoint: Endpoint) -> None:
        host, _port = endpoint
        if not is_numeric(host):  # a lookup would hold up the node
            self._dial_failed(peer, endpoint, f"names {host}, which is no address", is_final=True)
            return
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            self._dial_failed(peer, endpoint, str(error), is_final=False)
            return
        sock.setblocking(False)
        try:
            code = sock.connect_ex(endpoint)
        except (OSError, OverflowError) as error:  # no port, no address of this family
            sock.close()
            self._dial_failed(peer, endpoint, str(error), is_final=True)
            return
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._refused(peer, endpoint, code)
            return
        wire = self._wire(sock, endpoint, connected=False)
        wire.peer = peer
        peer.dials[endpoint] = wire
        self._watch(wire)

    def _wire(self, sock: socket.socket, endpoint: Endpoint | None, *, connected: bool) -> _Wire:
        """Raises OSError."""
        sock.setblocking(False)
        for option in KEEPALIVE:
            sock.setsockopt(*option)
        now = self.clock()
        session = Session(
            self.secret,
            Hello(CONTROL_PROTOCOL, self.me, new_challenge()),
            Greeting(self.layout, self.heartbeat.interval_ns, self.shards),
            is_dialler=endpoint is not None,
        )
        silence_ns = self.heartbeat.silence_ns(self.heartbeat.interval_ns)
        return _Wire(
            sock, session, endpoint, since_ns=now, heard_ns=now, said_ns=now, silence_ns=silence_ns, connected=connected
        )

    def _watch(self, wire: _Wire) -> None:
        """Wait for bytes, and for room where some could not be written."""
        wants_to_write = bool(wire.session.outgoing) or not wire.connected
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_to_write else 0)
        if mask != wire.mask:
            wire.mask = mask
            self.poller.watch(wire.sock, mask, partial(self._ready, wire))

    def _close(self, wire: _Wire) -> None:
        self._unidentified.pop(wire, None)
        self.poller.unwatch(wire.sock)
        wire.sock.close()

    def _close_all(self, peer: _Peer) -> None:
        for wire in [*peer.dials.values(), *([peer.wire] if peer.wire is not None else [])]:
            self._close(wire)
        peer.dials.clear()
        peer.wire = None

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _ready(self, wire: _Wire, mask: int) -> None:
        if not wire.is_open:
            return  # closed by what was ready before it
        if not wire.connected and not self._finish_dial(wire):
            return
        try:
            if mask & selectors.EVENT_READ:
                self._receive(wire)
        except ChannelClosed as error:
            self._drop(wire, closing(wire, str(error)))
        except MalformedFrame as error:
            self._drop(wire, str(error), is_wrong=True)
        if wire.is_open:
            self._flush(wire)

    def _receive(self, wire: _Wire) -> None:
        max_bytes = READ_BYTES if wire.session.is_member else GREETING_BYTES
        for message in wire.session.feed(receive_some(wire.sock, max_bytes)):
            wire.heard_ns = self.clock()
            self._heard(wire, message)
            if not wire.is_open:
                return

    def _finish_dial(self, wire: _Wire) -> bool:
        code = wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            wire.connected = True
            return True
        assert wire.peer is not None
        self._close(wire)
        self._refused(wire.peer, wire.endpoint, code)
        return False

    def _say(self, wire: _Wire, message: Frame) -> None:
        if len(wire.session.outgoing) > PENDING_BYTES:
            self._drop(wire, f"{len(wire.session.outgoing)} bytes wait for a reader that does not read")
            return
        wire.session.say(message)
        wire.said_ns = self.clock()

    def _flush(self, wire: _Wire) -> None:
        try:
            write_some(wire.sock, wire.session.outgoing)
            self._watch(wire)
        except ChannelClosed as error:
            self._drop(wire, closing(wire, str(error)))

    # -- who is there -----------------------------------------------------------------------------------------------

    def _heard(self, wire: _Wire, message: Greeting | Frame) -> None:
        match message:
            case Greeting():
                self._greet(wire, message)
            case Ping():
                pass
            case Ready() | Offer() | Release() | Abort():
                assert wire.peer is not None
                if message.source != wire.peer.who:
                    raise MalformedFrame("a message in another's name")
                told = admitted(message, self.bounds)
                if told is None:
                    raise MalformedFrame("a message about no room")
                self.report(PeerSaid(wire.peer.who, told))
            case never:
                assert_never(never)

    def _greet(self, wire: _Wire, greeting: Greeting) -> None:
        """Who is at the other end holds the secret: from here on it is who it says it is."""
        source = wire.session.source
        assert source is not None
        if source == self.me:
            raise MalformedFrame("is this server itself")
        peer = self._greet_acceptor(wire, greeting, source) if wire.endpoint else self._greet_dialler(wire, source)
        wire.silence_ns = self.heartbeat.silence_ns(greeting.ping_ns)
        if peer.lost_at is not None:
            self.report(PeerReturned(peer.who))
        peer.was_reached = True
        peer.lost_at = peer.retry_at = None
        peer.retry_ns = FIRST_RETRY_NS
        waiting, peer.waiting = peer.waiting, []
        for message in waiting:
            self._say(wire, message)

    def _greet_acceptor(self, wire: _Wire, greeting: Greeting, source: Incarnation) -> _Peer:
        """The one that was dialled answers."""
        peer, endpoint = wire.peer, wire.endpoint
        assert peer is not None
        assert endpoint is not None
        if source != peer.who:  # restarted, or another server took the port
            raise MalformedFrame("is another life now")
        if greeting.layout == self.layout:  # with another one no KV will travel, and requests say why
            shards = reachable_shards(greeting.shards, host=endpoint[0], want=len(self.shards))
            if peer.wire is None:
                self.reach(source, shards)
        peer.candidates.prove(endpoint)
        del peer.dials[endpoint]
        if peer.wire is None:
            peer.wire = wire
            wire.session.greet()
        else:
            self._close(wire)  # it was reached elsewhere meanwhile
        return peer

    def _greet_dialler(self, wire: _Wire, source: Incarnation) -> _Peer:
        peer = self._peers.get(source) or self._new_peer(source)
        if peer is None:
            raise MalformedFrame(f"{MAX_PEERS} others are connected")
        del self._unidentified[wire]
        if peer.wire is not None:  # its old connection broke without our noticing
            self._close(peer.wire)
        peer.wire, wire.peer = wire, peer
        return peer

    def _drop(self, wire: _Wire, reason: str, *, is_wrong: bool = False) -> None:
        """The connection is of no use any more; the peer may come back on another.

        is_wrong: who is at the other end does not keep the protocol.
        """
        peer, endpoint = wire.peer, wire.endpoint
        if peer is None and (is_wrong or wire.session.source is not None):
            self._note_unidentified(wire, reason)
        self._close(wire)
        if peer is not None and peer.wire is wire:
            peer.wire = None
            self._broken(peer, reason)
        elif peer is not None and endpoint in peer.dials:
            self._dial_failed(peer, endpoint, reason, is_final=is_wrong)

    def _refused(self, peer: _Peer, endpoint: Endpoint | None, code: int) -> None:
        if code == errno.ECONNREFUSED:
            self._dial_failed(peer, endpoint, "refuses connections", is_final=True)
        else:
            self._dial_failed(peer, endpoint, errno.errorcode.get(code, str(code)), is_final=False)

    def _dial_failed(self, peer: _Peer, endpoint: Endpoint | None, reason: str, *, is_final: bool) -> None:
        """is_final: the life that was meant is not there, and will not be."""
        assert endpoint is not None
        peer.dials.pop(endpoint, None)
        if is_final:
            peer.candidates.remove(endpoint)
        if peer.wire is not None or self._lose_if_nowhere(peer, reason):
            return
        if peer.dials:
            peer.trouble = reason
        else:
            self._broken(peer, reason)

    def _broken(self, peer: _Peer, reason: str) -> None:
        now = self.clock()
        peer.trouble = reason
        if peer.lost_at is None:
            self._note(f"connection to {peer.who.name} broke: {reason}")
            peer.lost_at = Nanos(now + RETURN_NS)
        if peer.candidates.endpoints:
            peer.retry_at = Nanos(now + peer.retry_ns)
            peer.retry_ns = Nanos(2 * peer.retry_ns)

    def _lose_if_nowhere(self, peer: _Peer, reason: str) -> bool:
        """One that is dialled is lost when there is no endpoint left."""
        if peer.candidates.endpoints:
            return False
        self._lose(peer, reason)
        return True

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._note(f"peer {peer.who.name} is lost: {reason}")
        self._close_all(peer)
        del self._peers[peer.who]
        self.report(PeerLost(peer.who, detail=one_line(reason)))

    def _note_unidentified(self, wire: _Wire, reason: str) -> None:
        """Whoever likes can cause these lines: they are few."""
        now = self.clock()
        if self._noted_at is not None and now < self._noted_at + NOTE_NS:
            self._unnoted += 1
            return
        who = "" if wire.session.source is None else f" that says it is {wire.session.source.name}"
        more = f" ({self._unnoted} more before it)" if self._unnoted else ""
        self._noted_at, self._unnoted = now, 0
        self._note(f"a connection{who} was dropped: {reason}{more}")

    def _note(self, line: str) -> None:
        self.note(one_line(line))


def closing(wire: _Wire, reason: str) -> str:
    if wire.session.source is None or wire.session.is_member:
        return reason
    return "closed the connection before both had proven to hold this cluster's secret (--cluster-secret-file)"


def numeric_host(host: str) -> str:
    """An address to bind to. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
