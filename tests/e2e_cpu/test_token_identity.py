"""The promise, on real text: transformers, one unified engine, and prefill + decode processes say the same tokens.

200 prompts with lengths 1, page - 1, page, page + 1, several chunks and whatever the text gives; 64 greedy tokens each,
end-of-sequence ignored, under concurrency that varies the batches. What "same" means: `reference.py`.
"""

from collections.abc import Iterator

import pytest
from cluster import Cluster, cluster
from reference import CHUNK, NEAR_TIE, PAGE, ask_all, ask_each, assert_same_tokens, parting, real_prompts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return real_prompts(200)


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    flags = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384"]
    with cluster(prefills=1, decodes=1, unified=True, flags=flags) as running:
        yield running


def test_an_answer_with_another_token_parts_from_the_reference(prompts: list[list[int]], servers: Cluster) -> None:
    prompt = prompts[20]
    (answer,) = (reply["output_ids"] for reply in ask_all(servers.unified, [prompt]))
    wrong = [*answer[:30], (answer[30] + 1) % 500, *answer[31:]]
    assert parting(tuple(prompt), tuple(answer)) is None
    found = parting(tuple(prompt), tuple(wrong))
    assert found is not None
    assert (found.at, found.want) == (30, answer[30])
    assert found.gap > NEAR_TIE


def test_one_unified_engine_says_what_transformers_says(prompts: list[list[int]], servers: Cluster) -> None:
    assert_same_tokens(prompts, ask_each(servers.unified, prompts), path="unified")


def test_prefill_and_decode_say_what_transformers_says(prompts: list[list[int]], servers: Cluster) -> None:
    assert_same_tokens(prompts, ask_each(servers.router, prompts), path="remote")


def test_kv_bytes_are_the_pages_of_the_prompt_and_decode_computes_none_of_it(prompts, servers: Cluster) -> None:
    page_bytes = 4 * 4 * 2 * PAGE * 32 * 4  # heads x layers x (K, V) x tokens x head_dim x float32
    for salt, prompt in enumerate(prompts[:10]):
        fresh = [3 + salt, *prompt]  # another first token: nothing is cached on either side
        meta = servers.router.generate(fresh, max_new_tokens=2)["meta_info"]
        assert meta["path"] == "remote"
        assert meta["kv_bytes"] == -(-len(fresh) // PAGE) * page_bytes
        assert meta["computed_tokens"] == 0


def test_sampled_tokens_are_the_same_for_a_seed(prompts, servers: Cluster) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "sampling_seed": 11}
    some = prompts[5:25]
    unified = [answer["output_ids"] for answer in ask_all(servers.unified, some, **sampling)]
    apart = [answer["output_ids"] for answer in ask_all(servers.router, some, **sampling)]
    assert len({tuple(tokens) for tokens in unified}) > 1
    assert sum(left != right for left, right in zip(unified, apart, strict=True)) == 0
