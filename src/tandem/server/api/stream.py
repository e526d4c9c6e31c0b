"""The HTTP answer of a generation: waits for tokens, writes them as they come or all at the end.

`TokenResponse` is the task behind one HTTP request, and owns what runs for it. Heads: a prefill server sends its 200 as
soon as the request is valid, because a gateway waits for both halves' heads (and the whole answer with it, where one
asks decode only then: `kv_transfer_params.py`); the others send theirs with the first token, so that every failure
before it has a proper status. The client's leaving is noticed at once and aborts all.

A sample that fails ends the others, whose client gets no answer. Not so on prefill: each sample has a decode half of
its own, which computes the failed prompt by itself where it may, and waits for the KV of the others. There the failure
is told when all have ended.

What tokens look like as JSON is the endpoint's business: a `Reply` for each dialect.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from tandem.core import commands
from tandem.metrics.request_stats import RequestRecord
from tandem.server import wire
from tandem.server.api.bounds import LOOP_IDS, LOOP_SAMPLES, LOOP_SCORES, SCORE_VECTOR_BYTES
from tandem.server.api.client import Generation, Live
from tandem.server.api.edge import Edge
from tandem.server.api.errors import Failure, Problem, error_event, error_headers, error_json
from tandem.server.api.http1 import CUT
from tandem.server.api.off_loop import in_turns, off_loop
from tandem.server.api.rendering import Renderer
from tandem.server.api.resume import TELLS, Piece, PieceKind
from tandem.server.api.sample import Sample
from tandem.server.api.sample_requests import SampleRequest
from tandem.server.api.telling import Teller
from tandem.server.api.text import TextStream
from tandem.server.request_spans import tell_spans
from tandem.server.tracing import Span, ending_with_errors, response_headers

logger = logging.getLogger("tandem.server")
SAMPLE_SCORES = LOOP_SCORES // LOOP_SAMPLES  # that an event is worth, whatever it holds
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect some pages of events before it passes them on
)
PATH_ORDER = ("unified", "remote", "local", "fallback")  # of several samples the head names the last of these


@dataclass(slots=True, eq=False)
class Prepared:
    """One sample that the node has not heard of: whatever may be wrong with it has been found by now."""

    ask: SampleRequest
    submit: wire.Submit
    text: TextStream


async def nowhere(message: Message) -> None:
    """`send` for a client that has its whole answer already: what is written goes to nobody."""


class Reply(Protocol):
    """How one endpoint writes samples. Methods that return bytes return whole SSE events, or nothing, as `begin`,
    `close` and `failed` do for a dialect without such events.
    """

    shows_prompts: bool  # what a sample's prompt was made of, or its ids, are part of its answer

    def begin(self, sample: Sample) -> bytes:
        """Before the first text of a sample."""
        return b""

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        """New text and the tokens `sample.tokens[start:]`."""
        ...

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        """The last text, and how the sample ended."""
        ...

    def close(self, samples: Sequence[Sample]) -> bytes:
        """After the last sample has ended."""
        return b""

    def failed(self, failure: Failure) -> bytes:
        """What a stream that has begun says of it in its own words, before the last event, which all have."""
        return b""

    def whole(self, samples: Sequence[Sample]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(slots=True, eq=False)
class TokenResponse:
    """An ASGI application that answers one generation request."""

    edge: Edge
    span: Span  # of the request; ended here
    prepared: Sequence[Prepared]
    arrival_ns: int
    endpoint: str
    request_id: str
    model: str
    is_streamed: bool
    reply: Reply
    renderer: Renderer | None
    teller: Teller | None  # of a stream that somebody else may go on with
    said: Sequence[Piece]  # of one that somebody else has begun
    # Of a prefill whose router says `kv_transfer_params`: the whole answer, which goes out at once; the prompt is
    # computed meanwhile, for the decode that the router asks next.
    hands_over: bytes | None
    _generation: Generation = field(default_factory=Generation)
    _samples: list[Sample] = field(default_factory=list[Sample])
    _by_live: dict[int, Sample] = field(default_factory=dict[int, Sample])
    _num_open: int = 0
    _failure: Failure | None = None  # of prefill: the first, while others go on
    _is_head_sent: bool = False
    _is_handed_over: bool = False

    @property
    def _is_prefill(self) -> bool:
        return self.edge.served.limits.role == "prefill"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `Refusal` when the node cannot be asked. Otherwise all that runs has ended, or has been told to."""
        with ending_with_errors(self.span):
            await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = [one for one in self.prepared if not one.ask.has_ended]
        submits, names = [one.submit for one in wanted], [one.ask.names for one in wanted]
        routed = [one.ask.dp_rank for one in wanted]
        may_move = self.teller is not None
        running = self.edge.client.running(submits, names, routed=routed, request_id=self.request_id, may_move=may_move)
        with running as generation:
            self._watch_over(generation)
            generation.cut = scope.get("extensions", {}).get(CUT, generation.cut)
            watch = asyncio.create_task(self._watch_client(receive))
            try:
                if self.hands_over is not None:
                    await self._hand_over(send, self.hands_over)
                    send = nowhere
                elif self._is_prefill:
                    await self._send_head(send, "local")
                if self.is_streamed:
                    await self._stream(send)
                else:
                    await self._answer(send)
            except Exception:  # the outermost frame of this task: the client gets an answer, the server goes on
                logger.exception("request %s", self.request_id)
                self.edge.client.last_steps.write(f"request {self.request_id} has met an error of ours")
                await self._fail(send, Failure(Problem.INTERNAL, "the server made a mistake"))
            finally:
                watch.cancel()
                self._record()

    def _watch_over(self, generation: Generation) -> None:
        page_bytes = 0 if self.edge.client.node is None else self.edge.client.node.page_bytes
        lives = iter(generation.lives)
        for one in self.prepared:
            live = self._ended(one, generation) if one.ask.has_ended else next(lives)
            submitted_ns = self.arrival_ns + one.ask.timeout_ns - live.request.timeout_ns
            self._samples.append(Sample(one.ask, live, one.text, page_bytes, self.arrival_ns, submitted_ns))
        self._num_open = len(self._samples)
        self.edge.stats.running += len(self._samples)
        self._generation = generation
        self._by_live = {id(sample.live): sample for sample in self._samples}

    def _ended(self, one: Prepared, generation: Generation) -> Live:
        """As if its node had run it."""
        request, said = one.submit.request, one.ask.said
        assert said is not None
        assert said.ends is not None
        ended = commands.FinishRequest(
            request.id, said.ends, commands.Path.LOCAL, said.cached_tokens, 0, 0, commands.StageTimings()
        )
        live = Live(request, self.edge.client.ranks[0], generation, ended=ended)
        generation.note(live)
        return live

    async def _watch_client(self, receive: Receive) -> None:
        """Abort everything as soon as the client is gone, unless it has all that it gets."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._is_handed_over:
            return
        self._generation.abandon()
        self.edge.client.leave(self._generation)

    async def _hand_over(self, send: Send, answer: bytes) -> None:
        await asyncio.sleep(0)  # who has left by now is known then
        if self._generation.is_abandoned:
            return
        await self._send_head(send, "local", length=len(answer))
        self._is_handed_over = True
        await self._write(send, {"type": "http.response.body", "body": answer, "more_body": False})
        self._generation.cut = lambda: None  # the connection is somebody else's now

    async def _write(self, send: Send, message: Message) -> None:
        with self.edge.client.writing(self._generation):
            await send(message)

    async def _news(self) -> list[Live]:
        """Who has news. Prompts that the node wants anew are on their way to it by then."""
        changed = await self._generation.changed()
        for live in changed:
            if live.render_at is not None and self.renderer is not None:
                sample = self._by_live[id(live)]
                sample.ask = await self.renderer.render(sample.ask, live, sample.arrival_ns)
        return changed

    async def _stream(self, send: Send) -> None:
        await off_loop(sum(len(piece.numbers) for piece in self.said), LOOP_IDS, self._say_again)
        is_last = False
        while not is_last:
            changed = await self._news()
            if self._generation.is_abandoned:
                return
            events, failure = await self._advance(changed)
            failure = failure or (None if self._num_open else self._failure)
            if not self._is_head_sent and failure is None and self._is_started():
                await self._send_head(send, self._path())
            if failure is not None:
                await self._fail(send, failure, events)
                return
            is_last = not self._num_open
            if is_last:
                events += self.reply.close(self._samples)
            if self.teller is not None:
                events = self.teller.frame(events, is_last=is_last)
            if events or is_last:
                await self._write(send, {"type": "http.response.body", "body": events, "more_body": not is_last})

    def _say_again(self) -> None:
        """Write the events of what was said elsewhere, so that those that follow are as they would have been there.

        Nobody gets them. In any thread.
        """
        for piece in self.said:
            sample = self._samples[piece.choice]
            if piece.kind is PieceKind.BEGINS:
                for one in self._to_begin(sample):
                    one.has_begun = True
                    self.reply.begin(one)
                continue
            start, text = len(sample.tokens), sample.say_again(piece.numbers)
            if piece.kind is PieceKind.SAYS:
                self.reply.delta(sample, text, start)
            else:
                self._num_open -= 1
                self.reply.end(sample, text + sample.finish(), start)

    async def _advance(self, changed: Sequence[Live]) -> tuple[bytes, Failure | None]:
        """Take all news: the events to write for it, and the first failure.

        Others have their turn in between, and then more may come to a sample: that is the next news of it.
        """
        events: list[bytes] = []
        num_scores = 0
        for live in changed:
            sample = self._by_live[id(live)]
            coming = SAMPLE_SCORES + self._num_scores(sample, live.tokens)
            if num_scores + coming > LOOP_SCORES:
                num_scores = 0
                await asyncio.sleep(0)
            num_scores += coming
            now_ns = time.monotonic_ns()
            start = len(sample.tokens)
            text, has_ended = sample.absorb(now_ns, self.edge.stats), live.ended is not None
            fresh = self._num_scores(sample, sample.tokens[start:])
            if isinstance(sample.text.matched, str):
                self.edge.client.stop(live)
            if (failure := sample.failure) is not None:
                if not self._is_prefill:
                    return b"".join(events), failure
                self._outlive(sample, failure)
                continue
            if not sample.has_begun and (sample.tokens or has_ended):
                events += [await self._begin(one) for one in self._to_begin(sample)]
            if not has_ended and len(sample.tokens) > start:
                events.append(await off_loop(fresh, LOOP_SCORES, self.reply.delta, sample, text, start))
            elif has_ended and not sample.ended_ns:
                self._num_open -= 1
                text += sample.finish()
                size = fresh if not self.reply.shows_prompts else fresh + self._size(sample)
                events.append(await off_loop(size, LOOP_SCORES, self.reply.end, sample, text, start))
            else:
                continue
            if self.teller is not None:
                self.teller.says(sample)
        return b"".join(events), None

    def _to_begin(self, sample: Sample) -> list[Sample]:
        """Choices begin in their order, whichever comes first: OpenAI's own client takes the first one to be number 0.

        Where an opening tells of a prompt it waits for the sample's own start, which brings that.
        """
        if sample.ask.sampling.prompt_logprobs_from is not None:
            return [sample]
        return [one for one in self._samples[: sample.ask.index + 1] if not one.has_begun]

    async def _begin(self, sample: Sample) -> bytes:
        sample.has_begun = True
        most = LOOP_IDS if sample.ask.sampling.prompt_logprobs_from is None else LOOP_SCORES
        return await off_loop(self._prompt_size(sample), most, self.reply.begin, sample)

    def _outlive(self, sample: Sample, failure: Failure) -> None:
        """The others go on without it."""
        if not sample.ended_ns:
            sample.ended_ns = time.monotonic_ns()
            self._num_open -= 1
            self._failure = self._failure or failure

    def _num_scores(self, sample: Sample, tokens: Sequence[int]) -> int:
        sampling = sample.ask.sampling
        return len(tokens) * (1 + sampling.top_logprobs + len(sampling.logprob_ids))

    def _prompt_size(self, sample: Sample) -> int:
        """Of what its answer shows of its prompt."""
        sampling, num_tokens = sample.ask.sampling, len(sample.ask.prompt.tokens)
        if sampling.prompt_logprobs_from is not None:
            return num_tokens * (1 + sampling.prompt_top_logprobs + len(sampling.logprob_ids))
        return num_tokens if self.reply.shows_prompts else 0

    def _size(self, sample: Sample) -> int:
        """Of a whole answer."""
        vector = len(sample.vector) // SCORE_VECTOR_BYTES
        return self._num_scores(sample, sample.tokens) + self._prompt_size(sample) + vector

    async def _answer(self, send: Send) -> None:
        while self._num_open:
            changed = await self._news()
            if self._generation.is_abandoned:
                return
            async for live in in_turns(changed, LOOP_SAMPLES):
                sample = self._by_live[id(live)]
                sample.absorb(time.monotonic_ns(), self.edge.stats)
                if isinstance(sample.text.matched, str):
                    self.edge.client.stop(live)
                if (failure := sample.failure) is not None:
                    if not self._is_prefill:
                        await self._fail(send, failure)
                        return
                    self._outlive(sample, failure)
                elif live.ended is not None and not sample.ended_ns:
                    self._num_open -= 1
                    sample.finish()
        if self._failure is not None:
            await self._fail(send, self._failure)
            return
        size = sum(map(self._size, self._samples))
        body = await off_loop(size, LOOP_SCORES, self.reply.whole, self._samples)
        if not self._is_head_sent:
            await self._send_head(send, self._path(), length=len(body))
        await self._write(send, {"type": "http.response.body", "body": body, "more_body": False})

    def _is_started(self) -> bool:
        return any(sample.has_begun and (sample.first_ns or sample.ended_ns) for sample in self._samples)

    def _path(self) -> str | None:
        """Where the prompt's KV came from; of several samples, the one that says most about trouble."""
        paths = [path for sample in self._samples if (path := sample.path) is not None]
        return max(paths, key=PATH_ORDER.index, default=None)

    async def _send_head(self, send: Send, path: str | None, *, length: int | None = None) -> None:
        headers = [(b"x-request-id", self.request_id.encode())]
        headers += [(name.encode(), value.encode()) for name, value in response_headers(self.span).items()]
        if path is not None:
            headers.append((b"x-tandem-path", path.encode()))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if self.is_streamed:
            headers += EVENT_STREAM
            headers += [] if self.teller is None else [(TELLS.encode(), b"1")]
        else:
            headers.append((b"content-type", b"application/json"))
        self._is_head_sent = True
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, failure: Failure, events: bytes = b"") -> None:
        """Tell the client, in the way that is still open, and end what else runs for it."""
        self.edge.client.leave(self._generation)
        body = error_json(failure, self.request_id)
        if not self._is_head_sent:
            headers = [(name.encode(), value.encode()) for name, value in error_headers(failure).items()]
            headers += [(b"x-request-id", self.request_id.encode()), (b"content-length", b"%d" % len(body))]
            headers += [(name.encode(), value.encode()) for name, value in response_headers(self.span).items()]
            self._is_head_sent = True
            await self._write(send, {"type": "http.response.start", "status": failure.status, "headers": headers})
        elif self.is_streamed:
            body = events + self.reply.failed(failure) + error_event(self.endpoint, body)
            if self.teller is not None:
                body = self.teller.last_frame(body, failure)
        await self._write(send, {"type": "http.response.body", "body": body, "more_body": False})

    def _record(self) -> None:
        """Count every sample once. The lines and spans of many come a little later."""
        records = [sample.record(endpoint=self.endpoint, request_id=self.request_id) for sample in self._samples]
        self.edge.stats.running -= len(records)
        for record in records:
            self.edge.stats.add(record)
            self.edge.stats.recent.append((time.time(), record))
        if len(records) <= LOOP_SAMPLES:
            self._tell(records)
        else:
            asyncio.get_running_loop().run_in_executor(None, self._tell, records)

    def _tell(self, records: Sequence[RequestRecord]) -> None:
        """In any thread."""
        self.edge.log.write_all(records)
        tell_spans(self.span, records, arrival_ns=self.arrival_ns, model=self.model)
