"""Anthropic's SDK as its users use it, through our router: the answer of one engine, as a chat of OpenAI's has it."""

from typing import Any  # the SDK's parameters

import anthropic
import openai
import pytest
from cluster import MODEL, Cluster, Server

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.fixture(params=["router", "unified"])
def client(request: pytest.FixtureRequest, common: Cluster) -> anthropic.Anthropic:
    server: Server = getattr(common, request.param)
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def chat_text(common: Cluster) -> str:
    """What the chat endpoint of one engine says."""
    assert common.unified is not None
    sdk = openai.OpenAI(base_url=f"{common.unified.url}/v1", api_key="none", max_retries=0, timeout=30)
    messages: list[Any] = [{"role": "system", "content": "Think."}, {"role": "user", "content": QUESTION}]
    answer = sdk.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=60)
    return answer.choices[0].message.content or ""


def fields(**other: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return {
        "model": MODEL,
        "max_tokens": 60,
        "extra_body": {"temperature": 0},
        "system": "Think.",
        "messages": messages,
    } | other


def test_the_answer_is_that_of_the_chat_endpoint(client: anthropic.Anthropic, chat_text: str) -> None:
    message = client.messages.create(**fields())
    assert [block.text for block in message.content if block.type == "text"] == [chat_text]
    assert message.usage.output_tokens > 0


def test_a_stream_is_the_same_message(client: anthropic.Anthropic, chat_text: str) -> None:
    with client.messages.stream(**fields()) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == chat_text
    assert [block.text for block in message.content if block.type == "text"] == [chat_text]
    assert len(pieces) > 1


def test_a_tool_that_must_be_called_is(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields(tools=[ADD], tool_choice={"type": "tool", "name": "add"}, max_tokens=200))
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "add"
    assert set(call.input) == {"a", "b"}
    assert message.stop_reason == "tool_use"


def test_tokens_are_counted_without_computing_them(client: anthropic.Anthropic) -> None:
    asked = {name: value for name, value in fields().items() if name in ("model", "system", "messages")}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**fields(max_tokens=1)).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_what_cannot_be_answered_is_the_clients_own_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**fields(model="nobody"))
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**fields(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]))
