"""The promise, on real text: transformers, one unified engine, and prefill + decode processes say the same tokens.

200 prompts with lengths 1, page - 1, page, page + 1, several chunks and whatever the text gives; 64 greedy tokens each,
end-of-sequence ignored, under concurrency that varies the batches. What "same" means: `reference.py`.
"""

from collections.abc import Iterator

import pytest
from cluster import Cluster, cluster
from reference import CHUNK, PAGE, ask_all, assert_same_tokens, greedy, load_model, real_prompts


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return real_prompts(200)


@pytest.fixture(scope="module")
def reference(model, prompts) -> list[list[int]]:
    return greedy(model, prompts)


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    flags = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384"]
    with cluster(prefills=1, decodes=1, unified=True, flags=flags) as running:
        yield running


def test_one_unified_engine_says_what_transformers_says(model, prompts, reference, servers: Cluster) -> None:
    answers = ask_all(servers.unified, prompts)
    assert_same_tokens(model, prompts, reference, answers, path="unified")


def test_prefill_and_decode_say_what_transformers_says(model, prompts, reference, servers: Cluster) -> None:
    answers = ask_all(servers.router, prompts)
    assert_same_tokens(model, prompts, reference, answers, path="remote")


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
