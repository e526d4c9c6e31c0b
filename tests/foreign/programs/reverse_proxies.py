"""nginx, HAProxy and Caddy in front of the router, each with the few lines that its manual begins with: answers are
those of one engine alone, streams come while they are written, errors and request ids pass, and a client that leaves
ends its request.

nginx asks in HTTP/1.0 and collects answers, if nobody tells it otherwise; the others keep connections to the router.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from _shared import BASE, MODEL, QUESTIONS, UNIFIED, alone, free_port, post, same, shown, stream, wait_ready

READY_S, GONE_S, POLL_S = 30.0, 30.0, 0.1
LONG = 1500  # tokens of an answer that nobody waits for
BIG_CHARS = 600_000  # of a prompt that is refused; nginx takes a million bytes
STREAMED, PAGE_BYTES = 300, 4096  # tokens of a stream; what nginx would collect, unless it is told not to
TIMES = 20
GENERATED = re.compile(r"^sglang:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
RUNNING = re.compile(r"^sglang:num_running_reqs\{.*\} (\S+)$", re.MULTILINE)

NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{router}; }} }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port}
    default_backend router
backend router
    server router {router}
"""
CADDY = """
{{
    admin off
}}
http://127.0.0.1:{port} {{
    reverse_proxy {router}
}}
"""
PROXIES = {
    "nginx": (NGINX, ["nginx", "-p", "{folder}", "-e", "stderr", "-c", "{config}"], ["nginx", "-v"]),
    "HAProxy": (HAPROXY, ["haproxy", "-q", "-f", "{config}"], ["haproxy", "-v"]),
    "Caddy": (CADDY, ["caddy", "run", "--adapter", "caddyfile", "--config", "{config}"], ["caddy", "version"]),
}


def main() -> None:
    facts = [through(name, *PROXIES[name]) for name in PROXIES]
    shown(
        ", ".join(facts),
        f"{len(QUESTIONS)} chats each, whole and streamed, equal to one engine's",
        "tokens as they are written",
        f"{TIMES} answers on kept connections",
        "what is refused reads the same",
        f"clients that leave a stream of {LONG} tokens end it",
    )


def through(name: str, config: str, words: list[str], version: list[str]) -> str:
    """Its name and version."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        path.write_text(config.format(folder=folder, port=port, router=urllib.parse.urlsplit(BASE).netloc))
        command = [word.format(folder=folder, config=path) for word in words]
        process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, env=with_libraries(folder))
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(f"{url}/health", process, ready_s=READY_S)
            check_chats(url)
            check_pieces(url)
            check_kept_connections(url)
            check_refusals(url)
            check_leaving(url)
        finally:
            process.terminate()
            process.wait(30)
    said = subprocess.run(version, capture_output=True, text=True, check=True, env=with_libraries("/"))
    found = re.search(r"[0-9]+[.][0-9.]+[0-9]", said.stdout + said.stderr)
    assert found, said
    return f"{name} {found[0]}"


def with_libraries(home: str) -> dict[str, str]:
    """Those of its packages lie beside the command, in a folder that the system does not look at."""
    unpacked = Path(os.environ["PATH"].partition(os.pathsep)[0]).parent
    libraries = os.pathsep.join(map(str, (unpacked / "lib").glob("*-linux-gnu")))
    return {**os.environ, "LD_LIBRARY_PATH": libraries, "HOME": home}


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": 96, "temperature": 0} | more


def check_chats(url: str) -> None:
    for question in QUESTIONS:
        expected = alone(question)
        same(post(f"{url}/v1/chat/completions", chat(question))["choices"][0]["message"]["content"], expected)
        events = stream(f"{url}/v1/chat/completions", chat(question))
        same("".join(choice["delta"].get("content") or "" for it in events for choice in it["choices"]), expected)


def check_pieces(url: str) -> None:
    """Tokens are there as they are written, and not when a page of them has come together."""
    body = chat("Count.", stream=True, max_tokens=STREAMED, ignore_eos=True)
    pieces: list[bytes] = []
    with urllib.request.urlopen(asking(url, body), timeout=60) as reply:
        while piece := reply.read1():
            pieces.append(piece)
    pages = sum(map(len, pieces)) / PAGE_BYTES
    assert len(pieces) > 2 * pages, f"a stream of {pages:.0f} pages comes in {len(pieces)} pieces"


def check_kept_connections(url: str) -> None:
    expected = post(f"{UNIFIED}/v1/completions", {"model": MODEL, "prompt": "1 + 1 =", "max_tokens": 8})
    for _ in range(TIMES):
        got = post(f"{url}/v1/completions", {"model": MODEL, "prompt": "1 + 1 =", "max_tokens": 8, "temperature": 0})
        assert got["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"], got


def check_refusals(url: str) -> None:
    """A wrong field, and a prompt that is far too long: the router's own words, with the client's request id."""
    for body in (chat("Hello!", max_tokens=-1), chat("1 " * (BIG_CHARS // 2))):
        answers = [refusal(base, body) for base in (BASE, url)]
        assert answers[0] == answers[1], answers
        assert answers[0][:2] == (400, "proxied"), answers


def asking(url: str, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"content-type": "application/json", "x-request-id": "proxied"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def refusal(url: str, body: dict[str, Any]) -> tuple[int, str | None, Any]:
    try:
        with urllib.request.urlopen(asking(url, body), timeout=60):
            raise AssertionError("it is taken")
    except urllib.error.HTTPError as error:
        return error.code, error.headers["x-request-id"], json.load(error)


def check_leaving(url: str) -> None:
    """The first event of a long stream is there long before the last one is written, and nobody writes on for a client
    that has left."""
    before = total(GENERATED)
    body = chat("Count.", stream=True, max_tokens=LONG, ignore_eos=True)
    with urllib.request.urlopen(asking(url, body), timeout=60) as reply:
        assert reply.readline().startswith(b"data:")
    until = time.monotonic() + GONE_S
    while total(RUNNING):
        assert time.monotonic() < until, f"a request runs {GONE_S:.0f} s after its client has left"
        time.sleep(POLL_S)
    written = total(GENERATED) - before
    assert written < LONG, f"all {written:.0f} tokens were written before the client had one, or for nobody"


def total(pattern: re.Pattern[str]) -> float:
    """Over the decode servers."""
    pages = []
    for worker in os.environ["CLIENTS_WORKERS"].splitlines():
        if worker.startswith("decode"):
            with urllib.request.urlopen(f"{worker.split()[1]}/metrics", timeout=30) as reply:
                pages.append(reply.read().decode())
    found = [float(value) for page in pages for value in pattern.findall(page)]
    assert found, pattern.pattern
    return sum(found)


main()
