"""pydantic-ai: plain and streamed runs, and an output of a given type, by a tool and by a schema."""

import asyncio
from typing import Literal

from _shared import BASE, KEY, MODEL, QUESTIONS, alone, same, shown
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    a: int = Field(ge=0, le=99)
    operator: Literal["+", "-", "*"]
    b: int = Field(ge=0, le=99)


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{BASE}/v1", api_key=KEY))
settings = {"temperature": 0.0, "max_tokens": 96}


async def main() -> None:
    agent = Agent(model, model_settings=settings)
    for question in QUESTIONS:
        expected = alone(question)
        same((await agent.run(question)).output, expected)
        async with agent.run_stream(question) as stream:
            same(await stream.get_output(), expected)
    for output in (ToolOutput(Sum), NativeOutput(Sum)):
        typed = Agent(model, output_type=output, model_settings=settings)
        assert isinstance((await typed.run("Calculate 3 + 4.")).output, Sum)


asyncio.run(main())
shown(f"{2 * len(QUESTIONS)} runs, whole and streamed", "typed output by tool and by schema")
