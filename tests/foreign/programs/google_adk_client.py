"""Google's ADK over litellm: agents that call a calculator of their own accord, whole and streamed."""

import asyncio
import json
import sys
from pathlib import Path

from _shared import BASE, KEY, MODEL, MODEL_DIR, shown
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

PROBLEMS = 10
APIS = {"openai": f"{BASE}/v1", "hosted_vllm": f"{BASE}/v1", "anthropic": BASE}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return answer(expression)


async def solved(api: str, question: str, mode: StreamingMode) -> list[str]:
    """What the agent has called and said."""
    model = LiteLlm(model=f"{api}/{MODEL}", api_base=APIS[api], api_key=KEY, temperature=0, max_tokens=160)
    agent = Agent(name="solver", model=model, instruction="Use the calculator.", tools=[calculator])
    runner = InMemoryRunner(agent=agent, app_name="problems")
    session = await runner.session_service.create_session(app_name="problems", user_id="user")
    asked = types.Content(role="user", parts=[types.Part(text=question)])
    told: list[str] = []
    async for event in runner.run_async(
        user_id="user", session_id=session.id, new_message=asked, run_config=RunConfig(streaming_mode=mode)
    ):
        for part in event.content.parts if event.content and not event.partial else ():
            told += [part.function_call.name] if part.function_call else [part.text] if part.text else []
    return told


async def main() -> None:
    lines = Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()
    for api in APIS:
        for problem in map(json.loads, lines[:PROBLEMS]):
            for mode in (StreamingMode.NONE, StreamingMode.SSE):
                told = await solved(api, problem["question"], mode)
                assert told == ["calculator", f"#### {problem['answer']}"], (api, mode, problem, told)


asyncio.run(main())
shown(
    f"by {len(APIS)} providers {PROBLEMS} held-out problems solved, whole and streamed, with calls that nothing forced"
)
