"""Decode's questions to bootstrap servers that answer anything, or nothing: that address pays for it, and no other."""

import asyncio
import gzip
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_network
from typing import Any

import msgspec
import pytest
from api_fakes import REPLICA

from loop_waits import until
from tandem.core import events
from tandem.core.settings import LoadBalanceMethod, PrefillInfo
from tandem.core.values import SECOND, ZERO_NS, Address, Incarnation, Nanos, Room
from tandem.server import wire
from tandem.server.api import bootstrap_client
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.bootstrap_client import BootstrapClient
from tandem.server.api.http_exchange import MAX_ANSWER_BYTES, ExchangeError, exchange
from tandem.server.api.question_lanes import Lanes

PREFILL = wire.ReplicaInfo(
    Incarnation("p", "3" * 32), "prefill", "abc", {}, "127.0.0.1", 5, (wire.DataEndpoint("127.0.0.1", 6),)
)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Event = wire.Connect | events.PeerLearned | events.PeerUnknown | events.DpRankAnswered


def ok(body: bytes, *headers: str) -> bytes:
    lines = ("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + body


GENUINE = ok(msgspec.json.encode(PREFILL))


def says(data: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)

    return serve


def says_for_ever(head: bytes, again: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(again * 1000)
            await writer.drain()

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the other side leaves


@asynccontextmanager
async def server(serve: Serve, host: str = "127.0.0.1", port: int = 0) -> Any:
    """The address of one that serves every connection like this."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(guarded, host, port)
    try:
        yield Address(host, listening.sockets[0].getsockname()[1])
    finally:
        listening.close()


class Asker:
    """A client and what it reports."""

    def __init__(self, **settings: Any) -> None:
        self.found: list[Event] = []
        self.it = BootstrapClient(AllowedHosts(), own=lambda: REPLICA, report=self.found.append, **settings)

    async def learned(self, address: Address, dp_rank: int | None = None) -> list[Event]:
        """What one question brings."""
        self.found.clear()
        self.it.learn(address, dp_rank)
        await until(lambda: any(not isinstance(event, wire.Connect) for event in self.found))
        return list(self.found)


def asks(story: Callable[[Asker], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        asker = Asker(**settings)
        try:
            await story(asker)
        finally:
            await asker.it.close()

    asyncio.run(main())


def changed(**changes: Any) -> bytes:
    return ok(msgspec.json.encode(msgspec.structs.replace(PREFILL, **changes)))


# --- what is answered ------------------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[bytes, str]] = {
    "no shards": (changed(shards=()), "shards: must name at least one"),
    "a port of 10^30": (changed(control_port=10**30), "control_port: "),
    "a shard's port of 10^30": (changed(shards=(wire.DataEndpoint("127.0.0.1", 10**30),)), "shards[0].port: "),
    "decode": (changed(role="decode"), "role: "),
    "a short id": (changed(incarnation=Incarnation("p", "3")), "incarnation.id: "),
    "a name of two lines": (changed(incarnation=Incarnation("p\nERROR", "3" * 32)), "incarnation.name: "),
    "nested": (ok(b'{"x":' + b"[" * 100_000), "it is not valid JSON"),
    "no UTF-8": (ok(b'{"role":"\xff"}'), "it is not valid JSON"),
    "another network": (changed(control_host="192.0.2.1"), "control_host: '192.0.2.1' is not 127.0.0.1"),
    "KV in another network": (changed(shards=(wire.DataEndpoint("192.0.2.1", 6),)), "shards[0].host: '192.0.2.1'"),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n", "answered 302"),
    "compressed": (ok(gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip"), "the answer is compressed"),
    "too long": (ok(b" " * MAX_ANSWER_BYTES), f"longer than {MAX_ANSWER_BYTES} bytes"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.0\r\n\r\n", "is not HTTP/1.1"),
    "no end": (b"HTTP/1.1 200 OK\r\n\r\n" + msgspec.json.encode(PREFILL), "closed before the answer had ended"),
    "half": (GENUINE[:-5], "closed before the answer had ended"),
    "a length that is none": (b"HTTP/1.1 200 OK\r\nContent-Length: 9e9\r\n\r\n", "is not HTTP/1.1"),
    "another protocol": (b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "is not HTTP/1.1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_is_an_unknown_peer_with_the_reason_in_one_line(case: str) -> None:
    data, reason = HOSTILE[case]

    async def story(asker: Asker) -> None:
        async with server(says(data)) as address:
            (unknown,) = await asker.learned(address)
            assert isinstance(unknown, events.PeerUnknown)
            assert reason in unknown.detail
            assert unknown.detail.isprintable()
            assert len(unknown.detail) < 400

    asks(story)


@pytest.mark.parametrize(
    ("head", "again"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"X: x\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x"),
    ],
    ids=["100 Continue", "one header", "headers", "chunks", "a body"],
)
def test_an_answer_without_end_is_cut_at_the_bound(head: bytes, again: bytes) -> None:
    async def story(asker: Asker) -> None:
        async with server(says_for_ever(head, again)) as address:
            (unknown,) = await asker.learned(address)
            assert isinstance(unknown, events.PeerUnknown)
            assert f"longer than {MAX_ANSWER_BYTES} bytes" in unknown.detail

    asks(story, answer_s=3600.0)


def test_any_exception_while_an_answer_is_read_is_an_unknown_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(raw: bytes) -> wire.ReplicaInfo:
        raise MemoryError

    monkeypatch.setattr(bootstrap_client, "read_replica", explode)

    async def story(asker: Asker) -> None:
        async with server(says(GENUINE)) as address:
            (unknown,) = await asker.learned(address)
            assert isinstance(unknown, events.PeerUnknown)
            assert "cannot be read (MemoryError)" in unknown.detail

    asks(story)


def test_a_1xx_before_the_answer_and_bytes_behind_it_change_nothing() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + GENUINE + b"HTTP/1.1 500 poison\r\n\r\n"

    async def story(asker: Asker) -> None:
        async with server(says(data)) as address:
            for _ in range(3):
                assert [type(event) for event in await asker.learned(address)] == [wire.Connect, events.PeerLearned]

    asks(story)


def test_what_one_address_says_of_a_life_changes_nothing_of_what_another_says() -> None:
    forged = changed(shards=(wire.DataEndpoint("127.0.0.1", 7),), prefill=PrefillInfo(2))

    async def story(asker: Asker) -> None:
        async with server(says(forged)) as false, server(says(GENUINE)) as genuine:
            for _ in range(2):
                for address, shards in ((genuine, PREFILL.shards), (false, (wire.DataEndpoint("127.0.0.1", 7),))):
                    connect, learned = await asker.learned(address)
                    assert isinstance(connect, wire.Connect)
                    assert isinstance(learned, events.PeerLearned)
                    assert (connect.address, connect.replica.shards) == (address, shards)
                    assert (learned.address, learned.peer) == (address, PREFILL.incarnation)

    asks(story)


def test_peers_may_be_where_bodies_may_send_us() -> None:
    async def story(asker: Asker) -> None:
        asker.it.hosts = AllowedHosts(networks=(ip_network("192.0.2.0/24"),))
        async with server(says(changed(control_host="192.0.2.1"))) as address:
            connect, _ = await asker.learned(address)
            assert isinstance(connect, wire.Connect)
            assert connect.replica.control_host == "192.0.2.1"

    asks(story)


@pytest.mark.parametrize(
    "body", [b"[]", b'{"7": -1}', b'{"7": 1e30}', b'{"7": true}', b'{"x": 1}', b'{"7":' + b"9" * 5000 + b"}"]
)
def test_a_hostile_answer_about_rooms_answers_the_room_with_nothing(body: bytes) -> None:
    async def story(asker: Asker) -> None:
        async with server(says(ok(body))) as address:
            asker.it.ask_rank(address, Room(7))
            await until(lambda: len(asker.found) == 2)
            assert isinstance(asker.found[0], events.PeerUnknown)
            assert asker.found[1] == events.DpRankAnswered(address, Room(7), None)

    asks(story)


def test_ranks_of_rooms_that_nobody_asked_for_are_not_taken() -> None:
    async def story(asker: Asker) -> None:
        async with server(says(ok(b'{"7":1,"8":0}'))) as address:
            asker.it.ask_rank(address, Room(7))
            await until(lambda: asker.found)
            assert asker.found == [events.DpRankAnswered(address, Room(7), 1)]

    asks(story)


def test_with_the_ranks_of_rooms_comes_what_the_prefill_says_of_itself() -> None:
    async def story(asker: Asker) -> None:
        headers = 'X-Tandem-Prefill: {"dp_size":3,"method":"round_robin"}', "X-Tandem-Age-Ns: 5"
        async with server(says(ok(b"{}", "\r\n".join(headers)))) as address:
            asker.it.ask_rank(address, Room(7))
            await until(lambda: asker.found)
            prefill = PrefillInfo(3, LoadBalanceMethod.ROUND_ROBIN)
            assert asker.found == [events.DpRankAnswered(address, Room(7), None, prefill, Nanos(5))]

    asks(story)


@pytest.mark.parametrize(
    "said",
    [
        *(
            f"X-Tandem-Prefill: {said}"
            for said in ("{", "7", '{"dp_size":0}', '{"dp_size":100000}', '{"method":"by_mood"}', "[" * 9000)
        ),
        *(f"X-Tandem-Age-Ns: {said}" for said in ("", "-1", "1e3", "9" * 19)),
    ],
)
def test_a_hostile_word_about_the_prefill_answers_the_room_with_nothing(said: str) -> None:
    async def story(asker: Asker) -> None:
        async with server(says(ok(b'{"7":1}', said))) as address:
            asker.it.ask_rank(address, Room(7))
            await until(lambda: len(asker.found) == 2)
            assert isinstance(asker.found[0], events.PeerUnknown)
            assert asker.found[1] == events.DpRankAnswered(address, Room(7), None)

    asks(story)


# --- who waits for whom ----------------------------------------------------------------------------------------------


def test_many_silent_addresses_delay_no_other_known_or_new() -> None:
    async def story(asker: Asker) -> None:
        async with AsyncExitStack() as stack:
            known = await stack.enter_async_context(server(says(GENUINE)))
            new = await stack.enter_async_context(server(says(GENUINE)))
            port = (await stack.enter_async_context(server(silent, "0.0.0.0"))).port
            await asker.learned(known)
            for number in range(300):
                asker.it.learn(Address(f"127.0.{1 + number // 250}.{1 + number % 250}", port), None)
            for address in (known, new):
                assert [type(event) for event in await asker.learned(address)] == [wire.Connect, events.PeerLearned]

    asks(story, answer_s=3600.0)  # so nobody's answer can have waited for the end of a silent one's question


def test_where_all_lanes_are_silent_a_known_address_is_asked_and_a_new_one_refused_at_once() -> None:
    async def story(asker: Asker) -> None:
        async with server(says(GENUINE)) as known, server(says(GENUINE)) as new, server(silent, "0.0.0.0") as quiet:
            await asker.learned(known)
            for number in range(4):
                asker.it.learn(Address(f"127.0.0.{2 + number}", quiet.port), None)
            assert isinstance((await asker.learned(known))[-1], events.PeerLearned)
            (refused,) = await asker.learned(new)
            assert isinstance(refused, events.PeerUnknown)
            assert "4 other bootstrap servers are being asked" in refused.detail

    asks(story, lanes=Lanes(max_unknown=4, patience_ns=Nanos(3600 * SECOND)), answer_s=3600.0)


def test_the_oldest_silent_address_makes_room_once_it_had_time_to_answer() -> None:
    async def story(asker: Asker) -> None:
        async with server(says(GENUINE)) as new, server(silent, "0.0.0.0") as quiet:
            oldest, younger = Address("127.0.0.2", quiet.port), Address("127.0.0.3", quiet.port)
            asker.it.learn(oldest, None)
            asker.it.learn(younger, None)
            await asyncio.sleep(0)
            asker.it.learn(new, None)
            await until(lambda: len(asker.found) == 3)
            assert {type(event).__name__: event.address for event in asker.found} == {
                "PeerUnknown": oldest,
                "Connect": new,
                "PeerLearned": new,
            }

    asks(story, lanes=Lanes(max_unknown=2, patience_ns=ZERO_NS), answer_s=3600.0)


def test_one_question_at_a_time_goes_to_an_address_and_its_silence_answers_all() -> None:
    connections: list[object] = []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")

    async def story(asker: Asker) -> None:
        async with server(counted) as address:
            for dp_rank in (None, 0, 1, 1, None):
                asker.it.learn(address, dp_rank)
            await until(lambda: len(asker.found) == 3)
            assert [event.dp_rank for event in asker.found if isinstance(event, events.PeerUnknown)] == [None, 0, 1]
        assert len(connections) == 3, "a server that closes the connection answers; it is asked for the others too"

    asks(story)

    async def silence(asker: Asker) -> None:
        async with server(silent) as address:
            for dp_rank in (None, 0, 1):
                asker.it.learn(address, dp_rank)
            await until(lambda: len(asker.found) == 3)
            assert {event.detail.partition(": ")[2] for event in asker.found} == {"no answer within 0.05 s"}  # type: ignore[union-attr]  # all are PeerUnknown

    asks(silence, answer_s=0.05)


def test_a_question_that_nobody_reads_ends_too() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        await asyncio.sleep(3600)

    async def story() -> None:
        listening = await asyncio.start_server(deaf, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(TimeoutError):
            await exchange("127.0.0.1", port, "POST", "/x", body=b"x" * (64 << 20), timeout_s=0.1)
        listening.close()

    asyncio.run(story())


def test_who_answers_before_the_question_was_sent_is_heard() -> None:
    """And closes with bytes unread, which resets the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}")

    threading.Thread(target=refuse, daemon=True).start()
    port = listener.getsockname()[1]
    body = b"x" * (16 << 20)  # more than the buffers of a connection take
    for _ in range(10):
        answer = asyncio.run(exchange("127.0.0.1", port, "PUT", "/x", body=body, timeout_s=20))
        assert (answer.status, answer.body) == (413, b"{}")
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_host_that_is_a_name_is_not_looked_up_here() -> None:
    async def story() -> None:
        with pytest.raises((OSError, ExchangeError)):
            await exchange("localhost", 9, "GET", "/", timeout_s=5)

    asyncio.run(story())
