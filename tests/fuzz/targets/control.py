"""The control plane of a node, with a genuine peer, and somebody besides: real sockets on loopback.

    control_noise       whatever somebody sends who has connected
    control_frames      whole frames of somebody who knows the protocol, and not the secret
    control_endpoint    what answers at an endpoint that a bootstrap server has told of
    control_member      frames of a member of the cluster, sealed as they should be, with arbitrary messages

Whatever it is costs its own connection: the node's thread goes on, the genuine peer is heard as before, and nothing is
believed in its name.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from engine import Run, Target
from examples import examples_of
from mutators import framed as frames_of
from mutators import join_frames, mutate_bytes, mutate_msgpack, mutate_typed, split_frames

from attackers import end_of, framed, hello_of, nested
from tandem.core.disagg.message_checks import Bounds
from tandem.core.disagg.messages import Message, Release
from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.values import MILLISECOND, Address, Cut, Incarnation, Nanos, Room
from tandem.membership import CHALLENGE_BYTES, ClusterSecret
from tandem.server.node.local_peer import SelectorPoller
from tandem.server.node.peers import Peers
from tandem.server.node.session import Greeting
from tandem.server.wire import DataEndpoint, ReplicaInfo
from targets.http import Broken

PREFILL, DECODE = Incarnation("prefill", "1" * 32), Incarnation("decode", "2" * 32)
ATTACKER = Incarnation("attacker", "3" * 32)
SECRET, OTHER_SECRET = ClusterSecret(b"what all members know"), ClusterSecret(b"what somebody else knows")
SHARDS = (DataEndpoint("127.0.0.1", 7001),)
FOUND_AT, ELSEWHERE = Address("127.0.0.1", 8998), Address("127.0.0.1", 8999)
LAYOUT = "layout"
BOUNDS = Bounds(vocab_size=50_000, is_extra=lambda extra: True, is_prompt_extra=lambda extra: True)
PATIENCE_S = 10.0
TURN_NS = 50 * MILLISECOND  # that each turn takes on the nodes' clock: nobody waits for their timeouts
HELLO = Release(Room(1), DECODE, "done")


@dataclass
class Node:
    me: Incarnation
    poller: SelectorPoller
    clock: Callable[[], Nanos]
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = Peers(
            self.me,
            LAYOUT,
            SECRET,
            SHARDS,
            BOUNDS,
            self.poller,
            self.events.append,
            reach=lambda peer, cut, shards: None,
            clock=self.clock,
            note=lambda line: None,
        )
        self.port = self.peers.listen("127.0.0.1")


class Pair:
    """A prefill that has met a decode."""

    def __init__(self) -> None:
        self._poller, self._now = SelectorPoller(), Nanos(0)
        self.prefill, self.decode = (Node(who, self._poller, lambda: self._now) for who in (PREFILL, DECODE))
        self.decode.peers.connect(replica(PREFILL, self.prefill.port), FOUND_AT)
        self.check()

    def pump(self) -> None:
        self._now = Nanos(self._now + TURN_NS)
        self._poller.poll(0.001)
        for node in (self.prefill, self.decode):
            node.peers.tick()
            node.peers.flush()

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.pump()
            if time.monotonic() > deadline:
                raise Broken(f"{what}: {self.prefill.events[-3:]} {self.decode.events[-3:]}")

    def check(self) -> None:
        """The genuine two are heard, and nothing was said in their names."""
        self.decode.peers.tell(PREFILL, HELLO)
        self.until(lambda: PeerSaid(DECODE, HELLO) in self.prefill.events, "the genuine decode is heard no more")
        self.prefill.events.remove(PeerSaid(DECODE, HELLO))
        for event in (*self.prefill.events, *self.decode.events):
            if isinstance(event, PeerSaid | PeerLost | PeerReturned) and event.peer in (DECODE, PREFILL):
                raise Broken(f"somebody made a node believe {event}")
        self.prefill.events.clear()
        self.decode.events.clear()

    def say(self, sock: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            sock.setblocking(True)
            for start in range(0, len(data), 1 << 14):
                sock.sendall(data[start : start + (1 << 14)])
                self.pump()
            sock.shutdown(socket.SHUT_WR)

    def until_closed(self, sock: socket.socket) -> None:
        """The node drops a connection whose other side has nothing more to say."""
        sock.setblocking(False)

        def is_closed() -> bool:
            try:
                return not sock.recv(1 << 16)
            except BlockingIOError:
                return False
            except OSError:
                return True

        self.until(is_closed, "the connection of somebody who has left is kept")

    def accepted(self, listener: socket.socket) -> socket.socket:
        found: list[socket.socket] = []
        listener.setblocking(False)

        def has_come() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.append(listener.accept()[0])
            return bool(found)

        self.until(has_come, "nobody is dialled")
        return found[0]

    @contextlib.contextmanager
    def attacker(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.prefill.port)) as sock:
            yield sock


def replica(who: Incarnation, port: int) -> ReplicaInfo:
    return ReplicaInfo(who, "prefill", LAYOUT, {}, "127.0.0.1", port, SHARDS)


# --- who does not have the secret ------------------------------------------------------------------------------------


def control_noise() -> Run:
    pair = Pair()

    def run(data: bytes) -> None:
        with pair.attacker() as sock:
            pair.say(sock, data)
            pair.until_closed(sock)
        if any(isinstance(event, PeerSaid) for event in pair.prefill.events):
            raise Broken(f"a message of somebody who has proved nothing: {pair.prefill.events}")
        pair.check()

    return run


def control_endpoint() -> Run:
    """Decode dials us, because some bootstrap server has said that another prefill is here."""
    pair = Pair()
    meant = Incarnation("another prefill", "4" * 32)

    def run(data: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pair.decode.peers.connect(replica(meant, listener.getsockname()[1]), ELSEWHERE)
            with pair.accepted(listener) as sock:
                pair.say(sock, data)
                pair.until_closed(sock)
        pair.until(lambda: any(event.peer == meant for event in losses(pair.decode)), "nobody there, and no loss")
        if any(isinstance(event, PeerSaid) for event in pair.decode.events):
            raise Broken(f"a message of somebody who has proved nothing: {pair.decode.events}")
        pair.check()

    return run


def losses(node: Node) -> list[PeerLost]:
    return [event for event in node.events if isinstance(event, PeerLost)]


def frame_seeds() -> Mapping[str, bytes]:
    """Streams of frames in clear. What follows the hello has to be sealed, and is not."""
    greeting = msgspec.msgpack.encode(Greeting(LAYOUT, Nanos(1_000_000_000), Cut(), SHARDS))
    hellos = {
        who.name: msgspec.msgpack.encode(hello_of(who, challenge=challenge)) for who in (ATTACKER, DECODE, PREFILL)
    }
    found = {name: join_frames([hello, greeting]) for name, hello in hellos.items()}
    found["nested"] = nested(1_200)
    found["not_utf8"] = framed(hellos[ATTACKER.name].replace(b"attacker", b"attack\xff\xff"))
    found["protocol"] = framed(msgspec.msgpack.encode(hello_of(ATTACKER, protocol=1, challenge=challenge)))
    return found


def challenge() -> bytes:
    """The same each time: what comes in a run is a function of its seed."""
    return bytes(range(CHALLENGE_BYTES))


def noise_seeds() -> Mapping[str, bytes]:
    found = {**frame_seeds(), "http": b"GET / HTTP/1.1\r\n\r\n"}
    for name, secret in (("another_secret", OTHER_SECRET), ("stops_in_time", SECRET)):
        with socket.socket() as sock:
            end = end_of(sock, secret, DECODE, is_dialler=True, challenge=challenge)
            found[name] = bytes(end.session.outgoing)
    return found


# --- who does --------------------------------------------------------------------------------------------------------


def control_member() -> Run:
    pair = Pair()

    def run(data: bytes) -> None:
        with pair.attacker() as sock:
            end = end_of(sock, SECRET, ATTACKER, is_dialler=True, layout=LAYOUT)
            end.flush()
            end.join(pair.pump)
            sealing = end.session._sealing
            assert sealing is not None
            pair.say(sock, b"".join(sealing.frame(body) for body in split_frames(data)))
            pair.until_closed(sock)
        said = [event for event in pair.prefill.events if isinstance(event, PeerSaid)]
        if any(event.peer != ATTACKER or event.message.source != ATTACKER for event in said):
            raise Broken(f"a message in another's name: {said}")
        pair.check()

    return run


def member_seeds() -> Mapping[str, bytes]:
    messages = {name: msgspec.structs.replace(one, source=ATTACKER) for name, one in examples_of(Message).items()}
    packed = {name.lower(): msgspec.msgpack.encode(message) for name, message in messages.items()}
    foreign = msgspec.msgpack.encode(HELLO)
    found = {name: join_frames([body]) for name, body in packed.items()}
    found["nested"] = join_frames([with_nested_field(packed["release"], 5_000)])
    return {**found, "all": join_frames(list(packed.values())), "in_anothers_name": join_frames([foreign])}


def with_nested_field(message: bytes, depth: int) -> bytes:
    """With one more field, which nobody knows, nested so deeply."""
    return bytes([message[0] + 1]) + message[1:] + msgspec.msgpack.encode("x") + b"\x91" * depth + b"\xc0"


def mutate_member(random, entry: bytes, other: bytes) -> bytes:  # type: ignore[no-untyped-def]  # as all mutators
    return frames_of(mutate_typed if random.random() < 0.6 else mutate_msgpack)(random, entry, other)


TARGETS = (
    Target("control_noise", control_noise, mutate_bytes, 800, seeds=noise_seeds),
    Target("control_frames", control_noise, frames_of(mutate_msgpack), 800, seeds=frame_seeds),
    Target("control_endpoint", control_endpoint, frames_of(mutate_msgpack), 500, seeds=noise_seeds),
    Target("control_member", control_member, mutate_member, 600, seeds=member_seeds),
)
