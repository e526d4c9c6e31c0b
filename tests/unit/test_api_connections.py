"""The API's port: what half comes, what nobody reads, and too many connections end, and those who can wait hear why."""

import asyncio
import contextlib
import errno
import resource
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import bounded_port
import msgspec
import pytest
from api_fakes import Script, says, world
from bounded_port import Opened, is_cut, opened

from loop_waits import until
from tandem.core.events import AbortRequested
from tandem.server.api import connections
from tandem.server.api.connections import (
    ENDING,
    SPARE_FDS,
    ConnectionBounds,
    api_bounds,
    raise_fd_limit,
    waited_s,
)
from tandem.server.api.http1 import MAX_HEAD_BYTES, Offers
from tandem.server.api.turn_limits import REQUESTS_PER_TURN
from tandem.server.router.app import RouterApp
from tandem.server.router.config import RouterConfig
from tandem.server.router.metrics import RouterMetrics

LONG = 3600.0
FILES = resource.RLIMIT_NOFILE
NUM_HELD = 8 * REQUESTS_PER_TURN
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Port(bounded_port.Port):
    def begin_to_end(self) -> None:
        self.server.should_exit = True

    def last_stays(self) -> list[bool]:
        """Of each connection, whether it is kept behind the last request that has begun to come."""
        connections: set[Any] = self.server.server_state.connections
        return [connection.cycle.keep_alive for connection in connections]

    def write_timers(self) -> list[asyncio.TimerHandle]:
        """Of each connection whose client does not read."""
        connections: set[Any] = self.server.server_state.connections
        return [one._write_timer for one in connections if one._write_timer is not None]

    async def has_ended(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.shield(self.task)

    async def ask(self, data: bytes) -> bytes:
        """The whole answer to one request on a connection of its own."""
        reader, writer = await self.open(data)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            length = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
            return head + await asyncio.wait_for(reader.readexactly(int(length[0].split(b":")[1])), 20)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving(app: Any, bounds: ConnectionBounds) -> AsyncIterator[Port]:
    async with opened(app, bounds, drain_seconds=int(LONG)) as port:
        yield Port(port.number, bounds, port.server, port.task)


def serves(story: Callable[[Port], Awaitable[None]], app: Any = None, **limits: Any) -> None:
    async def main() -> None:
        bounds = ConnectionBounds(
            **{"head_s": LONG, "body_s": LONG, "request_s": None, "write_s": LONG, "idle_s": LONG} | limits
        )
        async with serving(app or world().app, bounds) as port:
            await story(port)

    asyncio.run(main())


def generate(body: dict[str, Any], *, missing: int = 0, headers: str = "") -> bytes:
    """`missing`: so many bytes of the body are announced and do not come."""
    raw = msgspec.json.encode(body)
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: {len(raw) + missing}\r\n\r\n"
    return head.encode() + raw


def test_heads_that_do_not_come_lose_their_place_to_whoever_does() -> None:
    async def story(port: Port) -> None:
        held = [await port.open(b"POST /gen") for _ in range(40)]
        await until(lambda: port.bounds.num_refused or port.bounds.num_open == 8)
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")
        assert await is_cut(held[0][0])

    serves(story, max_connections=8)


def test_who_gives_way_before_its_first_head_is_there_is_told_why() -> None:
    async def story(port: Port) -> None:
        (first, _), _other = [await port.open(b"POST /gen") for _ in range(2)]
        await until(lambda: port.bounds.num_open == 2)
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")
        answer = await first.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert error_code(answer) == "busy"

    serves(story, max_connections=2)


def test_who_is_one_too_many_is_told_so_before_anything_of_it_is_read() -> None:
    async def story(port: Port) -> None:
        held = [await port.open() for _ in range(4)]
        await until(lambda: port.bounds.num_open == 4)
        answer = await port.ask(b"")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        assert (port.bounds.num_open, port.bounds.num_refused) == (4, 1)
        held[0][1].close()
        await until(lambda: port.bounds.num_open == 3)
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")

    serves(story, max_connections=4, patience_s=LONG)


def test_who_sends_a_whole_request_and_is_one_too_many_can_read_why() -> None:
    """Its bytes are not read; a connection that is closed over them would be reset, and the answer be lost."""

    async def story(port: Port) -> None:
        held = await port.open()
        await until(lambda: port.bounds.num_open == 1)
        for _ in range(20):
            answer = await port.ask(generate({"text": "x" * 30_000}))
            assert answer.startswith(b"HTTP/1.1 503")
        held[1].close()
        await until(lambda: not port.bounds.lingering)

    serves(story, max_connections=1, patience_s=LONG)


def test_how_long_the_refused_have_waited_is_told_but_of_those_who_are_waited_for() -> None:
    waited: list[float | None] = []

    async def story(port: Port) -> None:
        held = await port.open()
        await until(lambda: port.bounds.num_open == 1)
        for _ in range(3):
            await port.ask(b"")
        assert None not in waited
        assert len(waited) == 3
        port.bounds.patience_s = 0.0
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")  # in the place of who has not asked
        assert (port.bounds.num_refused, waited[3:]) == (4, [None])
        held[1].close()

    serves(story, max_connections=1, patience_s=LONG, refused=waited.append)
    assert all(0 <= seconds < 20 for seconds in waited if seconds is not None)


def test_the_kernel_says_how_long_bytes_have_waited_where_nobody_had_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        began = time.monotonic()
        client.sendall(b"x")
        select.select([], [], [], 0.1)
        link, _ = listener.accept()
        with link:
            waited, passed = waited_s(link), time.monotonic() - began
    assert waited is not None
    assert 0.05 <= waited <= passed + 0.05


def error_code(answer: bytes) -> str:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_where_as_many_requests_are_under_way_as_may_one_more_is_refused_by_its_head_alone() -> None:
    async def story(port: Port) -> None:
        held = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        answer = await port.ask(generate({"text": "x"}, missing=1 << 20))  # the rest of its body never comes
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        assert error_code(answer) == "busy"
        assert (port.bounds.num_requests, port.bounds.num_refused) == (1, 1)
        held[1].close()
        await until(lambda: port.bounds.num_requests == port.bounds.num_open == 0)
        assert (await port.ask(generate({"text": ""}))).startswith(b"HTTP/1.1 400")
        assert port.bounds.num_requests == 0

    serves(story, max_requests=1)


def test_probes_and_operators_are_answered_by_who_is_full() -> None:
    async def story(port: Port) -> None:
        _held = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        for path in ("/health", "/metrics", "/ready?x=y"):
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            assert (await port.ask(head.encode())).startswith(b"HTTP/1.1 200")
        abort = b'{"rid":"x"}'
        head = f"POST /abort_request HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(abort)}\r\n\r\n"
        assert (await port.ask(head.encode() + abort)).startswith(b"HTTP/1.1 200")
        assert (await port.ask(HEALTH.replace(b"/health", b"/v1/models"))).startswith(b"HTTP/1.1 503")

    serves(story, max_requests=1)


def test_who_was_let_in_and_is_refused_by_its_head_is_closed_once_its_body_is_there_and_not_reset() -> None:
    async def story(port: Port) -> None:
        _held = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        for _ in range(connections.MAX_LINGERING + 1):
            reader, writer = await port.open()
            await until(lambda: port.bounds.num_open == 2)
            writer.write(generate({"text": "x"}))
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
            await until(lambda: port.bounds.num_open == 1)
        assert not port.bounds.lingering
        await until(lambda: port.bounds.num_open == 1)

    serves(story, max_requests=1)


def test_who_sends_a_head_that_is_too_large_has_time_to_read_why() -> None:
    """What it still sends would reset a connection that is closed, and the answer could be lost."""

    async def story(port: Port) -> None:
        reader, writer = await port.open(b"GET /health HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES))
        await until(lambda: port.bounds.lingering)
        assert port.bounds.num_open == 0
        writer.write_eof()
        assert (await reader.read()).startswith(b"HTTP/1.1 431")
        await until(lambda: not port.bounds.lingering)

    serves(story)


def test_who_is_answered_before_its_body_is_there_has_time_to_read_it() -> None:
    """Behind which its connection ends: `Connection: close`, as Python's urllib says, or HTTP/1.0."""

    async def story(port: Port) -> None:
        head = b"POST /nowhere HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n"
        reader, writer = await port.open(head)
        await until(lambda: port.bounds.lingering)
        assert (port.bounds.num_open, port.bounds.num_requests) == (0, 0)
        writer.write(b"{}")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()
        await until(lambda: not port.bounds.lingering)
        assert (await port.ask(head.replace(b"Length: 2", b"Length: 0"))).startswith(b"HTTP/1.1 404")
        assert not port.bounds.lingering

    serves(story)


def test_who_speaks_an_older_http_reads_a_stream_without_chunks_until_its_connection_ends() -> None:
    it = world(says("hello"))

    async def story(port: Port) -> None:
        request = generate({"text": "x", "stream": True})
        newer, writer = await port.open(request)
        assert b"\r\ntransfer-encoding: chunked\r\n" in await newer.readuntil(b"\r\n\r\n")
        writer.close()
        older, _writer = await port.open(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await asyncio.wait_for(older.read(), 20)).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        assert lines[0] == b"http/1.1 200 ok"
        assert not [line for line in lines if line.startswith((b"transfer-encoding", b"content-length"))]
        events = body.removesuffix(b"\n\n").split(b"\n\n")
        assert len(events) > 1
        assert events[-1] == b"data: [DONE]"
        texts = [msgspec.json.decode(event.removeprefix(b"data: "))["text"] for event in events[:-1]]
        assert texts[-1] == "hello"

    serves(story, it.app)


def test_who_speaks_an_older_http_is_told_a_length_that_is_known() -> None:
    async def story(port: Port) -> None:
        for path in (b"/health", b"/v1/models"):  # the end of the connection is what is read up to
            head = b"GET %s HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" % path
            reader, _writer = await port.open(head)
            answer, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"content-length: %d" % len(body) in answer.lower()

    serves(story)


def test_no_refusal_stands_in_the_middle_of_an_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def story(port: Port) -> None:
        reader, writer = await port.open(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"begun\r\n")
        writer.write(b"no HTTP\r\n\r\n")
        assert await reader.read() == b""

    serves(story, app)


def test_who_leaves_while_another_request_waits_behind_the_first_leaves_the_first() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body", "body": b""})
        heard.append(scope["path"])

    async def story(port: Port) -> None:
        reader, writer = await port.open(b"".join(b"GET /%d HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % i for i in range(2)))
        await reader.readuntil(b"begun\r\n")
        writer.transport.abort()
        await until(lambda: heard and not port.bounds.num_requests)
        assert heard == ["/0"]

    serves(story, app)


@pytest.mark.parametrize("offer", [b"TLS/1.2", b"websocket", b"h2c, foo/2", b"h2c"])
def test_who_offers_another_protocol_is_answered_in_this_one_and_can_go_on(offer: bytes) -> None:
    """As Apache's client does with each GET, whose connection it keeps, and Java's own with its first request."""

    async def story(port: Port) -> None:
        reader, writer = await port.open()
        offers = b"Connection: Upgrade\r\nUpgrade: " + offer + b"\r\n"
        asked = generate({"text": "x"}, headers=offers.decode())
        for data, num_answers in ((HEALTH[:-2] + offers + b"\r\n", 1), (asked, 1), (asked + HEALTH, 2)):
            writer.write(data)
            for _ in range(num_answers):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                assert head.startswith(b"HTTP/1.1 200")
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.close()

    serves(story)


def test_offers_are_made_unreadable_however_they_come() -> None:
    """And nothing changes its length: what is counted as a body by one must not be a request for another."""
    head = b"GET / HTTP/1.1\r\nUPGRADE: h2c\r\nx-upgrade: a\r\nUpgrade:b\r\nupgraded: c\r\nupgrade\r\n\r\n"
    hidden = b"GET / HTTP/1.1\r\nUPGRADx: h2c\r\nx-upgrade: a\r\nUpgradx:b\r\nupgraded: c\r\nupgrade\r\n\r\n"
    for size in range(1, len(head) + 1):
        offers = Offers()
        pieces = [head[start : start + size] for start in range(0, len(head), size)]
        assert b"".join(map(offers.hidden, pieces)) == hidden


def test_a_body_with_offers_is_as_long_as_it_is() -> None:
    body = b"\r\nupgrade:" * 20 + HEALTH

    async def story(port: Port) -> None:
        head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        reader, writer = await port.open(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(-1), 20)
        assert answer.count(b"HTTP/1.1") == 1

    serves(story)


def test_a_tunnel_is_refused_and_its_connection_ends() -> None:
    """What follows CONNECT is no HTTP, so nobody may wait for an answer to it."""

    async def story(port: Port) -> None:
        reader, _writer = await port.open(b"CONNECT /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HEALTH)
        answer = await asyncio.wait_for(reader.read(-1), 20)
        assert answer.startswith(b"HTTP/1.1 405")
        assert answer.count(b"HTTP/1.1") == 1

    serves(story)


def test_what_stands_in_a_trailer_is_no_header() -> None:
    seen: list[list[bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([name for name, _ in scope["headers"]])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def story(port: Port) -> None:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        trailing = head + b"1\r\nx\r\n0\r\nAuthorization: Bearer key\r\n\r\n"
        reader, _writer = await port.open(trailing + HEALTH)
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert seen == [[b"host", b"transfer-encoding"], [b"host"]]

    serves(story, app)


def test_a_request_that_comes_behind_another_one_waits_for_its_turn_to_be_refused() -> None:
    """Said earlier, it would stand in the middle of the answer that is under way."""

    async def story(port: Port) -> None:
        reader, _writer = await port.open(generate({"text": ""}) + generate({"text": ""}))
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        await until(lambda: port.bounds.num_requests == 0)

    serves(story, max_requests=1)


def test_what_waits_for_its_turn_counts_and_neither_probes_nor_refusals_stand_behind_it() -> None:
    """One turn at a time: nothing that the client does in between takes a turn of the server's loop."""

    async def story(port: Port) -> None:
        opened = [await port.open() for _ in range(NUM_HELD + 2)]
        await until(lambda: port.bounds.num_open == len(opened))
        *asking, (_, refused), (_, probing) = opened
        for _, writer in asking:
            writer.write(generate({"text": "x"}, missing=1))
        probing.write(HEALTH)
        refused.write(generate({"text": "x"}, missing=1))
        await until(lambda: port.bounds.turns)
        assert len(port.bounds.turns) + port.bounds.num_requests <= NUM_HELD
        assert (await opened[-2][0].readline()).startswith(b"HTTP/1.1 503")
        assert (await opened[-1][0].readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: port.bounds.num_requests == NUM_HELD)
        for _, writer in asking:
            writer.close()
        await until(lambda: port.bounds.num_requests == 0)

    serves(story, max_requests=NUM_HELD)


def test_who_leaves_while_it_waits_for_its_turn_leaves_its_place() -> None:
    async def story(port: Port) -> None:
        port.bounds.turns.take = lambda: False
        _, writer = await port.open(generate({"text": "x"}))
        await until(lambda: port.bounds.turns)
        assert not port.bounds.waiting
        next(iter(port.bounds.turns._held)).cut()  # type: ignore[attr-defined]  # a connection
        await until(lambda: not port.bounds.turns)
        assert port.bounds.num_open == 0
        writer.close()

    serves(story)


def test_who_has_waited_for_its_turn_and_cannot_be_read_is_not_kept_longer_than_others() -> None:
    async def story(port: Port) -> None:
        opened = [await port.open() for _ in range(NUM_HELD)]
        await until(lambda: port.bounds.num_open == len(opened))
        for _, writer in opened:
            writer.write(b"no HTTP")
        for reader, _ in opened:
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400")
        await until(lambda: not port.bounds.num_open)

    serves(story)


def test_the_router_refuses_by_the_head_alone_too() -> None:
    async def story(port: Port) -> None:
        _held = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        assert error_code(await port.ask(generate({"text": "x"}, missing=10))) == "busy"
        assert (await port.ask(HEALTH)).startswith(b"HTTP/1.1 200")

    metrics = RouterMetrics()
    serves(story, RouterApp(RouterConfig(workers=())).app, max_requests=1, refused=metrics.see_refused_at_door)
    assert metrics.registry.get_sample_value("tandem:router_failures_total", {"cause": "busy"}) == 1
    assert metrics.registry.get_sample_value("tandem:router_refusal_seconds_count") == 1


def test_a_body_that_stands_still_ends_its_connection() -> None:
    async def story(port: Port) -> None:
        reader, _ = await port.open(generate({"text": "x"}, missing=10))
        assert await is_cut(reader)
        await until(lambda: port.bounds.num_open == 0)

    serves(story, body_s=0.05)


def test_a_port_ends_although_a_client_has_been_reset_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_transport: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def story(port: Port) -> None:
        _held = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", gone)
        port.begin_to_end()
        await port.has_ended()

    serves(story)


def test_a_port_that_ends_waits_for_no_body_and_says_so() -> None:
    app = RouterApp(RouterConfig(workers=())).app

    async def story(port: Port) -> None:
        reader, writer = await port.open(generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        port.begin_to_end()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 503")
        assert error_code(answer) == "draining"
        writer.close()
        await port.has_ended()

    serves(story, app)


def test_a_port_that_ends_gives_the_answer_that_stands_before_a_body_that_has_not_come() -> None:
    goes_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    async def story(port: Port) -> None:
        reader, writer = await port.open(HEALTH + generate({"text": "x"}, missing=10))
        await until(lambda: port.bounds.num_requests == 1)
        port.begin_to_end()
        await until(lambda: not any(port.last_stays()))
        goes_on.set()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\n\r\ndone" + ENDING in answer
        writer.close()
        await port.has_ended()

    serves(story, app)


def test_a_body_that_does_not_come_by_its_deadline_is_answered() -> None:
    async def story(port: Port) -> None:
        answer = await port.ask(generate({"text": "x"}, missing=10, headers="X-Request-Timeout-Ms: 50\r\n"))
        assert answer.startswith(b"HTTP/1.1 504")
        error = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["code"], "body" in error["message"]) == ("deadline_exceeded", True)
        assert 0 < error["waited_seconds"] <= 0.05

    serves(story)


def test_a_body_that_does_not_come_to_the_router_by_its_deadline_is_answered() -> None:
    app = RouterApp(RouterConfig(workers=())).app

    async def story(port: Port) -> None:
        answer = await port.ask(generate({"text": "x"}, missing=10, headers="X-Request-Timeout-Ms: 50\r\n"))
        assert answer.startswith(b"HTTP/1.1 504")
        error = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["stage"] == "router"
        assert 0 < error["waited_seconds"] <= 0.05

    serves(story, app)


def test_the_time_that_a_body_takes_to_come_to_the_router_is_none_of_what_is_left() -> None:
    app = RouterApp(RouterConfig(workers=())).app

    async def story(port: Port) -> None:
        raw = generate({"text": "x", "timeout": 0.02})
        reader, writer = await port.open(raw[:-1])
        await asyncio.sleep(0.1)
        writer.write(raw[-1:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 504")

    serves(story, app)


async def unread(port: Port, request: bytes) -> Opened:
    """A client with a small window that never reads."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port.number))
    reader, writer = await asyncio.open_connection(sock=raw)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
    writer.write(request)
    return reader, writer  # which is closed once nobody holds it


def test_an_answer_that_nobody_reads_ends_its_connection() -> None:
    async def story(port: Port) -> None:
        _held = await unread(port, HEALTH)
        await until(lambda: port.bounds.num_open == 1)
        await until(lambda: port.bounds.num_open == 0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b" " * (1 << 16), "more_body": True})

    serves(story, app, write_s=0.05)


def test_a_stream_that_nobody_reads_is_aborted_at_its_node() -> None:
    it = world(lambda request, payload: Script([5] * 200_000), context_length=1 << 20, stall_timeout=0.2)

    async def story(port: Port) -> None:
        _held = await unread(
            port, generate({"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 200_000}})
        )
        await until(lambda: it.node.sent)
        assert [type(message) for message in it.node.sent] == [AbortRequested]
        await until(lambda: it.client.num_live == 0)
        await until(lambda: port.bounds.num_open == 0)

    serves(story, it.app)


def test_an_answer_that_is_read_again_in_time_has_all_of_that_time_again() -> None:
    async def story(port: Port) -> None:
        reader, writer = await unread(port, HEALTH)
        await until(port.write_timers)
        (timer,) = port.write_timers()
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # asyncio types it as one that only writes
        while not timer.cancelled():
            assert await asyncio.wait_for(reader.read(1 << 16), 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b" " * (1 << 16), "more_body": True})

    serves(story, app, write_s=LONG)


def test_a_stream_that_is_read_is_not_bounded_by_what_bounds_others() -> None:
    it = world(says("hello"))

    async def story(port: Port) -> None:
        reader, writer = await port.open(generate({"text": "x", "stream": True}))
        assert (await asyncio.wait_for(reader.readuntil(b"[DONE]"), 20)).startswith(b"HTTP/1.1 200")
        writer.close()

    serves(story, it.app, body_s=0.01)


def test_the_number_of_connections_fits_the_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, each, most in ((64, 1, 16), (1024, 1, 896), (1024, 3, 298), (1 << 20, 1, 4096), (-1, 3, 4096)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda what, soft=soft: (soft, soft))
        bounds = api_bounds(max_requests=1 << 20, fds_each=each)
        assert bounds.max_connections == most
        assert bounds.max_requests is not None
        assert 0 < bounds.max_requests < most  # probes have a way in when it is full


def test_who_is_refused_may_read_why_wherever_there_are_file_descriptors_to_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, most in ((64, 256), (4096, 256), (6000, 6000 - SPARE_FDS - 4096), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda what, soft=soft: (soft, soft))
        assert api_bounds(max_requests=1 << 20).max_lingering == most


def test_as_many_files_may_be_open_as_the_system_lets_us() -> None:
    soft, hard = resource.getrlimit(FILES)
    resource.setrlimit(FILES, (min(soft, 1024), hard))
    try:
        raise_fd_limit()
        assert resource.getrlimit(FILES) == (hard, hard)
    finally:
        resource.setrlimit(FILES, (soft, hard))
