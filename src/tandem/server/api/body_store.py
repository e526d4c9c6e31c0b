"""Bodies of requests to a bootstrap server while they come in, of all its connections together: bounded in size, number
and time. Whoever reaches the port may send one, so the bounds are narrower than those of the API (`bounds.py`).

Where they make too much together, the largest of those that have not come whole is refused, not the last one: who sends
a few hundred bytes is not turned away by those who send megabytes slowly.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from tandem.server.api.errors import Problem, Refusal

MAX_BOOTSTRAP_BODY_BYTES = 1 << 20
MAX_STORED_BYTES = 16 << 20
BODY_SECONDS = 5.0
CHUNK_BYTES = 256  # that a body counts for at least: an empty one has a cost too


@dataclass(slots=True, eq=False)
class _PendingBody:
    limit: asyncio.Timeout
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = CHUNK_BYTES


@dataclass(slots=True)
class BodyStore:
    """Of one bootstrap server and event loop."""

    max_bytes: int = MAX_STORED_BYTES
    seconds: float = BODY_SECONDS
    _coming: dict[_PendingBody, None] = field(default_factory=dict)  # the oldest first
    _num_bytes: int = 0

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises Refusal when it is too long or too slow."""
        if announced(request) > MAX_BOOTSTRAP_BODY_BYTES:
            raise too_long()
        try:
            async with asyncio.timeout(self.seconds) as limit:
                return await self._read(request, _PendingBody(limit))
        except TimeoutError:
            raise Refusal(Problem.NOT_READY, "the body did not come in time") from None

    async def _read(self, request: Request, body: _PendingBody) -> bytes:
        self._coming[body] = None
        self._num_bytes += body.num_bytes
        try:
            async for piece in request.stream():
                self._keep(body, piece)
                if body not in self._coming:
                    raise TimeoutError
                if body.num_bytes > MAX_BOOTSTRAP_BODY_BYTES + CHUNK_BYTES:
                    raise too_long()
            return b"".join(body.pieces)
        finally:
            self._num_bytes -= body.num_bytes
            self._coming.pop(body, None)

    def _keep(self, body: _PendingBody, piece: bytes) -> None:
        body.pieces.append(piece)
        body.num_bytes += len(piece)
        self._num_bytes += len(piece)
        while self._num_bytes > self.max_bytes:
            self._give_up(max(self._coming, key=lambda other: other.num_bytes))

    def _give_up(self, body: _PendingBody) -> None:
        """Its memory is free now; its reader hears of it at once if it is this one, else from the event loop."""
        self._num_bytes -= body.num_bytes
        body.num_bytes = 0
        body.pieces.clear()
        self._coming.pop(body)
        if not body.limit.expired():
            body.limit.reschedule(0.0)


def announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0


def too_long() -> Refusal:
    return Refusal(Problem.BODY_TOO_LARGE, f"the body is longer than {MAX_BOOTSTRAP_BODY_BYTES} bytes")
