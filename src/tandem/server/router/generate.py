"""One generation request at the router: read and check what the router must know, wait for the outcome, write it.

The body is not validated here beyond that: both halves do it, and their 4xx is the answer. The router puts its own
`bootstrap_*` fields in place of any that came in, so a client cannot make a decode connect anywhere, and the time where
none came in.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any  # a JSON object, passed on

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem.core.router.messages import Fail
from tandem.core.router.pairing import num_prompts
from tandem.core.router.sent_prefixes import Blocks
from tandem.core.router.worker_registry import WorkerRegistry
from tandem.core.values import SECOND, Cause
from tandem.server.api.body import NOT_JSON
from tandem.server.api.bounds import LOOP_BYTES, MAX_PROMPTS, Seconds
from tandem.server.api.endpoint_parts import CLIENT_LEFT, read_body, within
from tandem.server.api.errors import (
    RULES,
    Code,
    Failure,
    Problem,
    Refusal,
    error_event,
    error_headers,
    error_json,
    in_words,
    invalid,
)
from tandem.server.api.large_body import check_counts
from tandem.server.api.off_loop import off_loop
from tandem.server.api.response_store import PendingResponse, ResponseStore, owner_of
from tandem.server.api.sample_requests import check_timeout
from tandem.server.api.tenant import given_key
from tandem.server.router.answer import Gone, StreamedAnswer, WholeAnswer, merge_input_logprobs
from tandem.server.router.finished_response import LastEvent, keep_document, keep_event
from tandem.server.router.forward import GENERATION_HEADERS, sent_headers
from tandem.server.router.metrics import RouterMetrics
from tandem.server.router.prompt_blocks import BlocksOf
from tandem.server.router.shell import ClientCall, RouterShell, encode_rest
from tandem.server.router.worker_documents import STAGE
from tandem.server.tracing import Span, Tracing, abort_info, ending_with_errors, response_headers

RESPONSES = "/v1/responses"
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES, "/generate")
NAMED_MODELS = 8  # in an error
CODES: dict[str, Code] = {code.value: code for code in RULES}


class Generate:
    """ASGI endpoint: Starlette's responses would hide when the client leaves."""

    def __init__(
        self,
        shell: RouterShell,
        metrics: RouterMetrics,
        store: ResponseStore,
        *,
        timeout_seconds: float,
        blocks_of: BlocksOf,
        tracing: Tracing,
    ) -> None:
        self._shell = shell
        self._metrics = metrics
        self._store = store
        self._tracing = tracing
        self._timeout_seconds = timeout_seconds
        self._blocks_of = blocks_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, began = Request(scope, receive), time.monotonic()
        span = self._tracing.begin(f"POST {scope['path']}", request.headers, time.monotonic_ns())
        with ending_with_errors(span):
            try:
                await self._answer(request, receive, send, span)
            except Refusal as refusal:  # before anybody was asked
                self._metrics.see_unasked(scope["path"], refusal.failure, time.monotonic() - began)
                raise

    async def _answer(self, request: Request, receive: Receive, send: Send, span: Span) -> None:
        began = time.monotonic()
        conversation = None
        if request.scope["path"] == RESPONSES and self._store.keeps:
            conversation = PendingResponse(self._store, owner_of(request))
        key = given_key(request.headers)
        limit = began + timeout_seconds(request, {}, default=self._timeout_seconds) - time.monotonic()

        async def read() -> tuple[dict[str, Any], bytes, Blocks]:
            raw = await read_body(request)
            size = len(raw) if conversation is None else LOOP_BYTES + 1  # what is before it may be long
            return await off_loop(size, LOOP_BYTES, self._read, raw, conversation, key)

        body, content, blocks = await within(limit, read(), "the body did not come", stage=STAGE)
        check_prompts(request.scope["path"], body)
        model = model_of(self._shell.router.registry, request.scope["path"], body)
        timeout = began + timeout_seconds(request, body, default=self._timeout_seconds) - time.monotonic()
        if timeout <= 0:
            message, waited = "the deadline passed while the body came", time.monotonic() - began
            raise Refusal(Cause.DEADLINE_EXCEEDED, message, stage=STAGE, waited_seconds=waited)
        reply = _Reply(send, request.scope["path"], request.state.request_id, began, conversation, span)
        headers = sent_headers(request.headers, GENERATION_HEADERS, request_id=reply.request_id)
        call = self._shell.open(
            request.scope["path"],
            body,
            content,
            headers,
            timeout_seconds=timeout,
            blocks=blocks,
            model=model,
            span=span,
        )
        watcher = asyncio.create_task(self._watch(receive, call, reply))
        try:
            await reply.write(call)
        finally:
            watcher.cancel()
            if not reply.is_whole:
                self._shell.leave(call)
            self._metrics.see_reply(
                request.scope["path"], reply.status, reply.first_byte_seconds, time.monotonic() - began
            )
            if reply.failure is not None:
                span.abort(abort_info(reply.failure))
            elif reply.status == CLIENT_LEFT:
                span.abort({"reason": "the client left"})
            span.end(time.monotonic_ns(), reply.attributes)

    def _read(self, raw: bytes, conversation: PendingResponse | None, key: str) -> tuple[dict[str, Any], bytes, Blocks]:
        """In any thread."""
        body, content = read_object(raw, conversation)
        return body, content, self._blocks_of(body, key)

    async def _watch(self, receive: Receive, call: ClientCall, reply: "_Reply") -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.is_whole:
            reply.status = CLIENT_LEFT
            self._shell.leave(call)


