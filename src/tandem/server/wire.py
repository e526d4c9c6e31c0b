"""What the processes of one server say to each other: API process - node process - worker process.

One stream socket between two local peers, frames of a 4-byte big-endian length and one msgpack object. Commands and
events of the core travel as they are; here are the few messages that only the shell knows.
"""

from typing import Annotated

from msgspec import Meta, Raw, Struct, msgpack

from tandem.core import commands, events
from tandem.core.kv_parts import KvGrid
from tandem.core.request import Request
from tandem.core.settings import MAX_DP_SIZE, PrefillInfo, WindowSettings
from tandem.core.values import MAX_SHARDS, Address, Cut, Incarnation
from tandem.sampling import Payload

MAX_FRAME_BYTES = 256 << 20
MAX_SUBMIT_BYTES = 32 << 20  # of one `SubmitAll`: with what may wait already, the worker's channel still holds it

# Of addresses and descriptions, which other servers write too (`documents.py`).
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
HostText = Annotated[str, Meta(max_length=64)]
EVERY_HOST = ("0.0.0.0", "::", "")  # who listens there has told no address
UnixPath = Annotated[str, Meta(max_length=107)]
Digest = Annotated[str, Meta(max_length=128)]
FieldName = Annotated[str, Meta(min_length=1, max_length=64)]
FieldValue = Annotated[str, Meta(max_length=256)]
LayoutFields = Annotated[dict[FieldName, FieldValue], Meta(max_length=64)]


class Submit(Struct, frozen=True):
    """A validated request. The node forwards its payload to the workers, as it came, before the core hears of it."""

    request: Request
    encoded: Raw  # a `Payload`: prompts are long, and the node has no use for them

    @classmethod
    def of(cls, request: Request, payload: Payload) -> "Submit":
        return cls(request, Raw(msgpack.encode(payload)))

    @property
    def payload(self) -> Payload:
        return msgpack.decode(self.encoded, type=Payload)


class SubmitAll(Struct, frozen=True, tag=True):
    """API -> node: every sample of one HTTP request. One frame, so that all of them come or none."""

    submits: tuple[Submit, ...]


class Rendered(Struct, frozen=True, tag=True):
    """API -> node: the prompt that `RenderAgain` asked for. The workers get its tokens before the core hears of it."""

    submit: Submit


class Query(Struct, frozen=True, tag=True):
    """API -> node: one of `state`, `waits`, `metrics`, `flush`, `faults`, `pulse`, and `worker` for all workers."""

    id: int
    what: str


class Answer(Struct, frozen=True, tag=True):
    id: int
    body: bytes  # JSON


class WorkerNumbers(Struct, frozen=True):
    """One of the list that answers `worker`: what a worker holds, counted by itself, and which one it is."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    numbers: dict[str, int]
    connections: dict[str, int] = {}  # open ones to workers of peers, by how pages travel


class Ping(Struct, frozen=True, tag=True):
    """node -> worker: answered at once by the thread that reads, whatever the engine does."""


class Echo(Struct, frozen=True, tag=True):
    """worker -> node: the answer to a `Ping`."""


class Faults(Struct, frozen=True):
    """The answer to `faults`: the test hooks as they are now."""

    force_optimistic_prefill_retry_prob: float
    disagg_failure_prob: float
    seed: int  # of the failures


class FailTransfers(Struct, frozen=True, tag=True):
    """API -> node: from here on this share of all transfers fails."""

    prob: float


class BatchLaunched(Struct, frozen=True, tag=True):
    """node -> API -> the other nodes -> their workers, with DP attention: this rank has launched its next batch."""

    dp_rank: int


class Shutdown(Struct, frozen=True, tag=True):
    """Parent -> child: end now."""


class DataEndpoint(Struct, frozen=True):
    """Where a worker's KV can be pulled from. `unix` is tried first when the peer is on the same host."""

    host: HostText
    port: Port
    unix: UnixPath = ""


