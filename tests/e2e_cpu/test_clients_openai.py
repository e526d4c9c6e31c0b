"""The OpenAI SDK as its users use it, through our router and through sglang-router, against our unified server.

Through either the answers come from prefill and decode; they must be the unified server's, token by token and logprob
by logprob. The SDK retries nothing here, so that every failure is seen.
"""

import asyncio
from functools import cache
from typing import Any  # the SDK's parameters

import openai
import pytest
from cluster import MODEL, Cluster, Server, eventually
from openai.types.chat import ChatCompletion, ChatCompletionChunk

FOREVER = {"ignore_eos": True}
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)


@pytest.fixture(scope="module")
def servers(it: Cluster, common_gateway: Server) -> dict[str, Server]:
    assert it.router is not None
    assert it.unified is not None
    return {"tandem router": it.router, "sglang-router": common_gateway, "unified": it.unified}


@pytest.fixture(params=["tandem router", "sglang-router"])
def front(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]


@pytest.fixture
def client(front: Server) -> openai.OpenAI:
    return sdk(front)


@pytest.fixture
def reference(servers: dict[str, Server]) -> openai.OpenAI:
    return sdk(servers["unified"])


@cache
def client_of(url: str) -> openai.OpenAI:
    """Making one takes longer than most requests."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def sdk(server: Server) -> openai.OpenAI:
    return client_of(server.url)


def chat(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(**chat_fields(**fields))
    return answer


def streamed_chat(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(stream=True, **chat_fields(**fields)))


def chat_fields(*, question: str = QUESTION, extra: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """24 greedy tokens, whatever the model would rather say. `extra`: fields that the SDK does not know."""
    messages = [{"role": "user", "content": question}]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
    return asked | {"extra_body": FOREVER | (extra or {})} | fields


def text_of(answer: ChatCompletion) -> str:
    text = answer.choices[0].message.content
    assert text is not None
    return text


def text_of_chunks(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def gauges(server: Server) -> dict[str, float]:
    """Sum over its labels of every gauge that counts work."""
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        name = line.removeprefix("sglang:").partition("{")[0]
        if name in GAUGES:
            found[name] = found.get(name, 0) + float(line.rpartition(" ")[2])
    return found


def is_free(it: Cluster) -> bool:
    """Both halves say, in state and metrics, that they do nothing for anybody."""
    halves = (it.prefills[0], it.decodes[0])
    return all(half.is_idle() and not any(gauges(half).values()) for half in halves)


def what_is_held(it: Cluster) -> object:
    return [(half.state(), gauges(half)) for half in (it.prefills[0], it.decodes[0])]


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_one_model_is_found_by_its_name(servers: dict[str, Server]) -> None:
    client = sdk(servers["tandem router"])  # sglang-router has no such page
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_chat_is_that_of_one_engine(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    ours, theirs = chat(client), chat(reference)
    assert ours.choices == theirs.choices
    assert (ours.object, ours.model, ours.choices[0].message.role) == ("chat.completion", MODEL, "assistant")
    assert ours.usage is not None
    assert theirs.usage is not None
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (theirs.usage.prompt_tokens, 24)
    assert ours.usage.total_tokens == ours.usage.prompt_tokens + 24


def test_where_the_prompts_kv_came_from_is_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**chat_fields())
    assert raw.headers["x-tandem-path"] == "remote"
    assert raw.headers["x-request-id"]


def test_a_streamed_chat_has_the_same_text_in_many_pieces(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    chunks = streamed_chat(client)
    assert len(chunks) > 2  # its role, what came first, and the rest: a client that is slow gets more at a time
    assert text_of_chunks(chunks) == text_of(chat(reference))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_counts_its_tokens_when_asked_to(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    last = streamed_chat(client, stream_options={"include_usage": True})[-1]
    whole = chat(reference).usage
    assert last.choices == []
    assert last.usage is not None
    assert whole is not None
    counted = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)
    assert counted == (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens)


@pytest.mark.parametrize(
    "prompt", [QUESTION, ["Tom has", "Anna buys 3"], [300, 301, 302]], ids=["text", "texts", "token ids"]
)
def test_completions_are_those_of_one_engine(
    servers: dict[str, Server], front: Server, reference: openai.OpenAI, prompt: Any
) -> None:
    if front is servers["sglang-router"] and isinstance(prompt[0], int):
        return  # it takes no ids; its users send them to /generate, see test_clients_sglang_router.py
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 10,
        "temperature": 0,
        "extra_body": FOREVER,
    }
    ours = sdk(front).completions.create(**fields)
    assert ours.choices == reference.completions.create(**fields).choices
    pieces = dict.fromkeys(range(len(ours.choices)), "")
    for chunk in sdk(front).completions.create(stream=True, **fields):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == {choice.index: choice.text for choice in ours.choices}


def test_chat_logprobs_are_those_of_one_engine_from_the_first_token_on(
    client: openai.OpenAI, reference: openai.OpenAI
) -> None:
    asked = {"logprobs": True, "top_logprobs": 4, "max_tokens": 8}
    expected = scores(chat(reference, **asked).choices[0].logprobs)
    assert len(expected) == 8 * 5
    assert scores(chat(client, **asked).choices[0].logprobs) == pytest.approx(expected, abs=1e-3)
    chunks = streamed_chat(client, **asked)
    streamed = [score for chunk in chunks for choice in chunk.choices for score in scores(choice.logprobs)]
    assert streamed == pytest.approx(expected, abs=1e-3)


def scores(logprobs: Any) -> list[float]:
    """Of a chat's tokens, each followed by the best candidates. Says whether they belong together."""
    found: list[float] = []
    for entry in logprobs.content if logprobs is not None else ():
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        found += [entry.logprob, *(top.logprob for top in entry.top_logprobs)]
    return found


