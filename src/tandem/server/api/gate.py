"""What every HTTP request passes first: a request id, the clock of its arrival, and the keys.

Health, readiness and metrics are open, because probes and scrapers have no keys. Operators' endpoints need the admin
key where one is set. Debug endpoints answer only to the server's own machine.
"""

import hmac
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.config import ServerConfig
from tandem.server.api.body import MAX_BODY_BYTES
from tandem.server.api.errors import Failure, Problem, Refusal, error_headers, error_json
from tandem.server.api.hosts import is_loopback

OPEN_PATHS = ("/health", "/ready", "/metrics")
ADMIN_PATHS = ("/flush_cache", "/abort_request", "/debug/")
MAX_REQUEST_ID_CHARS = 256


class Gate:
    """ASGI middleware, outermost but for the server's own error handling."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig) -> None:
        self._app = app
        self._key = config.api_key
        self._admin_key = config.admin_api_key or config.api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrival_ns"] = time.monotonic_ns()
        tag = (b"x-request-id", request_id.encode())

        async def send_tagged(message: Message) -> None:
            if message["type"] == "http.response.start" and tag not in message["headers"]:
                message["headers"] = [*message["headers"], tag]
            await send(message)

        failure = self._refusal(scope, headers)
        if failure is None:
            await self._app(scope, receive, send_tagged)
        else:
            await error_response(failure, request_id)(scope, receive, send_tagged)

    def _refusal(self, scope: Scope, headers: Headers) -> Failure | None:
        path: str = scope["path"]
        if scope["method"] == "OPTIONS" or path.startswith(OPEN_PATHS):
            return None
        is_admin = path.startswith(ADMIN_PATHS)
        accepted = [self._admin_key] if is_admin else [self._key, self._admin_key]
        is_guarded = accepted[0] is not None
        if is_guarded and not holds_key(headers, accepted):
            return Failure(Problem.UNAUTHORIZED, "the key is missing or wrong")
        if path.startswith("/debug/") and not is_local(scope):
            return Failure(Problem.FORBIDDEN, "debug endpoints answer on the server's own machine only")
        return None


def holds_key(headers: Headers, accepted: list[str | None]) -> bool:
    """Compared in constant time, so that the answer's delay tells nothing about the key."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    given_bytes = given.strip().encode()
    matches = [hmac.compare_digest(given_bytes, key.encode()) for key in accepted if key is not None]
    return any(matches)


def is_local(scope: Scope) -> bool:
    client = scope.get("client")
    return client is None or is_loopback(client[0])  # None: a unix socket


def request_id_of(headers: Headers) -> str:
    """The client's id if it is fit to be repeated in headers and logs, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def error_response(failure: Failure, request_id: str) -> Response:
    return Response(error_json(failure, request_id), status_code=failure.status, headers=error_headers(failure))


async def read_body(request: Request) -> bytes:
    """The whole body, within bounds."""
    too_large = Refusal(Problem.BODY_TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)
