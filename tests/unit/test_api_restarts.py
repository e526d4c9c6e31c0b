"""One DP rank of several is lost: it is started anew, later each time it dies before it is ready, not while all ends.

The API process runs here with its real ports; each node is a socket in the test's hand.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any  # settings by name
from unittest.mock import Mock

import msgspec
import pytest
from test_prefill_registers import FACTS, PAYLOAD, REPLICA, REQUEST, Child, until

from tandem.config import ServerConfig
from tandem.core import commands
from tandem.core.settings import PrefillInfo
from tandem.core.values import Cause, Incarnation
from tandem.membership import ClusterSecret
from tandem.ranks import Rank
from tandem.server import wire
from tandem.server.api import process
from tandem.server.api.process import ApiProcess, loading_patience_s, restart_delay_s
from tandem.server.channel import frame
from tandem.server.hosts.leader import NoOtherHosts, OtherHosts
from tandem.server.processes import Children, Replicas, ServerFailure, bind_listeners

UNIFIED = msgspec.structs.replace(REPLICA, role="unified")


@dataclass
class Life:
    """One start of the processes of one rank."""

    node: socket.socket
    child: Child

    def say(self, message: wire.NodeToApi) -> None:
        self.node.sendall(frame(message))


@dataclass
class Server:
    lives: list[list[Life]] = field(default_factory=lambda: [[], []])  # by DP rank
    process: ApiProcess | None = None
    linger: bool = False  # processes that are started from now on end only when they are killed
    replica: wire.ReplicaInfo = UNIFIED

    def start(self, dp_rank: int, _elsewhere: object = None) -> Children:
        node, api_end = socket.socketpair()
        self.lives[dp_rank].append(Life(node, Child(lingers=self.linger)))
        child = self.lives[dp_rank][-1].child
        return Children(child, (child,), (Rank(),), api_end)  # type: ignore[arg-type]  # `Child` has all that is asked of them

    @property
    def api(self) -> ApiProcess:
        assert self.process is not None
        return self.process

    def ready(self, dp_rank: int) -> None:
        identity = Incarnation("one", f"{dp_rank}{len(self.lives[dp_rank])}")
        replica = msgspec.structs.replace(self.replica, incarnation=identity, dp_rank=dp_rank)
        self.lives[dp_rank][-1].say(wire.NodeReady(replica, 9, 1))

    def dies(self, dp_rank: int) -> None:
        self.lives[dp_rank][-1].say(wire.Died("node", "a bug"))

    async def serves(self) -> None:
        """Both ranks are ready and looked after."""
        for dp_rank in (0, 1):
            self.ready(dp_rank)
        await until(lambda: len(self.api._watching) == 2)

    async def starts(self, dp_rank: int, count: int) -> None:
        """Until it has been started so often, and the last start is loading."""
        await until(lambda: len(self.lives[dp_rank]) == count and self.api._restarts[dp_rank].is_loading)


class OtherHostsThatListen(NoOtherHosts):
    def __init__(self) -> None:
        self.told: list[str] = []

    async def close(self, reason: str) -> None:
        self.told.append(reason)


def serve(
    story: Callable[[Server, "asyncio.Task[None]"], Awaitable[None]],
    *,
    drain_timeout: float = 60,
    hosts: OtherHosts | None = None,
    secret: ClusterSecret | None = None,
    **flags: Any,
) -> None:
    async def main() -> None:
        server = Server()
        config = ServerConfig(model="m", port=0, dp_size=2, drain_timeout=drain_timeout, **flags)
        listeners = bind_listeners(config)
        server.process = ApiProcess(config, Replicas(server.start, 2), listeners, lambda _: hosts or NoOtherHosts())
        running = asyncio.create_task(server.process.run(FACTS, secret))
        try:
            await story(server, running)
        finally:
            running.cancel()
            await asyncio.wait([running])
            listeners.close()
            for life in (life for lives in server.lives for life in lives):
                life.node.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _restarts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RESTART_S", 0.001)


class OtherHostsThatFail(NoOtherHosts):
    def open(self) -> None:
        raise RuntimeError("a bug")


def test_an_error_of_ours_while_a_server_starts_ends_it_and_is_not_waited_out() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await until(running.done)
        assert isinstance(running.exception(), RuntimeError)

    serve(story, hosts=OtherHostsThatFail())


def test_a_rank_that_is_lost_is_started_anew_and_the_others_are_left_alone() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.dies(1)
        await server.starts(1, 2)
        assert len(server.lives[0]) == 1
        assert [rank.dp_rank for rank in server.api._client.there] == [0]
        server.api._client.check_acceptable()
        server.ready(1)
        await until(lambda: not server.api._restarts)
        assert [rank.dp_rank for rank in server.api._client.there] == [0, 1]
        assert set(server.api._watching) == {0, 1}
        assert not running.done()

    serve(story)


def test_a_rank_that_dies_before_it_is_ready_is_tried_again_later_each_time() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.dies(1)
        for attempt in range(3):
            await server.starts(1, attempt + 2)
            assert server.api._restarts[1].attempt == attempt
            server.dies(1)
        await server.starts(1, 5)
        server.ready(1)
        await until(lambda: not server.api._restarts)
        assert not running.done(), "attempts that were given up end nothing"
        server.dies(1)
        await server.starts(1, 6)
        assert server.api._restarts[1].attempt == 0, "it has served since"

    serve(story)


def test_a_rank_that_hangs_while_it_loads_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RECORD_S", 0.01)
    monkeypatch.setattr(
        process, "loading_patience_s", lambda first_s, watchdog_s, attempt: 1_000.0 if attempt else 0.05
    )

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.linger = True
        server.dies(1)
        await server.starts(1, 3)
        assert server.api._restarts[1].attempt == 1
        assert not server.lives[1][1].child.lingers, "what hung is ended"
        server.ready(1)
        await until(lambda: not server.api._restarts)
        server.lives[1][2].child.lingers = False
        assert not running.done()

    serve(story)


def test_decode_does_not_find_a_rank_that_is_lost_until_it_is_back() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        server.replica = msgspec.structs.replace(REPLICA, prefill=PrefillInfo(dp_size=2))
        registry = server.api._registry
        await server.serves()
        assert registry.is_ready
        server.dies(1)
        await server.starts(1, 2)
        assert not registry.is_ready
        server.ready(1)
        await until(lambda: registry.is_ready)

    flags = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0}
    serve(story, secret=ClusterSecret(b"the secret of this cluster"), **flags)


def test_of_a_rank_that_is_lost_nobody_listens_to_the_node_and_nobody_watches_it() -> None:
    """The watchdog would take the next life, which loads, for one that hangs."""

    def ends(node: socket.socket) -> bool:
        node.settimeout(20)
        while node.recv(1000):
            pass
        return True

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        watching = server.api._watching[1]
        server.dies(1)
        assert await asyncio.to_thread(ends, server.lives[1][0].node)
        await server.starts(1, 2)
        assert watching.cancelled()

    serve(story)


def test_a_rank_is_started_anew_when_its_node_has_written_what_it_did_last() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        server.lives[1][0].child.lingers = True
        await server.serves()
        server.dies(1)
        await until(lambda: server.api._client.ranks[1].node is None)
        await asyncio.sleep(20 * process.RESTART_S)
        assert len(server.lives[1]) == 1
        server.lives[1][0].child.lingers = False
        await server.starts(1, 2)

    serve(story)


def test_every_attempt_waits_as_long_as_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(process, "restart_delay_s", lambda attempt: told.append(attempt) or 0.0)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        for number in range(2, 5):
            server.dies(1)
            await server.starts(1, number)
        assert told == [0, 1, 2]

    serve(story)


def test_a_rank_that_is_ready_in_the_last_moment_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "READY_POLL_S", 0.0123)
    monkeypatch.setattr(process, "loading_patience_s", lambda first_s, watchdog_s, attempt: 0.0)
    sleep, lose, told = asyncio.sleep, ApiProcess._lose, list[str]()

    def see(self: ApiProcess, dp_rank: int, reason: str, children: Children, **remedy: str) -> None:
        told.append(reason)
        lose(self, dp_rank, reason, children, **remedy)

    monkeypatch.setattr(ApiProcess, "_lose", see)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        async def sleep_on(seconds: float) -> None:
            """Until the rank is ready, where it is that which is waited for."""
            if seconds == process.READY_POLL_S:
                server.ready(1)
            while seconds == process.READY_POLL_S and server.api._client.ranks[1].node is None:
                await sleep(0.001)
            await sleep(seconds)

        await server.serves()
        monkeypatch.setattr(asyncio, "sleep", sleep_on)
        server.dies(1)
        await until(lambda: len(server.lives[1]) == 2 and not server.api._restarts)
        assert not any("it was not ready" in reason for reason in told)
        assert set(server.api._watching) == {0, 1}

    serve(story)


def test_a_rank_that_loads_again_may_take_as_long_as_the_first_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(
        process, "loading_patience_s", lambda first_s, watchdog_s, attempt: told.append(first_s) or 1_000.0
    )

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.serves()
        most_s = loop.time() - began
        server.dies(1)
        await server.starts(1, 2)
        await until(lambda: bool(told))
        assert 0 < told[0] <= most_s

    serve(story)


def test_a_rank_that_ends_without_a_word_is_started_anew_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for ever for a word of the kernel's."""
    monkeypatch.setattr(process, "EXIT_REASON_S", 0.01)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.lives[1][0].node.close()
        await server.starts(1, 2)
        assert "DP rank 1 is lost: a process of this server ended without a word; see its log" in caplog.messages

    serve(story)


