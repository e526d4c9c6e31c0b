"""Whoever attacks a data plane, on raw sockets: a hand-made end of a connection that does right what it is told to.

`Asker` is the reader's end and `Impostor` the owner's. Neither uses the server's own code for its part of a connection,
only the layouts of `protocol.py`; what they prove they make of a secret that they are given, which may be a wrong one.
"""

import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from data_planes import pack_read
from tandem.core.values import Incarnation, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import protocol
from tandem.transfer.handshake import OWNER_PURPOSE, READER_PURPOSE
from tandem.transfer.link import unix_address
from tandem.transfer.protocol import NO_PROOF, Hello, Status, Welcome

WRONG = ClusterSecret(b"the secret of some other cluster")
PATIENCE_S = 10.0
SOMEBODY = Incarnation("attacker", "f" * 32)


@dataclass(frozen=True)
class Target:
    """Where an owner listens, and what is known of it."""

    incarnation: Incarnation
    page_bytes: int
    host: str
    port: int
    unix: str = ""  # if it is to be used


def connect(target: Target) -> socket.socket:
    if target.unix:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(PATIENCE_S)
        link.connect(unix_address(target.unix))
        return link
    return socket.create_connection((target.host, target.port), timeout=PATIENCE_S)


def read_exactly(link: socket.socket, num_bytes: int) -> bytes:
    """Fewer bytes when the other end closes before."""
    received = b""
    while len(received) < num_bytes:
        try:
            data = link.recv(min(num_bytes - len(received), 1 << 20))
        except ConnectionResetError:
            break
        if not data:
            break
        received += data
    return received


def read_all(link: socket.socket) -> bytes:
    return read_exactly(link, 1 << 40)


class Asker:
    """The reader's end of one connection."""

    def __init__(self, target: Target, *, secret: ClusterSecret, reader: Incarnation = SOMEBODY) -> None:
        self.target, self.secret, self.reader = target, secret, reader
        self.link = connect(target)
        self.challenge = b""
        self.hello_said = b""

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def hear_challenge(self) -> bytes:
        message = read_exactly(self.link, protocol.CHALLENGE_MESSAGE_BYTES)
        self.challenge = protocol.unpack_challenge(message)
        return self.challenge

    def hello(self, **changes: object) -> bytes:
        """A Hello that fits, but for `changes` of its fields, with a proof of all that it says."""
        fields = {
            "version": protocol.VERSION,
            "page_bytes": self.target.page_bytes,
            "incarnation": protocol.incarnation_digest(self.target.incarnation),
            "reader": protocol.reader_digest(self.reader, ShardId(0)),
            "challenge": b"c" * 32,
            "proof": NO_PROOF,
        }
        unproven = protocol.pack_hello(Hello(**(fields | changes)))[: -len(NO_PROOF)]
        return unproven + self.secret.proof(READER_PURPOSE, self.challenge, unproven)

    def say(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it was cut off before it had said everything
            self.link.sendall(message)

    def say_hello(self, message: bytes) -> Welcome:
        self.hello_said = message
        self.say(message)
        return protocol.unpack_welcome(read_exactly(self.link, protocol.WELCOME_BYTES))

    def join(self) -> Status:
        """The whole handshake, as it ought to be."""
        self.hear_challenge()
        return self.say_hello(self.hello()).status

    def is_proven(self, welcome: Welcome) -> bool:
        """Whether the owner has proved the secret that this end has."""
        unproven = protocol.pack_welcome(welcome.status, NO_PROOF)[: -len(NO_PROOF)]
        return self.secret.is_proof(welcome.proof, OWNER_PURPOSE, self.challenge, self.hello_said, unproven)

    def ask(self, room: int, secret: bytes, pages: Sequence[int], generations: Sequence[int]) -> None:
        self.say(pack_read(room, secret, pages, generations, page_bytes=self.target.page_bytes))

    def answer(self) -> tuple[Status, bytes]:
        """The status of one frame, and everything behind its header that comes with it."""
        header = read_exactly(self.link, protocol.FRAME_HEADER_BYTES)
        status, count = struct.unpack("<II", header)
        return Status(status), read_exactly(self.link, count * self.target.page_bytes)

    def is_closed(self) -> bool:
        """By the other end, within the patience of the socket."""
        return read_all(self.link) == b""


class Impostor:
    """A listener that is not the owner whose address the reader believes it has."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.port: int = self.listener.getsockname()[1]

    def __enter__(self) -> "Impostor":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def accept(self) -> socket.socket:
        link, _ = self.listener.accept()
        link.settimeout(PATIENCE_S)
        return link

    def greet(self, link: socket.socket, challenge: bytes = b"o" * 32) -> bytes:
        """Say a Challenge; returns the Hello that answers it."""
        link.sendall(protocol.pack_challenge(challenge))
        return read_exactly(link, protocol.HELLO_BYTES)

    @staticmethod
    def welcome(status: Status, secret: ClusterSecret, hello: bytes, challenge: bytes = b"o" * 32) -> bytes:
        """A Welcome with the proof that `secret` makes of it."""
        unproven = protocol.pack_welcome(status, NO_PROOF)[: -len(NO_PROOF)]
        return unproven + secret.proof(OWNER_PURPOSE, challenge, hello, unproven)
