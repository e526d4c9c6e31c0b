"""`tandem demo` and `tandem up` as a user runs them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from cluster import Cluster, children_of, eventually, is_open, is_running

from tandem.cli import demo
from tandem.cli.ports import free_ports

TANDEM = [sys.executable, "-m", "tandem.cli.main"]
SLOW_IMPORTS = """
import sys, time
if "tandem.server.worker_process" in sys.orig_argv:
    time.sleep(60)
"""


def run_tandem(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*TANDEM, *words], capture_output=True, text=True, timeout=90, check=False)


def test_the_demo_prints_one_document_that_says_the_tokens_are_the_same() -> None:
    question = "Anna has 5 books and gets 3 more. How many books does she have?"
    shown = run_tandem("demo", "--json", "--prompt", question)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert set(document) == {"path", "kv_bytes", "tokens", "unified_tokens", "identical", "ttft_ms", "ttft_ledger"}
    assert document["path"] == "remote"
    assert document["kv_bytes"] > 0
    assert document["identical"] is True
    assert document["tokens"] == document["unified_tokens"] != []
    assert 0 < sum(document["ttft_ledger"].values()) <= document["ttft_ms"]


def test_the_demo_tells_a_human_what_happened(common: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert common.router is not None
    assert common.unified is not None
    demo.compare(common.router.member, common.unified.member, demo.PROMPT, demo.Screen(is_quiet=False))
    shown = capsys.readouterr().out
    for fact in ("path     remote", "KiB of KV moved", "ttft ", "decode_transferred", "gives the same ", "#### 168"):
        assert fact in shown


def descendants(process_id: int) -> list[int]:
    found = []
    for child in children_of(process_id):
        found += [child, *descendants(child)]
    return found


def test_up_starts_again_who_is_killed_and_nobody_is_refused_meanwhile_and_ctrl_c_drains_it(tmp_path: Path) -> None:
    """Router and a decode server: while either starts anew every request of a client is answered."""
    (port,) = free_ports(1)
    output = tmp_path / "up.log"
    with output.open("wb") as log:
        up = subprocess.Popen([*TANDEM, "up", "--decode", "2", "--port", str(port)], stdout=log, stderr=log)
    try:
        eventually(lambda: "tandem: ready" in output.read_text() or up.poll() is not None, within_s=60)
        assert output.read_text().startswith("tandem: starting 4 processes: router, 1 prefill and 2 decode servers")
        assert f"http://127.0.0.1:{port}/v1" in output.read_text()
        expected = ask(port)
        for words, name in (("router", "router"), ("serve", "decode-0")):
            os.kill(member_of(up.pid, words), signal.SIGKILL)
            while f"tandem: {name} serves again" not in output.read_text():
                assert ask(port) == expected
        assert ask(port) == expected
        assert output.read_text().count("tandem: ready") == 1
        everybody = descendants(up.pid)
        assert len(everybody) == 1 + 3 * 3  # the router; three servers of three processes
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
        assert not any(map(is_running, everybody))
    finally:
        up.kill()
        up.wait()


def ask(port: int) -> list[int]:
    body = {"text": "Tom has 3 apples", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        tokens: list[int] = json.loads(reply.read())["output_ids"]
    return tokens


def member_of(parent: int, word: str) -> int:
    """The last child of `parent` that runs this command of tandem: decode servers are started after prefill servers."""
    found = [pid for pid in children_of(parent) if f"\0{word}\0" in Path(f"/proc/{pid}/cmdline").read_text()]
    return found[-1] if word == "router" else found[1]


@pytest.mark.parametrize(
    ("words", "number"),
    [  # what a fleet does with a signal, and what a server does: each with both
        (["demo"], signal.SIGINT),
        (["up", "--port", "0"], signal.SIGTERM),
        (["serve", "tandem/mini", "--port", "0"], signal.SIGINT),
        (["serve", "tandem/mini", "--port", "0"], signal.SIGTERM),
    ],
)
def test_a_command_that_is_told_to_end_while_it_starts_leaves_nothing_running(
    words: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """A worker may import torch for long, and must not live until it has: here that takes a minute."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    (folder := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(tmp_path)}
    started = subprocess.Popen([*TANDEM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    num_processes = 2 if words[0] == "serve" else 1 + 2 * 3
    eventually(lambda: len(descendants(started.pid)) >= num_processes, within_s=60)
    everybody = descendants(started.pid)
    started.send_signal(number)
    _, error = started.communicate(timeout=30)
    assert b"Traceback" not in error
    assert list(folder.iterdir()) == []
    eventually(lambda: not any(map(is_running, everybody)), within_s=20)


@pytest.mark.slow
def test_up_that_is_told_twice_to_end_says_what_that_costs(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    output = tmp_path / "up.log"
    with output.open("wb") as log:
        up = subprocess.Popen([*TANDEM, "up", "--port", str(port)], stdout=log, stderr=log)
    try:
        eventually(lambda: "tandem: ready" in output.read_text() or up.poll() is not None, within_s=60)
        url = f"http://127.0.0.1:{port}/generate"
        body = {"text": "Tom", "stream": True, "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.readline()  # it runs, and will for a while
            everybody = descendants(up.pid)
            up.send_signal(signal.SIGINT)
            eventually(lambda: "tandem: draining" in output.read_text(), within_s=10)
            up.send_signal(signal.SIGINT)
            assert up.wait(10) == 1
        assert "tandem: error: ended before it had drained" in output.read_text()
        eventually(lambda: not any(map(is_running, everybody)), within_s=10)
    finally:
        up.kill()
        up.wait()


def test_up_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    output = tmp_path / "up.log"
    with output.open("wb") as log:
        up = subprocess.Popen([*TANDEM, "up", "--port", str(port)], stdout=log, stderr=log)
    eventually(lambda: len(descendants(up.pid)) == 1 + 2 * 3, within_s=60, what=output.read_text)
    everybody = descendants(up.pid)
    up.kill()
    up.wait()
    eventually(
        lambda: not any(map(is_running, everybody)),
        within_s=30,
        what=lambda: str([Path(f"/proc/{one}/cmdline").read_text() for one in everybody if is_running(one)]),
    )


@pytest.mark.parametrize(
    ("words", "cause", "code"),
    [
        (["up", "/does/not/exist"], "/does/not/exist does not exist", 1),
        (["up", "--server-flags", "--page-size 12"], "power of two", 2),
        (["up", "--prefill-flags=--strict-remote"], "prefill: --strict-remote is for decode servers", 2),
        (["up", "--decode-flags=--optimistic-prefill-retries 2"], "--optimistic-prefill-retries is for prefill", 2),
        (["up", "--server-flags", "'--page-size"], "--server-flags cannot be parted", 2),
        (["up", "--router-flags", "--drain-timeout -1"], "router: --retries and --drain-timeout", 2),
        (["up", "--server-flags", "--deterministic"], "written behind =", 2),
        (["up", "--prefill", "0"], "whole number of at least 1", 2),
        (["up", "--server-flags=--port 9000"], "--server-flags cannot say --port", 2),
        (["up", "--decode-flags=--disaggregation-mode=null"], "--decode-flags cannot say --disaggregation-mode", 2),
        (["up", "--router-flags=--decode http://127.0.0.1:1"], "--router-flags cannot say --decode", 2),
        (["up", "--server-flags=--pagesize 16"], "unknown argument --pagesize; did you mean --page-size?", 2),
        (["up", "--decode-flags=--page-size 32"], "would differ in --page-size, in which a pair must agree", 2),
        (["up", "--server-flags=--tp 1", "--prefill-flags=--tp-size=2"], "prefill: --tp-size is given twice", 2),
    ],
)
def test_up_that_cannot_start_says_why_and_leaves_nothing_running(words: list[str], cause: str, code: int) -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    up = run_tandem(*words, "--port", str(port))
    assert up.returncode == code
    (line,) = [line for line in up.stderr.splitlines() if line.startswith("tandem: error: ")]
    assert cause in line
    assert not is_open(port)
    assert time.monotonic() - began < 30


def test_an_output_that_takes_no_more_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [*TANDEM, "simulate", "--seed", "3", "--until", "1ms", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "tandem: error: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr


def test_up_on_a_port_that_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = run_tandem("up", "--port", str(port))
    assert up.returncode == 1
    assert re.search(rf"tandem: error: cannot listen on 127.0.0.1:{port}: Address already in use", up.stderr)
    assert up.stdout == "", "neither that it starts nor that it is ready"


def test_a_router_on_a_port_that_is_taken_names_it_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = run_tandem("router", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2", "--port", str(port))
    assert router.returncode == 1
    assert router.stderr.splitlines()[-1] == (
        f"tandem: error: cannot listen on 127.0.0.1:{port}: Address already in use; use another --port"
    )


def test_a_router_that_inherits_no_socket_says_so() -> None:
    router = run_tandem("router", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2", "--fd", "99")
    assert router.returncode == 1
    assert "tandem: error: cannot listen on file descriptor 99: Bad file descriptor" in router.stderr
