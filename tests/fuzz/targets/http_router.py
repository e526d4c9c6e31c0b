"""The router: a client's bytes, and what a prefill and a decode answer, all three from whoever wants to harm it.

An input is three frames: the client's request, the prefill's answer, the decode's. The workers' health is good, each
other request of the router to a worker is answered by that worker's frame.
"""

import json
import re
from collections.abc import Iterable, Mapping

import httpcore
from engine import Run, Target
from mutators import framed, join_frames, mutate_http, split_frames

from tandem.core.settings import Role
from tandem.server.router.app import RouterApp
from tandem.server.router.config import RouterConfig, make_worker
from targets.http import Broken, Refused, Served, check_served, new_loop, request, until

PREFILL_PORT, DECODE_PORT = 1, 2
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
REQUEST_LINE = re.compile(rb"[A-Z]+ /")
ANY_STATUS = frozenset(range(500, 1000))  # a worker's own is passed on; the router's mistakes are seen in its log
CONFIG = RouterConfig(
    workers=(
        make_worker(0, Role.PREFILL, f"http://127.0.0.1:{PREFILL_PORT}", 8998),
        make_worker(1, Role.DECODE, f"http://127.0.0.1:{DECODE_PORT}"),
    ),
    retries=1,
    request_timeout=5.0,
    stall_timeout=5.0,
)


class Answering(httpcore.AsyncNetworkStream):
    """One connection to a worker that says the same to every request, and nothing else."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._pieces: list[bytes] = []

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if REQUEST_LINE.match(buffer):
            answer = HEALTHY if buffer.startswith(b"GET /health ") else self._answer
            middle = max(1, len(answer) // 2)
            self._pieces = [piece for piece in (answer[:middle], answer[middle:]) if piece]

    async def aclose(self) -> None:
        self._pieces = []

    def get_extra_info(self, info: str) -> object:
        return None


class Workers(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self.answers: dict[int, bytes] = {}

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        if port not in self.answers:
            raise Broken(f"somebody made it connect to {host}:{port}")
        return Answering(self.answers[port])


class Connection(httpcore.AsyncHTTPConnection):
    """What the pool makes: in this process, with no network below."""

    backend: Workers

    def __init__(
        self,
        origin: httpcore.Origin,
        *,
        keepalive_expiry: float | None = None,
        network_backend: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        super().__init__(origin, keepalive_expiry=keepalive_expiry, network_backend=self.backend)


class Routers:
    def __init__(self) -> None:
        self._loop = new_loop()
        self._workers = Connection.backend = Workers()
        httpcore.AsyncHTTPConnection = Connection  # type: ignore[misc]  # this process only

    def __call__(self, data: bytes) -> None:
        client, prefill, decode = (*split_frames(data), b"", b"", b"")[:3]
        self._workers.answers = {PREFILL_PORT: prefill, DECODE_PORT: decode}
        it = RouterApp(CONFIG)
        self._loop.run_until_complete(started(it))
        try:
            statuses = Served(it.app, self._loop).answer(client, allowed=ANY_STATUS)
            self._loop.run_until_complete(until(lambda: is_idle(it), lambda: it.router.num_active()))
        finally:
            self._loop.run_until_complete(closed(it))
        check_served(statuses)


async def started(it: RouterApp) -> None:
    it._shell.start()
    await until(it.router.has_live_pair, lambda: "no live pair in the beginning")


async def closed(it: RouterApp) -> None:
    await it._shell.close()
    await it._client.aclose()


def is_idle(it: RouterApp) -> bool:
    return it.router.num_active() == it.router.num_live_rooms() == 0 and not it._shell._calls


def answer(status: int, body: object, **headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json", "x-tandem-path": "remote", **headers}
    named["content-length"] = str(len(content))
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def seeds() -> Mapping[str, bytes]:
    meta = {"id": "a", "finish_reason": {"type": "stop"}, "input_token_logprobs": [[-0.5, 1, None]]}
    document = answer(200, {"text": "a", "output_ids": [1], "meta_info": meta})
    batch = answer(200, [{"text": "a", "meta_info": meta}, {"text": "b", "meta_info": meta}])
    events = b'data: {"text": "a"}\n\ndata: {"error": {"code": "worker_lost", "message": "m"}}\n\ndata: [DONE]\n\n'
    stream = answer(200, events, content_type="text/event-stream")
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
        b"5\r\ndata:\r\n5\r\n {}\n\n\r\n0\r\n\r\n"
    )
    refusal = answer(400, {"error": {"code": "invalid_value", "message": "m", "param": "p"}})
    busy = answer(503, {"error": {"code": "queue_full", "message": "m"}}, retry_after="1")
    loads = answer(200, {"loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_used_tokens": 7}]})
    info = answer(200, {"disaggregation_mode": "decode", "internal_states": [{"a": 1}], "served_model_name": "m"})
    paths = answer(200, {"paths": {"/generate": {}, "/debug/state": {}}})
    responses = {"input": [{"role": "user", "content": "a"}], "store": True}
    made = {"id": "r", "status": "completed", "store": True, "output": [{"type": "message", "content": []}]}
    ending = b"event: response.completed\ndata: " + json.dumps({"response": made}).encode() + b"\n\n"
    made_stream = answer(200, ending, content_type="text/event-stream")
    pair = {"bootstrap_host": "x", "bootstrap_room": 5, "bootstrap_port": 1}
    native = {"text": "a", "rid": "r", "timeout": 3.5, "return_logprob": True, **pair}
    asked = {
        "document": (request("POST", "/generate", native), document, document),
        "batch": (request("POST", "/generate", {**native, "input_ids": [[1], [2]], "rid": ["a", "b"]}), batch, batch),
        "stream": (request("POST", "/generate", {**native, "stream": True}), document, stream),
        "chunked": (request("POST", "/v1/completions", {"prompt": ["a", "b"], "stream": True}), stream, chunked),
        "responses": (request("POST", "/v1/responses", responses), document, answer(200, made)),
        "responses_stream": (request("POST", "/v1/responses", {**responses, "stream": True}), document, made_stream),
        "chat": (request("POST", "/v1/chat/completions", {"messages": [], "n": 2}), document, document),
        "refused": (request("POST", "/generate", native), refusal, refusal),
        "retried": (request("POST", "/generate", native), busy, document),
        "loads": (request("GET", "/v1/loads"), loads, loads),
        "get_load": (request("GET", "/get_load"), answer(200, [{"dp_rank": 0, "num_reqs": 2}]), loads),
        "server_info": (request("GET", "/server_info"), info, info),
        "openapi": (request("GET", "/openapi.json"), paths, paths),
        "abort": (request("POST", "/abort_request", {"rid": "r"}), answer(200, {"aborted": 1}), answer(200, {})),
        "flush": (request("POST", "/flush_cache"), answer(200, {}), answer(200, {})),
        "models": (request("GET", "/v1/models/tandem/mini"), document, answer(200, {"data": [{"id": "m"}]})),
        "tokenize": (request("POST", "/tokenize", {"prompt": "a"}), document, answer(200, {"tokens": [1]})),
    }
    for path in ("/health", "/health_generate", "/ready", "/version", "/metrics", "/model_info"):
        asked["get" + path.replace("/", "_")] = (request("GET", path), answer(200, {}), answer(200, {}))
    return {name: join_frames(parts) for name, parts in asked.items()}


def router() -> Run:
    return Routers()


TARGETS = (Target("http_router", router, framed(mutate_http), 700, answers=(Refused,), seeds=seeds),)
