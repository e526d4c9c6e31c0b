"""Bootstrap documents, in both directions: what a bootstrap server is sent, and what one answers.

bootstrap_server    raw bytes of a client; most writes are signed as a member of the cluster would
bootstrap_answers   raw bytes of a bootstrap server that some request has named, on their way to worker and node
replica_document    the document alone
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec
from engine import Run, Target
from mutators import BLANK, mutate_http, mutate_json

from core_driver import World, assert_nothing_is_held
from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.events import DpRankAnswered, Event, PeerLearned, PeerLost, PeerUnknown
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, Address, Cut, Incarnation, Nanos, Room
from tandem.membership import ClusterSecret
from tandem.server import wire
from tandem.server.api import http_exchange
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.bootstrap import BootstrapServer
from tandem.server.api.bootstrap_client import BootstrapClient
from tandem.server.api.bootstrap_questions import registration
from tandem.server.api.cluster_auth import WriteGuard, signed_headers
from tandem.server.api.connections import ConnectionBounds
from tandem.server.channel import FrameDecoder, frame
from tandem.server.documents import BadDocument, read_ranks, read_replica
from targets.http import Broken, Refused, Served, check_served, new_loop, request, until
from targets.http_router import answer

SECRET = ClusterSecret(b"what all members know")
ENDS = (wire.DataEndpoint("127.0.0.1", 6001), wire.DataEndpoint("127.0.0.1", 6002, "@tandem"))
NOW = Nanos(1_000 * SECOND)
ASKED = Address("127.0.0.1", 8998)
ROOMS = (Room(11), Room((1 << 62) + 5))


def replica(rank: int = 0, *, of: int = 1, life: int = 1, **changes: Any) -> wire.ReplicaInfo:
    who = Incarnation(f"prefill {rank}", f"{life:032x}")
    prefill = PrefillInfo(dp_size=of)
    fields = {"model": "Llama", "page_size": "16"}
    made = wire.ReplicaInfo(who, "prefill", "abc", fields, "127.0.0.1", 6000, ENDS, 30000, rank, prefill)
    return msgspec.structs.replace(made, **changes)


def packed(document: object) -> bytes:
    return msgspec.json.encode(document)


# --- a server --------------------------------------------------------------------------------------------------------


class Server:
    """Of a prefill with two ranks, one of them its own. A new one for each input: registrations are remembered."""

    def __init__(self) -> None:
        self._loop = new_loop()

    def __call__(self, data: bytes) -> None:
        registry, guard = BootstrapRegistry(), WriteGuard(SECRET, now=lambda: NOW)
        own = registration(replica(0, of=2))
        registry.register(own, is_own=True)
        registry.register(registration(replica(1, of=2, life=2)))
        served = Served(
            BootstrapServer(registry, guard, now=lambda: NOW).app(), self._loop, protocol=ConnectionBounds().protocol()
        )
        if crc32(data) % 8:
            data = signed(data, guard.challenge())
        statuses = served.answer(data)
        found = registry.find(0)
        if found is not None and found.document != own.document:
            raise Broken(f"its own rank was replaced: {found.document[:300]!r}")
        check_served(statuses)


def signed(data: bytes, challenge: str) -> bytes:
    """With the proof that a member would send along."""
    head, blank, body = data.partition(BLANK)
    words = head.split(b"\r\n")[0].split(b" ")
    method, target = (words[0], words[1]) if len(words) > 1 else (b"PUT", b"/route")
    headers = signed_headers(
        SECRET, method=method.decode("latin-1"), target=target.decode("latin-1"), challenge=challenge, body=body
    )
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items())
    return head + lines.encode() + blank + body


def server_seeds() -> Mapping[str, bytes]:
    return {
        "put_other_rank": request("PUT", "/route", packed(replica(1, of=2, life=4))),
        "put_own_rank": request("PUT", "/route", packed(replica(0, of=2, life=3))),
        "put_same": request("PUT", "/route", packed(replica(0, of=2))),
        "announce": request("POST", "/register_dp_rank", {"bootstrap_room": str(ROOMS[1]), "dp_rank": 1}),
        "query": request("POST", "/query_dp_ranks", {"bootstrap_rooms": [ROOMS[0], str(ROOMS[1])]}),
        "get": request("GET", "/route"),
        "get_rank": request("GET", "/route?prefill_dp_rank=1"),
        "get_any": request("GET", "/route?prefill_dp_rank=-1"),
        "challenge": request("GET", "/challenge"),
        "health": request("GET", "/health"),
    }


# --- a client --------------------------------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A connection on which everything is taken and nothing is sent."""

    def abort(self) -> None:
        pass


@dataclass
class Writer:
    transport: Wire = field(default_factory=Wire)

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass


