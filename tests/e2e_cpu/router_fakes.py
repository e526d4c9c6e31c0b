"""Fake prefill and decode workers, and a router in front of them: real sockets, no model.

A fake does what it is told per request: `worker.behaves(Reject(500), Answer())` answers the first one with 500 and all
others properly. What it saw is in `worker.seen`.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from raw_http import ServerThread
from tandem.core.settings import Role
from tandem.server.api.errors import Code, Failure, error_headers, error_json
from tandem.server.api.resume import TELLS
from tandem.server.router.app import RouterApp, listen
from tandem.server.router.config import RouterConfig, make_worker
from tandem.server.router.generate import GENERATION_PATHS
from tandem.server.tracing import NO_TRACING, Tracing

PATIENCE_SECONDS = 45.0


def eventually(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Wait until `condition()` is true; its value."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        if value := condition():
            return value
        assert time.monotonic() < until, f"{what} did not come true in {PATIENCE_SECONDS} s"
        time.sleep(0.01)


@dataclass(frozen=True)
class Answer:
    """A proper answer: JSON or, when the body says `stream`, events. Of a decode when a prefill has seen the room."""

    body: dict[str, Any] | list[Any] | None = None
    chunks: tuple[bytes, ...] = (b'data: {"text": "a"}\n\n', b'data: {"text": "b"}\n\n', b"data: [DONE]\n\n")
    headers: dict[str, str] = field(default_factory=lambda: {"x-tandem-path": "remote"})


@dataclass(frozen=True)
class Reject:
    status: int
    code: str = "fake_error"
    once: Callable[[], Any] = lambda: True  # not before this is true


@dataclass(frozen=True)
class Refuse:
    """With the status and the body of a Tandem server."""

    code: Code
    once: Callable[[], Any] = lambda: True  # not before this is true


@dataclass(frozen=True)
class Hang:
    """Say nothing until the router closes the connection; with `has_head`, after a 200 head."""

    has_head: bool = False


@dataclass(frozen=True)
class FallSilent:
    """Send some events, then nothing until the router closes the connection."""

    chunks: tuple[bytes, ...] = (b"data: {}\n\n",)


@dataclass(frozen=True)
class Die:
    """Send these pieces of a stream, then break the connection."""

    chunks: tuple[bytes, ...] = ()
    is_stream: bool = True
    once: Callable[[], Any] = lambda: True  # not before this is true


@dataclass(frozen=True)
class TellAndDie:
    """Frames of a stream that others may go on with, then a connection that breaks."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class BeginAnew:
    """A whole document, whatever was asked for."""


@dataclass
class Seen:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    query: str = ""
    is_closed: bool = False  # by the router, before the answer was complete

    @property
    def room(self) -> Any:
        return self.body["bootstrap_room"]


