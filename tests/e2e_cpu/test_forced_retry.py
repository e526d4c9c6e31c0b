"""Optimistic prefill whose attempts are thrown away on purpose: the test hook of sglang#26780, in real processes.

The environment variable makes every second request id give its pages back once, as if READY had not come in time.
"""

from collections.abc import Iterator
from itertools import count

import pytest
from cluster import Cluster, Server, cluster, eventually

from tandem.core.disagg.optimistic_prefill import should_force_retry

PROMPTS = {"one chunk": [30 + index % 400 for index in range(100)], "many": [9 + index % 470 for index in range(1100)]}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}


@pytest.fixture(scope="module")
def it() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "0.5")
        with cluster(prefills=1, decodes=1, flags=["--deterministic"]) as it:
            yield it


def rid(name: str, *, forced: bool) -> str:
    rids = (f"{name}-{number}" for number in count())
    return next(rid for rid in rids if should_force_retry(rid, prob=0.5, prefill_retry_count=0) is forced)


def forced_retries(it: Cluster) -> float:
    return it.prefills[0].metric("sglang:num_prefill_retries_total{", 'reason="forced"')


@pytest.mark.parametrize("name", list(PROMPTS))
def test_a_forced_request_is_retried_once_with_the_tokens_and_logprobs_of_one_engine(
    router: Server, it: Cluster, name: str
) -> None:
    before = forced_retries(it)
    ours = router.generate(PROMPTS[name], max_new_tokens=8, rid=rid(name, forced=True), **LOGPROBS)
    assert (ours["meta_info"]["path"], forced_retries(it) - before) == ("remote", 1)
    it.decodes[0].open("POST", "/flush_cache").close()
    alone = it.decodes[0].generate(PROMPTS[name], max_new_tokens=8, **LOGPROBS)
    assert (alone["meta_info"]["path"], alone["meta_info"]["cached_tokens"]) == ("local", 0)
    assert ours["output_ids"] == alone["output_ids"]
    scored = [token for score, token, _ in ours["meta_info"]["output_token_logprobs"] if score is not None]
    assert scored == ours["output_ids"]
    for scores in ("output_token_logprobs", "output_top_logprobs"):
        assert ours["meta_info"][scores] == alone["meta_info"][scores]
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def test_a_request_that_was_not_chosen_is_not_retried(router: Server, it: Cluster) -> None:
    before = forced_retries(it)
    assert (
        router.generate([77] * 300, max_new_tokens=2, rid=rid("lucky", forced=False))["meta_info"]["path"] == "remote"
    )
    assert forced_retries(it) == before


def test_what_a_retry_finds_of_itself_is_no_cache_hit(router: Server, it: Cluster) -> None:
    it.prefills[0].open("POST", "/flush_cache").close()
    before = forced_retries(it)
    router.generate([78] * 1200, max_new_tokens=2, rid=rid("fresh", forced=True))
    assert forced_retries(it) == before + 1
    assert it.prefills[0].metric("sglang:cache_hit_rate{") == 0.0
    router.generate([78] * 1200, max_new_tokens=2, rid=rid("again", forced=True))
    assert it.prefills[0].metric("sglang:cache_hit_rate{") > 0.0, "what another request left is one"
