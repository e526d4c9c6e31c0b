"""Answers of workers on their way to the client: whole, in pieces, or merged from both halves."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import httpx
import msgspec

from tandem.core.router.messages import Fail
from tandem.server.api.body import NOT_JSON
from tandem.server.api.resume import TELLS

PIPE_BYTES = 1 << 20  # of an answer that a slow client has not taken yet


class WholeAnswer(msgspec.Struct, frozen=True):
    """A whole answer. prefill: of which something is still to be merged into it (`merge_input_logprobs`)."""

    status: int
    headers: dict[str, str]
    body: bytes
    prefill: bytes = b""


class StreamedAnswer(msgspec.Struct, frozen=True):
    """An answer that comes in pieces; the last thing in the pipe may be a failure."""

    status: int
    headers: dict[str, str]
    pipe: "Pipe"


class Gone(msgspec.Struct, frozen=True):
    """The client has left."""


Outcome = WholeAnswer | StreamedAnswer | Fail | Gone


class Pipe:
    """Bytes on their way to the client. The writer waits while the reader is slow; ending never waits."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._has_changed = asyncio.Event()
        self._is_ended = False
        self.failure: Fail | None = None

    async def put(self, chunk: bytes) -> None:
        while self._size >= PIPE_BYTES and not self._is_ended:
            self._has_changed.clear()
            await self._has_changed.wait()
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._has_changed.set()

    def end(self, failure: Fail | None = None, give_up_message: bytes = b"") -> None:
        """give_up_message: of a worker that gave the stream up, where there is no failure of ours."""
        if not self._is_ended:
            self.failure = failure
            if give_up_message and failure is None:
                self._chunks.append(give_up_message)
                self._size += len(give_up_message)
        self._is_ended = True
        self._has_changed.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._size -= len(chunk)
                self._has_changed.set()
                yield chunk
            if self._is_ended:
                return
            self._has_changed.clear()
            await self._has_changed.wait()


def passed_headers(headers: httpx.Headers) -> dict[str, str]:
    """What of a worker's head the client gets to see: nothing that could not be sent on."""
    passed = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
    own = {name for name in headers if name.startswith("x-tandem-") and name != TELLS}
    named = {name: value for name, value in headers.items() if name in passed or name in own}
    return {name: value for name, value in named.items() if value.isprintable()}


def error_at_end(tail: bytes) -> dict[str, object] | None:
    """The `error` of a body, or of the last event of a stream; a longer object has none."""
    events = [line for line in tail.splitlines() if line.strip() not in (b"", b"data: [DONE]")]
    last = events[-1].removeprefix(b"data:") if events else b""
    try:
        error = msgspec.json.decode(last, type=_Ending).error
    except NOT_JSON:
        return None
    return error if isinstance(error, dict) else {"message": error} if error else None


def code_of(tail: bytes) -> str:
    """Of the error at the end of a body; empty where there is none."""
    error = error_at_end(tail)
    return "" if error is None else str(error.get("code", ""))


def retryable_of(body: bytes) -> bool | None:
    """What an error says of itself (`api.errors.RULES`); None for one that is not of our shape."""
    try:
        return msgspec.json.decode(body, type=_Rejection).error.retryable
    except NOT_JSON:
        return None


class _Error(msgspec.Struct, frozen=True):
    retryable: bool | None = None


class _Rejection(msgspec.Struct, frozen=True):
    error: _Error


class _Ending(msgspec.Struct, frozen=True):
    error: dict[str, object] | str | int | None = None


def merge_input_logprobs(*, prefill: bytes, decode: bytes) -> bytes:
    """Decode's JSON with prefill's `input_token_logprobs` before its own, item by item for a batch.

    Decode's bytes unchanged when there is nothing to merge, because decode has computed the prompt itself, or when what
    the two have said cannot be read or written again. Never raises: somebody waits for the answer.
    """
    try:
        ours, theirs = msgspec.json.decode(decode), msgspec.json.decode(prefill)
    except NOT_JSON:
        return decode
    pairs = (
        list(zip(ours, theirs, strict=False))
        if isinstance(ours, list) and isinstance(theirs, list)
        else [(ours, theirs)]
    )
    merged = [_merge_one(into, given) for into, given in pairs]
    try:
        return msgspec.json.encode(ours) if any(merged) else decode
    except (RecursionError, OverflowError):  # nested deeper, or with larger numbers, than can be written
        return decode


def _merge_one(into: object, given: object) -> bool:
    found, own = _input_logprobs(given), _input_logprobs(into)
    if not found or own is None:
        return False
    own[:0] = found
    return True


def _input_logprobs(answer: object) -> list[object] | None:
    """The list inside `answer`, made when decode has left it out; None when this is not an answer."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return None
    if meta.get("input_token_logprobs") is None:
        meta["input_token_logprobs"] = []
    logprobs = meta["input_token_logprobs"]
    return logprobs if isinstance(logprobs, list) else None
