"""The client of the node: learning peers, queries, late news, draining."""

import asyncio
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import msgspec
import pytest
import uvicorn
from api_fakes import REPLICA, FakeNode, says

from loop_waits import until
from tandem.core import commands, events
from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.settings import PrefillInfo
from tandem.core.values import Address, Cause, Incarnation, Room
from tandem.membership import ClusterSecret
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.bootstrap import BootstrapServer, monotonic_now
from tandem.server.api.bootstrap_client import BootstrapClient
from tandem.server.api.bootstrap_questions import registration
from tandem.server.api.client import NodeClient
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.errors import Refusal

ID, NEXT_ID = "3" * 32, "4" * 32
SECRET = ClusterSecret(b"a secret of the whole cluster")
PREFILL = wire.ReplicaInfo(
    Incarnation("p", ID), "prefill", "abc", {"dtype": "x"}, "127.0.0.1", 5, (wire.DataEndpoint("127.0.0.1", 6),)
)


def bootstrap_app(*replicas: wire.ReplicaInfo) -> tuple[Any, BootstrapRegistry]:
    """The bootstrap server of a prefill, on loopback, and what it has been told."""
    registry = BootstrapRegistry()
    for replica in replicas:
        registry.register(registration(replica))
    return BootstrapServer(registry, WriteGuard(SECRET, now=monotonic_now)).app(), registry


def client_and_node(*, is_ready: bool = True) -> tuple[NodeClient, FakeNode]:
    node = FakeNode(says("x"))
    node.client = client = NodeClient(node, stall_timeout=1.0)
    if is_ready:
        client.receive(wire.NodeReady(REPLICA, 10, 10))
    return client, node


async def serving(app: Any, story: Callable[[int], Any]) -> None:
    """Run `story(port)` while a real server serves `app`."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        await story(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task


def test_a_peer_is_learned_from_its_bootstrap_server_and_connected_before_it_is_named() -> None:
    client, node = client_and_node()

    async def story(port: int) -> None:
        address = Address("localhost", port)
        client.receive(commands.LearnPeer(address))
        client.receive(commands.LearnPeer(address))
        await until(lambda: len(node.sent) >= 2)
        differs = "dtype is x at prefill and not told at decode"
        assert node.sent == [
            wire.Connect(address, PREFILL),
            events.PeerLearned(address, Incarnation("p", ID), "abc", differs),
        ]
        await client.close()

    asyncio.run(serving(bootstrap_app(PREFILL)[0], story))


def test_a_peer_with_an_equal_layout_differs_in_nothing() -> None:
    client, node = client_and_node()
    twin = msgspec.structs.replace(PREFILL, layout=REPLICA.layout)

    async def story(port: int) -> None:
        client.receive(commands.LearnPeer(Address("127.0.0.1", port)))
        await until(lambda: len(node.sent) == 2)
        assert node.sent[1].differs == ""
        await client.close()

    asyncio.run(serving(bootstrap_app(twin)[0], story))


def test_a_restarted_peer_is_seen_at_the_next_question() -> None:
    client, node = client_and_node()
    app, registry = bootstrap_app(PREFILL)

    async def story(port: int) -> None:
        address = Address("127.0.0.1", port)
        for count in (2, 4):
            client.receive(commands.LearnPeer(address))
            await until(lambda count=count: len(node.sent) == count)
            registry.register(registration(msgspec.structs.replace(PREFILL, incarnation=Incarnation("p", NEXT_ID))))
        ids = [message.peer.id for message in node.sent if isinstance(message, events.PeerLearned)]
        assert ids == [ID, NEXT_ID]
        await client.close()

    asyncio.run(serving(app, story))


@pytest.mark.parametrize("replicas", [(), (REPLICA,)], ids=["not ready", "no prefill"])
def test_a_server_that_is_no_ready_prefill_is_unknown(replicas: tuple[wire.ReplicaInfo, ...]) -> None:
    client, node = client_and_node()

    async def story(port: int) -> None:
        client.receive(commands.LearnPeer(Address("127.0.0.1", port)))
        await until(lambda: node.sent)
        (message,) = node.sent
        assert isinstance(message, events.PeerUnknown)
        assert "503" in message.detail or "role" in message.detail
        await client.close()

    asyncio.run(serving(bootstrap_app(*replicas)[0], story))


def test_nobody_at_the_address_is_unknown_with_a_reason() -> None:
    client, node = client_and_node()

    async def story() -> None:
        for host in ("127.0.0.1", "::1", "no such host"):
            client.receive(commands.LearnPeer(Address(host, 9)))
        await until(lambda: len(node.sent) == 3)
        assert all(isinstance(message, events.PeerUnknown) and message.detail for message in node.sent)
        await client.close()

    asyncio.run(story())


def ranked(rank: int) -> wire.ReplicaInfo:
    """One of two DP ranks of a prefill."""
    return msgspec.structs.replace(
        PREFILL, incarnation=Incarnation(f"p{rank}", f"{rank:032x}"), dp_rank=rank, prefill=PrefillInfo(dp_size=2)
    )


def test_each_dp_rank_is_asked_for_by_its_number() -> None:
    client, node = client_and_node()

    async def story(port: int) -> None:
        address = Address("127.0.0.1", port)
        for rank in (None, 1, 0):
            client.receive(commands.LearnPeer(address, rank))
        await until(lambda: len(node.sent) == 6)
        learned = [message for message in node.sent if isinstance(message, events.PeerLearned)]
        assert sorted((message.dp_rank, message.peer.name) for message in learned) == [(0, "p0")] * 2 + [(1, "p1")]
        assert {message.prefill.dp_size for message in learned} == {2}
        await client.close()

    asyncio.run(serving(bootstrap_app(ranked(0), ranked(1))[0], story))


def test_a_dp_rank_that_is_not_there_is_unknown() -> None:
    client, node = client_and_node()

    async def story(port: int) -> None:
        client.receive(commands.LearnPeer(Address("127.0.0.1", port), 2))
        await until(lambda: node.sent)
        assert node.sent == [events.PeerUnknown(Address("127.0.0.1", port), UNKNOWN_RANK.format(port=port), 2)]
        await client.close()

    asyncio.run(serving(bootstrap_app(ranked(0), ranked(1))[0], story))


UNKNOWN_RANK = "bootstrap server 127.0.0.1:{port}: GET /route?prefill_dp_rank=2 answered 404"


class Counted:
    """An application in front of a bootstrap server that counts the bodies that pass."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> Any:
            message = await receive()
            self.bodies.append(message.get("body", b""))
            return message

        await self.app(scope, listen if scope["type"] == "http" else receive, send)


