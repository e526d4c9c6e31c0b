"""langchain-anthropic: answers, forms, and agents on langgraph that call a calculator of their own accord."""

import json
import sys
from pathlib import Path

from _shared import BASE, CALCULATOR, KEY, MODEL, MODEL_DIR, QUESTIONS, alone, same, shown
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

PROBLEMS = 10
model = ChatAnthropic(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_tokens=160)


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return answer(expression)


for question in QUESTIONS:
    expected = alone(question)
    reply = model.invoke(question)
    same(reply.content, expected)
    same("".join(piece.text for piece in model.stream(question)), expected)
    counted = model.get_num_tokens_from_messages([HumanMessage(question)])
    assert counted == reply.usage_metadata["input_tokens"], (counted, reply.usage_metadata)

for method in ("json_schema", "function_calling"):
    found = model.with_structured_output({"title": "sum", **CALCULATOR}, method=method).invoke("Calculate 3 + 4.")
    assert set(found) == {"a", "operator", "b"}, found

agent = create_agent(model, [calculator], system_prompt="Use the calculator.")
problems = [json.loads(line) for line in Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()[:PROBLEMS]]
for problem in problems:
    asked = {"messages": [HumanMessage(problem["question"])]}
    told = agent.invoke(asked)["messages"]
    assert [message.type for message in told] == ["human", "ai", "tool", "ai"], told
    same(told[-1].text, f"#### {problem['answer']}")
    pieces = [piece for piece, of in agent.stream(asked, stream_mode="messages") if of["langgraph_node"] == "model"]
    last = [piece.text for piece in pieces if piece.id == pieces[-1].id]
    same("".join(last), f"#### {problem['answer']}")
shown(
    f"{2 * len(QUESTIONS)} answers, whole and streamed, prompts counted before",
    "structured output by schema and by tool",
    f"{PROBLEMS} held-out problems solved by agents on langgraph, whole and streamed, with calls that nothing forced",
)
