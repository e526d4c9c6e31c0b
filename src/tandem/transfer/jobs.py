"""What the puller of a shard hands out, what it knows of an attempt, and how a job may end. Decided in `puller.py`."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from tandem.core.commands import PullPages
from tandem.core.values import Incarnation, RequestId
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
class Failure:
    trouble: Trouble
    detail: str = ""
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class OfferedPages:
    """What this shard was offered by one command, checked."""

    digests: tuple[int, ...]
    secret: bytes = field(repr=False)  # of the grant


@dataclass(frozen=True, slots=True)
class PeerAddress:
    host: str
    port: int
    unix: str


@dataclass(slots=True)
class Peer(Generic[Link]):
    """A life of a server of which the address is known."""

    address: PeerAddress
    idle: list[Link] = field(default_factory=list)  # welcomed, no Read under way


@dataclass(slots=True, eq=False)
class Pull(Generic[Link]):
    """One attempt of one request that has pages to pull. Forgotten when they all landed."""

    key: Key
    room: int
    wanted: int  # pages named so far, by all commands of the attempt
    landed: int  # of which these are here and checked
    commands: deque[PullPages] = field(default_factory=deque)  # the first one is being pulled
    offer: OfferedPages | None = None  # of the first command, once it is checked
    armed: Link | None = None
    is_cancelled: bool = False
    may_retry: bool = True
    busy_since: int | None = None
    queued_at: int = 0


@dataclass(slots=True, eq=False)
class Job(Generic[Link]):
    pull: Pull[Link]
    peer: Incarnation
    moved_at: int  # when it was begun, or a frame landed


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
