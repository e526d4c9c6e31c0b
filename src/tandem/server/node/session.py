"""One connection between two nodes: who is at the other end, and frames that only the two of them can make.

    1. each side says a `PeerHello`, in clear: its protocol, who it claims to be, and a random nonce
    2. each side says a `Greeting`, sealed: who accepted at once, who dialled when it has opened that one and wants the
       connection. Who can open a greeting knows that the other end holds the cluster's secret, and is there now: the
       keys come from the secret and from both hellos, and each nonce is new
    3. messages, sealed

A frame is a 4-byte big-endian length and a body. A sealed body is ChaCha20-Poly1305 of one msgpack object: the key
belongs to this connection and direction, the nonce is the number of the frame, the length is authenticated with it.
So a frame that was changed, lost, repeated, reordered, reflected, or recorded on another connection cannot be opened,
and that ends the connection. What is in the frames is read by nobody else.

Bytes in, bytes out: no socket and no clock in here. Until the greeting is opened an end keeps nothing of the other but
a hello and one cut frame, both small.
"""

from collections.abc import Iterator
from ipaddress import ip_address

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from msgspec import Struct, structs

from tandem.core.disagg.message_checks import MAX_LAYOUT_CHARS, is_name
from tandem.core.disagg.messages import Abort, Moved, Offer, Ready, Release
from tandem.core.values import MAX_SHARDS, Cut, Incarnation, Nanos
from tandem.membership import CHALLENGE_BYTES, ClusterSecret
from tandem.server.frames import HEAD_BYTES, MalformedFrame, Splitter, decoded
from tandem.server.wire import EVERY_HOST, DataEndpoint

CONTROL_PROTOCOL = 4
PURPOSE = "control connection"
FROM_DIALLER, FROM_ACCEPTOR = b"from the dialler", b"from the acceptor"
NONCE_BYTES = 12
TAG_BYTES = 16
HELLO_BYTES = 512
GREETING_BYTES = 32 << 10  # data endpoints of 256 shards have half of that
MESSAGE_BYTES = 16 << 20  # an offer of 100,000 tokens is about 150 KB, where one worker reads from one


class PeerHello(Struct, frozen=True, tag="hello"):
    """First on every connection, in both directions. Nothing in it is believed before the greeting is opened."""

    protocol: int
    source: Incarnation
    nonce: bytes


class Greeting(Struct, frozen=True, tag="greeting"):
    """First after the hello, in both directions."""

    layout: str
    ping_ns: Nanos  # how often this side pings when it has nothing to say
    cut: Cut  # of this side
    shards: tuple[DataEndpoint, ...]  # where its KV can be pulled from, in order


class PeerPing(Struct, frozen=True, tag="ping"):
    """I am here and have nothing to say."""


Frame = PeerPing | Ready | Offer | Release | Abort | Moved

_encode = msgspec.msgpack.Encoder().encode
_hellos: msgspec.msgpack.Decoder[PeerHello] = msgspec.msgpack.Decoder(PeerHello)
_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class NotAMember(MalformedFrame):
    """The other end does not hold this cluster's secret."""


