"""Prefill and decode say what one engine alone says, under each policy and whatever is thrown away.

The test hooks are changed at run time: a share of the requests gives its computed prompt back once, a share of
the transfers fails. Whoever gets an answer gets the answer of one engine; whoever does not gets a code.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, bootstrap_port, cluster, eventually

import tandem
from tandem.core.disagg.optimistic_prefill import should_force_retry
from tandem.server.api.errors import RULES

HELD_OUT = Path(tandem.__file__).parent / "bundled" / "mini" / "heldout.jsonl"
RETRIES, CHUNK = 2, 64
AHEAD = 2  # batches that are launched before one returns
POLICY_FLAGS = {
    "off": ("--optimistic-prefill-policy", "off"),
    "retry": ("--optimistic-prefill-retries", str(RETRIES)),
    "park": ("--optimistic-prefill-policy", "park"),
}
FLAGS = ("--deterministic", "--enable-fault-injection", "--chunked-prefill-size", str(CHUNK))
SCORES = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 9]}
CODES = {code.value for code in RULES}
NUM_PROMPTS = 24
NUM_SAMPLES, PAGE_SIZE = 6, 16
NUM_PROBLEMS = 20  # tests/e2e_cpu/test_bundled_model.py asks more, of a pair that nothing happens to
RIDS = (f"pd-{number}" for number in count())

Answers = list[dict[str, Any] | HttpError]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    return [f"{before['question']} {row['question']}" for before, row in pairwise(rows[: NUM_PROMPTS + 1])]


@pytest.fixture(scope="module")
def unified(common: Cluster) -> Server:
    """Its chunks are longer than those of the pairs, which changes no bit."""
    assert common.unified is not None
    return common.unified


@pytest.fixture(scope="module")
def alone(unified: Server, prompts: list[str]) -> Answers:
    return ask_all(unified, prompts, [next(RIDS) for _ in prompts])


@pytest.fixture(scope="module")
def accuracy_alone(unified: Server) -> float:
    return accuracy(unified)


@pytest.fixture(scope="module", params=["park", *(pytest.param(it, marks=pytest.mark.slow) for it in ("off", "retry"))])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=POLICY_FLAGS[request.param]) as it:
        yield request.param, it


def ask_all(server: Server, prompts: Sequence[str], rids: Sequence[str]) -> Answers:
    def ask(prompt: str, rid: str) -> dict[str, Any] | HttpError:
        try:
            return server.generate(prompt, max_new_tokens=12, rid=rid, **SCORES)
        except HttpError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts, rids))


def ask_pair(it: Cluster, prompts: Sequence[str], rids: Sequence[str]) -> Answers:
    """With nothing cached: what is found in a cache would be neither computed nor sent."""
    assert it.router is not None
    for server in it.servers:
        server.open("POST", "/flush_cache").close()
    answers = ask_all(it.router, prompts, rids)
    for server in it.servers:
        eventually(server.is_idle, what=server.state)
    return answers


def set_hooks(it: Cluster, *, forced: float = 0.0, failing: float = 0.0) -> None:
    it.prefills[0].call(
        "PUT", "/debug/faults", {"force_optimistic_prefill_retry_prob": forced, "disagg_failure_prob": failing}
    )
    it.decodes[0].call("PUT", "/debug/faults", {"disagg_failure_prob": failing})


def gauge(server: Server, name: str, labels: str = "") -> float:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"sglang:{name}{{") and labels in line]
    return float(line.rpartition(" ")[2])


def num_retries(it: Cluster, reason: str = "forced") -> float:
    return gauge(it.prefills[0], "num_prefill_retries_total", f'reason="{reason}"')


def assert_same(answers: Answers, alone: Answers) -> None:
    """Of those that got an answer."""
    for ours, theirs in zip(answers, alone, strict=True):
        assert isinstance(theirs, dict)
        if isinstance(ours, HttpError):
            assert ours.error["code"] in CODES
            continue
        assert ours["output_ids"] == theirs["output_ids"]
        for scores in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert ours["meta_info"][scores] == theirs["meta_info"][scores]


def failures(answers: Answers) -> list[str]:
    return [str(answer) for answer in answers if isinstance(answer, HttpError)]


def paths(answers: Answers) -> set[str]:
    return {answer["meta_info"]["path"] for answer in answers if isinstance(answer, dict)}


def test_halves_without_a_decode_are_in_the_bootstrap_queue_whatever_is_computed(pair: tuple[str, Cluster]) -> None:
    """They come to rest where their policy leaves them: not begun, computed and given back, or computed and parked."""
    policy, it = pair
    prefill = it.prefills[0]
    rest = {"off": "bootstrapping", "retry": "bootstrapping", "park": "parked"}[policy]
    prompt = list(range(30, 130))
    before = num_retries(it, "not_ready")
    halves = [prefill.open_stream([20 + number, *prompt], bootstrap_room=number + 1) for number in range(6)]
    try:
        eventually(lambda: len(prefill.state()["queues"].get(rest, ())) == 6, what=prefill.state)
        queues = ("num_prefill_bootstrap_queue_reqs", "num_queue_reqs", "num_prefill_inflight_queue_reqs")
        assert [gauge(prefill, name) for name in queues] == [6, 0, 0]
        assert num_retries(it, "not_ready") - before == {"retry": 6 * RETRIES}.get(policy, 0)
        assert prefill.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == 6
    finally:
        for half in halves:
            half.close()
    eventually(prefill.is_idle, what=prefill.state)
    assert gauge(prefill, "num_prefill_bootstrap_queue_reqs") == 0


def test_as_much_of_a_prompt_is_computed_before_a_decode_is_there_as_the_policy_says(pair: tuple[str, Cluster]) -> None:
    """An attempt of a retry ends when its first chunk has returned; the next one goes on behind what was launched.
    What is left is what a decode that comes late waits for: with park nothing."""
    policy, it = pair
    prefill = it.prefills[0]
    rest = {"off": "bootstrapping", "retry": "bootstrapping", "park": "parked"}[policy]
    prompt = [300 - number % 250 for number in range(10 * CHUNK)]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 101}
    before = len(prefill.log)

    def chunks() -> float:
        prefill.state()  # what its node has told by then, it has logged
        found = re.findall(r"Prefill batch.*#new-token: (\d+)", prefill.log[before:])
        return sum(map(int, found)) / CHUNK

    half = prefill.open_stream(prompt, **room)
    try:
        eventually(lambda: len(prefill.state()["queues"].get(rest, ())) == 1, what=prefill.state)
        assert chunks() in {"off": {0}, "retry": set(range(RETRIES, RETRIES * (1 + AHEAD) + 1)), "park": {10}}[policy]
        assert it.decodes[0].generate(prompt, **room)["meta_info"]["path"] == "remote"
        assert chunks() == 10, "nothing is computed twice"
    finally:
        half.close()
    eventually(prefill.is_idle, what=prefill.state)


def test_samples_of_a_prompt_come_from_one_prefill(pair: tuple[str, Cluster], unified: Server) -> None:
    """Each but the first computes what is behind the last full page. Where a prefill that decode is not ready for
    gives its pages back at a chunk's end, the next one goes on from there."""
    policy, it = pair
    assert it.router is not None
    prompt, sampling = list(range(30, 180)), {"n": NUM_SAMPLES, "temperature": 2.0, "sampling_seed": 7}
    said: list[list[list[int]]] = []
    for server, flushed in ((it.router, it.servers), (unified, [unified])):
        for one in flushed:
            one.open("POST", "/flush_cache").close()
        answers: Any = server.generate(prompt, max_new_tokens=12, sampling_params=sampling)
        first, *others = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
        most = len(prompt) // PAGE_SIZE * PAGE_SIZE
        ends = {most} if server is unified or policy != "retry" else {*range(CHUNK, most, CHUNK), most}
        assert first == 0
        assert len(others) == NUM_SAMPLES - 1
        assert set(others) <= ends
        said.append([answer["output_ids"] for answer in answers])
    assert said[0] == said[1]
    assert len({tuple(ids) for ids in said[0]}) > 1


