"""No callback of an event loop reads, renders, tokenizes or writes more than the table of limits says, at any endpoint.

Counted, not timed: what does such work is watched, with the size of what it works on, and whatever one callback of a
loop has done of a kind is added up. Every endpoint that takes a body is asked with one far above the limits.
"""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import END, Script, ids, world
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.settings import Role
from tandem.server.api import bootstrap, generate, generation_request, large_body, messages, openai_reply, vectors
from tandem.server.api.body import DETOKENIZE_PATHS, TOKENIZE_PATHS, VECTOR_PATHS, ChatBody
from tandem.server.api.bounds import (
    LOOP_BYTES,
    LOOP_CHARS,
    LOOP_CHAT_BYTES,
    LOOP_IDS,
    LOOP_SAMPLES,
    LOOP_SCORES,
    MAX_CONTAINERS,
    MAX_VALUES,
)
from tandem.server.api.errors import Refusal
from tandem.server.api.large_body import JsonCounts, counts_of, decode_anywhere
from tandem.server.api.limits import Task
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.router import app as router_app
from tandem.server.router.config import RouterConfig, make_worker

MOST = {
    "json": 3 * LOOP_BYTES,  # a callback may write the last events, and the lines of the log
    "render": LOOP_CHAT_BYTES,
    "tokenize": 2 * LOOP_CHARS,
    "detokenize": LOOP_IDS,
    "submit": LOOP_IDS,
    "samples": 2 * LOOP_SAMPLES,
    "write": LOOP_SCORES,
}
TEXT = "x" * 40_000
TOKENS = [*ids("x" * 39), END]
DOCUMENT = msgspec.json.encode({"text": TEXT, "meta_info": {"input_token_logprobs": [[-1.0, 5, None]] * 3000}})


