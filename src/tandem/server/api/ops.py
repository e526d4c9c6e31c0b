"""Endpoints for operators, gateways and probes: health, model info, load, metrics, flush, abort, debug."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any  # JSON documents

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem import __version__
from tandem.config import ServerConfig, public_settings
from tandem.core.commands import FailRequest
from tandem.core.dp_dispatch import method_for
from tandem.core.settings import LoadBalanceMethod, Role
from tandem.core.values import SECOND
from tandem.logtext import shown
from tandem.metrics.export import CONTENT_TYPE, Exporter
from tandem.sampling import SamplingParams, VectorParams
from tandem.server import wire
from tandem.server.api.body import AbortBody
from tandem.server.api.browser_page import BOOTSTRAP_PORT_HEADER, ROLE_HEADER, about, docs_response
from tandem.server.api.client import NodeClient
from tandem.server.api.endpoint_parts import error_response, read_body
from tandem.server.api.errors import Failure, Problem, Refusal, failure_of, invalid
from tandem.server.api.large_body import decode_anywhere
from tandem.server.api.limits import Task
from tandem.server.api.live_requests import LOADING, LiveRank
from tandem.server.api.model_facts import ModelFacts
from tandem.server.api.openapi import openapi_document
from tandem.server.api.probe import SharedProbe
from tandem.server.api.sample_requests import PeerParams, SampleRequest, submission
from tandem.server.api.served_model import ServedModel
from tandem.server.api.tenant import tenant_of
from tandem.server.api.validation import GenerationParams, Prompt

HEALTH_NS = 20 * SECOND
PROBE_NS = SECOND  # between the starts of two probes of the engine
FRESH_NS = 10 * SECOND  # so long a success speaks for the path that it took
WORKER_SECONDS = 1.0  # for what a worker counts; it answers at once or is stuck
Numbers = dict[str, float]  # what one node counts
DIALECT = "sglang"  # as model cards say it: gateways read there how to pair a prefill with a decode


def json_response(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


class Ops:
    """One instance per application; the methods are its endpoints."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        client: NodeClient,
        model: ModelFacts,
        served: ServedModel,
        exporter: Exporter,
    ) -> None:
        self._config = config
        self._client = client
        self._model = model
        self._served = served
        self._limits = served.limits
        self._exporter = exporter
        self._created = int(time.time())
        self._probe = SharedProbe(self._generate_one, interval_ns=PROBE_NS)

    def routes(self) -> list[Route]:
        return [
            Route("/", self.about, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/health_generate", self.health_generate, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.one_model, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/get_server_info", self.server_info, methods=["GET"]),
            Route("/model_info", self.model_info, methods=["GET"]),
            Route("/get_model_info", self.model_info, methods=["GET"]),
            Route("/v1/loads", self.loads, methods=["GET"]),
            Route("/get_load", self.load_list, methods=["GET"]),
            Route("/load", self.server_load, methods=["GET"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/abort_request", self.abort_request, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/debug/waits", self.waits, methods=["GET"]),
            Route("/debug/state", self.state, methods=["GET"]),
        ]

    # probes

    async def health(self, request: Request) -> Response:
        """200 while new requests are accepted and make progress. Costs nothing: the watchdog knows already."""
        self._client.check_healthy()
        is_prefill = self._limits.role == Role.PREFILL
        port = {BOOTSTRAP_PORT_HEADER: str(self._limits.bootstrap_port)} if is_prefill else {}
        return Response(headers={ROLE_HEADER: self._limits.role, **port})

    async def health_generate(self, request: Request) -> Response:
        """One token through node and engine, unless a user's request has just got there and back.

        Whoever asks meanwhile, or within `PROBE_NS`, gets the same answer: probes cost the engine a bounded share.
        Where a prompt needs a peer to be answered, only the node is asked.
        """
        self._client.check_healthy()
        success = self._client.last_success()
        if success is not None and success[1] < FRESH_NS:
            return json_response({"checked": "request", "path": success[0], "age_seconds": success[1] / SECOND})
        if self._limits.role == "prefill" or self._config.strict_remote:
            await self._client.query("state")
            return json_response({"checked": "node"})
        found = await self._probe.answer()
        if isinstance(found, Failure):
            return error_response(found, request.state.request_id)
        return json_response({"checked": "engine", "seconds": found})

    async def _generate_one(self) -> float | Failure:
        """Seconds until the token, or the vector, was there, or why it never came."""
        started_ns = time.monotonic_ns()
        ask = probe(self._served)
        submit = submission(ask, self._client.next_request_id(), started_ns, self._limits)
        with self._client.running([submit], [ask.names], is_canary=True) as generation:
            live = generation.lives[0]
            while live.ended is None:
                await generation.changed()
        if isinstance(live.ended, FailRequest):
            return failure_of(live.ended)
        return (time.monotonic_ns() - started_ns) / SECOND

    # model info

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._config.model_names]
        return json_response({"object": "list", "data": cards, "has_more": False})

    async def one_model(self, request: Request) -> Response:
        from_path = request.path_params["id"]
        if not from_path:  # who joins a base and a path may leave a slash behind it
            return await self.models(request)
        check_model(from_path, self._config)
        named = from_path if from_path in self._config.model_names else self._config.model_name
        return json_response(self._card(named))

    def _card(self, name: str) -> dict[str, Any]:
        """As OpenAI's clients read it, and Anthropic's: `type`, `display_name`, `created_at`."""
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "created": self._created,
            "owned_by": DIALECT,
            "root": self._model.model_path,
            "parent": None,
            "max_model_len": self._model.context_length,
        }

    async def server_info(self, request: Request) -> Response:
        """Settings without keys, and what gateways read at registration."""
        numbers, workers = await asyncio.gather(self.numbers(), self._worker_numbers())
        throughput = self._exporter.gen_throughput() if self._limits.dp_size == 1 else None
        return json_response(
            public_settings(self._config)
            | {
                "model_path": self._model.model_path,
                "tokenizer_path": self._model.model_path,
                "served_model_name": self._config.model_name,
                "architectures": self._model.architectures,
                "model_type": self._model.model_type,
                "context_length": self._model.context_length,
                "dtype": self._model.dtype,
                "load_balance_method": self._method(),
                "disaggregation_bootstrap_port": self._limits.bootstrap_port,
                "max_total_num_tokens": self._num_pages() * self._model.page_size,
                "version": __version__,
                "status": "ready" if self._client.is_healthy else "not_ready",
                "dp_ranks": [health_of(dp_rank, one.state) for dp_rank, one in enumerate(self._client.ranks)],
                "internal_states": [internal_state(one, throughput) for one in numbers.values()],
                "kv_connections": connections(workers),
            }
        )

    async def model_info(self, request: Request) -> Response:
        return json_response(
            {
                "model_path": self._model.model_path,
                "tokenizer_path": self._model.model_path,
                "is_generation": self._limits.task is Task.TOKENS,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "architectures": self._model.architectures,
                "model_type": self._model.model_type,
                "context_length": self._model.context_length,
                "vocab_size": self._model.vocab_size,
                "has_chat_template": "default" in self._served.tokenizer.templates,
            }
        )

    async def about(self, request: Request) -> Response:
        return json_response(about(request.app.routes, role=self._limits.role, models=self._config.model_names))

    async def docs(self, request: Request) -> Response:
        return docs_response(self._limits.role, self._limits.dp_size, self._limits.task)

    async def openapi(self, request: Request) -> Response:
        limits = self._limits
        return json_response(
            openapi_document(
                limits.role,
                limits.dp_size,
                limits.task,
                limits.vocab_size,
                needs_room=limits.role == "decode" and limits.is_strict_remote,
                has_priorities=limits.unsaid_priority is not None,
            )
        )

    def _num_pages(self) -> int:
        """Until a node is ready nobody knows."""
        return 0 if self._client.node is None else self._client.node.num_pages

    # load

    async def numbers(self) -> dict[int, Numbers]:
        """The nodes' own numbers by DP rank; none of one that cannot be asked, so that a scrape never fails with it."""
        answers = await self._client.query_all("metrics")
        return {dp_rank: msgspec.json.decode(answer, type=Numbers) for dp_rank, answer in answers.items()}

    async def _worker_numbers(self) -> list[wire.WorkerNumbers]:
        """What the workers count. None of a rank whose workers do not all answer, rather than made-up ones."""
        answers = await self._client.query_all("worker", timeout=WORKER_SECONDS)
        return [one for body in answers.values() for one in msgspec.json.decode(body, type=list[wire.WorkerNumbers])]

    async def metrics(self, request: Request) -> Response:
        numbers, workers = await asyncio.gather(self.numbers(), self._worker_numbers())
        by_rank = {(one.tp_rank, one.pp_rank, one.dp_rank): one.numbers for one in workers}
        page = self._exporter.render(numbers, by_rank)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def loads(self, request: Request) -> Response:
        form = request.query_params.get("format", "json")
        if form not in ("json", "prometheus"):
            raise invalid("format", f"{shown(form)} is neither json nor prometheus")
        loads = await self._loads()
        wanted = request.query_params.get("dp_rank")
        if wanted is not None:
            loads = [load for load in loads if str(load["dp_rank"]) == wanted]
            if not loads:
                raise self._no_load_of(wanted)
        if form == "prometheus":
            return await self.metrics(request)
        return json_response(
            {
                "timestamp": time.time(),
                "version": __version__,
                "dp_rank_count": len(self._client.ranks),
                "loads": loads,
                "aggregate": aggregate(loads),
            }
        )

    async def load_list(self, request: Request) -> Response:
        return json_response(
            [
                {
                    "dp_rank": load["dp_rank"],
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
                for load in await self._loads()
            ]
        )

    async def server_load(self, request: Request) -> Response:
        """As vLLM says it."""
        return json_response({"server_load": sum(load["num_total_reqs"] for load in await self._loads())})

    async def _loads(self) -> list[Numbers]:
        """Of every rank that answers. Raises `Refusal` when none does: a made-up zero would draw traffic here."""
        self._client.check_there()
        found = [load_of(dp_rank, numbers) for dp_rank, numbers in (await self.numbers()).items()]
        if not found:
            raise Refusal(Problem.NODE_SILENT, "the node did not answer")
        return found

    def _no_load_of(self, wanted: str) -> Refusal:
        """Why none of the loads is that of this DP rank."""
        ranks = self._client.ranks
        known = next((rank for rank in ranks if str(rank.dp_rank) == wanted), None)
        if known is None:
            return invalid("dp_rank", f"there is no rank {wanted}: this server has {len(ranks)}")
        if known.node is None:
            return Refusal(Problem.NOT_READY, known.state.loss or LOADING)
        return Refusal(Problem.NODE_SILENT, "the node did not answer")

    def _method(self) -> str:
        """As gateways and other servers read it."""
        if self._limits.dp_size == 1:
            return LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM
        return method_for(LoadBalanceMethod(self._config.load_balance_method), self._config.role)

    # orders

    async def flush_cache(self, request: Request) -> Response:
        """Of every rank that is there. One that keeps silent is named: its cache may be as it was."""
        self._client.check_there()
        asked = [rank.dp_rank for rank in self._client.there]
        answers = await self._client.query_all("flush")
        silent = ", ".join(str(dp_rank) for dp_rank in asked if dp_rank not in answers)
        if silent:
            raise Refusal(Problem.NODE_SILENT, f"DP rank {silent} did not answer, and may not have flushed its cache")
        return Response("Cache flushed.\n", media_type="text/plain")

    async def abort_request(self, request: Request) -> Response:
        """Exact rid only; the answer says how many requests were told to end."""
        body = await decode_anywhere(await read_body(request) or b"{}", AbortBody)
        if body.abort_all:
            return json_response({"aborted": self._client.abort_all()})
        if not body.rid:
            raise invalid("rid", "is missing; to end every request send abort_all: true")
        return json_response({"aborted": self._client.abort_named(body.rid)})

    async def waits(self, request: Request) -> Response:
        return await self._documents("waits")

    async def state(self, request: Request) -> Response:
        return await self._documents("state")

    async def _documents(self, what: str) -> Response:
        """What the only node says, or a list of what the nodes of all DP ranks say."""
        if self._limits.dp_size == 1:
            return Response(await self._client.query(what), media_type="application/json")
        self._client.check_there()
        answers = await self._client.query_all(what)
        return Response(b"[" + b",".join(answers.values()) + b"]", media_type="application/json")


def connections(workers: Sequence[wire.WorkerNumbers]) -> dict[str, int]:
    """To workers of peers, by how pages travel; nothing where no peers are."""
    found: Counter[str] = Counter()
    for one in workers:
        found.update(one.connections)
    return dict(found)


def health_of(dp_rank: int, rank: LiveRank) -> dict[str, Any]:
    """One that is not well takes no requests; the server is well as long as another one is."""
    if rank.is_active:
        return {"dp_rank": dp_rank, "status": "ready"}
    return {"dp_rank": dp_rank, "status": "not_ready", "reason": rank.loss or rank.trouble or LOADING}


def internal_state(numbers: Numbers, gen_throughput: float | None) -> Numbers:
    """Of one DP rank, under the names that gateways read. None: the edge counts for several."""
    return numbers | ({} if gen_throughput is None else {"last_gen_throughput": gen_throughput})


def load_of(dp_rank: int, numbers: Numbers) -> Numbers:
    """Counts are integers, since gateways parse them as such."""
    running = int(numbers.get("num_running_reqs", 0))
    waiting = int(
        numbers.get("num_prefill_bootstrap_queue_reqs", 0)
        - numbers.get("tandem:num_prefill_early_reqs", 0)  # they run
        + max(numbers.get("num_queue_reqs", 0), numbers.get("num_decode_prealloc_queue_reqs", 0))  # they overlap
        + numbers.get("num_decode_transfer_queue_reqs", 0)
    )
    return {
        "dp_rank": dp_rank,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": int(numbers.get("num_used_tokens", 0)),
        "max_total_num_tokens": int(numbers.get("max_total_num_tokens", 0)),
        "token_usage": numbers.get("token_usage", 0),
    }


def aggregate(loads: list[Numbers]) -> Numbers:
    """Sums over ranks; of a share the mean."""
    names = [name for name in loads[0] if name != "dp_rank"]
    total: Numbers = {name: sum(load[name] for load in loads) for name in names}
    return total | {"token_usage": total["token_usage"] / len(loads)}


def check_model(name: str | None, config: ServerConfig) -> None:
    """Raises `Refusal` for a model that is not served here; no name means the one there is."""
    if name and name not in (*config.model_names, config.model):
        served = ", ".join(map(repr, config.model_names))
        detail = f"the model {name!r} is not served here; it serves {served}"
        raise Refusal(Problem.MODEL_NOT_FOUND, detail, param="model")


def probe(served: ServedModel) -> SampleRequest:
    """A prompt of one token that wants one token, or its vector."""
    sampling = SamplingParams(temperature=0.0)
    limits = served.limits
    prompt = Prompt(served.tokenizer.encode("1", add_special_tokens=False)[:1] or [0])
    rid = f"health-{uuid.uuid4().hex}"
    vector = None if limits.task is Task.TOKENS else VectorParams()
    params = GenerationParams(sampling, None, 1, 1, (), False, True, vector)
    pair, tenant, priority = PeerParams(), tenant_of("", None), limits.unsaid_priority or 0  # nobody gives way to it
    return SampleRequest(0, 0, prompt, params, sampling, 1, rid, (rid,), pair, tenant, HEALTH_NS, priority=priority)
