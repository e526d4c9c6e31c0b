"""Cases of a pair that need real processes: ends at the first token, retraction, rooms, health under pressure."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, Server, cluster, eventually

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
POOL = ("--max-total-tokens", "640", "--deterministic")
EAGER = ("--schedule-conservativeness", "0")
ROOMY = ("--max-total-tokens", "8192")


@pytest.fixture(scope="module")
def it() -> Iterator[Cluster]:
    """The pair has room for 40 pages, the reference for 512."""
    with cluster(prefills=1, decodes=1, unified=True, flags=POOL, decode_flags=EAGER, unified_flags=ROOMY) as it:
        yield it


@pytest.fixture(autouse=True)
def _leaves_nothing(it: Cluster) -> Iterator[None]:
    yield
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def end_of(answer: dict[str, Any]) -> tuple[list[int], str, dict[str, Any]]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def eos_of(server: Server) -> int:
    """The token with which an answer ends by itself."""
    answer = server.generate(PROMPT, max_new_tokens=200)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    found: int = answer["output_ids"][-1]
    return found


@pytest.mark.parametrize("how", ["one token", "end of sequence", "stop token", "stop string", "ignored end"])
def test_an_answer_that_may_end_with_its_first_token_is_that_of_one_engine(
    router: Server, unified: Server, how: str
) -> None:
    first = unified.generate(PROMPT, max_new_tokens=1)
    eos = eos_of(unified)
    sampling: dict[str, Any] = {
        "one token": {"max_new_tokens": 1},
        "end of sequence": {"logit_bias": {str(eos): 100.0}},
        "stop token": {"stop_token_ids": first["output_ids"]},
        "stop string": {"stop": [first["text"]]},
        "ignored end": {"logit_bias": {str(eos): 100.0}, "ignore_eos": True, "max_new_tokens": 5},
    }[how]
    ours = router.generate(PROMPT, sampling_params=sampling)
    theirs = unified.generate(PROMPT, sampling_params=sampling)
    assert end_of(ours) == end_of(theirs)
    assert ours["meta_info"]["path"] == "remote"
    assert ours["meta_info"]["completion_tokens"] == (5 if how == "ignored end" else 1)


def test_requests_that_are_pushed_back_on_decode_get_the_tokens_of_one_engine(
    it: Cluster, router: Server, unified: Server
) -> None:
    prompts = [[30 + 9 * number + index % 300 for index in range(40)] for number in range(6)]
    forever = {"ignore_eos": True}

    def ask(server: Server) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda p: server.generate(p, max_new_tokens=150, sampling_params=forever), prompts)
            return [answer["output_ids"] for answer in answers]

    assert ask(router) == ask(unified)
    assert num_retractions(it.decodes[0]) > 0
    assert num_retractions(unified) == 0


def num_retractions(server: Server) -> float:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("sglang:num_retracted_requests_total{")]
    return float(line.rpartition(" ")[2])


def test_a_room_may_be_used_again_when_its_request_has_ended(it: Cluster, unified: Server) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    port = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 4711}
    for prompt in ([300 + index for index in range(50)], [200 + index for index in range(50)]):
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(prefill.generate, prompt, max_new_tokens=4, **room)
            ours = decode.generate(prompt, max_new_tokens=4, **room)
            other.result()
        assert ours["output_ids"] == unified.generate(prompt, max_new_tokens=4)["output_ids"]
        assert ours["meta_info"]["path"] == "remote"


def test_health_is_answered_while_every_queue_is_stuck(it: Cluster) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    port = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "timeout": 15}
    stuck = [
        server.open_stream([60 + 31 * number + index % 200 for index in range(200)], bootstrap_room=room, **pair)
        for server, rooms in ((prefill, range(500, 506)), (decode, range(600, 606)))
        for number, room in enumerate(rooms)
    ]
    for server, names in ((prefill, ("parked", "queued")), (decode, ("arriving", "queued"))):
        eventually(lambda server=server, names=names: has_all(server, names), what=server.state)
    for server in (prefill, decode):
        for path in ("/health", "/health_generate"):
            with server.open("GET", path) as reply:
                assert reply.status == 200, path
        assert has_nothing_running(server)
    for connection in stuck:
        connection.close()


def has_all(server: Server, names: tuple[str, ...]) -> bool:
    queues = server.state()["queues"]
    return all(queues[name] for name in names)


def has_nothing_running(server: Server) -> bool:
    queues = server.state()["queues"]
    return not (queues["running"] or queues["sending"])
