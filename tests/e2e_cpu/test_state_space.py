"""A model with state-space layers through servers: what of a prompt is cached, sent, evicted or stored has its states.

The model is a small random Granite 4 (three of four layers are Mamba 2) with the tokenizer of the bundled one; the
reference is transformers.
"""

import os
import signal
from pathlib import Path

import pytest
from cluster import Server, cluster, eventually
from reference import NEAR_TIE, PAGE, parting_of, real_prompts
from served_models import LENGTH, POOL, SIZES, ask, assert_same, prompts_of, served, storage_flags
from tiny_models import make_granite
from transformers import PreTrainedModel

from tandem.cli.main import main

SMALL = ("--max-total-tokens", "640", "--max-running-requests", "4")


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("granite")
    return where, served(where, make_granite(where, **SIZES))


def further(prompts: list[list[int]], answers: list[dict]) -> list[list[int]]:
    """The next turn of each conversation."""
    return [[*one, *answer["output_ids"], 7, 11, 13] for one, answer in zip(prompts, answers, strict=True)]


def cached(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["cached_tokens"] for answer in answers)


@pytest.mark.parametrize("policy", ["park", pytest.param("retry", marks=pytest.mark.slow)])
def test_a_pair_says_what_transformers_says_and_goes_on_behind_what_is_cached(
    granite: tuple[Path, PreTrainedModel], policy: str
) -> None:
    where, model = granite
    flags = {"prefill_flags": ["--optimistic-prefill-policy", policy]}
    with cluster(prefills=1, decodes=1, model=str(where), flags=POOL, **flags) as running:
        assert running.router is not None
        prompts = real_prompts(20)
        first = ask(running.router, prompts)
        assert_same(model, prompts, first)
        assert {answer["meta_info"]["path"] for answer in first} == {"remote"}
        turns = further(prompts, first)
        second = ask(running.router, turns)
        assert_same(model, turns, second)
        assert cached(second) > sum(len(prompt) for prompt in prompts) / 2
        for server in running.servers:
            eventually(server.is_idle, what=server.states)


@pytest.mark.slow
def test_states_come_back_from_host_memory_and_requests_that_were_pushed_back_go_on(
    granite: tuple[Path, PreTrainedModel],
) -> None:
    """The pool holds forty pages, a fifth of what is asked about."""
    where, model = granite
    flags = [*POOL, *SMALL, "--enable-hierarchical-cache", "--hicache-ratio", "8"]
    eager = {"unified_flags": ["--schedule-conservativeness", "0"]}
    with cluster(prefills=1, decodes=1, unified=True, model=str(where), flags=flags, **eager) as running:
        assert running.router is not None
        assert running.unified is not None
        for salt, server in enumerate((running.router, running.unified)):
            prompts = prompts_of(24, salt=salt)
            first = ask(server, prompts)
            again = ask(server, prompts)
            assert_same(model, prompts, first)
            assert_same(model, prompts, again)
            # One at least: what the first load takes decides on a busy machine whether others are worth it.
            found = sum(one["meta_info"]["cached_tokens_details"]["host"] for one in again)
            assert found >= LENGTH // PAGE * PAGE
        assert_pushed_back(running.unified, model)


def assert_pushed_back(server: Server, model: PreTrainedModel) -> None:
    """Four that are started together outgrow the pool."""
    prompts = [prompt[:40] for prompt in prompts_of(4, salt=9)]
    streams = [server.stream(one, max_new_tokens=200, sampling_params={"ignore_eos": True}) for one in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        last = stream.rest()[-1]
        found = parting_of(model, tuple(prompt), tuple(last["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"{found}"
    assert server.metric("sglang:num_retracted_requests_total{") > 0


@pytest.mark.slow
def test_states_outlive_the_server(granite: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    where, model = granite
    flags = [*POOL, *storage_flags(tmp_path)]
    prompts = prompts_of(3, salt=20)
    for turn in range(2):
        with cluster(unified=True, model=str(where), flags=flags) as running:
            server = running.unified
            assert server is not None
            answers = ask(server, prompts)
            assert_same(model, prompts, answers)
            found = [answer["meta_info"]["cached_tokens_details"]["storage"] for answer in answers]
            assert found == [turn * (LENGTH // PAGE) * PAGE] * 3
            eventually(lambda server=server: not server.state()["copies"] and not server.state()["storage"])
            os.kill(server.member.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("flag", [["--deterministic"], ["--attn-cp-size", "2"]])
def test_what_states_do_not_allow_is_refused_by_name(
    granite: tuple[Path, PreTrainedModel], flag: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(granite[0]), *flag]) == 2

    assert f"{flag[0]} " in (said := capsys.readouterr().err)
    assert "state-space layer" in said