def test_rooms_are_asked_for_at_once_and_together_and_unknown_ones_are_answered_too() -> None:
    client, node = client_and_node()
    app, registry = bootstrap_app(ranked(0), ranked(1))
    registry.announce(Room(7), 1, monotonic_now())
    counted = Counted(app)

    async def story(port: int) -> None:
        address = Address("127.0.0.1", port)
        for room in (7, 8):
            client.receive(commands.AskDpRank(address, Room(room)))
        await until(lambda: len(node.sent) == 2)
        first, second = node.sent
        assert 0 < first.age_ns == second.age_ns
        assert [msgspec.structs.replace(found, age_ns=None) for found in (first, second)] == [
            events.DpRankAnswered(address, Room(7), 1, ranked(0).prefill),
            events.DpRankAnswered(address, Room(8), None, ranked(0).prefill),
        ]
        assert counted.bodies == [b'{"bootstrap_rooms":[7,8]}']
        await client.close()

    asyncio.run(serving(counted, story))


def test_rooms_that_stay_unknown_cost_one_query_per_interval() -> None:
    node: list[object] = []
    counted = Counted(bootstrap_app(ranked(0), ranked(1))[0])

    async def story(port: int) -> None:
        asker = BootstrapClient(AllowedHosts(), own=lambda: REPLICA, report=node.append, interval_s=3600)
        address = Address("127.0.0.1", port)
        asker.ask_rank(address, Room(1))
        await until(lambda: node)
        for _ in range(100):
            for room in (1, 2, 3):
                asker.ask_rank(address, Room(room))
            await asyncio.sleep(0)
        assert len(counted.bodies) == 1
        await asker.close()

    asyncio.run(serving(counted, story))


def test_a_bootstrap_server_that_talks_nonsense_about_rooms_is_unknown_and_the_room_is_answered() -> None:
    async def nonsense(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"5": -1}'})

    client, node = client_and_node()

    async def story(port: int) -> None:
        address = Address("127.0.0.1", port)
        client.receive(commands.AskDpRank(address, Room(5)))
        await until(lambda: len(node.sent) == 2)
        assert node.sent == [
            events.PeerUnknown(address, f"bootstrap server 127.0.0.1:{port}: [...]: Expected `int` >= 0"),
            events.DpRankAnswered(address, Room(5), None),
        ]
        await client.close()

    asyncio.run(serving(nonsense, story))


def test_a_name_is_connected_to_at_the_address_that_was_checked() -> None:
    asked: list[str] = []

    async def look_up(name: str) -> list[str]:
        asked.append(name)
        return ["203.0.113.9", "::1", "127.0.0.1"]  # not allowed; nobody listens; the server

    found: list[object] = []

    async def story(port: int) -> None:
        allowed = AllowedHosts(networks=(ip_network("127.0.0.0/8"),), look_up=look_up)
        asker = BootstrapClient(allowed, own=lambda: REPLICA, report=found.append)
        asker.learn(Address("prefill.example", port), None)
        await until(lambda: len(found) == 2)
        assert [type(message) for message in found] == [wire.Connect, events.PeerLearned]
        assert asked == ["prefill.example"]
        await asker.close()

    asyncio.run(serving(bootstrap_app(PREFILL)[0], story))


def test_news_about_unknown_requests_changes_nothing() -> None:
    client, _ = client_and_node()
    client.receive(commands.EmitTokens((9,), b"\0\0\0\0", ((9, b"x"),)))
    client.receive(commands.FailRequest(9, Cause.ABORTED, "decode"))
    client.receive(wire.Answer(5, b"{}"))
    assert client.num_live == 0


def test_a_query_is_answered_and_a_silent_node_is_not_waited_for() -> None:
    client, node = client_and_node()
    node.answers["waits"] = [1, 2]

    async def story() -> None:
        assert msgspec.json.decode(await client.query("waits")) == [1, 2]
        with pytest.raises(Refusal, match="did not answer"):
            await client.query("state", timeout=0.01)

    asyncio.run(story())


def test_queries_under_way_end_when_the_node_is_lost() -> None:
    client, _ = client_and_node()

    async def story() -> None:
        question = asyncio.create_task(client.query("state"))
        await asyncio.sleep(0)
        client.receive(wire.Died("node", "a bug"))
        with pytest.raises(Refusal, match="node: a bug"):
            await question

    asyncio.run(story())