@dataclass
class LoopWork:
    """What was done, of a kind, in the callback of a loop that is running, in the worst one so far, and elsewhere."""

    now: dict[int, Counter[str]] = field(default_factory=dict)  # by thread
    worst: Counter[str] = field(default_factory=Counter[str])
    elsewhere: Counter[str] = field(default_factory=Counter[str])

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, kind: str, size: Callable[..., int]) -> None:
        """size: of what a call works on, from its result (None where it raises) and its arguments."""
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            result = None
            try:
                result = original(*arguments, **named)
            finally:
                done = self.now.get(threading.get_ident())
                if done is None:
                    self.elsewhere[kind] += size(result, *arguments)
                else:
                    done[kind] += size(result, *arguments)
                    self.worst |= done
            return result

        patch.setattr(owner, name, watched)

    def follow_callbacks(self, patch: pytest.MonkeyPatch) -> None:
        original = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            self.now[threading.get_ident()] = Counter()
            try:
                original(handle)
            finally:
                del self.now[threading.get_ident()]

        patch.setattr(asyncio.Handle, "_run", run)

    def too_much(self) -> dict[str, int]:
        return {kind: size for kind, size in self.worst.items() if size > MOST[kind]}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> LoopWork:
    found = LoopWork()
    found.follow_callbacks(monkeypatch)
    watch = partial(found.watch, monkeypatch)
    watch(msgspec.json, "decode", "json", lambda _, raw: len(raw))
    watch(msgspec.json, "encode", "json", lambda raw, _: len(raw))
    for module in (openai_reply, generate, messages, vectors):
        watch(module, "encode", "json", lambda raw, _: len(raw))
    watch(Tokenizer, "render_chat", "render", lambda chat, *_: len(chat.text))
    watch(Tokenizer, "encode", "tokenize", lambda _ids, _self, text: len(text))
    watch(Tokenizer, "decode", "detokenize", lambda _text, _self, row: len(row))
    watch(Tokenizer, "token_names", "detokenize", lambda _names, _self, row: len(row))
    watch(Tokenizer, "encode_here", "tokenize", lambda _encoding, _self, one, other: len(one) + len(other))
    watch(generation_request, "submission", "submit", lambda _, ask, *_rest: len(ask.prompt.tokens))
    watch(generation_request, "submission", "samples", lambda *_: 1)
    watch(generation_request, "ask_all", "samples", lambda asks, *_: len(asks))
    watch(generate, "native_params", "samples", lambda *_: 1)
    watch(vectors.VectorReply, "whole", "write", lambda _, _self, samples: sum(len(it.vector) // 32 for it in samples))
    for reply in (openai_reply.ChatReply, openai_reply.CompletionReply, generate.GenerateReply, messages.MessagesReply):
        watch(reply, "whole", "write", lambda _, _self, samples: sum(map(num_scores, samples)))
        names = ("delta", "end") if reply is openai_reply.CompletionReply else ("delta",)  # others end with a delta
        for name in names:
            watch(reply, name, "write", lambda _, _self, sample, _text, start: num_scores(sample, start))
    return found


def num_scores(sample: Any, start: int = 0) -> int:
    return (len(sample.tokens) - start) * (1 + sample.ask.sampling.top_logprobs)


CHAT = {"messages": [{"role": "user", "content": "hello"}] * 4000}
SCORED = {"return_logprob": True, "top_logprobs_num": 20}
MANY = {"n": 64, "max_new_tokens": 40}
SERVER: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [TEXT]}}}]},
        CHAT | {"n": 64, "logprobs": True, "top_logprobs": 20, "stream": True, "return_token_ids": True},
        {"messages": [{"role": "user", "content": "x"}], "n": 64, "logprobs": True, "top_logprobs": 20},
    ],
    "/v1/completions": [
        {"prompt": TEXT, "echo": True, "n": 8},
        {"prompt": [5] * 40_000, "echo": True, "n": 8, "stream": True},
        {"prompt": [[5] * 40_000] * 4, "echo": True},
        {"prompt": ["x"] * 1000, "logprobs": 5},
        {"prompt": ["x"] * 1000, "stream": True},
    ],
    "/generate": [
        {"text": TEXT},
        {"text": ["x"] * 1000},
        {"input_ids": [[5] * 9000] * 20},
        {"text": "x", "sampling_params": MANY} | SCORED,
        {"text": "x", "sampling_params": MANY, "stream": True} | SCORED,
    ],
    "/v1/messages": [CHAT | {"max_tokens": 50}, CHAT | {"max_tokens": 50, "stream": True}],
    "/v1/messages/count_tokens": [CHAT],
    "/v1/responses": [
        {"input": TEXT},
        {"input": "x", "instructions": TEXT, "stream": True},
        {"input": [{"role": "user", "content": TEXT}, {"role": "user", "content": "x"}]},
    ],
    "/v1/responses/input_tokens": [{"input": TEXT}],
    "/tokenize": [{"text": [TEXT] * 5}, {"text": ["x"] * 1000}, {"text": [TEXT] * 5, "return_token_strs": True}, CHAT],
    "/detokenize": [{"tokens": [[5] * 9000] * 20}],
    "/abort_request": [{"rid": TEXT}],
    "/flush_cache": [{}],
    "/ping": [{}],
    "/debug/faults": [{"force_optimistic_prefill_retry_prob": 0.0}],
}
VECTORS: list[tuple[Task, str, dict[str, Any]]] = [
    (Task.EMBEDDINGS, "/v1/embeddings", {"input": TEXT}),
    (Task.EMBEDDINGS, "/v1/embeddings", {"input": ["x"] * 1000}),
    (Task.EMBEDDINGS, "/v1/embeddings", {"input": [[5] * 9000] * 20, "encoding_format": "base64"}),
    *((task, "/v1/rerank", {"query": "x", "documents": ["x"] * 900}) for task in (Task.EMBEDDINGS, Task.SCORES)),
    *((task, "/v1/rerank", {"query": TEXT, "documents": [TEXT] * 4}) for task in (Task.EMBEDDINGS, Task.SCORES)),
    *((task, "/v1/score", {"text_1": ["x"] * 400, "text_2": ["x"] * 400}) for task in (Task.EMBEDDINGS, Task.SCORES)),
]
UNREAD = {"/flush_cache", "/ping"}
SERVER_AT_MOST = {"/debug/faults": 403}  # fault injection is off


