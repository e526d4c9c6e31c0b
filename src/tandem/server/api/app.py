"""The HTTP application of one server.

A generation request's way: `read_body` - `decode_both` - the dialect's `read_*` (prompts and parameters) - `ask_all`
(rooms, seeds, deadlines) - `submission` - `TokenResponse`, which has the node run it (`NodeClient.running`).
Everything before that may refuse, and has reserved nothing; what a body makes long leaves the event loop.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.config import ServerConfig
from tandem.core.values import SECOND, Cause, RequestId
from tandem.metrics.export import Exporter
from tandem.metrics.http_counts import HttpCounts
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestStats
from tandem.server.api.access import AccessRules, AuthMiddleware
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.body import (
    EMBEDDING_PATHS,
    RERANK_PATHS,
    SCORE_PATHS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    NativeBody,
    RerankBody,
    Routing,
    ScoreBody,
    decode_body,
)
from tandem.server.api.bounds import LOOP_BYTES, LOOP_IDS, LOOP_SAMPLES
from tandem.server.api.chat_form import ChatForm
from tandem.server.api.client import NodeClient, raise_if
from tandem.server.api.cors import cors
from tandem.server.api.debug_page import DebugPage
from tandem.server.api.detokenizer import detokenizer
from tandem.server.api.endpoint_parts import Found, error_response, not_served, on_disconnect, read_body, within
from tandem.server.api.errors import EDGE_STAGE, Failure, Problem, Refusal
from tandem.server.api.faults import FaultsPage
from tandem.server.api.generate import GenerateReply, read_native
from tandem.server.api.http_counting import CountingMiddleware
from tandem.server.api.kv_transfer_params import (
    KvTransferParams,
    as_prefill_was_asked,
    follow,
    is_handed_over,
    prefill_answer,
    read_params,
)
from tandem.server.api.large_body import decode_both
from tandem.server.api.limits import Task
from tandem.server.api.live_requests import IncomingRequest
from tandem.server.api.messages import MessagesBody, MessagesReply, chat_of, read_messages
from tandem.server.api.model_facts import ModelFacts, limits_of
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openai import ChatReply, CompletionReply, Shape, count_tokens, read_chat, read_completion
from tandem.server.api.ops import Ops, check_model, json_response
from tandem.server.api.rendering import Renderer
from tandem.server.api.response_store import PendingResponse, ResponsePages, ResponseStore, owner_of
from tandem.server.api.responses import ResponsesBody, count_input, read_responses, without_items
from tandem.server.api.responses_reply import ResponsesReply
from tandem.server.api.resume import ASKS, Opening, Proofs, Resume, Resuming
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Prepared, Reply, TokenResponse
from tandem.server.api.telling import Resumed, Teller, can_tell, goes_on
from tandem.server.api.tenant import given_key, tenant_of
from tandem.server.api.text import TextStream
from tandem.server.api.tokenization import TokenizationPage
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.validation import (
    Asked,
    GenerationParams,
    Prompt,
    SampleRequest,
    ask_all,
    beyond,
    check_task,
    check_timeout,
    follow_gateway,
    priority_of,
    submission,
    time_of,
)
from tandem.server.api.vectors import (
    VectorReply,
    embeddings,
    ranking,
    read_embeddings,
    read_rerank,
    read_score,
    scores,
)
from tandem.server.tracing import NO_TRACING, Span, Tracing, ending_with_errors

logger = logging.getLogger("tandem.server")
Body = TypeVar("Body", bound=Struct)
# The last: bytes of the body, by which a reader knows what is too much for the loop.
Reader = Callable[[Body, Routing, ServedModel, int], Awaitable[Asked]]


def build_app(
    config: ServerConfig,
    client: NodeClient,
    model: ModelFacts,
    tokenizer: Tokenizer,
    *,
    digest_secret: bytes | None,
    log: RequestLog | None = None,
    tracing: Tracing = NO_TRACING,
    stats: RequestStats | None = None,
) -> Starlette:
    """The application. It may serve before the node is ready: then it answers 503 to all that needs the node."""
    limits = limits_of(config, model, digest_secret=digest_secret)
    served = ServedModel(limits, tokenizer, ChatForm.of(config, tokenizer))
    stats = stats or RequestStats()
    counts = HttpCounts()
    exporter = Exporter(stats, model_name=config.model_name, engine_type=config.role, counts=counts)
    generation = Endpoints(
        config=config,
        client=client,
        served=served,
        stats=stats,
        log=log or RequestLog(config.log_format),
        tracing=tracing,
    )
    ops = Ops(config=config, client=client, model=model, limits=limits, tokenizer=tokenizer, exporter=exporter)
    tokenization = TokenizationPage(served)
    debug = DebugPage(client, stats, role=config.role, name=config.model_name)
    counted_paths = frozenset(route.path for route in (*generation.routes(), *tokenization.routes()))

    async def on_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        if request.scope["path"] in counted_paths:
            stats.refuse(error.failure.code.value)
        return error_response(error.failure, request.state.request_id)

    async def on_bug(request: Request, error: Exception) -> Response:
        client.last_steps.write(f"request {request.state.request_id} has met an error of ours")
        return error_response(Failure(Problem.INTERNAL, "the server made a mistake"), request.state.request_id)

    app = Starlette(
        routes=[
            *generation.routes(),
            *tokenization.routes(),
            *ops.routes(),
            *FaultsPage(config, client).routes(),
            *debug.routes(),
        ],
        middleware=layers(config, counts),
        exception_handlers={
            Refusal: on_refusal,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    counts.endpoints = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return app


def layers(config: ServerConfig, counts: HttpCounts) -> list[Middleware]:
    """The outermost first."""
    return [
        Middleware(CountingMiddleware, counts=counts),
        *cors(config),
        Middleware(AuthMiddleware, rules=AccessRules.of(config), stage=EDGE_STAGE),
    ]


class Endpoints:
    """The pages that have the node run something: generation, and vectors and scores, which end with their prompts."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        client: NodeClient,
        served: ServedModel,
        stats: RequestStats,
        log: RequestLog,
        tracing: Tracing,
    ) -> None:
        self._tracing = tracing
        self._config = config
        self._client = client
        self._served = served
        self._limits = served.limits
        self._tokenizer = served.tokenizer
        self._chat_form = served.form
        self._stats = stats
        self._log = log
        self._store = ResponseStore(
            max_responses=config.max_stored_responses if config.role == "unified" else 0,
            max_bytes=config.stored_responses_max_bytes,
        )
        self._hosts = AllowedHosts.of(config)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input, methods=["POST"]),
            *ResponsePages(self._store).routes(),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            *(Route(path, self.embed, methods=["POST"]) for path in EMBEDDING_PATHS),
            *(Route(path, self.rerank, methods=["POST"]) for path in RERANK_PATHS),
            *(Route(path, self.score, methods=["POST"]) for path in SCORE_PATHS),
        ]

    async def chat(self, request: Request) -> TokenResponse:
        def reply(body: ChatBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            shape = self._shape(body, routing, asks, "chatcmpl-", made_at)
            return ChatReply(shape, self._tokenizer, self._chat_form.answer_to(body))

        return await self._answer(request, ChatBody, read_chat, reply)

    async def complete(self, request: Request) -> TokenResponse:
        def reply(body: CompletionBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            shape = self._shape(body, routing, asks, "cmpl-", made_at)
            return CompletionReply(shape, self._tokenizer, echo=bool(body.echo))

        return await self._answer(request, CompletionBody, read_completion, reply)

    async def generate(self, request: Request) -> TokenResponse:
        def reply(body: NativeBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            is_single = isinstance(body.text, str) or (body.input_ids and isinstance(body.input_ids[0], int))
            return GenerateReply(
                self._tokenizer,
                is_list=not is_single or len(asks) > 1,
                shows_text=bool(body.return_text_in_logprobs),
                shows_tops=bool(body.top_logprobs_num),
                shows_asked=bool(body.token_ids_logprob),
                shows_input=self._limits.role != "prefill",
            )

        return await self._answer(request, NativeBody, read_native, reply, checks_model=False)

    async def messages(self, request: Request) -> TokenResponse:
        def reply(body: MessagesBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            name = routing.rid if isinstance(routing.rid, str) else "msg_" + asks[0].rid
            form = self._chat_form.answer_to(chat_of(body))
            return MessagesReply(id=name, model=routing.model or self._config.model_name, form=form)

        return await self._answer(request, MessagesBody, read_messages, reply)

    async def responses(self, request: Request) -> TokenResponse:
        conversation = PendingResponse(self._store, owner_of(request))
        kept_size = 0

        async def read(body: ResponsesBody, routing: Routing, served: ServedModel, size: int) -> Asked:
            nonlocal kept_size
            if self._store.keeps and not conversation.has_begun:
                kept_size = await self._go_on(conversation, body)
            return await read_responses(body, routing, served, size + kept_size)

        def reply(body: ResponsesBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            model = routing.model or self._config.model_name
            form = self._chat_form.answer_to(without_items(body))
            keep = conversation.keep if conversation.has_begun else None
            return ResponsesReply(body, model=model, nonce=asks[0].nonce, made_at=made_at, form=form, keep=keep)

        return await self._answer(request, ResponsesBody, read, reply)

    async def _go_on(self, conversation: PendingResponse, body: ResponsesBody) -> int:
        """Puts what is before it into the body: how many bytes that has."""
        asked = (body.previous_response_id, body.input, body.kept_items)
        unknown = LOOP_BYTES + 1  # it may be long
        before, body.input, kept_size = await off_loop(unknown, LOOP_BYTES, conversation.begin, *asked)
        body.kept_items = await off_loop(len(before), LOOP_BYTES, msgspec.json.decode, before)
        return kept_size

    async def embed(self, request: Request) -> TokenResponse:
        def reply(body: EmbeddingBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            return VectorReply(partial(embeddings, body, routing.model or self._config.model_name))

        return await self._answer(request, EmbeddingBody, read_embeddings, reply, tasks=(Task.EMBEDDINGS,))

    async def rerank(self, request: Request) -> TokenResponse:
        def reply(body: RerankBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            write = partial(ranking, body, routing.model or self._config.model_name, self._limits.task)
            return VectorReply(write, shows_prompts=body.return_documents is not False)

        return await self._answer(request, RerankBody, read_rerank, reply, tasks=(Task.EMBEDDINGS, Task.SCORES))

    async def score(self, request: Request) -> TokenResponse:
        def reply(body: ScoreBody, routing: Routing, asks: Sequence[SampleRequest], made_at: int) -> Reply:
            return VectorReply(partial(scores, body, routing.model or self._config.model_name, self._limits.task))

        return await self._answer(request, ScoreBody, read_score, reply, tasks=(Task.EMBEDDINGS, Task.SCORES))

    async def count_tokens(self, request: Request) -> Response:
        raw = await read_body(request)
        routing, body = await decode_both(raw, Routing, MessagesBody)
        check_model(routing.model, self._config)
        count = await count_tokens(partial(chat_of, body), routing, self._served, len(raw))
        return json_response({"input_tokens": count})

    async def count_input(self, request: Request) -> Response:
        raw = await read_body(request)
        routing, body = await decode_both(raw, Routing, ResponsesBody)
        check_model(routing.model, self._config)
        size = len(raw)
        if self._store.keeps:
            size += await self._go_on(PendingResponse(self._store, owner_of(request)), body)
        count = await count_input(body, routing, self._served, size)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        read: Reader[Body],
        reply: Callable[[Body, Routing, Sequence[SampleRequest], int], Reply],
        *,
        checks_model: bool = True,
        tasks: tuple[Task, ...] = (Task.TOKENS,),
    ) -> TokenResponse:
        check_task(self._limits, *tasks)
        span = self._tracing.begin(f"POST {request.scope['path']}", request.headers, request.state.arrival_ns)
        with ending_with_errors(span):
            self._client.check_there()
            raw = await within(self._seconds_left(request), read_body(request), "the body did not come")
            transfer = await off_loop(len(raw), LOOP_BYTES, read_params, raw, self._limits)
            try:
                return await self._read_and_answer(
                    request, raw, transfer, kind, read, reply, span, checks_model=checks_model
                )
            except Refusal as refusal:
                await self._release(refusal.failure.message, request, raw, transfer, kind, read)
                raise

    async def _read_and_answer(
        self,
        request: Request,
        raw: bytes,
        transfer: KvTransferParams | None,
        kind: type[Body],
        read: Reader[Body],
        reply: Callable[[Body, Routing, Sequence[SampleRequest], int], Reply],
        span: Span,
        *,
        checks_model: bool,
    ) -> TokenResponse:
        seconds, size = self._seconds_left(request), len(raw)
        routing, body = await within(seconds, decode_both(raw, Routing, kind), "the body was not read")
        hands_over = is_handed_over(transfer, body, routing, self._limits)
        is_half = follow(transfer, body, routing, self._limits)
        routing.rendered_at = time_of(routing)
        routing.priority = priority_of(routing, request.headers.get("x-override-priority"))
        follow_gateway(routing, request.headers.get("x-data-parallel-rank"))
        if checks_model:
            check_model(routing.model, self._config)
        prompts, all_params = await within(
            self._seconds_left(request, routing),
            self._checked(read(body, routing, self._served, size), routing),
            "the prompt was not tokenized",
        )
        resume = await self._resumed(request, raw)
        if (failure := beyond(prompts, all_params, self._limits)) is not None:
            await self._decline(failure, request, routing, prompts, all_params, resume)
            raise Refusal.of(failure)
        if not is_half:
            why = "decode computes this prompt itself, for another min_tokens"
            await self._release(why, request, raw, transfer, kind, read)
        made_at = int(time.time()) if resume is None else resume.opening.made_at
        asks, resumed = await self._asks(request, routing, prompts, all_params, resume)
        prepared = await self._prepared(asks, request.state.arrival_ns)

        async def prompts_at(rendered_at: int) -> Sequence[Prompt]:
            there = structs.replace(routing, rendered_at=rendered_at)
            prompts, all_params = await read(body, there, self._served, size)
            raise_if(beyond(prompts, all_params, self._limits))
            return prompts

        model, answer = routing.model or self._config.model_name, None
        if hands_over:
            host, is_chat = request.scope["server"][0], isinstance(body, ChatBody)
            answer = prefill_answer(routing, asks, host, self._limits, model=model, is_chat=is_chat)
        may_differ = self._limits.role == "prefill" and any(ask.prompt.rendered_at for ask in asks)
        return TokenResponse(
            client=self._client,
            prepared=prepared,
            arrival_ns=request.state.arrival_ns,
            reply=await off_loop(size, LOOP_BYTES, reply, body, routing, asks, made_at),
            is_streamed=bool(routing.stream),
            is_prefill=self._limits.role == "prefill",
            renderer=Renderer(self._client, self._limits, prompts_at) if may_differ else None,
            endpoint=request.scope["path"],
            request_id=request.state.request_id,
            stats=self._stats,
            log=self._log,
            span=span,
            model=model,
            teller=self._teller(request, routing, prepared, made_at, resumed),
            hands_over=answer,
            said=() if resumed is None else resumed.pieces,
        )

    async def _release(
        self,
        why: str,
        request: Request,
        raw: bytes,
        transfer: KvTransferParams | None,
        kind: type[Body],
        read: Reader[Body],
    ) -> None:
        """Tell prefill that its half of this pair ends, and why. Where a router says `kv_transfer_params` prefill has
        answered before this server saw the body, and would wait for a decode that never comes.
        """
        if transfer is None or self._limits.role != "decode":
            return
        with suppress(Refusal):
            theirs = await off_loop(len(raw), LOOP_BYTES, as_prefill_was_asked, raw, transfer)
            routing, body = await decode_both(theirs, Routing, kind)
            routing.rendered_at = time_of(routing)
            follow(transfer, body, routing, self._limits)
            prompts, all_params = await self._checked(read(body, routing, self._served, len(raw)), routing)
            await self._decline(Failure(Cause.PEER_ABORTED, why), request, routing, prompts, all_params, None)

    async def _decline(
        self,
        failure: Failure,
        request: Request,
        routing: Routing,
        prompts: list[Prompt],
        all_params: list[GenerationParams],
        resume: Resume | None,
    ) -> None:
        """Another server may have taken the other half of what is too much for this one, and would wait for ours."""
        if routing.bootstrap_room is None:
            return
        with suppress(Refusal):  # what no server takes has no other half
            asks, _ = await self._asks(request, routing, prompts, all_params, resume)
            prepared = await self._prepared(asks, request.state.arrival_ns)
            self._client.decline(
                [
                    IncomingRequest(one.submit.request, routed=one.ask.dp_rank)
                    for one in prepared
                    if not one.ask.has_ended
                ],
                failure,
            )

    def _teller(
        self, request: Request, routing: Routing, prepared: Sequence[Prepared], made_at: int, resumed: Resumed | None
    ) -> Teller | None:
        """For a router that asks for it."""
        asks = [one.ask for one in prepared]
        is_cumulative = request.scope["path"] == "/generate"
        is_asked_for = ASKS in request.headers and bool(routing.stream)
        if not is_asked_for or not can_tell(asks, self._limits, is_cumulative=is_cumulative):
            return None
        if resumed is not None:
            return Teller(resumed.proofs, None, asks, self._serves)
        opening = Opening(asks[0].nonce, made_at, tuple(ask.pair.room or 0 for ask in asks))
        digests = [one.submit.request.prompt_digest for one in prepared]
        return Teller(Proofs(self._limits.keys.digests, opening, digests), opening, asks, self._serves)

    def _serves(self) -> bool:
        return self._client.is_any_active

    async def _resumed(self, request: Request, raw: bytes) -> Resume | None:
        """What of a stream was said elsewhere; only who asks to be told of one can have it."""
        if ASKS not in request.headers or self._limits.role == "unified":
            return None
        return (await off_loop(len(raw), LOOP_BYTES, decode_body, raw, Resuming)).tandem_resume

    async def _asks(
        self,
        request: Request,
        routing: Routing,
        prompts: list[Prompt],
        all_params: list[GenerationParams],
        resume: Resume | None,
    ) -> tuple[list[SampleRequest], Resumed | None]:
        asks = await off_loop(
            sum(params.n for params in all_params),
            LOOP_SAMPLES,
            ask_all,
            routing,
            prompts,
            all_params,
            self._limits,
            own_rid=uuid.uuid4().hex if resume is None else resume.opening.nonce,
            tenant=tenant_of(given_key(request.headers), routing.cache_salt, routing.extra_key),
            timeout_ns=self._timeout_ns(request, routing),
            seed_rooms=() if resume is None else resume.opening.rooms,
        )
        if resume is None:
            return asks, None
        size = len(resume.said) + sum(len(ask.prompt.tokens) for ask in asks)
        resumed = await off_loop(size, LOOP_IDS, goes_on, asks, resume, self._text, self._tokenizer, self._limits)
        return resumed.asks, resumed

    def _timeout_ns(self, request: Request, routing: Routing | None) -> int:
        """As the head says, and the body where it is there."""
        given = None if routing is None else routing.timeout
        return check_timeout(given, request.headers.get("x-request-timeout-ms"), self._config.request_timeout)

    def _seconds_left(self, request: Request, routing: Routing | None = None) -> float:
        left: float = (request.state.arrival_ns + self._timeout_ns(request, routing) - time.monotonic_ns()) / SECOND
        return left

    async def _checked(self, reading: Awaitable[Found], routing: Routing) -> Found:
        """With the host of the other half. Raises `Refusal`."""
        found = await reading
        if self._limits.role != "unified":  # which ignores the fields of a pair
            await self._hosts.check(routing.bootstrap_host)
        return found

    async def _prepared(self, asks: Sequence[SampleRequest], arrival_ns: int) -> list[Prepared]:
        requests = [(ask, self._client.next_request_id()) for ask in asks]
        size = sum(len(ask.prompt.tokens) + ask.num_said for ask in asks) + len(asks) * (LOOP_IDS // LOOP_SAMPLES)
        return await off_loop(size, LOOP_IDS, self._prepare, requests, arrival_ns)

    def _prepare(self, requests: Sequence[tuple[SampleRequest, RequestId]], arrival_ns: int) -> list[Prepared]:
        """In any thread."""
        return [
            Prepared(ask, submission(ask, number, arrival_ns, self._limits), self._text(ask))
            for ask, number in requests
        ]

    def _text(self, ask: SampleRequest) -> TextStream:
        eos = frozenset() if ask.sampling.ignore_eos else self._limits.eos_token_ids
        return TextStream(
            detokenizer(self._tokenizer, skip_special_tokens=ask.params.skip_special_tokens, prompt=ask.prompt.tokens),
            stops=ask.params.stop,
            stop_tokens=eos | frozenset(ask.sampling.stop_token_ids),
            keeps_stop=ask.params.keeps_stop,
            min_tokens=ask.sampling.min_tokens,
            thinking=ask.params.thinking,
        )

    def _shape(
        self,
        body: ChatBody | CompletionBody,
        routing: Routing,
        asks: Sequence[SampleRequest],
        prefix: str,
        made_at: int,
    ) -> Shape:
        name = routing.rid if isinstance(routing.rid, str) else None
        model = routing.model or self._config.model_name
        return Shape.of(body, id=name or prefix + asks[0].rid, model=model, n=len(asks), made_at=made_at)


# errors that are raised outside of the endpoints


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return not_served(error, request.method, request.scope["path"], request.state.request_id)
