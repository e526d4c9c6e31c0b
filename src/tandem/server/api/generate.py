"""SGLang's native dialect, `/generate`, in and out.

A stream's events are cumulative: each holds the whole text and all ids so far. What has been encoded once is kept as
bytes and appended to, so that an event costs one copy and not the encoding of everything before it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # values that may be one or one per prompt

import msgspec

from tandem.core.values import SECOND
from tandem.sampling import TokenScore
from tandem.server.api.body import NativeBody, NativeSampling, Routing, per_prompt
from tandem.server.api.bounds import LOOP_BYTES, LOOP_SAMPLES, MAX_LOGPROB_IDS, MAX_PROMPTS
from tandem.server.api.errors import invalid
from tandem.server.api.limits import ModelLimits
from tandem.server.api.off_loop import in_turns, off_loop
from tandem.server.api.sample import Sample
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Reply
from tandem.server.api.structured_output import read_grammar
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.validation import (
    Asked,
    GenerationParams,
    Names,
    Prompt,
    check_ids,
    check_params,
    check_prompts,
    read_text,
)

DEFAULT_NEW_TOKENS = 128  # SGLang's

encode = msgspec.json.Encoder().encode
Told = tuple[float, int, str | None]  # of an alternative: its logprob, its id and its text


# in


async def read_native(body: NativeBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    """size: bytes of the body."""
    prompts: list[Prompt] = []
    async for item in in_turns(await off_loop(size, LOOP_BYTES, prompt_items, body), LOOP_SAMPLES):
        prompts.append(await read_text(item, served, "text") if isinstance(item, str) else Prompt(item))
    param = "text" if body.text is not None else "input_ids"
    prompts = await off_loop(size, LOOP_BYTES, check_prompts, prompts, served.limits, param)
    count = len(prompts)
    columns = zip(
        per_prompt(body.sampling_params, count, "sampling_params"),
        per_prompt(body.return_logprob, count, "return_logprob"),
        per_prompt(body.top_logprobs_num, count, "top_logprobs_num"),
        per_prompt(body.logprob_start_len, count, "logprob_start_len"),
        ids_per_prompt(body.token_ids_logprob or [], count),
        prompts,
        strict=True,
    )
    grammars: dict[int, str] = {}  # prompts may share their parameters
    params: list[GenerationParams] = []
    async for column in in_turns(columns, LOOP_SAMPLES):
        if (key := id(column[0])) not in grammars:
            sampling = column[0] or NativeSampling()
            grammars[key] = await read_grammar(sampling, served.tokenizer, "sampling_params.", size=size)
        params.append(native_params(*column, limits=served.limits, grammar=grammars[key]))
    return prompts, params


def prompt_items(body: NativeBody) -> list[str] | list[list[int]]:
    """One for each prompt."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "exactly one of text and input_ids must be given")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        check_count(len(texts), "text")
        return texts
    ids: Any = body.input_ids
    rows = [ids] if all(isinstance(item, int) for item in ids) else ids
    check_count(len(rows), "input_ids")
    if not all(isinstance(row, list) for row in rows):
        raise invalid("input_ids", "mixes ids and lists")
    return rows


def ids_per_prompt(value: Sequence[int | list[int]], count: int) -> list[list[int]]:
    """One list for all, or a list for each."""
    ids = [each for each in value if isinstance(each, int)]
    if len(ids) > MAX_LOGPROB_IDS or 0 < len(ids) < len(value):
        raise invalid("token_ids_logprob", f"must hold up to {MAX_LOGPROB_IDS} ids, or a list of them for each prompt")
    return [ids] * count if ids or not value else per_prompt(value, count, "token_ids_logprob")


def check_count(count: int, param: str) -> None:
    if not 0 < count <= MAX_PROMPTS:
        raise invalid(param, f"must hold 1 to {MAX_PROMPTS} prompts")


