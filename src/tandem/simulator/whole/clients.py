"""Clients of a simulated cluster: they write bytes, read bytes, and know what each request has to end with.

A patient client waits for its answer. A careless one leaves, reads slowly, stops in the middle of its body or has its
request aborted; nothing is asked of its answer but that right tokens are right as far as they go.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, Protocol  # Any: JSON documents

import httptools
import msgspec
from msgspec import structs

from tandem.sampling import SamplingParams
from tandem.server.api.detokenizer import num_shared
from tandem.server.api.sample_requests import hashed
from tandem.server.router.app import CONTROL_SECONDS
from tandem.simulator.model import MASK, kv_content
from tandem.simulator.whole.engine import EOS_TOKEN, LOGPROB, prompt_logprob, right_tokens, vector_of
from tandem.simulator.whole.sockets import Machine
from tandem.simulator.whole.templates import tokenizer

CHAT = "/v1/chat/completions"
VOCABULARY = 512
PROMPT_LENGTHS = (1, 3, 12, 40, 90)
MOST_LIKELY = 5  # tokens, of which one is chosen where /generate is asked to sample
SAMPLING = {
    "top_p": (0.5, 0.9),
    "min_p": (0.05,),
    "presence_penalty": (-1.0, 0.5, 1.5),
    "frequency_penalty": (-0.5, 0.3, 1.2),
    "repetition_penalty": (0.8, 1.1, 1.5),
}
NEVER_SAID = "\u2603\u2603\u2603"  # a stop string that must be looked for and is not there
PATIENCE_S = CONTROL_SECONDS + 1.0  # for whatever is no generation: a router sees an order through, whoever listens
LONGEST_WAIT_S = 45.0  # then a client gives up, which is a violation


class Answers(Protocol):
    """What an engine has to say: tokens and their log-probabilities."""

    def __call__(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]: ...

    def of_prompt(self, prompt: Sequence[int]) -> list[float]:
        """The log-probability of each of its tokens behind the first."""
        ...

    def vector(self, prompt: Sequence[int]) -> list[float]: ...


class PlainAnswers:
    """Of an engine that knows one answer to each prompt, and to each grammar."""

    def __call__(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
        matcher = None
        if params.grammar:
            matcher = tokenizer().open_vocabulary().matcher(params.grammar, eos_ids=(EOS_TOKEN,))
        ends = {"ignore_eos": params.ignore_eos, "matcher": matcher}
        return [(token, LOGPROB) for token in right_tokens(prompt, count, vocab_size=VOCABULARY, **ends)]

    def of_prompt(self, prompt: Sequence[int]) -> list[float]:
        return [prompt_logprob(token, position) for position, token in enumerate(prompt[1:], start=1)]

    def vector(self, prompt: Sequence[int]) -> list[float]:
        """Whatever the number of workers."""
        kv_sum = 0
        for position, token in enumerate(prompt):
            kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK
        return vector_of(kv_sum)


PLAIN_ANSWERS = PlainAnswers()


class Conduct(StrEnum):
    PATIENT = "patient"
    LEAVES = "leaves"
    SLOW = "slow"  # reads a little now and then
    HALF = "half"  # never sends the end of its body
    ABORTED = "aborted"  # by rid, over another connection


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request."""

    number: int
    path: str
    prompt: tuple[int, ...]
    text: str  # instead of `prompt`, where there is one
    max_new: int
    is_streamed: bool
    ignore_eos: bool
    timeout_s: float
    conduct: Conduct
    scores: int = 0  # logprobs are asked for, with so many alternatives less one
    num_samples: int = 1
    priority: int | None = None
    routed: dict[str, Any] = field(default_factory=dict[str, Any])  # what a router has put into the body
    rendered_at: int = 0  # Unix seconds that the chat template shows; 0: it shows none
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])  # `draw_sampling`; nothing: greedy
    answers: Answers = PLAIN_ANSWERS  # of the engines that are asked

    @property
    def rid(self) -> str:
        return f"ask-{self.number}"

    @property
    def _precedence(self) -> dict[str, Any]:
        return {} if self.priority is None else {"priority": self.priority}

    def body(self) -> dict[str, Any]:
        if self.path == "/generate":
            given: dict[str, Any] = {"text": self.text} if self.text else {"input_ids": self.prompt}
            sampling = {"max_new_tokens": self.max_new, "ignore_eos": self.ignore_eos, "temperature": 0}
            sampling |= {"stop": [NEVER_SAID], "top_k": MOST_LIKELY, "skip_special_tokens": True}
            sampling |= {"sampling_seed": self.number, **self.sampling} if self.sampling else {}
            given |= self._precedence
            scores = {"return_logprob": bool(self.scores), "top_logprobs_num": max(0, self.scores - 1)}
            return {**given, **scores, "sampling_params": sampling, "stream": self.is_streamed, "rid": self.rid}
        rest = {"max_tokens": self.max_new, "stream": self.is_streamed, "rid": self.rid, "temperature": 0}
        rest |= {"ignore_eos": self.ignore_eos, "stop": NEVER_SAID, "n": self.num_samples, "seed": self.number}
        rest |= self._precedence | self.sampling | self.routed
        if self.is_streamed:
            rest |= {"stream_options": {"include_usage": True}}
        if self.path == "/v1/completions":
            scores = {"logprobs": self.scores} if self.scores else {}
            return {"prompt": self.text or self.prompt, **rest, **scores}
        scores = {"logprobs": True, "top_logprobs": self.scores} if self.scores else {}
        scores |= {"rendered_at": self.rendered_at} if self.rendered_at else {}
        return {"messages": [{"role": "user", "content": self.text}], **rest, **scores}

    def params(self, sample: int) -> SamplingParams:
        """What the body means to an engine, of which the log-probabilities of all tokens are asked."""
        greedy = SamplingParams(temperature=0.0, ignore_eos=self.ignore_eos, logprobs=True)
        if not self.sampling:
            return greedy
        seed = self.number if sample == 0 else hashed(b"seed", self.number, sample)
        top_k = MOST_LIKELY if self.path == "/generate" else 0
        return structs.replace(greedy, seed=seed, top_k=top_k, **self.sampling)

    def right_ids(self, sample: int = 0) -> list[int]:
        return [token for token, _ in self.right_scores(sample)]

    def right_scores(self, sample: int = 0) -> list[tuple[int, float]]:
        return self.answers(self._prompt_ids(), self.max_new, self.params(sample))

    def _prompt_ids(self) -> Sequence[int]:
        if self.path == CHAT:
            message, shower = {"role": "user", "content": self.text}, tokenizer(shows_time=bool(self.rendered_at))
            rendered = shower.render_chat(
                [message], add_generation_prompt=True, variables={}, rendered_at=self.rendered_at
            )
            return tokenizer().encode(rendered.text, add_special_tokens=False)
        return tokenizer().encode(self.text) if self.text else self.prompt

    def right_text(self, sample: int = 0) -> str:
        return text_behind(self._prompt_ids(), self.right_ids(sample))


