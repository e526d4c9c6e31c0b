"""A model of block diffusion through servers: alone and as a pair, in shared batches, cut where an answer ends.

The model is a small random SDAR with the tokenizer of the bundled one; the reference computes whole sequences anew for
every pass (`block_reference.py`).
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from block_reference import Draw, NearTie, block_reference, drawn, greedy
from cluster import Cluster, HttpError, Server, cluster, eventually
from reference import real_prompts
from served_models import SIZES, served
from tiny_models import make_sdar
from transformers import PreTrainedModel

from tandem.cli.main import main

BLOCK, MASK, THRESHOLD = 4, 511, 0.3
OUTPUT = 18
FLAGS = ("--page-size", "8", "--chunked-prefill-size", "64", "--dllm-threshold", str(THRESHOLD))
# A pool in which not all can run to their ends at once, and prompts first, so that they run at once.
FEW_PAGES = ("--max-total-tokens", "448", "--max-running-requests", "6", "--schedule-conservativeness", "0")
PROMPTS_FIRST = ("--no-enable-mixed-chunk", "--max-prefill-stall-ms", "0")


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("sdar")
    blocks = {"block_size": BLOCK, "mask_token_id": MASK}
    return where, served(where, make_sdar(where, blocks=blocks, **SIZES))


@pytest.fixture(scope="module")
def running(sdar: tuple[Path, PreTrainedModel]) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_LOG_FORWARD_ITERS", "1")
        with cluster(prefills=1, decodes=1, unified=True, model=str(sdar[0]), flags=FLAGS) as it:
            yield it


def right(model: PreTrainedModel, prompt: list[int], draw: Draw = greedy) -> list[int]:
    rules = {"block": BLOCK, "mask_id": MASK, "threshold": THRESHOLD, "draw": draw}
    return block_reference(model, prompt, OUTPUT, **rules)[0][:OUTPUT]  # type: ignore[arg-type]  # rules of any type


def prompts_with_answers(
    model: PreTrainedModel, count: int, *, first: int = 0, draw: Draw = greedy
) -> list[tuple[list[int], list[int]]]:
    """Prompts of which no decision is a near-tie; of all lengths beside the borders of blocks."""
    found: list[tuple[list[int], list[int]]] = []
    for number, prompt in enumerate(real_prompts(60)[10 + first :]):
        asked = prompt[: 61 + number % 9]
        try:
            found.append((asked, right(model, asked, draw)))
        except NearTie:
            continue
        if len(found) == count:
            return found
    raise AssertionError("too many prompts have near-ties")


def ask(server: Server, prompt: list[int], **params: object) -> dict:
    return server.generate(prompt, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True, **params})


def ask_together(server: Server, prompts: list[list[int]], **params: object) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, **params), prompts))


def both(running: Cluster) -> tuple[Server, Server]:
    assert running.unified is not None
    assert running.router is not None
    return running.unified, running.router


def test_a_server_and_a_pair_say_what_whole_sequences_say(sdar: tuple[Path, PreTrainedModel], running: Cluster) -> None:
    asked = prompts_with_answers(sdar[1], 9)
    for server in both(running):
        answers = ask_together(server, [prompt for prompt, _ in asked])
        assert [one["output_ids"] for one in answers] == [answer for _, answer in asked]
        assert {one["meta_info"]["finish_reason"]["type"] for one in answers} == {"length"}
        assert {one["meta_info"]["completion_tokens"] for one in answers} == {OUTPUT}
    assert {one["meta_info"]["path"] for one in answers} == {"remote"}
    for server in running.servers:
        eventually(server.is_idle, what=server.states)


def test_the_next_turn_finds_the_blocks_of_the_last_one_in_the_cache(
    sdar: tuple[Path, PreTrainedModel], running: Cluster
) -> None:
    _, model = sdar
    (prompt, answer), *_ = prompts_with_answers(model, 1, first=20)
    turn = [*prompt, *answer, 7, 11]
    expected = right(model, turn)
    for server in both(running):
        ask(server, prompt)
        second = ask(server, turn)
        assert second["output_ids"] == expected
        assert second["meta_info"]["cached_tokens"] >= len(prompt) // 8 * 8


def test_draws_are_the_same_alone_and_through_a_pair(sdar: tuple[Path, PreTrainedModel], running: Cluster) -> None:
    asked = prompts_with_answers(sdar[1], 3, first=30, draw=drawn(11, 0.7))
    for server in both(running):
        answers = ask_together(server, [prompt for prompt, _ in asked], temperature=0.7, sampling_seed=11)
        assert [one["output_ids"] for one in answers] == [answer for _, answer in asked]


def test_an_answer_ends_inside_a_block(sdar: tuple[Path, PreTrainedModel], running: Cluster) -> None:
    """By its length, by a token, and by a text: nothing is said behind it."""
    (prompt, answer), *_ = prompts_with_answers(sdar[1], 1, first=24)
    for server in both(running):
        for count in (1, 2, 3, 6):
            said = server.generate(prompt, max_new_tokens=count, sampling_params={"ignore_eos": True})
            assert said["output_ids"] == answer[:count]
        for stop in (at for at in range(2, 10) if answer[at] not in answer[:at]):
            said = ask(server, prompt, stop_token_ids=[answer[stop]])
            assert said["output_ids"] == answer[: stop + 1]
            assert said["meta_info"]["finish_reason"]["type"] == "stop"
        whole = ask(server, prompt, skip_special_tokens=False)["text"]
        text = whole[4:7]
        said = ask(server, prompt, stop=[text], skip_special_tokens=False)
        assert said["text"] == whole[: whole.index(text)]
        assert said["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}


def test_a_stream_is_the_answer_in_pieces(sdar: tuple[Path, PreTrainedModel], running: Cluster) -> None:
    (prompt, answer), *_ = prompts_with_answers(sdar[1], 1, first=24)
    for server in both(running):
        events = server.stream(prompt, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True}).rest()
        assert events[-1]["output_ids"] == answer
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert len(counts) < OUTPUT, "the tokens of a block come together"


def test_lines_of_batches_carry_the_numbers_of_their_launch(running: Cluster) -> None:
    """As those of any other batch, frozen when it was launched: the second chunk of a prompt is launched before the
    first one returns, the third before the second (sglang#20845).
    """
    for server in (both(running)[0], running.prefills[0]):
        eventually(server.is_idle, what=server.states)
    for server, batches in zip(both(running), (both(running)[0], running.prefills[0]), strict=True):
        before = len(batches.log)
        ask(server, list(range(20, 170)))

        def lines(log: Server = batches, before: int = before) -> list[tuple[str, str]]:
            return re.findall(r"Prefill batch \[(\d+)\], #new-seq: 1, #new-token: (\d+)", log.log[before:])

        eventually(lambda lines=lines: len(lines()) == 3, what=lines)
        assert [tokens for _, tokens in lines()] == ["64", "64", "22"]
        first = int(lines()[0][0])
        assert [int(number) for number, _ in lines()] == [first, first + 1, first + 2]


def test_requests_that_are_pushed_back_say_the_same(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    asked = prompts_with_answers(model, 9)
    with cluster(unified=True, model=str(where), flags=[*FLAGS, *FEW_PAGES, *PROMPTS_FIRST]) as it:
        assert it.unified is not None
        prompts = [prompt for prompt, _ in asked]
        answers = ask_together(it.unified, prompts)
        assert [one["output_ids"] for one in answers] == [answer for _, answer in asked]
        with it.unified.open("GET", "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("sglang:num_retracted")) > 0


REFUSED = {
    "logprobs": {"return_logprob": True},
    "frequency_penalty": {"sampling_params": {"frequency_penalty": 0.5}},
    "presence_penalty": {"sampling_params": {"presence_penalty": 0.5}},
    "repetition_penalty": {"sampling_params": {"repetition_penalty": 1.1}},
    "grammar": {"sampling_params": {"regex": "[a-z]+"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_block_has_no_answer_to_is_refused_by_name(running: Cluster, what: str) -> None:
    for server in (both(running)[0], running.prefills[0]):
        with pytest.raises(HttpError) as caught:
            server.generate([5, 6, 7], **REFUSED[what])
        assert caught.value.status == 400
        assert what in (said := json.dumps(caught.value.error))
        assert "finds the tokens of a block together" in said


@pytest.mark.parametrize(
    "flags",
    [
        *(["--deterministic"], ["--attn-cp-size", "2"], ["--is-embedding"], ["--kv-cache-dtype", "int8"]),
        *(["--enable-dp-attention", "--dp", "2", "--tp", "2"], ["--page-size", "2"], ["--attention-backend", "native"]),
    ],
)
def test_what_blocks_do_not_allow_is_refused_at_start(
    sdar: tuple[Path, PreTrainedModel], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(sdar[0]), *flags]) == 2

    assert f"{flags[0]} " in (said := capsys.readouterr().err)
    assert "block" in said


def test_a_threshold_is_refused_where_no_block_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tandem/mini", "--dllm-threshold", "0.5"]) == 2

    assert "--dllm-threshold is for models of block diffusion" in capsys.readouterr().err
