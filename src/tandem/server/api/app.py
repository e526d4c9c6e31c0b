"""The HTTP application of one server.

A generation request's way: `read_body` - `decode_body` - the dialect's `read_*` (prompts and parameters) - `ask_all`
(rooms, seeds, deadlines) - `submission` - `TokenResponse`, which has the node run it (`NodeClient.running`).
Everything before that may refuse, and has reserved nothing.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import Struct, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.config import ServerConfig
from tandem.core.values import SECOND, Cause
from tandem.metrics.export import Exporter
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestStats
from tandem.server.api.access import AccessRules, AuthMiddleware
from tandem.server.api.body import (
    ChatBody,
    CompletionBody,
    NativeBody,
    Routing,
    decode_body,
)
from tandem.server.api.client import NodeClient
from tandem.server.api.detokenizer import detokenizer
from tandem.server.api.errors import EDGE_STAGE, Failure, Problem, Refusal
from tandem.server.api.facts import ModelFacts, limits_of
from tandem.server.api.faults import FaultsPage
from tandem.server.api.gate import error_response, read_body
from tandem.server.api.generate import GenerateReply, read_native
from tandem.server.api.hosts import Hosts
from tandem.server.api.openai import ChatReply, CompletionReply, Shape, read_chat, read_completion
from tandem.server.api.ops import Ops, check_model
from tandem.server.api.rendering import Renderer
from tandem.server.api.stream import Prepared, Reply, TokenResponse
from tandem.server.api.tenant import bearer_token, tenant_of
from tandem.server.api.text import TextStream
from tandem.server.api.tokenization import TokenizationPage
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.validation import (
    GenerationParams,
    ModelLimits,
    Prompt,
    SampleRequest,
    ask_all,
    check_timeout,
    submission,
    time_of,
)

logger = logging.getLogger("tandem.server")
Body = TypeVar("Body", bound=Struct)
Reader = Callable[[Body, Routing, Tokenizer, ModelLimits], Awaitable[tuple[list[Prompt], list[GenerationParams]]]]


def build_app(
    config: ServerConfig,
    client: NodeClient,
    model: ModelFacts,
    tokenizer: Tokenizer,
    *,
    log: RequestLog | None = None,
    digest_secret: bytes | None = None,
) -> Starlette:
    """The application. It may serve before the node is ready: then it answers 503 to all that needs the node."""
    limits = limits_of(config, model, digest_secret=digest_secret)
    stats = RequestStats()
    exporter = Exporter(stats, model_name=config.model_name, engine_type=config.role)
    generation = Endpoints(
        config=config,
        client=client,
        limits=limits,
        tokenizer=tokenizer,
        stats=stats,
        log=log or RequestLog(config.log_format),
    )
    ops = Ops(config=config, client=client, model=model, limits=limits, tokenizer=tokenizer, exporter=exporter)
    tokenization = TokenizationPage(tokenizer, limits)
    counted_paths = frozenset(route.path for route in (*generation.routes(), *tokenization.routes()))

    async def on_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        if request.scope["path"] in counted_paths:
            stats.refuse(error.failure.code.value)
        return error_response(error.failure, request.state.request_id)

    app = Starlette(
        routes=[*generation.routes(), *tokenization.routes(), *ops.routes(), *FaultsPage(config, client).routes()],
        middleware=[Middleware(AuthMiddleware, rules=AccessRules.of(config), stage=EDGE_STAGE)],
        exception_handlers={
            Refusal: on_refusal,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


class Endpoints:
    """Generation."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        client: NodeClient,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        stats: RequestStats,
        log: RequestLog,
    ) -> None:
        self._config = config
        self._client = client
        self._limits = limits
        self._tokenizer = tokenizer
        self._stats = stats
        self._log = log
        self._hosts = Hosts.of(config)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> TokenResponse:
        def reply(body: ChatBody, routing: Routing, asks: Sequence[SampleRequest]) -> Reply:
            return ChatReply(self._shape(body, routing, asks, "chatcmpl-"), self._tokenizer)

        return await self._answer(request, ChatBody, read_chat, reply)

    async def complete(self, request: Request) -> TokenResponse:
        def reply(body: CompletionBody, routing: Routing, asks: Sequence[SampleRequest]) -> Reply:
            return CompletionReply(self._shape(body, routing, asks, "cmpl-"), self._tokenizer, echo=bool(body.echo))

        return await self._answer(request, CompletionBody, read_completion, reply)

    async def generate(self, request: Request) -> TokenResponse:
        def reply(body: NativeBody, routing: Routing, asks: Sequence[SampleRequest]) -> Reply:
            is_single = isinstance(body.text, str) or (body.input_ids and isinstance(body.input_ids[0], int))
            return GenerateReply(
                self._tokenizer,
                is_list=not is_single or len(asks) > 1,
                shows_text=bool(body.return_text_in_logprobs),
                shows_tops=bool(body.top_logprobs_num),
            )

        return await self._answer(request, NativeBody, read_native, reply, checks_model=False)

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        read: Reader[Body],
        reply: Callable[[Body, Routing, Sequence[SampleRequest]], Reply],
        *,
        checks_model: bool = True,
    ) -> TokenResponse:
        self._client.check_there()
        raw = await read_body(request)
        routing, body = decode_body(raw, Routing), decode_body(raw, kind)
        routing.rendered_at = time_of(routing)
        if checks_model:
            check_model(routing.model, self._config)
        timeout_ms = request.headers.get("x-request-timeout-ms")
        timeout_ns = check_timeout(routing.timeout, timeout_ms, self._config.request_timeout)
        try:
            async with asyncio.timeout((request.state.arrival_ns + timeout_ns - time.monotonic_ns()) / SECOND):
                prompts, all_params = await read(body, routing, self._tokenizer, self._limits)
                if self._limits.role != "unified":  # which ignores the fields of a pair
                    await self._hosts.check(routing.bootstrap_host)
        except TimeoutError:
            raise Refusal(Cause.DEADLINE_EXCEEDED, "the deadline passed while the prompt was tokenized") from None
        tenant = tenant_of(bearer_token(request.headers), routing.cache_salt)
        asks = ask_all(
            routing, prompts, all_params, self._limits, own_rid=uuid.uuid4().hex, tenant=tenant, timeout_ns=timeout_ns
        )

        async def prompts_at(rendered_at: int) -> Sequence[Prompt]:
            there = structs.replace(routing, rendered_at=rendered_at)
            return (await read(body, there, self._tokenizer, self._limits))[0]

        may_differ = self._limits.role == "prefill" and any(ask.prompt.rendered_at for ask in asks)
        return TokenResponse(
            client=self._client,
            prepared=[self._prepared(ask, request.state.arrival_ns) for ask in asks],
            arrival_ns=request.state.arrival_ns,
            reply=reply(body, routing, asks),
            is_streamed=bool(routing.stream),
            sends_head_first=self._limits.role == "prefill",
            renderer=Renderer(self._client, self._limits, prompts_at) if may_differ else None,
            endpoint=request.scope["path"],
            request_id=request.state.request_id,
            stats=self._stats,
            log=self._log,
        )

    def _prepared(self, ask: SampleRequest, arrival_ns: int) -> Prepared:
        submit = submission(ask, self._client.next_request_id(), arrival_ns, self._limits)
        return Prepared(ask, submit, self._text(ask))

    def _text(self, ask: SampleRequest) -> TextStream:
        eos = frozenset() if ask.sampling.ignore_eos else self._limits.eos_token_ids
        return TextStream(
            detokenizer(self._tokenizer, skip_special_tokens=ask.params.skip_special_tokens, prompt=ask.prompt.tokens),
            stops=ask.params.stop,
            stop_tokens=eos | frozenset(ask.sampling.stop_token_ids),
            keeps_stop=ask.params.keeps_stop,
            min_tokens=ask.sampling.min_tokens,
        )

    def _shape(
        self, body: ChatBody | CompletionBody, routing: Routing, asks: Sequence[SampleRequest], prefix: str
    ) -> Shape:
        name = routing.rid if isinstance(routing.rid, str) else None
        return Shape.of(
            body, id=name or prefix + asks[0].rid, model=routing.model or self._config.model_name, n=len(asks)
        )


# errors that are raised outside of the endpoints


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 405:
        response = error_response(
            Failure(Problem.METHOD_NOT_ALLOWED, f"{path} has no method {request.method}"), request.state.request_id
        )
        response.headers.update(error.headers or {})
        return response
    return error_response(Failure(Problem.NOT_FOUND, f"there is no {path}"), request.state.request_id)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def on_bug(request: Request, error: Exception) -> Response:
    return error_response(Failure(Problem.INTERNAL, "the server made a mistake"), request.state.request_id)
