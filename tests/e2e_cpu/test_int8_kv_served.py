"""Keys and values in 8 bits through engines and servers: chunks, shards, prefixes, host memory, and on their way."""

from pathlib import Path

import pytest
import torch
from cluster import HttpError, Server, bootstrap_port, cluster, halves
from engine_world import EngineWorld, prompt_of
from reference import PAGE, real_prompts
from shard_group import ThreadGroup, on_every_shard
from tiny_models import make_llama
from torch import Tensor

from tandem.engine.weights import load

PLAIN_PAGE = 4 * 4 * 2 * PAGE * 32 * 4  # heads x layers x (K, V) x tokens x head_dim x float32
INT8_PAGE = 4 * 4 * 2 * PAGE * (32 + 4)
INT8 = ("--kv-cache-dtype", "int8")
HOST = (
    *("--max-total-tokens", "1024", "--max-running-requests", "4"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "8"),
)


def answer(where: Path, *, chunk: int = 1 << 30, **settings: object) -> Tensor:
    """Logits after a prompt and after a token more, [2, vocab]."""
    world = EngineWorld(where, **settings)
    request = world.add(prompt_of(75))
    world.prefill(request, chunk=chunk)
    rows = [world.logits[request]]
    world.run(decodes=True, join=[request])
    return torch.stack([*rows, world.logits[request]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunked_prompt_sees_the_same_and_it_is_near_what_is_kept_whole(dtype: str, tmp_path: Path) -> None:
    make_llama(tmp_path)
    whole = answer(tmp_path, kv_is_int8=True, dtype=dtype)
    chunked = answer(tmp_path, kv_is_int8=True, dtype=dtype, chunk=32)
    plain = answer(tmp_path, dtype=dtype)

    near = 1e-3 if dtype == "float32" else 0.2
    assert (whole - chunked).abs().max() < near * plain.abs().max()
    assert 1e-4 < (whole - plain)[0].abs().max() < 0.3 * plain.abs().max()


def test_shards_keep_what_the_whole_model_does(tmp_path: Path) -> None:
    make_llama(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    expected = answer(tmp_path, kv_is_int8=True)

    def on_shard(group: ThreadGroup) -> Tensor:
        return answer(tmp_path, kv_is_int8=True, group=group)

    for found in on_every_shard(2, on_shard):
        assert (found - expected).abs().max() < 0.02 * expected.abs().max(), "a code may be one step off"


def test_the_layout_says_so(tmp_path: Path) -> None:
    make_llama(tmp_path)

    assert load(tmp_path, kv_is_int8=True).layout_fields["kv_cache_dtype"] == "int8"
    assert "kv_cache_dtype" not in load(tmp_path).layout_fields


def ask(server: Server, prompts: list[list[int]]) -> list[dict]:
    return [server.generate(prompt, max_new_tokens=16, sampling_params={"ignore_eos": True}) for prompt in prompts]


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.slow
def test_a_pair_says_what_one_server_says_with_prefixes_from_pool_and_host_and_a_quarter_of_the_bytes() -> None:
    text = [token for prompt in real_prompts(60)[10:] for token in prompt]
    prompts = [[3, 20 + i, *text[i * 150 : (i + 1) * 150]] for i in range(12)]
    with cluster(prefills=1, decodes=1, unified=True, flags=[*INT8, *HOST]) as running:
        assert running.router is not None
        assert running.unified is not None
        alone, first, again = ask(running.unified, prompts), ask(running.router, prompts), ask(running.router, prompts)
    assert tokens(first) == tokens(alone)
    assert tokens(again) == tokens(first)
    assert {each["meta_info"]["path"] for each in first} == {"remote"}
    assert {each["meta_info"]["kv_bytes"] for each in first} == {10 * INT8_PAGE}
    assert 3 * INT8_PAGE < PLAIN_PAGE
    assert sum(each["meta_info"]["cached_tokens_details"]["host"] for each in again) > 0


@pytest.mark.slow
def test_two_shards_send_to_one() -> None:
    prompts = real_prompts(30)[20:28]
    with cluster(prefills=1, decodes=1, unified=True, flags=INT8, prefill_flags=("--tp-size", "2")) as running:
        assert running.router is not None
        assert running.unified is not None
        alone, apart = ask(running.unified, prompts), ask(running.router, prompts)
    assert {each["meta_info"]["path"] for each in apart} == {"remote"}
    same = sum(left == right for left, right in zip(tokens(alone), tokens(apart), strict=True))
    assert same >= len(prompts) - 1, "sums of two shards may move one code by a step"


def test_halves_that_keep_kv_differently_are_refused_by_name(tmp_path: Path) -> None:
    with halves(tmp_path, INT8, ()) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 31}
        half = prefill.open_stream([5, 6, 7, 8], timeout=20, **pair)
        with pytest.raises(HttpError) as refused:
            decode.generate([5, 6, 7, 8], timeout=20, **pair)
        half.close()
    assert (refused.value.status, refused.value.error["code"]) == (502, "layout_mismatch")
    assert "kv_cache_dtype is int8 at prefill and not told at decode" in refused.value.error["message"]
