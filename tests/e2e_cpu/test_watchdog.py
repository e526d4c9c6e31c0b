"""A process of a server that hangs: the server says that it is unwell, then ends and says why; its partners go on.

Real processes, stopped by SIGSTOP. Tests in which a server ends start their own, or are the last that use it.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, HttpError, Server, child_named, children_of, cluster, eventually, is_running

from tandem.core.scheduler.node import EngineNode
from tandem.server.node.flight import replay, segments_of

TIMEOUT_S = 3
FLAGS = ["--watchdog-timeout", str(TIMEOUT_S), "--max-total-tokens", "8192"]
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"


@contextmanager
def alone(*flags: str) -> Iterator[Server]:
    with cluster(unified=True, flags=[*FLAGS, *flags]) as it:
        assert it.unified is not None
        yield it.unified


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with alone() as found:
        yield found


def stop(server: Server, module: str) -> int:
    child = child_named(server.member.process.pid, module)
    os.kill(child, signal.SIGSTOP)
    return child


def health(server: Server, path: str = "/health") -> tuple[int, str]:
    """Status and body; status 0 once the server is gone."""
    try:
        with server.open("GET", path) as reply:
            return reply.status, reply.read().decode()
    except OSError:
        return 0, ""


def healths_until_the_end(server: Server) -> list[tuple[int, str]]:
    seen = [health(server)]

    def is_over() -> bool:
        seen.append(health(server))
        return server.member.process.poll() is not None

    eventually(is_over, within_s=60, what=lambda: seen[-3:])
    return seen


def exit_reason(server: Server) -> str:
    """The one line in which it says why it ended."""
    (line,) = [line for line in server.log.splitlines() if line.startswith("tandem: error: ")]
    return line


@pytest.mark.parametrize(
    ("who", "module"), [pytest.param("node", "node.process", marks=pytest.mark.slow), ("worker", "worker_process")]
)
def test_health_turns_before_a_server_with_a_hanging_process_ends_with_the_cause(
    who: str, module: str, tmp_path: Path
) -> None:
    with alone("--flight-record", str(tmp_path)) as server:
        server.generate(PROMPT)
        children = children_of(server.member.process.pid)
        stop(server, module)
        seen = healths_until_the_end(server)
        statuses = [status for status, _ in seen]
        assert statuses[0] == 200
        assert 503 in statuses
        assert any(f"the {who} process hangs: no answer for" in body for _, body in seen)
        assert server.member.process.returncode == 1
        assert re.search(
            rf"the {who} process hangs: no answer for 3 s, the last iteration heard of is \d+ ", exit_reason(server)
        )
        assert not any(is_running(child) for child in children)
        (record,) = segments_of(tmp_path)
        replayed = replay(record, EngineNode)
        assert replayed.difference is None
        assert replayed.steps > 0


@pytest.mark.slow
def test_a_server_that_was_frozen_as_a_whole_goes_on(server: Server) -> None:
    tokens = server.generate(PROMPT)["output_ids"]
    pids = [server.member.process.pid, *children_of(server.member.process.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 1)  # there is nothing to wait for: what has to pass is time
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert server.generate(PROMPT)["output_ids"] == tokens
    assert health(server) == (200, "")


def test_a_worker_that_goes_on_in_time_makes_the_server_well_again(server: Server) -> None:
    child = stop(server, "worker_process")
    eventually(lambda: health(server)[0] == 503)
    os.kill(child, signal.SIGCONT)
    eventually(lambda: health(server)[0] == 200)
    assert server.generate(PROMPT)["meta_info"]["path"] == "unified"


def test_a_request_that_waits_for_a_hanging_worker_ends_with_that_cause(server: Server) -> None:
    """The last test of this server, which ends in it."""
    stream = server.stream(PROMPT, max_new_tokens=2000, sampling_params={"ignore_eos": True})
    assert stream.next() is not None
    stop(server, "worker_process")
    error = stream.rest()[-1]["error"]
    assert error["code"] == "worker_lost"
    assert "the worker process hangs" in error["message"]
    assert health(server, "/health_generate")[0] in (0, 503)


@pytest.mark.slow
def test_partners_of_a_server_with_a_hanging_worker_end_with_a_named_cause() -> None:
    with cluster(prefills=1, decodes=1, flags=FLAGS, decode_flags=["--kv-load-failure-policy", "fail"]) as it:
        assert it.router is not None
        prefill, decode = it.prefills[0], it.decodes[0]
        it.router.generate(PROMPT)
        stop(prefill, "worker_process")
        with pytest.raises(HttpError) as failed:
            direct(it, room=77)
        assert (failed.value.status, failed.value.error["code"]) == (502, "peer_lost")
        eventually(lambda: prefill.member.process.poll() == 1)
        eventually(decode.is_idle, what=decode.state)
        assert health(decode) == (200, "")


def direct(it: Cluster, *, room: int) -> None:
    """Both halves without the router, which would try again: decode's answer."""
    prefill, decode = it.prefills[0], it.decodes[0]
    bootstrap = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": room}
    half = prefill.open_stream(PROMPT, bootstrap_room=room)
    try:
        decode.generate(PROMPT, **pair)
    finally:
        half.close()
