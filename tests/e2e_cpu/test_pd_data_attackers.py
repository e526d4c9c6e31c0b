"""An attacker at the data port of a real prefill that holds a user's pages: it may guess everything but secrets."""

import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any  # JSON documents

import pytest
from cluster import Server, bootstrap_port, eventually, frozen, halves

from attackers_data import WRONG, Asker, Target
from tandem.core.values import Incarnation
from tandem.membership import user_secret
from tandem.transfer.protocol import Status

NUM_PAGES, PROMPT_PAGES = 32, 7
PROMPT = [400 - index for index in range(100)]
GENERATIONS = range(4)
SOON_S = 10.0
rooms = count(1)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    flags = ("--max-total-tokens", str(16 * NUM_PAGES))
    with halves(tmp_path_factory.mktemp("attacked"), flags, flags) as found:
        yield found


def pair_with(prefill: Server) -> dict[str, Any]:
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": next(rooms)}
    return {**pair, "timeout": SOON_S}


def data_port(it: tuple[Server, Server]) -> Target:
    """As the bootstrap server tells everybody; the size of a page as any answer tells it."""
    prefill, decode = it
    pair = pair_with(prefill)
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(prefill.generate, PROMPT, **pair)
        answer = decode.generate(PROMPT, **pair)
        half.result()
    route = bootstrap_route(pair["bootstrap_port"])
    (end,) = route["shards"]
    page_bytes, rest = divmod(answer["meta_info"]["kv_bytes"], PROMPT_PAGES)
    assert page_bytes > 0
    assert rest == 0
    return Target(Incarnation(**route["incarnation"]), page_bytes, end["host"], end["port"])


def bootstrap_route(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)
    connection.request("GET", "/route")
    with connection.getresponse() as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def test_pages_of_a_user_are_read_by_nobody_who_was_not_granted_them(it: tuple[Server, Server]) -> None:
    prefill, decode = it
    where = data_port(it)
    pair = pair_with(prefill)
    with frozen(decode, "worker_process"):
        connections = [server.open_stream(PROMPT[::-1], **pair) for server in (prefill, decode)]
        eventually(
            lambda: prefill.metric("tandem:worker_pinned_pages{") == PROMPT_PAGES, within_s=SOON_S, what=prefill.state
        )
        found = {reads(where, pair["bootstrap_room"], page, generation) for page, generation in guesses()}
        assert found == {Status.NOT_GRANTED}
        with Asker(where, secret=WRONG) as attacker:
            assert attacker.join() is Status.NOT_A_MEMBER
            assert attacker.is_closed()
        for connection in connections:
            connection.close()
    for server in it:
        eventually(server.is_idle, within_s=SOON_S, what=server.state)


def guesses() -> Iterator[tuple[int, int]]:
    return ((page, generation) for page in range(NUM_PAGES) for generation in GENERATIONS)


def reads(where: Target, room: int, page: int, generation: int) -> Status:
    """What a member that was granted nothing is answered."""
    with Asker(where, secret=user_secret(os.environ)) as member:
        assert member.join() is Status.OK
        member.ask(room, b"a secret of mine", [page], [generation])
        return member.answer()[0]
