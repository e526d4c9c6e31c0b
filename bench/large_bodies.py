"""What `/health` of a server takes while somebody sends it the largest bodies that it reads, one after the other."""

import json
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

from bench.beside import Beside, Watch, asked, milliseconds, watch

HEALTH_SECONDS = 0.02  # between two probes: a stop of the event loop is met, not slept through
TIMES = 5
VALUES = 1_000_000
OF_SERVERS = ("/tokenize", "/detokenize")
CONVERSATION = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class LargeBody:
    """One request that is much work, or refused as too much."""

    name: str
    path: str
    raw: bytes


@dataclass
class Figures:
    """Of one body, sent some times. Durations are seconds."""

    body: LargeBody
    statuses: Counter[str] = field(default_factory=Counter[str])
    answers: list[float] = field(default_factory=list[float])
    router: Watch = field(default_factory=Watch)
    decode: Watch = field(default_factory=Watch)

    def row(self) -> dict[str, object]:
        return {
            "body": self.body.name,
            "path": self.body.path,
            "megabytes": round(len(self.body.raw) / 1e6, 1),
            "answers": dict(self.statuses),
            "answer_ms": milliseconds(self.answers),
            "router_health_ms": milliseconds(self.router.health),
            "decode_health_ms": milliseconds(self.decode.health),
            "health_failures": self.router.health_failures + self.decode.health_failures,
            "memory_mb": round(self.router.memory_bytes / 1e6),
        }


def bodies() -> list[LargeBody]:
    """Those that stopped a server, or its router, before their work had bounds and left the event loop."""
    completion = {"max_tokens": 1, "temperature": 0}
    logprobs = {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 32}
    ids = [index % 500 for index in range(VALUES)]
    return [
        body("2,500,000 texts of one letter", "/tokenize", {"prompt": ["a"] * 2_500_000}),
        body("1,048,000 characters", "/tokenize", {"prompt": "word " * 209_600}),
        body("260,000 token ids", "/detokenize", {"tokens": ids[:260_000]}),
        body("1,024 prompts of 9,000 characters", "/v1/completions", {**completion, "prompt": ["word " * 1800] * 1024}),
        body("64 samples with 20 logprobs", "/v1/chat/completions", {**logprobs, "messages": CONVERSATION}),
        body("1,000,000 empty prompts", "/v1/completions", {**completion, "prompt": [""] * VALUES}),
        body("1,000,000 token ids", "/v1/completions", {**completion, "prompt": ids}),
        body("31 MB of one text, escaped", "/v1/completions", {**completion, "prompt": "\n" * 15_500_000}),
    ]


def body(name: str, path: str, fields: dict[str, object]) -> LargeBody:
    return LargeBody(name, path, json.dumps(fields).encode())


def measure(router_port: int, roots: list[int]) -> list[dict[str, object]]:
    """One row for each. `roots` are the processes whose memory is looked at, with all that they started."""
    decode_port = port_of_decode(router_port)
    return [sent(large, router_port, decode_port, roots).row() for large in bodies()]


def sent(large: LargeBody, router_port: int, decode_port: int, roots: list[int]) -> Figures:
    """To the router where it has the page, else to the decode server."""
    port = decode_port if large.path in OF_SERVERS else router_port
    figures = Figures(large)
    at_router = Beside(watch, router_port, roots, HEALTH_SECONDS)
    at_decode = Beside(watch, decode_port, roots, HEALTH_SECONDS)
    for _ in range(TIMES):
        began = time.monotonic()
        try:
            figures.statuses[str(asked(port, "POST", large.path, large.raw))] += 1
        except OSError as error:
            figures.statuses[type(error).__name__] += 1
        figures.answers.append(time.monotonic() - began)
    figures.router, figures.decode = at_router.end(), at_decode.end()
    return figures


def port_of_decode(router_port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{router_port}/workers") as answer:
        workers = json.load(answer)["workers"]
    url = next(worker["url"] for worker in workers if worker["worker_type"] == "decode")
    return int(url.rsplit(":", 1)[1])
