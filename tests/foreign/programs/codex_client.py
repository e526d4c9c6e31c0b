"""Codex: sessions with a short prompt, an MCP server (a namespace of tools) and a schema; its own prompt is too long.

Web search is off: that is a tool which the server would have to run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _shared import BASE, CALCULATOR, MODEL, shown

SESSIONS = 3
SMALL = """
model_instructions_file = "kind.md"
[features]
shell_tool = false
unified_exec = false
goals = false
multi_agent = false
[mcp_servers.calculator]
command = "{python}"
args = ["{server}"]
"""


def session(question: str, *flags: str, settings: str = "") -> tuple[list[Any], str]:
    """(its events, what it says on the side)"""
    provider = f'''[model_providers.tandem]
name = "tandem"
base_url = "{BASE}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
'''
    head = f'model = "{MODEL}"\nmodel_provider = "tandem"\nweb_search = "disabled"\n'
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "config.toml").write_text(head + settings + provider)
        (home / "kind.md").write_text("You are kind.")
        (home / "schema.json").write_text(json.dumps(CALCULATOR))
        done = subprocess.run(
            ["codex", "exec", "--json", "--skip-git-repo-check", *flags, question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=home,
            env=os.environ | {"CODEX_HOME": name},
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


small = SMALL.format(python=sys.executable, server=Path(__file__).with_name("mcp_calculator.py"))
for _ in range(SESSIONS):  # sampled: it sends no temperature
    events, rest = session("Calculate 3 + 4.", "--output-schema", "schema.json", settings=small)
    assert events, rest
    assert events[-1]["type"] == "turn.completed", (events, rest)
    assert events[-1]["usage"]["input_tokens"] > 0 < events[-1]["usage"]["output_tokens"], events
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert set(json.loads(said[-1])) == set(CALCULATOR["required"]), said
events, rest = session("Calculate 3 + 4.")
assert any("ran out of room in the model's context window" in str(event) for event in events), (events, rest)
shown(
    f"{SESSIONS} sessions with an MCP server end with what their schema wants",
    "its own prompt and tools are refused in a way that it knows as a full context",
)
