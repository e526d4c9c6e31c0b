"""What the hosts of one server say to each other: node rank 0, which has the API and the nodes, and the others.

Sealed frames over one TCP connection per host (`session.py`), which the others dial; and the first word on a connection
of its own for every worker, over which from then on worker and node speak as on one machine.
"""

from typing import Annotated

from msgspec import Meta, Struct

from tandem.core.settings import MAX_DP_SIZE
from tandem.core.values import MAX_SHARDS, Incarnation
from tandem.server.wire import HostText, Port

MAX_FIELDS = 256
MAX_REASON_CHARS = 2000

Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
DpRank = Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
ShardNumber = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Ticket = Annotated[bytes, Meta(min_length=16, max_length=16)]
FieldName = Annotated[str, Meta(min_length=1, max_length=128)]
FieldValue = Annotated[str, Meta(max_length=4096)]
Fields = Annotated[dict[FieldName, FieldValue], Meta(max_length=MAX_FIELDS)]


def as_reason(text: str) -> str:
    """As much as the other end takes: engines quote at length, and who cannot read a last word takes it for none."""
    return text[:MAX_REASON_CHARS]


class Here(Struct, frozen=True, tag=True):
    """0 -> other, first: proves that it is a member."""


class Join(Struct, frozen=True, tag=True):
    """other -> 0, first: this host is there, and what it was told."""

    node_rank: Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
    fields: Fields


class WorkerHere(Struct, frozen=True, tag=True):
    """other -> 0, first and last on a worker's connection: the one that was asked for under this ticket.

    Where its group meets, if it was asked to say so.
    """

    ticket: Ticket
    meeting_host: HostText = ""
    meeting_port: Port = 0


class Welcome(Struct, frozen=True, tag=True):
    """0 -> other: the answer to `Join`."""


class Refused(Struct, frozen=True, tag=True):
    """0 -> other: the answer to `Join`. Not final: what is in the way may be gone soon."""

    reason: Reason
    is_final: bool


class WorkerTicket(Struct, frozen=True):
    """A worker that is to be started, and the word by which its connection is known."""

    shard: ShardNumber
    ticket: Ticket


class Start(Struct, frozen=True, tag=True):
    """0 -> other: start these workers of a replica. Whatever is left of an earlier life of it is to be ended first."""

    dp_rank: DpRank
    incarnation: Incarnation
    places: Annotated[tuple[WorkerTicket, ...], Meta(max_length=MAX_SHARDS)]
    spans_hosts: bool  # the workers of this replica, or those that step together with them, are on several hosts
    group_host: HostText = ""  # where they meet; empty where the first of these makes the place
    group_port: Port = 0


class End(Struct, frozen=True, tag=True):
    """0 -> other: end what is left of this replica."""

    dp_rank: DpRank


class WorkerLost(Struct, frozen=True, tag=True):
    """other -> 0: a worker of this life has ended, or could not be started."""

    incarnation_id: Annotated[str, Meta(max_length=128)]
    reason: Reason


class Leaving(Struct, frozen=True, tag=True):
    """other -> 0: this host was told to end; the server should drain."""


class Goodbye(Struct, frozen=True, tag=True):
    """0 -> other: the server has ended. An empty reason: as it should."""

    reason: Reason = ""


class Beat(Struct, frozen=True, tag=True):
    """I am here and have nothing to say."""


ToLeader = Join | WorkerHere | WorkerLost | Leaving | Beat
ToFollower = Here | Welcome | Refused | Start | End | Goodbye | Beat
