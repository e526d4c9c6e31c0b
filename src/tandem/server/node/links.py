"""The node's connections to the nodes of other servers, as a machine: who is there, who is lost, who is back.

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
    nothing at all was heard for as long as `Heartbeat` says    `PeerLost`; who has nothing to say says `PeerPing`
    more peers dial us than `Limits.peers`                      whose last message is the oldest gives way

Bytes and times in, bytes and events out: sockets are `peers.py`'s or the simulator's, which reach the machine through
its methods and are reached through `Transport`. Bytes to write lie in `Link.session.outgoing`, from which the transport
takes what its connection has room for. What is told to a peer without a connection waits for the one that is made, or
made anew; not READY where the connection broke, nor anything to who has to dial us: who waits for an answer says its
message again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from msgspec import Struct, structs

from tandem.core.disagg.message_checks import Bounds, admitted, one_line
from tandem.core.disagg.messages import Abort, Message, Moved, Offer, Ready, Release
from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.values import MILLISECOND, SECOND, Cut, Incarnation, Nanos
from tandem.membership import ClusterSecret
from tandem.server.frames import MalformedFrame
from tandem.server.node.candidates import Candidates, Endpoint, Voucher
from tandem.server.node.session import (
    CONTROL_PROTOCOL,
    Frame,
    Greeting,
    PeerHello,
    PeerPing,
    Session,
    is_numeric,
    reachable_shards,
)
from tandem.server.wire import DataEndpoint

RETURN_NS = 2 * SECOND  # how long a broken connection may take to return
MAX_PING_NS = 60 * SECOND  # more than that is not believed
HELLO_NS = 5 * SECOND  # from its first moment; a connection that has not proven who it is by then is dropped
FIRST_RETRY_NS = Nanos(20 * MILLISECOND)
MAX_RETRY_NS = Nanos(200 * MILLISECOND)  # so that one that is there again in time is found in time
NOTE_NS = 10 * SECOND  # between two log lines about connections that proved nothing


class Heartbeat(Struct, frozen=True):
    """How often who has nothing to say says so, and how many such words may be missing."""

    interval_ns: Nanos = Nanos(1 * SECOND)
    max_failure: int = 4

    def silence_ns(self, peer_interval_ns: Nanos) -> Nanos:
        """How long a peer may be silent that pings in its own rhythm. One interval more: the last word may be late."""
        return Nanos((self.max_failure + 1) * max(self.interval_ns, min(peer_interval_ns, MAX_PING_NS)))


class Limits(Struct, frozen=True):
    """How much others may make a node keep."""

    unidentified: int = 256  # accepted connections; and as many lives that are dialled and were never reached
    peers: int = 1024
    waiting: int = 1024  # messages to a peer that is being dialled
    pending_bytes: int = 32 << 20  # written to one connection and not yet taken by it


class DialFailure(Struct, frozen=True):
    """is_final: nobody will ever be reached there."""

    reason: str
    is_final: bool


@dataclass(slots=True, eq=False)
class Link:
    """One connection, or one that is being made."""

    session: Session
    endpoint: Endpoint | None  # where it was dialled; None: it was accepted
    since_ns: Nanos
    heard_ns: Nanos
    said_ns: Nanos
    silence_ns: Nanos  # after so much of it the peer is lost
    peer: "ControlPeer | None" = None  # None: accepted and unidentified
    is_open: bool = True


@dataclass(slots=True, eq=False)
class ControlPeer:
    """One life of one peer, as long as its connection is there or may return."""

    who: Incarnation
    bounds: Bounds  # of what it may say
    candidates: Candidates = field(default_factory=Candidates)  # empty: the peer dials us
    dials: dict[Endpoint, Link] = field(default_factory=dict[Endpoint, Link])  # which prove nothing yet
    waiting: list[Message] = field(default_factory=list[Message])  # to be said when one of them does
    link: Link | None = None  # the one that has
    told_ns: Nanos | None = None  # its last message
    was_reached: bool = False
    lost_at: Nanos | None = None  # when it is given up, once the connection is broken
    retry_at: Nanos | None = None
    retry_ns: Nanos = FIRST_RETRY_NS
    trouble: str = ""  # the last, with its connections


class Transport(Protocol):
    """What the machine asks of whoever has the connections. None of these may call back."""

    def dial(self, link: Link, endpoint: Endpoint) -> DialFailure | None:
        """Begin to connect. What becomes of it is said later, or at once by what is returned."""
        ...

    def write(self, link: Link) -> None:
        """There is something in `link.session.outgoing`."""
        ...

    def hang_up(self, link: Link) -> None:
        """Nothing is heard of this connection any more."""
        ...


@dataclass(slots=True)
class Links:
    me: Incarnation
    layout: str
    secret: ClusterSecret
    shards: tuple[DataEndpoint, ...]  # of this server
    bounds: Bounds  # of what peers may say, whose own cut is told by each
    transport: Transport
    report: Callable[[Event], None]
    reach: Callable[[Incarnation, Cut, tuple[DataEndpoint, ...]], None]  # here a dialled peer's KV can be pulled
    note: Callable[[str], None]  # one line for the log
    new_nonce: Callable[[], bytes]  # CHALLENGE_BYTES, never the same again
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    limits: Limits = field(default_factory=Limits)
    peers: dict[Incarnation, ControlPeer] = field(default_factory=dict[Incarnation, ControlPeer])
    unidentified: dict[Link, None] = field(default_factory=dict[Link, None])  # accepted; the oldest first
    _why_lost: dict[Incarnation, str] = field(default_factory=dict[Incarnation, str])  # the last `limits.peers` of them
    _unnoted: int = 0  # connections that proved nothing since the last line about one
    _noted_at: Nanos | None = None

    # -- what the node wants --------------------------------------------------------------------------------------

    def connect(self, who: Incarnation, voucher: Voucher, endpoint: Endpoint, now: Nanos) -> None:
        """Have a connection to this life of a prefill, for which a bootstrap server vouches.

        Says PeerLost for one for which nobody else vouches but this one, before. One that is connected stays so,
        whatever is said here of where it may be dialled.
        """
        for other in [other for other in self.peers.values() if other.who != who]:
            if other.candidates.is_vouched_by(voucher):
                other.candidates.withdraw(voucher)
                self._lose_if_nowhere(other, "was replaced by another life")
        peer = self.peers.get(who) or self._new_peer(who)
        if peer is None:
            self.report(PeerLost(who, detail=f"{self.limits.peers} others are connected"))
            return
        peer.candidates.vouch(voucher, endpoint)
        if peer.link is None:
            if not peer.was_reached:
                peer.lost_at = None  # what others say of it, and is wrong, does not count against this address
            self._dial(peer, now)

    def tell(self, who: Incarnation, message: Message, now: Nanos) -> None:
        peer = self.peers.get(who)
        if peer is None:
            if isinstance(message, Ready):  # lost before the node had learned of it
                self.report(PeerLost(who, detail=self._why_lost.get(who, "")))
        elif peer.link is not None:
            self._say(peer.link, message, now)
        elif len(peer.waiting) < self.limits.waiting and (peer.dials or may_wait(peer, message)):
            peer.waiting.append(message)

    def close(self) -> None:
        for link in list(self.unidentified):
            self._close(link)
        for peer in self.peers.values():
            self._close_all(peer)

    # -- time -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> Nanos | None:
        """When `tick` has something to do, if nothing comes."""
        oldest = next(iter(self.unidentified), None)
        times = [oldest.since_ns + HELLO_NS] if oldest is not None else []
        for peer in self.peers.values():
            if peer.lost_at is not None:
                times.append(peer.lost_at)
            if peer.retry_at is not None:
                times.append(peer.retry_at)
            if peer.dials:
                times += [link.since_ns + HELLO_NS for link in peer.dials.values()]
            if (link := peer.link) is not None:
                times += (link.heard_ns + link.silence_ns, link.said_ns + self.heartbeat.interval_ns)
        return Nanos(min(times)) if times else None

    def tick(self, now: Nanos) -> None:
        """Redial, give up, say that we are here, and notice who is not."""
        while (oldest := next(iter(self.unidentified), None)) is not None and now >= oldest.since_ns + HELLO_NS:
            self._drop(oldest, "does not prove who it is", now)
        for peer in list(self.peers.values()):
            self._tick_peer(peer, now)

    def _tick_peer(self, peer: ControlPeer, now: Nanos) -> None:
        for link in [link for link in peer.dials.values() if now >= link.since_ns + HELLO_NS]:
            if not link.is_open:  # the peer was lost with the one before
                return
            self._close(link)
            self._dial_failed(peer, link.endpoint, DialFailure("does not prove who it is", is_final=True), now)
        if self.peers.get(peer.who) is not peer:
            return
        link = peer.link
        if link is not None and now >= link.heard_ns + link.silence_ns:
            self._lose(peer, "silent")
        elif link is not None and now >= link.said_ns + self.heartbeat.interval_ns:
            self._say(link, PeerPing(), now)
        elif peer.lost_at is not None and now >= peer.lost_at:
            self._lose(peer, f"did not return: {peer.trouble}")
        elif peer.retry_at is not None and now >= peer.retry_at:
            self._dial(peer, now)

    # -- connections ----------------------------------------------------------------------------------------------

    def accepted(self, now: Nanos) -> Link:
        """Somebody has connected."""
        if len(self.unidentified) >= self.limits.unidentified:
            self.make_room(now)  # not the newcomer: silent ones must not shut out a peer
        link = self._link(None, now)
        self.unidentified[link] = None
        self.transport.write(link)
        return link

    def make_room(self, now: Nanos) -> bool:
        """Drop a connection that has proven nothing, the oldest. False: there is none."""
        oldest = next(iter(self.unidentified), None)
        if oldest is not None:
            self._drop(oldest, "gives way to a newer connection", now)
        return oldest is not None

    def dial_failed(self, link: Link, failure: DialFailure, now: Nanos) -> None:
        assert link.peer is not None
        self._close(link)
        self._dial_failed(link.peer, link.endpoint, failure, now)

    def received(self, link: Link, data: bytes, now: Nanos) -> None:
        """Some bytes, cut anywhere."""
        try:
            for message in link.session.feed(data):
                link.heard_ns = now
                self._heard(link, message, now)
                if not link.is_open:
                    return
        except MalformedFrame as error:
            self._drop(link, str(error), now, is_wrong=True)
            return
        if link.session.outgoing:
            self.transport.write(link)

    def broken(self, link: Link, reason: str, now: Nanos) -> None:
        """The connection is gone, or the other end closed it."""
        self._drop(link, closing(link, reason), now)

    def _new_peer(self, who: Incarnation) -> ControlPeer | None:
        """None: there are too many. Of those that were never reached the oldest gives way."""
        never_reached = [peer for peer in self.peers.values() if not peer.was_reached]
        if len(never_reached) >= self.limits.unidentified:
            self._lose(never_reached[0], "gives way to others that are dialled")
        if len(self.peers) >= self.limits.peers and not self._lose_least_heard():
            return None
        self._why_lost.pop(who, None)
        peer = self.peers[who] = ControlPeer(who, self.bounds)
        return peer

    def _lose_least_heard(self) -> bool:
        """Of those that dial us: members that greet and say nothing must not shut out one that has something to say."""
        dialling = [peer for peer in self.peers.values() if peer.link is not None and peer.link.endpoint is None]
        if dialling:
            self._lose(min(dialling, key=last_word_ns), "gives way to a newer peer")
        return bool(dialling)

    def _dial(self, peer: ControlPeer, now: Nanos) -> None:
        """Everywhere where it may be, at once: an endpoint that only somebody claims must not hold up a right one."""
        peer.retry_at = None
        for endpoint in peer.candidates.endpoints:
            if endpoint not in peer.dials and endpoint in peer.candidates.endpoints:
                self._dial_at(peer, endpoint, now)

    def _dial_at(self, peer: ControlPeer, endpoint: Endpoint, now: Nanos) -> None:
        host, _port = endpoint
        if not is_numeric(host):  # a lookup would hold up the node
            self._dial_failed(peer, endpoint, DialFailure(f"names {host}, which is no address", is_final=True), now)
            return
        link = self._link(endpoint, now)
        failure = self.transport.dial(link, endpoint)
        if failure is not None:
            link.is_open = False
            self._dial_failed(peer, endpoint, failure, now)
            return
        link.peer = peer
        peer.dials[endpoint] = link

    def _link(self, endpoint: Endpoint | None, now: Nanos) -> Link:
        session = Session(
            self.secret,
            PeerHello(CONTROL_PROTOCOL, self.me, self.new_nonce()),
            Greeting(self.layout, self.heartbeat.interval_ns, self.bounds.cut, self.shards),
            is_dialler=endpoint is not None,
        )
        silence_ns = self.heartbeat.silence_ns(self.heartbeat.interval_ns)
        return Link(session, endpoint, since_ns=now, heard_ns=now, said_ns=now, silence_ns=silence_ns)

    def _say(self, link: Link, message: Frame, now: Nanos) -> None:
        pending = len(link.session.outgoing)
        if pending > self.limits.pending_bytes:
            self._drop(link, f"{pending} bytes wait for a reader that does not read", now)
            return
        link.session.say(message)
        link.said_ns = now
        self.transport.write(link)

    def _close(self, link: Link) -> None:
        self.unidentified.pop(link, None)
        link.is_open = False
        self.transport.hang_up(link)

    def _close_all(self, peer: ControlPeer) -> None:
        for link in [*peer.dials.values(), *([peer.link] if peer.link is not None else [])]:
            self._close(link)
        peer.dials.clear()
        peer.link = None

    # -- who is there ---------------------------------------------------------------------------------------------

    def _heard(self, link: Link, message: Greeting | Frame, now: Nanos) -> None:
        match message:
            case Greeting():
                self._greet(link, message, now)
            case PeerPing():
                pass
            case Ready() | Offer() | Release() | Abort() | Moved():
                assert link.peer is not None
                if message.source != link.peer.who:
                    raise MalformedFrame("a message in another's name")
                told = admitted(message, link.peer.bounds)
                if told is None:
                    raise MalformedFrame("a message about no room")
                link.peer.told_ns = now
                self.report(PeerSaid(link.peer.who, told))
            case never:
                assert_never(never)

    def _greet(self, link: Link, greeting: Greeting, now: Nanos) -> None:
        """Who is at the other end holds the secret: from here on it is who it says it is."""
        source = link.session.source
        assert source is not None
        if source == self.me:
            raise MalformedFrame("is this server itself")
        if greeting.layout == self.layout and not self.bounds.grid.can_be_cut(greeting.cut):
            raise MalformedFrame(f"is cut in a way in which this model cannot be: {greeting.cut.name}")
        peer = self._greet_acceptor(link, greeting, source) if link.endpoint else self._greet_dialler(link, source)
        if peer.link is link:
            peer.bounds = structs.replace(self.bounds, peer_cut=greeting.cut)
        link.silence_ns = self.heartbeat.silence_ns(greeting.ping_ns)
        if peer.lost_at is not None:
            self.report(PeerReturned(peer.who))
        peer.was_reached = True
        peer.lost_at = peer.retry_at = None
        peer.retry_ns = FIRST_RETRY_NS
        waiting, peer.waiting = peer.waiting, []
        for message in waiting:
            self._say(link, message, now)

    def _greet_acceptor(self, link: Link, greeting: Greeting, source: Incarnation) -> ControlPeer:
        """The one that was dialled answers."""
        peer, endpoint = link.peer, link.endpoint
        assert peer is not None
        assert endpoint is not None
        if source != peer.who:  # restarted, or another server took the port
            raise MalformedFrame("is another life now")
        if greeting.layout == self.layout:  # with another one no KV will travel, and requests say why
            shards = reachable_shards(greeting, host=endpoint[0])
            if peer.link is None:
                self.reach(source, greeting.cut, shards)
        peer.candidates.prove(endpoint)
        del peer.dials[endpoint]
        if peer.link is None:
            peer.link = link
            link.session.greet()
        else:
            self._close(link)  # it was reached elsewhere meanwhile
        return peer

    def _greet_dialler(self, link: Link, source: Incarnation) -> ControlPeer:
        peer = self.peers.get(source) or self._new_peer(source)
        if peer is None:
            raise MalformedFrame(f"{self.limits.peers} others are connected")
        del self.unidentified[link]
        if peer.link is not None:  # its old connection broke without our noticing
            self._close(peer.link)
        peer.link, link.peer = link, peer
        return peer

    def _drop(self, link: Link, reason: str, now: Nanos, *, is_wrong: bool = False) -> None:
        """The connection is of no use any more; the peer may come back on another.

        is_wrong: who is at the other end does not keep the protocol.
        """
        peer, endpoint = link.peer, link.endpoint
        if peer is None and (is_wrong or link.session.source is not None):
            self._note_unidentified(link, reason, now)
        self._close(link)
        if peer is not None and peer.link is link:
            peer.link = None
            self._broken(peer, reason, now)
        elif peer is not None and endpoint in peer.dials:
            self._dial_failed(peer, endpoint, DialFailure(reason, is_final=is_wrong), now)

    def _dial_failed(self, peer: ControlPeer, endpoint: Endpoint | None, failure: DialFailure, now: Nanos) -> None:
        """A final failure: the life that was meant is not there, and will not be."""
        assert endpoint is not None
        peer.dials.pop(endpoint, None)
        if failure.is_final:
            peer.candidates.remove(endpoint)
        if peer.link is not None or self._lose_if_nowhere(peer, failure.reason):
            return
        if peer.dials:
            peer.trouble = failure.reason
        else:
            self._broken(peer, failure.reason, now)

    def _broken(self, peer: ControlPeer, reason: str, now: Nanos) -> None:
        peer.trouble = reason
        if peer.lost_at is None:
            self.note(one_line(f"connection to {peer.who.name} broke: {reason}"))
            peer.lost_at = Nanos(now + RETURN_NS)
        if peer.candidates.endpoints:
            peer.retry_at = Nanos(now + peer.retry_ns)
            peer.retry_ns = min(Nanos(2 * peer.retry_ns), MAX_RETRY_NS)

    def _lose_if_nowhere(self, peer: ControlPeer, reason: str) -> bool:
        """One that is dialled is lost when there is no endpoint left."""
        if peer.candidates.endpoints:
            return False
        self._lose(peer, reason)
        return True

    def _lose(self, peer: ControlPeer, reason: str) -> None:
        self.note(one_line(f"peer {peer.who.name} is lost: {reason}"))
        self._close_all(peer)
        del self.peers[peer.who]
        while len(self._why_lost) >= self.limits.peers:
            del self._why_lost[next(iter(self._why_lost))]
        self._why_lost[peer.who] = one_line(reason)
        self.report(PeerLost(peer.who, detail=one_line(reason)))

    def _note_unidentified(self, link: Link, reason: str, now: Nanos) -> None:
        """Whoever likes can cause these lines: they are few."""
        if self._noted_at is not None and now < self._noted_at + NOTE_NS:
            self._unnoted += 1
            return
        who = "" if link.session.source is None else f" that says it is {link.session.source.name}"
        more = f" ({self._unnoted} more before it)" if self._unnoted else ""
        self._noted_at, self._unnoted = now, 0
        self.note(one_line(f"a connection{who} was dropped: {reason}{more}"))


def may_wait(peer: ControlPeer, message: Message) -> bool:
    """It is told once, to one who is about to be dialled again. READY is said again when that one is back."""
    return bool(peer.candidates.endpoints) and not isinstance(message, Ready)


def last_word_ns(peer: ControlPeer) -> tuple[bool, Nanos]:
    """Whoever has never said a message comes before all who have."""
    assert peer.link is not None
    return peer.told_ns is not None, peer.told_ns if peer.told_ns is not None else peer.link.since_ns


def closing(link: Link, reason: str) -> str:
    if link.session.source is None or link.session.is_member:
        return reason
    return "closed the connection before both had proven to hold this cluster's secret (--cluster-secret-file)"
