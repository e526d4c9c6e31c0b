"""A port's own accept: a burst in parts, refusals at the bare socket, and no file descriptors left."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from loop_waits import until
from tandem.server.api import accept
from tandem.server.api.accept import PER_TURN, BoundedServer
from tandem.server.api.connections import ENDING, BoundedHttp1, ConnectionBounds

LONG = 3600.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Story = Callable[["Port"], Awaitable[None]]


class Port:
    """Its clients connect without its loop, which takes no turn meanwhile."""

    def __init__(self, server: BoundedServer, address: tuple[str, int], bounds: ConnectionBounds) -> None:
        self.server, self.address, self.bounds = server, address, bounds
        self._clients = contextlib.ExitStack()

    def connect(self, data: bytes = b"") -> socket.socket:
        client = self._clients.enter_context(socket.create_connection(self.address, timeout=20))
        client.sendall(data)
        client.setblocking(False)
        return client

    def close(self) -> None:
        self._clients.close()


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def serves(story: Story, *, sock: Callable[[], socket.socket] | None = None, **limits: Any) -> None:
    async def main() -> None:
        bounds = ConnectionBounds(head_s=LONG, request_s=LONG, write_s=LONG, idle_s=LONG, **limits)
        server = BoundedServer(ok, bounds, drain_seconds=0)
        with sock() if sock is not None else socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            await until(lambda: server.started)
            port = Port(server, listener.getsockname(), bounds)
            try:
                await story(port)
            finally:
                port.close()
                server.should_exit = server.force_exit = True
                await serving

    asyncio.run(main())


async def answer(client: socket.socket) -> bytes:
    """All of it, to the end of the connection."""
    found, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while piece := await loop.sock_recv(client, 1 << 16):
            found += piece
    return found


def per_turn(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> Counter[int]:
    """How often a method is called, by the turn of the running loop."""
    calls: Counter[int] = Counter()
    turn, original = 0, getattr(kind, name)

    def tick() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(tick)

    def counted(*arguments: Any) -> Any:
        if not calls:
            tick()
        calls[turn] += 1
        return original(*arguments)

    monkeypatch.setattr(kind, name, counted)
    return calls


def test_a_turn_makes_a_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = per_turn(monkeypatch, BoundedHttp1, "connection_made")

    async def story(port: Port) -> None:
        for _ in range(10 * PER_TURN):
            port.connect()
        await until(lambda: calls.total() == 10 * PER_TURN)

    serves(story)
    assert max(calls.values()) == PER_TURN


def test_who_is_refused_does_not_stand_behind_those_who_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = per_turn(monkeypatch, BoundedHttp1, "connection_made")

    async def story(port: Port) -> None:
        for _ in range(4 * PER_TURN + 1):
            port.connect()
        await until(lambda: port.bounds.num_refused)
        assert (port.bounds.num_refused, port.bounds.num_open) == (1, 4 * PER_TURN)
        assert made.total() < 4 * PER_TURN
        await until(lambda: made.total() == 4 * PER_TURN)

    serves(story, max_connections=4 * PER_TURN, patience_s=LONG)


def test_a_turn_does_not_take_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "ACCEPTS_PER_TURN", 64)
    calls = per_turn(monkeypatch, accept.RefusedConnection, "__init__")

    async def story(port: Port) -> None:
        for _ in range(300):
            port.connect()
        await until(lambda: calls.total() == 300)

    serves(story, max_connections=0, max_lingering=300, patience_s=LONG)
    assert max(calls.values()) == 64


def test_nothing_is_made_of_a_connection_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def connection_made(self: BoundedHttp1, transport: object) -> None:
        made.append(transport)

    async def story(port: Port) -> None:
        port.bounds.num_requests = 1
        for data in (MODELS, MODELS + b"x" * 9999):
            assert (await answer(port.connect(data))).startswith(b"HTTP/1.1 503")
        assert (port.bounds.num_refused, port.bounds.num_open) == (2, 0)

    monkeypatch.setattr(BoundedHttp1, "connection_made", connection_made)
    serves(story, max_requests=1)
    assert made == []


def test_who_is_full_hears_probes_and_who_has_said_nothing_yet() -> None:
    async def story(port: Port) -> None:
        port.bounds.num_requests = 1
        silent, half, probe = port.connect(), port.connect(MODELS[:9]), port.connect(HEALTH)
        await until(lambda: port.bounds.num_open == 3)
        assert (await asyncio.get_running_loop().sock_recv(probe, 1 << 16)).startswith(b"HTTP/1.1 200")
        silent.sendall(MODELS)
        half.sendall(MODELS[9:])
        for client in (silent, half):
            assert (await answer(client)).startswith(b"HTTP/1.1 503")
        port.bounds.num_requests = 0

    serves(story, max_requests=1)


def test_who_asks_for_a_page_before_it_has_a_transport_is_not_refused() -> None:
    async def story(port: Port) -> None:
        port.bounds.num_requests = 1
        *_, last = [port.connect() for _ in range(PER_TURN + 1)]
        await until(lambda: port.bounds.num_open == PER_TURN + 1)
        last.sendall(HEALTH)
        assert (await asyncio.get_running_loop().sock_recv(last, 1 << 16)).startswith(b"HTTP/1.1 200")
        port.bounds.num_requests = 0

    serves(story, max_requests=1)


def test_where_there_are_too_many_connections_probes_are_answered_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept, "MORE_FOR_PAGES", 2)

    async def story(port: Port) -> None:
        port.connect()
        await until(lambda: port.bounds.num_open == 1)
        for data in (b"", MODELS):
            assert b"as many connections" in await answer(port.connect(data))
        for _ in range(2):
            said = await asyncio.get_running_loop().sock_recv(port.connect(HEALTH), 1 << 16)
            assert said.startswith(b"HTTP/1.1 200")
        assert b"as many connections" in await answer(port.connect(HEALTH))

    serves(story, max_connections=1, patience_s=LONG)


def test_a_probe_does_not_stand_behind_those_who_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = per_turn(monkeypatch, BoundedHttp1, "connection_made")

    async def story(port: Port) -> None:
        for _ in range(4 * PER_TURN):
            port.connect()
        said = await asyncio.get_running_loop().sock_recv(port.connect(HEALTH), 1 << 16)
        assert said.startswith(b"HTTP/1.1 200")

    serves(story)
    assert made[min(made)] == PER_TURN + 1, "it is one of the first"


def test_a_refused_socket_goes_with_its_client_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(port: Port) -> None:
        leaves, stays = port.connect(), port.connect()
        await until(lambda: len(port.bounds.lingering) == 2)
        leaves.close()
        await until(lambda: len(port.bounds.lingering) == 1)
        monkeypatch.setattr(accept, "LINGER_SECONDS", 0.01)
        port.connect()
        await until(lambda: len(port.bounds.lingering) == 2)
        await until(lambda: len(port.bounds.lingering) == 1)
        assert (await answer(stays)).startswith(b"HTTP/1.1 503")

    serves(story, max_connections=0, patience_s=LONG)


def test_who_was_let_in_and_has_no_transport_at_the_end_of_a_port_is_told_why() -> None:
    async def story(port: Port) -> None:
        clients = [port.connect(MODELS) for _ in range(PER_TURN + 2)]
        await until(lambda: port.bounds.num_open == len(clients))
        port.server.servers[0].close()
        said = [await answer(client) for client in clients[PER_TURN:]]
        assert [(it[:12], b"draining" in it) for it in said] == [(b"HTTP/1.1 503", True)] * 2
        await until(lambda: port.bounds.num_open == PER_TURN)

    serves(story)


def test_who_gets_its_transport_while_a_port_ends_does_not_stay() -> None:
    async def story(port: Port) -> None:
        client = port.connect()
        await until(lambda: port.bounds.num_open == 1)
        assert not port.server.server_state.connections, "the transport is being made"
        port.server.servers[0].close()
        assert await answer(client) == ENDING
        await until(lambda: port.bounds.num_open == 0)

    serves(story)


def test_at_the_end_of_a_port_nobody_lingers() -> None:
    found: list[ConnectionBounds] = []

    async def story(port: Port) -> None:
        port.connect()
        await until(lambda: port.bounds.lingering)
        found.append(port.bounds)

    serves(story, max_connections=0, patience_s=LONG)
    assert not found[0].lingering


class Full(socket.socket):
    """A listening socket of a process that has no file descriptor left, for the first three times."""

    num_failures = 0

    def accept(self) -> Any:
        if self.num_failures < 3:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def full() -> socket.socket:
    listener = Full()
    listener.bind(("127.0.0.1", 0))
    return listener


def test_accepting_goes_on_once_there_are_file_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "RETRY_SECONDS", 0.01)

    async def story(port: Port) -> None:
        port.connect()
        await until(lambda: port.bounds.num_open == 1)

    with caplog.at_level(logging.WARNING):
        serves(story, sock=full)
    assert len(lines_of_http(caplog)) == 1  # for three failures within a second


def test_a_port_may_close_before_accepting_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story(port: Port) -> None:
        port.connect()
        await until(lambda: lines_of_http(caplog))

    with caplog.at_level(logging.WARNING):
        serves(story, sock=full)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def lines_of_http(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tandem.http"]