class ReplicaInfo(Struct, frozen=True):
    """One DP rank as its bootstrap server tells of it (`GET /route`), and what decode needs to reach it."""

    incarnation: Incarnation
    role: Annotated[str, Meta(max_length=16)]
    layout: Digest  # digest, compared; `layout_fields` say which field differs
    layout_fields: LayoutFields
    control_host: HostText
    control_port: Port
    shards: Annotated[tuple[DataEndpoint, ...], Meta(max_length=MAX_SHARDS)]
    http_port: Port = 0
    dp_rank: Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)] = 0
    prefill: PrefillInfo = PrefillInfo()


class Connect(Struct, frozen=True, tag=True):
    """API -> node: how to reach a peer. Comes before the `PeerLearned` that names it."""

    address: Address  # of the bootstrap server that vouches for it
    replica: ReplicaInfo


class Reach(Struct, frozen=True, tag=True):
    """node -> worker: where a peer's KV can be pulled from, as it said itself. Comes before any pull from it."""

    peer: Incarnation
    cut: Cut  # of the peer
    shards: tuple[DataEndpoint, ...]  # of the peer, in order


class Disconnect(Struct, frozen=True, tag=True):
    """node -> worker: this peer is lost; nothing will be pulled from it any more."""

    peer: Incarnation


class EngineReady(Struct, frozen=True, tag=True):
    """worker -> node: its part of the model is loaded."""

    num_pages: int
    page_bytes: int  # of this worker's part of a page
    grid: KvGrid  # of the whole model
    layout: str
    layout_fields: dict[str, str]
    vocab_size: int
    data: DataEndpoint
    whole_prompts: bool = False  # a prompt is computed in one batch, or not at all
    host_pages: int = 0  # of host memory below the pool
    block_tokens: int = 1  # that a row samples at once
    windows: WindowSettings | None = None  # of some layers


class NodeReady(Struct, frozen=True, tag=True):
    """node -> API: the core runs; `replica.control_port` and its shards listen."""

    replica: ReplicaInfo
    num_pages: int
    page_bytes: int


class Died(Struct, frozen=True, tag=True):
    """child -> parent, fatal message: one line with cause and remedy."""

    who: str
    reason: str


ApiToNode = (
    SubmitAll
    | Rendered
    | Query
    | Connect
    | FailTransfers
    | BatchLaunched
    | Shutdown
    | events.RequestRefused
    | events.AbortRequested
    | events.StopMatched
    | events.PeerLearned
    | events.PeerUnknown
    | events.DpRankAnswered
    | events.RoomElsewhere
    | events.LoadWanted
    | events.LoadsGathered
    | events.HooksChanged
    | events.DrainRequested
    | events.FlushRequested
)
NodeToApi = (
    NodeReady
    | Answer
    | Died
    | BatchLaunched
    | commands.StartRequest
    | commands.EmitTokens
    | commands.FinishRequest
    | commands.FailRequest
    | commands.RenderAgain
    | commands.LearnPeer
    | commands.AskDpRank
    | commands.AnnounceDpRank
    | commands.GatherLoad
)
NodeToWorker = (
    Payload
    | Query
    | Reach
    | Disconnect
    | Ping
    | BatchLaunched
    | Shutdown
    | commands.LaunchBatch
    | commands.ForgetRequests
    | commands.PublishPages
    | commands.RevokePages
    | commands.PullPages
    | commands.CancelPull
    | commands.FreeWindows
    | commands.StorePages
    | commands.LoadPages
    | commands.LookUpPages
    | commands.FetchPages
    | commands.WritePages
)
WorkerToNode = (
    EngineReady
    | Answer
    | Echo
    | Died
    | events.BatchReturned
    | events.BatchFailed
    | events.PagesDigested
    | events.PageRead
    | events.ReadsDrained
    | events.PagesLanded
    | events.TransferFailed
    | events.TransferDrained
    | events.PagesCopied
    | events.PagesFound
)
