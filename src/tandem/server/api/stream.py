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

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tandem.core import commands
from tandem.core.values import SECOND, Cause
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestRecord, RequestStats
from tandem.sampling import TokenScore, read_scores
from tandem.server import wire
from tandem.server.api.bounds import LOOP_IDS, LOOP_SAMPLES, LOOP_SCORES, SCORE_VECTOR_BYTES
from tandem.server.api.client import Generation, Live, NodeClient
from tandem.server.api.errors import Failure, Problem, error_event, error_headers, error_json, failure_of
from tandem.server.api.http1 import CUT
from tandem.server.api.off_loop import in_turns, off_loop
from tandem.server.api.rendering import Renderer
from tandem.server.api.resume import TELLS, Piece, PieceKind, Said
from tandem.server.api.telling import Teller
from tandem.server.api.text import TextStream
from tandem.server.api.validation import SampleRequest
from tandem.server.request_spans import tell_spans
from tandem.server.tracing import Span, ending_with_errors, response_headers

logger = logging.getLogger("tandem.server")
decode_score = msgspec.msgpack.Decoder(TokenScore).decode
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


@dataclass(slots=True, eq=False)
class Sample:
    """One sample while it is being answered."""

    ask: SampleRequest
    live: Live
    text: TextStream
    page_bytes: int
    arrival_ns: int
    submitted_ns: int
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)  # as long as `tokens` if logprobs were asked for
    parts: list[str] = field(default_factory=list)  # text so far
    first_ns: int | None = None
    last_ns: int = 0
    ended_ns: int = 0
    has_begun: bool = False  # the stream has its opening

    def say_again(self, group: Sequence[int]) -> str:
        """What was said elsewhere: as `absorb`, but that it is nothing new."""
        text = self.text.feed(group)
        self.tokens += group
        if self.ask.sampling.logprobs:
            self.scores += [None] * len(group)
        self.parts.append(text)
        return text

    def absorb(self, now_ns: int, stats: RequestStats) -> str:
        """Take over what has come; the text that may be shown for it."""
        live = self.live
        new = live.tokens
        if not new or isinstance(self.text.matched, str):
            return ""
        live.tokens = []
        if not self.ask.max_new_tokens:  # the node has sampled one all the same
            live.tokens, live.extras = [], []
            self._start(now_ns, stats)
            return ""
        before = self.text.num_tokens
        text = self.text.feed(new)
        count = self.text.num_tokens - before
        self.tokens += new if count == len(new) else new[:count]
        if self.ask.sampling.logprobs:
            extras, live.extras = live.extras, []
            self.scores += [decode_score(extra) if extra else None for extra in extras[:count]]
            self.scores += [None] * (len(self.tokens) - len(self.scores))
        stats.emit(now_ns, count)
        if self.first_ns is None:
            self._start(now_ns, stats)
            count -= 1
        if count > 0:
            stats.gap.observe((now_ns - self.last_ns) / count / SECOND, count)
        self.last_ns = now_ns
        self.parts.append(text)
        return text

    def _start(self, now_ns: int, stats: RequestStats) -> None:
        """Its first token has come."""
        stats.start(len(self.ask.prompt.tokens), self.cached_tokens, self.host_tokens, self.storage_tokens)
        self.first_ns = self.last_ns = now_ns

    def finish(self) -> str:
        """The node has ended it well; the last of the text."""
        self.ended_ns = time.monotonic_ns()
        text = self.text.finish(is_stopped=self.finish_reason == "stop")
        self.parts.append(text)
        return text

    @property
    def failure(self) -> Failure | None:
        """Why it ended without its tokens. After a stop string the text is complete, whatever happens then."""
        ended = self.live.ended
        if not isinstance(ended, commands.FailRequest) or isinstance(self.text.matched, str):
            return None
        return failure_of(ended)

    @property
    def finish_reason(self) -> str:
        if not self.ask.max_new_tokens and self.ask.params.vector is None:
            return "length"
        if isinstance(self.text.matched, str) or self.finished is None:
            return "stop"
        return self.finished.reason.value

    @property
    def finished(self) -> commands.FinishRequest | None:
        """What the node has said of its end; None: it runs, or has failed."""
        return self.live.ended if isinstance(self.live.ended, commands.FinishRequest) else None

    @property
    def path(self) -> str | None:
        news = self.finished or self.live.started
        return None if news is None else news.path.value

    @property
    def _found(self) -> Said | commands.FinishRequest | commands.StartRequest | None:
        """Who says how much of its prompt was found: whoever began its stream, else the node."""
        return self.ask.said or self.finished or self.live.started

    @property
    def cached_tokens(self) -> int:
        return 0 if (found := self._found) is None else found.cached_tokens

    @property
    def host_tokens(self) -> int:
        """Those of them that came from host memory."""
        return 0 if (found := self._found) is None else found.host_tokens

    @property
    def storage_tokens(self) -> int:
        """Those of these that came there from storage."""
        return 0 if (found := self._found) is None else found.storage_tokens

    @property
    def vector(self) -> bytes:
        """float32 little endian; empty of who wanted tokens, or got none."""
        return b"" if self.finished is None else self.finished.vector

    def scores_of_prompt(self) -> list[TokenScore | None]:
        """One for each prompt token from `prompt_logprobs_from` on, where that is one; the first has none."""
        first = self.ask.sampling.prompt_logprobs_from
        if first is None:
            return []
        chunks = () if self.live.started is None else self.live.started.prompt_extras
        found = [score for chunk in chunks for score in read_scores(chunk)]
        lacking = len(self.ask.prompt.tokens) - first - 1 - len(found)
        return [None, *found, *[None] * lacking][: len(self.ask.prompt.tokens) - first]

    @property
    def ledger(self) -> tuple[tuple[str, int], ...]:
        """Stages from the request's head to its first token at the socket, in nanoseconds; empty before that."""
        news = self.live.started or self.live.ended
        if self.first_ns is None or not isinstance(news, commands.StartRequest | commands.FinishRequest):
            return ()
        node = news.ledger.stages
        receive_ns = self.submitted_ns - self.arrival_ns
        send_ns = self.first_ns - self.submitted_ns - sum(duration for _, duration in node)
        return (("edge_receive", receive_ns), *node, ("edge_send", send_ns))

    def record(self, *, endpoint: str, request_id: str) -> RequestRecord:
        """What is said of it when it is over, or when its client has left."""
        failure, finish = self.failure, self.finished
        if self.live.ended is None:
            has_left = self.live.generation.is_abandoned
            failure = Failure(Cause.ABORTED, "the client left" if has_left else "another sample failed", None, "client")
        return RequestRecord(
            rid=self.ask.rid,
            request_id=request_id,
            endpoint=endpoint,
            outcome=self.finish_reason if failure is None else failure.code.value,
            is_failed=failure is not None,
            prompt_tokens=len(self.ask.prompt.tokens),
            completion_tokens=self.text.num_tokens,
            e2e_ns=(self.ended_ns or time.monotonic_ns()) - self.arrival_ns,
            ttft_ns=None if self.first_ns is None else self.first_ns - self.arrival_ns,
            path=self.path,
            cached_tokens=self.cached_tokens,
            host_tokens=self.host_tokens,
            storage_tokens=self.storage_tokens,
            computed_tokens=0 if finish is None else finish.computed_tokens,
            kv_pages=0 if finish is None else finish.kv_pages,
            kv_bytes=0 if finish is None else finish.kv_pages * self.page_bytes,
            retries=0 if finish is None else finish.retries,
            room=self.ask.pair.room,
            dp_rank=self.live.rank.number_among_several,
            stage=None if failure is None else failure.stage,
            detail=failure.message if failure is not None else "" if finish is None else finish.detail,
            peer="" if failure is None else failure.peer,
            waited_seconds=None if failure is None else failure.waited_seconds,
            ledger=self.ledger,
        )


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


