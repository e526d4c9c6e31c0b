"""haystack's generators of chats and responses: answers, a form, and agents that call a calculator by themselves."""

import json
import sys
from pathlib import Path
from typing import Annotated

from _shared import BASE, CALCULATOR, KEY, MODEL, MODEL_DIR, QUESTIONS, alone, same, shown
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

PROBLEMS = 10
FORM = {"name": "sum", "schema": CALCULATOR}
CHATS = {"response_format": {"type": "json_schema", "json_schema": FORM}}
RESPONSES = {"text": {"format": {"type": "json_schema", **FORM}}}
KINDS = (
    (OpenAIChatGenerator, "max_completion_tokens", CHATS),
    (OpenAIResponsesChatGenerator, "max_output_tokens", RESPONSES),
)


def calculator(expression: Annotated[str, "the expression"]) -> str:
    """Evaluates an arithmetic expression."""
    return answer(expression)


problems = [json.loads(line) for line in Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()[:PROBLEMS]]
tool = create_tool_from_function(calculator)
for kind, limit, form in KINDS:
    options = {"temperature": 0, limit: 160}
    model = kind(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=f"{BASE}/v1", generation_kwargs=options)
    for question in QUESTIONS:
        expected, asked, pieces = alone(question), [ChatMessage.from_user(question)], []
        same(model.run(asked)["replies"][0].text, expected)
        same(model.run(asked, streaming_callback=pieces.append)["replies"][0].text, expected)
        same("".join(piece.content for piece in pieces), expected)
    (reply,) = model.run([ChatMessage.from_user("Calculate 3 + 4.")], generation_kwargs=form)["replies"]
    assert set(json.loads(reply.text)) == {"a", "operator", "b"}, reply.text
    agent = Agent(chat_generator=model, tools=[tool], system_prompt="Use the calculator.")
    for problem in problems:
        for streamed in (None, [].append):
            told = agent.run([ChatMessage.from_user(problem["question"])], streaming_callback=streamed)["messages"]
            assert sum(len(message.tool_calls) for message in told) == 1, told
            same(told[-1].text, f"#### {problem['answer']}")
shown(
    f"by {len(KINDS)} generators {2 * len(KINDS) * len(QUESTIONS)} answers, whole and streamed, an object by a schema",
    f"{PROBLEMS} held-out problems solved by agents, whole and streamed, with calls that nothing forced",
)