class Client:
    """A decode that asks a bootstrap server which says the same whatever it is asked."""

    def __init__(self) -> None:
        self._loop = new_loop()
        self._answer = b""
        http_exchange.asyncio = self  # type: ignore[assignment]  # in place of the module: only what follows is used
        self.timeout = asyncio.timeout

    async def open_connection(self, *_: object, **__: object) -> tuple[asyncio.StreamReader, Writer]:
        reader = asyncio.StreamReader()
        reader.feed_data(self._answer)
        reader.feed_eof()
        return reader, Writer()

    def __call__(self, data: bytes) -> None:
        self._answer = data
        reports: list[Any] = []
        self._loop.run_until_complete(self._ask(reports))
        learned = [report for report in reports if isinstance(report, PeerLearned | PeerUnknown)]
        told = [report for report in reports if isinstance(report, DpRankAnswered)]
        if {report.address for report in learned} != {ASKED} or len(told) != len(ROOMS):
            raise Broken(f"asked once, and told {reports}")
        if sum(isinstance(report, PeerLearned) for report in learned) > 1:
            raise Broken(f"learned twice: {learned}")
        tell_node(arrived(reports))

    async def _ask(self, reports: list[Any]) -> None:
        client = BootstrapClient(AllowedHosts(), own=lambda: replica(life=9), report=reports.append, interval_s=0.0)
        client.learn(ASKED, None)
        for room in ROOMS:
            client.ask_rank(ASKED, room)
        await until(lambda: client._questions.next_deadline() is None, lambda: client._tasks)
        await client.close()


def arrived(reports: list[Any]) -> list[Any]:
    """At the node, and what it tells its worker at the worker."""
    at_node: list[Any] = []
    node, worker = FrameDecoder[Any](wire.ApiToNode), FrameDecoder[Any](wire.NodeToWorker)
    for report in reports:
        at_node += node.feed(frame(report))
        if isinstance(report, wire.Connect):
            list(
                worker.feed(
                    frame(
                        wire.Reach(report.replica.incarnation, Cut(len(report.replica.shards)), report.replica.shards)
                    )
                )
            )
    return at_node


def tell_node(events: list[Any]) -> None:
    """A decode's node with a request for that address takes it all, and the request ends."""
    world = World()
    decode = world.decode()
    world.directory.clear()
    world.submit(decode, room=11, peer=ASKED, timeout_ns=20 * SECOND)
    world.run()
    world.step(decode, [event for event in events if isinstance(event, Event)])
    known = {event.peer for event in events if isinstance(event, PeerLearned)}
    world.step(decode, [PeerLost(peer) for peer in known])
    world.advance(60 * SECOND)
    assert_nothing_is_held(decode)


def answer_seeds() -> Mapping[str, bytes]:
    ranks = {str(room): rank for rank, room in enumerate(ROOMS)}
    other_layout = replica(layout="other", layout_fields={"model": "Qwen", "dtype": "float32"})
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    return {
        "replica": answer(200, packed(replica())),
        "rank": answer(200, packed(replica(1, of=2))),
        "everywhere": answer(200, packed(replica(control_host="0.0.0.0"))),
        "other_layout": answer(200, packed(other_layout)),
        "ranks": answer(200, packed(ranks)),
        "not_ready": answer(503, {"error": {"code": "not_ready", "message": "m"}}),
        "chunked": chunked,
        "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(200, packed(replica())),
    }


def documents() -> Run:
    def run(data: bytes) -> None:
        refused: list[BadDocument] = []
        for read in (read_replica, read_some_ranks):
            try:
                check_document(read, data)
            except BadDocument as bad:
                refused.append(bad)
        if len(refused) == 2:
            if any("\n" in str(bad) or len(str(bad)) > 1_000 for bad in refused):
                raise Broken(f"not one short line: {str(refused[0])[:500]!r}")
            raise refused[0]

    return run


def check_document(read: Callable[[bytes], Any], data: bytes) -> None:
    document = read(data)
    if isinstance(document, wire.ReplicaInfo):
        assert document.shards
        assert 0 < document.control_port < 1 << 16
        assert all(0 < shard.port < 1 << 16 for shard in document.shards)
        list(FrameDecoder[Any](wire.ApiToNode).feed(frame(wire.Connect(ASKED, document))))


def read_some_ranks(data: bytes) -> dict[Room, int]:
    return read_ranks(data, ROOMS)


def document_seeds() -> Mapping[str, bytes]:
    ranks = {str(room): rank for rank, room in enumerate(ROOMS)}
    return {"replica": packed(replica()), "rank": packed(replica(1, of=2)), "ranks": packed(ranks)}


def bootstrap_server() -> Run:
    return Server()


def bootstrap_answers() -> Run:
    return Client()


TARGETS = (
    Target("bootstrap_server", bootstrap_server, mutate_http, 1_000, answers=(Refused,), seeds=server_seeds),
    Target("bootstrap_answers", bootstrap_answers, mutate_http, 700, seeds=answer_seeds),
    Target("replica_document", documents, mutate_json, 5_000, answers=(BadDocument,), seeds=document_seeds),
)
