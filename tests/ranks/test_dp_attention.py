"""DP attention: ranks that attend each to its own requests, and compute the experts together. Real processes.

The models are small random Qwen3-MoE and Mixtral with the tokenizer of the bundled one; the reference is transformers.
Some of it is in `make ranks` only.
"""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cluster import Server, Stream, children_of, cluster, eventually, is_running
from reference import NEAR_TIE, parting_of, real_prompts
from reference import model as reference_model
from served_models import SIZES, served
from tiny_models import make_mixtral, make_qwen3_moe
from transformers import PreTrainedModel

POOL = ("--max-total-tokens", "16384", "--chunked-prefill-size", "128")
TOGETHER = ("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention")
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
OUTPUT = 24


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Seven experts, whose 22 features two workers share; the first layer is dense."""
    where = tmp_path_factory.mktemp("moe")
    sizes = {**SIZES, "num_hidden_layers": 3, "mlp_only_layers": [0]}
    return where, served(where, make_qwen3_moe(where, **sizes))


@pytest.fixture(scope="module")
def alone(experts: tuple[Path, PreTrainedModel]) -> Iterator[Server]:
    """Two ranks of one unified server."""
    with cluster(unified=True, model=str(experts[0]), flags=[*POOL, *TOGETHER]) as it:
        assert it.unified is not None
        yield it.unified


def ask_ranks(server: Server, prompts: list[list[int]]) -> list[dict]:
    """Twelve at a time, so that one rank has prompts while the other one decodes, or nothing."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(partial(ask, server), prompts))


def ask(server: Server, prompt: list[int], **fields: object) -> dict:
    return server.generate(prompt, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True}, **fields)


