"""Clients of the router: each sends one request after another, with its own deadline, and judges what comes back.

    success         all tokens, each as expected
    failed          one error with a code of the closed list, in time
    ordered         ended by an abort that the chaos run ordered
    left            the client itself closed its connection
    late            no token a second after its deadline, or a gap between two tokens beyond the limit; of a document
                    the client sees no token before its end, so it has both times
    wrong           a token that is not the expected one, or a wrong number of them
    mistake         a code that no fault explains, such as logits that are not finite or a room that is taken
    unnamed         ended without a code: a torn answer, an unknown code, a broken connection while the router lived

A router that was killed takes its connections with it. As the OpenAI client does, a client then connects again and
sends the request once more, if it has not seen a byte of the answer; otherwise that is the code `router_killed`.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

import httpx
from oracle import OUTPUT_TOKENS, Case

from tandem.server.api.errors import RULES

GRACE_S = 1.0
RECONNECT_S = 0.05
CODES = {code.value for code in RULES}
MISTAKES = {
    *("internal_error", "engine_failed", "invalid_logits", "layout_mismatch", "protocol", "out_of_pages", "queue_full"),
    *("invalid_json", "invalid_value", "invalid_combination", "invalid_grammar", "refused_by_template", "unsupported"),
    *("context_length_exceeded", "duplicate_rid", "duplicate_room", "host_not_allowed"),
}
ORDERED_CODES = {"aborted", "peer_aborted"}
ROUTER_KILLED = "router_killed"


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILED = "failed"
    ORDERED = "ordered"
    LEFT = "left"
    LATE = "late"
    WRONG = "wrong"
    MISTAKE = "mistake"
    UNNAMED = "unnamed"


class Failed(Exception):
    """The answer is an error."""

    def __init__(self, error: dict[str, object]) -> None:
        super().__init__(str(error))
        self.code = str(error.get("code"))
        self.stage = str(error.get("stage"))
        self.detail = str(error.get("message"))


class Unusable(Exception):
    """The answer is not what it should be."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


@dataclass(eq=False)
class Ask:
    """One request and what became of it. Times are of `time.monotonic`."""

    number: int
    case: Case
    max_tokens: int
    streams: bool
    wants_logprobs: bool
    deadline_s: float
    rid: str
    began: float = 0.0
    first_token_at: float | None = None
    ended: float = 0.0
    outcome: Outcome | None = None
    code: str = ""
    stage: str = ""
    detail: str = ""
    path: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def body(self) -> dict[str, object]:
        sampling = {"temperature": 0, "max_new_tokens": self.max_tokens, "ignore_eos": True}
        return {
            "input_ids": list(self.case.prompt),
            "sampling_params": sampling,
            "stream": self.streams,
            "rid": self.rid,
            "return_logprob": self.wants_logprobs,
        }

    def story(self) -> str:
        kind = "stream" if self.streams else "document"
        first = "none" if self.first_token_at is None else f"{self.first_token_at - self.began:.2f} s"
        return (
            f"{self.rid} ({kind}, {len(self.case.prompt)} + {self.max_tokens} tokens, limit {self.deadline_s:.0f} s): "
            f"{self.outcome} {self.code} at {self.stage or '-'} after {self.seconds:.2f} s, first token {first};"
            f" {self.detail}"
        )


@dataclass
class Order:
    """An abort that was sent: at whom, and when it may have reached them."""

    rids: frozenset[str] | None  # None: everybody
    began: float
    ended: float

    def concerns(self, ask: Ask) -> bool:
        return (self.rids is None or ask.rid in self.rids) and ask.began <= self.ended and ask.ended >= self.began


