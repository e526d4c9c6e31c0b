"""litellm's proxy in front of the pair: answers whole and streamed, a forced call, and a refusal with its status."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import openai
from _shared import BASE, CALCULATOR, KEY, MODEL, QUESTIONS, alone, free_port, same, shown, wait_ready

READY_S = 120.0
NAME, PROXY_KEY = "by-proxy", f"sk-{secrets.token_hex(32)}"  # without a key it does not start


def ask(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
    usual = {"model": NAME, "temperature": 0, "max_tokens": 96}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        expected = alone(question)
        same(client.chat.completions.create(messages=messages, **usual).choices[0].message.content, expected)
        pieces = client.chat.completions.create(messages=messages, stream=True, **usual)
        same("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices), expected)
    tool = {"type": "function", "function": {"name": "calculator", "parameters": CALCULATOR}}
    force = {"type": "function", "function": {"name": "calculator"}}
    messages = [{"role": "user", "content": "Calculate 3 + 4."}]
    reply = client.chat.completions.create(messages=messages, tools=[tool], tool_choice=force, **usual)
    (call,) = reply.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "operator", "b"}
    said = ""
    try:
        client.chat.completions.create(messages=messages, **usual | {"temperature": -1})
    except openai.BadRequestError as refusal:
        said = str(refusal)
    assert "temperature" in said, said or "a negative temperature is taken"


with tempfile.TemporaryDirectory() as name:
    config = Path(name) / "config.json"  # JSON is YAML
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": KEY}
    config.write_text(json.dumps({"model_list": [{"model_name": NAME, "litellm_params": parameters}]}))
    port = free_port()
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    variables = os.environ | {"LITELLM_MASTER_KEY": PROXY_KEY}
    log = (Path(name) / "log").open("w+b")
    process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, cwd=name, env=variables)
    try:
        wait_ready(f"http://127.0.0.1:{port}/health/liveliness", process, ready_s=READY_S)
        ask(f"http://127.0.0.1:{port}")
    except BaseException:
        print((Path(name) / "log").read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(30)
shown(f"{2 * len(QUESTIONS)} answers, whole and streamed", "a forced call", "a refusal with its status")