def native_params(
    sampling: NativeSampling | None,
    returns_logprob: bool | None,
    top_logprobs: int | None,
    logprob_start: int | None,
    logprob_ids: list[int],
    prompt: Prompt,
    *,
    limits: ModelLimits,
    grammar: str,
) -> GenerationParams:
    sampling = sampling or NativeSampling()
    check_ids(logprob_ids, limits, "token_ids_logprob")
    starts_inside = logprob_start is not None and 0 <= logprob_start < len(prompt.tokens)
    return check_params(
        sampling,
        limits,
        Names("max_new_tokens", "min_new_tokens", "sampling_params."),
        max_tokens=DEFAULT_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        top_logprobs=(top_logprobs or 0) if returns_logprob else None,
        prompt_logprobs_from=logprob_start if returns_logprob and starts_inside else None,
        logprob_ids=logprob_ids if returns_logprob else (),
        keeps_stop=bool(sampling.no_stop_trim),
        grammar=grammar,
    )


# out


@dataclass(slots=True)
class Written:
    """JSON of one streamed sample, without the closing bracket or quote."""

    text: bytearray
    ids: bytearray
    logprobs: bytearray
    tops: bytearray
    asked: bytearray


class GenerateReply(Reply):
    """`is_list`: the client sent lists, or wants several samples, and gets a list."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        is_list: bool,
        shows_text: bool,
        shows_tops: bool,
        shows_asked: bool,
        shows_input: bool,
    ) -> None:
        """shows_input: it tells of prompt tokens. Of a pair decode does: gateways put the lists of both together."""
        self.shows_prompts = False
        self._shows_input = shows_input
        self._input: dict[int, bytes] = {}  # by sample: members of `meta_info` about its prompt
        self._tokenizer = tokenizer
        self._is_list = is_list
        self._shows_text = shows_text  # of tokens in logprobs
        self._shows_tops = shows_tops
        self._shows_asked = shows_asked  # tokens that were asked for by their ids
        self._written: dict[int, Written] = {}

    def begin(self, sample: Sample) -> bytes:
        if sample.ask.sampling.logprobs:
            self._input[sample.ask.index] = encode(self._input_scores(sample))[1:-1]
        return b""

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        return self._event(sample, text, start, is_last=False)

    def _event(self, sample: Sample, text: str, start: int, *, is_last: bool) -> bytes:
        """What is told of the prompt may be large, and stands in the first and the last one only."""
        written = self._written.get(sample.ask.index)
        shows_prompt = written is None or is_last or sample.ask.sampling.prompt_logprobs_from is None
        if written is None:
            written = Written(bytearray(b'"'), *(bytearray(b"[") for _ in range(4)))
            self._written[sample.ask.index] = written
        written.text += encode(text)[1:-1]
        extend(written.ids, encode(sample.tokens[start:]))
        event = b'data: {"text":' + written.text + b'","output_ids":' + written.ids + b'],"meta_info":'
        meta = encode(self._meta(sample))
        if sample.ask.sampling.logprobs and shows_prompt:
            meta = meta[:-1] + b"," + self._input[sample.ask.index] + b"}"
        if sample.ask.sampling.logprobs:
            extend(written.logprobs, encode(self._scores(sample, start)))
            meta = meta[:-1] + b',"output_token_logprobs":' + written.logprobs + b"]}"
            if self._shows_tops:
                extend(written.tops, encode(self._tops(sample, start)))
                meta = meta[:-1] + b',"output_top_logprobs":' + written.tops + b"]}"
            if self._shows_asked:
                extend(written.asked, encode([self._asked(sample, score) for score in sample.scores[start:]]))
                meta = meta[:-1] + b',"output_token_ids_logprobs":' + written.asked + b"]}"
        tail = b',"index":%d}\n\n' % sample.ask.index if self._is_list else b"}\n\n"
        return bytes(event + meta + tail)

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        return self._event(sample, text, start, is_last=True)

    def close(self, samples: Sequence[Sample]) -> bytes:
        return b"data: [DONE]\n\n"

    def whole(self, samples: Sequence[Sample]) -> bytes:
        answers = [self._answer(sample) for sample in samples]
        return encode(answers if self._is_list else answers[0])

    def _answer(self, sample: Sample) -> dict[str, object]:
        meta = self._meta(sample)
        if sample.ask.sampling.logprobs:
            meta |= self._input_scores(sample)
            meta["output_token_logprobs"] = self._scores(sample, 0)
            if self._shows_tops:
                meta["output_top_logprobs"] = self._tops(sample, 0)
            if self._shows_asked:
                meta["output_token_ids_logprobs"] = [self._asked(sample, score) for score in sample.scores]
        return {"text": "".join(sample.parts), "output_ids": sample.tokens, "meta_info": meta}

    def _meta(self, sample: Sample) -> dict[str, object]:
        """Durations are seconds."""
        is_ended = bool(sample.ended_ns)
        until_ns = sample.ended_ns or time.monotonic_ns()
        meta: dict[str, object] = {
            "id": sample.ask.rid,
            "finish_reason": finish_reason(sample) if is_ended else None,
            "prompt_tokens": len(sample.ask.prompt.tokens),
            "completion_tokens": sample.text.num_tokens,
            "cached_tokens": sample.cached_tokens,
            "cached_tokens_details": {
                "device": sample.cached_tokens - sample.host_tokens,
                "host": sample.host_tokens - sample.storage_tokens,
                "storage": sample.storage_tokens,
            },
            "weight_version": "default",
            "dp_rank": sample.live.rank.dp_rank,
            "e2e_latency": (until_ns - sample.arrival_ns) / SECOND,
            "path": sample.path,
        }
        if sample.first_ns is not None:
            meta["ttft"] = (sample.first_ns - sample.arrival_ns) / SECOND
            meta["ttft_ledger"] = {stage: duration_ns / SECOND for stage, duration_ns in sample.ledger}
        if is_ended:
            record = sample.record(endpoint="", request_id="")
            meta["kv_pages"] = record.kv_pages
            meta["kv_bytes"] = record.kv_bytes
            meta["computed_tokens"] = record.computed_tokens
            meta["retries"] = record.retries
        return meta

    def _input_scores(self, sample: Sample) -> dict[str, object]:
        """SGLang's: of the prompt from `logprob_start_len` on. The first has none, for nothing before it was read."""
        first = sample.ask.sampling.prompt_logprobs_from
        told = [] if first is None or not self._shows_input else sample.ask.prompt.tokens[first:]
        scores = sample.scores_of_prompt() if told else []
        found: dict[str, object] = {
            "input_token_logprobs": [
                (None if score is None else score.logprob, token, self._text(token))
                for token, score in zip(told, scores, strict=True)
            ]
        }
        if self._shows_tops:
            found["input_top_logprobs"] = [self._alternatives(sample, score) for score in scores]
        if self._shows_asked:
            found["input_token_ids_logprobs"] = [self._asked(sample, score) for score in scores]
        return found

    def _scores(self, sample: Sample, start: int) -> list[tuple[float | None, int, str | None]]:
        return [
            (None if score is None else score.logprob, token, self._text(token))
            for token, score in zip(sample.tokens[start:], sample.scores[start:], strict=True)
        ]

    def _tops(self, sample: Sample, start: int) -> list[list[Told] | None]:
        return [self._alternatives(sample, score) for score in sample.scores[start:]]

    def _alternatives(self, sample: Sample, score: TokenScore | None) -> list[Told] | None:
        return None if score is None else self._told(score)[: len(score.top_ids) - len(sample.ask.sampling.logprob_ids)]

    def _asked(self, sample: Sample, score: TokenScore | None) -> list[Told] | None:
        return None if score is None else self._told(score)[len(score.top_ids) - len(sample.ask.sampling.logprob_ids) :]

    def _told(self, score: TokenScore) -> list[Told]:
        return [(logprob, id, self._text(id)) for id, logprob in zip(score.top_ids, score.top_logprobs, strict=True)]

    def _text(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._shows_text else None


def finish_reason(sample: Sample) -> dict[str, object]:
    if sample.finish_reason == "length":
        return {"type": "length", "length": sample.text.num_tokens}
    return {"type": "stop", "matched": sample.text.matched}


def extend(written: bytearray, array: bytes) -> None:
    """Append the members of an encoded array to an open one."""
    if len(array) > 2:
        written += array[1:-1] if written.endswith(b"[") and len(written) == 1 else b"," + array[1:-1]
