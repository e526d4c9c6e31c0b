"""Streams of OpenAI's `/v1/completions`, and when their tokens came: the same client for every server."""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

DEADLINE_S = 600.0


class Unanswered(Exception):
    """A server refused, broke off, or made another number of tokens than it was asked for."""


@dataclass
class Stream:
    """One answer. Times are seconds of `time.perf_counter`."""

    began: float
    events: list[float] = field(default_factory=list[float])
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.events[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.events, self.events[1:], strict=False)]

    def tokens_between(self, after: float, until: float) -> float:
        """Where events have several tokens each, all are taken to have as many."""
        return sum(after < event <= until for event in self.events) * self.tokens / len(self.events)


@dataclass(frozen=True)
class Address:
    port: int
    model: str
    fields: dict[str, object] = field(default_factory=dict[str, object])  # of this server's own; None: not sent to it


async def ask(server: Address, prompt: str, tokens: int) -> Stream:
    """Raises Unanswered. HTTP/1.0: the answer is what comes until the connection ends, in no chunks."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    raw = json.dumps({name: value for name, value in (body | server.fields).items() if value is not None}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    stream = Stream(time.perf_counter())
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
            writer.write(head.encode() + b"\r\n\r\n" + raw)
            try:
                status = (await reader.readline()).split()
                if status[1:2] != [b"200"]:
                    raise Unanswered(f"{b' '.join(status).decode()}: {(await reader.read(2000)).decode()}")
                await read_events(reader, stream, tokens)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error
    if stream.tokens != tokens or not stream.events:
        raise Unanswered(f"{stream.tokens} tokens for {tokens}")
    return stream


async def read_events(reader: asyncio.StreamReader, stream: Stream, most: int) -> None:
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if choices := event.get("choices"):
            stream.events.append(time.perf_counter())
            if choices[0].get("finish_reason") == "length":
                stream.tokens = most  # of servers that tell no usage
        if event.get("usage"):
            stream.tokens = event["usage"]["completion_tokens"]


async def prefill_rate(server: Address, prompts: list[str], tokens: int) -> float:
    """Prompt tokens per second until the first token is there, of prompts of `tokens` one after the other."""
    seconds = [(await ask(server, prompt, 1)).ttft for prompt in prompts]
    return tokens / statistics.median(seconds)


@dataclass(frozen=True)
class Decoded:
    """Tokens per second of several streams that are asked for at once."""

    whole: float  # from the first token of any to the last of all: the prompts of those who begin later are in it
    together: float  # from the last one's first token to the first one's last; 0: they never decoded all at once


async def decode_rates(server: Address, prompts: list[str], tokens: int) -> Decoded:
    streams = await asyncio.gather(*(ask(server, prompt, tokens) for prompt in prompts))
    began, ended = min(stream.events[0] for stream in streams), max(stream.events[-1] for stream in streams)
    all_began, first_ended = max(stream.events[0] for stream in streams), min(stream.events[-1] for stream in streams)
    if ended == began:
        raise Unanswered("all tokens came at once")
    together = sum(stream.tokens_between(all_began, first_ended) for stream in streams)
    return Decoded(
        (sum(stream.tokens for stream in streams) - 1) / (ended - began),
        together / (first_ended - all_began) if first_ended > all_began else 0.0,
    )


@dataclass(frozen=True)
class Served:
    requests_per_s: float
    ttft_p50_s: float
    itl_p99_s: float


async def served(server: Address, prompts: list[str], tokens: int, clients: int) -> Served:
    """`clients` at a time, each of which asks again as soon as it has its answer, until all prompts are answered."""
    waiting = list(prompts)
    streams: list[Stream] = []

    async def client() -> None:
        while waiting:
            streams.append(await ask(server, waiting.pop(), tokens))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    return Served(
        len(prompts) / seconds,
        statistics.median(stream.ttft for stream in streams),
        gaps[len(gaps) * 99 // 100] if gaps else 0.0,
    )
