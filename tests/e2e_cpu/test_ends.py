"""How a server ends, and what does not keep it from starting: a closed terminal, the drain timeout, a full disk."""

import contextlib
import http.client
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Server, children_of, eventually, is_open, is_running

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

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
