"""A prefill in its own bootstrap server: it is there once it is ready, until it has drained or is lost.

The API process runs here with its real ports; the node is a socket in the test's hand.
"""

import asyncio
import socket
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

import tandem
from loop_waits import until
from tandem.config import ServerConfig
from tandem.core.commands import FailRequest
from tandem.core.request import Request
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, Cause, Incarnation, Nanos, RequestId
from tandem.membership import ClusterSecret
from tandem.ranks import Rank
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.api.bootstrap_questions import registration
from tandem.server.api.cluster_auth import signed_write
from tandem.server.api.model_facts import ModelFacts
from tandem.server.api.process import ApiProcess
from tandem.server.channel import frame
from tandem.server.hosts.leader import NoOtherHosts
from tandem.server.processes import Children, Listeners, Replicas, ServerFailure, bind_listeners

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
FACTS = ModelFacts(str(MINI), ["LlamaForCausalLM"], "llama", 8192, 16, 512, frozenset({2}), "float32")
SECRET = ClusterSecret(b"a secret of the whole cluster")
REPLICA = wire.ReplicaInfo(Incarnation("p", "1"), "prefill", "abc", {}, "127.0.0.1", 5, (), prefill=PrefillInfo())
SHARDS = (wire.DataEndpoint("127.0.0.1", 6),)
READY = wire.NodeReady(REPLICA, num_pages=9, page_bytes=1)
REQUEST = Request(RequestId(1), "r", 3, (), 1, Nanos(60 * SECOND))
PAYLOAD = Payload(1, array("i", [5, 6, 7]).tobytes(), SamplingParams(), b"")


@dataclass
class Child:
    """A process that ends well when it is asked to, or a little later."""

    lingers: bool = False

    def poll(self) -> int | None:
        return None if self.lingers else 0

    def kill(self) -> None:
        self.lingers = False

    def wait(self) -> int:
        return 0


@dataclass
class Server:
    process: ApiProcess
    listeners: Listeners
    node: socket.socket
    child: Child
    http: httpx.AsyncClient

    def say(self, message: wire.NodeToApi) -> None:
        self.node.sendall(frame(message))

    async def seen(self) -> tuple[int, int]:
        """What is answered to a router that asks /ready, and to a decode that asks who is there."""
        ready = await self.http.get(f"http://127.0.0.1:{self.listeners.http_port}/ready")
        route = await self.http.get(f"http://127.0.0.1:{self.listeners.bootstrap_port}/route")
        return ready.status_code, route.status_code

    @property
    def is_registered(self) -> bool:
        return self.process._registry.is_ready


def serve(story: Callable[[Server, "asyncio.Task[None]"], Awaitable[None]]) -> None:
    """Run `story` with a server and the task in which it runs. The node is not ready yet."""

    async def main() -> None:
        node, api_end = socket.socketpair()
        with node, listening() as listeners:
            child = Child()
            children = Children(child, (child,), (Rank(),), api_end)  # type: ignore[arg-type]  # `Child` has all that is asked of them
            process = ApiProcess(config(), Replicas(lambda *_: children, 1), listeners, lambda _: NoOtherHosts())
            running = asyncio.create_task(process.run(FACTS, SECRET))
            async with httpx.AsyncClient(trust_env=False) as http:
                await story(Server(process, listeners, node, child, http), running)

    asyncio.run(main())


def config(**changes: object) -> ServerConfig:
    asked = {"port": 0, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0}
    return ServerConfig(model="m", **asked, **changes)  # type: ignore[arg-type]  # any fields


@contextmanager
def listening(**changes: object) -> Iterator[Listeners]:
    listeners = bind_listeners(config(**changes))
    try:
        yield listeners
    finally:
        listeners.close()


