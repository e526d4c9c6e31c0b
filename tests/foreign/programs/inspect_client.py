"""inspect-ai: one evaluation by every provider of it that speaks to such a server, alone and with a calculator."""

import json
import os
import sys
import tempfile
from pathlib import Path

from _shared import BASE, KEY, MODEL, MODEL_DIR, shown

PROBLEMS = 20
PROVIDERS = ("vllm", "sglang", "openai", "openai-api/tandem")
for name in ("VLLM", "SGLANG", "OPENAI", "TANDEM"):
    os.environ |= {f"{name}_BASE_URL": f"{BASE}/v1", f"{name}_API_KEY": KEY}

from inspect_ai import Task  # noqa: E402
from inspect_ai import eval as evaluated  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, system_message, use_tools  # noqa: E402
from inspect_ai.tool import Tool, tool  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # noqa: E402  # of the model's own folder: the standard library only


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: the expression
        """
        return answer(expression)

    return execute


problems = [json.loads(line) for line in Path(MODEL_DIR, "heldout.jsonl").read_text().splitlines()[:PROBLEMS]]
samples = [Sample(input=it["question"], target=f"#### {it['answer']}") for it in problems]
alone = [generate()]
with_tool = [system_message("Use the calculator."), use_tools(calculator()), generate()]
right: dict[str, list[float]] = {}
with tempfile.TemporaryDirectory() as logs:
    for solver in (alone, with_tool):
        for provider in PROVIDERS:
            task = Task(dataset=samples, solver=solver, scorer=includes())
            options = {"temperature": 0, "max_tokens": 160, "max_retries": 0}
            (log,) = evaluated(task, model=f"{provider}/{MODEL}", display="none", log_dir=logs, **options)
            assert log.status == "success", log.error
            found = log.results.scores[0].metrics["accuracy"].value
            right.setdefault("alone" if solver is alone else "with it", []).append(found)
            assert found >= 0.9, (provider, found)
assert all(len(set(values)) == 1 for values in right.values()), right
shown(
    f"{PROBLEMS} held-out problems by {len(PROVIDERS)} providers, each the same accuracy: "
    f"{right['alone'][0]:.2f}, and {right['with it'][0]:.2f} with a calculator"
)
