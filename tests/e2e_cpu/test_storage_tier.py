"""Storage below host memory: KV outlives the server that computed it, by `kill -9`, and the tokens are the same."""

import json
import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster, Server, cluster, eventually
from reference import NEAR_TIE, PAGE, parting, real_prompts

LENGTH, OUTPUT = 12 * PAGE + 3, 20


def flags(folder: Path, backend: str = "file") -> list[str]:
    return [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", backend, "--hicache-storage-dir", str(folder)),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]


def prompts(salt: int) -> list[list[int]]:
    text = [token for prompt in real_prompts(100)[10:] for token in prompt]
    return [[3 + salt, 20 + i, *text[i * LENGTH : (i + 1) * LENGTH - 2]] for i in range(4)]


def ask(server: Server, wanted: list[list[int]]) -> list[dict]:
    params = {"ignore_eos": True}
    return [server.generate(prompt, max_new_tokens=OUTPUT, sampling_params=params) for prompt in wanted]


def from_storage(answers: list[dict]) -> list[int]:
    return [answer["meta_info"]["cached_tokens_details"]["storage"] for answer in answers]


def assert_right(wanted: list[list[int]], answers: list[dict]) -> None:
    for prompt, answer in zip(wanted, answers, strict=True):
        found = parting(tuple(prompt), tuple(answer["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"{found}"


def is_written(server: Server) -> bool:
    state = server.state()
    return not state["copies"] and not state["storage"]


def pages_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "secret"]


@pytest.mark.slow
def test_a_conversation_is_a_hit_after_the_server_was_killed(tmp_path: Path) -> None:
    """The prompt that has to be computed comes last: behind it a server knows what a token costs, and where the machine
    is busy may find that a load costs more."""
    wanted = prompts(0)
    with cluster(unified=True, flags=flags(tmp_path)) as running:
        server = running.unified
        assert server is not None
        server.generate(wanted[-1][: PAGE + 1], max_new_tokens=1)
        eventually(lambda: is_written(server))
        (damaged,) = pages_of(tmp_path)  # the first page of the last prompt
        first = ask(server, wanted)
        eventually(lambda: is_written(server))
        assert server.metric("sglang:backuped_tokens_total") >= 4 * 12 * PAGE
        os.kill(server.member.process.pid, signal.SIGKILL)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    with cluster(unified=True, flags=flags(tmp_path)) as running:
        server = running.unified
        assert server is not None
        again = ask(server, wanted)
        hits = from_storage(again)
        assert hits == [*[12 * PAGE] * 3, 0], "all but the one whose first page has changed"
        assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
        assert_right(wanted, first)
        assert server.metric('sglang:cached_tokens_total{cache_source="storage"') == sum(hits)
        assert server.metric("tandem:worker_storage_removed_damaged_total") == 1
        eventually(server.is_idle)


@pytest.mark.slow
def test_nixl_writes_and_reads_the_files_of_both_kinds_of_servers(tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    wanted = prompts(2)
    answers: list[list[dict]] = []
    for backend in ("nixl", "file", "nixl"):
        with cluster(unified=True, flags=flags(tmp_path, backend)) as running:
            assert running.unified is not None
            answers.append(ask(running.unified, wanted))
            eventually(lambda server=running.unified: is_written(server))
            assert running.unified.metric("tandem:worker_storage_errors_total") == 0
    assert [from_storage(each) for each in answers] == [[0] * 4, [12 * PAGE] * 4, [12 * PAGE] * 4]
    assert len({str([answer["output_ids"] for answer in each]) for each in answers}) == 1
    assert_right(wanted, answers[0])


@pytest.mark.slow
def test_both_halves_of_a_pair_serve_from_storage_and_only_the_rest_travels(tmp_path: Path) -> None:
    wanted = prompts(1)
    answers: list[list[dict]] = []
    for _ in range(2):
        with cluster(prefills=1, decodes=1, flags=flags(tmp_path)) as running:
            assert running.router is not None
            answers.append(ask(running.router, wanted))
            for server in running.servers:
                eventually(lambda server=server: is_written(server))
            fetched = [server.metric("sglang:prefetched_tokens_total") for server in running.servers]
            kill_all(running)
    first, again = answers
    assert_right(wanted, first)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
    assert {answer["meta_info"]["path"] for answer in again} == {"remote"}
    assert all(fetched)
    sent = [sum(answer["meta_info"]["kv_bytes"] for answer in each) for each in answers]
    assert sent[1] <= sent[0] // 4


def kill_all(running: Cluster) -> None:
    for server in running.servers:
        os.kill(server.member.process.pid, signal.SIGKILL)
