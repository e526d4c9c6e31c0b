"""Tools with the bundled model and the OpenAI SDK, through prefill and decode: what is forced is valid, and the same.

The model was shown a calculator and no other tool: what holds here holds by the grammar. Its own calls are in
`test_calculator.py`.
"""

import json
from typing import Any  # the SDK's parameters

import openai
import pytest
from cluster import MODEL, Cluster, Server

USER = [{"role": "user", "content": "What is 3 + 4?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 8}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "note"}}


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def router(common: Cluster) -> openai.OpenAI:
    assert common.router is not None
    return sdk(common.router)


@pytest.fixture
def unified(common: Cluster) -> openai.OpenAI:
    assert common.unified is not None
    return sdk(common.unified)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 600, "tools": [ADD, NOTE]} | fields


def calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
        {"tool_choice": "required", "temperature": 1.0, "seed": 4, "parallel_tool_calls": False},
    ],
    ids=str,
)
def test_a_forced_call_is_valid_and_the_same_on_pair_and_engine(
    router: openai.OpenAI, unified: openai.OpenAI, fields: dict[str, Any]
) -> None:
    answer = router.chat.completions.create(**asked(**fields))
    choice = answer.choices[0]
    ((name, arguments),) = calls(choice.message)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert set(json.loads(arguments)) == ({"a", "b"} if name == "add" else {"text"})
    alone = unified.chat.completions.create(**asked(**fields))
    assert calls(alone.choices[0].message) == [(name, arguments)]


def test_a_streamed_call_is_put_together_what_the_whole_one_is(router: openai.OpenAI) -> None:
    fields = asked(tool_choice="required", parallel_tool_calls=False)
    whole = router.chat.completions.create(**fields)
    with router.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert calls(final.choices[0].message) == calls(whole.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_conversation_with_a_call_and_its_result_goes_on(router: openai.OpenAI) -> None:
    first = router.chat.completions.create(**asked(tool_choice="required", parallel_tool_calls=False))
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    messages = [*USER, message.model_dump(exclude_none=True), result]
    second = router.chat.completions.create(**asked(messages=messages, tool_choice="none", max_tokens=20))
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def test_tools_that_may_not_be_called_leave_the_answer_as_it_was(router: openai.OpenAI) -> None:
    with_tools = router.chat.completions.create(**asked(tool_choice="none"))
    without = router.chat.completions.create(**asked(tools=openai.NOT_GIVEN))
    assert with_tools.choices[0].message.content == without.choices[0].message.content
    assert with_tools.choices[0].finish_reason == "stop"


def test_a_choice_among_no_tools_is_a_400_that_the_sdk_knows(router: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        router.chat.completions.create(**asked(tools=openai.NOT_GIVEN, tool_choice="required"))
    assert refused.value.param == "tool_choice"