@dataclass
class Clients:
    """All of them, and everything they have asked so far."""

    url: str
    cases: list[Case]
    random: Random
    stall_s: float  # the bound of the gap between two tokens, as the client sees it
    asks: list[Ask] = field(default_factory=list)
    router_is_up: asyncio.Event = field(default_factory=asyncio.Event)
    router_killed_at: list[float] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    is_over: bool = False
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> "Clients":
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=False)
        self.router_is_up.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.aclose()

    @property
    def http(self) -> httpx.AsyncClient:
        assert self._http is not None
        return self._http

    @property
    def running(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.outcome is None]

    async def work(self) -> None:
        """One client: asks until it is over, and then until its last answer is here."""
        while not self.is_over:
            await self.ask(self.draw())

    def draw(self) -> Ask:
        draw = self.random
        streams = draw.random() < 0.4
        return self.make(
            draw.choice(self.cases),
            max_tokens=draw.randint(1, OUTPUT_TOKENS),
            streams=streams,
            wants_logprobs=draw.random() < 0.1,
            deadline_s=draw.uniform(8, 20),
        )

    def make(self, case: Case, *, max_tokens: int, streams: bool, wants_logprobs: bool, deadline_s: float) -> Ask:
        number = next(self._numbers)
        return Ask(number, case, max_tokens, streams, wants_logprobs, deadline_s, rid=f"n{number}")

    async def ask(self, ask: Ask) -> Ask:
        """Ask, and wait for the end, whatever it is."""
        self.asks.append(ask)
        ask.began = time.monotonic()
        ask.task = asyncio.create_task(self._ask(ask))
        await asyncio.wait([ask.task])
        ask.ended = time.monotonic()
        if ask.task.cancelled():
            ask.outcome = Outcome.LEFT
        elif (error := ask.task.exception()) is not None:
            raise error
        return ask

    def leave(self, ask: Ask) -> None:
        """Close the connection, wherever the answer is."""
        assert ask.task is not None
        ask.task.cancel()

    def settle(self) -> None:
        """Once all have ended: tell who was aborted by order from who failed."""
        for ask in self.asks:
            if (
                ask.outcome is Outcome.FAILED
                and ask.code in ORDERED_CODES
                and any(o.concerns(ask) for o in self.orders)
            ):
                ask.outcome = Outcome.ORDERED

    # --- one request ------------------------------------------------------------------------------------------------

    async def _ask(self, ask: Ask) -> None:
        limit_s = ask.deadline_s + GRACE_S + (0.0 if ask.streams else self.stall_s)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + limit_s) as limit:
                await self._until_answered(ask, limit)
            ask.outcome = Outcome.SUCCESS
        except TimeoutError:
            ask.outcome, ask.detail = Outcome.LATE, "nothing came"
        except Unusable as unusable:
            ask.outcome, ask.detail = unusable.outcome, str(unusable)
        except Failed as failed:
            ask.code, ask.stage, ask.detail = failed.code, failed.stage, failed.detail
            ask.outcome = outcome_of(failed.code)
        except httpx.HTTPError as error:
            ask.detail = f"{type(error).__name__} {error}".strip()
            ask.outcome = Outcome.UNNAMED
            if self._router_died_during(ask):
                ask.outcome, ask.code = Outcome.FAILED, ROUTER_KILLED

    async def _until_answered(self, ask: Ask, limit: asyncio.Timeout) -> None:
        """Send it; again, when the router was killed before a byte of the answer came."""
        while True:
            left_s = ask.began + ask.deadline_s - time.monotonic()
            try:
                await self._send(ask, max(0.001, left_s), limit)
                return
            except httpx.ConnectError:
                if not self._router_died_during(ask):
                    raise
            except httpx.HTTPError:
                if not self._router_died_during(ask) or ask.first_token_at is not None or left_s < RECONNECT_S:
                    raise
            ask.rid = f"n{ask.number}-{time.monotonic_ns()}"  # the first life's half may still hold the other one
            await self.router_is_up.wait()
            await asyncio.sleep(RECONNECT_S)

    def _router_died_during(self, ask: Ask) -> bool:
        return not self.router_is_up.is_set() or any(at >= ask.began for at in self.router_killed_at)

    async def _send(self, ask: Ask, left_s: float, limit: asyncio.Timeout) -> None:
        headers = {"x-request-timeout-ms": str(int(left_s * 1000)), "connection": "close"}
        async with self.http.stream("POST", f"{self.url}/generate", json=ask.body(), headers=headers) as response:
            if response.status_code != 200:
                raise Failed(error_of(await response.aread()))
            ask.path = response.headers.get("x-tandem-path", "")
            if ask.streams:
                last = await self._last_event(ask, response, limit)
            else:
                last = json.loads(await response.aread())
        if "error" in last:
            raise Failed(last["error"])
        self._judge(ask, last, is_whole=True)

    async def _last_event(self, ask: Ask, response: httpx.Response, limit: asyncio.Timeout) -> dict:
        """The event before [DONE], or the error that ends the stream. All before are judged as they come."""
        last: dict | None = None
        async for event in events(response):
            if event is None:
                break
            if last is not None and "error" in last:
                raise Unusable(Outcome.UNNAMED, f"{event} after an error")
            last = event
            ask.first_token_at = ask.first_token_at or time.monotonic()
            limit.reschedule(asyncio.get_running_loop().time() + self.stall_s + GRACE_S)
            if "error" not in event:
                self._judge(ask, event, is_whole=False)
        else:
            if last is None or "error" not in last:
                raise Unusable(Outcome.UNNAMED, f"the stream ends without [DONE] after {last}")
        if last is None:
            raise Unusable(Outcome.UNNAMED, "an empty stream")
        return last

    def _judge(self, ask: Ask, answer: dict, *, is_whole: bool) -> None:
        tokens = answer["output_ids"]
        if not ask.case.allows(tokens) or (is_whole and len(tokens) != ask.max_tokens):
            expected = list(ask.case.tokens[: ask.max_tokens])
            raise Unusable(Outcome.WRONG, f"{answer['meta_info']}: {tokens}, not {expected}")
        if is_whole:
            ask.path = answer["meta_info"].get("path", ask.path)


def outcome_of(code: str) -> Outcome:
    if code in MISTAKES:
        return Outcome.MISTAKE
    return Outcome.FAILED if code in CODES else Outcome.UNNAMED


def error_of(body: bytes) -> dict[str, object]:
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        raise Unusable(Outcome.UNNAMED, f"an error that is none: {body[:300]!r}") from None


async def events(response: httpx.Response) -> AsyncIterator[dict | None]:
    """The documents of a server-sent event stream; None for its end mark."""
    async for line in response.aiter_lines():
        data = line.strip().removeprefix("data:").strip()
        if data:
            yield None if data == "[DONE]" else json.loads(data)