def paths_with_bodies(app: Starlette) -> set[str]:
    """Every endpoint that some method brings a body to."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return {route.path for route in routes if (route.methods or set()) & {"POST", "PUT", "PATCH"}}


async def ask(app: Starlette, path: str, body: object, *, method: str = "POST") -> httpx.Response:
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 4711))
    raw = padded(json.dumps(body).encode())
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
        return await http.request(method, path, content=raw)


def padded(raw: bytes) -> bytes:
    """More than any limit, whatever it says."""
    return raw + b" " * (2 * LOOP_BYTES)


def test_every_endpoint_of_a_server_has_a_row() -> None:
    assert paths_with_bodies(world().app) == set(SERVER) | {*VECTOR_PATHS, *TOKENIZE_PATHS, *DETOKENIZE_PATHS}
    assert {path for path in VECTOR_PATHS if path.startswith("/v1")} == {path for _, path, _ in VECTORS}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in SERVER.items() for body in bodies], ids=lambda it: str(it)[:30]
)
def test_no_callback_of_a_server_works_on_more_than_the_limit(path: str, body: dict[str, Any], work: LoopWork) -> None:
    it = world(
        lambda request, payload: Script(TOKENS, is_burst=True),
        context_length=1 << 20,
        answers={"flush": {}, "metrics": {}},
    )
    work.worst.clear()

    response = asyncio.run(ask(it.app, path, body, method="PUT" if path.startswith("/debug") else "POST"))
    assert response.status_code == SERVER_AT_MOST.get(path, 200), response.text[:300]
    assert work.too_much() == {}
    takes_bodies = path not in SERVER_AT_MOST and path not in UNREAD
    assert not takes_bodies or work.elsewhere["json"] > LOOP_BYTES, "nothing was seen"


@pytest.mark.parametrize(("task", "path", "body"), VECTORS, ids=lambda it: str(it)[:30])
def test_no_callback_works_on_more_of_vectors_than_the_limit(
    task: Task, path: str, body: dict[str, Any], work: LoopWork
) -> None:
    it = world(context_length=1 << 20, task=task)
    work.worst.clear()

    response = asyncio.run(ask(it.app, path, body))
    assert response.status_code == 200, response.text[:300]
    assert work.too_much() == {}
    assert work.elsewhere["json"] > LOOP_BYTES, "nothing was seen"


# --- the router


ROUTED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [CHAT],
    "/v1/completions": [{"prompt": TEXT}, {"prompt": "refused"}],
    "/v1/messages": [CHAT],
    "/v1/responses": [{"input": TEXT}],
    "/v1/responses/input_tokens": [{"input": TEXT}],
    "/generate": [{"text": TEXT}, {"text": "x", "return_logprob": True}],
    "/v1/messages/count_tokens": [CHAT],
    "/tokenize": [{"text": TEXT}],
    "/detokenize": [{"tokens": [5] * 40_000}],
    "/abort_request": [{"rid": TEXT}],
    "/flush_cache": [{}],
    "/ping": [{}],
    "/workers": [{"url": "http://x:1", "worker_type": "decode", "more": TEXT}],
}
BY_QUERY = {"/add_worker", "/remove_worker"}  # a body that comes with it is not read
PASSED_ON = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", *UNREAD}  # as bytes, whatever they say


async def answered(request: HttpRequest) -> Response:
    """A worker that has much to say. Its own reading and writing is not watched: it is another process."""
    raw = await request.body()
    if b'"refused"' in raw:
        return Response(b'{"error":{"retryable":false},"more":"%s"}' % TEXT.encode(), 400)
    if request.url.path == "/abort_request":
        return Response(b'{"aborted":1,"more":"%s"}' % TEXT.encode())
    return Response(DOCUMENT, media_type="application/json")


def worker() -> Starlette:
    methods = ["GET", "POST"]
    return Starlette(routes=[Route("/{path:path}", answered, methods=methods)])


@asynccontextmanager
async def routing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Starlette]:
    monkeypatch.setattr(
        router_app, "make_client", lambda: httpx.AsyncClient(transport=httpx.ASGITransport(app=worker()))
    )
    workers = (make_worker(0, Role.PREFILL, "http://p:1"), make_worker(1, Role.DECODE, "http://d:2"))
    app = router_app.RouterApp(RouterConfig(workers=workers, allowed_host=("testserver",), fault_records="off")).app
    async with app.router.lifespan_context(app):
        yield app


def test_every_endpoint_of_a_router_has_a_row() -> None:
    """What ends with its prompts is refused before its body is read."""
    others = {*VECTOR_PATHS, *BY_QUERY, *TOKENIZE_PATHS, *DETOKENIZE_PATHS}
    assert paths_with_bodies(router_app.RouterApp(RouterConfig(workers=())).app) == set(ROUTED) | others


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in ROUTED.items() for body in bodies], ids=lambda it: str(it)[:30]
)
def test_no_callback_of_a_router_works_on_more_than_the_limit(
    path: str, body: dict[str, Any], work: LoopWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> httpx.Response:
        async with routing(monkeypatch) as app:
            return await ask(app, path, body)

    response = asyncio.run(story())
    assert response.status_code == (400 if body == {"prompt": "refused"} else 202 if path == "/workers" else 200)
    assert work.too_much() == {}
    assert path in PASSED_ON or work.elsewhere["json"] > LOOP_BYTES, "nothing was seen"


# --- the bootstrap server


BOOTSTRAP: dict[str, Any] = {
    "/query_dp_ranks": {"bootstrap_rooms": list(range(1, 40_000))},
    "/register_dp_rank": {"bootstrap_room": 5, "dp_rank": 0},
    "/route": {"role": TEXT},
}


class AnybodyMay:
    """Instead of the guard over writes."""

    def refusal(self, *arguments: Any, **named: Any) -> None:
        return None


@pytest.mark.parametrize(("path", "body"), BOOTSTRAP.items())
def test_no_callback_of_a_bootstrap_server_works_on_more_than_the_limit(
    path: str, body: Any, work: LoopWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "has_hash", lambda body, headers: True)
    it = bootstrap.BootstrapServer(BootstrapRegistry(), AnybodyMay())  # type: ignore[arg-type]  # instead of a guard
    app = it.app()
    assert paths_with_bodies(app) == set(BOOTSTRAP)
    response = asyncio.run(ask(app, path, body, method="PUT" if path == "/route" else "POST"))
    assert response.status_code in (200, 400), response.text
    assert work.too_much() == {}
    assert work.elsewhere["json"] > LOOP_BYTES, "nothing was seen"


# --- what a large body may hold


def counted(value: object) -> JsonCounts:
    """The same, by walking over what was decoded."""
    if not isinstance(value, dict | list):
        return JsonCounts(0, 0)
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value
    below = list(map(counted, inner))
    return JsonCounts(1 + sum(it.containers for it in below), max(0, len(value) - 1) + sum(it.commas for it in below))


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64, 1 << 16])
def test_values_are_counted_whatever_stands_in_texts_and_wherever_slices_end(
    slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_body, "SLICE_BYTES", slice_bytes)
    draw = random.Random(5)

    def made(depth: int) -> object:
        text = "".join(draw.choice('ab[]{},"\\ü\n') for _ in range(draw.randrange(9)))
        if depth == 0:
            return text
        members = [made(depth - 1) for _ in range(draw.randrange(5))]
        return members if draw.random() < 0.5 else {f"{text}{index}": value for index, value in enumerate(members)}

    for _ in range(50):
        value = made(4)
        assert counts_of(msgspec.json.encode(value)) == counted(value)


@pytest.mark.parametrize(
    ("inner", "most"), [(b"[],", MAX_CONTAINERS), (b'{"a":1},', MAX_CONTAINERS), (b"1,", MAX_VALUES)]
)
def test_a_body_with_too_many_values_is_refused_before_one_is_made(inner: bytes, most: int, work: LoopWork) -> None:
    head, tail = b'{"messages":[{"role":"user","content":[', b"1]}]}"
    assert asyncio.run(decode_anywhere(head + inner * (most - 8) + tail, ChatBody)).messages
    work.elsewhere.clear()
    with pytest.raises(Refusal, match=str(most)):
        asyncio.run(decode_anywhere(head + inner * (most + 1) + tail, ChatBody))
    assert (work.elsewhere["json"], work.worst["json"]) == (0, 0)
