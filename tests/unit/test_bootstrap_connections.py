"""The bootstrap server's port: heads, bodies and answers have deadlines, connections and bytes in memory a bound."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import bounded_port
import pytest
from bounded_port import is_cut, opened

from loop_waits import until
from tandem.core.bootstrap_registry import BootstrapRegistry, Registration
from tandem.core.settings import PrefillInfo
from tandem.core.values import Incarnation
from tandem.server.api.body_store import CHUNK_BYTES, MAX_BOOTSTRAP_BODY_BYTES, BodyStore
from tandem.server.api.bootstrap import BootstrapServer, monotonic_now
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.connections import ConnectionBounds

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ROUTE = b"GET /route HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = Registration(Incarnation("p", "1" * 32), 0, PrefillInfo(), {}, b" " * (1 << 20))
LONG = 3600.0


def query(num_bytes: int) -> bytes:
    return b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % num_bytes


@dataclass
class Port(bounded_port.Port):
    """Of a bootstrap server."""

    bodies: BodyStore

    async def ask(self, data: bytes) -> bytes:
        """The head of the answer."""
        reader, writer = await self.open(data)
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving(bounds: ConnectionBounds, bodies: BodyStore) -> AsyncIterator[Port]:
    registry = BootstrapRegistry()
    registry.register(LARGE)
    app = BootstrapServer(registry, WriteGuard(None, monotonic_now), bodies=bodies).app()
    async with opened(app, bounds) as port:
        yield Port(port.number, bounds, port.server, port.task, bodies)


def serves(story: Callable[[Port], Awaitable[None]], *, bodies: BodyStore | None = None, **bounds: Any) -> None:
    async def main() -> None:
        limits = ConnectionBounds(**{"head_s": LONG, "request_s": LONG, "idle_s": LONG} | bounds)
        async with serving(limits, bodies or BodyStore(seconds=LONG)) as port:
            await story(port)

    asyncio.run(main())


@pytest.mark.parametrize("data", [b"", b"G", HEALTH[:-2]], ids=["nothing", "a byte", "half a head"])
def test_a_head_that_does_not_come_ends_its_connection(data: bytes) -> None:
    async def story(port: Port) -> None:
        reader, _ = await port.open(data)
        assert await is_cut(reader)
        await until(lambda: port.bounds.num_open == 0)

    serves(story, head_s=0.05)


def test_an_idle_connection_ends_after_a_while() -> None:
    async def story(port: Port) -> None:
        reader, _ = await port.open(HEALTH)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await is_cut(reader)

    serves(story, idle_s=0.05)


def test_an_answer_that_nobody_reads_ends_its_connection() -> None:
    async def story(port: Port) -> None:
        reader, writer = await port.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        writer.write(ROUTE * 100)  # more answers than the sockets' buffers hold
        await until(lambda: port.bounds.num_open == 1)
        await until(lambda: port.bounds.num_open == 0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await is_cut(reader)

    serves(story, request_s=0.3)


def test_a_request_that_does_not_end_ends_its_connection() -> None:
    async def story(port: Port) -> None:
        reader, _ = await port.open(query(1000) + b"{")
        assert await is_cut(reader)
        await until(lambda: port.bodies._num_bytes == 0)

    serves(story, request_s=0.05)


def test_a_request_is_served_while_others_hold_connections_in_any_number() -> None:
    async def story(port: Port) -> None:
        held = [await port.open(b"" if number % 2 else b"GET /hea") for number in range(40)]
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")
        assert port.bounds.num_open <= 8
        assert await is_cut(held[0][0]), "the one that has waited longest"

    serves(story, max_connections=8)


def test_a_connection_may_be_used_again_and_requests_may_come_before_they_are_answered() -> None:
    async def story(port: Port) -> None:
        reader, writer = await port.open(HEALTH * 5)
        for _ in range(5):
            assert (await reader.readuntil(b"\r\n\r\nOK")).startswith(b"HTTP/1.1 200")
        writer.write(HEALTH)
        assert (await reader.readuntil(b"\r\n\r\nOK")).startswith(b"HTTP/1.1 200")
        assert list(port.bounds.waiting) != []

    serves(story)


def test_a_body_that_does_not_come_is_refused_and_its_memory_free() -> None:
    bodies = BodyStore(seconds=0.1)

    async def story(port: Port) -> None:
        answer = await port.ask(query(1000) + b"{")
        assert answer.startswith(b"HTTP/1.1 503")
        assert bodies._num_bytes == 0

    serves(story, bodies=bodies)


def test_a_body_that_is_too_long_is_refused_before_it_comes() -> None:
    async def story(port: Port) -> None:
        assert (await port.ask(query(MAX_BOOTSTRAP_BODY_BYTES + 1))).startswith(b"HTTP/1.1 413")

    serves(story)


def test_where_bodies_are_too_much_together_the_largest_goes_and_small_ones_pass() -> None:
    bodies = BodyStore(max_bytes=100_000, seconds=LONG)

    async def story(port: Port) -> None:
        held = []
        for size in (20_000, 50_000, 40_000):
            reader, writer = await port.open(query(60_000) + b" " * size)
            held.append((reader, writer))
            await until(lambda size=size: bodies._num_bytes % 10_000 >= CHUNK_BYTES or size == 40_000)
        assert (await asyncio.wait_for(held[1][0].readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 503")
        assert (await port.ask(query(22) + b'{"bootstrap_rooms":[]}')).startswith(b"HTTP/1.1 200")
        await until(lambda: bodies._num_bytes == 60_000 + 2 * CHUNK_BYTES)
        for _, writer in held:
            writer.close()
        await until(lambda: bodies._num_bytes == 0)

    serves(story, bodies=bodies)
