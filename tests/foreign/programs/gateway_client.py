"""sglang-router, smg and vllm-router in front of prefill and decode servers: every answer equal to that of one engine
alone, whole and streamed, by chats, `/generate` (which vllm-router has not) and completions; and, where it spreads them
over DP ranks, by ranks of both sides.

The first word of the command line says which; the others are its flags. `CLIENTS_WORKERS` has the servers:
`prefill URL PORT` or `decode URL`.
"""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from _shared import MODEL, QUESTIONS, UNIFIED, alone, free_port, post, same, shown, stream, wait_ready

START_S = 90.0
PROMPTS = (*QUESTIONS, *(f"Calculate {a} * {b} + {a + b}." for a in range(3, 9) for b in (17, 26, 31, 45)))
STREAMED = PROMPTS[:9]
AS_THEY_COME = "no stream has two events"  # on a busy machine all tokens of some may share one
GREEDY = {"temperature": 0, "max_new_tokens": 32}
# One prompt of some pages: a rank that has had it twice has found it in its prefix cache, which its metrics say.
AGAIN, TIMES = f"Question: {QUESTIONS[0]} {QUESTIONS[1]}\nAnswer:", 12
HIT_RATE = re.compile(r'^sglang:cache_hit_rate\{.*dp_rank="(\d+)".*\} (\S+)$', re.MULTILINE)
TRANSFERRED = re.compile(r'^tandem:requests_path_total\{.*path="remote".*\} (\S+)$', re.MULTILINE)
CHOSEN = re.compile(r'^smg_worker_cb_outcomes_total\{worker="(.+@\d+)",outcome="success"\} (\d+)$', re.MULTILINE)


def main() -> None:
    name, *flags = sys.argv[1:]
    port, metrics_port = free_port(), free_port()
    beside = Path(sys.executable)
    command = {
        "smg": [str(beside.with_name("smg")), "launch", "--backend", "sglang", "--pd-disaggregation"],
        "sglang-router": [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"],
        "vllm-router": [str(beside.with_name("vllm-router")), "--vllm-pd-disaggregation"],
    }[name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    is_vllms = name == "vllm-router"  # to which prefill says its port itself
    for role, url, *bootstrap_port in workers():
        command += [f"--{role}", url, *([] if is_vllms else bootstrap_port)]
    gateway = subprocess.Popen([*command, *flags], stdout=sys.stderr, stderr=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(f"{url}/{'health' if is_vllms else 'readiness'}", gateway, ready_s=START_S)
        before = num_transfers()
        facts = [chats(url), *([] if is_vllms else [generations(url)]), completions(url)]
        if is_vllms:
            facts.append(transfers(before))
        if "--dp-aware" in flags:
            facts.append(ranks(url, f"http://127.0.0.1:{metrics_port}"))
    finally:
        gateway.terminate()
        try:
            gateway.wait(20)
        except subprocess.TimeoutExpired:
            gateway.kill()
            gateway.wait()
    shown(*facts)


def workers() -> list[list[str]]:
    return [worker.split() for worker in os.environ["CLIENTS_WORKERS"].splitlines()]


def chats(url: str) -> str:
    num_events = 0
    for prompt in PROMPTS:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 96, "temperature": 0}
        expected = alone(prompt)
        same(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"], expected)
        if prompt in STREAMED:
            events = stream(f"{url}/v1/chat/completions", body)
            num_events += len(events)
            same("".join(choice["delta"].get("content") or "" for it in events for choice in it["choices"]), expected)
    assert num_events > len(STREAMED), AS_THEY_COME
    return f"{len(PROMPTS)} chats, {len(STREAMED)} of them streamed, too"


def generations(url: str) -> str:
    """`/generate`, whose events have all of the text so far."""
    num_events = 0
    for prompt in STREAMED:
        body = {"text": prompt, "sampling_params": GREEDY}
        alone = post(f"{UNIFIED}/generate", body)
        events = stream(f"{url}/generate", body)
        num_events += len(events)
        for got in (post(f"{url}/generate", body), events[-1]):
            same(got["text"], alone["text"])
            assert got["output_ids"] == alone["output_ids"], (got, alone)
            assert got["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"], (got, alone)
    assert num_events > len(STREAMED), AS_THEY_COME
    return f"{len(STREAMED)} answers of /generate"


def completions(url: str) -> str:
    num_events = 0
    for prompt in STREAMED:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0}
        expected = text_of(post(f"{UNIFIED}/v1/completions", body))
        same(text_of(post(f"{url}/v1/completions", body)), expected)
        events = stream(f"{url}/v1/completions", body)
        num_events += len(events)
        same("".join(map(text_of, events)), expected)
    assert num_events > len(STREAMED), AS_THEY_COME
    return f"{len(STREAMED)} completions, both whole and streamed, equal to one engine's"


def text_of(document: Any) -> str:
    return "".join(choice["text"] for choice in document["choices"])


def ranks(url: str, metrics_url: str) -> str:
    """Which of either side it has chosen, by its own count, and which have served: of decode by its answers, of both by
    what their prefix caches have found."""
    body = {"text": AGAIN, "sampling_params": GREEDY}
    expected = post(f"{UNIFIED}/generate", body)["text"]
    answered: set[int] = set()
    for _ in range(TIMES):
        got = post(f"{url}/generate", body)
        same(got["text"], expected)
        answered.add(got["meta_info"]["dp_rank"])
    chosen = {worker for worker, count in CHOSEN.findall(page(metrics_url)) if int(count)}
    counts: list[str] = []
    for role, server, *_ in workers():
        rates = {int(rank): float(rate) for rank, rate in HIT_RATE.findall(page(server))}
        assert len(rates) > 1, f"{role} has one rank only"
        assert all(rates.values()), f"of {role} some ranks have not had the prompt twice: {rates}"
        assert chosen >= {f"{server}@{rank}" for rank in rates}, f"of {role} it has chosen {chosen}"
        assert role == "prefill" or answered == set(rates), f"answers came of ranks {answered} of decode"
        counts.append(f"{len(rates)} of {role}")
    return f"of all DP ranks: {' and '.join(counts)}"


def num_transfers() -> int:
    """How many prompts decode servers have taken over from a prefill: what no router passes on they compute alone."""
    pages = [page(server) for role, server, *_ in workers() if role == "decode"]
    return sum(int(float(value)) for text in pages for value in TRANSFERRED.findall(text))


def transfers(before: int) -> str:
    wanted = len(PROMPTS) + 3 * len(STREAMED)  # what is streamed is asked whole, too
    count = num_transfers() - before
    assert count == wanted, f"of {wanted} prompts decode servers took over {count}"
    return f"{count} prompts computed by prefill"


def page(server: str) -> str:
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as reply:
        return str(reply.read().decode())


main()
