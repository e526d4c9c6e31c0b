"""NVIDIA Dynamo's frontend, with `docs/dynamo/tandem_worker.py` as its worker: discovery by a folder, requests by TCP,
events by ZMQ, so that there is neither etcd nor NATS.

First with two workers, one for the pair and one for the engine alone: its router sends a prompt to the one that has
computed it before, which it knows by Tandem's KV events only. Then with the pair: chats and completions are those of
one engine, a client that leaves ends its request, and a decode that is killed ends streams with an error. The last is
why the servers are this program's own: `CLIENTS_KV_EVENTS` has where prefill and the engine publish and tell again,
a line each, `CLIENTS_DECODE_PID` which process to kill.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _shared import BASE, CALCULATOR, MODEL, QUESTIONS, UNIFIED, free_port, post, same, shown, stream, wait_ready

WORKER = Path(__file__).resolve().parents[3] / "docs" / "dynamo" / "tandem_worker.py"
DECODE_PID = int(os.environ["CLIENTS_DECODE_PID"])
START_S, GONE_S, POLL_S = 120.0, 60.0, 0.1
EARLY_S = 20.0  # before Tandem itself gives up a request that hears nothing
PROMPTS = (*QUESTIONS, *(f"Calculate {a} * {b} + {a + b}." for a in range(3, 6) for b in (17, 26)))
BEGINNING = "The rules of this conversation: " + " ".join(f"rule {index}," for index in range(12))
TANDEMS = (BASE, UNIFIED)
NUM_CACHED, MIN_CACHED = 12, 96  # prompts whose KV is somewhere, and how many tokens more than their common beginning
LONG = 7000  # tokens of an answer that nobody waits for, or that is cut off
GENERATED = re.compile(r"^sglang:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
RUNNING = re.compile(r"^sglang:num_running_reqs\{.*\} (\S+)$", re.MULTILINE)
STORED = re.compile(r'^dynamo_component_kv_cache_events_applied\{.*event_type="stored",status="ok".*\} (\d+)$', re.M)
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


def main() -> None:
    endpoints = [line.split() for line in os.environ["CLIENTS_KV_EVENTS"].splitlines()]
    events = [["--kv-events", live, "--kv-events-replay", replay] for live, replay in endpoints]
    for index in range(NUM_CACHED // 2):
        compute(TANDEMS[index % 2], document(f"{index}"))
    with dynamo(dict(zip(TANDEMS, events, strict=True)), "--router-mode", "kv") as url:
        facts = [cached_prompts(url)]
    with dynamo({BASE: []}) as url:
        facts += [chats(url), completions(url), forms(url), refusals(url), leaving(url), killing(url)]
    shown(*facts)


@contextmanager
def dynamo(workers: dict[str, list[str]], *flags: str) -> Iterator[str]:
    """Its frontend's URL. workers: by Tandem, more flags for the one in front of it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "HOME": folder,  # it copies tokenizers to a cache there
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": f"{folder}/discovery",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        commands = [
            [str(WORKER), "--url", tandem, "--dyn-tool-call-parser", "hermes", *more]
            for tandem, more in workers.items()
        ]
        commands.append(["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *flags])
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                words = [sys.executable, *command]
                processes.append(subprocess.Popen(words, stdout=sys.stderr, stderr=sys.stderr, env=environment))
            wait_ready(f"{url}/health", processes[-1], ready_s=START_S)
            eventually(lambda: num_workers(url) == len(workers), f"{len(workers)} workers", START_S)
            yield url
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def num_workers(url: str) -> int:
    """That serve, and whose model the frontend has taken."""
    known = json.loads(page(f"{url}/health"))["instances"]
    models = json.loads(page(f"{url}/v1/models"))["data"]
    return sum(it["endpoint"] == "generate" for it in known) if models else 0


# Where a prompt's KV is


def cached_prompts(url: str) -> str:
    """Each was computed once, by a Tandem that was asked without Dynamo, in turn: half of them before Dynamo was
    there. So only events tell where, and those of before have to be asked for."""
    for tandem in TANDEMS:
        connect(url, tandem)
    common = max(compute(tandem, f"{BEGINNING} What?") for tandem in TANDEMS)
    for index in range(NUM_CACHED // 2, NUM_CACHED):
        before = num_stored(url)
        compute(TANDEMS[index % 2], document(f"{index}"))
        eventually(lambda before=before: num_stored(url) > before, "Dynamo has the KV events of a prompt", GONE_S)
    for index in range(NUM_CACHED):
        body = {"model": MODEL, "prompt": document(f"{index}") + " How many?", "max_tokens": 4, "temperature": 0}
        usage = post(f"{url}/v1/completions", body)["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert found >= common + MIN_CACHED, f"prompt {index} was sent where its KV is not: {usage}"
    return f"by KV events its router sends {NUM_CACHED} prompts to the one of 2 Tandems that has their KV"


def connect(url: str, tandem: str) -> None:
    """Until an event has come all the way: a subscriber hears nothing of what was published before it was there."""
    before, asked = num_stored(url), 0

    def heard() -> bool:
        nonlocal asked
        asked += 1
        compute(tandem, document(f"{tandem} {asked}"))
        return num_stored(url) > before

    eventually(heard, f"Dynamo hears of {tandem}", START_S)


def compute(tandem: str, prompt: str) -> int:
    """How many tokens of it were there."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    cached: int = post(f"{tandem}/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def document(name: str) -> str:
    """Some pages that all begin with, and some that no other has."""
    return f"{BEGINNING} {name}: " + " ".join(f"{name} and {index}," for index in range(30))


def num_stored(url: str) -> int:
    return sum(map(int, STORED.findall(page(f"{url}/metrics"))))


# What is answered


def chats(url: str) -> str:
    """Texts, ends, counts and, by their log-probabilities, tokens are those of one engine."""
    for prompt in PROMPTS:
        body = chat(prompt, logprobs=True)
        expected = post(f"{UNIFIED}/v1/chat/completions", body)
        got = post(f"{url}/v1/chat/completions", body)
        same_choice(got["choices"][0], expected["choices"][0], got["choices"][0]["message"]["content"])
        same_usage(got["usage"], expected["usage"])
        same_scores(scores_of(got["choices"]), scores_of(expected["choices"]))
        events = stream(f"{url}/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        choices = [choice for event in events for choice in event["choices"]]
        assert len(choices) > 1, events
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        same_choice(choices[-1], expected["choices"][0], text)
        same_usage(events[-1]["usage"], expected["usage"])
        same_scores(scores_of(choices), scores_of(expected["choices"]))
    return f"{len(PROMPTS)} chats with log-probabilities"


def completions(url: str) -> str:
    """Some end by their length, by a string, or by a token."""
    for prompt in PROMPTS:
        for ending in ({}, {"stop": ["1"]}, {"stop_token_ids": [28]}, {"ignore_eos": True}):
            body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0} | ending
            expected = post(f"{UNIFIED}/v1/completions", body)
            got = post(f"{url}/v1/completions", body)
            same_choice(got["choices"][0], expected["choices"][0], got["choices"][0]["text"])
            same_usage(got["usage"], expected["usage"])
            events = stream(f"{url}/v1/completions", body | {"stream_options": {"include_usage": True}})
            choices = [choice for event in events for choice in event["choices"]]
            same_choice(choices[-1], expected["choices"][0], "".join(choice["text"] for choice in choices))
            same_usage(events[-1]["usage"], expected["usage"])
    return f"{4 * len(PROMPTS)} completions with 4 kinds of ends, both whole and streamed, equal to one engine's"


def forms(url: str) -> str:
    for prompt in QUESTIONS:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
        body = chat(prompt, response_format=form)
        expected = post(f"{UNIFIED}/v1/chat/completions", body)["choices"][0]["message"]["content"]
        same(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"], expected)
    tool = {"type": "function", "function": {"name": "calculator", "parameters": CALCULATOR}}
    body = chat(QUESTIONS[1], tools=[tool], tool_choice="required")
    for call in post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "calculator", call
        assert set(arguments) == set(CALCULATOR["required"]), call
    return f"{len(QUESTIONS)} objects by a schema, a forced call"


def refusals(url: str) -> str:
    """What the worker cannot pass on, and what Tandem refuses, each with its own status and words."""
    cases = [
        (chat("Hello!", n=2, temperature=1), "not supported by Tandem's worker for Dynamo: n"),
        (chat("Hello!", logprobs=True, top_logprobs=3), "not supported by Tandem's worker for Dynamo: top_logprobs"),
        (chat("Hello!", guided_regex="("), "regex"),
    ]
    for body, words in cases:
        status, text = refused(f"{url}/v1/chat/completions", body)
        assert (status, words in text) == (400, True), (status, text)
    return f"{len(cases)} refusals with their words"


def refused(url: str, body: dict[str, Any]) -> tuple[int, str]:
    try:
        answer = post(url, body)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    raise AssertionError(f"this was to be refused: {answer}")


# Who goes away


def leaving(url: str) -> str:
    before = total(GENERATED)
    with opened(url) as reply:
        assert reply.readline().startswith(b"data:")
    eventually(lambda: not total(RUNNING), "no request runs when its client has left", GONE_S)
    written = total(GENERATED) - before
    assert written < LONG, f"all {written:.0f} tokens were written for nobody"
    os.kill(DECODE_PID, signal.SIGSTOP)  # so that no first token comes
    try:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            body = json.dumps(chat("Count.", stream=True)).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            eventually(lambda: active() > 0, "the router has the request", GONE_S)
        eventually(lambda: not active(), "the router has no request when its client has left", EARLY_S)
    finally:
        os.kill(DECODE_PID, signal.SIGCONT)
    eventually(is_live, "decode is back", GONE_S)
    return "clients that leave before and after the first token end their requests"


def active() -> int:
    """Prompts that Tandem's router has under way on decode."""
    workers = json.loads(page(f"{BASE}/server_info"))["workers"]
    return sum(worker["active_prompts"] for worker in workers if worker["role"] == "decode")


def is_live() -> bool:
    try:
        compute(BASE, "a")
    except urllib.error.HTTPError:
        return False
    return True


def killing(url: str) -> str:
    """A stream ends with an error, and the next request is refused: neither hangs."""
    with opened(url) as reply:
        assert reply.readline().startswith(b"data:")
        os.kill(DECODE_PID, signal.SIGKILL)
        events = [line.decode() for line in reply if line.startswith(b"data:")]
    assert any('"error"' in event for event in events[-2:]), events[-2:]
    status, text = refused(f"{url}/v1/chat/completions", chat("Hello!"))
    assert status >= 500, (status, text)
    return "of a decode that is killed a stream ends with an error"


def opened(url: str) -> Any:
    """A long stream, of which the first event is there before most of it is written."""
    body = chat("Count.", stream=True, max_tokens=LONG, ignore_eos=True)
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def total(pattern: re.Pattern[str]) -> float:
    """On prefill and decode."""
    workers = [line.split()[1] for line in os.environ["CLIENTS_WORKERS"].splitlines()]
    found = [float(value) for worker in workers for value in pattern.findall(page(f"{worker}/metrics"))]
    assert found, pattern.pattern
    return sum(found)


# Words of all


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": 96, "temperature": 0} | more


def same_choice(got: Any, expected: Any, text: str) -> None:
    same(text, expected["text"] if "text" in expected else expected["message"]["content"])
    assert got["finish_reason"] == expected["finish_reason"], (got, expected)


def same_usage(got: Any, expected: Any) -> None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [got[name] for name in names] == [expected[name] for name in names], (got, expected)


def scores_of(choices: list[Any]) -> list[Any]:
    return [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or []]


def same_scores(got: list[Any], expected: list[Any]) -> None:
    """Dynamo shows no text of special tokens."""
    for one, other in zip(got, expected, strict=True):
        assert one["bytes"] in (None, other["bytes"]), (one, other)
        assert abs(one["logprob"] - other["logprob"]) < 1e-3, (one, other)


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return str(reply.read().decode())


def eventually(is_so: Callable[[], bool], what: str, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, f"not after {within_s:.0f} s: {what}"
        time.sleep(POLL_S)


main()
