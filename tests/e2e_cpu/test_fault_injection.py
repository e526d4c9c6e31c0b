"""Transfers that fail and prefills that are thrown away, by a hook that is changed while the servers run.

Tokens stay what they are without faults, or the request ends with its code; switched off, everything is as before.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, HttpError, Server, cluster, eventually

from tandem.core.disagg.optimistic_prefill import should_force_retry
from tandem.core.events import HooksChanged, TransferFailed
from tandem.core.scheduler.node import EngineNode
from tandem.server.api.errors import RULES
from tandem.server.node.flight import FlightSegment, restored, segments_of

FLAGS = ["--enable-fault-injection", "--deterministic"]
NUM_REQUESTS = 8
SCORES = {"return_logprob": True, "top_logprobs_num": 2}
CODES = {code.value for code in RULES}


def prompt(number: int) -> list[int]:
    """No prompt begins as another one: each has pages of its own to transfer, several chunks in the longer half."""
    return [20 + number, *(30 + (index * (number + 3)) % 400 for index in range(600 if number % 2 else 100))]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers of `it` write their flight records."""
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def it(records: Path) -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, flags=[*FLAGS, "--flight-record", str(records)]) as it:
        yield it


@pytest.fixture(scope="module")
def failing() -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, flags=FLAGS, decode_flags=["--kv-load-failure-policy", "fail"]) as it:
        yield it


def change(server: Server, **hooks: float) -> dict[str, Any]:
    found: dict[str, Any] = server.call("PUT", "/debug/faults", hooks)
    assert found | hooks == found == server.get("/debug/faults")
    return found


def set_failures(servers: Sequence[Server], prob: float) -> None:
    for server in servers:
        change(server, disagg_failure_prob=prob)


def answers(it: Cluster, *, first: int = 0, count: int = NUM_REQUESTS) -> list[dict[str, Any]]:
    """All at once; where a request failed, its error."""

    def ask(number: int) -> dict[str, Any]:
        assert it.router is not None
        try:
            return it.router.generate(prompt(number), max_new_tokens=8, rid=f"request-{number}", **SCORES)
        except HttpError as failure:
            return failure.error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(first, first + count)))


def tokens_and_paths(replies: Sequence[dict[str, Any]]) -> tuple[list[list[int]], set[str]]:
    return [reply["output_ids"] for reply in replies], {reply["meta_info"]["path"] for reply in replies}


def flush(it: Cluster) -> None:
    for server in it.servers:
        eventually(server.is_idle, what=server.state)
        server.open("POST", "/flush_cache").close()


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_when_every_transfer_fails_decode_computes_the_same_tokens_itself(it: Cluster, half: str) -> None:
    flush(it)
    expected, paths = tokens_and_paths(answers(it))
    assert paths == {"remote"}
    flush(it)
    servers = it.prefills if half == "prefill" else it.decodes
    set_failures(servers, 1.0)
    assert tokens_and_paths(answers(it)) == (expected, {"fallback"})
    set_failures(servers, 0.0)
    flush(it)
    assert tokens_and_paths(answers(it)) == (expected, {"remote"})


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_prompts_of_one_request_are_computed_by_decode_each_for_itself(it: Cluster, half: str) -> None:
    """Short ones have failed while the others, of several chunks, are on their way: those must not be given up."""
    assert it.router is not None
    flush(it)
    body = {"input_ids": [prompt(number) for number in range(NUM_REQUESTS)], "sampling_params": {"temperature": 0}}
    expected, _ = tokens_and_paths(it.router.call("POST", "/generate", body))
    flush(it)
    servers = it.prefills if half == "prefill" else it.decodes
    set_failures(servers, 1.0)
    for _ in range(3):
        assert tokens_and_paths(it.router.call("POST", "/generate", body)) == (expected, {"fallback"})
        flush(it)
    set_failures(servers, 0.0)


def test_the_share_that_fails_is_what_the_environment_says_until_it_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_DISAGG_FAILURE_PROB", "1")
    with cluster(prefills=1, decodes=1, flags=FLAGS) as it:
        assert [server.get("/debug/faults")["disagg_failure_prob"] for server in it.servers] == [1.0, 1.0]
        expected, paths = tokens_and_paths(answers(it))
        assert paths == {"fallback"}
        flush(it)
        set_failures(it.servers, 0.0)
        assert tokens_and_paths(answers(it)) == (expected, {"remote"})


def test_a_share_of_failures_changes_no_token(it: Cluster) -> None:
    flush(it)
    expected, _ = tokens_and_paths(answers(it, count=16))
    flush(it)
    set_failures(it.servers, 0.3)
    found, paths = tokens_and_paths(answers(it, count=16))
    set_failures(it.servers, 0.0)
    assert found == expected
    assert paths <= {"remote", "fallback"}
    flush(it)


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_when_every_transfer_fails_and_must_not_every_request_ends_with_the_code(failing: Cluster, half: str) -> None:
    servers = failing.prefills if half == "prefill" else failing.decodes
    set_failures(servers, 1.0)
    errors = answers(failing)
    assert {error["code"] for error in errors} == {"transfer_failed"}
    assert all("injected" in error["message"] for error in errors)
    set_failures(servers, 0.0)
    _, paths = tokens_and_paths(answers(failing))
    assert paths == {"remote"}
    flush(failing)


def test_without_recompute_the_survivors_are_right_and_the_rest_has_a_code(it: Cluster, failing: Cluster) -> None:
    flush(it)
    expected = answers(it, count=16)
    set_failures(failing.servers, 0.5)
    found = answers(failing, count=16)
    set_failures(failing.servers, 0.0)
    for ours, theirs in zip(found, expected, strict=True):
        if "code" in ours:
            assert ours["code"] in CODES
            continue
        assert (ours["output_ids"], ours["meta_info"]["path"]) == (theirs["output_ids"], "remote")
        for scores in ("output_token_logprobs", "output_top_logprobs"):
            assert ours["meta_info"][scores] == theirs["meta_info"][scores]
    assert any("code" in reply for reply in found), "no transfer failed"
    flush(failing)


def test_forced_retries_follow_the_probability_at_run_time(it: Cluster) -> None:
    prefill = it.prefills[0]

    def forced() -> float:
        return prefill.metric("sglang:num_prefill_retries_total{", 'reason="forced"')

    for prob in (0.5, 1.0, 0.0):
        flush(it)
        before = forced()
        change(prefill, force_optimistic_prefill_retry_prob=prob)
        _, paths = tokens_and_paths(answers(it))
        chosen = [should_force_retry(f"request-{n}", prob=prob, prefill_retry_count=0) for n in range(NUM_REQUESTS)]
        assert (forced() - before, paths) == (sum(chosen), {"remote"})


def test_the_hooks_of_the_other_half_are_refused(it: Cluster) -> None:
    with pytest.raises(HttpError) as refused:
        change(it.decodes[0], force_optimistic_prefill_retry_prob=1.0)
    assert (refused.value.status, refused.value.error["code"]) == (400, "unsupported")


def test_what_was_injected_is_in_the_flight_records_which_replay(it: Cluster, records: Path) -> None:
    change(it.prefills[0], force_optimistic_prefill_retry_prob=1.0)
    set_failures(it.servers, 1.0)
    answers(it)
    seen = set()
    for segment in map(FlightSegment, segments_of(records)):
        for step in segment.steps(restored(segment, EngineNode)):
            assert step.expected in (None, step.got)
            seen |= {type(event) for event in step.input.happened}
    assert {HooksChanged, TransferFailed} <= seen
