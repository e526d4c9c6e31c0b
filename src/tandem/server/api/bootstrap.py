"""The bootstrap server of a prefill: decode servers ask it who is there; the prefill's DP ranks register with it.

    GET  /route[?prefill_dp_rank=N]   a rank's `ReplicaInfo`, the first one's without N; 503 until all are there, 404
    PUT  /route                       a rank registers with its `ReplicaInfo`: all its shards in one call
    POST /register_dp_rank            {"bootstrap_room", "dp_rank"}: where a request was dispatched
    POST /query_dp_ranks              {"bootstrap_rooms": [...]}: {"<room>": rank} for those that are known, and in
                                      headers what this prefill is, and how old: who asks may mean a former life
    GET  /challenge                   what the next write has to prove the secret for
    GET  /health                      200 once all ranks are there

What is decided is decided by `core.bootstrap_registry`; the prefill's own process registers with the same object,
without HTTP. PUT and `register_dp_rank` are writes: who makes them is known before their body is read (`cluster_auth`).
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tandem.core.bootstrap_registry import BootstrapRegistry, Rejected
from tandem.core.values import SECOND, ZERO_NS, Nanos, Room
from tandem.server.api.body_store import BodyStore
from tandem.server.api.bootstrap_questions import MAX_ROOMS_PER_QUERY, registration
from tandem.server.api.bounds import LOOP_BYTES
from tandem.server.api.cluster_auth import CHALLENGE_HEADER, CHALLENGE_PATH, WriteGuard, has_hash
from tandem.server.api.endpoint_parts import error_response, not_served, on_disconnect, request_id_of
from tandem.server.api.errors import Problem, Refusal, invalid
from tandem.server.api.off_loop import off_loop
from tandem.server.api.sample_requests import check_room
from tandem.server.documents import AGE_HEADER, PREFILL_HEADER, BadDocument, one_line, read_document, read_replica

REFUSAL_LOG_NS = 10 * SECOND  # between two log lines about refused writes
RANK = re.compile(r"-1|[0-9]{1,9}")

RoomText = Annotated[str, Meta(max_length=19)]
AnyRoom = int | RoomText
AnyBody = TypeVar("AnyBody")

logger = logging.getLogger("tandem.bootstrap")


class RoomOfRank(Struct):
    """`POST /register_dp_rank`."""

    bootstrap_room: AnyRoom
    dp_rank: int


class RoomsQuery(Struct):
    """`POST /query_dp_ranks`."""

    bootstrap_rooms: list[AnyRoom]


def monotonic_now() -> Nanos:
    return Nanos(time.monotonic_ns())


@dataclass(slots=True)
class BootstrapServer:
    """The endpoints around one registry."""

    registry: BootstrapRegistry
    guard: WriteGuard
    now: Callable[[], Nanos] = field(default=monotonic_now)
    bodies: BodyStore = field(default_factory=BodyStore)
    _num_refused: int = 0  # writes with a wrong proof, since the last line about them
    _logs_again_at: Nanos = ZERO_NS
    _began_at: Nanos = field(init=False)

    def __post_init__(self) -> None:
        self._began_at = self.now()

    def app(self) -> Starlette:
        routes = [
            Route("/route", self.route, methods=["GET", "PUT"]),
            Route("/register_dp_rank", self.register_dp_rank, methods=["POST"]),
            Route("/query_dp_ranks", self.query_dp_ranks, methods=["POST"]),
            Route(CHALLENGE_PATH, self.challenge, methods=["GET"]),
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
        raw = await self._written(request)
        try:
            replica = await off_loop(len(raw), LOOP_BYTES, read_replica, raw)
        except BadDocument as bad:
            raise refused(bad) from None
        return self._answer(self.registry.register(registration(replica)), f"rank {replica.dp_rank} by PUT /route")

    async def register_dp_rank(self, request: Request) -> Response:
        body = await decoded(await self._written(request), RoomOfRank)
        return self._answer(self.registry.announce(room_of(body.bootstrap_room), body.dp_rank, self.now()))

    async def query_dp_ranks(self, request: Request) -> Response:
        body = await decoded(await self.bodies.read(request), RoomsQuery)
        if len(body.bootstrap_rooms) > MAX_ROOMS_PER_QUERY:
            raise invalid("bootstrap_rooms", f"at most {MAX_ROOMS_PER_QUERY} at a time")
        found = self.registry.ranks_of(map(room_of, body.bootstrap_rooms), self.now())
        document = {str(room): rank for room, rank in found.items()}
        prefill, age = self.registry.prefill, str(self.now() - self._began_at)
        headers = None if prefill is None else {PREFILL_HEADER: msgspec.json.encode(prefill).decode(), AGE_HEADER: age}
        return Response(msgspec.json.encode(document), media_type="application/json", headers=headers)

    async def challenge(self, request: Request) -> Response:
        return PlainTextResponse(self.guard.challenge(), headers={"cache-control": "no-store"})

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("OK") if self.registry.is_ready else Response(status_code=503)

    async def _written(self, request: Request) -> bytes:
        """The body of a write. Raises Refusal for one that nobody may make."""
        refusal = self.guard.refusal(request.headers, method=request.method, target=target_of(request))
        if refusal is None:
            body = await self.bodies.read(request)
            if has_hash(body, request.headers):
                return body
            refusal = "the body is not the one that was signed"
        if CHALLENGE_HEADER in request.headers:  # else it only asks for one
            self._note_refused(request, refusal)
        raise Unsigned(refusal, self.guard.challenge())

    def _note_refused(self, request: Request, refusal: str) -> None:
        """One line now and then, however many writes are tried."""
        self._num_refused += 1
        now = self.now()
        if now < self._logs_again_at:
            return
        client = request.client.host if request.client is not None else "a unix socket"
        what = one_line(f"{request.method} {target_of(request)} from {client}: {refusal}")
        logger.warning("%d writes were refused; the last: %s", self._num_refused, what)
        self._num_refused, self._logs_again_at = 0, Nanos(now + REFUSAL_LOG_NS)

    def _answer(self, outcome: Rejected | None, news: str = "") -> Response:
        if outcome is not None:
            raise invalid(outcome.param, one_line(outcome.reason))
        if news:
            logger.info("registered: %s", news)
        return PlainTextResponse("OK")


class Unsigned(Refusal):
    """A 401 with a challenge for the next attempt."""

    def __init__(self, reason: str, challenge: str) -> None:
        super().__init__(Problem.UNSIGNED, reason)
        self.challenge = challenge


def target_of(request: Request) -> str:
    """As it stands in the request line: `Request.url` is also made of the Host header, which anybody may write."""
    query: bytes = request.scope["query_string"]
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return (raw.partition(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1")


async def decoded(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """Raises Refusal."""
    try:
        return await off_loop(len(raw), LOOP_BYTES, read_document, raw, kind)
    except BadDocument as bad:
        raise refused(bad) from None


def refused(bad: BadDocument) -> Refusal:
    return Refusal(Problem.INVALID_VALUE if bad.is_json else Problem.INVALID_JSON, str(bad), param=bad.field)


def rank_of(text: str) -> int | None:
    """None for -1: whichever."""
    if RANK.fullmatch(text) is None:
        raise invalid("prefill_dp_rank", f"{text[:40]!r} is no rank; -1 is the first one")
    return None if text == "-1" else int(text)


def room_of(value: int | str) -> Room:
    room = check_room(value)
    assert room is not None
    return room


# errors


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    response = error_response(error.failure, request_id_of(Headers(scope=request.scope)))
    if isinstance(error, Unsigned):
        response.headers[CHALLENGE_HEADER] = error.challenge
    return response


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_id = request_id_of(Headers(scope=request.scope))
    return not_served(error, request.method, one_line(request.scope["path"]), request_id)
