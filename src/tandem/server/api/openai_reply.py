"""OpenAI's dialect, out: `ChatReply` and `CompletionReply` write samples as JSON.

Chunks of a stream are put together from bytes that are encoded once per request: this runs for every token.
"""

import codecs
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tandem.sampling import TokenScore
from tandem.server.api.body import OpenAIBody
from tandem.server.api.chat_form import AnswerForm, AnswerSplitter
from tandem.server.api.sample import Sample
from tandem.server.api.stream import Reply
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Reasoning, Text

NO_THOUGHT = b'"reasoning_content":null'  # of a delta, as SGLang and DeepSeek have it: their clients ask every one

encode = msgspec.json.Encoder().encode


class Shape(Struct, frozen=True):
    """What every object of one answer says, and what the client wants to see."""

    id: str
    model: str
    n: int
    made_at: int  # Unix seconds
    includes_usage: bool  # in an event of its own at the end
    counts_on: bool  # usage in every event
    returns_ids: bool
    names_ids: bool  # tokens of logprobs are shown by id
    prompt_logprobs: int | None  # alternatives to each token of the prompt; None: nothing is told of them

    @classmethod
    def of(cls, body: OpenAIBody, *, id: str, model: str, n: int, made_at: int) -> "Shape":
        options = body.stream_options
        return cls(
            id=id,
            model=model,
            n=n,
            made_at=made_at,
            includes_usage=options is not None and bool(options.include_usage),
            counts_on=options is not None and bool(options.continuous_usage_stats),
            returns_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs,
        )


