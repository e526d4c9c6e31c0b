"""Ends of control connections in the hands of a test: a member of the cluster, or somebody who holds another secret.

with dialled(port, SECRET, source=DECODE) as end:
    end.greet()
    end.say(message)
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from tandem.core.values import Cut, Incarnation
from tandem.membership import ClusterSecret, new_challenge
from tandem.server.channel import HEAD_BYTES, MalformedFrame
from tandem.server.node.links import Heartbeat
from tandem.server.node.session import CONTROL_PROTOCOL, Frame, Greeting, PeerHello, Session
from tandem.server.wire import DataEndpoint

SECRET = ClusterSecret(b"what all members of the cluster know")
OTHER_SECRET = ClusterSecret(b"what members of another cluster know")
SHARDS = (DataEndpoint("127.0.0.1", 7001),)
UNCUT = Cut()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEAD_BYTES) + body


def hello_of(
    source: Incarnation, *, protocol: int = CONTROL_PROTOCOL, challenge: Callable[[], bytes] = new_challenge
) -> PeerHello:
    return PeerHello(protocol, source, challenge())


def nested(depth: int) -> bytes:
    """A hello whose unknown field is nested so deeply: 1,286 bytes with 1,200."""
    known = {"type": "hello", "protocol": CONTROL_PROTOCOL, "source": {"name": "decode", "id": "20"}}
    body = msgspec.msgpack.encode(known)
    return framed(bytes([body[0] + 1]) + body[1:] + msgspec.msgpack.encode("x") + b"\x91" * depth + b"\xc0")


@dataclass
class End:
    """One end of a connection. What is there is read when it is asked for."""

    sock: socket.socket
    session: Session
    heard: list[Greeting | Frame] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)  # as it came
    is_closed: bool = False  # by the other end, or because what it says is wrong
    trouble: str = ""

    def read(self) -> list[Greeting | Frame]:
        """What has come so far, of which some may have come now."""
        try:
            data = self.sock.recv(1 << 16)
            self.received += data
            self.is_closed = self.is_closed or not data
            self.heard += self.session.feed(data)
        except TimeoutError:
            pass
        except (ConnectionError, MalformedFrame) as error:
            self.is_closed, self.trouble = True, str(error)
        self.flush()
        return self.heard

    def flush(self) -> bytes:
        """Send what the session wants to say; returned as it went."""
        data, self.session.outgoing = bytes(self.session.outgoing), bytearray()
        try:
            self.sock.sendall(data)
        except OSError as error:
            self.is_closed, self.trouble = True, str(error)
        return data

    def greet(self) -> bytes:
        self.session.greet()
        return self.flush()

    def say(self, *messages: Frame) -> None:
        for message in messages:
            self.session.say(message)
        self.flush()

    def join(self, pump: Callable[[], None] = lambda: None, *, within_s: float = 10.0) -> None:
        """Take the other end's greeting, and answer."""
        deadline = time.monotonic() + within_s
        while not self.session.is_member:
            pump()
            self.read()
            assert not self.is_closed, self.trouble
            assert time.monotonic() < deadline, "no greeting came"
        self.greet()


def end_of(
    sock: socket.socket,
    secret: ClusterSecret,
    source: Incarnation,
    *,
    is_dialler: bool,
    layout: str = "layout",
    cut: Cut = UNCUT,
    shards: tuple[DataEndpoint, ...] = SHARDS,
    challenge: Callable[[], bytes] = new_challenge,
) -> End:
    sock.settimeout(0.01)
    greeting = Greeting(layout, Heartbeat().interval_ns, cut, shards)
    return End(sock, Session(secret, hello_of(source, challenge=challenge), greeting, is_dialler=is_dialler))


@contextmanager
def dialled(
    port: int, secret: ClusterSecret, source: Incarnation, *, layout: str = "layout", host: str = "127.0.0.1"
) -> Iterator[End]:
    """A connection to a node that listens; its hello is said."""
    with socket.create_connection((host, port)) as sock:
        end = end_of(sock, secret, source, is_dialler=True, layout=layout)
        end.flush()
        yield end
