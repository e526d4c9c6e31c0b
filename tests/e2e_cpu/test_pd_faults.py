"""A half dies, falls silent or comes back: every request ends, with tokens or with a cause, and nothing stays taken.

The tests run in the order of this file on one cluster; each leaves it whole.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, HttpError, Server, child_named, cluster, eventually

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
FOREVER = {"ignore_eos": True}


@pytest.fixture(scope="module")
def it() -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1) as it:
        yield it


@pytest.fixture(autouse=True)
def _leaves_nothing(it: Cluster) -> Iterator[None]:
    yield
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def kill(server: Server) -> None:
    """All of it, at once."""
    server.member.process.kill()
    server.member.process.wait()


def revive(it: Cluster, server: Server) -> None:
    it.fleet.restart(server.member)
    it.fleet.wait_ready(timeout_s=60)


def serves(router: Server) -> bool:
    """A request goes through both halves again."""
    try:
        return bool(router.generate(PROMPT, timeout=5)["meta_info"]["path"] == "remote")
    except HttpError:
        return False


def test_a_request_that_decodes_does_not_need_its_prefill_any_more(it: Cluster, router: Server) -> None:
    whole = router.generate(PROMPT, max_new_tokens=200, sampling_params=FOREVER)["output_ids"]
    stream = router.stream(PROMPT, max_new_tokens=200, sampling_params=FOREVER)
    assert stream.next() is not None
    kill(it.prefills[0])
    assert stream.rest()[-1]["output_ids"] == whole
    revive(it, it.prefills[0])


def test_a_prefill_that_came_back_is_used_again(it: Cluster, router: Server) -> None:
    eventually(lambda: serves(router))
    kill(it.prefills[0])
    began = time.monotonic()
    with pytest.raises(HttpError) as failed:
        router.generate(PROMPT, timeout=10)
    assert failed.value.status in (500, 502, 503)
    assert failed.value.error["code"]
    assert time.monotonic() - began < 11
    revive(it, it.prefills[0])
    eventually(lambda: serves(router))


def test_a_half_of_an_earlier_life_of_prefill_is_not_waited_for_and_one_that_comes_late_is(it: Cluster) -> None:
    """A router of SGLang's, to which prefill was not there, waits for decode, which would wait for a minute."""
    prefill, decode = it.prefills[0], it.decodes[0]
    bootstrap = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap}
    kill(prefill)
    lost = decode.open_stream(PROMPT, timeout=60, bootstrap_room=503, **pair)
    revive(it, prefill)
    assert lost.getresponse().headers["x-tandem-path"] == "fallback"
    lost.close()
    kill(prefill)
    revive(it, prefill)
    early = decode.open_stream(PROMPT, timeout=60, bootstrap_room=504, **pair)
    time.sleep(3)  # longer than the half of an earlier life is waited for
    prefill.stream(PROMPT, timeout=60, bootstrap_room=504, **pair).rest()
    assert early.getresponse().headers["x-tandem-path"] == "remote"
    early.close()


@pytest.mark.slow
def test_a_prefill_whose_node_hangs_is_lost_and_decode_computes_the_prompt(it: Cluster) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    bootstrap = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap}
    tokens = decode.generate(PROMPT)["output_ids"]
    node = child_named(prefill.member.process.pid, "node.process")
    os.kill(node, signal.SIGSTOP)
    try:
        reply = decode.generate(PROMPT, bootstrap_room=501, timeout=20, **pair)
    finally:
        os.kill(node, signal.SIGCONT)
    assert reply["meta_info"]["path"] == "fallback"
    assert reply["output_ids"] == tokens


def test_a_decode_that_dies_leaves_nothing_on_its_prefill(it: Cluster, router: Server) -> None:
    eventually(lambda: serves(router))
    prefill, decode = it.prefills[0], it.decodes[0]
    bootstrap = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": 502}
    os.kill(child_named(decode.member.process.pid, "worker_process"), signal.SIGSTOP)  # nobody pulls
    decode_half = decode.open_stream(PROMPT, timeout=60, **pair)
    prefill_half = prefill.stream(PROMPT, timeout=60, **pair)
    eventually(lambda: prefill.state()["queues"]["sending"], what=prefill.state)
    kill(decode)
    assert prefill_half.rest()[-1]["error"]["code"] == "peer_lost"
    decode_half.close()
    revive(it, decode)
    eventually(lambda: serves(router))


def test_a_decode_that_drains_finishes_what_it_has(it: Cluster, router: Server) -> None:
    decode = it.decodes[0]
    stream = router.stream(PROMPT, max_new_tokens=300, sampling_params=FOREVER)
    assert stream.next() is not None
    decode.member.process.send_signal(signal.SIGTERM)
    assert len(stream.rest()[-1]["output_ids"]) == 300
    assert decode.member.process.wait(20) == 0
    revive(it, decode)
    eventually(lambda: serves(router))
