"""What every endpoint needs of a request and for its refusal: its id, its body within bounds, the error document."""

import asyncio
import codecs
import uuid
from collections.abc import Awaitable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.values import Cause
from tandem.logtext import shown
from tandem.server.api.bounds import MAX_BODY_BYTES
from tandem.server.api.errors import EDGE_STAGE, Failure, Problem, Refusal, error_headers, error_json

MAX_REQUEST_ID_CHARS = 256
CLIENT_LEFT = 499  # as proxies have it
CODING = "content-encoding"
Found = TypeVar("Found")


def request_id_of(headers: Headers) -> str:
    """The client's id if it is fit to be repeated in headers and logs, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def error_response(failure: Failure, request_id: str) -> Response:
    return Response(error_json(failure, request_id), status_code=failure.status, headers=error_headers(failure))


def not_served(failed: HTTPException, method: str, path: str, request_id: str) -> Response:
    """Of a path or a method that the routes do not have."""
    if failed.status_code == 405:
        response = error_response(Failure(Problem.METHOD_NOT_ALLOWED, f"{path} has no method {method}"), request_id)
        response.headers.update(failed.headers or {})
        return response
    return error_response(Failure(Problem.NOT_FOUND, f"there is no {path}"), request_id)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Of an endpoint whose client has left: nobody reads it."""
    return Response(status_code=CLIENT_LEFT)


async def read_body(request: Request) -> bytes:
    """The whole body, within bounds, as it came: nothing is unpacked, for nobody knows how much that would be.

    But for a byte order mark, which JSON has none of (RFC 8259) and readers may pass over: FastAPI's do.
    """
    coding = request.headers.get(CODING, "").strip().lower()
    if coding not in ("", "identity"):
        raise Refusal(Problem.UNSUPPORTED, f"{CODING}: a body in {shown(coding)} is not read here", param=CODING)
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
    return b"".join(chunks).removeprefix(codecs.BOM_UTF8)


async def within(seconds: float, work: Awaitable[Found], what: str, *, stage: str = EDGE_STAGE) -> Found:
    """Raises `Refusal` when the deadline passes meanwhile; `what` says what was not done by then."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        message = f"the deadline passed: {what}"
        waited = max(0.0, seconds)
        raise Refusal(Cause.DEADLINE_EXCEEDED, message, stage=stage, waited_seconds=waited) from None
