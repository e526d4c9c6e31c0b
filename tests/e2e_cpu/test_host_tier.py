"""A KV pool of a fifth of the working set above host memory that has room for all of it: the same tokens, from host.

Every prompt comes twice, with all others in between, so that its pages have left the pool by then.
"""

from collections.abc import Iterator

import pytest
from cluster import Cluster, Server, cluster, eventually
from reference import NEAR_TIE, PAGE, parting, real_prompts

PROMPTS, LENGTH, OUTPUT = 20, 10 * PAGE + 3, 20
POOL = PROMPTS * (LENGTH + OUTPUT) // 5
FLAGS = [
    *("--max-total-tokens", str(POOL), "--chunked-prefill-size", str(4 * PAGE), "--max-running-requests", "4"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "8"),
]


def prompts(salt: int) -> list[list[int]]:
    """None has the beginning of another one."""
    text = [token for prompt in real_prompts(200)[10:] for token in prompt]
    return [[3 + salt, 20 + i, *text[i * LENGTH : (i + 1) * LENGTH - 2]] for i in range(PROMPTS)]


def ask(server: Server, prompts: list[list[int]]) -> list[dict]:
    """One by one."""
    found = []
    for prompt in prompts:
        found.append(server.generate(prompt, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True}))
    return found


def assert_right(prompts: list[list[int]], answers: list[dict]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        found = parting(tuple(prompt), tuple(answer["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"{found}"


def from_host(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["cached_tokens_details"]["host"] for answer in answers)


@pytest.mark.parametrize(
    "policy",
    [
        "write_through",
        pytest.param("write_through_selective", marks=pytest.mark.slow),
        pytest.param("write_back", marks=pytest.mark.slow),
    ],
)
def test_pages_that_left_the_pool_come_back_from_host_memory(policy: str) -> None:
    with cluster(unified=True, flags=[*FLAGS, "--hicache-write-policy", policy]) as running:
        server = running.unified
        assert server is not None
        wanted = prompts(0)
        first = ask(server, wanted)
        if policy == "write_through_selective":
            for prompt in wanted:  # a second use while it is in the pool: now it is worth a copy
                ask(server, [prompt, prompt])
        again = ask(server, wanted)
        assert from_host(first) == 0
        assert from_host(again) >= PROMPTS * LENGTH // 2
        assert_right(wanted, first)
        assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
        assert server.metric('sglang:cached_tokens_total{cache_source="host"') == from_host(again)
        assert server.metric("sglang:hicache_host_used_tokens") > 0
        eventually(server.is_idle)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, flags=FLAGS) as running:
        yield running


def test_both_halves_serve_from_host_memory_and_only_the_rest_travels(pair: Cluster) -> None:
    assert pair.router is not None
    wanted = prompts(1)
    first, again = ask(pair.router, wanted), ask(pair.router, wanted)
    assert_right(wanted, first)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in first]
    assert {answer["meta_info"]["path"] for answer in (*first, *again)} == {"remote"}
    sent = [sum(answer["meta_info"]["kv_bytes"] for answer in answers) for answers in (first, again)]
    assert sent[1] <= sent[0] // 2
    for server in pair.servers:
        assert server.metric("tandem:hicache_loaded_tokens_total") > 0
        eventually(server.is_idle)


def test_a_flush_empties_host_memory_too(pair: Cluster) -> None:
    (prefill,) = pair.prefills
    eventually(lambda: not prefill.state()["copies"])
    with prefill.open("POST", "/flush_cache") as reply:
        assert reply.status == 200
    state = prefill.state()
    assert state["pages"]["cached"] == 0
    assert state["host_pages"]["cached"] == 0
