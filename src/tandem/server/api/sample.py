"""One sample while it is being answered: its tokens and text so far, and what is said of it at the end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.core import commands
from tandem.core.values import SECOND, Cause
from tandem.metrics.request_stats import RequestRecord, RequestStats
from tandem.sampling import TokenScore, read_scores
from tandem.server.api.client import Live
from tandem.server.api.errors import Failure, failure_of
from tandem.server.api.resume import Said
from tandem.server.api.sample_requests import SampleRequest
from tandem.server.api.text import TextStream

decode_score = msgspec.msgpack.Decoder(TokenScore).decode


@dataclass(slots=True, eq=False)
class Sample:
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
