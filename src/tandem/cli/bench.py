"""`tandem bench`: load for any OpenAI-compatible server, and what its users would have felt.

    closed loop   `--concurrency N`: N clients, each sends its next request when the last one is answered
    open loop     `--rate R`: requests arrive as a Poisson process of R per second, whatever the server does

Prompts are random words, as many as `--input-len` tokens need: the ratio is asked from /tokenize where the server has
it. What the server counted is reported. All randomness comes from `--seed`.

    TTFT   request sent -> first piece of text        ITL   between two pieces of text
    TPOT   (E2E - TTFT) / (output tokens - 1)         E2E   request sent -> end of the stream
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any  # JSON documents of servers

import httpx
from msgspec import Struct

from tandem.cli.client import (
    EventStream,
    ProgressLine,
    ServerTrouble,
    add_server_arguments,
    client_options,
    raise_for_status,
    read_answer,
    served_model,
    trouble,
)
from tandem.cli.failure import CommandFailed
from tandem.cli.flags import count, finite, natural
from tandem.cli.plain_text import plain
from tandem.server.http_pool import PooledTransport

WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend
"""
WORDS = tuple(WORD_LIST.split())
PERCENTILES = (50, 90, 99)
SAMPLE_WORDS = 200
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Tokens(Struct):
    """The answer of /tokenize."""

    count: int | None = None
    tokens: list[Any] | None = None


@dataclass(slots=True)
class RequestTimings:
    """One request, times in seconds of the monotonic clock."""

    sent: float
    pieces: list[float] = field(default_factory=list[float])  # when each piece of text came
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    path: str = ""
    failure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a server under load."
    add_server_arguments(parser)
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=count, metavar="N", help="closed loop of N clients (default: 8)")
    loop.add_argument("--rate", type=finite, metavar="R", help="open loop: R requests per second, Poisson")
    parser.add_argument("--num-prompts", type=count, default=64, metavar="N", help="requests (default: 64)")
    parser.add_argument("--input-len", type=count, default=128, metavar="TOKENS", help="prompt length (default: 128)")
    parser.add_argument("--output-len", type=count, default=64, metavar="TOKENS", help="answer length (default: 64)")
    parser.add_argument("--endpoint", choices=tuple(PATHS), default="completions", help="default: completions")
    parser.add_argument(
        "--warmup", type=natural, default=2, metavar="N", help="requests before, not counted (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    if args.rate is None and args.concurrency is None:
        args.concurrency = 8
    if args.rate is not None and args.rate <= 0:
        raise CommandFailed("--rate must be positive", is_wrong_usage=True)
    model = served_model(args)
    samples, seconds = asyncio.run(measure(args, model))
    report = make_report(args, model, samples, seconds)
    print(json.dumps(report) if args.json else plain(report_text(report)))
    if not report["completed"]:
        raise CommandFailed(f"no request succeeded: {', '.join(report['failures'])}")
    return 0


async def measure(args: argparse.Namespace, model: str) -> tuple[list[RequestTimings], float]:
    """All samples, and the seconds from the first request to the last answer."""
    async with httpx.AsyncClient(**client_options(args), transport=PooledTransport()) as client:
        rng = random.Random(args.seed)
        words_per_token = await learn_words_per_token(client, model)
        prompts = [make_prompt(rng, args.input_len, words_per_token) for _ in range(args.warmup + args.num_prompts)]
        load = LoadGenerator(client, args, model)
        for prompt in prompts[: args.warmup]:
            await load.send(prompt)
        if args.warmup and all(sample.failure for sample in load.samples):
            raise ServerTrouble(load.samples[0].failure)
        load.samples.clear()
        load.progress = ProgressLine(args.num_prompts)
        began = time.monotonic()
        if args.rate is None:
            await closed_loop(load, prompts[args.warmup :], args.concurrency)
        else:
            await open_loop(load, prompts[args.warmup :], arrival_times(rng, args.rate, args.num_prompts))
        return load.samples, time.monotonic() - began


class LoadGenerator:
    """Sends requests and keeps their samples."""

    def __init__(self, client: httpx.AsyncClient, args: argparse.Namespace, model: str) -> None:
        self._client = client
        self._args = args
        self._model = model
        self.samples: list[RequestTimings] = []
        self.progress: ProgressLine | None = None

    async def send(self, prompt: str) -> None:
        sample = RequestTimings(sent=time.monotonic())
        try:
            await self._stream(prompt, sample)
        except httpx.HTTPError as error:
            sample.failure = str(trouble(error, self._args.url))
        except ServerTrouble as error:
            sample.failure = str(error)
        sample.ended = time.monotonic()
        self.samples.append(sample)
        if self.progress is not None:
            failed = sum(bool(sample.failure) for sample in self.samples)
            self.progress.show(len(self.samples), f"answered, {failed} failed")

    async def _stream(self, prompt: str, sample: RequestTimings) -> None:
        async with self._client.stream("POST", PATHS[self._args.endpoint], json=self._body(prompt)) as response:
            if not response.is_success:
                raise_for_status(response.status_code, await response.aread())
            sample.path = response.headers.get("x-tandem-path", "")
            stream = EventStream()
            async for line in response.aiter_lines():
                for chunk in stream.take(line):
                    if any(choice.piece for choice in chunk.choices or []):
                        sample.pieces.append(time.monotonic())
                    if chunk.usage is not None:
                        sample.input_tokens = chunk.usage.prompt_tokens or sample.input_tokens
                        sample.output_tokens = chunk.usage.completion_tokens or sample.output_tokens
            stream.end()
        sample.output_tokens = sample.output_tokens or len(sample.pieces)

    def _body(self, prompt: str) -> dict[str, Any]:
        is_chat = self._args.endpoint == "chat"
        return {
            "model": self._model,
            **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
            "max_tokens": self._args.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def closed_loop(load: LoadGenerator, prompts: list[str], concurrency: int) -> None:
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            await load.send(prompt)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(prompts)))))


