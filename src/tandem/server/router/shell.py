"""The loop around the router's core: it turns commands into HTTP connections and what they do into events.

Everything but the probes (`prober.py`) runs on one asyncio loop. `tell` steps the core and begins its commands; nothing
that is begun there calls `tell` again before it returns. A half of an attempt is one task around the core's
`UpstreamCall`; to cancel it closes its connection.

    stream (SSE)   a decode's first bytes are the event, then bytes go through a bounded pipe to the client; of one that
                   comes in frames (`api/resume.py`) whole frames do, and another pair can go on with it
    document       read to its end before the client gets a byte, so that a decode that dies can still be retried
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
import msgspec

from tandem.core.router.messages import (
    AbortAsked,
    BreakHalf,
    CancelHalf,
    ClientAsked,
    ClientLeft,
    DispatchPair,
    Fail,
    Finish,
    Forward,
    ForwardRejection,
    HalfFailed,
    HalfFailure,
    Probe,
    RouterCommand,
    RouterEvent,
    Side,
    WorkerAdded,
    WorkerProbed,
    WorkerRemoved,
)
from tandem.core.router.pairing import PREFILL_RANK, num_prompts, rank_fields
from tandem.core.router.router import Router, RouterEffects
from tandem.core.router.sent_prefixes import Blocks
from tandem.core.router.upstream_call import Said, UpstreamCall
from tandem.core.router.worker_registry import Health, ProbeResult, RegisteredWorker, WorkerId
from tandem.core.values import MILLISECOND, SECOND, Nanos, RequestId
from tandem.server.api.bounds import LOOP_BYTES
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.off_loop import off_loop
from tandem.server.api.resume import ASKS, FIELD, TELLS, FrameReader, Told
from tandem.server.fault_records import OURS
from tandem.server.router.answer import (
    Gone,
    Outcome,
    Pipe,
    StreamedAnswer,
    WholeAnswer,
    code_of,
    error_at_end,
    passed_headers,
    retryable_of,
)
from tandem.server.router.config import nanos
from tandem.server.router.metrics import RouterMetrics
from tandem.server.router.prober import Prober
from tandem.server.tracing import NO_SPAN, Span, Value

log = logging.getLogger("tandem.router")

DOCUMENT_BYTES_MAX = 256 << 20
REJECTION_BYTES_MAX = 1 << 20
BODY_END_SECONDS = 1.0  # behind the last frame of a stream: nobody waits for it, and nothing else bounds it
PREFILL_TAIL_BYTES = 16 << 10
REJECTION_TAIL_BYTES = 16 << 10
OWN_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "timeout", FIELD)  # the router's to say


@dataclass(slots=True)
class UpstreamConnection:
    """The connection of one half of one attempt."""

    call: "ClientCall"
    upstream: UpstreamCall
    worker: RegisteredWorker
    sent_at: Nanos
    task: asyncio.Task[None] | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
    pipe: Pipe | None = None  # decode only, when it streams
    told: Told = field(default_factory=Told)  # with the pipe: what it has said
    heard_at: int = 0  # the last piece of a stream
    span: Span = NO_SPAN

    @property
    def silent_ns(self) -> Nanos:
        return Nanos(time.monotonic_ns() - self.heard_at if self.heard_at else 0)


@dataclass(slots=True)
class ClientCall:
    """One request of a client. Owned by the shell until the core has ended it."""

    id: RequestId
    path: str
    content: bytes  # the client's body, without the fields that each attempt sets
    rank_fields: dict[str, object]  # what this client's choice of a DP rank says to both halves
    has_timeout: bool  # in the body: then it says there how much is left
    headers: dict[str, str]  # for both halves
    merges: bool
    names: frozenset[str]  # by which it can be aborted
    outcome: asyncio.Future[Outcome]
    span: Span  # of the whole request
    streams: bool = False
    source: UpstreamConnection | None = None  # whose answer the client gets, or got until it was lost
    give_up_message: bytes = b""  # of a stream that gave up, for the client if nobody goes on with it
    give_up_code: str = ""
    connections: dict[Side, UpstreamConnection] = field(
        default_factory=dict[Side, UpstreamConnection]
    )  # of the latest attempt


class RouterShell:
    """`start` begins probing, `close` cancels everything."""

    def __init__(
        self,
        router: Router,
        client: httpx.AsyncClient,
        prober: Prober,
        metrics: RouterMetrics,
        *,
        stall_seconds: float,
        step: Callable[[Sequence[RouterEvent], Nanos], RouterEffects],
        failed: Callable[[str], object] = lambda why: None,
    ) -> None:
        """step: the router's, with whoever looks on. failed: called when a request has ended with a cause of ours."""
        self.router = router
        self._step = step
        self._failed = failed
        self._client = client
        self._prober = prober
        self._metrics = metrics
        self._stall_seconds = stall_seconds
        self._calls: dict[RequestId, ClientCall] = {}
        self._next_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._absent: set[WorkerId] = set()  # workers that did not answer from the beginning, as the log says

    def start(self) -> None:
        self._prober.start(partial(asyncio.get_running_loop().call_soon_threadsafe, self.tell))
        self.tell()

    async def close(self) -> None:
        self._is_closed = True
        self._prober.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(
        self,
        path: str,
        body: dict[str, object],
        content: bytes,
        headers: dict[str, str],
        *,
        timeout_seconds: float,
        blocks: Blocks = (),
        model: str | None = None,
        span: Span = NO_SPAN,
    ) -> ClientCall:
        """Begin a request. Its `outcome` comes in any case; whoever stops waiting for it must call `leave`.

        content: of the body, as `encode_rest` makes it. blocks: of its prompt, where a policy looks at them.
        model: one that workers are known to serve; None: of no matter.
        """
        self._next_id += 1
        streams = bool(body.get("stream"))
        merges = path == "/generate" and bool(body.get("return_logprob")) and not streams
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        names, has_timeout = names_of(body, headers), "timeout" in body
        call = ClientCall(
            RequestId(self._next_id),
            path,
            content,
            rank_fields(body, headers.get("x-data-parallel-rank")),
            has_timeout,
            headers,
            merges,
            names,
            future,
            span,
            streams,
        )
        self._calls[call.id] = call
        self.tell(ClientAsked(call.id, num_prompts(path, body), nanos(timeout_seconds), streams, merges, blocks, model))
        return call

    def add_worker(self, worker: RegisteredWorker) -> None:
        log.info("%s worker %s is added", worker.role.value, worker.url)
        self.tell(WorkerAdded(worker))

    def remove_worker(self, worker: RegisteredWorker) -> None:
        """It answers what it has before it goes."""
        log.info("%s worker %s is to leave", worker.role.value, worker.url)
        self._absent.discard(worker.id)
        self.tell(WorkerRemoved(worker.id))

    def leave(self, call: ClientCall) -> None:
        """The client has gone. Without effect when the request has ended."""
        if call.id in self._calls:
            self.tell(ClientLeft(call.id))

    def abort(self, rid: str | None) -> None:
        """Nothing more is tried for the requests of this name; for all of them when none is given."""
        named = [call.id for call in self._calls.values() if rid is None or rid in call.names]
        self.tell(*map(AbortAsked, named))

    def tell(self, *events: RouterEvent) -> None:
        """Probes that were answered meanwhile come first: an answer that is here is not late because we are.

        After `close` nothing comes of it: the last probes may have called for one, and nobody could be asked any more.
        """
        if self._is_closed:
            return
        probed = self._prober.take()
        before = {worker: self.router.registry.health(worker.id) for worker in self._known(probed)}
        effects = self._step((*probed, *events), Nanos(time.monotonic_ns()))
        for worker, health in before.items():
            self._note_health(worker, health)
        self._note_absent(probed)
        for command in effects.commands:
            self._metrics.see(command)
            self._begin(command)
        self._wake_at(effects.wake_at)

    def _known(self, probed: Sequence[WorkerProbed]) -> list[RegisteredWorker]:
        """Those that have not left since they were asked."""
        found = {probe.worker for probe in probed}
        return [worker for worker in self.router.registry.workers() if worker.id in found] if found else []

    def _note_health(self, worker: RegisteredWorker, before: Health | None) -> None:
        after = self.router.registry.health(worker.id)
        if before is not after:
            log.info("%s worker %s: %s -> %s", worker.role.value, worker.url, before or "new", after or "gone")

    def _note_absent(self, probed: Sequence[WorkerProbed]) -> None:
        """Once, of whom nobody has seen: started later than the router, or an address that is wrong."""
        missed = [probe for probe in probed if probe.result is ProbeResult.MISSED]
        for worker in self._known(missed):
            if self.router.registry.health(worker.id) is Health.JOINING and worker.id not in self._absent:
                self._absent.add(worker.id)
                log.info("%s worker %s does not answer yet: it joins when it does", worker.role.value, worker.url)

    def _wake_at(self, wake_at: Nanos) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0, wake_at - time.monotonic_ns()) / SECOND
        self._timer = asyncio.get_running_loop().call_later(delay, self.tell)

    # --- commands -------------------------------------------------------------------------------------------------

    def _begin(self, command: RouterCommand) -> None:
        match command:
            case DispatchPair():
                self._dispatch(command)
            case CancelHalf(request=request, half=half):
                self._cancel(self._calls[request].connections[half])
            case BreakHalf(request=request, half=half, silent_ns=silent_ns, detail=detail):
                self._break(self._calls[request].connections[half], silent_ns, detail)
            case Forward(request=request, merged=merged):
                self._forward(self._calls[request], merged)
            case ForwardRejection(request=request, half=half):
                connection = self._calls[request].connections[half]
                self._metrics.see_rejection(half, connection.upstream.status)
                self._look_for_fault(request, code_of(bytes(connection.body[-REJECTION_TAIL_BYTES:])))
                self._end(request, WholeAnswer(connection.upstream.status, connection.headers, bytes(connection.body)))
            case Fail(request=request):
                self._end(request, command)
            case Finish(request=request):
                self._end(request, Gone())
            case Probe(worker=worker):
                self._prober.probe(worker)

    def _dispatch(self, sent: DispatchPair) -> None:
        call = self._calls[sent.request]
        own = sent.pair.fields() | call.rank_fields
        if call.has_timeout:
            own["timeout"] = sent.timeout_ns / SECOND
        if sent.resumes and call.source is not None:
            own[FIELD] = call.source.told.resume()
        content = with_fields(own, call.content)
        headers = call.headers | {"x-request-timeout-ms": str(max(1, sent.timeout_ns // MILLISECOND))}
        headers |= {ASKS: "1"} if call.streams else {}
        now = Nanos(time.monotonic_ns())
        for half, worker in ((Side.PREFILL, sent.pair.prefill), (Side.DECODE, sent.pair.decode)):
            upstream = UpstreamCall(call.id, sent.attempt, half, nanos(self._stall_seconds))
            connection = UpstreamConnection(
                call, upstream, worker, now, span=call.span.child(half.value, now, is_call=True)
            )
            call.connections[half] = connection
            connection.task = self._spawn(self._run(connection, content, headers | connection.span.headers))

    def _cancel(self, connection: UpstreamConnection) -> None:
        assert connection.task is not None
        connection.upstream.cancel()
        connection.task.cancel()
        connection.span.abort({"reason": "cancelled"})
        self._end_span(connection)

    def _break(self, connection: UpstreamConnection, silent_ns: Nanos, detail: str) -> None:
        """What happens is told once the commands of this step are begun."""
        if connection.silent_ns < silent_ns:
            return
        said = connection.upstream.fail(HalfFailure.BROKEN, detail, silent_ns=connection.silent_ns)
        self._cancel(connection)
        asyncio.get_running_loop().call_soon(self._hear, connection, said)

    def _forward(self, call: ClientCall, merged: bool) -> None:
        connection = call.source = call.connections[Side.DECODE]
        call.give_up_message = b""
        if connection.pipe is not None:
            self._resolve(call, StreamedAnswer(connection.upstream.status, connection.headers, connection.pipe))
            return
        prefill = bytes(call.connections[Side.PREFILL].body) if merged else b""
        self._resolve(
            call, WholeAnswer(connection.upstream.status, connection.headers, bytes(connection.body), prefill)
        )

    def _end(self, request: RequestId, outcome: Outcome) -> None:
        call = self._calls.pop(request)
        decode = call.source or call.connections.get(Side.DECODE)
        if decode is not None and decode.pipe is not None:
            decode.pipe.end(outcome if isinstance(outcome, Fail) else None, call.give_up_message)
            if call.give_up_message and not isinstance(outcome, Fail):
                self._look_for_fault(request, call.give_up_code)
        self._resolve(call, outcome)

    def _look_for_fault(self, request: RequestId, code: str) -> None:
        """code: of the error that its client hears."""
        if code in OURS:
            self._failed(f"request {request} has ended with {code}")

    def _resolve(self, call: ClientCall, outcome: Outcome) -> None:
        if not call.outcome.done():
            call.outcome.set_result(outcome)

    # --- connections ----------------------------------------------------------------------------------------------

    async def _run(self, connection: UpstreamConnection, content: bytes, headers: dict[str, str]) -> None:
        """Talk to one worker and tell what happened. Cancelled, it closes the connection and tells nothing."""
        upstream = connection.upstream
        try:
            url = connection.worker.url + connection.call.path
            sent = httpx.Headers(headers, encoding="latin-1")  # as they were read
            async with self._client.stream("POST", url, content=content, headers=sent) as response:
                await self._listen(connection, response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._hear(connection, upstream.fail(HalfFailure.REFUSED, f"cannot connect: {error}"))
        except TimeoutError:
            self._hear(connection, upstream.stall())
        except Exception as error:  # whatever a foreign server makes of HTTP is its failure, not ours
            detail = f"{type(error).__name__} {error}".strip()
            self._hear(connection, upstream.fail(HalfFailure.BROKEN, detail, silent_ns=connection.silent_ns))
        finally:
            self._end_span(connection)

    def _end_span(self, connection: UpstreamConnection) -> None:
        upstream = connection.upstream
        if upstream.status and not upstream.is_accepted:
            connection.span.abort({"reason": f"answers {upstream.status}"})
        attributes: dict[str, Value] = {
            "url.full": connection.worker.url + connection.call.path,
            "tandem.attempt": upstream.attempt,
        }
        if upstream.status:
            attributes["http.response.status_code"] = upstream.status
        connection.span.end(time.monotonic_ns(), attributes)

    def _hear(self, connection: UpstreamConnection, said: Said) -> None:
        for event in said:
            if isinstance(event, HalfFailed):
                connection.span.abort({"reason": event.detail, "failure": event.failure.value})
                log.warning("%s worker %s: %s", event.half.value, connection.worker.url, event.detail)
        if said:
            before = self._breaker_state(connection.worker)
            self.tell(*said)
            if (after := self._breaker_state(connection.worker)) != before:
                log.warning(
                    "%s worker %s: circuit breaker is %s", connection.worker.role.value, connection.worker.url, after
                )

    def _breaker_state(self, worker: RegisteredWorker) -> str:
        breaker = self.router.registry.breaker(worker.id)
        return "" if breaker is None else breaker.state.value

    async def _listen(self, connection: UpstreamConnection, response: httpx.Response) -> None:
        upstream = connection.upstream
        connection.headers = passed_headers(response.headers)
        self._metrics.see_head(connection.worker, (time.monotonic_ns() - connection.sent_at) / SECOND)
        is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        is_event_stream &= not connection.call.merges  # nobody reads a pipe before both halves have ended
        in_frames = TELLS in response.headers
        said = upstream.head(response.status_code, is_event_stream=is_event_stream, is_resumable=in_frames)
        self._hear(connection, said)
        if not upstream.is_accepted:
            await collect(response, connection.body, REJECTION_BYTES_MAX)
            is_retryable = await off_loop(len(connection.body), LOOP_BYTES, retryable_of, bytes(connection.body))
            self._hear(connection, upstream.reject(is_retryable=is_retryable))
        elif upstream.is_resumable:
            await self._listen_to_frames(connection, response)
        elif upstream.half is Side.DECODE and connection.call.source is not None:
            self._hear(connection, upstream.fail(HalfFailure.BROKEN, "begins an answer anew that it was to go on with"))
        elif upstream.is_stream:
            await self._listen_to_stream(connection, response)
        elif upstream.half is Side.DECODE:
            await collect(response, connection.body, DOCUMENT_BYTES_MAX)
            self._hear(connection, upstream.end())
        else:
            await self._listen_to_prefill(connection, response)

    async def _listen_to_prefill(self, connection: UpstreamConnection, response: httpx.Response) -> None:
        """Its body says nothing that decode does not say, but for prompt logprobs; all but its end is dropped."""
        if connection.call.merges:
            await collect(response, connection.body, DOCUMENT_BYTES_MAX)
        else:
            async for piece in response.aiter_raw():
                connection.body = (connection.body + piece)[-PREFILL_TAIL_BYTES:]
        error = error_at_end(bytes(connection.body[-PREFILL_TAIL_BYTES:]))
        code, message = (str(error.get("code")), str(error.get("message"))) if error is not None else (None, "")
        self._hear(connection, connection.upstream.end(code, message))

    async def _listen_to_stream(self, connection: UpstreamConnection, response: httpx.Response) -> None:
        pieces = response.aiter_raw()
        pipe = connection.pipe = Pipe()
        while (piece := await next_piece(pieces, connection.upstream)) is not None:
            await pipe.put(piece)
            self._hear(connection, connection.upstream.piece())
        pipe.end()
        self._hear(connection, connection.upstream.end())

    async def _listen_to_frames(self, connection: UpstreamConnection, response: httpx.Response) -> None:
        """Of a stream that others may go on with, or that goes on here: then the client reads from the same pipe."""
        lost = connection.call.source
        pipe = connection.pipe = Pipe() if lost is None or lost.pipe is None else lost.pipe
        connection.told = connection.told if lost is None else lost.told
        pieces, reader = response.aiter_raw(), FrameReader()
        while (piece := await next_piece(pieces, connection.upstream)) is not None:
            for frame, data in reader.feed(piece):
                if frame.gives_up:
                    connection.call.give_up_message, connection.call.give_up_code = data, frame.code
                    silent_ns, serves_on = connection.silent_ns, frame.serves_on
                    said = connection.upstream.give_up(frame.gives_up, silent_ns=silent_ns, serves_on=serves_on)
                    self._hear(connection, said)
                    return
                if data:
                    await pipe.put(data)
                connection.told.add(frame)
                # Of what does not tell how it began nobody can be asked for the rest.
                connection.upstream.is_resumable = connection.told.opening is not None
                connection.heard_at = time.monotonic_ns()
                if frame.is_last:
                    pipe.end()
                    self._look_for_fault(connection.call.id, frame.code)
                self._hear(
                    connection, (*connection.upstream.piece(), *(connection.upstream.end() if frame.is_last else ()))
                )
                if frame.is_last:
                    async with asyncio.timeout(BODY_END_SECONDS):
                        await anext(pieces, None)  # the end of the body: its connection can be used again
                    return
        raise httpx.RemoteProtocolError("the stream ends before its last frame")

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def next_piece(pieces: AsyncIterator[bytes], upstream: UpstreamCall) -> bytes | None:
    """None: there is no more. Raises TimeoutError where the next one takes longer than `patience_ns`."""
    patience_ns = upstream.patience_ns
    async with asyncio.timeout(patience_ns / SECOND if patience_ns is not None else None):
        return await anext(pieces, None)


async def collect(response: httpx.Response, body: bytearray, size_max: int) -> None:
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > size_max:
            raise httpx.DecodingError(f"answer is longer than {size_max} bytes")


def encode_rest(body: dict[str, object]) -> bytes:
    """What all attempts send alike. Raises `Refusal` for what is nested beyond what can be written."""
    own = OWN_FIELDS if body.get(PREFILL_RANK) is not None else (*OWN_FIELDS, PREFILL_RANK)
    try:
        return msgspec.json.encode({name: value for name, value in body.items() if name not in own})
    except RecursionError as error:
        raise Refusal(Problem.INVALID_JSON, f"the body is nested too deeply: {error}") from None


def with_fields(own: dict[str, object], content: bytes) -> bytes:
    """One JSON object from an encoded object and fields, of which there is at least one.

    These come last, as workers complain of the first field that is wrong: it is one of the client's.
    """
    return content[:-1] + (b"," if len(content) > 2 else b"") + msgspec.json.encode(own)[1:]


def names_of(body: dict[str, object], headers: dict[str, str]) -> frozenset[str]:
    """As the workers know it: `rid` of the body, one or a list, and the request id."""
    rid = body.get("rid")
    given = rid if isinstance(rid, list) else [rid]
    return frozenset(name for name in (*given, headers.get("x-request-id")) if isinstance(name, str))
