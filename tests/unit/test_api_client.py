"""The client of the node: learning peers, queries, late news, draining."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import uvicorn
from api_fakes import REPLICA, FakeNode, says

from tandem.core import commands, events
from tandem.core.fleet.bootstrap_registry import Registry
from tandem.core.values import Address, Cause, Incarnation
from tandem.server import wire
from tandem.server.api.bootstrap import BootstrapServer, registration
from tandem.server.api.client import NodeClient
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.errors import Refusal

PREFILL = wire.ReplicaInfo(
    Incarnation("p", 3), "prefill", "abc", {"dtype": "x"}, "127.0.0.1", 5, (wire.DataEndpoint("127.0.0.1", 6),)
)


def bootstrap_app(*replicas: wire.ReplicaInfo) -> tuple[Any, Registry]:
    """The bootstrap server of a prefill, on loopback, and what it has been told."""
    registry = Registry()
    for replica in replicas:
        registry.register(registration(replica))
    return BootstrapServer(registry, WriteGuard(None, is_loopback=True, clock=time.time)).app(), registry


def client_and_node(*, is_ready: bool = True) -> tuple[NodeClient, FakeNode]:
    node = FakeNode(says("x"))
    node.client = client = NodeClient(node, stall_timeout=1.0)
    if is_ready:
        client.receive(wire.NodeReady(REPLICA, 10, 10))
    return client, node


async def until(condition: Callable[[], object], *, seconds: float = 4.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


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
        assert node.sent == [wire.Connect(PREFILL), events.PeerLearned(address, Incarnation("p", 3), "abc", differs)]
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
            registry.register(registration(msgspec.structs.replace(PREFILL, incarnation=Incarnation("p", 4))))
        epochs = [message.peer.epoch for message in node.sent if isinstance(message, events.PeerLearned)]
        assert epochs == [3, 4]
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
        assert "503" in message.detail or "unified" in message.detail
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
