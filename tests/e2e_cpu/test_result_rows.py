"""A prefill with one row for results: who has none computes nothing, and nobody keeps one too long."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any  # JSON documents

import pytest
from cluster import Server, bootstrap_port, eventually, halves

EXACT = ("--deterministic",)
FLAGS = (*EXACT, "--disaggregation-metadata-slots", "1", "--optimistic-prefill-policy", "park")
rooms = count(1)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with halves(tmp_path_factory.mktemp("rows"), FLAGS, EXACT) as found:
        yield found


def in_state(prefill: Server, name: str) -> int:
    return len(prefill.state()["queues"].get(name, ()))


def rows(prefill: Server) -> tuple[int, int]:
    """(free, all)"""
    found = prefill.state()["result_rows"]
    return found["free"], found["total"]


def test_who_lacks_a_row_computes_nothing_until_one_is_given_back(it: tuple[Server, Server]) -> None:
    prefill, _ = it
    first = prefill.open_stream([5] * 100, bootstrap_room=next(rooms))
    eventually(lambda: in_state(prefill, "parked") == 1, what=prefill.state)
    assert rows(prefill) == (0, 1)
    second = prefill.open_stream([6] * 100, bootstrap_room=next(rooms))
    eventually(lambda: in_state(prefill, "queued") == 1, what=prefill.state)
    assert prefill.log.count("Prefill batch") == 1
    first.close()
    eventually(lambda: in_state(prefill, "parked") == 1 and in_state(prefill, "queued") == 0, what=prefill.state)
    assert prefill.log.count("Prefill batch") == 2
    assert rows(prefill) == (0, 1)
    second.close()
    eventually(prefill.is_idle, what=prefill.state)
    assert rows(prefill) == (1, 1)


def test_who_is_ready_takes_the_row_of_one_that_is_parked_and_everybody_is_answered(it: tuple[Server, Server]) -> None:
    prefill, decode = it

    def through_both(number: int) -> dict[str, Any]:
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill)}
        pair |= {"bootstrap_room": next(rooms), "timeout": 20}
        prompt = [30 + number] * 100
        with ThreadPoolExecutor(1) as pool:
            half = pool.submit(prefill.generate, prompt, max_new_tokens=8, **pair)
            answer = decode.generate(prompt, max_new_tokens=8, **pair)
            half.result()
        return answer

    parked = prefill.open_stream([7] * 100, bootstrap_room=next(rooms))
    eventually(lambda: in_state(prefill, "parked") == 1, what=prefill.state)
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(through_both, range(6)))
    assert [answer["meta_info"]["path"] for answer in answers] == ["remote"] * 6
    decode.open("POST", "/flush_cache").close()
    alone = [decode.generate([30 + number] * 100, max_new_tokens=8) for number in range(6)]
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]
    parked.close()
    for server in it:
        eventually(server.is_idle, what=server.state)