class TokenResponse:
    """An ASGI application that answers one generation request."""

    def __init__(
        self,
        *,
        client: NodeClient,
        prepared: Sequence[Prepared],
        arrival_ns: int,
        reply: Reply,
        is_streamed: bool,
        is_prefill: bool,
        renderer: Renderer | None,
        endpoint: str,
        request_id: str,
        stats: RequestStats,
        log: RequestLog,
        span: Span,
        model: str,
        teller: Teller | None,
        said: Sequence[Piece],
        hands_over: bytes | None,
    ) -> None:
        """span: of the request; ended here. teller: of a stream that somebody else may go on with. said: of one that
        somebody else has begun. hands_over: of a prefill whose router says `kv_transfer_params`: the whole answer,
        which goes out at once; the prompt is computed meanwhile, for the decode that the router asks next.
        """
        self._said = said
        self._hands_over = hands_over
        self._is_handed_over = False
        self._span = span
        self._teller = teller
        self._model = model
        self._client = client
        self._prepared = prepared
        self._arrival_ns = arrival_ns
        self._generation = Generation()
        self._samples: list[Sample] = []
        self._by_live: dict[int, Sample] = {}
        self._reply = reply
        self._is_streamed = is_streamed
        self._is_prefill = is_prefill
        self._failure: Failure | None = None  # of prefill: the first, while others go on
        self._renderer = renderer
        self._endpoint = endpoint
        self._request_id = request_id
        self._stats = stats
        self._log = log
        self._is_head_sent = False
        self._num_open = len(prepared)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `Refusal` when the node cannot be asked. Otherwise all that runs has ended, or has been told to."""
        with ending_with_errors(self._span):
            await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = [one for one in self._prepared if not one.ask.has_ended]
        submits, names = [one.submit for one in wanted], [one.ask.names for one in wanted]
        routed = [one.ask.dp_rank for one in wanted]
        may_move = self._teller is not None
        running = self._client.running(submits, names, routed=routed, request_id=self._request_id, may_move=may_move)
        with running as generation:
            self._watch_over(generation)
            generation.cut = scope.get("extensions", {}).get(CUT, generation.cut)
            watch = asyncio.create_task(self._watch_client(receive))
            try:
                if self._hands_over is not None:
                    await self._hand_over(send, self._hands_over)
                    send = nowhere
                elif self._is_prefill:
                    await self._send_head(send, "local")
                if self._is_streamed:
                    await self._stream(send)
                else:
                    await self._answer(send)
            except Exception:  # the outermost frame of this task: the client gets an answer, the server goes on
                logger.exception("request %s", self._request_id)
                self._client.last_steps.write(f"request {self._request_id} has met an error of ours")
                await self._fail(send, Failure(Problem.INTERNAL, "the server made a mistake"))
            finally:
                watch.cancel()
                self._record()

    def _watch_over(self, generation: Generation) -> None:
        page_bytes = 0 if self._client.node is None else self._client.node.page_bytes
        lives = iter(generation.lives)
        for one in self._prepared:
            live = self._ended(one, generation) if one.ask.has_ended else next(lives)
            submitted_ns = self._arrival_ns + one.ask.timeout_ns - live.request.timeout_ns
            self._samples.append(Sample(one.ask, live, one.text, page_bytes, self._arrival_ns, submitted_ns))
        self._stats.running += len(self._samples)
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
        live = Live(request, self._client.ranks[0], generation, ended=ended)
        generation.note(live)
        return live

    async def _watch_client(self, receive: Receive) -> None:
        """Abort everything as soon as the client is gone, unless it has all that it gets."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._is_handed_over:
            return
        self._generation.abandon()
        self._client.leave(self._generation)

    async def _hand_over(self, send: Send, answer: bytes) -> None:
        await asyncio.sleep(0)  # who has left by now is known then
        if self._generation.is_abandoned:
            return
        await self._send_head(send, "local", length=len(answer))
        self._is_handed_over = True
        await self._write(send, {"type": "http.response.body", "body": answer, "more_body": False})
        self._generation.cut = lambda: None  # the connection is somebody else's now

    async def _write(self, send: Send, message: Message) -> None:
        with self._client.writing(self._generation):
            await send(message)

    async def _news(self) -> list[Live]:
        """Who has news. Prompts that the node wants anew are on their way to it by then."""
        changed = await self._generation.changed()
        for live in changed:
            if live.render_at is not None and self._renderer is not None:
                sample = self._by_live[id(live)]
                sample.ask = await self._renderer.render(sample.ask, live, sample.arrival_ns)
        return changed

    async def _stream(self, send: Send) -> None:
        await off_loop(sum(len(piece.numbers) for piece in self._said), LOOP_IDS, self._say_again)
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
                events += self._reply.close(self._samples)
            if self._teller is not None:
                events = self._teller.frame(events, is_last=is_last)
            if events or is_last:
                await self._write(send, {"type": "http.response.body", "body": events, "more_body": not is_last})

    def _say_again(self) -> None:
        """Write the events of what was said elsewhere, so that those that follow are as they would have been there.

        Nobody gets them. In any thread.
        """
        for piece in self._said:
            sample = self._samples[piece.choice]
            if piece.kind is PieceKind.BEGINS:
                for one in self._to_begin(sample):
                    one.has_begun = True
                    self._reply.begin(one)
                continue
            start, text = len(sample.tokens), sample.say_again(piece.numbers)
            if piece.kind is PieceKind.SAYS:
                self._reply.delta(sample, text, start)
            else:
                self._num_open -= 1
                self._reply.end(sample, text + sample.finish(), start)

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
            text, has_ended = sample.absorb(now_ns, self._stats), live.ended is not None
            fresh = self._num_scores(sample, sample.tokens[start:])
            if isinstance(sample.text.matched, str):
                self._client.stop(live)
            if (failure := sample.failure) is not None:
                if not self._is_prefill:
                    return b"".join(events), failure
                self._outlive(sample, failure)
                continue
            if not sample.has_begun and (sample.tokens or has_ended):
                events += [await self._begin(one) for one in self._to_begin(sample)]
            if not has_ended and len(sample.tokens) > start:
                events.append(await off_loop(fresh, LOOP_SCORES, self._reply.delta, sample, text, start))
            elif has_ended and not sample.ended_ns:
                self._num_open -= 1
                text += sample.finish()
                size = fresh if not self._reply.shows_prompts else fresh + self._size(sample)
                events.append(await off_loop(size, LOOP_SCORES, self._reply.end, sample, text, start))
            else:
                continue
            if self._teller is not None:
                self._teller.says(sample)
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
        return await off_loop(self._prompt_size(sample), most, self._reply.begin, sample)

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
        return num_tokens if self._reply.shows_prompts else 0

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
                sample.absorb(time.monotonic_ns(), self._stats)
                if isinstance(sample.text.matched, str):
                    self._client.stop(live)
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
        body = await off_loop(size, LOOP_SCORES, self._reply.whole, self._samples)
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
        headers = [(b"x-request-id", self._request_id.encode())]
        headers += [(name.encode(), value.encode()) for name, value in response_headers(self._span).items()]
        if path is not None:
            headers.append((b"x-tandem-path", path.encode()))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if self._is_streamed:
            headers += EVENT_STREAM
            headers += [] if self._teller is None else [(TELLS.encode(), b"1")]
        else:
            headers.append((b"content-type", b"application/json"))
        self._is_head_sent = True
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, failure: Failure, events: bytes = b"") -> None:
        """Tell the client, in the way that is still open, and end what else runs for it."""
        self._client.leave(self._generation)
        body = error_json(failure, self._request_id)
        if not self._is_head_sent:
            headers = [(name.encode(), value.encode()) for name, value in error_headers(failure).items()]
            headers += [(b"x-request-id", self._request_id.encode()), (b"content-length", b"%d" % len(body))]
            headers += [(name.encode(), value.encode()) for name, value in response_headers(self._span).items()]
            self._is_head_sent = True
            await self._write(send, {"type": "http.response.start", "status": failure.status, "headers": headers})
        elif self._is_streamed:
            body = events + self._reply.failed(failure) + error_event(self._endpoint, body)
            if self._teller is not None:
                body = self._teller.last_frame(body, failure)
        await self._write(send, {"type": "http.response.body", "body": body, "more_body": False})

    def _record(self) -> None:
        """Count every sample once. The lines and spans of many come a little later."""
        records = [sample.record(endpoint=self._endpoint, request_id=self._request_id) for sample in self._samples]
        self._stats.running -= len(records)
        for record in records:
            self._stats.add(record)
            self._stats.recent.append((time.time(), record))
        if len(records) <= LOOP_SAMPLES:
            self._tell(records)
        else:
            asyncio.get_running_loop().run_in_executor(None, self._tell, records)

    def _tell(self, records: Sequence[RequestRecord]) -> None:
        """In any thread."""
        self._log.write_all(records)
        tell_spans(self._span, records, arrival_ns=self._arrival_ns, model=self._model)
