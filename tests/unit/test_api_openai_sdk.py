"""The openai package against a real uvicorn on a free port, with a fake node behind it."""

from collections.abc import Iterator

import openai
import pytest
from api_fakes import Script, ids, world

from raw_http import serving
from tandem.core.values import Cause

USER = [{"role": "user", "content": "hi"}]


def script(request, payload) -> Script:
    """Answers `Hello wörld 😀`; a prompt of a known odd length fails."""
    failures = {11: Cause.PEER_LOST, 13: Cause.QUEUE_FULL}
    if request.prompt_len in failures:
        return Script(failure=failures[request.prompt_len])
    if request.prompt_len == 17:
        return Script(ids("begin"), failure=Cause.DEADLINE_EXCEEDED)
    return Script([*ids("Hello wörld 😀"), 1])


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(world(script, api_key="key").app) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=0, timeout=10)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=USER)
    assert answer.choices[0].message.content == "Hello wörld 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello wörld 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_samples_and_stop(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=USER, n=3, stop=["wör"])
    assert [choice.message.content for choice in answer.choices] == ["Hello "] * 3


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["a", "b"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    stream = client.completions.create(model="toy", prompt="a", stream=True, max_tokens=50)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello wörld 😀"


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="toy", messages=USER, logprobs=True, top_logprobs=2, max_tokens=2)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["H", "e"]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2]
    text = client.completions.create(model="toy", prompt="a", logprobs=1, max_tokens=2)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.token_logprobs == [-0.5, -0.5]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_errors_have_their_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=USER, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    for prompt_len, status in ((11, 502), (13, 503)):
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="toy", prompt="x" * prompt_len)
        assert failed.value.status_code == status


def test_an_error_in_a_stream_is_raised_after_its_tokens(client: openai.OpenAI) -> None:
    seen = ""
    stream = client.completions.create(model="toy", prompt="x" * 17, stream=True)
    with pytest.raises(openai.APIError) as failed:  # noqa: PT012 (the tokens come before the error)
        for chunk in stream:
            seen += chunk.choices[0].text
    assert seen == "begin"
    assert failed.value.code == "deadline_exceeded"
