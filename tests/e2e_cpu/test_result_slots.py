"""A prefill with one row for results: who has none computes nothing, and nobody keeps one too long."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import Server, bootstrap_port, eventually, frozen, halves

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
    found = prefill.state()["result_slots"]
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


def test_who_lacks_a_row_is_passed_over_by_one_that_has_one(tmp_path: Path) -> None:
    """Three rows and 24 pages. Of two that are parked both give their pages back to one that is READY. The smaller one
    has kept its row and is computed again, though another one that lacks a row is first in the queue."""
    flags = ("--disaggregation-metadata-slots", "3", "--optimistic-prefill-attempts", "3", "--max-total-tokens", "384")
    with halves(tmp_path, (*EXACT, *flags), EXACT) as (prefill, decode):
        large, small = ([number] * 16 * pages for number, pages in ((5, 7), (6, 3)))
        parked = []
        for number, prompt in enumerate((large, small)):
            parked.append(prefill.open_stream(prompt, bootstrap_room=next(rooms)))
            eventually(lambda number=number: in_state(prefill, "parked") == number + 1, what=prefill.state)
        lacking = prefill.open_stream([7] * 16 * 16, bootstrap_room=next(rooms), rid="lacking")
        eventually(lambda: waits_for(prefill, "lacking") == "pages", what=prefill.state)
        ready = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": bootstrap_port(prefill),
            "bootstrap_room": next(rooms),
        }
        with frozen(decode, "worker_process"):
            half_of_decode = decode.open_stream([8] * 16 * 18, **ready)
            eventually(lambda: prefill.state()["stashed"] == 1, what=prefill.state)
            half = prefill.open_stream([8] * 16 * 18, **ready)
            eventually(lambda: waits_for(prefill, "lacking") == "result_slot", what=prefill.state)
            eventually(lambda: in_state(prefill, "sending") == in_state(prefill, "parked") == 1, what=prefill.state)
            assert waits_for(prefill, "lacking") == "result_slot"
            assert in_state(prefill, "queued") == 2
            assert rows(prefill) == (0, 3)
        assert half_of_decode.getresponse().status == half.getresponse().status == 200
        for connection in (*parked, lacking, half_of_decode, half):
            connection.close()
        eventually(prefill.is_idle, what=prefill.state)


def waits_for(prefill: Server, rid: str) -> str | None:
    """None: for nothing, or it has not come yet."""
    return next((wait["waiting_for"] for wait in prefill.get("/debug/waits") if wait["rid"] == rid), None)
