"""One connection between two hosts of a server: who is at the other end, and frames that only the two can make.

As between nodes (`node/session.py`): each side says a hello in clear with a fresh nonce, keys come from the cluster's
secret and both hellos, and everything after is sealed. Who opens the first sealed frame knows that the other end holds
the secret, and is there now. Bytes in, bytes out: no socket in here.
"""

from typing import Any, Generic, TypeVar  # Any: a union type as a value, which the type system cannot spell

import msgspec
from cryptography.exceptions import InvalidTag
from msgspec import Struct

from tandem.membership import CHALLENGE_BYTES, ClusterSecret, new_challenge
from tandem.server.channel import ChannelKeys
from tandem.server.frames import HEAD_BYTES, MalformedFrame, decoded
from tandem.server.node.session import FROM_ACCEPTOR, FROM_DIALLER, NotAMember, Seal, opened

HOSTS_PROTOCOL = 1
PURPOSE = "connection between hosts"
CHANNEL_PURPOSE = "channel of a worker"
MAX_BODY_BYTES = 2 << 20  # the fields of a `Join` are the longest

Incoming = TypeVar("Incoming")


class HostHello(Struct, frozen=True, tag=True):
    protocol: int
    nonce: bytes


_encode = msgspec.msgpack.Encoder().encode
_hellos: msgspec.msgpack.Decoder[HostHello] = msgspec.msgpack.Decoder(HostHello)


def body_bytes(head: bytes) -> int:
    """Of the frame that begins with `head`. Raises MalformedFrame."""
    size = int.from_bytes(head)
    if size > MAX_BODY_BYTES:
        raise MalformedFrame(f"a frame of {size} bytes; at most {MAX_BODY_BYTES} are allowed")
    return size


class HostSession(Generic[Incoming]):
    """One end of one connection: say `hello`, `meet` that of the other end, then `seal` and `open`."""

    def __init__(self, secret: ClusterSecret, incoming: Any, *, is_dialler: bool) -> None:
        self._secret = secret
        self._is_dialler = is_dialler
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._hello = _encode(HostHello(HOSTS_PROTOCOL, new_challenge()))
        self._hellos: tuple[bytes, bytes] | None = None
        self._sealing: Seal | None = None
        self._opening: Seal | None = None
        self.is_member = False  # the other end, once a frame of it was opened

    @property
    def hello(self) -> bytes:
        """The first frame of this end."""
        return len(self._hello).to_bytes(HEAD_BYTES) + self._hello

    def meet(self, body: bytes) -> None:
        """The hello of the other end. Raises MalformedFrame."""
        hello = decoded(_hellos, body)
        if hello.protocol != HOSTS_PROTOCOL:
            raise MalformedFrame(f"speaks protocol {hello.protocol} between hosts, here it is {HOSTS_PROTOCOL}")
        if len(hello.nonce) != CHALLENGE_BYTES:
            raise MalformedFrame("says a hello that is none")
        self._hellos = (self._hello, body) if self._is_dialler else (body, self._hello)
        sealing, opening = self._keys(PURPOSE)
        self._sealing, self._opening = Seal(sealing), Seal(opening)

    def seal(self, message: Struct) -> bytes:
        assert self._sealing is not None
        return self._sealing.frame(_encode(message))

    def open(self, body: bytes) -> Incoming:
        """Raises MalformedFrame, NotAMember."""
        assert self._opening is not None
        if self.is_member:
            return decoded(self._decoder, opened(self._opening, body))
        try:
            first = self._opening.open(body)
        except InvalidTag:
            raise NotAMember("does not hold this cluster's secret (--cluster-secret-file)") from None
        self.is_member = True
        return decoded(self._decoder, first)

    def channel_keys(self) -> ChannelKeys:
        """For worker and node, who go on with this connection."""
        return ChannelKeys(*self._keys(CHANNEL_PURPOSE))

    def _keys(self, purpose: str) -> tuple[bytes, bytes]:
        """Of what this end says, and of what it hears."""
        assert self._hellos is not None
        ways = (FROM_DIALLER, FROM_ACCEPTOR) if self._is_dialler else (FROM_ACCEPTOR, FROM_DIALLER)
        sealing, opening = (self._secret.key(purpose, *self._hellos, way) for way in ways)
        return sealing, opening