def test_who_ended_a_rank_is_said_though_the_kernel_tells_it_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "EXIT_REASON_S", 1_000.0)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        codes = iter((None, None, -9))
        monkeypatch.setattr(server.lives[1][0].child, "poll", lambda: next(codes, -9))
        server.lives[1][0].node.close()
        await server.starts(1, 2)
        assert any("the worker process was killed by signal SIGKILL" in message for message in caplog.messages)

    serve(story)


@pytest.mark.parametrize(
    ("what", "where"),
    [("HTTP server", (process.QuietServer, "serve")), ("watchdog", (process.Watchdog, "run"))],
)
def test_a_server_of_which_a_part_has_failed_ends_and_says_which(
    monkeypatch: pytest.MonkeyPatch, what: str, where: tuple[type, str]
) -> None:
    """It would be there, and not answer, or not notice who hangs."""

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(*where, fail)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        for dp_rank in (0, 1):
            server.ready(dp_rank)
        with pytest.raises(ServerFailure, match=f"^the {what} ended: a bug$"):
            await running

    serve(story)


def test_a_restart_that_fails_by_an_error_of_ours_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiProcess, "_start_anew", Mock(side_effect=RuntimeError("a bug")))

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.dies(1)
        with pytest.raises(ServerFailure, match=r"^the restart of a replica ended: a bug$"):
            await running

    serve(story)


