"""sglang-router and smg in front of prefill and decode servers: every answer equal to that of one engine alone.

The last word of the command line says which. `CLIENTS_WORKERS` has the servers: `prefill URL PORT` or `decode URL`.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from _shared import MODEL, QUESTIONS, alone, post, same, shown

START_S = 90.0
PROMPTS = (*QUESTIONS, *(f"Calculate {a} * {b} + {a + b}." for a in range(3, 9) for b in (17, 26, 31, 45)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


name, *flags = sys.argv[1:]
port = free_port()
command = [str(Path(sys.executable).with_name("smg")), "launch", "--backend", "sglang"]
if name == "sglang-router":
    command = [sys.executable, "-m", "sglang_router.launch_router"]
command += ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
for worker in os.environ["CLIENTS_WORKERS"].splitlines():
    role, *words = worker.split()
    command += [f"--{role}", *words]
gateway = subprocess.Popen([*command, *flags], stdout=sys.stderr, stderr=sys.stderr)
try:
    deadline = time.monotonic() + START_S
    while True:
        assert gateway.poll() is None, f"it ended with {gateway.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5):
                break
        except (OSError, urllib.error.HTTPError):
            assert time.monotonic() < deadline, f"it took no server in {START_S:.0f} s"
            time.sleep(0.2)
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 96, "temperature": 0}
        reply = post(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        same(reply["choices"][0]["message"]["content"], alone(prompt))
finally:
    gateway.terminate()
    try:
        gateway.wait(20)
    except subprocess.TimeoutExpired:
        gateway.kill()
        gateway.wait()
shown(f"{len(PROMPTS)} answers through it equal to one engine's")
