"""A calculator as an MCP server on stdin and stdout, for programs that take their tools from one."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "models" / "mini"))
from calculator import answer  # of the model's own folder: the standard library only

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Evaluates an arithmetic expression.", "inputSchema": EXPRESSION}


def result_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            about = {"name": "calculator", "version": "1"}
            return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": answer(given["arguments"]["expression"])}]}
        case _:
            return {}


for message in map(json.loads, sys.stdin):
    if "id" in message:
        result = result_of(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
