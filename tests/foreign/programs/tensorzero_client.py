"""TensorZero's gateway, inside of its client: answers, and a calculator that the model calls by itself, in the words of
vLLM, of SGLang, and of OpenAI's chats and responses."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _shared import BASE, MODEL, MODEL_DIR, QUESTIONS, alone, same, shown
from tensorzero import TensorZeroGateway, Text, ToolCall

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

PROBLEMS = 10
PROVIDERS = {"vllm": "", "sglang": "", "openai": "", "responses": 'api_type = "responses"'}
CALCULATOR = {
    "name": "calculator",
    "description": "Evaluates an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def model(name: str, more: str) -> str:
    return f"""
[models.{name}]
routing = ["it"]
[models.{name}.providers.it]
type = "{name if not more else "openai"}"
api_base = "{BASE}/v1/"
model_name = "{MODEL}"
api_key_location = "none"
{more}
"""


def ask(name: str, messages: list[dict[str, Any]], *, stream: bool, **more: Any) -> list[Text | ToolCall]:
    """Texts of a stream put together; so are calls, which come in pieces."""
    asked = {
        "model_name": name,
        "input": {"messages": messages, **({"system": "Use the calculator."} if more else {})},
        "params": {"chat_completion": {"temperature": 0.0, "max_tokens": 160}},
        **more,
    }
    if not stream:
        return gateway.inference(**asked).content
    texts, calls = "", {}
    for chunk in gateway.inference(**asked, stream=True):
        for part in chunk.content:
            if part.type == "text":
                texts += part.text
            else:
                call = calls.setdefault(part.id, ["", ""])
                call[0] += part.raw_name or ""
                call[1] += part.raw_arguments
    found = [
        ToolCall(id, arguments, called, json.loads(arguments), called) for id, (called, arguments) in calls.items()
    ]
    return [*([Text(texts)] if texts else []), *found]


def text_of(content: list[Text | ToolCall]) -> str:
    return "".join(part.text for part in content if part.type == "text")


def solve(name: str, problem: dict[str, Any], *, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem["question"]}]
    (call,) = (
        part for part in ask(name, messages, stream=stream, additional_tools=[CALCULATOR]) if part.type != "text"
    )
    assert call.raw_name == "calculator", call
    named = {"id": call.id, "name": "calculator"}
    messages += [
        {"role": "assistant", "content": [{"type": "tool_call", **named, "arguments": call.raw_arguments}]},
        {"role": "user", "content": [{"type": "tool_result", **named, "result": answer(call.arguments["expression"])}]},
    ]
    told = ask(name, messages, stream=stream, additional_tools=[CALCULATOR])
    same(text_of(told), f"#### {problem['answer']}")


problems = [json.loads(line) for line in Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()[:PROBLEMS]]
with TemporaryDirectory() as folder:
    config = Path(folder, "tensorzero.toml")
    config.write_text("".join(model(name, more) for name, more in PROVIDERS.items()))
    with TensorZeroGateway.build_embedded(config_file=str(config)) as gateway:
        for name in PROVIDERS:
            for stream in (False, True):
                for question in QUESTIONS:
                    said = ask(name, [{"role": "user", "content": question}], stream=stream)
                    same(text_of(said), alone(question, max_tokens=160))
                for problem in problems:
                    solve(name, problem, stream=stream)
shown(
    f"by {len(PROVIDERS)} providers {2 * len(PROVIDERS) * len(QUESTIONS)} answers, whole and streamed",
    f"{PROBLEMS} held-out problems solved, whole and streamed, with calls that nothing forced",
)
