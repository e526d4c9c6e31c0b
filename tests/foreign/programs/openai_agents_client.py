"""openai-agents: a loop that calls a calculator, as far as a model goes that was not trained to: the call is forced."""

import asyncio
import operator
from typing import Annotated, Literal

from _shared import BASE, KEY, MODEL, shown
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import Field

set_tracing_disabled(True)
calls: list[str] = []
DOES = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Operand = Annotated[int, Field(ge=0, le=99)]


@function_tool
def calculator(a: Operand, op: Literal["+", "-", "*"], b: Operand) -> str:
    """Computes one step."""
    calls.append(f"{a} {op} {b}")
    return str(DOES[op](a, b))


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY)
    agent = Agent(
        name="calculator",
        instructions="Use the calculator.",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        tools=[calculator],
        model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=160),
    )
    for question in ("Calculate 3 + 4.", "Calculate 12 * 7.", "Tom has 3 apples and buys 4 more. How many?"):
        result = await Runner.run(agent, question, max_turns=4)
        assert result.final_output, "the loop ended without an answer"
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
        assert kinds[-1] == "message_output_item", kinds
        streamed = Runner.run_streamed(agent, question, max_turns=4)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == result.final_output


asyncio.run(main())
shown(f"3 loops, whole and streamed, with {len(calls)} calls of a calculator, each forced, and the answer behind them")
