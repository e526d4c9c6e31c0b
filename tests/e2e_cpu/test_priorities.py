"""One slot, and who is more urgent comes first: out of the queue, into it, and in the place of one that runs.

The worker that decodes stands still while the others come, so that they meet in the queue.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, cluster, eventually, frozen, generate_body

FLAGS = ("--deterministic", "--max-running-requests", "1", "--enable-priority-scheduling")
LOW, LATER, HIGH = [31] * 40, [32] * 40, [33] * 40
LONG, SHORT = 300, 8
RUNS_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, flags=FLAGS) as it:
        yield it


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with cluster(unified=True, flags=(*FLAGS, "--max-queued-requests", "2")) as it:
        yield it


@pytest.fixture(scope="module")
def alone(common: Cluster) -> dict[str, list[int]]:
    """What one engine says."""
    assert common.unified is not None
    asked = {"low": (LOW, LONG), "later": (LATER, LONG), "high": (HIGH, SHORT)}
    return {
        name: common.unified.generate(prompt, max_new_tokens=count, sampling_params=RUNS_ON)["output_ids"]
        for name, (prompt, count) in asked.items()
    }


class Answers:
    """Of requests that run beside each other, in the order in which they ended."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self.server, self.pool = server, pool
        self.ended: list[str] = []
        self.futures: dict[str, Future[list[int]]] = {}

    def ask(self, name: str, prompt: list[int], count: int, headers: dict[str, str] | None = None, **more: Any) -> None:
        body = generate_body(prompt, count, sampling_params=RUNS_ON, **more)

        def answered() -> list[int]:
            try:
                with self.server.open("POST", "/generate", body, headers) as reply:
                    data = reply.read()
                    if reply.status != 200:
                        raise HttpError(reply.status, data)
                    ids: list[int] = json.loads(data)["output_ids"]
                    return ids
            finally:
                self.ended.append(name)

        self.futures[name] = self.pool.submit(answered)

    def start(self, name: str, prompt: list[int], count: int, **more: Any) -> None:
        """Here when it has said something."""
        stream = self.server.stream(prompt, max_new_tokens=count, sampling_params=RUNS_ON, **more)
        assert stream.next() is not None

        def read_on() -> list[int]:
            ids: list[int] = stream.rest()[-1]["output_ids"]
            self.ended.append(name)
            return ids

        begun = threading.Event()
        self.futures[name] = self.pool.submit(lambda: (begun.set(), read_on())[1])
        assert begun.wait(10)

    def tokens(self) -> dict[str, list[int]]:
        return {name: future.result(timeout=60) for name, future in self.futures.items()}


@contextmanager
def answers_of(server: Server) -> Iterator[Answers]:
    with ThreadPoolExecutor(4) as pool:
        yield Answers(server, pool)


def queues(server: Server) -> dict[str, int]:
    return {name: len(found) for name, found in server.state()["queues"].items() if found}


def story(asked: Server, decodes: Server, alone: dict[str, list[int]], *, by_header: bool) -> None:
    """A low one runs, a second one waits, and one comes that is more urgent than both."""
    with answers_of(asked) as answers:
        answers.start("low", LOW, LONG, priority=1)
        with frozen(decodes, "worker_process"):
            assert queues(decodes) == {"running": 1}, "it has not ended yet"
            answers.ask("later", LATER, LONG, priority=1)
            eventually(lambda: queues(decodes) == {"running": 1, "queued": 1}, what=decodes.state)
            if by_header:
                answers.ask("high", HIGH, SHORT, {"X-Override-Priority": "50"}, priority=0)
            else:
                answers.ask("high", HIGH, SHORT, priority=50)
            eventually(lambda: queues(decodes) == {"retracting": 1, "queued": 2}, what=decodes.state)
        assert answers.tokens() == alone
    assert answers.ended == ["high", "low", "later"]


def test_who_is_more_urgent_answers_first_and_all_say_what_one_engine_says(
    one: Cluster, alone: dict[str, list[int]]
) -> None:
    assert one.unified is not None
    story(one.unified, one.unified, alone, by_header=False)
    eventually(one.unified.is_idle, what=one.unified.state)


@pytest.mark.parametrize("by_header", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_same_on_a_pair_through_its_router(pair: Cluster, alone: dict[str, list[int]], by_header: bool) -> None:
    assert pair.router is not None
    story(pair.router, pair.decodes[0], alone, by_header=by_header)
    for server in pair.servers:
        eventually(server.is_idle, what=server.state)


def test_a_full_queue_takes_in_who_is_more_urgent(one: Cluster, alone: dict[str, list[int]]) -> None:
    server = one.unified
    assert server is not None
    pushed_back = server.metric("sglang:num_retracted_requests_total")
    with answers_of(server) as answers:
        answers.start("low", LOW, LONG, priority=9)
        with frozen(server, "worker_process"):
            for number, name in enumerate(("later", "last"), 1):
                answers.ask(name, LATER, LONG, priority=1)
                eventually(lambda number=number: queues(server).get("queued") == number, what=server.state)
            with pytest.raises(HttpError) as refused:
                server.generate(LATER, max_new_tokens=SHORT, priority=1)
            assert (refused.value.status, refused.value.error["code"]) == (503, "queue_full")
            answers.ask("high", HIGH, SHORT, priority=15)  # not by so much that the one that runs gives way
            with pytest.raises(HttpError) as evicted:
                answers.futures["last"].result(timeout=20)
            assert (evicted.value.status, evicted.value.error["code"]) == (503, "queue_full")
            assert "higher priority" in evicted.value.error["message"]
            assert queues(server) == {"running": 1, "queued": 2}
        del answers.futures["last"]
        assert answers.tokens() == alone
    assert server.metric("sglang:num_retracted_requests_total") == pushed_back, "low has gone on"
    assert [name for name in answers.ended if name != "low"] == ["last", "high", "later"]


def test_without_the_flag_a_priority_is_refused_by_its_name(common: Cluster) -> None:
    assert common.unified is not None
    with pytest.raises(HttpError) as refused:
        common.unified.generate(LOW, priority=1)
    assert (refused.value.status, refused.value.error["param"]) == (400, "priority")
    assert "--enable-priority-scheduling" in refused.value.error["message"]
