"""A node for tests of the API: answers by a script, on the event loop that called it."""

import asyncio
import struct
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Message
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from tandem.config import ServerConfig
from tandem.core import commands, events
from tandem.core.commands import FinishReason, StageTimings
from tandem.core.commands import Path as KvPath
from tandem.core.request import Request
from tandem.core.values import Cause, Incarnation, Nanos, RequestId
from tandem.metrics.log import RequestLog
from tandem.sampling import Payload, SamplingDefaults, TokenScore
from tandem.server import wire
from tandem.server.api.app import build_app
from tandem.server.api.client import NodeClient
from tandem.server.api.limits import Task
from tandem.server.api.model_facts import ModelFacts
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.channel import frame

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
END = 1  # id of </s>
WAITED_NS = Nanos(1_500_000_000)  # by who fails by script, on the peer "other"
WORKERS = [wire.WorkerNumbers(0, 0, 0, {"live_rooms": 0})]
REPLICA = wire.ReplicaInfo(Incarnation("one", "7"), "unified", "layout", {}, "127.0.0.1", 1, ())
DIRECTORIES = tempfile.TemporaryDirectory(prefix="tandem-tokenizers-")


@cache
def tokenizer() -> Tokenizer:
    """Byte level without merges: one token per byte, ids from 2 on; `<s>` is 0 and `</s>` is 1."""
    return load_tokenizer(TEMPLATE)


def load_tokenizer(template: str | None, added: Sequence[str] = ()) -> Tokenizer:
    """added: more tokens, which are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: id for id, char in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.add_tokens([AddedToken(name, normalized=False) for name in added])
    config = {"eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    return tokenizer_of(raw, config)


def tokenizer_of(raw: RawTokenizer, config: dict[str, Any]) -> Tokenizer:
    """What a model's directory with these two files gives. It stays to the end of the tests: grammars read it again."""
    directory = Path(tempfile.mkdtemp(dir=DIRECTORIES.name))
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return Tokenizer(directory)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


@dataclass
class Script:
    """What the node does with one request. `tokens` run out: then it ends with `reason`, unless `failure` is set."""

    tokens: Sequence[int] = ()
    reason: FinishReason = FinishReason.STOP
    failure: Cause | None = None
    path: KvPath = KvPath.UNIFIED
    is_silent: bool = False  # never ends by itself
    is_burst: bool = False  # all tokens are there before anybody looks
    is_patient: bool = False  # no token comes before the last one was taken
    wants_time: int = 0  # wants the prompt of that time first


def says(text: str, **kwargs: object) -> Callable[[Request, Payload], Script]:
    script = Script([*ids(text), END], **kwargs)  # type: ignore[arg-type]
    return lambda request, payload: script


@dataclass
class FakeNode:
    script: Callable[[Request, Payload], Script]
    client: NodeClient | None = None
    submits: list[wire.Submit] = field(default_factory=list)
    rendered: list[wire.Submit] = field(default_factory=list)
    sent: list[wire.ApiToNode] = field(default_factory=list)  # all but submits and queries
    answers: dict[str, object] = field(default_factory=dict)  # by query
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    dimensions: int = 0  # of a vector
    dp_rank: int = 0

    def send(self, message: wire.ApiToNode) -> None:
        frame(message)  # what cannot be encoded is never sent
        match message:
            case wire.SubmitAll(submits):
                for submit in submits:
                    self.submits.append(submit)
                    script = self.script(submit.request, submit.payload)
                    if script.wants_time:
                        asyncio.get_running_loop().call_soon(
                            self.tell, commands.RenderAgain(submit.request.id, script.wants_time)
                        )
                    self._begin(submit, script)
            case wire.Rendered(submit):
                self.rendered.append(submit)
                self._begin(submit, replace(self.script(submit.request, submit.payload), wants_time=0))
            case wire.Query():
                if message.what in self.answers:
                    body = msgspec.json.encode(self.answers[message.what])
                    asyncio.get_running_loop().call_soon(self.tell, wire.Answer(message.id, body))
            case events.AbortRequested():
                self.sent.append(message)
                self.end(message.request, commands.FailRequest(message.request, message.cause, "decode"))
            case events.StopMatched():
                self.sent.append(message)
                self.end(message.request, self.finish(message.request, Script()))
            case _:
                self.sent.append(message)

    def _begin(self, message: wire.Submit, script: Script) -> None:
        self.running[message.request.id] = asyncio.get_running_loop().create_task(self.run(message, script))

    def tell(self, message: wire.NodeToApi) -> None:
        assert self.client is not None
        self.client.receive(message, self.dp_rank)

    def end(self, request: int, terminal: commands.FinishRequest | commands.FailRequest) -> None:
        task = self.running.pop(request, None)
        if task is not None:
            task.cancel()
            asyncio.get_running_loop().call_soon(self.tell, terminal)

    async def run(self, submit: wire.Submit, script: Script) -> None:
        if script.wants_time:
            return
        request = submit.request
        if request.wants_vector:
            await asyncio.sleep(0)
            done = self.finish(request.id, Script(reason=FinishReason.PROMPT))
            self.tell(msgspec.structs.replace(done, vector=array("f", [0.5] * self.dimensions).tobytes()))
            self.running.pop(request.id, None)
            return
        wants_scores = submit.payload.sampling.logprobs
        await asyncio.sleep(0)
        tokens = list(script.tokens)[: request.max_new_tokens]
        for index, token in enumerate(tokens):
            if index == 0:
                ledger = StageTimings((("queue", 1000), ("forward", 2000)))
                scores = prompt_scores(submit.payload)
                self.tell(commands.StartRequest(request.id, script.path, 3, ledger, scores))
            extras = ((request.id, score(token, submit.payload)),) if wants_scores else ()
            self.tell(commands.EmitTokens((request.id,), struct.pack("<i", token), extras))
            if not script.is_burst:
                await asyncio.sleep(0)
            while script.is_patient and self.has_untaken(request.id):
                await asyncio.sleep(0)
        if script.failure is not None:
            self.tell(commands.FailRequest(request.id, script.failure, "transfer", "as scripted", "other", WAITED_NS))
        elif script.is_silent:
            return
        else:
            self.tell(self.finish(request.id, script, is_cut=len(tokens) < len(script.tokens)))
        self.running.pop(request.id, None)

    def has_untaken(self, request: RequestId) -> bool:
        assert self.client is not None
        live = self.client._live.get(request)
        return live is not None and live.tokens != []

    def finish(self, request: int, script: Script, *, is_cut: bool = False) -> commands.FinishRequest:
        reason = FinishReason.LENGTH if is_cut else script.reason
        ledger = StageTimings((("queue", 1000), ("forward", 2000)))
        return commands.FinishRequest(request, reason, script.path, 3, 5, 2, ledger)  # type: ignore[arg-type]


