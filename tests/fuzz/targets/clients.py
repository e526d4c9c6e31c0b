"""What `tandem chat`, `bench` and `eval` read from a server, whoever that is: the raw bytes of its answer."""

import argparse
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from random import Random
from typing import TypeVar
from zlib import crc32

import httpcore
import httpx
from engine import Run, Target
from mutators import mutate_http

from tandem.cli import bench, eval
from tandem.cli.client import ServerTrouble, served_model
from tandem.cli.conversation import Conversation
from tandem.cli.eval import MathProblem
from targets.http import new_loop
from targets.http_router import Answering, answer

Answer = TypeVar("Answer")
ARGS = argparse.Namespace(
    url="http://127.0.0.1:1",
    api_key=None,
    api_key_file=None,
    model=None,
    system=None,
    max_tokens=4,
    temperature=0.0,
    endpoint="chat",
    output_len=4,
)


class Same(httpcore.NetworkBackend):
    """Every connection gives the same bytes."""

    answer = b""

    def connect_tcp(self, *args: object, **options: object) -> httpcore.NetworkStream:
        return httpcore.MockStream([self.answer])


class SameAsync(httpcore.AsyncNetworkBackend):
    answer = b""

    async def connect_tcp(self, *args: object, **options: object) -> httpcore.AsyncNetworkStream:
        return Answering(self.answer)


class Clients:
    def __init__(self) -> None:
        self._loop = new_loop()
        self._backend, self._async_backend = Same(), SameAsync()
        self._transport = httpx.HTTPTransport()
        self._async_transport = httpx.AsyncHTTPTransport()
        self._reconnect()
        httpx.Client._init_transport = lambda client, **options: self._transport  # type: ignore[method-assign]  # this process only

    def _reconnect(self) -> None:
        """No connection of the input before is left."""
        self._transport._pool = httpcore.ConnectionPool(network_backend=self._backend)
        self._async_transport._pool = httpcore.AsyncConnectionPool(network_backend=self._async_backend)

    def __call__(self, data: bytes) -> None:
        """Each input is read by one of them: a checksum says by which."""
        self._backend.answer = self._async_backend.answer = data
        self._reconnect()
        steps = (self._model, self._chat, self._words, self._load, self._eval)
        steps[crc32(data) % len(steps)]()

    def _model(self) -> None:
        served_model(ARGS)

    def _chat(self) -> None:
        with httpx.Client(base_url=ARGS.url) as client:
            Conversation(client, ARGS, "m").ask("a", lambda piece: None)

    def _words(self) -> None:
        words = self._ask(lambda client: bench.learn_words_per_token(client, "m"))
        bench.make_prompt(Random(0), 1, words)

    def _load(self) -> None:
        self._ask(lambda client: bench.LoadGenerator(client, ARGS, "m").send("a"))

    def _eval(self) -> None:
        self._ask(lambda client: eval.ask_one(client, ARGS, "m", MathProblem("q", Decimal(1))))

    def _ask(self, ask: Callable[[httpx.AsyncClient], Awaitable[Answer]]) -> Answer:
        async def run() -> Answer:
            async with httpx.AsyncClient(base_url=ARGS.url, transport=self._async_transport) as client:
                return await ask(client)

        return self._loop.run_until_complete(run())


def seeds() -> Mapping[str, bytes]:
    delta = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    error = b'data: {"error": {"code": "worker_lost", "message": "m"}}\n\n'
    done = b"data: [DONE]\n\n"
    events = {"content_type": "text/event-stream"}
    return {
        "stream": answer(200, delta + delta + usage + done, **events),
        "stream_error": answer(200, delta + error, **events),
        "stream_torn": answer(200, b": comment\nid: 1\n" + delta[:-9], **events),
        "models": answer(200, {"data": [{"id": "m"}]}),
        "chat": answer(200, {"choices": [{"message": {"content": "#### 4"}}]}),
        "tokens": answer(200, {"tokens": [1, 2], "count": 2}),
        "refusal": answer(400, {"error": {"code": "invalid_value", "message": "m"}}),
        "plain": answer(502, b"Bad gateway", content_type="text/plain"),
    }


def client_answers() -> Run:
    return Clients()


TARGETS = (Target("client_answers", client_answers, mutate_http, 1_000, answers=(ServerTrouble,), seeds=seeds),)