class Writer:
    """The parts of an answer that chat and completions share."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer, kind: str) -> None:
        self.shape = shape
        self.tokenizer = tokenizer
        self.head = {"id": shape.id, "object": kind, "created": shape.made_at, "model": shape.model}
        self._opening = b"data: " + encode(self.head)[:-1] + b',"choices":['

    def event(self, choice: bytes, sample: Sample, *, shows_output: bool = True, more: bytes = b"") -> bytes:
        """One SSE event with one choice. more: members beside the choices."""
        event = self._opening + choice + b"]" + more
        if self.shape.counts_on:
            event += b',"usage":' + encode(usage_of([sample], shows_output=shows_output))
        return event + b"}\n\n"

    def close(self, samples: Sequence[Sample]) -> bytes:
        if not self.shape.includes_usage:
            return b"data: [DONE]\n\n"
        return self._opening + b'],"usage":' + encode(usage_of(samples)) + b"}\n\ndata: [DONE]\n\n"

    def ids(self, sample: Sample, start: int, until: int | None = None) -> bytes:
        """A member of a choice in a stream."""
        return b',"token_ids":' + encode(sample.tokens[start:until]) if self.shape.returns_ids else b""

    def name(self, id: int) -> str:
        """A token as logprobs show it."""
        return f"token_id:{id}" if self.shape.names_ids else self.tokenizer.token_text(id)

    def score(self, id: int, logprob: float | None) -> dict[str, object]:
        """A token as chat logprobs show it."""
        return {
            "token": self.name(id),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(id)),
        }

    def prompt_logprobs(self, sample: Sample) -> list[object]:
        """As vLLM tells them: by id the prompt's own token and its best alternatives, null for the first token.

        A rank is known of the alternatives only, so it is null where the prompt's token is none of them.
        """
        pairs = zip(sample.ask.prompt.tokens, sample.scores_of_prompt(), strict=True)
        return [None if score is None else self._ranked(token, score) for token, score in pairs]

    def _ranked(self, token: int, score: TokenScore) -> dict[str, object]:
        best = score.first(self.shape.prompt_logprobs or 0)
        ranks = {id: rank for rank, id in enumerate(best.top_ids, 1)}
        shown = {token: score.logprob} | dict(zip(best.top_ids, best.top_logprobs, strict=True))
        return {
            str(id): {"logprob": logprob, "rank": ranks.get(id), "decoded_token": self.tokenizer.token_text(id)}
            for id, logprob in shown.items()
        }


class ChatReply(Reply):
    """`form`: how its answers are taken apart; None where they are text."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer, form: AnswerForm | None) -> None:
        self.shows_prompts = shape.returns_ids
        self._shape = shape
        self._chunk = Writer(shape, tokenizer, "chat.completion.chunk")
        self._whole = Writer(shape, tokenizer, "chat.completion")
        self._form = form if form is not None and not form.is_plain else None
        self._splitters: dict[int, AnswerSplitter] = {}  # by index of the sample
        self._openings = [b'{"index":%d,"delta":' % index for index in range(shape.n)]

    def begin(self, sample: Sample) -> bytes:
        choice = (
            self._openings[sample.ask.index] + b'{"role":"assistant","content":"",' + NO_THOUGHT + b'},"logprobs":null'
        )
        choice += b',"finish_reason":null}'
        ids = b',"prompt_token_ids":' + encode(sample.ask.prompt.tokens) if self._shape.returns_ids else b""
        return self._chunk.event(choice, sample, shows_output=False, more=ids)

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        if self._form is None:
            if not text and not sample.scores and not self._shape.returns_ids:
                return b""
            return self._delta(sample, b'{"content":' + encode(text) + b"," + NO_THOUGHT + b"}", start)
        return self._pieces(sample, self._splitter(sample).feed(text), start)

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        last = self.delta(sample, text, start) if len(sample.tokens) > start or text else b""
        if self._form is not None:
            last += self._pieces(sample, self._splitter(sample).finish(), len(sample.tokens), is_last=True)
        choice = self._openings[sample.ask.index] + b'{%s},"logprobs":null,"finish_reason":"%s",%s}' % (
            NO_THOUGHT,
            self._finish_reason(sample).encode(),
            encode(what_ended(sample))[1:-1],
        )
        return last + self._chunk.event(choice, sample)

    def close(self, samples: Sequence[Sample]) -> bytes:
        return self._chunk.close(samples)

    def whole(self, samples: Sequence[Sample]) -> bytes:
        choices = [self._choice(sample) for sample in samples]
        answer: dict[str, object] = {**self._whole.head, "choices": choices, "usage": usage_of(samples)}
        if self._shape.returns_ids:
            answer["prompt_token_ids"] = samples[0].ask.prompt.tokens
        if self._shape.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._whole.prompt_logprobs(samples[0])
        return encode(answer)

    def _splitter(self, sample: Sample) -> AnswerSplitter:
        assert self._form is not None
        found = self._splitters.get(sample.ask.index)
        if found is None:
            found = self._form.splitter(sample.ask.prompt.text or "", f"{sample.ask.nonce}/{sample.ask.index}")
            self._splitters[sample.ask.index] = found
        return found

    def _finish_reason(self, sample: Sample) -> str:
        splitter = self._splitters.get(sample.ask.index)
        calls = splitter is not None and splitter.num_calls and sample.finish_reason == "stop"
        return "tool_calls" if calls else sample.finish_reason

    def _pieces(self, sample: Sample, pieces: Sequence[Piece], start: int, *, is_last: bool = False) -> bytes:
        """An event for each; what is said of the tokens goes with the first, or with one that says nothing else."""
        deltas = [encode(self._delta_of(sample, piece)) for piece in pieces]
        if not deltas and not is_last and (sample.scores or self._shape.returns_ids):
            deltas = [b'{"content":"",' + NO_THOUGHT + b"}"]
        events = []
        for delta in deltas:
            events.append(self._delta(sample, delta, start))
            start = len(sample.tokens)
        return b"".join(events)

    def _delta_of(self, sample: Sample, piece: Piece) -> dict[str, object]:
        match piece:
            case Text(text):
                return {"content": text, "reasoning_content": None}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                id = self._splitter(sample).id_of(index)
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": id, "type": "function", "function": function}
                return {"tool_calls": [call], "reasoning_content": None}
            case CallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
                return {"tool_calls": [call], "reasoning_content": None}

    def _delta(self, sample: Sample, delta: bytes, start: int) -> bytes:
        """What is told of the token at which the model ends, which has no text, is an event of its own: some clients
        put the text of an event together of its tokens."""
        until = len(sample.tokens) - 1
        tells = self._shape.returns_ids or sample.ask.sampling.logprobs
        if not tells or until <= start or not sample.text.holds_stop_token or sample.ask.params.keeps_stop:
            return self._told(sample, delta, start, until + 1)
        no_text = b'{"content":"",' + NO_THOUGHT + b"}"
        return self._told(sample, delta, start, until) + self._told(sample, no_text, until, until + 1)

    def _told(self, sample: Sample, delta: bytes, start: int, until: int) -> bytes:
        choice = self._openings[sample.ask.index] + delta
        choice += b',"logprobs":' + self._logprobs(sample, start, until) + self._chunk.ids(sample, start, until)
        return self._chunk.event(choice + b',"finish_reason":null}', sample)

    def _choice(self, sample: Sample) -> dict[str, object]:
        message = self._message(sample)
        choice: dict[str, object] = {
            "index": sample.ask.index,
            "message": message,
            "logprobs": {"content": self._entries(sample, 0)} if sample.ask.sampling.logprobs else None,
            "finish_reason": self._finish_reason(sample),
            **what_ended(sample),
        }
        if self._shape.returns_ids:
            choice["token_ids"] = sample.tokens
        return choice

    def _message(self, sample: Sample) -> dict[str, object]:
        text = "".join(sample.parts)
        if self._form is None:
            return {"role": "assistant", "content": text, "tool_calls": None, "reasoning_content": None}
        splitter = self._splitter(sample)
        pieces = [*splitter.feed(text), *splitter.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        arguments: dict[int, list[str]] = {}
        for piece in pieces:
            if isinstance(piece, CallArguments):
                arguments.setdefault(piece.index, []).append(piece.text)
        calls = [
            {
                "id": splitter.id_of(call.index),
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(arguments.get(call.index, ()))},
            }
            for call in pieces
            if isinstance(call, CallStart)
        ]
        return {
            "role": "assistant",
            "content": content if content or not calls else None,
            "tool_calls": calls or None,
            "reasoning_content": thought or None,
        }

    def _logprobs(self, sample: Sample, start: int, until: int) -> bytes:
        if not sample.ask.sampling.logprobs:
            return b"null"
        return encode({"content": self._entries(sample, start, until)})

    def _entries(self, sample: Sample, start: int, until: int | None = None) -> list[dict[str, object]]:
        pairs = zip(sample.tokens[start:until], sample.scores[start:until], strict=True)
        return [self._entry(token, score) for token, score in pairs]

    def _entry(self, token: int, score: TokenScore | None) -> dict[str, object]:
        entry = self._chunk.score(token, None if score is None else score.logprob)
        best = [] if score is None else zip(score.top_ids, score.top_logprobs, strict=True)
        return {**entry, "top_logprobs": [self._chunk.score(id, logprob) for id, logprob in best]}


