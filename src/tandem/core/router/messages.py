"""What happens to a request on its way through a pair (events), and what the router asks for (commands)."""

from enum import StrEnum

from msgspec import Struct

from tandem.core.router.pairing import WorkerPair
from tandem.core.router.sent_prefixes import Blocks
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId
from tandem.core.values import ZERO_NS, Nanos, RequestId


class Side(StrEnum):
    """Of a disaggregated pair; a request has a half on each."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Side":
        return Side.DECODE if self is Side.PREFILL else Side.PREFILL


class HalfFailure(StrEnum):
    """Why a half ended without an answer."""

    REFUSED = "refused"  # no connection
    BROKEN = "broken"  # the connection broke, or the worker is gone
    STALLED = "stalled"  # a stream said nothing for too long
    GAVE_UP = "gave_up"  # its last word is that it cannot go on with a stream, and that another may


class RouteCause(StrEnum):
    """Why the router itself ended a request; worker's own answers are passed on instead. Part of `docs/errors.md`."""

    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_LIVE_PAIR = "no_live_pair"
    QUEUE_FULL = "queue_full"
    WORKER_UNREACHABLE = "worker_unreachable"
    CONNECTION_LOST = "connection_lost"
    ABORTED = "aborted"


# --- events -------------------------------------------------------------------------------------------------------


class ClientAsked(Struct, frozen=True, tag=True):
    request: RequestId
    num_prompts: int | None  # None: one prompt, not in a list
    timeout_ns: Nanos
    streams: bool = False  # decode's head comes with its first token; that of a document comes at its end
    merges: bool = False  # the answer needs prefill's body too
    blocks: Blocks = ()  # of its first prompt, where a policy looks at them
    model: str | None = None  # that some workers serve, and others may not; None: the first one that a pair serves


class ClientLeft(Struct, frozen=True, tag=True):
    request: RequestId


class AbortAsked(Struct, frozen=True, tag=True):
    """Somebody ended the request by its name. The halves are told too and say so: no other pair takes it over."""

    request: RequestId


class HalfAnswered(Struct, frozen=True, tag=True):
    """A 2xx head came in. Of a decode that streams this is not said: its first byte counts, see `DecodeSpoke`."""

    request: RequestId
    attempt: int
    half: Side


class DecodeSpoke(Struct, frozen=True, tag=True):
    """Bytes for the client are there: the first of a stream, or the whole of a document."""

    request: RequestId
    attempt: int
    is_resumable: bool = False  # it tells what it says in tokens too, so that another decode can go on with it


class HalfEnded(Struct, frozen=True, tag=True):
    """The body of a 2xx answer is complete."""

    request: RequestId
    attempt: int
    half: Side
    has_error: bool = False  # of prefill: it says that the transfer failed


class HalfRejected(Struct, frozen=True, tag=True):
    """Another status than 2xx, body and all."""

    request: RequestId
    attempt: int
    half: Side
    status: int
    is_retryable: bool | None = None  # as its body says; None: it does not, and the status tells


class HalfFailed(Struct, frozen=True, tag=True):
    request: RequestId
    attempt: int
    half: Side
    failure: HalfFailure
    detail: str = ""
    silent_ns: Nanos = Nanos(0)  # of a stream: since its last piece
    serves_on: bool = False  # of a worker that gave up: another of its DP ranks may go on


class WorkerProbed(Struct, frozen=True, tag=True):
    worker: WorkerId
    result: ProbeResult
    models: tuple[str, ...] | None = None  # that it says it serves; None: it was not asked, or said nothing of it
    bootstrap_port: int | None = None  # that a prefill says it has; None: it said none


class WorkerAdded(Struct, frozen=True, tag=True):
    """By an operator. It joins as any other does, by its first good probe."""

    worker: RegisteredWorker


class WorkerRemoved(Struct, frozen=True, tag=True):
    """By an operator: it gets no more requests, and is forgotten when it has answered those that it has."""

    worker: WorkerId


HalfEvent = HalfAnswered | DecodeSpoke | HalfEnded | HalfRejected | HalfFailed
RouterEvent = ClientAsked | ClientLeft | AbortAsked | HalfEvent | WorkerProbed | WorkerAdded | WorkerRemoved


# --- commands -----------------------------------------------------------------------------------------------------


class DispatchPair(Struct, frozen=True, tag=True):
    """Send the request to both halves at once."""

    request: RequestId
    attempt: int
    pair: WorkerPair
    timeout_ns: Nanos  # what is left until the deadline
    resumes: bool = False  # with what the client has of its stream: what follows that is asked for


class CancelHalf(Struct, frozen=True, tag=True):
    """Close the connection. There is no answer."""

    request: RequestId
    attempt: int
    half: Side


class BreakHalf(Struct, frozen=True, tag=True):
    """Where nothing of its stream has come for so long, close the connection: `HalfFailed` says how long it was."""

    request: RequestId
    attempt: int
    half: Side
    silent_ns: Nanos
    detail: str


class Forward(Struct, frozen=True, tag=True):
    """Pass decode's answer on to the client, as it comes; with `merged`, both bodies are there to be merged.

    With `resumes`, it goes on with the stream that the client has already.
    """

    request: RequestId
    attempt: int
    merged: bool = False
    resumes: bool = False


class Finish(Struct, frozen=True, tag=True):
    """The end: the client has its answer, or has left."""

    request: RequestId


class ForwardRejection(Struct, frozen=True, tag=True):
    """The end: the answer is what this half said."""

    request: RequestId
    attempt: int
    half: Side


class Fail(Struct, frozen=True, tag=True):
    """The end: an error of the router's own. When `Forward` came before, it can only end the stream."""

    request: RequestId
    cause: RouteCause
    stage: str  # the wait it was in
    detail: str = ""
    waited_ns: Nanos = ZERO_NS  # in that stage


class Probe(Struct, frozen=True, tag=True):
    """Ask for /health; answered by `WorkerProbed`."""

    worker: RegisteredWorker


RouterCommand = DispatchPair | CancelHalf | BreakHalf | Forward | Finish | ForwardRejection | Fail | Probe
