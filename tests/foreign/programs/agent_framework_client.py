"""Microsoft's Agent Framework by its clients of chats and responses: answers, a form, a conversation, and agents that
call a calculator of their own accord."""

import asyncio
import json
import sys
from pathlib import Path

from _shared import BASE, KEY, MODEL, MODEL_DIR, QUESTIONS, alone, same, shown
from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from pydantic import BaseModel

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

PROBLEMS = 10
KINDS = (OpenAIChatCompletionClient, OpenAIChatClient)
OPTIONS = {"temperature": 0, "max_tokens": 160}


class Solution(BaseModel):
    steps: str
    answer: int


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return answer(expression)


async def both_ways(agent: Agent, question: str, expected: str) -> None:
    same((await agent.run(question)).text, expected)
    stream = agent.run(question, stream=True)
    pieces = [update async for update in stream]
    assert len(pieces) > 1, pieces
    same((await stream.get_final_response()).text, expected)


async def main() -> None:
    problems = [json.loads(line) for line in Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()[:PROBLEMS]]
    for kind in KINDS:
        client = kind(MODEL, api_key=KEY, base_url=f"{BASE}/v1")
        agent = Agent(client, default_options=OPTIONS)
        for question in QUESTIONS:
            await both_ways(agent, question, alone(question))
        solution = (await agent.run(QUESTIONS[1], options={"response_format": Solution})).value
        assert solution.answer == 9 * 13 + 48, solution
        session = agent.create_session()
        sizes = [(await agent.run("Hello!", session=session)).usage_details["input_token_count"] for _ in range(2)]
        assert sizes[1] > 2 * sizes[0], sizes
        solver = Agent(client, "Use the calculator.", tools=[calculator], default_options=OPTIONS)
        for problem in problems:
            await both_ways(solver, problem["question"], f"#### {problem['answer']}")


asyncio.run(main())
shown(
    f"by {len(KINDS)} clients {2 * len(KINDS) * len(QUESTIONS)} answers, whole and streamed, a type and a conversation",
    f"{PROBLEMS} held-out problems solved by agents, whole and streamed, with calls that nothing forced",
)
