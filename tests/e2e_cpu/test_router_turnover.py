"""Real processes: a decode is added to a router that runs, the first one leaves and finishes what it has."""

import pytest
from cluster import Cluster, Server, cluster, eventually

from tandem.cli.fleet import serve_words
from tandem.cli.ports import free_ports

TOKENS = 24
PROMPT = list(range(20, 50))


def start_decode(made: Cluster) -> Server:
    (port,) = free_ports(1)
    words = serve_words("tandem/mini", port, "--disaggregation-mode", "decode")
    server = Server(made.fleet.start("decode-late", words, port=port))
    eventually(server.is_ready, within_s=90)
    return server


@pytest.mark.slow
def test_a_decode_joins_and_the_first_one_leaves_with_its_answer_whole() -> None:
    with cluster(prefills=1, decodes=1) as made:
        router, (first,) = made.router, made.decodes
        assert router is not None
        alone = router.generate(PROMPT, max_new_tokens=TOKENS)["output_ids"]
        late = start_decode(made)
        with router.open("POST", "/workers", {"url": late.url, "worker_type": "decode"}) as reply:
            assert reply.status == 202
            place = reply.headers["location"]
        eventually(lambda: router.get(place)["is_healthy"])

        workers = {worker["url"]: worker for worker in router.get("/workers")["workers"]}
        streams = [router.stream(PROMPT, max_new_tokens=TOKENS) for _ in range(2)]  # in turn: one is at the first
        begun = [stream.next() for stream in streams]
        with router.open("DELETE", f"/workers/{workers[first.url]['id']}") as reply:
            assert reply.status == 202
        for stream, event in zip(streams, begun, strict=True):
            last = [event, *stream.rest()][-1]
            assert last is not None
            assert last["output_ids"] == alone
        eventually(lambda: first.url not in {worker["url"] for worker in router.get("/workers")["workers"]})

        first.member.process.kill()
        assert router.generate(PROMPT, max_new_tokens=TOKENS)["output_ids"] == alone
