"""Claude Code: sessions with a prompt that the small context has room for; its own has to be "too long"."""

import json
import os
import subprocess
import tempfile

from _shared import BASE, KEY, MODEL, shown

QUESTIONS = ("Calculate 9 * 13 + 48.", "Tom has 3 apples and buys 4 more. How many apples does Tom have?", "Hello!")
SMALL = ("--tools", "", "--system-prompt", "You are kind.")


def session(question: str, *flags: str) -> dict[str, object]:
    """What it says of one, which has a home of its own."""
    command = ["claude", "-p", question, "--output-format", "json", *flags]
    with tempfile.TemporaryDirectory() as home:
        variables = os.environ | {
            "ANTHROPIC_BASE_URL": BASE,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HOME": home,
        }
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=home,
            env=variables,
        )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


for question in QUESTIONS:  # sampled: it sends no temperature
    told = session(question, *SMALL)
    assert (told["is_error"], told["stop_reason"]) == (False, "end_turn"), told
    usage = told["usage"]
    assert isinstance(usage, dict)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0 < usage["output_tokens"], told
    assert told["result"], told
refused = session(QUESTIONS[0])
assert refused["api_error_status"] == 400, refused
assert str(refused["result"]).startswith("Prompt is too long"), refused
shown(
    f"{len(QUESTIONS)} sessions with a short prompt are answered",
    "its own prompt and tools are refused in a way that it knows as too long",
)