def test_a_prefill_is_registered_while_it_drains_and_no_more_when_it_has() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        assert await server.seen() == (503, 503)
        server.say(READY)
        await until(lambda: server.process._ready.is_set())
        assert await server.seen() == (200, 200)
        with server.process._client.running([wire.Submit.of(REQUEST, PAYLOAD)], [("r",)]):
            server.process._signalled()
            await until(lambda: server.process._client._requests.is_draining)
            assert await server.seen() == (503, 200), "decode still has to find it for what runs"
            server.child.lingers = True
            server.say(FailRequest(REQUEST.id, Cause.ABORTED, "window"))
            await until(lambda: not server.is_registered)
            assert server.child.lingers, "it does not wait for its processes to end"
            server.child.lingers = False
            await running

    serve(story)


def test_a_prefill_that_is_lost_is_registered_no_more() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        server.say(READY)
        await until(lambda: server.is_registered)
        server.say(wire.Died("node", "a bug"))
        await until(lambda: not server.is_registered)
        with pytest.raises(ServerFailure, match="a bug"):
            await running

    serve(story)


def test_a_prefill_that_cannot_register_is_never_ready_and_ends_with_the_cause() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        other = wire.ReplicaInfo(READY.replica.incarnation, "prefill", "abc", {}, "127.0.0.1", 6, ())
        server.process._registry.register(registration(other), is_own=True)
        server.say(READY)
        with pytest.raises(
            ServerFailure, match=r"cannot register .*: this incarnation has registered already, and differently"
        ):
            await running

    serve(story)


def test_nobody_takes_the_place_of_a_prefill_in_its_own_bootstrap_server() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        server.say(READY)
        await until(lambda: server.is_registered)
        other = msgspec.structs.replace(REPLICA, incarnation=Incarnation("q", "f" * 32), shards=SHARDS)
        body, port = msgspec.json.encode(other), server.listeners.bootstrap_port
        answer = await signed_write(SECRET, "127.0.0.1", port, method="PUT", target="/route", body=body)
        assert (answer.status, b"runs in this server itself" in answer.body) == (400, True)
        assert (await server.http.get(f"http://127.0.0.1:{port}/route")).json()["incarnation"]["name"] == "p"
        server.process._signalled()
        await running

    serve(story)


def test_a_rank_that_is_lost_while_it_comes_back_is_started_once_more_and_found_under_its_last_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.server.api.process.RESTART_S", 0.0)
    info = PrefillInfo(dp_size=2)
    nodes: list[socket.socket] = []  # our ends, of every life of every rank

    def start(_dp_rank: int, _elsewhere: object = None) -> Children:
        node, api_end = socket.socketpair()
        nodes.append(node)
        child = Child()
        return Children(child, (child,), (Rank(),), api_end)  # type: ignore[arg-type]  # `Child` has all that is asked of them

    def say_ready(life: int, dp_rank: int) -> None:
        who = Incarnation(f"p/{dp_rank}", str(life))
        replica = msgspec.structs.replace(REPLICA, incarnation=who, dp_rank=dp_rank, prefill=info)
        nodes[life].sendall(frame(msgspec.structs.replace(READY, replica=replica)))

    async def story() -> None:
        with listening(dp_size=2) as listeners:
            process = ApiProcess(config(dp_size=2), Replicas(start, 2), listeners, lambda _: NoOtherHosts())
            running = asyncio.create_task(process.run(FACTS, SECRET))
            say_ready(0, 0)
            say_ready(1, 1)
            await until(lambda: process._ready.is_set() and 1 in process._watching)
            nodes[1].sendall(frame(wire.Died("node", "a bug")))
            await until(lambda: len(nodes) == 3)
            await until(lambda: process._links[1].channel is not None and process._restarts[1].is_loading)
            first = process._restarts[1].task
            nodes[2].sendall(frame(wire.Died("node", "a bug")))
            await until(lambda: len(nodes) == 4)
            second = process._restarts[1].task
            say_ready(3, 1)
            await asyncio.wait([first, second])
            assert first.cancelled(), "two attempts to bring one rank back"
            assert second.exception() is None
            assert not running.done()
            found = process._registry.find(1)
            assert found is not None
            assert found.who == Incarnation("p/1", "3")
            process._signalled()
            await running

    try:
        asyncio.run(story())
    finally:
        for node in nodes:
            node.close()
