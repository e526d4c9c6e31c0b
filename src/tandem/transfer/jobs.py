"""What a puller hands out, what it knows of peers and attempts, and how a job may end. Decided in `puller.py`."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from msgspec import Struct

from tandem.core.commands import PullPages
from tandem.core.kv_parts import Tile
from tandem.core.values import Cut, Incarnation, RequestId, ShardId
from tandem.transfer.protocol import Status

Key = tuple[RequestId, int]  # request, attempt
Link = TypeVar("Link", bound=Hashable)


class Trouble(Enum):
    """Why a job ended before its time."""

    BROKEN = "broken"  # nobody there, or the connection has ended
    HANDSHAKE_BROKEN = "handshake broken"  # crowded out, or about to be gone: the next dial tells
    FROZEN = "frozen"  # nothing moved for the whole timeout
    REFUSED = "refused"  # with a status
    NONSENSE = "nonsense"  # the peer does not speak the protocol
    NOT_PROVEN = "not proven"  # the peer is no member
    CORRUPT = "corrupt"  # a page differs from its digest
    OURS = "ours"  # an error of ours


@dataclass(frozen=True, slots=True)
class JobFailure:
    trouble: Trouble
    detail: str = ""
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class OfferedPages:
    """What one worker of a peer has offered to this one by one command, checked."""

    digests: tuple[int, ...]
    secret: bytes = field(repr=False)  # of the grant


class PeerAddress(Struct, frozen=True):
    """Of one worker."""

    host: str
    port: int
    unix: str


class Origin(Struct, frozen=True, cache_hash=True):
    """A worker of a life of a server."""

    peer: Incarnation
    shard: ShardId


@dataclass(slots=True)
class Source(Generic[Link]):
    """A worker of a peer from which this one pulls."""

    tile: Tile
    address: PeerAddress
    idle: list[Link] = field(default_factory=list)  # welcomed, no Read under way


@dataclass(slots=True)
class DataPeer(Generic[Link]):
    """A life of a server of which the address is known."""

    cut: Cut
    addresses: tuple[PeerAddress, ...]
    sources: tuple[Source[Link], ...]


@dataclass(slots=True, eq=False)
class Attempt(Generic[Link]):
    """Of a request that has pages to pull, from one worker of a peer or several. Forgotten when they all landed."""

    key: Key
    room: int
    peer: Incarnation
    wanted: int  # pages named so far, by all its commands
    reported: int  # pages that are here, with all their parts, as was said last
    pulls: tuple["Pull[Link]", ...] = ()
    is_over: bool = False  # failed or cancelled: nothing of it is begun any more
    owes_drained: bool = False  # said when no byte can land any more

    @property
    def num_landed(self) -> int:
        """Pages of which all parts are here."""
        return min(pull.landed for pull in self.pulls)

    @property
    def is_armed(self) -> bool:
        """Bytes may land for it."""
        return any(pull.armed is not None for pull in self.pulls)


@dataclass(slots=True, eq=False)
class Pull(Generic[Link]):
    """What one attempt gets from one worker of the peer."""

    attempt: Attempt[Link]
    origin: Origin
    tile: Tile
    landed: int  # pages of which this part is here and checked
    commands: deque[PullPages] = field(default_factory=deque)  # the first one is being pulled
    offer: OfferedPages | None = None  # of the first command, once it is checked
    armed: Link | None = None
    may_retry: bool = True
    busy_since: int | None = None
    queued_at: int = 0


@dataclass(slots=True, eq=False)
class Job(Generic[Link]):
    pull: Pull[Link]
    moved_at: int  # when it was begun, or a frame landed

    @property
    def origin(self) -> Origin:
        return self.pull.origin

    @property
    def tile(self) -> Tile:
        return self.pull.tile


@dataclass(slots=True, eq=False)
class Dial(Job[Link]):
    """Connect and shake hands; then `dialled` or `failed`."""

    address: PeerAddress


@dataclass(slots=True, eq=False)
class Receive(Job[Link]):
    """Send a Read for pages [start, stop) of the command, receive each frame into its destinations and compare the
    digests, say `landed`; then `received` or `failed`. Whole frames move `start`."""

    link: Link
    command: PullPages
    offer: OfferedPages
    start: int
    stop: int
    was_idle: bool  # the link has been used before, and may be dead by now
    began_at: int  # pages landed when the job began
    reported_at: int


AnyJob = TypeVar("AnyJob", bound=Job[Any])
