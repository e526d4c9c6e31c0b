"""The proxy does what it says it does: a fault that harms nothing would prove nothing."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
from greetings import Regreeter
from proxy import LOOPBACK, RECORDED_BYTES, Link, RouteProxy

from attackers import SECRET, hello_of
from tandem.core.values import Cut, Incarnation, Nanos
from tandem.server.node.session import Greeting, PeerPing, Session
from tandem.server.wire import DataEndpoint

DATA = bytes(range(256)) * 64
LIMIT_S = 10.0


@asynccontextmanager
async def echo() -> AsyncIterator[asyncio.Server]:
    """Sends back what comes, and ends when told that no more comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1 << 16):
                writer.write(piece)
            writer.close()
        except OSError:
            pass

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield server
    finally:
        server.close()


@asynccontextmanager
async def link_to_echo() -> AsyncIterator[Link]:
    async with echo() as server:
        link = Link("test", server.sockets[0].getsockname()[1], Random(1), is_damageable=True)
        await link.open()
        try:
            yield link
        finally:
            await link.close()


async def there_and_back(link: Link) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
    writer.write(DATA)
    writer.write_eof()
    try:
        return await reader.read(-1)
    finally:
        writer.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await story()

    asyncio.run(limited())


def test_a_link_passes_bytes_and_their_end_in_both_directions() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            assert await there_and_back(link) == DATA

    run(story)


@pytest.mark.parametrize("harm", ["corrupt", "duplicate"])
def test_harm_is_done_once_per_armed_piece_and_counted(harm: str) -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            link.arm(harm, 1)
            harmed = await there_and_back(link)
            assert harmed != DATA
            assert (len(harmed) > len(DATA)) == (harm == "duplicate")
            assert link.harmed == {harm: 1}
            assert await there_and_back(link) == DATA

    run(story)


def test_a_cut_resets_what_is_connected_and_nothing_else() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            assert link.cut(half=False) == 1
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            assert await there_and_back(link) == DATA

    run(story)


def test_a_half_cut_ends_one_direction_while_the_other_goes_on() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            (connection,) = link.connections
            connection.close_half(connection.near)
            assert await reader.read(1) == b""
            writer.write(b"y")
            await writer.drain()
            assert connection in link.connections

    run(story)


def test_a_stall_holds_everything_until_it_is_healed() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            link.stall()
            answer = asyncio.create_task(there_and_back(link))
            done, _ = await asyncio.wait([answer], timeout=0.2)
            assert not done
            link.heal()
            assert await answer == DATA

    run(story)


def test_a_delay_is_at_least_half_of_what_was_asked_in_each_direction() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            link.delay(0.1)
            began = time.monotonic()
            assert await there_and_back(link) == DATA
            assert time.monotonic() - began >= 0.1

    run(story)


def test_a_link_to_nobody_refuses_and_listens_again_when_somebody_is_there() -> None:
    async def story() -> None:
        with socket.create_server((LOOPBACK, 0)) as reserved:
            port = reserved.getsockname()[1]
        link = Link("test", port, Random(1), is_damageable=False)
        await link.open()
        with pytest.raises(ConnectionError):  # the first is accepted, then reset: by it the link learns
            await there_and_back(link)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, link.port)
        server = await asyncio.start_server(lambda _, writer: writer.close(), LOOPBACK, port)
        while True:
            try:
                assert await there_and_back(link) == b""
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        server.close()
        await link.close()

    run(story)


def test_a_route_names_the_links_and_no_unix_socket() -> None:
    shards = [{"host": LOOPBACK, "port": port, "unix": "@here"} for port in (2, 3)]
    replica = {"control_port": 1, "shards": shards, "layout": "x", "dp_rank": 1}
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heard.append(head.split(b" HTTP")[0] + b" " + await reader.readexactly(int(head.split(b"length: ")[1])))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(replica).encode())
        writer.close()

    async def link(kind: str, port: int) -> Link:
        ports = {"control DP1": 11, "data DP1": 12, "data DP1 1": 13}
        return Link(kind, port, Random(1), is_damageable=True, port=ports[kind])

    async def story() -> None:
        server = await asyncio.start_server(serve, LOOPBACK, 0)
        route = RouteProxy(server.sockets[0].getsockname()[1], link)
        await route.open()

        async def asked(head: bytes, body: bytes = b"") -> object:
            reader, writer = await asyncio.open_connection(LOOPBACK, route.port)
            writer.write(b"%b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            answer = (await reader.read(-1)).partition(b"\r\n\r\n")[2]
            writer.close()
            return json.loads(answer)

        links = [{"host": LOOPBACK, "port": port, "unix": ""} for port in (12, 13)]
        assert await asked(b"GET /route?prefill_dp_rank=1") == {**replica, "control_port": 11, "shards": links}
        assert route.data_ports == {2: 12, 3: 13}
        assert route.document == replica
        assert await asked(b"POST /query_dp_ranks", b"[7]") == replica, "what is no route is passed on as it is"
        assert heard == [b"GET /route?prefill_dp_rank=1 ", b"POST /query_dp_ranks [7]"]
        await route.close()
        server.close()

    run(story)


def test_a_link_keeps_how_diallers_have_begun() -> None:
    async def story() -> None:
        async with link_to_echo() as link:
            assert await there_and_back(link) == DATA
            assert list(link.recorded) == [DATA[:RECORDED_BYTES]]

    run(story)


def test_a_greeting_names_the_link_of_the_data_plane_and_all_else_passes_in_whatever_pieces() -> None:
    told = (DataEndpoint(LOOPBACK, 7001, "@here"),)
    for size in (1, 7, 1 << 16):
        dialler = session("decode", (), is_dialler=True)
        acceptor = session("prefill", told, is_dialler=False)
        between = Regreeter(SECRET, {7001: 8001})
        heard: list[object] = []

        def exchange(size: int, dialler: Session, acceptor: Session, between: Regreeter, heard: list[object]) -> None:
            sent, dialler.outgoing = bytes(dialler.outgoing), bytearray()
            for start in range(0, len(sent), size):
                between.see_dialler(sent[start : start + size])
                list(acceptor.feed(sent[start : start + size]))
            sent, acceptor.outgoing = bytes(acceptor.outgoing), bytearray()
            for start in range(0, len(sent), size):
                heard.extend(dialler.feed(between.pass_acceptor(sent[start : start + size])))

        exchange(size, dialler, acceptor, between, heard)
        dialler.greet()
        exchange(size, dialler, acceptor, between, heard)
        acceptor.say(PeerPing())
        exchange(size, dialler, acceptor, between, heard)
        assert heard == [Greeting("layout", Nanos(1), Cut(), (DataEndpoint(LOOPBACK, 8001),)), PeerPing()]


def session(name: str, shards: tuple[DataEndpoint, ...], *, is_dialler: bool) -> Session:
    hello = hello_of(Incarnation(name, "1"))
    return Session(SECRET, hello, Greeting("layout", Nanos(1), Cut(max(1, len(shards))), shards), is_dialler=is_dialler)
