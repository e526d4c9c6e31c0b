"""What a body asks of one prompt, checked: its tokens, and the numbers by which they are gone on with.

Both halves of a disaggregated pair get the same body and check it each on its own: what they refuse, they refuse alike.
What becomes of it with the rest of the body: `sample_requests.py`.
"""

from collections.abc import Sequence
from typing import TypeVar  # a value that may be one or one per prompt

import msgspec
from msgspec import Struct

from tandem.core.values import Cause
from tandem.sampling import SamplingParams, VectorParams
from tandem.server.api.body import SamplingFields, unsupported
from tandem.server.api.errors import Failure, Problem, Refusal, contradiction, invalid
from tandem.server.api.limits import ModelLimits, Task
from tandem.server.api.reasoning import Thinking
from tandem.server.api.served_model import ServedModel

Number = TypeVar("Number", int, float)


class Prompt(Struct, frozen=True):
    tokens: list[int]
    text: str | None = None  # as the user wrote it, when it was text
    rendered_at: int = 0  # Unix seconds that its chat template has shown; 0: none
    too_long: Failure | None = None  # for this server's context; another one may take it


class GenerationParams(Struct, frozen=True):
    """Checked numbers of one prompt, still without room and seed per sample."""

    sampling: SamplingParams
    seed: int | None
    max_new_tokens: int | None  # None: whatever fits the context
    n: int
    stop: tuple[str, ...]
    keeps_stop: bool  # the text includes the stop string or token that ended it
    skip_special_tokens: bool
    vector: VectorParams | None = None  # no token is wanted
    thinking: Thinking = Thinking.NEVER


Asked = tuple[list[Prompt], list[GenerationParams]]  # by one body: the prompts, and the numbers of each


class Names(Struct, frozen=True):
    """What an endpoint calls the fields that the two dialects name differently: for messages to the user."""

    max_tokens: str = "max_tokens"
    min_tokens: str = "min_tokens"
    prefix: str = ""  # of all the others