@pytest.mark.parametrize("forced", [0.0, 0.1, 1.0])
def test_forced_retries_change_no_token_and_are_counted(
    pair: tuple[str, Cluster], prompts: list[str], alone: Answers, forced: float
) -> None:
    policy, it = pair
    set_hooks(it, forced=forced)
    rids = [next(RIDS) for _ in prompts]
    chosen = sum(should_force_retry(rid, prob=forced, prefill_retry_count=0) for rid in rids)
    before = num_retries(it)
    answers = ask_pair(it, prompts, rids)
    assert failures(answers) == []
    assert_same(answers, alone)
    assert paths(answers) == {"remote"}
    assert num_retries(it) - before == (0 if policy == "off" else chosen)


@pytest.mark.parametrize("failing", [0.3, 1.0])
def test_transfers_that_fail_change_no_token(
    pair: tuple[str, Cluster], prompts: list[str], alone: Answers, failing: float
) -> None:
    _, it = pair
    set_hooks(it, failing=failing)
    answers = ask_pair(it, prompts, [next(RIDS) for _ in prompts])
    assert failures(answers) == [], "what fails is computed on decode"
    assert_same(answers, alone)
    assert paths(answers) <= {"remote", "fallback"}
    assert failing < 1 or paths(answers) == {"fallback"}
    set_hooks(it)
    assert paths(ask_pair(it, prompts[:4], [next(RIDS) for _ in range(4)])) == {"remote"}


def test_accuracy_is_that_of_one_engine_whatever_is_retried_or_fails(
    pair: tuple[str, Cluster], accuracy_alone: float
) -> None:
    _, it = pair
    assert it.router is not None
    set_hooks(it, forced=0.5, failing=0.3)
    assert accuracy(it.router) == accuracy_alone >= 0.9


def accuracy(server: Server) -> float:
    command = [sys.executable, "-m", "tandem.cli.main", "eval", "--url", server.url, "--num", str(NUM_PROBLEMS)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: float = json.loads(done.stdout)["accuracy"]
    return found
