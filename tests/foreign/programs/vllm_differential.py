"""vLLM beside us with the same checkpoint in float32: the same tokens, usage and ends, log-probabilities within 1e-3,
and of bad requests the same status and `param`, or a difference that is known and has its reason."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from _shared import BASE, MODEL, MODEL_DIR, UNIFIED, post, shown

READY_S, CONTEXT, LONGEST = 480.0, 512, 8192  # the model's own context is the longest
NEAR = 1e-3
HELD_OUT = Path(MODEL_DIR) / "heldout.jsonl"
NUM_PROMPTS, NUM_TOKENS = 24, 24

COMPLETION = {"model": MODEL, "prompt": "Question: 1 + 1", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# Name: path, usual body, what is bad about it.
BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no JSON": ("/v1/completions", {}, {}),
    "no prompt": ("/v1/completions", {"model": MODEL}, {}),
    "no messages": ("/v1/chat/completions", {"model": MODEL}, {}),
    "unknown model": ("/v1/completions", COMPLETION, {"model": "nobody"}),
    "prompt too long": ("/v1/completions", COMPLETION, {"prompt": [5] * (LONGEST + 8)}),
    "token out of the vocabulary": ("/v1/completions", COMPLETION, {"prompt": [1 << 28]}),
    "empty prompt": ("/v1/completions", COMPLETION, {"prompt": []}),
    "temperature -1": ("/v1/completions", COMPLETION, {"temperature": -1}),
    "temperature as text": ("/v1/completions", COMPLETION, {"temperature": "warm"}),
    "top_p 0": ("/v1/completions", COMPLETION, {"top_p": 0}),
    "top_p 2": ("/v1/completions", COMPLETION, {"top_p": 2}),
    "top_k -2": ("/v1/completions", COMPLETION, {"top_k": -2}),
    "min_p 2": ("/v1/completions", COMPLETION, {"min_p": 2}),
    "max_tokens 0": ("/v1/completions", COMPLETION, {"max_tokens": 0}),
    "max_tokens -1": ("/v1/completions", COMPLETION, {"max_tokens": -1}),
    "n 0": ("/v1/completions", COMPLETION, {"n": 0}),
    "presence_penalty 3": ("/v1/completions", COMPLETION, {"presence_penalty": 3}),
    "frequency_penalty -3": ("/v1/completions", COMPLETION, {"frequency_penalty": -3}),
    "repetition_penalty 0": ("/v1/completions", COMPLETION, {"repetition_penalty": 0}),
    "logprobs -1": ("/v1/completions", COMPLETION, {"logprobs": -1}),
    "logprobs 1000": ("/v1/completions", COMPLETION, {"logprobs": 1000}),
    "suffix": ("/v1/completions", COMPLETION, {"suffix": "end"}),
    "stream_options without stream": ("/v1/completions", COMPLETION, {"stream_options": {"include_usage": True}}),
    "top_logprobs without logprobs": ("/v1/chat/completions", CHAT, {"top_logprobs": 2}),
    "response_format that is none": ("/v1/chat/completions", CHAT, {"response_format": {"type": "xml"}}),
    "schema that is none": (
        "/v1/chat/completions",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    ),
    "choice of a tool that is not there": (
        "/v1/chat/completions",
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    "role that is none": ("/v1/chat/completions", CHAT, {"messages": [{"role": 5, "content": "x"}]}),
    "unknown path": ("/v1/nothing", COMPLETION, {}),
}
OTHER_STATUS = {"max_tokens 0"}  # which asks for the prompt's own log-probabilities, with `echo`
OTHER_FIELD = {"prompt too long": "prompt"}  # not `input_tokens`, which no body has


def main() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    words = ["serve", MODEL_DIR, "--served-model-name", MODEL, "--dtype", "float32", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--max-model-len", str(CONTEXT), "--enforce-eager", "--max-logprobs", "20"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            wait_ready(url, process)
            compare_answers(url)
            compare_refusals(url)
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)
    shown(
        f"{NUM_PROMPTS} answers with vLLM's tokens, usage and ends, log-probabilities within {NEAR:g}",
        f"{len(BAD) - len(OTHER_STATUS)} of {len(BAD)} bad requests with its status",
        "and with its `param` where it has one",
    )


def wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            assert process.poll() is None, "vLLM has ended"
            assert time.monotonic() < until, f"vLLM is not ready after {READY_S:.0f} s"
            time.sleep(1)
        else:
            return


def compare_answers(url: str) -> None:
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[:NUM_PROMPTS]]
    for row in rows:
        prompt = f"Question: {row['question']}\nAnswer:"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
        ours, theirs = (post(f"{server}/v1/completions", body) for server in (BASE, url))
        (our,), (their,) = ours["choices"], theirs["choices"]
        assert our["text"] == their["text"], (prompt, our["text"], their["text"])
        assert our["finish_reason"] == their["finish_reason"], (prompt, our, their)
        pairs = zip(our["logprobs"]["token_logprobs"], their["logprobs"]["token_logprobs"], strict=True)
        assert all(abs(one - other) < NEAR for one, other in pairs), (prompt, our, their)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert ours["usage"][count] == theirs["usage"][count], (prompt, ours["usage"], theirs["usage"])


def compare_refusals(url: str) -> None:
    """Another status only where that is known; and where vLLM names a field, we name it, too."""
    for name, (path, usual, bad) in BAD.items():
        data = b"{" if name == "no JSON" else json.dumps(usual | bad).encode()
        (our_status, our_field), (status, field) = (refusal(f"{server}{path}", data) for server in (UNIFIED, url))
        assert (our_status != status) == (name in OTHER_STATUS), (name, our_status, status)
        if our_status == status and field is not None:
            assert our_field == OTHER_FIELD.get(name, field), (name, our_field, field)


def refusal(url: str, data: bytes) -> tuple[int, str | None]:
    """Status and the field of the body that `param` names; 200 and None where it is taken."""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=120).close()
    except urllib.error.HTTPError as error:
        try:
            param = json.load(error).get("error", {}).get("param") or ""
        except ValueError:
            return error.code, None
        field = param.removeprefix("body.").partition(".")[0]
        return error.code, field if field.isidentifier() else None
    return 200, None


main()