def assert_same(model: PreTrainedModel, prompts: list[list[int]], answers: list[dict], *, path: str) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["path"] == path
        assert len(answer["output_ids"]) == OUTPUT
        found = parting_of(model, tuple(prompt), tuple(answer["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: {found}"


def test_two_ranks_say_what_transformers_says(alone: Server, experts: tuple[Path, PreTrainedModel]) -> None:
    prompts = real_prompts(20)
    answers = ask_ranks(alone, prompts)
    assert_same(experts[1], prompts, answers, path="unified")
    assert Counter(answer["meta_info"]["dp_rank"] for answer in answers) == {0: 10, 1: 10}
    eventually(alone.is_idle, what=alone.states)


def test_a_rank_that_has_nothing_goes_along(alone: Server, experts: tuple[Path, PreTrainedModel]) -> None:
    prompts = real_prompts(12)
    answers = [ask(alone, prompt, routed_dp_rank=1) for prompt in prompts]
    assert_same(experts[1], prompts, answers, path="unified")
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {1}


def test_dense_mlps_are_shared_alike() -> None:
    prompts = real_prompts(12)
    with cluster(unified=True, flags=[*POOL, *TOGETHER, "--disable-overlap-schedule"]) as it:
        assert it.unified is not None
        assert_same(reference_model(), prompts, ask_ranks(it.unified, prompts), path="unified")


@pytest.mark.parametrize(
    "decode", [TOGETHER, pytest.param(("--tp", "2"), marks=pytest.mark.slow)], ids=lambda flags: flags[-1].strip("-")
)
def test_prefill_and_decode_may_step_together_each(tmp_path: Path, decode: tuple[str, ...]) -> None:
    """The rooms tell the rank of a prefill; what decode pulls is cut by its own shards, not by those of the experts."""
    model, prompts = served(tmp_path, make_mixtral(tmp_path, **SIZES)), real_prompts(16)
    with cluster(
        prefills=1, decodes=1, model=str(tmp_path), flags=POOL, prefill_flags=TOGETHER, decode_flags=decode
    ) as it:
        assert it.router is not None
        assert_same(model, prompts, ask_ranks(it.router, prompts), path="remote")
        for rank in (0, 1):
            assert f"node DP{rank}] Prefill batch" in it.prefills[0].log
        for server in it.servers:
            eventually(server.is_idle, what=server.states)


def test_prompts_of_one_rank_wait_for_what_the_other_one_sees(experts: tuple[Path, PreTrainedModel]) -> None:
    """`mixed`: some ranks have prompts and some have none, which a rank that agrees with itself alone never finds."""
    flags = (
        "--enable-prefill-delayer",
        "--prefill-delayer-queue-min-ratio",
        "0.5",
        "--prefill-delayer-max-delay-passes",
        "6",
    )
    with cluster(unified=True, model=str(experts[0]), flags=[*POOL, *TOGETHER, *flags]) as it:
        server, prompts = it.unified, real_prompts(20)
        assert server is not None
        assert_same(experts[1], prompts, ask_ranks(server, prompts), path="unified")
        streams = [stream_on(server, rank) for rank in (0, 1)]
        for rank in (0, 1):
            server.generate(prompts[5], max_new_tokens=4, routed_dp_rank=rank)
            seen = server.states()[rank]["delayer"]
            assert [load["num_running"] for load in seen] == [1, 1], "what the last pass saw of both ranks"
            assert (seen[rank]["num_waiting"], seen[1 - rank]["num_waiting"]) == (1, 0)
        for stream in streams:
            stream.close()
        outcomes = delayer_outcomes(server)
        for rank in (0, 1):
            assert outcomes[rank, "mixed", "delay"] > 0
            assert sum(number for (at, _, reason), number in outcomes.items() if at == rank and reason != "delay") > 0
        eventually(server.is_idle, what=server.states)


def delayer_outcomes(server: Server) -> Counter[tuple[int, str, str]]:
    """By rank, who had prompts, and why prompts began or did not."""
    return counted(server, "sglang:prefill_delayer_outcomes_total", "input_estimation", "output_reason")


def test_tokens_are_counted_by_how_many_ranks_had_prompts_in_the_same_step(alone: Server) -> None:
    """What SGLang calls `dp_cooperation_info`."""
    text, server = real_prompts(10)[-1], alone
    prompts = ([first, *text] for first in range(3, 500))  # nothing of one is cached for another
    prompt, began = next(prompts), cooperation(server)
    ask(server, prompt, routed_dp_rank=0)
    assert cooperation(server) - began == {
        (0, "prefill_compute", "1"): len(prompt),
        (0, "decode", "0"): OUTPUT - 1,  # the first one comes with the prompt
    }
    cached = ask(server, prompt, routed_dp_rank=0)["meta_info"]["cached_tokens"]
    assert (cooperation(server) - began)[0, "prefill_cache", "1"] == cached > 0

    def decodes_beside_a_prompt() -> bool:
        ask(server, next(prompts), routed_dp_rank=0)
        return cooperation(server)[1, "decode", "1"] > began[1, "decode", "1"]

    stream = stream_on(server, 1)
    eventually(decodes_beside_a_prompt)
    stream.close()

    def have_prompts_together() -> bool:
        ask_ranks(server, [next(prompts) for _ in range(4)])
        found = cooperation(server) - began
        return all(found[rank, "prefill_compute", "2"] > 0 for rank in (0, 1))

    eventually(have_prompts_together)
    timed = counted(server, "sglang:dp_cooperation_forward_execution_seconds_total", "category", "num_prefill_ranks")
    assert {(0, "extend", "1"), (0, "decode", "0"), (1, "decode", "1")} <= timed.keys()


def cooperation(server: Server) -> Counter[tuple[int, str, str]]:
    """Tokens by rank, mode, and how many ranks had prompts."""
    return counted(server, "sglang:dp_cooperation_realtime_tokens_total", "mode", "num_prefill_ranks")


def counted(server: Server, name: str, *by: str) -> Counter[tuple[int, str, str]]:
    """The samples of a metric, in whole numbers, by DP rank and two other labels."""
    found: Counter[tuple[int, str, str]] = Counter()
    with server.open("GET", "/metrics") as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(name + "{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found[int(labels["dp_rank"]), labels[by[0]], labels[by[1]]] += int(float(line.rsplit(" ", 1)[1]))
    return found


@pytest.mark.parametrize("what", ["worker_process", pytest.param("node.process", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_takes_all_of_them_with_it(what: str) -> None:
    with cluster(unified=True, flags=[*POOL, *TOGETHER]) as it:
        server = it.unified
        assert server is not None
        children = children_of(server.member.process.pid)
        streams = [stream_on(server, rank) for rank in (0, 1)]
        os.kill(process_of(server, what, 1), signal.SIGKILL)
        name = "worker" if what == "worker_process" else "node"
        reason = f"DP rank 1: the {name} process was killed by signal SIGKILL"
        for stream in streams:
            error = stream.rest()[-1]["error"]
            assert error["code"] == "worker_lost"
            assert reason in error["message"]
        eventually(lambda: server.member.process.poll() == 1)
        assert reason in error_line(server)
        assert not any(is_running(child) for child in children)


@pytest.mark.parametrize("what", ["worker_process", "node.process"])
def test_of_ranks_that_hang_the_one_is_named_that_keeps_the_other(what: str) -> None:
    with cluster(unified=True, flags=[*POOL, *TOGETHER, "--watchdog-timeout", "3"]) as it:
        server = it.unified
        assert server is not None
        stream_on(server, 0)
        os.kill(process_of(server, what, 1), signal.SIGSTOP)
        eventually(lambda: server.member.process.poll() == 1, within_s=60)
        name = "worker" if what == "worker_process" else "node"
        assert f"DP rank 1: the {name} process hangs: no answer for " in error_line(server)


def stream_on(server: Server, rank: int) -> Stream:
    stream = server.stream(PROMPT, max_new_tokens=1000, routed_dp_rank=rank, sampling_params={"ignore_eos": True})
    assert stream.next() is not None
    return stream


def process_of(server: Server, what: str, dp_rank: int) -> int:
    """Ranks are started in order."""
    found = [pid for pid in children_of(server.member.process.pid) if what in Path(f"/proc/{pid}/cmdline").read_text()]
    return found[dp_rank]


def error_line(server: Server) -> str:
    (line,) = [line for line in server.log.splitlines() if line.startswith("tandem: error: ")]
    return line