def test_patience_with_a_load_is_that_of_the_first_start_and_the_watchdog_together() -> None:
    assert loading_patience_s(2.0, 30.0, 0) == 36.0
    assert loading_patience_s(2.0, 30.0, 3) == 78.0


def test_attempts_wait_twice_as_long_each_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [restart_delay_s(attempt) for attempt in (0, 1, 2, 6, 7, 5000)] == [0.25, 0.5, 1, 16, 30, 30]


def test_a_rank_that_is_lost_while_the_server_drains_is_not_started_anew() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        client = server.api._client
        with client.running([wire.Submit.of(REQUEST, PAYLOAD)], [("r",)], routed=[0]) as generation:
            server.api._signalled()
            await until(lambda: client._requests.is_draining)
            server.dies(1)
            await until(lambda: client.ranks[1].node is None)
            await until(lambda: server.api._restarts[1].task.done())
            server.lives[0][0].say(commands.FailRequest(REQUEST.id, Cause.ABORTED, "window"))
            await generation.changed()
        await running
        assert [len(lives) for lives in server.lives] == [1, 1]

    serve(story)


def test_a_rank_that_ends_as_it_was_told_to_is_not_lost() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.lives[0][0].child.lingers = True  # there is time for what must not happen
        server.api._signalled()
        await until(lambda: server.api._has_said_goodbye)
        server.lives[1][0].node.close()
        channel = server.api._links[1].channel
        assert channel is not None
        await until(lambda: channel._transport is None)
        server.lives[0][0].child.lingers = False
        await running
        assert [len(lives) for lives in server.lives] == [1, 1]
        assert not server.api._restarts

    serve(story)


def test_a_rank_that_was_never_ready_takes_the_start_with_it() -> None:
    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        server.ready(0)
        server.dies(1)
        with pytest.raises(ServerFailure, match=r"^DP rank 1: a bug$"):
            await running
        assert [len(lives) for lives in server.lives] == [1, 1]

    serve(story)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ServerFailure("no such tokenizer")])
def test_other_hosts_are_told_what_the_server_ends_for(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty reason would be a good end, and they would exit with 0."""
    monkeypatch.setattr(process, "load_tokenizer", Mock(side_effect=error))
    hosts = OtherHostsThatListen()

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        with pytest.raises(type(error)):
            await running

    serve(story, hosts=hosts)
    (reason,) = hosts.told
    assert str(error) in reason


def test_other_hosts_hear_no_reason_when_the_server_ends_as_it_was_told_to() -> None:
    hosts = OtherHostsThatListen()

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        server.api._signalled()
        await running

    serve(story, hosts=hosts)
    assert hosts.told == [""]


def test_who_waits_for_a_node_that_keeps_silent_at_the_end_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ABORT_S", 0.05)

    async def story(server: Server, running: "asyncio.Task[None]") -> None:
        await server.serves()
        client = server.api._client
        with client.running([wire.Submit.of(REQUEST, PAYLOAD)], [("r",)], routed=[0]) as generation:
            server.api._signalled()
            await running
            (live,) = generation.lives
        assert isinstance(live.ended, commands.FailRequest)
        assert (live.ended.cause, live.ended.detail) == (
            Cause.WORKER_LOST,
            "the node kept silent while the server ended",
        )

    serve(story, drain_timeout=0.01)
