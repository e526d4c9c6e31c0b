"""How a server ends, and what does not keep it from starting: a closed terminal, the drain timeout, a full disk."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cluster import Server, children_of, eventually, is_open, is_running
from router_fakes import FakeWorker, FallSilent, Hang

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.settings import Role

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
FOREVER = {"ignore_eos": True}


def test_a_closed_terminal_drains_and_what_runs_beyond_the_drain_timeout_ends_as_draining(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Fleet(tmp_path, engines=1) as fleet:
        words = serve_words("tandem/mini", port, "--drain-timeout", "0.1")
        server = Server(fleet.start("unified", words, port=port))
        fleet.wait_ready(timeout_s=60)
        process = server.member.process
        children = children_of(process.pid)
        stream = server.stream(PROMPT, max_new_tokens=8000, sampling_params=FOREVER)
        assert stream.next() is not None
        process.send_signal(signal.SIGHUP)
        error = stream.rest()[-1]["error"]
        assert (error["code"], error["retryable"]) == ("draining", True)
        assert process.wait(20) == 0
        assert not any(map(is_running, children))


def test_a_router_says_draining_to_whom_it_has_not_answered_within_its_drain_timeout() -> None:
    """To a stream that has begun, and to who waits for a document."""
    prefill, decode = FakeWorker(Role.PREFILL), FakeWorker(Role.DECODE)
    decode.prefills = [prefill]
    decode.behaves(FallSilent(), Hang())
    (port,) = free_ports(1)
    words = ["--prefill", prefill.url, "--decode", decode.url, "--port", str(port), "--drain-timeout", "1"]
    process = subprocess.Popen([sys.executable, "-m", "tandem.cli.main", "router", *words], start_new_session=True)
    try:
        eventually(lambda: is_healthy(port), within_s=60)
        url, client, body = f"http://127.0.0.1:{port}/generate", httpx.Client(timeout=20), {"text": "x"}
        with client.stream("POST", url, json=body | {"stream": True}) as stream, ThreadPoolExecutor() as pool:
            said = stream.iter_text()
            assert next(said) == "data: {}\n\n"
            asked = pool.submit(client.post, url, json=body)
            eventually(lambda: len(decode.generations) == 2, within_s=20)
            process.send_signal(signal.SIGTERM)
            last, document = "".join(said).strip(), asked.result()
        errors = [json.loads(last.removeprefix("data: "))["error"], document.json()["error"]]
        assert [(error["code"], error["retryable"]) for error in errors] == [("draining", True)] * 2
        assert (document.status_code, process.wait(20)) == (503, 0)
    finally:
        process.kill()
        process.wait()
        for worker in (prefill, decode):
            worker.kill()


def serve_command(port: int) -> list[str]:
    return serve_words("tandem/mini", port)


def router_command(port: int) -> list[str]:
    nowhere = [f"http://127.0.0.1:{free}" for free in free_ports(2)]
    return ["router", "--prefill", nowhere[0], "--decode", nowhere[1], "--port", str(port)]


@pytest.mark.parametrize("words", [serve_command, router_command])
def test_who_cannot_say_anything_starts_and_serves_and_ends(words: Callable[[int], list[str]]) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tandem.cli.main", *words(port)]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=full, stderr=full, start_new_session=True)
    try:
        eventually(lambda: process.poll() is not None or is_healthy(port), within_s=60)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def is_healthy(port: int) -> bool:
    if not is_open(port):
        return False
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
