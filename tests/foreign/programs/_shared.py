"""What the programs of this folder share: where the servers are, and what one engine alone answers.

They run in environments of their own, which know nothing of tandem: the standard library only.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from typing import Any

BASE = os.environ["CLIENTS_URL"]  # router of a pair
UNIFIED = os.environ["CLIENTS_UNIFIED_URL"]  # one engine alone
MODEL = os.environ["CLIENTS_MODEL"]
MODEL_DIR = os.environ["CLIENTS_MODEL_DIR"]
KEY = "none"  # servers without a key take any, and most programs want one

QUESTIONS = (
    "A ferry carries 245 people. At the first stop 38 get off and 17 get on. How many people are on the ferry now?",
    "Calculate 9 * 13 + 48.",
    "Hello!",
)
CALCULATOR = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "operator": {"type": "string", "enum": ["+", "-", "*"]},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "operator", "b"],
    "additionalProperties": False,
}


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def stream(url: str, body: dict[str, Any]) -> list[Any]:
    """The events of a whole stream, which must end as one does."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        lines = [line.decode().strip() for line in reply if line.startswith(b"data:")]
    assert lines, "a stream without events"
    events = [line.removeprefix("data:").strip() for line in lines]
    assert events.pop() == "[DONE]", events
    return [json.loads(event) for event in events]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def wait_ready(url: str, process: "subprocess.Popen[bytes]", *, ready_s: float) -> None:
    """Until the server that this program has started answers there."""
    until = time.monotonic() + ready_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert process.poll() is None, f"{process.args} ended with {process.returncode}"
            assert time.monotonic() < until, f"{url} is not ready after {ready_s:.0f} s"
            time.sleep(0.5)
        else:
            return


def alone(question: str, *, max_tokens: int = 96) -> str:
    """What one engine alone says to it, without this program in between."""
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    answer: str = post(f"{UNIFIED}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return answer


def same(got: str, expected: str) -> None:
    assert got == expected, f"the pair answered {got!r}, one engine alone {expected!r}"


def shown(*facts: str) -> None:
    """For the table."""
    print("SHOWN " + ", ".join(facts))