class Seal:
    """One direction: makes sealed frames, or opens them, each once and in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._count = 0

    def frame(self, body: bytes) -> bytes:
        head = (len(body) + TAG_BYTES).to_bytes(HEAD_BYTES)
        return head + self._cipher.encrypt(self._nonce(), body, head)

    def open(self, sealed: bytes) -> bytes:
        """Raises InvalidTag."""
        return self._cipher.decrypt(self._nonce(), sealed, len(sealed).to_bytes(HEAD_BYTES))

    def _nonce(self) -> bytes:
        nonce = self._count.to_bytes(NONCE_BYTES)
        self._count += 1
        return nonce


class Session:
    """One end of one connection."""

    def __init__(self, secret: ClusterSecret, hello: PeerHello, greeting: Greeting, *, is_dialler: bool) -> None:
        """`hello.nonce`: new for this connection."""
        assert len(hello.nonce) == CHALLENGE_BYTES
        self._secret = secret
        self._hello = _encode(hello)
        self._greeting = greeting
        self._is_dialler = is_dialler
        self._splitter = Splitter(HELLO_BYTES)
        self._sealing: Seal | None = None
        self._opening: Seal | None = None
        self.source: Incarnation | None = None  # who the other end claims to be; who it is, once it is a member
        self.is_member = False  # its greeting is opened
        self.outgoing = bytearray(len(self._hello).to_bytes(HEAD_BYTES) + self._hello)  # what is to be written

    def feed(self, data: bytes) -> Iterator[Greeting | Frame]:
        """What the other end says, its greeting first. Raises MalformedFrame, NotAMember."""
        for body in self._splitter.feed(data):
            if self._opening is None:
                self._meet(body)
            elif not self.is_member:
                yield self._greeted(self._opening, body)
            else:
                yield decoded(_frames, opened(self._opening, body))

    def greet(self) -> None:
        """Once. Says who we are to who has proven to be a member, and proves that we are one."""
        self._seal(self._greeting)

    def say(self, message: Frame) -> None:
        """Only to a member that was greeted."""
        assert self.is_member
        self._seal(message)

    def _meet(self, body: bytes) -> None:
        hello = decoded(_hellos, body)
        if hello.protocol != CONTROL_PROTOCOL:
            raise MalformedFrame(f"speaks control protocol {hello.protocol}, here it is {CONTROL_PROTOCOL}")
        if len(hello.nonce) != CHALLENGE_BYTES or not is_name(hello.source):
            raise MalformedFrame("says a hello that is none")
        hellos = (self._hello, body) if self._is_dialler else (body, self._hello)
        directions = (FROM_DIALLER, FROM_ACCEPTOR) if self._is_dialler else (FROM_ACCEPTOR, FROM_DIALLER)
        self._sealing, self._opening = (Seal(self._secret.key(PURPOSE, *hellos, way)) for way in directions)
        self.source = hello.source
        self._splitter.max_frame_bytes = GREETING_BYTES
        if not self._is_dialler:
            self.greet()

    def _greeted(self, opening: Seal, body: bytes) -> Greeting:
        try:
            opened_body = opening.open(body)
        except InvalidTag:
            raise NotAMember("does not hold this cluster's secret (--cluster-secret-file)") from None
        greeting = decoded(_greetings, opened_body)
        cut = greeting.cut
        if len(greeting.layout) > MAX_LAYOUT_CHARS or min(cut.sizes) < 1 or cut.num_shards > MAX_SHARDS:
            raise MalformedFrame("says a greeting that is none")
        self._splitter.max_frame_bytes = MESSAGE_BYTES
        self.is_member = True
        return greeting

    def _seal(self, message: Greeting | Frame) -> None:
        assert self._sealing is not None
        self.outgoing += self._sealing.frame(_encode(message))


def opened(opening: Seal, body: bytes) -> bytes:
    try:
        return opening.open(body)
    except InvalidTag:
        raise MalformedFrame("bytes were changed, lost or repeated on their way") from None


def reachable_shards(greeting: Greeting, *, host: str) -> tuple[DataEndpoint, ...]:
    """Where to pull from a peer that was dialled at `host`: a server that listens everywhere is there too.

    Raises MalformedFrame when there are not as many shards as its cut has, or one of them is nowhere.
    """
    if len(greeting.shards) != greeting.cut.num_shards:
        raise MalformedFrame(f"tells of {len(greeting.shards)} data endpoints; its cut has {greeting.cut.num_shards}")
    return tuple(reachable(shard, host) for shard in greeting.shards)


def reachable(shard: DataEndpoint, host: str) -> DataEndpoint:
    if shard.port == 0 or not shard.unix.isprintable():  # the rest is in the types of the struct
        raise MalformedFrame("tells of a data endpoint that is none")
    if shard.host in EVERY_HOST:
        return structs.replace(shard, host=host)
    if not is_numeric(shard.host):
        raise MalformedFrame("tells of a data endpoint that is no address")
    return shard


def is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
