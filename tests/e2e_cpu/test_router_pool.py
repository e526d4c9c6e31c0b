"""The connection pool against a server that counts its connections."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import httpcore
import httpx
import pytest

from tandem.server import http_pool
from tandem.server.api.resolver import NoThread
from tandem.server.http_pool import NamedHosts, PooledTransport

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"


class Server:
    """Answers every request with `answer`; after `closes_after` answers it closes the connection."""

    def __init__(self) -> None:
        self.answer = ANSWER
        self.closes_after = 1000
        self.num_accepted = 0
        self.num_closed = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            for _ in range(self.closes_after):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer)
            writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
        self.num_closed += 1


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
    async with listener, httpx.AsyncClient(transport=PooledTransport(), timeout=10) as client:
        yield server, client


async def until_closed(server: Server, count: int) -> None:
    async with asyncio.timeout(10):
        while server.num_closed < count:
            await asyncio.sleep(0.005)


def test_requests_one_after_the_other_share_a_connection() -> None:
    async def story() -> None:
        async with served() as (server, client):
            assert [(await client.get(server.url)).content for _ in range(3)] == [b"body"] * 3
            assert server.num_accepted == 1

    asyncio.run(story())


def test_requests_at_the_same_time_have_a_connection_each_and_give_it_back() -> None:
    async def story() -> None:
        async with served() as (server, client):
            for _ in range(2):
                await asyncio.gather(*(client.get(server.url) for _ in range(5)))
            assert server.num_accepted == 5
        await until_closed(server, 5)

    asyncio.run(story())


def test_what_comes_behind_an_answer_is_not_the_answer_to_the_next_request() -> None:
    async def story() -> None:
        async with served() as (server, client):
            server.answer = ANSWER + ANSWER.replace(b"body", b"more")
            assert [(await client.get(server.url)).content for _ in range(3)] == [b"body"] * 3
        await until_closed(server, 3)

    asyncio.run(story())


def test_an_answer_that_is_left_early_closes_its_connection() -> None:
    async def story() -> None:
        async with served() as (server, client):
            server.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbody"
            async with client.stream("GET", server.url) as response:
                assert response.status_code == 200
            await until_closed(server, 1)

    asyncio.run(story())


def test_a_cancelled_request_closes_its_connection() -> None:
    async def story() -> None:
        async with served() as (server, client):
            server.answer = b""
            task = asyncio.create_task(client.get(server.url))
            async with asyncio.timeout(10):
                while not server.num_accepted:
                    await asyncio.sleep(0.005)
            task.cancel()
            await until_closed(server, 1)

    asyncio.run(story())


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async def story() -> None:
        async with served() as (server, client):
            server.closes_after = 1
            for count in (1, 2, 3):
                assert (await client.get(server.url)).content == b"body"
                await until_closed(server, count)
            assert server.num_accepted == 3

    asyncio.run(story())


def test_connections_of_a_busier_time_are_closed_while_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool, "KEEPALIVE_SECONDS", 0.5)

    async def story() -> None:
        async with served() as (server, client):
            server.closes_after = 1_000_000
            await asyncio.gather(*(client.get(server.url) for _ in range(5)))
            async with asyncio.timeout(5):
                while server.num_accepted - server.num_closed > 1:
                    await client.get(server.url)

    asyncio.run(story())


def test_failures_are_those_of_httpx() -> None:
    async def story() -> None:
        async with served() as (server, client):
            server.answer, server.closes_after = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbody", 1
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(server.url)
            server.answer = b""
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(server.url)
        async with httpx.AsyncClient(transport=PooledTransport()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)

    asyncio.run(story())


def test_a_connection_that_dies_while_the_library_looks_at_it_is_a_failure_of_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever makes requests handles `httpx.HTTPError`, and nothing else that comes from below."""

    async def die(*_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async def story() -> None:
        async with served() as (server, client):
            with monkeypatch.context() as patched:
                patched.setattr(httpcore.AsyncHTTPConnection, "handle_async_request", die)
                with pytest.raises(httpx.TransportError, match="getpeername"):
                    await client.get(server.url)
            assert (await client.get(server.url)).content == b"body"

    asyncio.run(story())


def test_what_idles_for_too_long_is_closed_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool, "KEEPALIVE_SECONDS", 0.02)

    async def story() -> None:
        async with served() as (server, client):
            for _ in range(2):  # the second time somebody has to look again
                await asyncio.gather(*(client.get(server.url) for _ in range(3)))
                await until_closed(server, server.num_accepted)
            assert server.num_accepted >= 2

    asyncio.run(story())


def test_no_more_idle_connections_are_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool, "IDLE_MAX", 1)
    monkeypatch.setattr(http_pool, "KEEPALIVE_SECONDS", 600.0)

    async def story() -> None:
        async with served() as (server, client):
            await asyncio.gather(*(client.get(server.url) for _ in range(3)))
            await until_closed(server, 2)
            assert (server.num_accepted, server.num_closed) == (3, 2)
            assert (await client.get(server.url)).content == b"body"
            assert server.num_accepted == 3

    asyncio.run(story())


# --- names of hosts ---------------------------------------------------------------------------------------------------


class Sockets:
    """Connects to one address only; others do not answer, or refuse."""

    def __init__(self, good: str, failure: type[Exception]) -> None:
        self.good, self.failure = good, failure
        self.asked: list[tuple[str, float | None]] = []  # and how long it may take

    async def connect_tcp(self, host: str, port: int, timeout: float | None, *_: object) -> str:
        self.asked.append((host, timeout))
        if host != self.good:
            raise self.failure
        return host


def connect(
    sockets: Sockets, look_up: Callable[[str], Awaitable[Sequence[str]]], timeout: float | None = 6.0
) -> object:
    async def story() -> object:
        hosts = NamedHosts()
        hosts._sockets, hosts._look_up = sockets, look_up  # type: ignore[assignment]  # of this one only
        async with asyncio.timeout(20):
            return await hosts.connect_tcp("a-name", 80, timeout)

    return asyncio.run(story())


@pytest.mark.parametrize("failure", [httpcore.ConnectError, httpcore.ConnectTimeout])
def test_a_name_is_connected_to_where_it_answers_and_who_does_not_has_its_share_of_the_time(
    failure: type[Exception],
) -> None:
    async def look_up(name: str) -> list[str]:
        return ["::1", "127.0.0.2", "127.0.0.3"]

    sockets = Sockets("127.0.0.2", failure)
    assert connect(sockets, look_up) == "127.0.0.2"
    assert sockets.asked == [("::1", 2.0), ("127.0.0.2", 2.0)]
    sockets = Sockets("127.0.0.3", failure)
    assert connect(sockets, look_up, None) == "127.0.0.3"
    assert sockets.asked == [("::1", None), ("127.0.0.2", None), ("127.0.0.3", None)]
    with pytest.raises(failure):
        connect(Sockets("nowhere", failure), look_up)


@pytest.mark.parametrize("error", [NoThread("busy"), OSError("no such name"), UnicodeError("label too long")], ids=repr)
def test_a_name_that_cannot_be_looked_up_is_a_server_that_cannot_be_reached(error: Exception) -> None:
    async def look_up(name: str) -> list[str]:
        raise error

    with pytest.raises(httpcore.ConnectError, match=str(error)):
        connect(Sockets("nowhere", OSError), look_up)


def test_a_look_up_has_the_time_of_its_connection_and_no_more() -> None:
    async def look_up(name: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(httpcore.ConnectTimeout, match="no connection to a-name in time"):
        connect(Sockets("nowhere", OSError), look_up, 0.01)