def prompt_scores(payload: Payload) -> tuple[bytes, ...]:
    """In chunks of three."""
    first, tokens = payload.sampling.prompt_logprobs_from, list(array("i", payload.tokens))
    if first is None:
        return ()
    most = payload.sampling.prompt_top_logprobs
    found = [msgspec.msgpack.decode(score(token, payload, most)) for token in tokens[first + 1 :]]
    return tuple(msgspec.msgpack.encode(found[at : at + 3]) for at in range(0, len(found), 3))


def score(token: int, payload: Payload, most: int | None = None) -> bytes:
    best = tuple(range(token, token + (payload.sampling.top_logprobs if most is None else most)))
    told = (*best, *payload.sampling.logprob_ids)
    return msgspec.msgpack.encode(TokenScore(-0.5, told, tuple(-0.5 - i for i in range(len(told)))))


@dataclass
class World:
    """An application on top of a fake node, or of one for each DP rank: `node` is the first."""

    node: FakeNode
    client: NodeClient
    app: Starlette
    log: StringIO

    def http(self, **kwargs: object) -> TestClient:
        return TestClient(self.app, client=("127.0.0.1", 4711), **kwargs)  # type: ignore[arg-type]


USUAL = SamplingDefaults()


def world(
    script: Callable[[Request, Payload], Script] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    is_ready: bool = True,
    context_length: int = 4096,
    answers: dict[str, object] | None = None,
    digest_secret: bytes | None = None,
    sampling_defaults: SamplingDefaults = USUAL,
    task: Task = Task.TOKENS,
    dimensions: int = 1024,
    block_tokens: int = 1,
    vocab_size: int | None = None,
    ranks: int = 1,
    **settings: object,
) -> World:
    named = {"allowed_host": ("testserver", "test")} | settings  # as the test clients call it
    config = ServerConfig(model="toy", log_format="json", **named)  # type: ignore[arg-type]
    known = {"worker": WORKERS} | ({"metrics": {}} if answers is None else answers)
    nodes = [FakeNode(script or says("ok"), answers=known, dp_rank=dp_rank) for dp_rank in range(ranks)]
    client = NodeClient(*nodes, stall_timeout=config.stall_timeout)
    for node in nodes:
        node.dimensions = 1 if task is Task.SCORES else dimensions
        node.client = client
        if is_ready:
            node.tell(wire.NodeReady(REPLICA, num_pages=100, page_bytes=64))
    model = ModelFacts(
        model_path="/models/toy",
        architectures=["ToyForCausalLM"],
        model_type="toy",
        context_length=context_length,
        page_size=config.page_tokens,
        vocab_size=vocab_size or (tokenizer or default_tokenizer()).vocab_size,
        eos_token_ids=frozenset({END}),
        dtype="float32",
        sampling_defaults=sampling_defaults,
        task=task,
        dimensions=dimensions,
        block_tokens=block_tokens,
    )
    log = StringIO()
    app = build_app(
        config,
        client,
        model,
        tokenizer or default_tokenizer(),
        log=RequestLog("json", log),
        digest_secret=digest_secret,
    )
    return World(nodes[0], client, app, log)


class Call:
    """One POST /v1/completions on the bare ASGI interface. `breaks`: writing to a client that has left fails."""

    def __init__(self, w: World, body: dict, *, breaks: bool = False) -> None:
        self.messages: list[Message] = []
        self._breaks = breaks
        self._left = asyncio.Event()
        self._body: bytes | None = msgspec.json.encode(body)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.get_running_loop().create_task(w.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._breaks and self._left.is_set():
            raise OSError("the client has left")
        self.messages.append(message)

    def leave(self) -> None:
        self._left.set()

    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    def error(self) -> dict:
        return msgspec.json.decode(self.body())["error"]


def default_tokenizer() -> Tokenizer:
    return tokenizer()


def prompt_of(submit: wire.Submit) -> list[int]:
    return list(array("i", submit.payload.tokens))


def sse(text: str) -> list[dict]:
    """The JSON events of a stream; `[DONE]` must be last and is left out."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if events and events[-1] == "[DONE]":
        events.pop()
    return [msgspec.json.decode(event) for event in events]
