"""How KV travels between the processes of a pair: what `--disaggregation-transfer-backend` chooses, and that tokens are
the same whichever way."""

import pytest
from cluster import Cluster, Server, cluster

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


@pytest.mark.parametrize(
    ("prefill", "decode", "way"),
    [("auto", "sock", "unix"), pytest.param("sock", "auto", "unix", marks=pytest.mark.slow)],
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
