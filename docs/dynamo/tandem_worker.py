"""Tandem as a worker of NVIDIA Dynamo (`docs/dynamo.md`). It runs in Dynamo's environment and knows one Tandem's URL.

    python tandem_worker.py --url http://127.0.0.1:8000

Dynamo's frontend renders templates, tokenizes, chooses a worker and writes text; to it this is an engine that takes
token ids and gives token ids. Each request goes on to Tandem's `/v1/completions` as one stream, whose fields Dynamo
names as vLLM does. Tandem's router knows which prefill and decode are behind it; Dynamo sees one worker.

A field of a request that would change the answer and is not passed on is refused. Stop strings are for both: Dynamo
cuts the text, and Tandem writes no token behind one, which Dynamo would count.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # what is JSON

import aiohttp
from dynamo._core import Context
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.run import run
from dynamo.llm import HttpError
from dynamo.llm.exceptions import CannotConnect, Disconnected
from kv_event_relay import KvEventRelay

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop")
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
DATA, DONE = b"data: ", b"data: [DONE]"
CONNECT_S = 10.0
MAX_LINE_BYTES = 8 * 1024 * 1024  # of one event; the first has the prompt


@dataclass(frozen=True)
class Model:
    """What Tandem says of what it serves."""

    name: str
    path: str  # of tokenizer and template, where Dynamo finds them
    context_length: int
    page_size: int


class TandemEngine(LLMEngine):
    """One Tandem, as Dynamo's `Worker` drives an engine."""

    def __init__(self, session: aiohttp.ClientSession, model: Model, relay: KvEventRelay | None) -> None:
        self._session = session
        self._model = model
        self._relay = relay
        self._asking: dict[str, asyncio.Task[None]] = {}  # by Dynamo's id of the request

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["TandemEngine", WorkerConfig]:
        args = read_flags(argv)
        session = session_of(args)
        try:
            model = await model_of(session, args.model_path)
        except BaseException:
            await session.close()
            raise
        config = WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            model_name=model.path,
            served_model_name=model.name,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            tool_call_parser=args.dyn_tool_call_parser,
            reasoning_parser=args.dyn_reasoning_parser,
            enable_kv_routing=args.kv_events is not None,
        )
        relay = None if args.kv_events is None else KvEventRelay(args.kv_events, args.kv_events_replay)
        return cls(session, model, relay), config

    async def start(self, worker_id: int) -> EngineConfig:
        model = self._model
        llm = LlmRegistration(context_length=model.context_length, kv_cache_block_size=model.page_size)
        return EngineConfig(model=model.path, served_model_name=model.name, llm=llm)

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self._relay is None else [PushSource(self._relay.start)]

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Raises HttpError with Tandem's status where it has refused, CannotConnect and Disconnected where it is gone.

        A task reads, so that `abort` can end it while this waits for a first token.
        """
        body = body_of(request, self._model)
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()  # one answer's at most; None: no more come
        asking = asyncio.create_task(self._ask(body, context.id(), chunks))
        asking.add_done_callback(lambda _: chunks.put_nowait(None))
        self._asking[context.id()] = asking
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            if not asking.cancelled():
                asking.result()
        finally:
            del self._asking[context.id()]
            asking.cancel()

    async def abort(self, context: Context) -> None:
        """The client has left, and so does this: Tandem ends what nobody reads."""
        asking = self._asking.get(context.id())
        if asking is not None:
            asking.cancel()

    async def cleanup(self) -> None:
        if self._relay is not None:
            self._relay.stop()
        await self._session.close()

    async def _ask(self, body: dict[str, Any], id: str, chunks: "asyncio.Queue[GenerateChunk | None]") -> None:
        try:
            reply = await self._session.post("/v1/completions", json=body, headers={"x-request-id": id})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CannotConnect(f"Tandem does not answer: {error}") from error
        async with reply:
            if reply.status != 200:
                raise HttpError(reply.status, message_of(await reply.text()))
            async for event in events_of(reply):
                for chunk in chunks_of(event):
                    chunks.put_nowait(chunk)


def read_flags(argv: list[str] | None) -> argparse.Namespace:
    """Flags that `python -m dynamo.frontend` has too are named as there, with the same variables behind them."""
    flags = argparse.ArgumentParser(prog="tandem_worker.py", description="Tandem as a worker of NVIDIA Dynamo")
    flags.add_argument("--url", required=True, help="of a Tandem router, or of a server that needs none")
    flags.add_argument("--api-key-file", type=Path, help="its key, where it wants one")
    flags.add_argument(
        "--model-path", help="where Dynamo finds tokenizer and template (default: where Tandem has them)"
    )
    flags.add_argument(
        "--kv-events",
        metavar="tcp://HOST:PORT",
        help="where the server that computes prompts publishes (its --kv-events-config), for --router-mode kv",
    )
    flags.add_argument("--kv-events-replay", metavar="tcp://HOST:PORT", help="its `replay_endpoint`")
    flags.add_argument("--namespace", default=os.environ.get("DYN_NAMESPACE", "dynamo"))
    flags.add_argument("--component", default="tandem")
    flags.add_argument("--discovery-backend", default=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"))
    flags.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    flags.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE"))
    flags.add_argument("--dyn-tool-call-parser", help="by which Dynamo's frontend finds calls in the text")
    flags.add_argument("--dyn-reasoning-parser", help="by which it finds thoughts")
    args = flags.parse_args(argv)
    if args.kv_events is None and args.kv_events_replay is not None:
        flags.error("--kv-events-replay is of --kv-events")
    return args


def session_of(args: argparse.Namespace) -> aiohttp.ClientSession:
    headers = {}
    if args.api_key_file is not None:
        headers["authorization"] = f"Bearer {args.api_key_file.read_text().strip()}"
    return aiohttp.ClientSession(
        args.url,
        headers=headers,
        # Deadlines of requests are Tandem's, and how many run at once is for Dynamo and Tandem to say.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=MAX_LINE_BYTES,
    )


async def model_of(session: aiohttp.ClientSession, path: str | None) -> Model:
    """Its first model. Ends the process where there is none."""
    card = (await document(session, "/v1/models"))["data"][0]
    info = await document(session, "/server_info")
    server = (info.get("prefill") or [info])[0]  # of a router's first prefill, or of the server itself
    return Model(card["id"], path or card["root"], card["max_model_len"], server["page_size"])


async def document(session: aiohttp.ClientSession, path: str) -> Any:
    try:
        async with session.get(path) as reply:
            if reply.status == 200:
                return await reply.json()
            raise SystemExit(f"{reply.url} says {reply.status}: {message_of(await reply.text())}")
    except aiohttp.ClientError as error:
        raise SystemExit(str(error)) from error


# in


def body_of(request: GenerateRequest, model: Model) -> dict[str, Any]:
    """Raises HttpError for what is not passed on."""
    tokens = request["token_ids"]
    sampling = said(request.get("sampling_options"))
    stopping = said(request.get("stop_conditions"))
    output = said(request.get("output_options"))
    body: dict[str, Any] = {
        "model": model.name,
        "prompt": tokens,
        "max_tokens": model.context_length - len(tokens),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "stop_token_ids": sorted({id for name in STOP_IDS for id in stopping.pop(name, ())}),
        "cache_salt": (request.get("routing") or {}).get("cache_salt"),
    }
    body |= {name: sampling.pop(name) for name in SAMPLING if name in sampling}
    body |= {name: stopping.pop(name) for name in STOPPING if name in stopping}
    if (guided := sampling.pop("guided_decoding", None)) is not None:
        body["structured_outputs"] = said(guided)
    if "logprobs" in output:
        body["logprobs"] = 0
    sampling.pop("include_stop_str_in_output", None)  # Dynamo's, who writes the text
    left = [name for name, value in (sampling | stopping).items() if value is not False and not is_one(name, value)]
    # Tandem names alternatives by text, Dynamo wants ids. Who wants log-probabilities without any asks for 1 here.
    left += ["top_logprobs"] if output.get("logprobs", 0) > 1 else []
    left += ["prompt_logprobs"] if "prompt_logprobs" in output else []
    left += ["multi_modal_data"] if request.get("multi_modal_data") else []
    if left:
        raise HttpError(400, f"not supported by Tandem's worker for Dynamo: {', '.join(left)}")
    return body


def is_one(name: str, value: Any) -> bool:
    """Of choices: Dynamo ends an answer with the first of them that ends."""
    return name in ("n", "best_of") and value == 1


def said(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}


# out


async def events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Raises Disconnected where the answer ends before its time."""
    try:
        async for line in reply.content:
            if line.startswith(DONE):
                return
            if line.startswith(DATA):
                event: dict[str, Any] = json.loads(line.removeprefix(DATA))
                if "error" in event:
                    raise Disconnected(event["error"]["message"])
                yield event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Disconnected(f"Tandem went away: {error}") from error
    raise Disconnected("Tandem went away")


def chunks_of(event: dict[str, Any]) -> list[GenerateChunk]:
    """None of the first event, which tells the prompt, and of the last one, which has no choice."""
    return [chunk_of(choice, event["usage"]) for choice in event["choices"] if "token_ids" in choice]


def chunk_of(choice: dict[str, Any], usage: dict[str, Any]) -> GenerateChunk:
    chunk: GenerateChunk = {"index": choice["index"], "token_ids": choice["token_ids"]}
    if choice["logprobs"] is not None:
        chunk["log_probs"] = choice["logprobs"]["token_logprobs"]
        chunk["top_logprobs"] = [[] for _ in choice["token_ids"]]  # without which Dynamo shows none of it
    if choice["finish_reason"] is not None:
        chunk["finish_reason"] = choice["finish_reason"]
        chunk["completion_usage"] = usage
    return chunk


def message_of(text: str) -> str:
    """Of an error in Tandem's form; all of it, where something in between has said it."""
    try:
        message: str = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
    return message


if __name__ == "__main__":
    run(TandemEngine)
