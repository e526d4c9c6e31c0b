"""openai-agents: a loop that calls a calculator of its own accord and solves held-out problems with what it says."""

import asyncio
import json
import sys
from pathlib import Path

from _shared import BASE, KEY, MODEL, MODEL_DIR, shown
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

set_tracing_disabled(True)
PROBLEMS, STREAMED = 20, 5
calls: list[str] = []


@function_tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    calls.append(expression)
    return answer(expression)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY)
    agent = Agent(
        name="solver",
        instructions="Use the calculator.",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        tools=[calculator],
        model_settings=ModelSettings(temperature=0, max_tokens=160),
    )
    lines = Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()
    for index, problem in enumerate(map(json.loads, lines[:PROBLEMS])):
        result = await Runner.run(agent, problem["question"], max_turns=4)
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], (problem, kinds)
        assert result.final_output == f"#### {problem['answer']}", (problem, result.final_output, calls[-1])
        if index < STREAMED:
            streamed = Runner.run_streamed(agent, problem["question"], max_turns=4)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == result.final_output


asyncio.run(main())
shown(f"{PROBLEMS} held-out problems solved, {STREAMED} streamed too, with {len(calls)} calls that nothing forced")