class Offsets:
    """Where the tokens of a text begin, in characters. Those of one character all begin where it does."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._num_chars = 0

    def of(self, token: bytes) -> int:
        """Of the next token."""
        offset = self._num_chars
        self._num_chars += len(self._decode(token))
        return offset


class CompletionReply(Reply):
    """`echo`: the prompt's text goes before the answer's."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer, *, echo: bool) -> None:
        self.shows_prompts = echo or shape.returns_ids
        self._shape = shape
        self._writer = Writer(shape, tokenizer, "text_completion")
        self._tokenizer = tokenizer
        self._echo = echo
        self._openings = [b'{"index":%d,"text":' % index for index in range(shape.n)]
        self._offsets: dict[int, Offsets] = {}  # by index of the sample

    def begin(self, sample: Sample) -> bytes:
        if not self._echo and not self._shape.returns_ids:
            return b""
        choice = self._openings[sample.ask.index] + encode(self._prompt_text(sample))
        if self._shape.returns_ids:
            choice += b',"prompt_token_ids":' + encode(sample.ask.prompt.tokens)
        logprobs = b"null"
        if sample.ask.sampling.logprobs:
            logprobs = encode(self._of_prompt(sample) if self._echo else self._listed(sample, (), ()))
        choice += b',"logprobs":' + logprobs + self._writer.ids(sample, len(sample.tokens)) + b',"finish_reason":null}'
        return self._writer.event(choice, sample, shows_output=False)

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        if not text and not sample.scores and not self._shape.returns_ids:
            return b""
        return self._writer.event(self._part(sample, text, start) + b',"finish_reason":null}', sample)

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        choice = self._part(sample, text, start) + b',"finish_reason":"%s",%s}' % (
            sample.finish_reason.encode(),
            encode(what_ended(sample))[1:-1],
        )
        return self._writer.event(choice, sample)

    def close(self, samples: Sequence[Sample]) -> bytes:
        return self._writer.close(samples)

    def whole(self, samples: Sequence[Sample]) -> bytes:
        choices = [self._choice(sample) for sample in samples]
        return encode({**self._writer.head, "choices": choices, "usage": usage_of(samples)})

    def _part(self, sample: Sample, text: str, start: int) -> bytes:
        logprobs = encode(self._logprobs(sample, start)) if sample.ask.sampling.logprobs else b"null"
        return (
            self._openings[sample.ask.index]
            + encode(text)
            + b',"logprobs":'
            + logprobs
            + self._writer.ids(sample, start)
        )

    def _choice(self, sample: Sample) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": sample.ask.index,
            "text": self._prompt_text(sample) + "".join(sample.parts),
            "logprobs": self._all_logprobs(sample) if sample.ask.sampling.logprobs else None,
            "finish_reason": sample.finish_reason,
            **what_ended(sample),
        }
        if self._shape.returns_ids:
            choice |= {"token_ids": sample.tokens, "prompt_token_ids": sample.ask.prompt.tokens}
        if self._shape.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._writer.prompt_logprobs(sample)
        return choice

    def _prompt_text(self, sample: Sample) -> str:
        if not self._echo:
            return ""
        prompt = sample.ask.prompt
        return self._tokenizer.decode(prompt.tokens) if prompt.text is None else prompt.text

    def _all_logprobs(self, sample: Sample) -> dict[str, list[object]]:
        if not self._echo:
            return self._logprobs(sample, 0)
        prompt, output = self._of_prompt(sample), self._logprobs(sample, 0)
        return {name: prompt[name] + output[name] for name in prompt}

    def _of_prompt(self, sample: Sample) -> dict[str, list[object]]:
        most = sample.ask.sampling.top_logprobs
        scores = [None if score is None else score.first(most) for score in sample.scores_of_prompt()]
        return self._listed(sample, sample.ask.prompt.tokens, scores)

    def _logprobs(self, sample: Sample, start: int) -> dict[str, list[object]]:
        return self._listed(sample, sample.tokens[start:], sample.scores[start:])

    def _listed(
        self, sample: Sample, tokens: Sequence[int], scores: Sequence[TokenScore | None]
    ) -> dict[str, list[object]]:
        """The next tokens of prompt and output together."""
        its = self._offsets.setdefault(sample.ask.index, Offsets())
        names: list[object] = []
        offsets: list[object] = []
        tops: list[object] = []
        for token, score in zip(tokens, scores, strict=True):
            names.append(self._writer.name(token))
            offsets.append(its.of(self._tokenizer.token_bytes(token)))
            tops.append(None if score is None else self._tops(token, score))
        return {
            "tokens": names,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(self, token: int, score: TokenScore) -> dict[str, float]:
        """The best alternatives by name; the sampled token is always among them, as OpenAI has it."""
        best = {self._writer.name(id): logprob for id, logprob in zip(score.top_ids, score.top_logprobs, strict=True)}
        return best | {self._writer.name(token): score.logprob}


def what_ended(sample: Sample) -> dict[str, object]:
    """What the output stopped at, as SGLang has it; and as vLLM, which names only what the request asked to stop at."""
    matched = sample.text.matched
    is_the_models = isinstance(matched, int) and matched not in sample.ask.sampling.stop_token_ids
    return {"matched_stop": matched, "stop_reason": None if is_the_models else matched}


def usage_of(samples: Sequence[Sample], *, shows_output: bool = True) -> dict[str, object]:
    """Prompts count once, however many samples they have, and as cached what no sample of them has computed."""
    prompts = {sample.ask.prompt_index: len(sample.ask.prompt.tokens) for sample in samples}
    cached = dict(prompts)
    for sample in samples:
        cached[sample.ask.prompt_index] = min(cached[sample.ask.prompt_index], sample.cached_tokens)
    prompt_tokens = sum(prompts.values())
    shown = samples if shows_output else ()
    completion_tokens = sum(sample.text.num_tokens for sample in shown)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {"reasoning_tokens": sum(sample.text.num_thought_tokens for sample in shown)},
    }
