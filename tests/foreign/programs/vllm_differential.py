"""vLLM beside us with the same checkpoint in float32: the same tokens, usage and ends of completions and chats,
log-probabilities within 1e-3, and of bad requests to a router and to one engine the same status and `param`, or a
difference that is known and has its reason."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from _shared import BASE, MODEL, MODEL_DIR, QUESTIONS, UNIFIED, free_port, post, shown, stream, wait_ready

READY_S, CONTEXT, LONGEST = 480.0, 512, 8192  # the model's own context is the longest
NEAR = 1e-3
HELD_OUT = Path(MODEL_DIR) / "heldout.jsonl"
NUM_PROMPTS, NUM_TOKENS = 24, 24
NUM_CHAT_TOKENS = 48

COMPLETION = {"model": MODEL, "prompt": "Question: 1 + 1", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHATS: list[list[dict[str, str]]] = [
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    *([{"role": "user", "content": f"Calculate {a} * {a + 11} + 7."}] for a in range(3, 8)),
    [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": "Calculate 6 * 7."}],
    [
        {"role": "user", "content": "Calculate 9 * 13 + 48."},
        {"role": "assistant", "content": "9 * 13 = 117, and 117 + 48 = 165."},
        {"role": "user", "content": "And 12 more?"},
    ],
]
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
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["serve", MODEL_DIR, "--served-model-name", MODEL, "--dtype", "float32", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--max-model-len", str(CONTEXT), "--enforce-eager", "--max-logprobs", "20"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            wait_ready(f"{url}/health", process, ready_s=READY_S)
            compare_answers(url)
            compare_chats(url)
            for server in (BASE, UNIFIED):
                compare_refusals(server, url)
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)
    shown(
        f"{NUM_PROMPTS} completions and {len(CHATS)} chats with vLLM's tokens, usage and ends",
        f"log-probabilities within {NEAR:g}",
        "the chats streamed, too",
        f"{len(BAD) - len(OTHER_STATUS)} of {len(BAD)} bad requests to a router and to one engine with its status",
        "and with its `param` where it has one",
    )


def compare_answers(url: str) -> None:
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[:NUM_PROMPTS]]
    for row in rows:
        prompt = f"Question: {row['question']}\nAnswer:"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
        ours, theirs = (post(f"{server}/v1/completions", body) for server in (BASE, url))
        (our,), (their,) = ours["choices"], theirs["choices"]
        assert our["text"] == their["text"], (prompt, our["text"], their["text"])
        near(our["logprobs"]["token_logprobs"], their["logprobs"]["token_logprobs"])
        same_ends(ours, theirs)


def compare_chats(url: str) -> None:
    """By the checkpoint's own template; the tokens are those of their log-probabilities."""
    for messages in CHATS:
        body = {"model": MODEL, "messages": messages, "max_tokens": NUM_CHAT_TOKENS, "temperature": 0, "logprobs": True}
        ours, theirs = (post(f"{server}/v1/chat/completions", body) for server in (BASE, url))
        (our,), (their,) = ours["choices"], theirs["choices"]
        assert our["message"]["content"] == their["message"]["content"], (messages, our, their)
        (our_tokens, our_scores), (tokens, scores) = (tokens_of(choice) for choice in (our, their))
        assert our_tokens == tokens, (messages, our_tokens, tokens)
        near(our_scores, scores)
        same_ends(ours, theirs)
        for server in (BASE, url):
            choices = [it for event in stream(f"{server}/v1/chat/completions", body) for it in event["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            assert text == their["message"]["content"], (server, messages, text, their)
            assert choices[-1]["finish_reason"] == their["finish_reason"], (server, messages, choices[-1], their)


def tokens_of(choice: Any) -> tuple[list[str], list[float]]:
    """Of a chat: their texts and their log-probabilities."""
    content = choice["logprobs"]["content"]
    return [it["token"] for it in content], [it["logprob"] for it in content]


def near(ours: list[float], theirs: list[float]) -> None:
    assert all(abs(one - other) < NEAR for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def same_ends(ours: Any, theirs: Any) -> None:
    """Why it ended, and how much it was."""
    assert ours["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"], (ours, theirs)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][count] == theirs["usage"][count], (ours["usage"], theirs["usage"])


def compare_refusals(server: str, url: str) -> None:
    """Another status only where that is known; and where vLLM names a field, we name it, too."""
    for name, (path, usual, bad) in BAD.items():
        data = b"{" if name == "no JSON" else json.dumps(usual | bad).encode()
        (our_status, our_field), (status, field) = (refusal(f"{it}{path}", data) for it in (server, url))
        assert (our_status != status) == (name in OTHER_STATUS), (server, name, our_status, status)
        if our_status == status and field is not None:
            assert our_field == OTHER_FIELD.get(name, field), (server, name, our_field, field)


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