class _Reply:
    """What the client gets. `is_whole` once nothing is missing, just before the last byte is handed over."""

    def __init__(
        self,
        send: Send,
        path: str,
        request_id: str,
        began: float,
        conversation: PendingResponse | None,
        span: Span,
    ) -> None:
        """conversation: that has to learn what a response says, before the client has all of it."""
        self._send = send
        self._span = span
        self._conversation = conversation
        self._path = path
        self._began = began
        self.request_id = request_id
        self.status = CLIENT_LEFT
        self.first_byte_seconds: float | None = None
        self.failure: Failure | None = None  # of the router's own
        self.is_whole = False

    @property
    def attributes(self) -> dict[str, str | float]:
        """What a span says of it."""
        found: dict[str, str | float] = {
            "http.route": self._path,
            "http.response.status_code": self.status,
            "tandem.request_id": self.request_id,
        }
        if self.first_byte_seconds is not None:
            found["tandem.first_byte_seconds"] = self.first_byte_seconds
        return found

    async def write(self, call: ClientCall) -> None:
        try:
            await self._write(call)
        except asyncio.CancelledError:  # the drain is over, and this request is not
            await self._end(Failure(Cause.DRAINING, "the router has ended before the request", None, STAGE))

    async def _write(self, call: ClientCall) -> None:
        match await call.outcome:
            case WholeAnswer(status, headers, body, prefill):
                if prefill:
                    size = len(prefill) + len(body)
                    body = await off_loop(size, LOOP_BYTES, merge_input_logprobs, prefill=prefill, decode=body)
                if self._conversation is not None and status == 200:
                    await off_loop(len(body), LOOP_BYTES, keep_document, self._conversation, body)
                await self._document(status, headers, body)
            case StreamedAnswer() as stream:
                await self._stream(stream)
            case Fail() as fail:
                failure = self.failure = failure_of(fail)
                await self._document(failure.status, error_headers(failure), error_json(failure, self.request_id))
            case Gone():
                pass  # nobody is there

    async def _document(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self._head(status, headers | {"content-length": str(len(body))})
        self.is_whole = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, stream: StreamedAnswer) -> None:
        await self._head(stream.status, stream.headers)
        tail = b"\n\n"
        seeker = None if self._conversation is None else LastEvent()
        async for chunk in stream.pipe.chunks():
            tail = (tail + chunk)[-2:]
            if seeker is not None and self._conversation is not None and (last := seeker.feed(chunk)):
                await off_loop(len(last), LOOP_BYTES, keep_event, self._conversation, last)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        if stream.pipe.failure is not None:
            failure = self.failure = failure_of(stream.pipe.failure)
            event = error_event(self._path, error_json(failure, self.request_id))
            torn = b"" if tail == b"\n\n" else b"\n\n"  # what decode left unfinished must not swallow the event
            await self._send({"type": "http.response.body", "body": torn + event, "more_body": True})
        self.is_whole = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, failure: Failure) -> None:
        """In the way that is still open."""
        self.failure = failure
        body = error_json(failure, self.request_id)
        if self.first_byte_seconds is None:
            await self._document(failure.status, error_headers(failure), body)
        elif not self.is_whole:
            self.is_whole = True
            event = b"\n\n" + error_event(self._path, body)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.first_byte_seconds = time.monotonic() - self._began
        pairs = (headers | {"x-request-id": self.request_id} | response_headers(self._span)).items()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def failure_of(fail: Fail) -> Failure:
    """The router's own error in words for a client."""
    message = in_words(fail.cause, fail.detail)
    return Failure(CODES[fail.cause.value], message, None, fail.stage, waited_seconds=fail.waited_ns / SECOND)


