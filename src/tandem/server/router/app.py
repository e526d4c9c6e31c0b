"""The router's HTTP face: generation through a prefill and a decode, the rest proxied, fanned out or answered here.

    through a pair      /v1/chat/completions /v1/completions /v1/messages /v1/responses /generate
    to one decode       /v1/models(/ID) /model_info /tokenize /detokenize /v1/messages/count_tokens
                        /v1/responses/input_tokens /openapi.json
    to all live ones    /flush_cache /health_generate /server_info /v1/loads /get_load /debug/pd/data, and
                        /abort_request, also to those that drain or are to leave
    answered here       / /docs /debug/pd /health /ready /ping /load /metrics /version /v1/responses/ID /workers(/ID)
    refused here        /v1/embeddings /v1/rerank /v1/score

Some have a second name, which is in `_routes`; with --enable-igw /v1/models is put together from what all say. Error
bodies are those of `errors.py`; who may ask for what is in `access.py`, what is passed on in `forward.py`.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from operator import itemgetter
from typing import Any  # what a coroutine is sent and gives back while it runs

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import tandem
from tandem.core.router.router import Router
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import Role
from tandem.core.values import Nanos
from tandem.logtext import shown
from tandem.metrics.export import CONTENT_TYPE
from tandem.server.api.accept import LISTEN_BACKLOG, BoundedServer
from tandem.server.api.access import AccessRules, AuthMiddleware
from tandem.server.api.body import DETOKENIZE_PATHS, TOKENIZE_PATHS, VECTOR_PATHS, AbortBody
from tandem.server.api.bounds import LOOP_BYTES
from tandem.server.api.browser_page import ROLE_HEADER, about, docs_response
from tandem.server.api.connections import api_bounds, raise_fd_limit
from tandem.server.api.cors import cors
from tandem.server.api.debug_page import show_page
from tandem.server.api.endpoint_parts import error_response, on_disconnect, read_body
from tandem.server.api.errors import Failure, Problem, Refusal
from tandem.server.api.large_body import decode_anywhere
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openapi import behind_router
from tandem.server.api.response_store import PendingResponse, ResponsePages, ResponseStore, owner_of
from tandem.server.exposure import takes_ipv4
from tandem.server.fault_records import folder_of
from tandem.server.http_pool import PooledTransport
from tandem.server.router.answer import passed_headers
from tandem.server.router.config import RouterConfig
from tandem.server.router.forward import (
    ABORT_REQUEST,
    CONTROL_HEADERS,
    COUNT_INPUT,
    COUNT_TOKENS,
    DEBUG_DATA,
    DETOKENIZE,
    FLUSH_CACHE,
    GET_LOAD,
    HEALTH_GENERATE,
    LOADS,
    MODEL_INFO,
    MODELS,
    ONE_MODEL,
    OPENAPI,
    SERVER_INFO,
    TOKENIZE,
    WorkerRoute,
    sent_headers,
)
from tandem.server.router.generate import GENERATION_PATHS, Generate, model_of, read_object
from tandem.server.router.last_steps import RouterLastSteps
from tandem.server.router.metrics import RouterMetrics
from tandem.server.router.prober import Prober
from tandem.server.router.prompt_blocks import PromptBlocks, no_blocks
from tandem.server.router.record import Draws
from tandem.server.router.shell import RouterShell
from tandem.server.router.worker_documents import (
    STAGE,
    Aborted,
    Document,
    Info,
    LoadList,
    LoadsDocument,
    ModelDocuments,
    ModelList,
    Named,
    OpenApi,
    document_of,
    internal_states,
    passed_on,
    read_document,
    sum_of_loads,
)
from tandem.server.router.worker_pages import WorkerPages
from tandem.server.tracing import NO_TRACING, Tracing, make_tracing

CONNECT_SECONDS = 5.0  # to a worker
FIRST_LOOK_SECONDS = 4.0  # longer than the timeout of a probe
PROBE_SECONDS = 2.5  # less than the core waits: what comes later would be taken for the answer to the next probe
CONTROL_SECONDS = 10.0  # for a worker's answer to anything that is not generation, and between two pieces of it
WHOLE_CONTROL_SECONDS = 60.0  # for all of it

log = logging.getLogger("tandem.router")


class RouterApp:
    """`app` is the ASGI application; its lifespan starts and stops everything."""

    def __init__(
        self, config: RouterConfig, metrics: RouterMetrics | None = None, tracing: Tracing = NO_TRACING
    ) -> None:
        self._config = config
        self._tracing = tracing
        self._metrics = metrics or RouterMetrics()
        self._client = make_client()
        draws = Draws(lambda: secrets.randbits(64))
        self.router = Router(
            config.workers,
            draw=draws,
            settings=config.settings(),
            now=Nanos(time.monotonic_ns()),
        )
        key = next(iter((config.api_key or "").splitlines()), "")
        prober = Prober(make_client, timeout_s=PROBE_SECONDS, asks_models=config.enable_igw, key=key)
        self._last_steps = RouterLastSteps(
            self.router, draws, folder_of(config.fault_records), settings=config.settings()
        )
        self._store = ResponseStore(config.max_stored_responses, config.stored_responses_max_bytes)
        self._shell = RouterShell(
            self.router,
            self._client,
            prober,
            self._metrics,
            stall_seconds=config.stall_timeout,
            step=self._last_steps.step,
            failed=self._last_steps.write,
        )
        self.app = Starlette(
            routes=self._routes(),
            lifespan=self._lifespan,
            middleware=[
                *cors(config),
                Middleware(AuthMiddleware, rules=AccessRules.of(config), stage=STAGE),
            ],
            exception_handlers={
                Refusal: refused,
                HTTPException: not_served,
                ClientDisconnect: on_disconnect,
                Exception: self._our_bug,
            },
        )
        self.app.router.redirect_slashes = False  # as on the workers

    def _routes(self) -> list[Route]:
        generate = Generate(
            self._shell,
            self._metrics,
            self._store,
            timeout_seconds=self._config.request_timeout,
            blocks_of=PromptBlocks(secrets.token_bytes(32)) if self._config.is_cache_aware else no_blocks,
            tracing=self._tracing,
        )
        return [
            *(Route(path, generate, methods=["POST"]) for path in GENERATION_PATHS),
            *(Route(path, self._refuse_vectors, methods=["POST"]) for path in VECTOR_PATHS),
            Route("/v1/responses/input_tokens", self._count_input, methods=["POST"]),
            *ResponsePages(self._store).routes(),
            Route("/", self._about),
            Route("/docs", self._docs),
            Route("/debug/pd", show_page),
            Route("/debug/pd/data", self._debug_data),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/ping", self._ready, methods=["GET", "POST"]),
            Route("/load", self._server_load),
            Route("/version", self._version),
            Route("/metrics", self._export),
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._one_model),
            *WorkerPages(self.router, self._shell).routes(),
            Route("/openapi.json", self._openapi),
            *(self._proxied(path, MODEL_INFO) for path in ("/model_info", "/get_model_info")),
            *(self._proxied(path, TOKENIZE) for path in TOKENIZE_PATHS),
            *(self._proxied(path, DETOKENIZE) for path in DETOKENIZE_PATHS),
            self._proxied("/v1/messages/count_tokens", COUNT_TOKENS),
            *(Route(path, self._server_info) for path in ("/server_info", "/get_server_info")),
            Route("/v1/loads", self._loads),
            Route("/get_load", self._get_load),
            Route("/health_generate", self._health_generate),
            Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),
            Route("/abort_request", self._abort_request, methods=["POST"]),
        ]

    async def _our_bug(self, request: Request, error: Exception) -> Response:
        self._last_steps.write(f"request {request.state.request_id} has met an error of ours")
        failure = Failure(Problem.INTERNAL, f"{type(error).__name__} in the router", None, STAGE)
        return error_response(failure, request.state.request_id)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._shell.start()
        await self._first_look()
        yield
        await self._shell.close()
        await self._client.aclose()

    async def _first_look(self) -> None:
        """Nobody is answered before the workers are known: who has connected to a router that starts anew waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                while not self.router.registry.has_asked_all:
                    await asyncio.sleep(FIRST_LOOK_SECONDS / 100)

    # --- answered here --------------------------------------------------------------------------------------------

    async def _about(self, request: Request) -> Response:
        """Which models is what a decode says; none while no decode can be asked."""
        live = self.router.registry.live(Role.DECODE)[:1]
        answers = [(worker, await self._ask(worker, request, MODELS)) for worker in live]
        documents = [await document_of(answer, ModelList) for _, answer in answers]
        models = [card.id for document in documents if document is not None for card in document.data]
        return JSONResponse(about(request.app.routes, role="router", models=models))

    async def _docs(self, request: Request) -> Response:
        return docs_response("router")

    async def _health(self, request: Request) -> Response:
        return Response(headers={ROLE_HEADER: "router"})

    async def _ready(self, request: Request) -> Response:
        self._require_pair()
        return Response()

    async def _server_load(self, request: Request) -> Response:
        """Of all decodes, as far as they have it from here."""
        decodes = (worker for worker in self.router.registry.workers() if worker.role is Role.DECODE)
        return JSONResponse({"server_load": sum(self.router.load(worker.id) for worker in decodes)})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": tandem.__version__})

    async def _export(self, request: Request) -> Response:
        return Response(self._metrics.export(self.router), headers={"content-type": CONTENT_TYPE})

    async def _refuse_vectors(self, request: Request) -> Response:
        detail = "a router has pairs, and vectors and scores need no decode server: ask a unified one for them"
        raise Refusal(Problem.WRONG_TASK, detail, stage=STAGE)

    # --- one worker -----------------------------------------------------------------------------------------------

    def _proxied(self, path: str, page: WorkerRoute) -> Route:
        async def answer(request: Request) -> Response:
            return await self._to_decode(request, page)

        return Route(path, answer, methods=[page.method])

    async def _to_decode(self, request: Request, page: WorkerRoute) -> Response:
        return await self._send_to_decode(request, page, await read_body(request))

    async def _count_input(self, request: Request) -> Response:
        """With the items that are before it, which are kept here."""
        raw = await read_body(request)
        conversation = PendingResponse(self._store, owner_of(request)) if self._store.keeps else None
        unknown = LOOP_BYTES + 1  # they may be long
        _, content = await off_loop(unknown, LOOP_BYTES, read_object, raw, conversation)
        return await self._send_to_decode(request, COUNT_INPUT, content)

    async def _send_to_decode(self, request: Request, page: WorkerRoute, body: bytes) -> Response:
        """To the first one that serves the model in question."""
        live = self.router.registry.live(Role.DECODE, await self._model_in_question(request, page, body))
        if not live:
            raise Refusal(Problem.NO_LIVE_PAIR, "no live decode worker", stage=STAGE)
        answer = await self._ask(live[0], request, page, body)
        if isinstance(answer, str):
            raise Refusal(Problem.CONNECTION_LOST, f"{live[0].url}: {answer}", stage=STAGE)
        return Response(answer.content, answer.status_code, passed_headers(answer.headers))

    async def _model_in_question(self, request: Request, page: WorkerRoute, body: bytes) -> str | None:
        """Of the path, or of the body, where it can be read: another one is the worker's to refuse."""
        if not self._config.enable_igw:
            return None
        registry = self.router.registry
        if page is ONE_MODEL:
            return model_of(registry, page.path, {"model": request.path_params["id"]})
        named = await off_loop(len(body), LOOP_BYTES, read_document, body, Named)
        return None if named is None else model_of(registry, page.path, {"model": named.model})

    async def _models(self, request: Request) -> Response:
        """Of all that a live pair serves; each as the first decode says it."""
        if not self._config.enable_igw:
            return await self._to_decode(request, MODELS)
        paired, told = self.router.registry.paired_models(), dict[str, dict[str, Any]]()
        for worker, document in await self._documents(request, MODELS, ModelDocuments):
            if worker.role is Role.DECODE:
                for model in document.data:
                    told.setdefault(str(model.get("id")), model)
        data = [told[name] for name in paired if name in told]
        return passed_on({"object": "list", "data": data, "has_more": False})

    async def _one_model(self, request: Request) -> Response:
        """All of them where it has no name, as on the workers."""
        return await (self._to_decode(request, ONE_MODEL) if request.path_params["id"] else self._models(request))

    async def _ask(
        self, worker: RegisteredWorker, request: Request, page: WorkerRoute, body: bytes = b""
    ) -> httpx.Response | str:
        """The worker's answer, or why there is none."""
        url = worker.url + page.target(request.path_params)
        headers = sent_headers(request.headers, CONTROL_HEADERS, request_id=request.state.request_id)
        sent = httpx.Headers(headers, encoding="latin-1")  # as they were read
        call = self._client.request(page.method, url, content=body, headers=sent, timeout=CONTROL_SECONDS)
        try:
            async with asyncio.timeout(WHOLE_CONTROL_SECONDS):
                return await (while_there(request, call) if page.method == "GET" else call)  # an order is seen through
        except (httpx.HTTPError, TimeoutError) as error:
            return f"{type(error).__name__} {error}".strip()

    async def _openapi(self, request: Request) -> Response:
        """What a decode offers, but for its debug pages: they answer there only."""
        answer = await self._to_decode(request, OPENAPI)
        if answer.status_code != 200:
            return answer
        raw = bytes(answer.body)
        document = await off_loop(len(raw), LOOP_BYTES, read_document, raw, Info)
        offered = await off_loop(len(raw), LOOP_BYTES, read_document, raw, OpenApi)
        if document is None or offered is None:
            raise Refusal(Problem.CONNECTION_LOST, "the decode worker describes no API", stage=STAGE)
        routed = await off_loop(len(raw), LOOP_BYTES, behind_router, document)
        return await off_loop(len(raw), LOOP_BYTES, passed_on, routed)

    # --- all workers ----------------------------------------------------------------------------------------------

    async def _ask_all(
        self, request: Request, page: WorkerRoute
    ) -> list[tuple[RegisteredWorker, httpx.Response | str]]:
        """The live ones, prefills first."""
        body = await read_body(request)
        workers = [*self.router.registry.live(Role.PREFILL), *self.router.registry.live(Role.DECODE)]
        return await self._send_to(workers, request, page, body)

    async def _send_to(
        self, workers: Sequence[RegisteredWorker], request: Request, page: WorkerRoute, body: bytes
    ) -> list[tuple[RegisteredWorker, httpx.Response | str]]:
        answers = await asyncio.gather(*(self._ask(worker, request, page, body) for worker in workers))
        return list(zip(workers, answers, strict=True))

    async def _documents(
        self, request: Request, page: WorkerRoute, kind: type[Document]
    ) -> list[tuple[RegisteredWorker, Document]]:
        """Of all live workers that give one of this shape."""
        answers = await self._ask_all(request, page)
        documents = [(worker, await document_of(answer, kind)) for worker, answer in answers]
        return [(worker, document) for worker, document in documents if document is not None]

    async def _server_info(self, request: Request) -> Response:
        """Lists of the workers' own documents, as SGLang's load balancer gives them, and who is alive."""
        documents = await self._documents(request, SERVER_INFO, Info)
        prefills, decodes = (
            [info for worker, info in documents if worker.role is role] for role in (Role.PREFILL, Role.DECODE)
        )
        shared = ("served_model_name", "model_path", "tokenizer_path")
        return passed_on(
            {
                **{name: decodes[0][name] for name in shared if decodes and name in decodes[0]},
                "version": tandem.__version__,
                "disaggregation_mode": "null",
                "prefill": prefills,
                "decode": decodes,
                "internal_states": [state for info in decodes for state in internal_states(info)],
                "workers": [self._describe(worker) for worker in self.router.registry.workers()],
            }
        )

    async def _debug_data(self, request: Request) -> Response:
        """Of all live workers on this machine: others refuse to tell."""
        documents = await self._documents(request, DEBUG_DATA, Info)
        return passed_on({"role": "router", "servers": [document for _, document in documents]})

    def _describe(self, worker: RegisteredWorker) -> dict[str, object]:
        return {
            "url": worker.url,
            "role": worker.role.value,
            "bootstrap_port": worker.bootstrap_port,
            "health": self.router.registry.health(worker.id),
            "active_prompts": self.router.load(worker.id),
            "circuit_breaker": "off" if (breaker := self.router.registry.breaker(worker.id)) is None else breaker.state,
        }

    async def _loads(self, request: Request) -> Response:
        form, rank = request.query_params.get("format", "json"), request.query_params.get("dp_rank")
        if form != "json":
            detail = f"format: {shown(form)} is not the router's; /metrics of each worker tells Prometheus its loads"
            raise Refusal(Problem.INVALID_VALUE, detail, param="format", stage=STAGE)
        documents = await self._documents(request, LOADS, LoadsDocument)
        loads = [
            {"url": worker.url, "role": worker.role.value, **load}
            for worker, document in documents
            for load in document.loads
            if rank is None or str(load.get("dp_rank")) == rank
        ]
        if rank is not None and not loads:
            detail = f"dp_rank: no worker that answers has a rank {shown(rank)}"
            raise Refusal(Problem.INVALID_VALUE, detail, param="dp_rank", stage=STAGE)
        return passed_on(
            {
                "timestamp": time.time(),
                "version": tandem.__version__,
                "dp_rank_count": len(loads),
                "loads": loads,
                "aggregate": sum_of_loads(loads),
            }
        )

    async def _get_load(self, request: Request) -> Response:
        documents = await self._documents(request, GET_LOAD, LoadList)
        return passed_on([load for _, document in documents for load in document])

    async def _health_generate(self, request: Request) -> Response:
        self._require_pair()
        self._require_all_good(await self._ask_all(request, HEALTH_GENERATE))
        return Response()

    async def _flush_cache(self, request: Request) -> Response:
        answers = await self._ask_all(request, FLUSH_CACHE)
        self._require_all_good(answers)
        return PlainTextResponse(f"Cache flushed on {len(answers)} workers.\n")

    async def _abort_request(self, request: Request) -> Response:
        """Both halves of a request know it, one of them perhaps no more: the larger count is the answer.

        Asked are those too that get no more requests, as they are to leave or drain: they have some.
        """
        body = await read_body(request)
        await self._keep_from_retrying(body)
        answers = await self._send_to(self.router.registry.answering(), request, ABORT_REQUEST, body)
        given = [answer for _, answer in answers if isinstance(answer, httpx.Response)]
        if not given:
            raise Refusal(Problem.NO_LIVE_PAIR, "no worker answers", stage=STAGE)
        counts = [await num_aborted(answer) for answer in given]
        _, _, best = max(zip((answer.is_success for answer in given), counts, given, strict=True), key=itemgetter(0, 1))
        return Response(best.content, best.status_code, passed_headers(best.headers))

    async def _keep_from_retrying(self, body: bytes) -> None:
        """What is aborted here must not come up at another pair. What names nothing is the workers' to refuse."""
        try:
            asked = await decode_anywhere(body, AbortBody)
        except Refusal:
            return
        if asked.abort_all or asked.rid is not None:
            self._shell.abort(None if asked.abort_all else asked.rid)

    def _require_pair(self) -> None:
        if not self.router.has_live_pair():
            raise Refusal(Problem.NO_LIVE_PAIR, "there must be a live prefill and a live decode", stage=STAGE)

    def _require_all_good(self, answers: list[tuple[RegisteredWorker, httpx.Response | str]]) -> None:
        bad = [
            f"{worker.url}: {answer if isinstance(answer, str) else answer.status_code}"
            for worker, answer in answers
            if isinstance(answer, str) or not answer.is_success
        ]
        if not answers:
            raise Refusal(Problem.NO_LIVE_PAIR, "no live worker", stage=STAGE)
        if bad:
            is_keyless = any(isinstance(answer, httpx.Response) and answer.status_code == 401 for _, answer in answers)
            raise Refusal(Problem.UNAUTHORIZED if is_keyless else Problem.NOT_READY, "; ".join(bad), stage=STAGE)


