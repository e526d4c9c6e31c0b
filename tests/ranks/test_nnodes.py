"""One server on several hosts (`--nnodes`): the same tokens, one life for all of them, and one line for what is wrong.

Two hosts are two addresses of this machine; `test_nnodes_cable.py` has real ones.
"""

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from cluster import MODEL, START_S, Server, children_of, eventually, is_running, show_logs
from rank_gauges import worker_gauges
from reference import CHUNK, ask_all, assert_same_tokens, real_prompts
from test_rank_failures import workers_of
from test_rank_identity import slow
from two_hosts import POOL, TwoHosts, ends, error_line, host_words, start_hosts, two_hosts

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
FLAGS = ("--chunked-prefill-size", str(CHUNK))
LONG = {"max_new_tokens": 4000, "sampling_params": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return real_prompts(16)


CUTS = [("--tp", "2")]
MORE_CUTS = [("--pp", "2"), ("--dp", "2"), ("--tp", "2", "--pp", "2"), ("--dp", "2", "--tp", "2")]


@pytest.mark.parametrize("cut", [*CUTS, *slow(*MORE_CUTS)], ids="".join)
def test_a_server_on_two_hosts_says_what_transformers_says(
    tmp_path: Path, prompts: list[list[int]], cut: Sequence[str]
) -> None:
    with two_hosts(tmp_path, *FLAGS, *cut) as it:
        assert len(workers_of(it.leader)) == len(workers_of(it.follower)) == len(cut) // 2
        assert_same_tokens(prompts, ask_all(it.leader, prompts), path="unified")
        eventually(it.leader.is_idle, what=it.leader.states)


def test_a_prefill_on_two_hosts_sends_kv_from_both_to_a_decode_on_two_that_is_cut_otherwise(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    bootstrap, router_port = free_ports(2)
    with Fleet(tmp_path, engines=2) as fleet:
        try:
            mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
            it = start_hosts(fleet, [*FLAGS, *mode, "--tp", "2"], name="prefill")
            decodes = start_hosts(fleet, [*FLAGS, "--disaggregation-mode", "decode", "--pp", "2"], name="decode")
            decode = decodes.leader
            pair = ("--prefill", it.leader.url, str(bootstrap), "--decode", decode.url)
            router = Server(fleet.start("router", ["router", "--port", str(router_port), *pair], port=router_port))
            for server in (it.leader, decode, router):
                eventually(server.is_ready, within_s=START_S)
            assert_same_tokens(prompts, ask_all(router, prompts), path="remote")
            assert data_hosts(bootstrap) == ["127.0.0.1", "127.0.0.2"]
            assert worker_gauges(it.leader, "pinned_pages") == {("0", "0"): 0.0, ("1", "0"): 0.0}
            for server in (it.leader, decode):
                eventually(server.is_idle, what=server.state)
        except BaseException:
            show_logs(fleet)
            raise


def data_hosts(bootstrap_port: int, dp_rank: int = -1) -> list[str]:
    """Where the KV of each worker of a DP rank of a prefill is pulled from, as its bootstrap server tells."""
    with urlopen(f"http://127.0.0.1:{bootstrap_port}/route?prefill_dp_rank={dp_rank}") as reply:
        return [shard["host"] for shard in json.load(reply)["shards"]]


def answer(it: TwoHosts) -> list[int]:
    return it.leader.generate(PROMPT)["output_ids"]


def serves_again(it: TwoHosts, tokens: list[int]) -> None:
    eventually(it.leader.is_ready, within_s=START_S, what=lambda: it.leader.log)
    assert answer(it) == tokens


def loses(it: TwoHosts, process: int) -> str:
    """The line that a stream ends with when this process is killed, and the server with it is not ready."""
    stream = it.leader.stream(PROMPT, **LONG)
    assert stream.next() is not None
    os.kill(process, signal.SIGKILL)
    error = stream.rest()[-1]["error"]
    assert error["code"] == "worker_lost"
    return error["message"]


@pytest.mark.slow
def test_a_group_over_two_hosts_dies_together_and_lives_again_when_all_are_there(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "--pp", "2") as it:
        tokens = answer(it)
        assert "worker TP0 PP1 process was killed by signal SIGKILL" in loses(it, workers_of(it.follower)[0])
        serves_again(it, tokens)
        assert "worker TP0 PP0 process was killed by signal SIGKILL" in loses(it, workers_of(it.leader)[0])
        serves_again(it, tokens)
        orphans = children_of(it.follower.member.process.pid)
        assert "node rank 1 (127.0.0.1) is lost" in loses(it, it.follower.member.process.pid)
        eventually(lambda: not any(is_running(child) for child in orphans))
        with it.leader.open("GET", "/health") as reply:
            assert reply.status == 503
        it.follower.member.process.wait()
        it.fleet.restart(it.follower.member)
        serves_again(it, tokens)
        orphans = [*children_of(it.leader.member.process.pid), *workers_of(it.follower)]
        it.leader.member.process.kill()
        it.leader.member.process.wait()
        eventually(lambda: not any(is_running(child) for child in orphans))
        # how a connection ends whose other side was killed, depends on what was still to be read
        eventually(lambda: "; the workers here have ended, and it is dialled again" in it.follower.log)
        it.fleet.restart(it.leader.member)
        serves_again(it, tokens)


TOGETHER = ("--dp", "2", "--tp", "2", "--enable-dp-attention")


def test_ranks_that_step_together_over_two_hosts_say_what_transformers_says(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    with two_hosts(tmp_path, *FLAGS, *TOGETHER) as it:
        assert len(workers_of(it.leader)) == len(workers_of(it.follower)) == 1
        answers = ask_all(it.leader, prompts)
        assert_same_tokens(prompts, answers, path="unified")
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
        eventually(it.leader.is_idle, what=it.leader.states)


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("worker", "DP rank 1: the worker process was killed by signal SIGKILL"),
        pytest.param("host", "DP rank 1: node rank 1 (127.0.0.1) is lost: ", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_step_together_end_together_on_all_hosts(tmp_path: Path, victim: str, reason: str) -> None:
    with two_hosts(tmp_path, *TOGETHER) as it:
        children = [child for member in it.members for child in children_of(member.process.pid)]
        streams = [it.leader.stream(PROMPT, routed_dp_rank=rank, **LONG) for rank in (0, 1)]
        for stream in streams:
            assert stream.next() is not None
        killed = workers_of(it.follower)[0] if victim == "worker" else it.follower.member.process.pid
        os.kill(killed, signal.SIGKILL)
        for stream in streams:
            error = stream.rest()[-1]["error"]
            assert error["code"] == "worker_lost"
            assert reason in error["message"]
        for server in (it.leader, it.follower) if victim == "worker" else (it.leader,):
            ends(server, 1)
            assert reason in error_line(server)
        eventually(lambda: not any(is_running(child) for child in children))


@pytest.mark.slow
def test_of_ranks_that_step_together_the_one_that_hangs_on_another_host_is_named(tmp_path: Path) -> None:
    with two_hosts(tmp_path, *TOGETHER, "--watchdog-timeout", "3") as it:
        assert it.leader.stream(PROMPT, routed_dp_rank=0, **LONG).next() is not None
        os.kill(workers_of(it.follower)[0], signal.SIGSTOP)
        for server in (it.leader, it.follower):
            ends(server, 1)
            assert "DP rank 1: the worker process hangs: no answer for " in error_line(server)


@pytest.mark.slow
def test_a_prefill_that_steps_together_over_two_hosts_sends_kv_from_both(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    bootstrap, port, router_port = free_ports(3)
    with Fleet(tmp_path, engines=2) as fleet:
        try:
            mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
            it = start_hosts(fleet, [*FLAGS, *mode, *TOGETHER], name="prefill")
            words = serve_words(MODEL, port, *FLAGS, *POOL, "--disaggregation-mode", "decode")
            decode = Server(fleet.start("decode", words, port=port))
            pair = ("--prefill", it.leader.url, str(bootstrap), "--decode", decode.url)
            router = Server(fleet.start("router", ["router", "--port", str(router_port), *pair], port=router_port))
            for server in (it.leader, decode, router):
                eventually(server.is_ready, within_s=START_S)
            assert_same_tokens(prompts, ask_all(router, prompts), path="remote")
            assert [data_hosts(bootstrap, rank) for rank in (0, 1)] == [["127.0.0.1"], ["127.0.0.2"]]
            for server in (it.leader, decode):
                eventually(server.is_idle, what=server.states)
        except BaseException:
            show_logs(fleet)
            raise


@pytest.mark.parametrize("told", [0, 1])
def test_whichever_host_is_told_to_end_the_server_drains_on_all(tmp_path: Path, told: int) -> None:
    with two_hosts(tmp_path, "--tp", "2") as it:
        children = [child for member in it.members for child in children_of(member.process.pid)]
        stream = it.leader.stream(PROMPT, max_new_tokens=40, sampling_params={"ignore_eos": True})
        assert stream.next() is not None
        it.members[told].process.send_signal(signal.SIGTERM)
        assert len(stream.rest()[-1]["output_ids"]) == 40
        for server in (it.leader, it.follower):
            ends(server, 0)
        assert not any(is_running(child) for child in children)


# --- what is wrong, in one line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--nnodes", "2"), "--nnodes needs --dist-init-addr HOST:PORT"),
        (("--nnodes", "2", "--dist-init-addr", "a:b"), "--nnodes needs --dist-init-addr HOST:PORT"),
        (("--nnodes", "2", "--tp", "3", "--dist-init-addr", "127.0.0.1:1"), "3 workers (--tp-size 3 x --pp-size 1 x"),
        (("--nnodes", "2", "--node-rank", "2", "--tp", "2", "--dist-init-addr", "127.0.0.1:1"), "must be from 0 to 1"),
        (("--node-rank", "1"), "go together: without --nnodes a server is on one host"),
        (("--nnodes", "2", "--tp", "2", "--dist-init-addr", "10.0.0.1:5000"), "needs --cluster-secret-file"),
    ],
)
def test_flags_that_cannot_be_are_refused(tmp_path: Path, flags: Sequence[str], reason: str) -> None:
    with Fleet(tmp_path, engines=1) as fleet:
        server = Server(fleet.start("server", serve_words(MODEL, 0, *flags), port=0))
        ends(server, 2)
        assert reason in error_line(server)


def test_a_host_that_finds_nobody_ends_at_its_deadline(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Fleet(tmp_path, engines=1) as fleet:
        words = host_words(1, f"127.0.0.1:{port}", 0, ("--tp", "2", "--dist-timeout", "1"))
        server = Server(fleet.start("server", words, port=0))
        ends(server, 1)
        line = f"node rank 0 at 127.0.0.1:{port} has not let node rank 1 in until --dist-timeout: "
        assert error_line(server).startswith(line)


@pytest.mark.slow
def test_a_leader_to_whom_nobody_comes_ends_at_its_deadline_and_is_not_healthy_until_then(tmp_path: Path) -> None:
    port, meeting = free_ports(2)
    with Fleet(tmp_path, engines=1) as fleet:
        words = host_words(0, f"127.0.0.1:{meeting}", port, ("--tp", "2", "--dist-timeout", "4"))
        server = Server(fleet.start("server", words, port=port))
        eventually(lambda: "waits for node rank 1" in server.log)
        with server.open("GET", "/health") as reply:
            assert reply.status == 503
        ends(server, 1)
        assert error_line(server).startswith(f"node rank 1 did not come to 127.0.0.1:{meeting} within 4 s; start it")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, Fleet(tmp_path, engines=1) as fleet:
        meeting = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(fleet.start("server", host_words(0, meeting, 0, ("--tp", "2")), port=0))
        ends(server, 1)
        assert error_line(server).endswith("Address already in use); use another --dist-init-addr")


def test_flags_that_differ_between_hosts_are_named_and_the_leader_waits_for_who_fits(tmp_path: Path) -> None:
    with Fleet(tmp_path, engines=1) as fleet:
        it = start_hosts(fleet, ("--tp", "2"), follower_flags=("--tp", "2", "--page-size", "32"))
        ends(it.follower, 1)
        reason = "--page-size is 32 on node rank 1 and 16 on node rank 0; all hosts need the same"
        assert error_line(it.follower) == reason
        fleet.start("who-fits", host_words(1, it.meeting, 0, ("--tp", "2")), port=0)
        eventually(it.leader.is_ready, within_s=START_S, what=lambda: it.leader.log)


@pytest.mark.slow
def test_two_hosts_with_one_node_rank_are_told(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "--tp", "2") as it:
        second = Server(it.fleet.start("second", host_words(1, it.meeting, 0, ("--tp", "2")), port=0))
        ends(second, 1)
        assert "node rank 1 is there already, at 127.0.0.1" in error_line(second)
        assert it.leader.generate(PROMPT)["output_ids"]


def test_a_stranger_without_the_secret_is_nobody(tmp_path: Path) -> None:
    secrets = [tmp_path / name for name in ("ours", "theirs")]
    for path in secrets:
        path.write_text(f"the secret of {path.name} servers")
        path.chmod(0o600)
    ours, theirs = (("--tp", "2", "--cluster-secret-file", str(path)) for path in secrets)
    with Fleet(tmp_path, engines=1) as fleet:
        it = start_hosts(fleet, ours, follower_flags=theirs)
        ends(it.follower, 1)
        assert error_line(it.follower).endswith("does not hold this cluster's secret (--cluster-secret-file)")
        eventually(lambda: "who came from 127.0.0.1 has not joined: " in it.leader.log)
        assert it.leader.member.process.poll() is None
        assert workers_of(it.leader) == []


def test_a_worker_that_dies_while_it_loads_ends_the_start_on_all_hosts(tmp_path: Path) -> None:
    with Fleet(tmp_path, engines=1) as fleet:
        it = start_hosts(fleet, ("--tp", "2"))
        eventually(lambda: workers_of(it.follower))
        os.kill(workers_of(it.follower)[0], signal.SIGKILL)
        for server in (it.leader, it.follower):
            ends(server, 1)
            assert "the worker TP1 PP0 process was killed by signal SIGKILL" in error_line(server)
            assert "on node rank 1" in error_line(server)
