"""A decode that reserves pages when a prompt is computed holds none for those that its prefill has not come to.

Its pool has room for one of three prompts. How far the prefill is says a worker that stands still.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, Server, cluster, eventually, frozen

EXACT = ("--deterministic",)
POOL = ("--max-total-tokens", "128")
PROMPTS = [[30 + number] * 100 for number in range(3)]
NUM_TOKENS = 8

Asked = list[Future[dict[str, Any]]]


@contextmanager
def pair(policy: str) -> Iterator[Cluster]:
    decode_flags = (*POOL, "--disaggregation-decode-allocation-policy", policy)
    prefill_flags = ("--optimistic-prefill-policy", "off")
    with cluster(prefills=1, decodes=1, flags=EXACT, prefill_flags=prefill_flags, decode_flags=decode_flags) as it:
        yield it


@pytest.fixture(scope="module")
def late() -> Iterator[Cluster]:
    with pair("prefill_complete") as it:
        yield it


@pytest.fixture(scope="module")
def alone(common: Cluster) -> list[list[int]]:
    """What one engine says."""
    assert common.unified is not None
    return [common.unified.generate(prompt, max_new_tokens=NUM_TOKENS)["output_ids"] for prompt in PROMPTS]


@contextmanager
def asked_of_a_prefill_that_stands(it: Cluster) -> Iterator[Asked]:
    """It goes on when this ends."""
    assert it.router is not None
    router = it.router
    with ThreadPoolExecutor(len(PROMPTS)) as pool, frozen(it.prefills[0], "worker_process"):
        yield [pool.submit(router.generate, prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]


def queues(server: Server) -> dict[str, int]:
    """How many are in which, but for those where nobody is."""
    return {name: len(found) for name, found in server.state()["queues"].items() if found}


def gauges(server: Server) -> dict[str, float]:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    names = ("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "num_used_tokens")
    return {name: float(line.split()[-1]) for name in names for line in lines if line.startswith(f"sglang:{name}{{")}


def test_a_prefill_that_stands_is_asked_for_all_and_decode_holds_nothing(late: Cluster, alone: list[list[int]]) -> None:
    (prefill,), (decode,) = late.prefills, late.decodes
    with asked_of_a_prefill_that_stands(late) as asked:
        eventually(lambda: queues(decode) == {"awaiting": 3}, what=decode.state)
        eventually(lambda: "bootstrapping" not in queues(prefill), what=prefill.state)
        assert sum(queues(prefill).values()) == 3, "each is READY, and so in a queue or a batch"
        state = decode.state()
        assert (state["pages"]["owned"], state["pages_by_request"]) == (0, {})
        assert gauges(decode) == {
            "num_decode_prealloc_queue_reqs": 3,
            "num_decode_transfer_queue_reqs": 0,
            "num_used_tokens": 0,
        }
        waits = decode.get("/debug/waits")
        assert [wait["waiting_for"] for wait in waits] == ["prefill"] * 3, waits
    answers = [one.result() for one in asked]
    assert [answer["output_ids"] for answer in answers] == alone
    assert [answer["meta_info"]["path"] for answer in answers] == ["remote"] * 3
    for server in late.servers:
        eventually(server.is_idle, what=server.state)


@pytest.mark.slow
def test_an_early_decode_of_the_same_size_is_full_with_one_of_them(alone: list[list[int]]) -> None:
    """So that the test above says something."""
    with pair("early") as early:
        (prefill,), (decode,) = early.prefills, early.decodes
        with asked_of_a_prefill_that_stands(early) as asked:
            eventually(lambda: queues(decode) == {"arriving": 1, "queued": 2}, what=decode.state)
            eventually(lambda: queues(prefill).get("bootstrapping") == 2, what=prefill.state)
            assert decode.state()["pages"]["owned"] == 7
        assert [one.result()["output_ids"] for one in asked] == alone


def test_samples_and_a_cached_prompt_are_answered_as_by_one_engine(late: Cluster, common: Cluster) -> None:
    assert late.router is not None
    assert common.unified is not None
    body = {"prompt": [77] * 40, "max_tokens": 6, "n": 3, "temperature": 1.0, "seed": 5, "model": "tandem/mini"}
    for _ in range(2):
        texts = [
            [one["text"] for one in server.call("POST", "/v1/completions", body)["choices"]]
            for server in (late.router, common.unified)
        ]
        assert texts[0] == texts[1]
    for server in late.servers:
        eventually(server.is_idle, what=server.state)