def make_client() -> httpx.AsyncClient:
    """One client for all workers, with no timeout but the core's."""
    return httpx.AsyncClient(
        transport=PooledTransport(),  # no proxy of the environment: these are one's own workers
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is kept: they would be of all clients
        headers={"accept-encoding": "identity", "user-agent": f"tandem-router/{tandem.__version__}"},
    )


async def num_aborted(answer: httpx.Response) -> int:
    document = await document_of(answer, Aborted)
    return 0 if document is None else document.aborted


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error.failure, request.state.request_id)


async def not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = Problem.METHOD_NOT_ALLOWED if error.status_code == 405 else Problem.NOT_FOUND
    failure = Failure(code, f"{request.method} {request.scope['path']}: {error.detail}", None, STAGE)
    response = error_response(failure, request.state.request_id)
    response.headers.update(error.headers or {})
    return response


def listen(config: RouterConfig) -> socket.socket:
    """Raises OSError when the address is taken, or what was inherited is no socket."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    if config.fd is not None:
        listener = socket.socket(fileno=config.fd)
    else:
        listener = socket.create_server(
            (config.host, config.port),
            family=family,
            backlog=LISTEN_BACKLOG,
            dualstack_ipv6=takes_ipv4(config.host),
        )
    # Accepted sockets inherit it; asyncio sets it only on sockets that were made with IPPROTO_TCP, which this was not.
    # Without it each small write of a stream waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve_router(config: RouterConfig, listener: socket.socket) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then no new connection, and running requests get `drain_timeout`."""
    raise_fd_limit()
    metrics = RouterMetrics()
    bounds = api_bounds(
        refused=metrics.see_refused_at_door,
        max_requests=config.max_active_requests,
        write_s=config.stall_timeout,
        fds_each=3,  # the client's connection, and those to both halves
    )
    drain_seconds = max(1, round(config.drain_timeout))
    tracing = make_tracing(
        is_enabled=config.enable_trace,
        endpoint=config.otlp_traces_endpoint,
        service="tandem-router",
        attributes={"tandem.role": "router"},
        note=log.warning,
    )
    app = RouterApp(config, metrics, tracing).app
    server = BoundedServer(app, bounds, drain_seconds=drain_seconds, lifespan="on")

    def end(*_: object) -> None:
        """For a signal before uvicorn listens to any. It raises one again after the drain; that changes nothing."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    try:
        server.run(sockets=[listener])
    finally:
        tracing.close()


async def while_there(request: Request, call: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """What nobody waits for any more does not keep a router from ending. Raises ClientDisconnect."""
    answer, leaving = asyncio.ensure_future(call), asyncio.ensure_future(has_disconnected(request))
    try:
        await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def has_disconnected(request: Request) -> None:
    """Returns when it has. To be asked when the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
