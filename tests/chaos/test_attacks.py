"""The attackers notice when something is let through: an attack that cannot succeed would prove nothing."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from attack_bootstrap import HostileBootstrap
from attack_http import TRAVERSALS, HttpAttacks
from attack_ports import listening
from attacks import HANDSHAKE_BYTES, Attacks
from proxy import LOOPBACK

LIMIT_S = 20.0
DOCUMENT = {
    "incarnation": {"name": "p", "id": "1" * 32},
    "control_host": "",
    "control_port": 7,
    "shards": [{"port": 8}],
}
Story = Callable[[Attacks], Awaitable[None]]


def run(story: Story) -> Attacks:
    attacks = Attacks(Random(1))

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await story(attacks)

    asyncio.run(limited())
    return attacks


@asynccontextmanager
async def server_that_says(answer: bytes, *, is_asked: bool = False) -> AsyncIterator[int]:
    """Its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_asked:
            await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def arena(**fields: Any) -> Any:
    """As much of one as an attack looks at."""
    return SimpleNamespace(known_documents=lambda: [DOCUMENT], **fields)


@pytest.mark.parametrize(("size", "count"), [(HANDSHAKE_BYTES, 0), (HANDSHAKE_BYTES + 1, 1)])
def test_a_port_that_says_more_than_a_handshake_is_a_violation(size: int, count: int) -> None:
    async def story(attacks: Attacks) -> None:
        async with server_that_says(b"k" * size) as port:
            await attacks.talk("noise", port, b"x")

    attacks = run(story)
    assert (len(attacks.violations), attacks.heard_bytes) == (count, size)


@pytest.mark.parametrize("status", [200, 404])
def test_a_router_that_passes_a_page_on_is_a_violation_whatever_it_calls_it(status: int) -> None:
    async def story(attacks: Attacks) -> None:
        page = b'{"queues": {}}'
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(page)}\r\n\r\n".encode()
        async with server_that_says(head + page, is_asked=True) as port:
            it = arena(router_server=SimpleNamespace(member=SimpleNamespace(port=port)))
            await HttpAttacks(it, attacks).traversal()

    assert len(run(story).violations) == len(TRAVERSALS)


def test_a_write_that_is_accepted_is_a_violation() -> None:
    async def story(attacks: Attacks) -> None:
        async with server_that_says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK", is_asked=True) as port:
            await HttpAttacks(arena(routes=[SimpleNamespace(target_port=port)]), attacks).unsigned_write()

    assert len(run(story).violations) == 2


def test_the_hostile_bootstrap_server_names_its_own_endpoints_and_counts_what_they_hear() -> None:
    async def story(attacks: Attacks) -> None:
        async with HostileBootstrap(arena(), attacks) as bootstrap:
            bootstrap._tell = bootstrap._other_endpoints
            heard = await attacks.talk("x", bootstrap.port, b"GET /route HTTP/1.1\r\n\r\n")
            told = json.loads(heard.partition(b"\r\n\r\n")[2])
            assert told["incarnation"] == DOCUMENT["incarnation"]
            assert told["control_port"] == told["shards"][0]["port"] != DOCUMENT["control_port"]
            async with attacks.connection(told["control_port"]) as (_, writer):
                writer.write(b"t" * (HANDSHAKE_BYTES + 1))
                await writer.drain()
                writer.write_eof()
                while not attacks.violations:
                    await asyncio.sleep(0.01)

    assert len(run(story).violations) == 1


def test_ports_are_found_by_who_listens() -> None:
    with socket.create_server((LOOPBACK, 0)) as sock:
        assert sock.getsockname()[1] in listening(os.getpid())
