"""The bootstrap server of a prefill: decode servers ask it who is there; the prefill's DP ranks register with it.

    GET  /route[?prefill_dp_rank=N]   a rank's `ReplicaInfo`, the first one's without N; 503 until all are there, 404
    PUT  /route                       a rank registers with its `ReplicaInfo`: all its shards in one call
    POST /register_dp_rank            {"bootstrap_room", "dp_rank"}: where a request was dispatched
    POST /query_dp_ranks              {"bootstrap_rooms": [...]}: {"<room>": rank} for those that are known
    GET  /health                      200 once all ranks are there

What is decided is decided by `core.fleet.bootstrap_registry`; the prefill's own process registers with the same object,
without HTTP. PUT and `register_dp_rank` are writes (`cluster_auth`).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tandem.core.fleet.bootstrap_registry import Registration, Registry, Rejected
from tandem.core.values import Nanos, Room
from tandem.server import wire
from tandem.server.api.ask import check_room
from tandem.server.api.body import decode_body
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.errors import Failure, Problem, Refusal, invalid
from tandem.server.api.gate import error_response, request_id_of

MAX_BODY_BYTES = 1 << 20
MAX_ROOMS_PER_QUERY = 4096

logger = logging.getLogger("tandem.bootstrap")


class RoomOfRank(Struct):
    """`POST /register_dp_rank`."""

    bootstrap_room: int | str
    dp_rank: int


class RoomsQuery(Struct):
    """`POST /query_dp_ranks`."""

    bootstrap_rooms: list[int | str]


def registration(replica: wire.ReplicaInfo) -> Registration:
    return Registration(
        who=replica.incarnation,
        dp_rank=replica.dp_rank,
        prefill=replica.prefill,
        layout_fields=replica.layout_fields,
        document=msgspec.json.encode(replica),
    )


def monotonic_now() -> Nanos:
    return Nanos(time.monotonic_ns())


@dataclass(slots=True)
class BootstrapServer:
    """The endpoints around one registry."""

    registry: Registry
    guard: WriteGuard
    now: Callable[[], Nanos] = field(default=monotonic_now)

    def app(self) -> Starlette:
        routes = [
            Route("/route", self.route, methods=["GET", "PUT"]),
            Route("/register_dp_rank", self.register_dp_rank, methods=["POST"]),
            Route("/query_dp_ranks", self.query_dp_ranks, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        handlers = {Refusal: on_refusal, HTTPException: on_http_error, ClientDisconnect: on_disconnect}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # narrower than Exception
        app.router.redirect_slashes = False
        return app

    async def route(self, request: Request) -> Response:
        return await self.put_route(request) if request.method == "PUT" else self.get_route(request)

    def get_route(self, request: Request) -> Response:
        rank = rank_of(request.query_params.get("prefill_dp_rank", "-1"))
        if not self.registry.is_ready:
            raise Refusal(Problem.NOT_READY, "not all ranks of this prefill have registered")
        found = self.registry.find(rank)
        if found is None:
            raise Refusal(Problem.NOT_FOUND, f"there is no rank {rank} of {self.registry.dp_size}")
        return Response(found.document, media_type="application/json")

    async def put_route(self, request: Request) -> Response:
        replica = decode_body(await self._written(request), wire.ReplicaInfo)
        if replica.role != "prefill":
            raise invalid("role", f"{replica.role!r} registers with nobody; prefill servers do")
        return self._answer(self.registry.register(registration(replica)), f"rank {replica.dp_rank} by PUT /route")

    async def register_dp_rank(self, request: Request) -> Response:
        body = decode_body(await self._written(request), RoomOfRank)
        return self._answer(self.registry.announce(room_of(body.bootstrap_room), body.dp_rank, self.now()))

    async def query_dp_ranks(self, request: Request) -> Response:
        body = decode_body(await whole_body(request), RoomsQuery)
        if len(body.bootstrap_rooms) > MAX_ROOMS_PER_QUERY:
            raise invalid("bootstrap_rooms", f"at most {MAX_ROOMS_PER_QUERY} at a time")
        found = self.registry.ranks_of(map(room_of, body.bootstrap_rooms), self.now())
        document = {str(room): rank for room, rank in found.items()}
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("OK") if self.registry.is_ready else Response(status_code=503)

    async def _written(self, request: Request) -> bytes:
        """The body of a write. Raises Refusal for one that nobody may make."""
        body = await whole_body(request)
        target = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        refusal = self.guard.refusal(request.headers, method=request.method, target=target, body=body)
        if refusal is not None:
            client = request.client.host if request.client is not None else "a unix socket"
            logger.warning("%s %s from %s refused: %s", request.method, target, client, refusal)
            raise Refusal(Problem.UNSIGNED, refusal)
        return body

    def _answer(self, outcome: object, news: str = "") -> Response:
        if isinstance(outcome, Rejected):
            raise invalid(outcome.param, outcome.reason)
        if news:
            logger.info("registered: %s", news)
        return PlainTextResponse("OK")


def rank_of(text: str) -> int | None:
    """None for -1: whichever."""
    try:
        rank = int(text)
    except ValueError:
        raise invalid("prefill_dp_rank", f"{text[:40]!r} is not an integer") from None
    if rank < -1:
        raise invalid("prefill_dp_rank", "is a rank, or -1 for the first one")
    return None if rank == -1 else rank


def room_of(value: int | str) -> Room:
    room = check_room(value)
    assert room is not None
    return room


async def whole_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refusal(Problem.BODY_TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return body


# errors


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error.failure, request_id_of(Headers(scope=request.scope)))


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_id = request_id_of(Headers(scope=request.scope))
    path = request.scope["path"]
    if error.status_code == 405:
        failure = Failure(Problem.METHOD_NOT_ALLOWED, f"{path} has no method {request.method}")
        response = error_response(failure, request_id)
        response.headers.update(error.headers or {})
        return response
    return error_response(Failure(Problem.NOT_FOUND, f"there is no {path}"), request_id)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
