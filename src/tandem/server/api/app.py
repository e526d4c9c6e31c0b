"""The HTTP application of one server: its routes, and the dialects in which it is asked for tokens, vectors and scores.

What becomes of such a request: `generation_request.py`.
"""

from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.config import ServerConfig
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
)
from tandem.server.api.bounds import LOOP_BYTES
from tandem.server.api.chat_form import ChatForm
from tandem.server.api.client import NodeClient
from tandem.server.api.cors import cors
from tandem.server.api.debug_page import DebugPage
from tandem.server.api.edge import Edge
from tandem.server.api.endpoint_parts import error_response, not_served, on_disconnect, read_body
from tandem.server.api.errors import EDGE_STAGE, Failure, Problem, Refusal
from tandem.server.api.faults import FaultsPage
from tandem.server.api.generate import GenerateReply, read_native
from tandem.server.api.generation_request import Answered, GenerationRequest
from tandem.server.api.http_counting import CountingMiddleware
from tandem.server.api.large_body import decode_both
from tandem.server.api.limits import Task
from tandem.server.api.messages import MessagesBody, MessagesReply, chat_of, read_messages
from tandem.server.api.model_facts import ModelFacts, limits_of
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openai import count_tokens, read_chat, read_completion
from tandem.server.api.openai_reply import ChatReply, CompletionReply, Shape
from tandem.server.api.ops import Ops, check_model, json_response
from tandem.server.api.response_store import PendingResponse, ResponsePages, ResponseStore, owner_of
from tandem.server.api.responses import ResponsesBody, count_input, read_responses, without_items
from tandem.server.api.responses_reply import ResponsesReply
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Reply, TokenResponse
from tandem.server.api.tokenization import TokenizationPage
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.validation import Asked
from tandem.server.api.vectors import (
    VectorReply,
    embeddings,
    ranking,
    read_embeddings,
    read_rerank,
    read_score,
    scores,
)
from tandem.server.tracing import NO_TRACING, Tracing


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
    log = log or RequestLog(config.log_format)
    generation = Endpoints(Edge(config, client, served, AllowedHosts.of(config), stats, log, tracing))
    ops = Ops(config=config, client=client, model=model, served=served, exporter=exporter)
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

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._served = edge.served
        self._config = config = edge.config
        self._store = ResponseStore(
            max_responses=config.max_stored_responses if config.role == "unified" else 0,
            max_bytes=config.stored_responses_max_bytes,
        )

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
        def reply(it: Answered[ChatBody]) -> Reply:
            return ChatReply(shape_of(it, "chatcmpl-"), self._served.tokenizer, self._served.form.answer_to(it.body))

        return await GenerationRequest(self._edge, request, ChatBody, read_chat, reply).answer()

    async def complete(self, request: Request) -> TokenResponse:
        def reply(it: Answered[CompletionBody]) -> Reply:
            return CompletionReply(shape_of(it, "cmpl-"), self._served.tokenizer, echo=bool(it.body.echo))

        return await GenerationRequest(self._edge, request, CompletionBody, read_completion, reply).answer()

    async def generate(self, request: Request) -> TokenResponse:
        def reply(it: Answered[NativeBody]) -> Reply:
            body = it.body
            is_single = isinstance(body.text, str) or (body.input_ids and isinstance(body.input_ids[0], int))
            return GenerateReply(
                self._served.tokenizer,
                is_list=not is_single or len(it.asks) > 1,
                shows_text=bool(body.return_text_in_logprobs),
                shows_tops=bool(body.top_logprobs_num),
                shows_asked=bool(body.token_ids_logprob),
                shows_input=self._served.limits.role != "prefill",
            )

        return await GenerationRequest(self._edge, request, NativeBody, read_native, reply, checks_model=False).answer()

    async def messages(self, request: Request) -> TokenResponse:
        def reply(it: Answered[MessagesBody]) -> Reply:
            form = self._served.form.answer_to(chat_of(it.body))
            return MessagesReply(id=it.name("msg_"), model=it.model, form=form)

        return await GenerationRequest(self._edge, request, MessagesBody, read_messages, reply).answer()

    async def responses(self, request: Request) -> TokenResponse:
        conversation = PendingResponse(self._store, owner_of(request))
        kept_size = 0

        async def read(body: ResponsesBody, routing: Routing, served: ServedModel, size: int) -> Asked:
            nonlocal kept_size
            if self._store.keeps and not conversation.has_begun:
                kept_size = await self._go_on(conversation, body)
            return await read_responses(body, routing, served, size + kept_size)

        def reply(it: Answered[ResponsesBody]) -> Reply:
            form, nonce = self._served.form.answer_to(without_items(it.body)), it.asks[0].nonce
            keep = conversation.keep if conversation.has_begun else None
            return ResponsesReply(it.body, model=it.model, nonce=nonce, made_at=it.made_at, form=form, keep=keep)

        return await GenerationRequest(self._edge, request, ResponsesBody, read, reply).answer()

    async def _go_on(self, conversation: PendingResponse, body: ResponsesBody) -> int:
        """Puts what is before it into the body: how many bytes that has."""
        asked = (body.previous_response_id, body.input, body.kept_items)
        unknown = LOOP_BYTES + 1  # it may be long
        before, body.input, kept_size = await off_loop(unknown, LOOP_BYTES, conversation.begin, *asked)
        body.kept_items = await off_loop(len(before), LOOP_BYTES, msgspec.json.decode, before)
        return kept_size

    async def embed(self, request: Request) -> TokenResponse:
        def reply(it: Answered[EmbeddingBody]) -> Reply:
            return VectorReply(partial(embeddings, it.body, it.model))

        return await GenerationRequest(
            self._edge, request, EmbeddingBody, read_embeddings, reply, tasks=(Task.EMBEDDINGS,)
        ).answer()

    async def rerank(self, request: Request) -> TokenResponse:
        def reply(it: Answered[RerankBody]) -> Reply:
            write = partial(ranking, it.body, it.model, self._served.limits.task)
            return VectorReply(write, shows_prompts=it.body.return_documents is not False)

        return await GenerationRequest(
            self._edge, request, RerankBody, read_rerank, reply, tasks=(Task.EMBEDDINGS, Task.SCORES)
        ).answer()

    async def score(self, request: Request) -> TokenResponse:
        def reply(it: Answered[ScoreBody]) -> Reply:
            return VectorReply(partial(scores, it.body, it.model, self._served.limits.task))

        return await GenerationRequest(
            self._edge, request, ScoreBody, read_score, reply, tasks=(Task.EMBEDDINGS, Task.SCORES)
        ).answer()

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


def shape_of(it: Answered[ChatBody] | Answered[CompletionBody], prefix: str) -> Shape:
    return Shape.of(it.body, id=it.name(prefix), model=it.model, n=len(it.asks), made_at=it.made_at)


# errors that are raised outside of the endpoints


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return not_served(error, request.method, request.scope["path"], request.state.request_id)
