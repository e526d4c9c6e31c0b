"""Nodes of control links over wires in this process: `tandem.server.node.links` without sockets."""

import itertools
from collections import deque
from dataclasses import dataclass, field

from tandem.core.disagg.message_checks import Bounds
from tandem.core.disagg.messages import Ready, Release
from tandem.core.events import Event, PeerLost, PeerSaid
from tandem.core.values import Address, Incarnation, Nanos, Room
from tandem.membership import CHALLENGE_BYTES, ClusterSecret
from tandem.server.node.candidates import Endpoint
from tandem.server.node.links import DialFailure, Limits, Link, Links
from tandem.server.wire import DataEndpoint

PREFILL, DECODE = Incarnation("prefill", "10"), Incarnation("decode", "20")
SECRET = ClusterSecret(b"what all members of the cluster know")
START = Nanos(0)
ENDPOINT: Endpoint = ("127.0.0.1", 5)
FOUND = (Address("127.0.0.1", 8998), 0)
NOBODY = DialFailure("no route to host", is_final=False)


@dataclass(eq=False)
class Node:
    """One end. What it has written lies in its links until the wires carry it."""

    me: Incarnation
    wires: "Wires"
    limits: Limits = field(default_factory=Limits)
    heard: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        nonces = itertools.count(int(self.me.id) << 32)
        self.links = Links(
            self.me,
            "layout",
            SECRET,
            (DataEndpoint("127.0.0.1", 7001),),
            Bounds(512, lambda extra: True, lambda extra: True),
            self,
            self.heard.append,
            lambda who, cut, shards: None,
            self.notes.append,
            lambda: next(nonces).to_bytes(CHALLENGE_BYTES),
            limits=self.limits,
        )

    def dial(self, link: Link, endpoint: Endpoint) -> DialFailure | None:
        return self.wires.dial(self, link, endpoint)

    def write(self, link: Link) -> None:
        """The wires look themselves."""

    def hang_up(self, link: Link) -> None:
        self.wires.closed.append(link)

    def connect(self, endpoint: Endpoint = ENDPOINT) -> None:
        self.links.connect(PREFILL, FOUND, endpoint, self.wires.now)

    def tell(self, who: Incarnation, message: Ready | Release) -> None:
        self.links.tell(who, message, self.wires.now)

    @property
    def is_connected(self) -> bool:
        """To anybody."""
        return any(peer.link is not None for peer in self.links.peers.values())

    @property
    def said(self) -> list[object]:
        return [event.message for event in self.heard if isinstance(event, PeerSaid)]

    @property
    def lost(self) -> list[Incarnation]:
        return [event.peer for event in self.heard if isinstance(event, PeerLost)]


@dataclass(eq=False)
class Wires:
    """Carries bytes between nodes, in order, when it is told to."""

    now: Nanos = START
    listener: Node | None = None
    ends: dict[Link, tuple[Node, Link]] = field(default_factory=dict)  # by one end: the node and link at the other
    closed: deque[Link] = field(default_factory=deque)
    num_dials: int = 0

    def dial(self, node: Node, link: Link, endpoint: Endpoint) -> DialFailure | None:
        self.num_dials += 1
        if self.listener is None or endpoint != ENDPOINT:
            return NOBODY
        other = self.listener.links.accepted(self.now)
        self.ends[link], self.ends[other] = (self.listener, other), (node, link)
        return None

    def carry(self) -> None:
        """Until there is nothing left to carry."""
        while self.closed or any(link.session.outgoing for link in self.ends):
            while self.closed:
                self.cut(self.closed.popleft())
            for link, (node, other) in list(self.ends.items()):
                data = bytes(link.session.outgoing)
                link.session.outgoing.clear()
                if data and other.is_open:
                    node.links.received(other, data, self.now)

    def cut(self, link: Link) -> None:
        """Both ends hear that it broke, if they do not know."""
        node, other = self.ends.pop(link, (None, None))
        if node is None or other is None:
            return
        here, _ = self.ends.pop(other)
        for end, at in ((other, node), (link, here)):
            if end.is_open:
                at.links.broken(end, "cut by the test", self.now)

    def pass_time(self, duration_ns: int, *nodes: Node) -> None:
        """As it is slept through by nodes that wake at their deadlines."""
        until = self.now + duration_ns
        while True:
            deadlines = [node.links.next_deadline() for node in nodes]
            due = min((deadline for deadline in deadlines if deadline is not None), default=until)
            self.now = Nanos(min(until, max(self.now, due)))
            for node in nodes:
                node.links.tick(self.now)
            self.carry()
            if self.now >= until:
                return


def two_nodes() -> tuple[Wires, Node, Node]:
    """Prefill and decode, connected."""
    wires = Wires()
    prefill, decode = Node(PREFILL, wires), Node(DECODE, wires)
    wires.listener = prefill
    decode.connect()
    wires.carry()
    return wires, prefill, decode


def ready(room: int = 5, source: Incarnation = DECODE) -> Ready:
    return Ready(Room(room), 1, source, PREFILL, "layout", 100)


def link_of(node: Node, who: Incarnation) -> Link:
    link = node.links.peers[who].link
    assert link is not None
    return link