class FakeWorker:
    def __init__(self, role: Role) -> None:
        self.role = role
        self.seen: list[Seen] = []
        self.prefills: list[FakeWorker] = []  # of a decode
        self.is_healthy = True
        self.models = ["fake"]
        self.hangs_at = ""  # a page that is not answered
        self.drips_at = ""  # one whose answer does not end
        self.asks_for_a_key_at = ""  # one that says 401
        self._behaviours: list[Any] = [Answer()]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._thread: ServerThread | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def generations(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.path in GENERATION_PATHS]

    @property
    def rooms(self) -> list[Any]:
        return [seen.room for seen in self.generations]

    def behaves(self, *behaviours: Any) -> None:
        """One per request from now on; the last one stays."""
        self._behaviours = list(behaviours)

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = ServerThread(self._app, listener)

    def tell_to_end(self) -> None:
        assert self._thread is not None
        self._thread.tell_to_stop(kill=True)

    def kill(self) -> None:
        assert self._thread is not None
        self._thread.stop(kill=True)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path = scope["path"]
        if path == "/health":
            return await reply(send, 200 if self.is_healthy else 503, b"")
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        body = json.loads(raw) if raw else {}
        seen = Seen(path, body if isinstance(body, dict) else {}, headers, scope["query_string"].decode())
        self.seen.append(seen)
        if path in GENERATION_PATHS:
            behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
            return await self._behave(behaviour, seen, receive, send)
        if path == self.hangs_at:
            return await self._behave(Hang(), seen, receive, send)
        if path == self.drips_at:
            return await self._drip(send)
        if path == self.asks_for_a_key_at:
            return await reply(send, 401, b"{}")
        return await reply(send, *self._control(path))

    async def _drip(self, send: Send) -> None:
        await head(send, 200, {"content-type": "application/json"})
        while True:  # until its task is cancelled
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.02)

    def _control(self, path: str) -> tuple[int, bytes]:
        documents: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [{"id": name, "of": self.url} for name in self.models]},
            "/server_info": {"disaggregation_mode": self.role.value, "internal_states": [{"role": self.role.value}]},
            "/v1/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_used_tokens": 7}]},
            "/get_load": [{"dp_rank": 0, "num_reqs": 2}],
            "/tokenize": {"tokens": [1, 2]},
            "/openapi.json": {"paths": {"/generate": {}, "/debug/state": {}}},
            "/flush_cache": {},
            "/abort_request": {"aborted": int(self.role is Role.DECODE)},
            "/health_generate": {},
        }
        return (200, json.dumps(documents[path]).encode()) if path in documents else (404, b"{}")

    def _rooms_of_prefills(self) -> list[Any]:
        return [room for prefill in self.prefills for room in prefill.rooms]

    async def _until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def _behave(self, behaviour: Any, seen: Seen, receive: Receive, send: Send) -> None:
        if isinstance(behaviour, (Reject, Refuse, Die)):
            await self._until(behaviour.once)
        if isinstance(behaviour, Answer):
            await self._until(lambda: not self.prefills or seen.room in self._rooms_of_prefills())
        match behaviour:
            case Answer(chunks=chunks, headers=headers) if seen.body.get("stream"):
                await head(send, 200, {"content-type": "text/event-stream"} | headers)
                for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            case Answer(body=body, headers=headers):
                document = body if body is not None else {"text": f"from {self.role.value}"}
                await reply(send, 200, json.dumps(document).encode(), headers)
            case Reject(status=status, code=code):
                await reply(send, status, json.dumps({"error": {"code": code, "message": "told to"}}).encode())
            case Refuse(code=code):
                failure = Failure(code, "told to")
                await reply(send, failure.status, error_json(failure, "id"), error_headers(failure))
            case Hang(has_head=has_head):
                if has_head:
                    await head(send, 200, {"content-type": "application/json"})
                while (await receive())["type"] != "http.disconnect":
                    pass
                seen.is_closed = True
            case FallSilent(chunks=chunks):
                await head(send, 200, {"content-type": "text/event-stream"})
                for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                while (await receive())["type"] != "http.disconnect":
                    pass
                seen.is_closed = True
            case TellAndDie(frames=frames):
                await head(send, 200, {"content-type": "text/event-stream", TELLS: "1"})
                for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                raise ConnectionResetError("told to die")
            case BeginAnew():
                await reply(send, 200, b'{"text": "anew"}')
            case Die(chunks=chunks, is_stream=is_stream):
                kind = "text/event-stream" if is_stream else "application/json"
                await head(send, 200, {"content-type": kind})
                for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                raise ConnectionResetError("told to die")
            case _:
                raise AssertionError(behaviour)


async def head(send: Send, status: int, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def reply(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    await head(send, status, {"content-type": "application/json"} | (headers or {}))
    await send({"type": "http.response.body", "body": body})


@dataclass
class Fleet:
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    router: RouterApp
    url: str

    def seen(self) -> list[Seen]:
        return [seen for worker in self.prefills + self.decodes for seen in worker.generations]

    def is_idle(self) -> bool:
        core = self.router.router
        return core.num_active() == core.num_live_rooms() == 0


@contextlib.contextmanager
def fleet(prefills: int = 1, decodes: int = 1, tracing: Tracing = NO_TRACING, **settings: Any) -> Iterator[Fleet]:
    """A router whose workers are all live. At the end nothing may be under way any more."""
    workers = [FakeWorker(Role.PREFILL) for _ in range(prefills)], [FakeWorker(Role.DECODE) for _ in range(decodes)]
    for decode in workers[1]:
        decode.prefills = workers[0]
    told = [
        make_worker(index, worker.role, worker.url, 9000 + index if worker.role is Role.PREFILL else None)
        for index, worker in enumerate(workers[0] + workers[1])
    ]
    config = RouterConfig(workers=tuple(told), port=0, **({"health_check_interval": 0.1} | settings))
    listener = listen(config)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    router = RouterApp(config, tracing=tracing)
    thread = ServerThread(router.app, listener, lifespan="on")
    made = Fleet(*workers, router, url)
    try:
        core = router.router
        eventually(lambda: all(core.is_live(worker.id) for worker in told), "all workers live")
        yield made
        eventually(made.is_idle, "an idle router")
    finally:
        thread.tell_to_stop()
        for worker in workers[0] + workers[1]:
            worker.tell_to_end()
        thread.stop()
        for worker in workers[0] + workers[1]:
            worker.kill()
