"""One server on two hosts with a cable between them that is pulled and put back. Network namespaces; needs root."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import MODEL, START_S, Server, children_of, eventually, is_running, secret_flags, show_logs
from several_hosts import Host, poor, several_hosts, unplugged
from two_hosts import POOL

from tandem.cli.fleet import Fleet, serve_words

PORT, MEETING_PORT = 8000, 5000  # every host has all its ports to itself
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
LONG = {"max_new_tokens": 4000, "sampling_params": {"ignore_eos": True}}
SILENCE_S = 5.0  # the heartbeats of docs/flags.md: 1 s, and 4 that may be missing


@dataclass
class Spread:
    hosts: list[Host]  # by node rank
    leader: Server
    follower: Server

    def is_ready(self) -> bool:
        with self.hosts[0].inside():
            return self.leader.is_ready()

    def answer(self, prompt: str = PROMPT) -> list[int]:
        with self.hosts[0].inside():
            return self.leader.generate(prompt)["output_ids"]


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Spread]:
    with ExitStack() as stack:
        hosts = list(stack.enter_context(several_hosts("rank0", "rank1")).values())
        fleet = stack.enter_context(Fleet(tmp_path, engines=1))
        everywhere = ("--host", "0.0.0.0", "--tp", "2", *POOL, *secret_flags(tmp_path))
        together = ("--nnodes", "2", "--dist-init-addr", f"{hosts[0].address}:{MEETING_PORT}")
        try:
            servers: list[Server] = []
            for node_rank, host in enumerate(hosts):
                with host.inside():
                    words = serve_words(MODEL, PORT, *everywhere, *together, "--node-rank", str(node_rank))
                    servers.append(Server(fleet.start(host.name, words, port=PORT)))
            found = Spread(hosts, *servers)
            eventually(found.is_ready, within_s=START_S)
            yield found
        except BaseException:
            show_logs(fleet)
            raise


def test_without_the_cable_requests_end_with_a_cause_and_with_it_a_new_life_begins(spread: Spread) -> None:
    tokens = spread.answer()
    workers = children_of(spread.follower.member.process.pid)
    with spread.hosts[0].inside():
        stream = spread.leader.stream(PROMPT, **LONG)
    assert stream.next() is not None
    with unplugged(*spread.hosts):
        began = time.monotonic()
        error = stream.rest()[-1]["error"]
        assert time.monotonic() - began < SILENCE_S + 10
        assert error["code"] == "worker_lost"
        assert f"node rank 1 ({spread.hosts[1].address}) is lost: silent for 5 s" in error["message"]
        assert not spread.is_ready()
        eventually(lambda: not any(is_running(worker) for worker in workers))
        eventually(lambda: "is lost: silent for 5 s; the workers here have ended" in spread.follower.log)
    eventually(spread.is_ready, within_s=START_S, what=lambda: (spread.leader.log, spread.follower.log))
    assert spread.answer() == tokens


def test_over_a_cable_that_delays_and_loses_packets_the_server_says_the_same(spread: Spread) -> None:
    prompt = PROMPT * 6  # what its sums carry is more than a queue on the way has room for
    tokens = spread.answer(prompt)
    with spread.hosts[0].inside(), spread.leader.open("POST", "/flush_cache") as reply:
        assert reply.status == 200
    with poor(*spread.hosts) as num_lost:
        assert spread.answer(prompt) == tokens
        assert num_lost() > 0
    assert spread.is_ready()
