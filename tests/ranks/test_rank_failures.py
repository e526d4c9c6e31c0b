"""The workers of a replica live and die together: whichever is lost, the server ends and says which one it was.

And what cannot be spread over so many workers is refused before anything serves. Real processes.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # marks of pytest

import pytest
from cluster import MODEL, Server, children_of, cluster, eventually, is_running, workers_of

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
POOL = ("--max-total-tokens", "8192")


def error_line(server: Server) -> str:
    (line,) = [line for line in server.log.splitlines() if line.startswith("tandem: error: ")]
    return line


WORKERS = [
    (("--tp", "2"), 1, "TP1 PP0"),
    (("--pp", "2"), 0, "TP0 PP0"),
    (("--attn-cp-size", "2"), 1, "TP0 CP1 PP0"),
]
OTHER_WORKERS = [
    (("--tp", "2"), 0, "TP0 PP0"),
    (("--pp", "2"), 1, "TP0 PP1"),
    *((("--tp", "2", "--pp", "2"), shard, f"TP{shard % 2} PP{shard // 2}") for shard in range(4)),
]


def slow(cases: Sequence[tuple[Any, ...]]) -> list[Any]:  # pytest does not name the type
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("words", "shard", "name"), [*WORKERS, *slow(OTHER_WORKERS)])
def test_a_worker_that_is_killed_takes_its_replica_with_it(words: Sequence[str], shard: int, name: str) -> None:
    with cluster(unified=True, flags=[*POOL, *words]) as it:
        server = it.unified
        assert server is not None
        children = children_of(server.member.process.pid)
        stream = server.stream(PROMPT, max_new_tokens=4000, sampling_params={"ignore_eos": True})
        assert stream.next() is not None
        assert f" {name}] engine: " in server.log, "it names itself where it logs"
        os.kill(workers_of(server)[shard], signal.SIGKILL)
        error = stream.rest()[-1]["error"]
        assert error["code"] == "worker_lost"
        assert f"the worker {name} process was killed by signal SIGKILL" in error["message"]
        eventually(lambda: server.member.process.poll() == 1)
        assert f"the worker {name} process was killed" in error_line(server)
        assert not any(is_running(child) for child in children)


@pytest.mark.parametrize(("words", "shard", "name"), [(("--pp", "2"), 1, "TP0 PP1"), *slow(WORKERS)])
def test_a_worker_that_hangs_is_named_by_the_watchdog(words: Sequence[str], shard: int, name: str) -> None:
    """And the server says before that it is not well."""
    with cluster(unified=True, flags=[*POOL, *words, "--watchdog-timeout", "3"]) as it:
        server = it.unified
        assert server is not None
        server.generate(PROMPT, max_new_tokens=4)
        os.kill(workers_of(server)[shard], signal.SIGSTOP)
        eventually(lambda: health(server) == 503, what=lambda: server.log)
        eventually(lambda: server.member.process.poll() == 1, within_s=60)
        assert f"the worker {name} process hangs: no answer for 3 s" in error_line(server)
        assert error_line(server).endswith(" (--watchdog-timeout); start the server again")


@pytest.mark.slow
def test_a_worker_that_answers_and_returns_no_batch_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage before it has returned its part."""
    file = tmp_path / "hanging"
    file.write_text("")
    folders = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).with_name("hanging_workers"))]
    monkeypatch.setenv("TANDEM_TEST_HANGING_WORKERS", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    with cluster(unified=True, flags=[*POOL, "--pp", "2", "--watchdog-timeout", "3"]) as it:
        server = it.unified
        assert server is not None
        server.generate(PROMPT, max_new_tokens=4)
        file.write_text(str(workers_of(server)[1]))
        stream = server.open_stream(PROMPT)
        eventually(lambda: server.member.process.poll() == 1, within_s=60)
        hangs = r"the worker TP0 PP1 process hangs: iteration \d+ has not returned for 3 s"
        assert re.search(hangs, error_line(server)), error_line(server)
        stream.close()


def health(server: Server) -> int:
    with server.open("GET", "/health") as reply:
        return reply.status


@contextmanager
def starting(tmp_path, *flags: str) -> Iterator[Server]:
    """A server that was told to start, and is not waited for."""
    (port,) = free_ports(1)
    with Fleet(tmp_path, engines=1) as fleet:
        yield Server(fleet.start("server", serve_words(MODEL, port, *POOL, *flags), port=port))


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (("--tp", "16"), 1, "8 attention heads cannot be spread over 16 shards; take fewer"),
        (("--pp", "5"), 1, "4 layers cannot be spread over 5 pipeline stages; take fewer"),
        (("--tp", "0"), 2, "--tp-size, --pp-size and --attn-cp-size must be at least 1, and their product at"),
        (("--attn-cp-size", "2", "--disaggregation-mode", "decode"), 2, "which a decode server does not compute"),
        (("--tp", "2", "--dp", "2", "--enable-dp-attention", "--deterministic"), 2, "which cuts the sums of MLPs"),
    ],
)
def test_what_cannot_be_spread_like_that_is_refused_in_one_line(
    tmp_path, flags: Sequence[str], code: int, reason: str
) -> None:
    with starting(tmp_path, *flags) as server:
        children: set[int] = set()
        eventually(lambda: has_ended(server, children), within_s=90, what=lambda: server.log)
        assert server.member.process.returncode == code
        assert reason in error_line(server)
        assert not children, "it is refused before any worker is started"


def test_workers_without_a_device_each_end_the_server_in_one_line_before_they_meet(tmp_path) -> None:
    """Only they know what devices there are."""
    with starting(tmp_path, "--tp", "2", "--device", "cuda:99") as server:
        eventually(lambda: server.member.process.poll() == 1, within_s=90, what=lambda: server.log)
        assert "2 workers need a device each, from cuda:99 on, and this machine has " in error_line(server)


def has_ended(server: Server, children: set[int]) -> bool:
    """children: collects those that are seen meanwhile."""
    children.update(children_of(server.member.process.pid))
    return server.member.process.poll() is not None


def test_more_workers_than_cores_are_worth_a_warning(tmp_path) -> None:
    cores = len(os.sched_getaffinity(0))
    with starting(tmp_path, "--tp", "4", "--pp", str(cores)) as server:
        sizes = f"{4 * cores} workers (--tp-size 4 x --pp-size {cores} x --dp-size 1) share {cores} cores"
        eventually(lambda: sizes in server.log, what=lambda: server.log)


@pytest.mark.parametrize(
    ("flag", "name"), [("--tp", "the worker TP1 PP0 process"), ("--dp", "DP rank 1: the worker process")]
)
def test_a_worker_that_dies_while_it_loads_ends_the_start(tmp_path, flag: str, name: str) -> None:
    with starting(tmp_path, flag, "2") as server:
        eventually(lambda: len(workers_of(server)) == 2)
        children = children_of(server.member.process.pid)
        os.kill(workers_of(server)[1], signal.SIGKILL)
        eventually(lambda: server.member.process.poll() == 1, within_s=60, what=lambda: server.log)
        assert error_line(server).startswith(f"tandem: error: {name} was killed by signal SIGKILL")
        assert not any(is_running(child) for child in children)
