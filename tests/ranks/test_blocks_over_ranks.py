"""Block diffusion over several workers: they go through the same passes, alone and in pairs that are cut in any way.

The model is a small random SDAR with the tokenizer of the bundled one; the reference computes whole sequences anew for
every pass. Most of it is in `make ranks` only.
"""

import os
import signal
from pathlib import Path

import pytest
from cluster import Server, cluster, eventually
from served_models import SIZES, served
from test_blocks_served import BLOCK, FEW_PAGES, FLAGS, MASK, OUTPUT, ask_together, prompts_with_answers
from test_rank_failures import error_line, workers_of
from test_rank_identity import slow
from tiny_models import make_sdar
from transformers import PreTrainedModel

ONE, TP2, PP2, BOTH = (), ("--tp", "2"), ("--pp", "2"), ("--tp", "2", "--pp", "2")
TP4, DIVIDED = ("--tp", "4"), ("--pp", "2", "--pp-min-micro-batch-size", "1")  # two who decode are in two micro-batches
RETRY, PARK = (("--optimistic-prefill-policy", policy) for policy in ("retry", "park"))
UNIFIED = [TP2, *slow(DIVIDED, BOTH, TP4, (*PP2, "--disable-overlap-schedule"), (*PP2, "--no-enable-mixed-chunk"))]
PAIRS = [
    (PP2, TP2),
    *slow((BOTH, TP2), (TP2, BOTH), (ONE, DIVIDED), (TP4, ONE), (TP2, TP2), (PP2, DIVIDED)),
    *slow(*(((*cut, *policy), ONE) for cut in (TP2, PP2, BOTH) for policy in (RETRY, PARK))),
]
ENDLESS = {"max_new_tokens": 1500, "sampling_params": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("sdar")
    blocks = {"block_size": BLOCK, "mask_token_id": MASK}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}  # of four shards two have the same KV head
    return where, served(where, make_sdar(where, blocks=blocks, num_hidden_layers=4, **heads, **SIZES))


def assert_all_say(server: Server, asked: list[tuple[list[int], list[int]]], *, path: str) -> None:
    answers = ask_together(server, [prompt for prompt, _ in asked])
    assert [one["output_ids"] for one in answers] == [answer for _, answer in asked]
    assert {one["meta_info"]["path"] for one in answers} == {path}


def name_of(flags: tuple[str, ...]) -> str:
    return "-".join(flags).replace("--", "") or "one"


@pytest.mark.parametrize("flags", UNIFIED, ids=name_of)
def test_a_server_says_what_whole_sequences_say(sdar: tuple[Path, PreTrainedModel], flags: tuple[str, ...]) -> None:
    """Also when some are pushed back, as there are few pages."""
    where, model = sdar
    asked = prompts_with_answers(model, 9)
    with cluster(unified=True, model=str(where), flags=[*FLAGS, *FEW_PAGES, *flags]) as it:
        assert it.unified is not None
        assert_all_say(it.unified, asked, path="unified")
        eventually(it.unified.is_idle, what=it.unified.states)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "--".join(map(name_of, pair)))
def test_a_pair_says_what_whole_sequences_say(
    sdar: tuple[Path, PreTrainedModel], pair: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    where, model = sdar
    asked = prompts_with_answers(model, 9)
    flags = {"prefill_flags": pair[0], "decode_flags": pair[1]}
    with cluster(prefills=1, decodes=1, model=str(where), flags=FLAGS, **flags) as it:
        assert it.router is not None
        for _ in range(2):  # the second time prompts are found in the prefill's cache
            assert_all_say(it.router, asked, path="remote")
        for server in it.servers:
            eventually(server.is_idle, what=server.states)


@pytest.mark.parametrize("cut", [PP2, *slow(TP2)], ids=name_of)
def test_a_replica_whose_worker_is_killed_ends_with_the_cause_and_comes_back(
    sdar: tuple[Path, PreTrainedModel], cut: tuple[str, ...]
) -> None:
    """In the middle of the passes of a block: the other worker waits for what one of them has found."""
    where, model = sdar
    ((prompt, answer),) = prompts_with_answers(model, 1)
    with cluster(unified=True, model=str(where), flags=[*FLAGS, "--dp", "2", *cut]) as it:
        server = it.unified
        assert server is not None
        stream = server.stream(prompt, routed_dp_rank=0, **ENDLESS)
        assert stream.next() is not None
        os.kill(workers_of(server)[1], signal.SIGKILL)
        error = stream.rest()[-1]["error"]
        name = "TP0 PP1" if cut is PP2 else "TP1 PP0"
        assert error["code"] == "worker_lost"
        assert f"the worker {name} process was killed by signal SIGKILL" in error["message"]
        eventually(lambda: "DP rank 0 serves again" in server.log, within_s=90, what=lambda: server.log[-2000:])
        params = {"max_new_tokens": OUTPUT, "sampling_params": {"ignore_eos": True}}
        for rank in (0, 1):
            assert server.generate(prompt, routed_dp_rank=rank, **params)["output_ids"] == answer


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_worker_that_hangs_in_a_pass_is_named_by_the_watchdog(sdar: tuple[Path, PreTrainedModel], shard: int) -> None:
    where, model = sdar
    ((prompt, _),) = prompts_with_answers(model, 1)
    with cluster(unified=True, model=str(where), flags=[*FLAGS, *PP2, "--watchdog-timeout", "3"]) as it:
        server = it.unified
        assert server is not None
        stream = server.stream(prompt, **ENDLESS)
        assert stream.next() is not None
        os.kill(workers_of(server)[shard], signal.SIGSTOP)
        eventually(lambda: server.member.process.poll() == 1, within_s=60, what=lambda: server.log[-2000:])
        assert f"the worker TP0 PP{shard} process hangs: no answer for 3 s" in error_line(server)