def text_behind(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What decoding prompt and answer has more than decoding the prompt: a character may begin in one and end in the
    other."""
    said = tokens[:-1] if tokens and tokens[-1] == EOS_TOKEN else tokens
    before, whole = tokenizer().decode(prompt), tokenizer().decode([*prompt, *said])
    return whole[num_shared(before, whole) :]


@dataclass(slots=True)
class Answer:
    """What a client has seen. Times are seconds since it began."""

    ask: ClientRequest
    began_ns: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    first_s: float | None = None
    ended_s: float | None = None
    longest_gap_s: float = 0.0
    is_whole: bool = False  # ended as HTTP has it
    trouble: str = ""  # of the connection
    last_s: float = 0.0
    rights: Any = None  # what has to be said in each sample, where the form of the answer is asked for (`forms.py`)
    has_given_up: bool = False  # after LONGEST_WAIT_S

    def events(self) -> list[Any]:
        """Documents of a stream, or the one document; empty where it cannot be read."""
        text = bytes(self.body)
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            lines = [event.partition(b"data: ")[2] for event in text.split(b"\n\n")]  # some events have names
            return [msgspec.json.decode(line) for line in lines if line.endswith(b"}")]
        with suppress(msgspec.DecodeError):
            return [msgspec.json.decode(text)]
        return []

    @property
    def error(self) -> dict[str, Any] | None:
        for event in self.events()[-1:]:
            if isinstance(event, dict) and isinstance(event.get("error"), dict):
                return event["error"]
        return None


class _Reader:
    """What the parser calls."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.answer.body += piece

    def on_message_complete(self) -> None:
        self.answer.is_whole = True


def draw_ask(
    random: Random,
    number: int,
    *,
    careless: float,
    timeouts: Sequence[float],
    lengths: Sequence[int] = PROMPT_LENGTHS,
) -> ClientRequest:
    path = random.choice(("/generate", "/generate", "/generate", "/v1/completions", "/v1/chat/completions"))
    base = random.choice((0, 0, 7))  # some prompts share a prefix
    length = random.choice(lengths)
    prompt = tuple(16 + (base * 31 + index * 7 + (0 if index < 16 else number * 13)) % 480 for index in range(length))
    text = "" if path == "/generate" and random.random() < 0.8 else f"What is {random.randrange(99)} plus {number}?"
    conduct = Conduct.PATIENT
    if random.random() < careless:
        conduct = random.choice((Conduct.LEAVES, Conduct.SLOW, Conduct.HALF, Conduct.ABORTED))
    return ClientRequest(
        number=number,
        path=path,
        prompt=prompt,
        text=text,
        max_new=random.choice((1, 4, 16, 40)),
        is_streamed=random.random() < 0.6,
        ignore_eos=random.random() < 0.7,
        timeout_s=random.choice(timeouts),
        conduct=conduct,
        scores=random.choice((0, 0, 0, 1, 3)),
        num_samples=random.choice((1, 1, 1, 2)) if path != "/generate" else 1,
    )


def draw_sampling(random: Random) -> dict[str, Any]:
    """How tokens are to be chosen, by the names that all dialects have; nothing: greedily, as in every third."""
    if not random.randrange(3):
        return {}
    found: dict[str, Any] = {"temperature": random.choice((0.0, 0.5, 1.0, 1.5))}
    for name, values in SAMPLING.items():
        if random.random() < 0.3:
            found[name] = random.choice(values)
    if random.random() < 0.2:
        found["logit_bias"] = {random.randrange(3, VOCABULARY): random.choice((-100.0, -5.0, 5.0)) for _ in range(4)}
    return found


def as_of_blocks(ask: ClientRequest) -> ClientRequest:
    """Without what tokens have that are found one behind the other."""
    sampling = {name: value for name, value in ask.sampling.items() if not name.endswith("penalty")}
    return replace(ask, scores=0, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Keys:
    """Empty where nobody needs one."""

    user: str = ""
    admin: str = ""


def shown(key: str) -> str:
    """The line of a head."""
    return f"Authorization: Bearer {key}\r\n" if key else ""


async def ask_at(host: str, port: int, ask: ClientRequest, random: Random, keys: Keys) -> Answer:
    """Ask, and see what comes. Never raises for what a server does."""
    answer = Answer(ask, Machine.kernel.now)
    try:
        async with asyncio.timeout(LONGEST_WAIT_S):
            await _exchange(host, port, ask, answer, random, keys)
    except TimeoutError:
        answer.trouble = f"no end within {LONGEST_WAIT_S:g} s"
        answer.has_given_up = True
    except OSError as error:
        answer.trouble = f"{type(error).__name__} {error}"
    except httptools.HttpParserError as error:
        answer.trouble = f"not HTTP: {error}"
    answer.ended_s = _since(answer)
    return answer


def _since(answer: Answer) -> float:
    return (Machine.kernel.now - answer.began_ns) / 1e9


async def _exchange(host: str, port: int, ask: ClientRequest, answer: Answer, random: Random, keys: Keys) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
    aborting: asyncio.Task[object] | None = None
    try:
        body = msgspec.json.encode(ask.body())
        head = (
            f"POST {ask.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"X-Request-Timeout-Ms: {int(ask.timeout_s * 1000)}\r\nContent-Length: {len(body)}\r\n"
            f"{shown(keys.user)}Connection: close\r\n\r\n"
        ).encode()
        sent = head + (body[: len(body) // 2] if ask.conduct is Conduct.HALF else body)
        writer.write(sent)
        await writer.drain()
        if ask.conduct is Conduct.HALF:
            await asyncio.sleep(random.random() * 8)
            return
        if ask.conduct is Conduct.ABORTED:
            aborting = asyncio.ensure_future(_abort(host, port, ask, random.random(), keys))
        leaves_at = random.random() if ask.conduct is Conduct.LEAVES else None
        await _read(reader, answer, random, ask.conduct, leaves_at)
    finally:
        if aborting is not None:
            aborting.cancel()
        writer.transport.abort() if random.random() < 0.5 else writer.close()


async def _abort(host: str, port: int, ask: ClientRequest, after_s: float, keys: Keys) -> None:
    await asyncio.sleep(after_s)
    await simple(host, port, "POST", "/abort_request", {"rid": ask.rid}, key=keys.admin)


async def _read(
    reader: asyncio.StreamReader, answer: Answer, random: Random, conduct: Conduct, leaves_at: float | None
) -> None:
    parsing = _Reader(answer)
    while not answer.is_whole:
        try:
            async with asyncio.timeout(None if leaves_at is None else max(0.0, leaves_at - _since(answer))):
                data = await reader.read(1 << 14)
        except TimeoutError:
            if leaves_at is not None:
                return
            raise
        now = _since(answer)
        if not data:
            answer.trouble = answer.trouble or "closed before its end"
            return
        if answer.first_s is None:
            answer.first_s = now
        else:
            answer.longest_gap_s = max(answer.longest_gap_s, now - answer.last_s)
        answer.last_s = now
        parsing.parser.feed_data(data)
        if conduct is Conduct.SLOW:
            await asyncio.sleep(random.random() * 0.3)


async def simple(
    host: str,
    port: int,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = PATIENCE_S,
    key: str = "",
) -> Answer | None:
    """One question of an operator; None: no answer."""
    content = b"" if body is None else msgspec.json.encode(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(content)}\r\n"
        f"{shown(key)}Connection: close\r\n\r\n"
    )
    return await answer_to(host, port, path, head.encode() + content, timeout_s=timeout_s)


async def answer_to(host: str, port: int, path: str, sent: bytes, *, timeout_s: float = PATIENCE_S) -> Answer | None:
    """To what was sent as it is, on a connection of its own; None: there is none."""
    answer = Answer(ClientRequest(0, path, (), "", 0, False, True, timeout_s, Conduct.PATIENT), Machine.kernel.now)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent)
            await _read(reader, answer, Random(0), Conduct.PATIENT, None)
    except (OSError, httptools.HttpParserError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return answer if answer.is_whole else None


def said_in(answer: Answer) -> list[Sequence[int] | str]:
    """Of each sample: ids of /generate, the text of the others."""
    events = [event for event in answer.events() if isinstance(event, dict)]
    if answer.ask.path == "/generate":
        return [event["output_ids"] for event in events[-1:] if "output_ids" in event]
    texts = dict.fromkeys(range(answer.ask.num_samples), "")
    for event in events:
        for choice in event.get("choices", ()):
            said = choice.get("text") or choice.get("delta", {}).get("content")
            texts[choice["index"]] += said or choice.get("message", {}).get("content") or ""
    return list(texts.values())