def check_params(
    fields: SamplingFields,
    limits: ModelLimits,
    names: Names,
    *,
    max_tokens: int | None,
    min_tokens: int | None,
    seed: int | None,
    top_logprobs: int | None,  # None: no logprobs wanted
    keeps_stop: bool,
    grammar: str,
    prompt_logprobs_from: int | None,
    prompt_top_logprobs: int | None = None,  # None: as many as of the answer
    logprob_ids: Sequence[int] = (),
) -> GenerationParams:
    """Check what does not depend on the prompt and no type can say; raises `Refusal` for the first thing wrong."""
    prefix, defaults = names.prefix, limits.defaults
    if max_tokens is not None and (min_tokens or 0) > max_tokens:
        raise contradiction(prefix + names.min_tokens, f"must not exceed {names.max_tokens} ({max_tokens})")
    bias = fields.logit_bias or {}
    check_ids(list(bias), limits, prefix + "logit_bias")
    stop_token_ids = fields.stop_token_ids or []
    check_ids(stop_token_ids, limits, prefix + "stop_token_ids")
    sampling = SamplingParams(
        temperature=given_or(fields.temperature, defaults.temperature),
        top_k=max(given_or(fields.top_k, defaults.top_k), 0),
        top_p=given_or(fields.top_p, defaults.top_p),
        min_p=given_or(fields.min_p, defaults.min_p),
        presence_penalty=given_or(fields.presence_penalty, 0.0),
        frequency_penalty=given_or(fields.frequency_penalty, 0.0),
        repetition_penalty=given_or(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=bias,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min_tokens or 0,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        prompt_logprobs_from=prompt_logprobs_from,
        prompt_top_logprobs=0
        if prompt_logprobs_from is None
        else given_or(prompt_top_logprobs, given_or(top_logprobs, 0)),
        logprob_ids=tuple(logprob_ids),
        grammar=grammar,
    )
    if limits.block_tokens > 1:
        check_blocks(sampling, prefix)
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    return GenerationParams(
        sampling=sampling,
        seed=seed,
        max_new_tokens=max_tokens,
        n=given_or(fields.n, 1),
        stop=tuple(text for text in stops if text),
        keeps_stop=keeps_stop,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def check_blocks(sampling: SamplingParams, prefix: str) -> None:
    """What a token has no answer to that is found together with those behind it."""
    plain = SamplingParams()
    wanted = {
        "logprobs": sampling.logprobs or sampling.prompt_logprobs_from is not None,
        "response_format, tools or a grammar": bool(sampling.grammar),
        prefix + "frequency_penalty": sampling.frequency_penalty != plain.frequency_penalty,
        prefix + "presence_penalty": sampling.presence_penalty != plain.presence_penalty,
        prefix + "repetition_penalty": sampling.repetition_penalty != plain.repetition_penalty,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise unsupported(name, ": this model finds the tokens of a block together, not one behind the other")


def given_or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def check_task(limits: ModelLimits, *tasks: Task) -> None:
    """Raises `Refusal` where the model of this server is for something else than these."""
    if limits.task in tasks:
        return
    if Task.TOKENS in tasks:
        there = "/v1/rerank and /v1/score" + (", /v1/embeddings" if limits.task is Task.EMBEDDINGS else "")
        detail = f"this server makes {limits.task}, no tokens: ask {there}, or a server without --is-embedding"
    elif limits.task is Task.TOKENS:
        one = "a server of its own" if limits.role != "unified" else "a server"
        detail = f"this server generates tokens; vectors and scores come from {one} with --is-embedding, or an encoder"
    else:
        detail = "this server has a cross-encoder, which makes no embeddings: ask /v1/rerank or /v1/score"
    raise Refusal(Problem.WRONG_TASK, detail)


def check_ids(ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    """Raises `Refusal` for an id that is no token of this model's. Its tokenizer may have more, that were added to it
    alone.
    """
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < limits.vocab_size:
            raise invalid(param, f"{id} is not a token id; the vocabulary has {limits.vocab_size}")


async def read_text(text: str, served: ServedModel, param: str, *, add_special_tokens: bool = True) -> Prompt:
    """The prompt that a text is. Far too long a one is refused as it is: tokenizing takes seconds per MiB."""
    if not served.tokenizer.may_fit(text, served.limits.context_length):
        raise too_long(param, f"{len(text)} characters are more than its tokens can hold", served.limits)
    return Prompt(await served.tokenizer.encode_anywhere(text, add_special_tokens=add_special_tokens), text)


def check_prompt(prompt: Prompt, limits: ModelLimits, param: str) -> Prompt:
    """Raises `Refusal` for what no server takes. One that is too long for this one says so: see `beyond`."""
    if not prompt.tokens:
        raise invalid(param, "the prompt has no tokens")
    check_ids(prompt.tokens, limits, param)
    if len(prompt.tokens) >= limits.context_length:
        refusal = too_long(param, f"{len(prompt.tokens)} tokens > {limits.context_length - 1} maximum", limits)
        return msgspec.structs.replace(prompt, too_long=refusal.failure)
    return prompt


def too_long(param: str, what: str, limits: ModelLimits) -> Refusal:
    """In the words by which clients know that they have to shorten it: Anthropic's, then OpenAI's."""
    context = f"This model's maximum context length is {limits.context_length} tokens"
    return Refusal(Cause.CONTEXT_LENGTH_EXCEEDED, f"{param}: prompt is too long: {what}. {context}", param=param)


def check_prompts(prompts: list[Prompt], limits: ModelLimits, param: str) -> list[Prompt]:
    return [check_prompt(prompt, limits, param) for prompt in prompts]


def beyond(prompts: Sequence[Prompt], all_params: Sequence[GenerationParams], limits: ModelLimits) -> Failure | None:
    """Why these are too much for this server. One with other flags may take them, and so may have the other half."""
    too_long = next((prompt.too_long for prompt in prompts if prompt.too_long is not None), None)
    num_samples = sum(params.n for params in all_params)
    if too_long is None and num_samples > limits.max_samples:
        message = f"{num_samples} samples in one request; at most {limits.max_samples} are accepted"
        return contradiction("n", message).failure
    return too_long