def read_object(raw: bytes, conversation: PendingResponse | None = None) -> tuple[dict[str, Any], bytes]:
    """In any thread: the body, and what of it all attempts send alike. Raises `Refusal`.

    conversation: of a response, that has the items before it put into the body.
    """
    check_counts(raw)
    try:
        body = msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise Refusal(Problem.INVALID_JSON, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(Problem.INVALID_JSON, "the body must be a JSON object")
    stamp_time(body)
    if conversation is not None:
        previous, given = body.get("previous_response_id"), body.get("input")
        if previous is None or isinstance(previous, str):  # another one is the workers' to refuse
            begun = conversation.begin(previous, given, body.get("kept_items"))
            body |= {"kept_items": Raw(begun.before)} | ({} if given is None else {"input": begun.given})
    return body, encode_rest(body)


def model_of(registry: WorkerRegistry, path: str, body: Mapping[str, object]) -> str | None:
    """By which workers are chosen. None: it names none, or the workers' models are not known. Raises `Refusal`."""
    asked = body.get("model")
    if not isinstance(asked, str):
        return None
    is_model = registry.is_model(asked)
    if is_model is False and path != "/generate":  # where gateways send any name
        raise not_a_model(asked, registry.paired_models())
    return asked if is_model else None


def not_a_model(asked: str, served: Sequence[str]) -> Refusal:
    names = ", ".join(map(repr, served[:NAMED_MODELS])) or "no live pair serves any"
    detail = f"the model {asked[:80]!r} is not served here; what is: {names}"
    return Refusal(Problem.MODEL_NOT_FOUND, detail, param="model", stage=STAGE)


def stamp_time(body: dict[str, Any]) -> None:
    """Both halves render a chat by this clock, whatever their own ones say; another attempt gives the same prompt."""
    if body.get("rendered_at") is None:
        body["rendered_at"] = int(time.time())


def check_prompts(path: str, body: dict[str, Any]) -> None:
    """Each gets a room; the workers would refuse so many only after that, in these words. Raises `Refusal`."""
    if (num_prompts(path, body) or 1) <= MAX_PROMPTS:
        return
    if path != "/generate":
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts in one request")
    raise invalid("text" if body.get("text") is not None else "input_ids", f"must hold 1 to {MAX_PROMPTS} prompts")


def timeout_seconds(request: Request, body: dict[str, Any], *, default: float) -> float:
    """The smaller of what body and header say: a gateway before us may have spent some of the client's time."""
    given: list[float] = []
    if (in_body := body.get("timeout")) is not None:
        given.append(_within_bounds(in_body))
    if (in_header := request.headers.get("x-request-timeout-ms")) is not None:
        given.append(check_timeout(None, in_header, default) / SECOND)
    return min(given, default=default)


def _within_bounds(value: object) -> float:
    """The workers get what is left of it instead, so what they would refuse is refused here, in their words.

    value: not null, which they take for none.
    """
    try:
        return msgspec.convert(value, Seconds | None) or 0.0
    except (msgspec.ValidationError, OverflowError) as error:
        raise invalid("timeout", str(error)) from None