def test_completion_logprobs_are_those_of_one_engine_from_the_first_token_on(
    client: openai.OpenAI, reference: openai.OpenAI
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": QUESTION, "max_tokens": 8, "logprobs": 3}
    fields |= {"temperature": 0, "extra_body": FOREVER}
    ours, theirs = (one.completions.create(**fields).choices[0].logprobs for one in (client, reference))
    assert ours is not None
    assert theirs is not None
    assert (ours.tokens, ours.text_offset) == (theirs.tokens, theirs.text_offset)
    assert ours.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-3)
    assert ours.top_logprobs is not None
    assert theirs.top_logprobs is not None
    assert [len(tops) for tops in ours.top_logprobs] == [3] * 8
    for mine, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    text = text_of(chat(reference))
    stop = text[len(text) // 2 :][:3]  # falls where it falls, also inside of a token
    expected = text[: text.index(stop)]
    answer = chat(client, stop=["never said", stop])
    assert text_of(answer) == expected
    assert answer.choices[0].finish_reason == "stop"
    chunks = streamed_chat(client, stop=stop)
    assert text_of_chunks(chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_token_ends_the_answer(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    whole = chat(reference, extra={"return_token_ids": True}).choices[0]
    tokens: list[int] = whole.model_dump()["token_ids"]
    stop = tokens[9]
    answer = chat(client, extra={"stop_token_ids": [stop]})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens.index(stop) + 1
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["matched_stop"] == stop
    assert whole.message.content is not None
    assert whole.message.content.startswith(text_of(answer))


def test_one_token_is_enough(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    asked = {"max_tokens": 1, "logprobs": True}
    ours, theirs = chat(client, **asked), chat(reference, **asked)
    assert ours.choices[0].finish_reason == "length"
    assert text_of(ours) == text_of(theirs)
    assert ours.choices[0].logprobs is not None
    assert ours.choices[0].logprobs.content is not None
    assert len(ours.choices[0].logprobs.content) == 1
    assert text_of_chunks(streamed_chat(client, max_tokens=1)) == text_of(theirs)


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(
    client: openai.OpenAI, reference: openai.OpenAI
) -> None:
    asked = {"temperature": 2.0, "max_tokens": 32, "frequency_penalty": 2.0}  # far from what the model is sure of
    first, again, other = (text_of(chat(client, seed=seed, **asked)) for seed in (5, 5, 6))
    assert first == again == text_of(chat(reference, seed=5, **asked))
    assert other == text_of(chat(reference, seed=6, **asked))
    assert first != other


def test_several_samples_of_one_prompt_differ_and_are_those_of_one_engine(
    client: openai.OpenAI, reference: openai.OpenAI
) -> None:
    asked = {"n": 2, "seed": 7, "temperature": 2.0, "max_tokens": 32, "frequency_penalty": 2.0}
    ours, theirs = chat(client, **asked), chat(reference, **asked)
    assert [choice.index for choice in ours.choices] == [0, 1]
    assert ours.choices == theirs.choices
    assert ours.choices[0].message.content != ours.choices[1].message.content
    assert ours.usage is not None
    assert ours.usage.completion_tokens == sum_of_tokens(theirs)


def sum_of_tokens(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    return answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
        ({"question": "apple " * 9000}, "tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_request_is_a_bad_request_error(
    client: openai.OpenAI, wrong: dict[str, Any], word: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(stream=stream, **chat_fields(**wrong))
    assert word in refused.value.response.text


def test_our_router_keeps_code_and_parameter_of_an_error(servers: dict[str, Server]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk(servers["tandem router"]), max_tokens=0)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "max_tokens")
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(stream=stream, **chat_fields(model="nobody"))
    assert "nobody" in refused.value.response.text


def test_leaving_a_stream_frees_both_halves(client: openai.OpenAI, it: Cluster) -> None:
    stream = client.chat.completions.create(stream=True, **chat_fields(max_tokens=5000))
    for _ in range(3):
        next(stream)
    assert gauges(it.decodes[0])["num_running_reqs"] == 1
    stream.close()
    eventually(lambda: is_free(it), what=lambda: what_is_held(it))


def test_a_client_that_loses_its_patience_frees_both_halves(client: openai.OpenAI, it: Cluster) -> None:
    impatient = client.with_options(timeout=0.4)
    with pytest.raises(openai.APITimeoutError):
        chat(impatient, max_tokens=7000)
    eventually(lambda: is_free(it), what=lambda: what_is_held(it))


def test_text_in_any_language_goes_in_and_comes_out_unharmed(client: openai.OpenAI, reference: openai.OpenAI) -> None:
    question = "Zoë kauft 3 Äpfel 🍎 und 日本 — how many? é"
    assert text_of(chat(client, question=question)) == text_of(chat(reference, question=question))
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0, "echo": True}
    assert client.completions.create(prompt=question, **fields).choices[0].text.startswith(question)


def test_a_letter_of_two_tokens_is_never_torn_apart(
    client: openai.OpenAI, reference: openai.OpenAI, it: Cluster
) -> None:
    """Made to say nothing but the two bytes of one letter, in an order that is the model's and not always the right."""
    first, second = it.decodes[0].call("POST", "/tokenize", {"prompt": "é"})["tokens"]
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Zoë", "max_tokens": 24, "seed": 4, "frequency_penalty": 2.0}
    fields["logit_bias"] = {str(first): 100, str(second): 100}
    text = reference.completions.create(**fields).choices[0].text
    assert "é" in text
    answers: list[list[str]] = []

    def comes_in_parts() -> bool:
        """Tokens that are there together are one piece: so it may be where the cores are busy."""
        answers.append([chunk.choices[0].text for chunk in client.completions.create(stream=True, **fields)])
        return len(answers[-1]) > 2

    eventually(comes_in_parts, what=lambda: str(answers))
    for pieces in answers:
        assert "".join(pieces) == text
        assert text.count("é") == sum(piece.count("é") for piece in pieces)


def test_many_at_once_all_get_the_answer_of_one_engine(front: Server, reference: openai.OpenAI, it: Cluster) -> None:
    questions = [f"Tom has {number} apples and buys {2 * number} more. How many?" for number in range(3, 15)]

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=30)
        async with client:
            asks = [client.chat.completions.create(**chat_fields(question=question)) for question in questions]
            return [text_of(answer) for answer in await asyncio.gather(*asks)]

    assert asyncio.run(ask_all()) == [text_of(chat(reference, question=question)) for question in questions]
    eventually(lambda: is_free(it), what=lambda: what_is_held(it))
