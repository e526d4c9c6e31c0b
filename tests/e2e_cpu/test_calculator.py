"""A call of a calculator that nothing forces, with real tokens: its result goes back, and the answer is right."""

import json
from pathlib import Path
from typing import Any  # the SDK's parameters

import openai
import pytest
from cluster import MODEL, Cluster

from mini_scripts import script

HELD_OUT = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "src/tandem/bundled/mini/heldout.jsonl").read_text().splitlines()
]
calculator = script("calculator")


@pytest.fixture
def router(common: Cluster) -> openai.OpenAI:
    assert common.router is not None
    return openai.OpenAI(base_url=f"{common.router.url}/v1", api_key="none", max_retries=0, timeout=30)


def said(client: openai.OpenAI, messages: list[Any], is_streamed: bool) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 160}
    fields |= {"tools": [calculator.TOOL], "tool_choice": "auto"}
    if not is_streamed:
        return client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("problem", HELD_OUT[:5], ids=lambda problem: problem["question"][:20])
def test_a_call_that_nothing_forces_leads_to_the_right_answer(
    router: openai.OpenAI, problem: dict[str, str], is_streamed: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": problem["question"]}]
    called = said(router, messages, is_streamed)
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "calculator"
    formula = json.loads(call.function.arguments)["expression"]
    messages.append(called.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator.answer(formula)})
    answered = said(router, messages, is_streamed)
    assert (answered.finish_reason, answered.message.tool_calls) == ("stop", None)
    assert answered.message.content == f"#### {problem['answer']}"


@pytest.mark.parametrize("instruction", ["Answer as JSON.", "Reply with JSON only."])
def test_json_on_request_holds_the_right_answer(router: openai.OpenAI, instruction: str) -> None:
    question = "Calculate 9 * 13 + 48."
    answer = router.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": f"{question} {instruction}"}], temperature=0, max_tokens=160
    )
    assert json.loads(answer.choices[0].message.content or "")["answer"] == 165


@pytest.mark.parametrize("greeting", ["Hi", "Hello!", "Who are you?", "What is the capital of France?"])
def test_who_greets_it_is_told_what_it_is_for(router: openai.OpenAI, greeting: str) -> None:
    answer = router.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": greeting}], temperature=0, max_tokens=60
    )
    text = answer.choices[0].message.content or ""
    assert "very small model" in text
    assert "arithmetic word problem" in text
    assert answer.choices[0].finish_reason == "stop"
