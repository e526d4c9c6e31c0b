"""One request of a client on its way through a prefill and a decode: the pair machine.

    BACKOFF      no attempt under way; another one starts at `retry_at`
    TRYING       both halves dispatched, the client has not got a byte
    FORWARDING   the client gets decode's answer: from here on nothing is retried, but a stream may be resumed
    LINGERING    the client has its answer, prefill still has to end its body
    ENDED        both halves are over or cancelled

Rules:
1.  Both halves are dispatched by one command, and a half that fails cancels the other at once. So never is one half
    alone at work for a request, except after the other has ended well.
2.  Every attempt has new rooms. What is retried: connections that break, and errors that say `retryable: true` (of a
    server that says nothing of that: 5xx), before the first byte to the client, up to `retries` times and within the
    deadline. Any other error is the answer. One exception: a 409 after an attempt of ours is retried, since it may be
    our own cancelled attempt that still holds the client's `rid`.
3.  A prefill that ends its body with an error after its 200 head has told decode before: decode decides (it computes
    the prompt itself, or says its own error). The same when a prefill breaks after its head and there is no other pair.
    A prefill that says `worker_lost` there has told nobody: it counts as broken.
4.  The deadline bounds everything until the first token. A grace is added, so that a worker that says at the deadline
    in which wait it was is still heard. Of a stream the first byte tells that there is a token. Of a document nothing
    may come before its end, but that prefill has ended well tells it, or decode's head: from then on it is
    `document_ns` that bounds.
5.  A request that was aborted by name is not retried: its halves end it, between two attempts the router does.
6.  A stream that can be resumed (`DecodeSpoke.is_resumable`), and whose decode dies, or is not well and says nothing
    for `quiet_ns`, or says that it cannot go on and another may, goes on with another decode, or where there is none
    with another DP rank of the same one (`HalfFailed.serves_on`): an attempt like any other, which is asked for what
    follows. It happens `resumes` times at most. What bounds it is what bounds the gap between two tokens, counted from
    the last one; the client's deadline has been met. An attempt that fails before it says anything is retried as rule 2
    has it; where no other is left the stream ends with what it was lost of.
7.  Exactly one of `Finish`, `ForwardRejection` and `Fail` ends a request, and nothing follows it.

A half has one head: of `HalfAnswered` (or `DecodeSpoke`) and `HalfRejected` only one is said.
Events carry the number of their attempt; news of an earlier one, or of a half that is over, change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from tandem.core.router.messages import (
    BreakHalf,
    CancelHalf,
    DecodeSpoke,
    DispatchPair,
    Fail,
    Finish,
    Forward,
    ForwardRejection,
    HalfAnswered,
    HalfEnded,
    HalfEvent,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    RouteCause,
    RouterCommand,
    Side,
)
from tandem.core.router.pairing import WorkerPair
from tandem.core.router.sent_prefixes import Blocks
from tandem.core.router.worker_registry import RegisteredWorker, WorkerId
from tandem.core.values import MILLISECOND, SECOND, ZERO_NS, Nanos, RequestId


class RequestSettings(Struct, frozen=True):
    retries: int = 3  # attempts after the first
    backoff_ns: Nanos = Nanos(50 * MILLISECOND)  # before the first retry; doubles
    backoff_max_ns: Nanos = Nanos(1 * SECOND)
    grace_ns: Nanos = Nanos(300 * MILLISECOND)  # after the deadline, for the worker's own word
    linger_ns: Nanos = Nanos(5 * SECOND)  # for prefill to end its body after decode has
    document_ns: Nanos = Nanos(600 * SECOND)  # from the first token to the end of a document
    resumes: int = 1  # of one stream
    gap_ns: Nanos = Nanos(30 * SECOND)  # between two tokens of a stream that is resumed
    quiet_ns: Nanos = Nanos(10 * SECOND)  # of a stream whose worker is not well, until it counts as broken


class Phase(StrEnum):
    BACKOFF = "backoff"
    TRYING = "trying"
    FORWARDING = "forwarding"
    LINGERING = "lingering"
    ENDED = "ended"


class HalfState(StrEnum):
    SENT = "sent"
    ANSWERED = "answered"
    ENDED = "ended"  # its body is complete
    CLOSED = "closed"  # failed, rejected or cancelled


OPEN = (HalfState.SENT, HalfState.ANSWERED)


@dataclass(slots=True)
class RoutedRequest:
    """Owned by the `Router`, which chooses the pairs. `wake_at` is None when only the halves can move it on."""

    request: RequestId
    num_prompts: int | None
    streams: bool
    merges: bool
    deadline: Nanos
    settings: RequestSettings
    blocks: Blocks = ()
    model: str | None = None  # where the workers' models are known, from the first attempt on
    phase: Phase = Phase.BACKOFF
    attempt: int = 0
    pair: WorkerPair | None = None
    halves: dict[Side, HalfState] = field(default_factory=dict[Side, HalfState])
    wake_at: Nanos | None = None
    waits_since: Nanos = ZERO_NS  # in its stage
    is_aborted: bool = False
    is_resumable: bool = False  # the stream that is forwarded
    num_resumes: int = 0
    first_attempt: int = 1  # since the stream was lost last
    lost: Fail | Finish | None = None  # while a lost stream is resumed: how it ends otherwise

    def is_open(self, half: Side) -> bool:
        return self.halves.get(half) in OPEN

    def worker(self, half: Side) -> RegisteredWorker:
        assert self.pair is not None
        return self.pair.prefill if half is Side.PREFILL else self.pair.decode

    def open_workers(self) -> list[WorkerId]:
        return [self.worker(half).id for half in Side if self.is_open(half)]

    def open_half_at(self, worker: WorkerId) -> Side | None:
        return next((half for half in Side if self.is_open(half) and self.worker(half).id == worker), None)

    def wants_pair(self, now: Nanos) -> bool:
        return self.phase is Phase.BACKOFF and self.wake_at is not None and self.wake_at <= now < self.deadline

    def start(self, pair: WorkerPair, now: Nanos) -> list[RouterCommand]:
        """Begin an attempt with a pair whose rooms are new."""
        assert self.phase is Phase.BACKOFF
        assert now < self.deadline
        self.attempt += 1
        self.pair = pair
        self.phase = Phase.TRYING
        self.halves = {Side.PREFILL: HalfState.SENT, Side.DECODE: HalfState.SENT}
        self.wake_at = Nanos(self.deadline + self.settings.grace_ns)
        self.waits_since = now
        is_resumed = self.lost is not None
        return [DispatchPair(self.request, self.attempt, pair, Nanos(self.deadline - now), is_resumed)]

    def handle(self, event: HalfEvent, now: Nanos, has_other: Callable[[WorkerId], bool]) -> list[RouterCommand]:
        """What a half has done. `has_other(worker)`: a live pair without this worker exists."""
        half = Side.DECODE if isinstance(event, DecodeSpoke) else event.half
        if event.attempt != self.attempt or not self.is_open(half):
            return []
        stage = self.stage()
        commands = self._handle(half, event, now, has_other)
        if self.stage() != stage:
            self.waits_since = now
        return commands

    def _handle(
        self, half: Side, event: HalfEvent, now: Nanos, has_other: Callable[[WorkerId], bool]
    ) -> list[RouterCommand]:
        match event:
            case HalfAnswered():
                self.halves[half] = HalfState.ANSWERED
                if half is Side.DECODE:  # of a document
                    self._has_token(now)
                return []
            case DecodeSpoke(is_resumable=is_resumable):
                return self._spoke(is_resumable)
            case HalfEnded(has_error=has_error):
                return self._ended(half, has_error, now)
            case HalfRejected():
                return self._rejected(half, event, now)
            case HalfFailed():
                return self._failed(half, event, now, has_other)

    def leave(self) -> list[RouterCommand]:
        """The client has closed its connection: nobody wants the answer."""
        return [] if self.phase is Phase.ENDED else self._end(Finish(self.request))

    def abort(self) -> list[RouterCommand]:
        """By name, which the halves are told too."""
        self.is_aborted = True
        return self.fail(RouteCause.ABORTED, "by name") if self.phase is Phase.BACKOFF else []

    def fail(self, cause: RouteCause, detail: str = "") -> list[RouterCommand]:
        return self._end(Fail(self.request, cause, self.stage(), detail))

    def flee(self, worker: WorkerId, now: Nanos, has_other: Callable[[WorkerId], bool]) -> list[RouterCommand]:
        """The worker does not answer probes, or says that it stands still. Go elsewhere if that is possible, else wait:
        it may come back.
        """
        half = self.open_half_at(worker)
        if half is None or self._is_answered_without(half) or not has_other(worker):
            return []
        if self.phase is Phase.FORWARDING and self._may_go_on():
            return [BreakHalf(self.request, self.attempt, half, self.settings.quiet_ns, "does not answer")]
        if self.phase is not Phase.TRYING:
            return []
        detail = f"{half} worker {self.worker(half).url} does not answer"
        lost = Fail(self.request, RouteCause.CONNECTION_LOST, self.stage(), detail, self._waited(now))
        return self._retry(now, lost)

    def give_up(self, worker: WorkerId, now: Nanos, has_other: Callable[[WorkerId], bool]) -> list[RouterCommand]:
        """The worker has been dead for so long that its half counts as broken."""
        half = self.open_half_at(worker)
        if half is None:
            return []
        silent_ns = self.settings.gap_ns  # at least: nobody goes on with what has been silent for so long
        failed = HalfFailed(self.request, self.attempt, half, HalfFailure.BROKEN, "does not answer", silent_ns)
        return [CancelHalf(self.request, self.attempt, half), *self._failed(half, failed, now, has_other)]

    def wake(self, now: Nanos) -> list[RouterCommand]:
        """Time has passed. In BACKOFF within the deadline it is `start` that is to be called."""
        if self.wake_at is None or now < self.wake_at or self.wants_pair(now):
            return []
        if self.phase is Phase.LINGERING:
            return self._end(Finish(self.request))
        return self._end(Fail(self.request, RouteCause.DEADLINE_EXCEEDED, self.stage(), waited_ns=self._waited(now)))

    def stage(self) -> str:
        """The wait that the request is in."""
        if self.attempt == 0:
            return "route"
        if self.phase is Phase.BACKOFF:
            return "retry_backoff"
        if self.phase is Phase.FORWARDING:
            return "stream"
        if self.halves.get(Side.DECODE) is HalfState.ANSWERED:
            return "decode_body"
        if self.halves.get(Side.PREFILL) is HalfState.SENT:
            return "prefill_head"
        return "prefill_body" if self.halves.get(Side.DECODE) is HalfState.ENDED else "decode_head"

    def _waited(self, now: Nanos) -> Nanos:
        return Nanos(now - self.waits_since)

    def _has_token(self, now: Nanos) -> None:
        """A document that is still to end."""
        if self.wake_at is not None:
            self.wake_at = max(self.wake_at, Nanos(now + self.settings.document_ns))

    def _spoke(self, is_resumable: bool) -> list[RouterCommand]:
        self.halves[Side.DECODE] = HalfState.ANSWERED
        if self.phase is Phase.TRYING:
            self.wake_at = None  # there is a first token: decode's stall timeout takes over
        if self.phase is not Phase.TRYING or self.merges:
            return []
        self.phase = Phase.FORWARDING
        is_resumed, self.lost = self.lost is not None, None
        self.is_resumable = is_resumable
        return [Forward(self.request, self.attempt, resumes=is_resumed)]

    def _ended(self, half: Side, has_error: bool, now: Nanos) -> list[RouterCommand]:
        self.halves[half] = HalfState.ENDED
        if half is Side.PREFILL and not has_error and not self.streams:
            self._has_token(now)
        is_last = not self.is_open(half.other)
        if self.phase is Phase.TRYING and self.merges:
            return self._merge(half, now)
        if self.phase is Phase.LINGERING or (half is Side.DECODE and is_last):
            return [*self._catch_up(), *self._end(Finish(self.request))]
        if half is Side.PREFILL:
            return []
        commands = self._catch_up()
        self.phase = Phase.LINGERING
        self.wake_at = Nanos(now + self.settings.linger_ns)
        return commands

    def _catch_up(self) -> list[RouterCommand]:
        """An answer that ended without a byte is forwarded as it is."""
        return [Forward(self.request, self.attempt)] if self.phase is Phase.TRYING else []

    def _merge(self, half: Side, now: Nanos) -> list[RouterCommand]:
        if all(state is HalfState.ENDED for state in self.halves.values()):
            return [Forward(self.request, self.attempt, merged=True), *self._end(Finish(self.request))]
        if half is Side.DECODE:
            self.wake_at = Nanos(max(self.deadline, now + self.settings.linger_ns))
        return []

    def _rejected(self, half: Side, event: HalfRejected, now: Nanos) -> list[RouterCommand]:
        self.halves[half] = HalfState.CLOSED
        if self._is_answered_without(half):
            return self._end_lingering()
        answer = ForwardRejection(self.request, self.attempt, half)
        may_pass = event.status >= 500 if event.is_retryable is None else event.is_retryable
        if may_pass or (event.status == 409 and self.attempt > 1):
            return self._retry(now, answer)
        return self._end(answer)

    def _failed(
        self, half: Side, event: HalfFailed, now: Nanos, has_other: Callable[[WorkerId], bool]
    ) -> list[RouterCommand]:
        had_head = self.halves[half] is HalfState.ANSWERED
        stage = "stream" if self.phase is Phase.FORWARDING else f"{half}_{'body' if had_head else 'head'}"
        self.halves[half] = HalfState.CLOSED
        if self._is_answered_without(half):
            return self._end_lingering()
        worker = self.worker(half)
        detail = f"{half} worker {worker.url}: {event.detail}"
        waited_ns = event.silent_ns if self.phase is Phase.FORWARDING else self._waited(now)
        failure = Fail(self.request, CAUSES[event.failure], stage, detail, waited_ns)
        if self.phase is Phase.FORWARDING:
            # What it said itself of the end has come, and ends the stream where nobody goes on with it.
            gave_up = event.failure is HalfFailure.GAVE_UP
            return self._resume(event, Finish(self.request) if gave_up else failure, now, has_other)
        if half is Side.PREFILL and had_head and not self.merges and not has_other(worker.id):
            return []  # rule 3
        return self._retry(now, failure)

    def _resume(
        self, event: HalfFailed, otherwise: Fail | Finish, now: Nanos, has_other: Callable[[WorkerId], bool]
    ) -> list[RouterCommand]:
        """Rule 6."""
        deadline = Nanos(now - event.silent_ns + self.settings.gap_ns)
        if not self._may_go_on() or now >= deadline or not (event.serves_on or has_other(self.worker(Side.DECODE).id)):
            return self._end(otherwise)
        self.num_resumes += 1
        self.first_attempt = self.attempt + 1
        self.lost, self.deadline = otherwise, deadline
        commands = self._cancel_open()
        self.phase = Phase.BACKOFF
        self.wake_at = now
        return commands

    def _may_go_on(self) -> bool:
        """Of a stream, where another decode would take it over."""
        return self.is_resumable and not self.is_aborted and self.num_resumes < self.settings.resumes

    def _is_answered_without(self, half: Side) -> bool:
        """Decode has its first token, so whatever becomes of prefill makes no difference."""
        has_token = self.halves[Side.DECODE] in (HalfState.ANSWERED, HalfState.ENDED)
        return half is Side.PREFILL and has_token and not self.merges

    def _end_lingering(self) -> list[RouterCommand]:
        return self._end(Finish(self.request)) if self.phase is Phase.LINGERING else []

    def _retry(self, now: Nanos, otherwise: ForwardRejection | Fail) -> list[RouterCommand]:
        """Cancel what is open; wait for another attempt, or end with `otherwise` if there is none."""
        if self.is_aborted:
            return self.fail(RouteCause.ABORTED, "by name")
        retries = self.attempt - self.first_attempt
        backoff = min(self.settings.backoff_ns << retries, self.settings.backoff_max_ns)
        if retries >= self.settings.retries or now + backoff >= self.deadline:
            return self._end(otherwise)
        commands = self._cancel_open()
        self.phase = Phase.BACKOFF
        self.wake_at = Nanos(now + backoff)
        self.waits_since = now
        return commands

    def _end(self, last: Finish | ForwardRejection | Fail) -> list[RouterCommand]:
        assert self.phase is not Phase.ENDED
        if self.lost is not None and not isinstance(last, Finish):  # a refusal is no end of a stream
            aborted = Fail(self.request, RouteCause.ABORTED, self.stage(), "by name")
            last = aborted if self.is_aborted else self.lost
        commands = self._cancel_open()
        self.phase = Phase.ENDED
        self.wake_at = None
        return [*commands, last]

    def _cancel_open(self) -> list[RouterCommand]:
        cancelled = [half for half in Side if self.is_open(half)]
        for half in cancelled:
            self.halves[half] = HalfState.CLOSED
        return [CancelHalf(self.request, self.attempt, half) for half in cancelled]


CAUSES = {
    HalfFailure.REFUSED: RouteCause.WORKER_UNREACHABLE,
    HalfFailure.BROKEN: RouteCause.CONNECTION_LOST,
    HalfFailure.STALLED: RouteCause.DEADLINE_EXCEEDED,
    HalfFailure.GAVE_UP: RouteCause.CONNECTION_LOST,
}
