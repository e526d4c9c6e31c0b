"""How KV travels between the processes of a pair: what `--disaggregation-transfer-backend` chooses, and that tokens are
the same whichever way."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, cluster, eventually
from transfer_world import WITH_NIXL

PROMPTS = [
    f"Ann has {number} pens and gives {number // 2} of them to each of her 3 friends in turn. " * 6
    + "How many are left?"
    for number in range(20, 32)
]


def connections(server: Server) -> dict[str, int]:
    return server.get("/server_info")["kv_connections"]


def tokens(server: Server) -> list[list[int]]:
    return [server.generate(prompt, max_new_tokens=16)["output_ids"] for prompt in PROMPTS]


def pulled(it: Cluster) -> list[list[int]]:
    """What the pair says, of prompts that all have travelled."""
    assert it.router is not None
    for server in it.servers:
        server.open("POST", "/flush_cache").close()
    answers = [it.router.generate(prompt, max_new_tokens=16) for prompt in PROMPTS]
    assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}
    return [answer["output_ids"] for answer in answers]


def test_on_one_host_auto_copies_from_shared_memory(common: Cluster) -> None:
    assert common.unified is not None
    assert pulled(common) == tokens(common.unified)
    for server in (*common.prefills, *common.decodes):
        assert set(filter(connections(server).get, connections(server))) == {"shm"}
    assert "through shared memory (shm)" in common.decodes[0].log
    assert connections(common.unified) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "way"),
    [("auto", "sock", "unix"), ("sock", "auto", "unix")],
)
def test_where_one_side_says_sock_bytes_are_sent_and_the_tokens_are_the_same(
    common: Cluster, prefill: str, decode: str, way: str
) -> None:
    backend = "--disaggregation-transfer-backend"
    sides = {"prefill_flags": (backend, prefill), "decode_flags": (backend, decode)}
    with cluster(prefills=1, decodes=1, flags=["--deterministic"], **sides) as it:
        assert common.unified is not None
        assert pulled(it) == tokens(common.unified)
        assert set(filter(connections(it.decodes[0]).get, connections(it.decodes[0]))) == {way}


@pytest.fixture(scope="module")
def by_nixl() -> Iterator[Cluster]:
    """A prefill that is set to NIXL, and a decode that follows it. Over TCP, as on a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        flags = ("--disaggregation-transfer-backend", "nixl")
        with cluster(prefills=1, decodes=1, flags=["--deterministic"], prefill_flags=flags) as it:
            yield it


@WITH_NIXL
def test_where_one_side_says_nixl_it_reads_and_the_tokens_are_the_same(common: Cluster, by_nixl: Cluster) -> None:
    assert common.unified is not None
    assert pulled(by_nixl) == tokens(common.unified)
    for server in by_nixl.servers:
        assert set(filter(connections(server).get, connections(server))) == {"nixl"}
    assert "read by NIXL (nixl)" in by_nixl.decodes[0].log


@WITH_NIXL
@pytest.mark.slow
def test_clients_that_leave_while_nixl_reads_disturb_nobody(common: Cluster, by_nixl: Cluster) -> None:
    router = by_nixl.router
    assert router is not None
    assert common.unified is not None
    leaving = [router.open_stream(long_prompt(number)) for number in range(12)]
    first = router.stream(long_prompt(12))
    first.next()
    for one in (*leaving, first):  # some prompts are being computed, some pulled, some answered
        one.close()
    for server in by_nixl.servers:
        eventually(server.is_idle, what=server.state)
    assert pulled(by_nixl) == tokens(common.unified)


@WITH_NIXL
@pytest.mark.slow
def test_a_prefill_that_is_killed_while_nixl_reads_costs_no_token_and_comes_back(
    common: Cluster, by_nixl: Cluster
) -> None:
    """The last of this file on that pair."""
    router = by_nixl.router
    assert router is not None
    assert common.unified is not None
    prompts = [long_prompt(number) for number in range(20, 28)]
    expected = [common.unified.generate(prompt, max_new_tokens=4)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(router.generate, prompt, max_new_tokens=4) for prompt in prompts]
        wait(answers, return_when=FIRST_COMPLETED)  # the others are on their way
        (prefill,) = by_nixl.prefills
        prefill.member.process.kill()
        prefill.member.process.wait()
        found = [outcome(answer.result) for answer in answers]
    assert all(said == whole or (isinstance(said, str) and said) for said, whole in zip(found, expected, strict=True))
    by_nixl.fleet.restart(prefill.member)
    by_nixl.fleet.wait_ready(timeout_s=60)
    for server in by_nixl.servers:
        eventually(server.is_idle, what=server.state)
    eventually(lambda: is_remote(router), what=lambda: by_nixl.decodes[0].log[-2000:])
    assert pulled(by_nixl) == tokens(common.unified)
    assert connections(by_nixl.decodes[0])["nixl"]


def outcome(answer: Callable[[], dict[str, Any]]) -> list[int] | str:
    """Its tokens, or the code of the error."""
    try:
        return answer()["output_ids"]
    except HttpError as error:
        return error.error["code"]


def is_remote(router: Server) -> bool:
    try:
        return router.generate(PROMPTS[0], timeout=5)["meta_info"]["path"] == "remote"
    except HttpError:
        return False


def long_prompt(number: int) -> list[int]:
    """No two begin alike, so all their pages travel."""
    return [20 + number, *(30 + (index * (number + 3)) % 400 for index in range(1500))]
