"""smolagents, and Hugging Face's client, which reads streams by code of its own and asks for forms in TGI's words."""

import asyncio
import json
from typing import Any

from _shared import BASE, CALCULATOR, KEY, MODEL, QUESTIONS, alone, same, shown
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from smolagents import OpenAIModel, Tool

FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "sum", "schema": CALCULATOR}}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": CALCULATOR}}
LIMITS: dict[str, Any] = {"temperature": 0, "max_tokens": 96}
STOP = "very"


class Calculator(Tool):
    name = "calculator"
    description = "Evaluates an arithmetic expression."
    inputs = {"expression": {"type": "string", "description": "the expression"}}
    output_type = "string"

    def forward(self, expression: str) -> str:
        return expression


def keeps_form(text: str) -> None:
    assert set(json.loads(text)) == {"a", "operator", "b"}, text


def ask_hub(client: InferenceClient) -> None:
    for question in QUESTIONS:
        messages, expected = [{"role": "user", "content": question}], alone(question)
        same(client.chat_completion(messages, model=MODEL, **LIMITS).choices[0].message.content, expected)
        *pieces, last = client.chat_completion(
            messages, model=MODEL, stream=True, stream_options={"include_usage": True}, **LIMITS
        )
        same("".join(piece.choices[0].delta.content or "" for piece in pieces), expected)
        assert last.usage.completion_tokens > 0
    reply = client.chat_completion(messages, model=MODEL, logprobs=True, top_logprobs=2, **LIMITS).choices[0]
    assert all(len(token.top_logprobs) == 2 for token in reply.logprobs.content)
    asked = [{"role": "user", "content": "Calculate 3 + 4."}]
    keeps_form(client.chat_completion(asked, model=MODEL, response_format=FORM, **LIMITS).choices[0].message.content)
    forced = client.chat_completion(asked, model=MODEL, tools=[TOOL], tool_choice="required", **LIMITS)
    keeps_form(forced.choices[0].message.tool_calls[0].function.arguments)
    try:
        client.chat_completion(asked, model="nobody", **LIMITS)
        status = 200
    except HfHubHTTPError as error:
        status = error.response.status_code
    assert status == 404, status


async def ask_hub_async() -> None:
    async with AsyncInferenceClient(base_url=f"{BASE}/v1", api_key=KEY) as client:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        pieces = await client.chat_completion(messages, model=MODEL, stream=True, **LIMITS)
        same("".join([piece.choices[0].delta.content or "" async for piece in pieces]), alone(QUESTIONS[0]))


def ask_model(model: OpenAIModel) -> None:
    for question in QUESTIONS:
        messages, expected = [{"role": "user", "content": [{"type": "text", "text": question}]}], alone(question)
        same(model.generate(messages).content, expected)
        same("".join(delta.content or "" for delta in model.generate_stream(messages)), expected)
    begun, found, _ = expected.partition(STOP)
    assert found, expected
    same(model.generate(messages, stop_sequences=[STOP]).content, begun)
    asked = [{"role": "user", "content": [{"type": "text", "text": "Calculate 3 + 4."}]}]
    (call,) = model.generate(asked, tools_to_call_from=[Calculator()]).tool_calls
    assert call.function.name == "calculator", call


ask_hub(InferenceClient(base_url=f"{BASE}/v1", api_key=KEY))
asyncio.run(ask_hub_async())
ask_model(OpenAIModel(MODEL, api_base=f"{BASE}/v1", api_key=KEY, **LIMITS))
shown("by 3 clients 13 answers, whole and streamed", "a stop sequence", "a form", "2 forced calls", "a refusal")