async def open_loop(load: LoadGenerator, prompts: list[str], times: list[float]) -> None:
    began = time.monotonic()

    async def at(seconds: float, prompt: str) -> None:
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        await load.send(prompt)

    await asyncio.gather(*(at(seconds, prompt) for seconds, prompt in zip(times, prompts, strict=True)))


def arrival_times(rng: random.Random, rate: float, count: int) -> list[float]:
    """Seconds from the start, exponential gaps; the first request comes at 0."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times


async def learn_words_per_token(client: httpx.AsyncClient, model: str) -> float:
    """1.0 when the server cannot tell."""
    text = " ".join(random.Random(0).choices(WORDS, k=SAMPLE_WORDS))
    try:
        response = await client.post("/tokenize", json={"model": model, "prompt": text})
        raise_for_status(response.status_code, response.content)
        answer = read_answer(response.content, Tokens)
    except (httpx.HTTPError, ServerTrouble):
        return 1.0
    count = answer.count or len(answer.tokens or [])
    return SAMPLE_WORDS / count if count > 0 else 1.0


def make_prompt(rng: random.Random, tokens: int, words_per_token: float) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, round(tokens * words_per_token))))


def make_report(args: argparse.Namespace, model: str, samples: list[RequestTimings], seconds: float) -> dict[str, Any]:
    good = [sample for sample in samples if not sample.failure and sample.pieces]
    gaps = [b - a for sample in good for a, b in itertools.pairwise(sample.pieces)]
    per_token = [(s.ended - s.pieces[0]) / (s.output_tokens - 1) for s in good if s.output_tokens > 1]
    input_tokens = sum(sample.input_tokens for sample in good)
    output_tokens = sum(sample.output_tokens for sample in good)
    return {
        "url": args.url,
        "model": model,
        "load": {"rate": args.rate} if args.rate is not None else {"concurrency": args.concurrency},
        "seed": args.seed,
        "num_prompts": len(samples),
        "completed": len(good),
        "failed": len(samples) - len(good),
        "failures": dict(Counter(s.failure or "answered without text" for s in samples if s not in good)),
        "paths": dict(Counter(sample.path for sample in good if sample.path)),
        "seconds": round(seconds, 4),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": round(len(good) / seconds, 4),
        "input_tokens_per_second": round(input_tokens / seconds, 3),
        "output_tokens_per_second": round(output_tokens / seconds, 3),
        "ttft_ms": summary([sample.pieces[0] - sample.sent for sample in good]),
        "itl_ms": summary(gaps),
        "tpot_ms": summary(per_token),
        "e2e_ms": summary([sample.ended - sample.sent for sample in good]),
    }


def summary(seconds: list[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None when nothing was measured."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    numbers = {"mean": sum(ordered) / len(ordered), **{f"p{p}": percentile(ordered, p) for p in PERCENTILES}}
    return {name: round(value * 1000, 3) for name, value in (numbers | {"max": ordered[-1]}).items()}


def percentile(ordered: list[float], percent: float) -> float:
    """Linear between the two nearest ranks; `ordered` is sorted and not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report_text(report: dict[str, Any]) -> str:
    load = ", ".join(f"{name} {value:g}" for name, value in report["load"].items())
    lines = [
        f"{report['model']} at {report['url']}: {load}, seed {report['seed']}",
        f"{report['completed']} of {report['num_prompts']} requests in {report['seconds']:.2f} s: "
        f"{report['requests_per_second']:.2f} requests/s, {report['output_tokens_per_second']:.1f} output tokens/s, "
        f"{report['input_tokens_per_second']:.1f} input tokens/s",
        "",
        f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        if numbers := report[f"{name}_ms"]:
            lines.append(f"{name.upper():<6}" + "".join(f"{value:>10.1f}" for value in numbers.values()))
    if report["paths"]:
        lines += ["", "path: " + ", ".join(f"{path} {count}" for path, count in report["paths"].items())]
    lines += [f"failed: {count} x {failure}" for failure, count in report["failures"].items()]
    return "\n".join(lines)
