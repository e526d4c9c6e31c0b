"""Everything that can happen to a node: facts, in the past tense.

Events may be duplicated, may overtake the request they speak of, and may outlive it. A node never raises for one that
comes from a peer, a user or a device.
"""

from msgspec import Struct

from tandem.core.batch import BatchOutcome
from tandem.core.disagg.messages import Message
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.request import Request
from tandem.core.settings import PrefillInfo
from tandem.core.values import Address, BatchId, Cause, Incarnation, Nanos, RequestId, Room, ShardId


class RequestArrived(Struct, frozen=True, tag=True):
    request: Request


class RequestRefused(Struct, frozen=True, tag=True):
    """The edge has refused it by itself. If it has a room, its other half must not wait for it."""

    request: Request
    cause: Cause
    detail: str


class PromptRendered(Struct, frozen=True, tag=True):
    """Answers `RenderAgain`. Only what the prompt makes of a request counts; its tokens have replaced the workers'."""

    request: Request


class AbortRequested(Struct, frozen=True, tag=True):
    """The client left, an operator asked, or the edge found it invalid."""

    request: RequestId
    cause: Cause = Cause.ABORTED


class StopMatched(Struct, frozen=True, tag=True):
    """The edge saw a stop string in the text: end the request as finished, not as aborted."""

    request: RequestId


class BatchReturned(Struct, frozen=True, tag=True, gc=False):
    """In launch order."""

    outcome: BatchOutcome


class BatchFailed(Struct, frozen=True, tag=True):
    """The forward pass raised. Its requests end with `cause`; the worker goes on."""

    batch: BatchId
    cause: Cause
    detail: str


class PeerLearned(Struct, frozen=True, tag=True):
    """The bootstrap server at `address` told who its DP rank `dp_rank` is. Answers `LearnPeer`."""

    address: Address
    peer: Incarnation
    layout: str
    differs: str = ""  # in which fields its layout differs from ours, in words; empty: in none, or nobody compared
    dp_rank: int = 0
    prefill: PrefillInfo = PrefillInfo()


class PeerUnknown(Struct, frozen=True, tag=True):
    """Nobody, or nobody ready, at `address`. Answers `LearnPeer`; asking again is the node's business."""

    address: Address
    detail: str
    dp_rank: int | None = None  # who was asked for; None: anybody


class DpRankAnswered(Struct, frozen=True, tag=True):
    """The bootstrap server at `address` told which of its DP ranks has this room; None: it does not know (yet).

    With every answer it says what the prefill is: who asks may mean a former life, which had other ranks.
    """

    address: Address
    room: Room
    dp_rank: int | None
    prefill: PrefillInfo | None = None  # None: nobody has answered, or no rank is there
    age_ns: Nanos | None = None  # for how long that server has been there; None: nobody has answered, or it did not say


class RoomElsewhere(Struct, frozen=True, tag=True):
    """Another DP rank of this server has announced a room that decode looks for here."""

    room: Room
    dp_rank: int


class PeerSaid(Struct, frozen=True, tag=True):
    """A message of the rendezvous has come in."""

    peer: Incarnation
    message: Message


class PeerReturned(Struct, frozen=True, tag=True):
    """The connection to this life of the peer broke and is there again; what was said meanwhile is lost."""

    peer: Incarnation


class PeerLost(Struct, frozen=True, tag=True):
    """The connection to this life of the peer broke and could not be made again, or it restarted."""

    peer: Incarnation
    cause: Cause = Cause.PEER_LOST
    detail: str = ""


class PagesDigested(Struct, frozen=True, tag=True):
    """A shard made the digests that `PublishPages` asked for; from here on its pages may be read."""

    request: RequestId
    attempt: int
    shard: ShardId
    first_page: int
    num_pages: int
    digests: tuple[bytes, ...]  # one per part of this shard that a worker of the peer reads, 8 bytes per page
    secret: bytes  # of the grant, opaque here: who presents it may read what this attempt has published


class PageRead(Struct, frozen=True, tag=True):
    """A peer has read a page of this request: renews the lease. Sent at most once per second and shard."""

    request: RequestId
    shard: ShardId


class ReadsDrained(Struct, frozen=True, tag=True):
    """After `RevokePages`: no read of this request's pages runs on this shard any more, and none will start."""

    request: RequestId
    attempt: int
    shard: ShardId


class PagesLanded(Struct, frozen=True, tag=True):
    """A shard's landed-through watermark: the first `landed` wanted pages are here and their digests were equal."""

    request: RequestId
    attempt: int
    shard: ShardId
    landed: int


class TransferFailed(Struct, frozen=True, tag=True):
    request: RequestId
    attempt: int
    shard: ShardId
    cause: Cause
    detail: str = ""


class TransferDrained(Struct, frozen=True, tag=True):
    """After `CancelPull`: no byte of this transfer can land on this shard any more."""

    request: RequestId
    attempt: int
    shard: ShardId


class PagesCopied(Struct, frozen=True, tag=True):
    """Answers the four commands that copy pages between tiers: this shard has copied the first `num_pages`, and will
    copy no more."""

    copy: int
    shard: ShardId
    num_pages: int
    detail: str = ""  # why not all


class PagesFound(Struct, frozen=True, tag=True):
    """Answers `LookUpPages`: this shard's part of the first `num_pages` is in storage, or was a moment ago."""

    number: int
    shard: ShardId
    num_pages: int
    detail: str = ""  # why nobody knows of more


class LoadWanted(Struct, frozen=True, tag=True):
    """Another DP rank wants to begin prompts. To be answered by `GatherLoad`."""

    number: int  # of the pass


class LoadsGathered(Struct, frozen=True, tag=True):
    """One pass of the prefill delayer: what all ranks said, the same for all of them (`scheduler/delayer_sync.py`)."""

    number: int
    loads: tuple[RankLoad, ...]
    memory: DelayHistory  # with which this pass decides


class HooksChanged(Struct, frozen=True, tag=True):
    """An operator changed what the test hooks do."""

    force_retry_prob: float


class DrainRequested(Struct, frozen=True, tag=True):
    """Shut down: accept no more, finish what runs."""


class FlushRequested(Struct, frozen=True, tag=True):
    """Drop every cached page that nobody holds."""


Event = (
    RequestArrived
    | RequestRefused
    | PromptRendered
    | AbortRequested
    | StopMatched
    | BatchReturned
    | BatchFailed
    | PeerLearned
    | PeerUnknown
    | DpRankAnswered
    | RoomElsewhere
    | PeerSaid
    | PeerReturned
    | PeerLost
    | PagesDigested
    | PageRead
    | ReadsDrained
    | PagesLanded
    | TransferFailed
    | TransferDrained
    | PagesCopied
    | PagesFound
    | LoadWanted
    | LoadsGathered
    | HooksChanged
    | DrainRequested
    | FlushRequested
)
