"""What ends with its prompts: embeddings as OpenAI has them, rerank as Jina and Cohere, scores as vLLM, in and out.

A cross-encoder reads two texts as one prompt and says how well they fit. An embedding model reads each text alone;
how well two fit is then the product of their vectors, which have length 1.
"""

import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from operator import mul

import msgspec

from tandem.core.values import Cause
from tandem.sampling import SamplingParams, VectorParams
from tandem.server.api.body import Document, EmbeddingBody, RerankBody, Routing, ScoreBody, unsupported
from tandem.server.api.bounds import LOOP_BYTES, LOOP_SAMPLES, MAX_PROMPTS
from tandem.server.api.errors import Refusal, invalid
from tandem.server.api.limits import ModelLimits, Task
from tandem.server.api.off_loop import in_turns, off_loop
from tandem.server.api.openai import prompt_items
from tandem.server.api.sample import Sample
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Reply
from tandem.server.api.validation import (
    Asked,
    GenerationParams,
    Prompt,
    check_ids,
    read_text,
    too_long,
)

encode = msgspec.json.Encoder().encode


# in


async def read_embeddings(body: EmbeddingBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    """size: bytes of the body."""
    limits = served.limits
    refuse_stream(routing)
    if body.normalize is False:
        raise unsupported("normalize", " unless it is true: vectors have length 1")
    if body.dimensions is not None and body.dimensions > limits.dimensions:
        raise invalid("dimensions", f"this model has {limits.dimensions}")
    adds_special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    async for item in in_turns(await off_loop(size, LOOP_BYTES, prompt_items, body.input, "input"), LOOP_SAMPLES):
        if isinstance(item, str):
            prompts.append(await read_one(item, served, "input", add_special_tokens=adds_special))
        else:
            prompts.append(check_length(Prompt(item), limits, "input"))
    return prompts, [params_of(VectorParams(dimensions=body.dimensions))] * len(prompts)


async def read_rerank(body: RerankBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    refuse_stream(routing)
    if body.query is None:
        raise invalid("query", "is missing")
    if not body.documents:
        raise invalid("documents", "is missing or empty")
    texts = [text_of(document) for document in body.documents]
    return await read_texts([body.query], texts, ("query", "documents"), served)


async def read_score(body: ScoreBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    refuse_stream(routing)
    first, second = listed(body.text_1, "text_1"), listed(body.text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise invalid("text_1", f"{len(first)} texts for {len(second)} of text_2; one, or as many, are needed")
    return await read_texts(first, second, ("text_1", "text_2"), served)


def refuse_stream(routing: Routing) -> None:
    if routing.stream:
        raise unsupported("stream", ": the answer is one number or vector for each text")


def listed(value: str | list[str] | None, param: str) -> list[str]:
    if value is None or value == []:
        raise invalid(param, "is missing or empty")
    return [value] if isinstance(value, str) else value


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


async def read_texts(first: list[str], second: list[str], params: tuple[str, str], served: ServedModel) -> Asked:
    """One text, or as many as there are others. Of a cross-encoder prompts are pairs, else all first texts before all
    second ones.
    """
    if served.limits.task is Task.SCORES:
        firsts = first * len(second) if len(first) == 1 else first
        pairs = in_turns(list(zip(firsts, second, strict=True)), LOOP_SAMPLES)
        read = [await read_pair(one, other, params, served) async for one, other in pairs]
        return [prompt for prompt, _ in read], [params_of(wants) for _, wants in read]
    prompts: list[Prompt] = []
    for texts, param in ((first, params[0]), (second, params[1])):
        async for text in in_turns(texts, LOOP_SAMPLES):
            prompts.append(await read_one(text, served, param))
    if len(prompts) > MAX_PROMPTS:
        raise invalid(params[1], f"at most {MAX_PROMPTS} texts in one request, of both kinds together")
    return prompts, [params_of(VectorParams())] * len(prompts)


async def read_one(text: str, served: ServedModel, param: str, *, add_special_tokens: bool = True) -> Prompt:
    refuse_empty(text, param)
    prompt = await read_text(text, served, param, add_special_tokens=add_special_tokens)
    return check_length(prompt, served.limits, param)


async def read_pair(
    first: str, second: str, params: tuple[str, str], served: ServedModel
) -> tuple[Prompt, VectorParams]:
    refuse_empty(first, params[0])
    refuse_empty(second, params[1])
    tokens, second_from = await served.tokenizer.encode_pair(first, second)
    return check_length(Prompt(tokens, first), served.limits, params[1]), VectorParams(second_from=second_from)


def refuse_empty(text: str, param: str) -> None:
    if not text:
        raise invalid(param, "a text is empty")


def check_length(prompt: Prompt, limits: ModelLimits, param: str) -> Prompt:
    """No room for output is needed. Raises `Refusal`."""
    if not prompt.tokens:
        raise invalid(param, "a prompt has no tokens")
    check_ids(prompt.tokens, limits, param)
    count = len(prompt.tokens)
    if count > limits.context_length:
        raise too_long(param, f"{count} tokens > {limits.context_length} maximum", limits)
    if limits.one_batch_tokens is not None and count > limits.one_batch_tokens:
        raise Refusal(
            Cause.CONTEXT_LENGTH_EXCEEDED,
            f"{param}: {count} tokens are more than one batch of {limits.one_batch_tokens} (--chunked-prefill-size), "
            "and a model that looks both ways computes a prompt in one",
            param=param,
        )
    return prompt


def params_of(vector: VectorParams) -> GenerationParams:
    return GenerationParams(SamplingParams(), 0, 0, 1, (), False, True, vector)


# out


class VectorReply(Reply):
    """A `Reply` that is never streamed."""

    def __init__(self, write: Callable[[Sequence[Sample]], bytes], *, shows_prompts: bool = False) -> None:
        self.shows_prompts = shows_prompts
        self._write = write

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        return b""

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        return b""

    def whole(self, samples: Sequence[Sample]) -> bytes:
        return self._write(samples)


def embeddings(body: EmbeddingBody, model: str, samples: Sequence[Sample]) -> bytes:
    is_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": sample.ask.index,
            "embedding": b64encode(sample.vector).decode() if is_base64 else floats(sample),
        }
        for sample in samples
    ]
    return encode({"object": "list", "data": data, "model": model, "usage": usage(samples)})


def ranking(body: RerankBody, model: str, task: Task, samples: Sequence[Sample]) -> bytes:
    """Best first; of equals the one that was named first."""
    assert body.documents is not None
    found = enumerate(fits(samples, task, num_first=1))
    best = sorted(found, key=lambda one: -one[1])[: body.top_n]
    results: list[dict[str, object]] = [{"index": index, "relevance_score": score} for index, score in best]
    if body.return_documents is not False:
        for result, (index, _) in zip(results, best, strict=True):
            result["document"] = {"text": text_of(body.documents[index])}
    id = "rerank-" + samples[0].ask.rid
    return encode({"id": id, "model": model, "results": results, "usage": usage(samples)})


def scores(body: ScoreBody, model: str, task: Task, samples: Sequence[Sample]) -> bytes:
    num_first = len(listed(body.text_1, "text_1"))
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(fits(samples, task, num_first=num_first))
    ]
    id = "score-" + samples[0].ask.rid
    answer = {"id": id, "object": "list", "created": int(time.time()), "model": model, "data": data}
    return encode(answer | {"usage": usage(samples)})


def fits(samples: Sequence[Sample], task: Task, *, num_first: int) -> Iterable[float]:
    """How well each second text fits its first one."""
    vectors = [floats(sample) for sample in samples]
    if task is Task.SCORES:
        return [score for (score,) in vectors]
    first, second = vectors[:num_first], vectors[num_first:]
    firsts = first * len(second) if num_first == 1 else first
    return [sum(map(mul, one, other)) for one, other in zip(firsts, second, strict=True)]


def floats(sample: Sample) -> list[float]:
    values = array("f")
    values.frombytes(sample.vector)
    return values.tolist()


def usage(samples: Sequence[Sample]) -> dict[str, int]:
    num_tokens = sum(len(sample.ask.prompt.tokens) for sample in samples)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
