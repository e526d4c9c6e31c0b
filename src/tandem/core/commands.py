"""Everything a node can ask for: imperatives. They begin in order; completions come back as events, or never."""

from enum import StrEnum

from msgspec import Struct

from tandem.core.batch import BatchPlan
from tandem.core.disagg.messages import Message
from tandem.core.rank_load import RankLoad
from tandem.core.values import ZERO_NS, Address, Cause, Cut, Incarnation, Nanos, PageHash, PageId, RequestId, Room


class LaunchBatch(Struct, frozen=True, tag=True, gc=False):
    """Run on every shard; answered by `BatchReturned` or `BatchFailed`, in launch order."""

    plan: BatchPlan


class ForgetRequests(Struct, frozen=True, tag=True):
    """No batch will speak of these requests again: workers drop tokens, tables and their place in the decode set."""

    requests: tuple[RequestId, ...]


class EmitTokens(Struct, frozen=True, tag=True, gc=False):
    """New tokens of one step, all rows in one message."""

    requests: tuple[RequestId, ...]
    tokens: bytes  # int32 little endian, one per request
    extras: tuple[tuple[RequestId, bytes], ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, stop token or stop string
    LENGTH = "length"
    PROMPT = "prompt"  # it wanted no token: a vector


class Path(StrEnum):
    """Where the prompt's KV came from."""

    UNIFIED = "unified"
    REMOTE = "remote"  # set by the commit of a transfer and nowhere else
    LOCAL = "local"
    FALLBACK = "fallback"  # a transfer was meant, it failed, decode computed the prompt


class StageTimings(Struct, frozen=True):
    """Where the time to the first token went: stages partition [arrival, first token] on this node's clock."""

    stages: tuple[tuple[str, Nanos], ...] = ()


class StartRequest(Struct, frozen=True, tag=True):
    """The first token is here; comes right before the first `EmitTokens` that names the request."""

    request: RequestId
    path: Path
    cached_tokens: int
    ledger: StageTimings
    prompt_extras: tuple[
        bytes, ...
    ] = ()  # opaque: log-probabilities of the prompt, where they are wanted; none on a prefill
    host_tokens: int = 0  # of those cached: from host memory
    storage_tokens: int = 0  # of those: from storage


class FinishRequest(Struct, frozen=True, tag=True):
    """The one terminal event of an accepted request that got its tokens, or its vector."""

    request: RequestId
    reason: FinishReason
    path: Path
    cached_tokens: int
    computed_tokens: int  # prompt tokens computed on this node
    kv_pages: int  # pages that were pulled from a peer
    ledger: StageTimings
    retries: int = 0
    vector: bytes = b""  # float32 little endian, of who wanted one
    host_tokens: int = 0
    storage_tokens: int = 0
    detail: str = ""  # of a fallback: why no KV has come


class FailRequest(Struct, frozen=True, tag=True):
    """The one terminal event of a request that was refused or did not get its tokens."""

    request: RequestId
    cause: Cause
    stage: str  # the wait it was in
    detail: str = ""
    peer: str = ""  # instance of the other half, if it was known
    waited_ns: Nanos = ZERO_NS  # in that stage


class RenderAgain(Struct, frozen=True, tag=True):
    """Decode has rendered the chat at another time. Render it at `rendered_at`, too; answered by `PromptRendered`.

    Until then no batch knows the request and no page of it is on offer. Comes once per request at most.
    """

    request: RequestId
    rendered_at: int  # Unix seconds


class LearnPeer(Struct, frozen=True, tag=True):
    """Ask the bootstrap server at `address` who its DP rank is; None: any, to learn what prefill this is."""

    address: Address
    dp_rank: int | None = None


class AskDpRank(Struct, frozen=True, tag=True):
    """Ask the bootstrap server at `address` which of its DP ranks has this room. Answered by `DpRankAnswered`."""

    address: Address
    room: Room


class AnnounceDpRank(Struct, frozen=True, tag=True):
    """Register at our own bootstrap server that this room is with this DP rank."""

    room: Room
    dp_rank: int
    sought: int | None = None  # the rank where decode looks by itself: it is to hear `RoomElsewhere`


class PromptsLetIn(Struct, frozen=True, tag=True):
    """The prefill delayer has let a batch of prompts begin: for those who count how long that took. Nobody answers."""

    waited_passes: int  # 0: at once
    waited_ns: Nanos


class GatherLoad(Struct, frozen=True, tag=True):
    """Give this rank's load to a pass of the prefill delayer. Answered by `LoadsGathered`."""

    number: int | None  # the pass that wants it; None: this rank wants a pass
    load: RankLoad


class Tell(Struct, frozen=True, tag=True):
    """Send a message of the rendezvous. Lost if there is no connection: the sender's timer says it again."""

    peer: Incarnation
    message: Message


class PublishPages(Struct, frozen=True, tag=True):
    """Every shard: digest these pages, then let the peer read them. Answered by `PagesDigested`, once per shard."""

    request: RequestId
    attempt: int
    first_page: int  # index in the request's table
    pages: tuple[PageId, ...]
    generations: tuple[int, ...]
    room: int
    reader: Cut = Cut()  # how the peer is cut: each part that one of its workers reads has digests of its own


class RevokePages(Struct, frozen=True, tag=True):
    """Every shard: no new read of this request's pages. Answered by `ReadsDrained`, once per shard."""

    request: RequestId
    attempt: int
    room: int


class PullPages(Struct, frozen=True, tag=True):
    """Every shard: read pages of a peer into own pages, compare digests. Answered by `PagesLanded`/`TransferFailed`."""

    request: RequestId
    attempt: int
    room: int
    peer: Incarnation
    first_wanted: int  # how many wanted pages earlier commands of this attempt have named
    sources: tuple[int, ...]
    generations: tuple[int, ...]
    destinations: tuple[PageId, ...]
    digests: tuple[bytes, ...]  # one per part that workers of this side and of the peer share, 8 bytes per page
    secrets: tuple[bytes, ...]  # of the grants, one per shard of the peer


class CancelPull(Struct, frozen=True, tag=True):
    """Every shard: stop; answered by `TransferDrained` once no byte can land any more."""

    request: RequestId
    attempt: int


class AnnounceStored(Struct, frozen=True, tag=True):
    """The prefix tree holds these pages from here on. This and the next two come only where `announces_cache`.

    Whoever replays the three in order has the hashes that the tree holds, at the end of every step. The request names
    whose tokens they are: it lives, and its tokens up to the end of these pages have been told.
    """

    request: RequestId
    first_page: int  # index in the request's table
    parent: PageHash | None  # of the first; each of the others follows the one before it
    hashes: tuple[PageHash, ...]


class AnnounceRemoved(Struct, frozen=True, tag=True):
    """The prefix tree has dropped these pages."""

    hashes: tuple[PageHash, ...]


class AnnounceCleared(Struct, frozen=True, tag=True):
    """A flush has left nothing in the prefix tree."""


class FreeWindows(Struct, frozen=True, tag=True):
    """Every shard: give back the memory of these pages' KV in layers with a window. No answer.

    No batch, transfer or copy under way needs it; what writes there next is a command behind this one.
    """

    pages: tuple[PageId, ...]


class StorePages(Struct, frozen=True, tag=True):
    """Every shard: copy its part of these pages to host memory, in order. Answered by `PagesCopied`, once per shard."""

    copy: int
    hashes: tuple[PageHash, ...]  # kept beside the bytes
    pages: tuple[PageId, ...]
    host_pages: tuple[PageId, ...]


class LoadPages(Struct, frozen=True, tag=True):
    """Every shard: copy these pages back, in order, as far as they are whole and have these hashes. Answered alike."""

    copy: int
    hashes: tuple[PageHash, ...]
    host_pages: tuple[PageId, ...]
    pages: tuple[PageId, ...]


class LookUpPages(Struct, frozen=True, tag=True):
    """Every shard: how many of these, from the first on, are in storage? Answered by `PagesFound`, once per shard."""

    number: int
    hashes: tuple[PageHash, ...]


class FetchPages(Struct, frozen=True, tag=True):
    """Every shard: copy these pages from storage to host memory, in order, as far as they are there and whole.

    Answered by `PagesCopied`, once per shard.
    """

    copy: int
    hashes: tuple[PageHash, ...]
    host_pages: tuple[PageId, ...]


class WritePages(Struct, frozen=True, tag=True):
    """Every shard: write these pages of host memory to storage, as far as they still have these hashes. Answered alike.

    Nobody waits for it and nothing is pinned: a page that is given to another one meanwhile is not written.
    """

    copy: int
    hashes: tuple[PageHash, ...]
    host_pages: tuple[PageId, ...]


Command = (
    LaunchBatch
    | ForgetRequests
    | EmitTokens
    | StartRequest
    | FinishRequest
    | FailRequest
    | RenderAgain
    | LearnPeer
    | AskDpRank
    | AnnounceDpRank
    | PromptsLetIn
    | GatherLoad
    | Tell
    | PublishPages
    | RevokePages
    | PullPages
    | CancelPull
    | AnnounceStored
    | AnnounceRemoved
    | AnnounceCleared
    | FreeWindows
    | StorePages
    | LoadPages
    | LookUpPages
    | FetchPages
    | WritePages
)


class Effects(Struct, frozen=True, gc=False):
    """What a step wants: commands in the order in which they must begin, and when to call it again at the latest."""

    commands: tuple[Command, ...]
    wake_at: Nanos | None
