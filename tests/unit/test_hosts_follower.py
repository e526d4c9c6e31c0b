"""A host that is not node rank 0: it and its workers are watched from node rank 0, which is in the test's hand."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tandem.config import ServerConfig
from tandem.core.values import Incarnation
from tandem.membership import ClusterSecret
from tandem.server.channel import ChannelClosed, ChannelKeys
from tandem.server.hosts import follower
from tandem.server.hosts.connection import HostConnection
from tandem.server.hosts.follower import Follower
from tandem.server.hosts.messages import (
    Beat,
    End,
    Goodbye,
    Here,
    Join,
    Leaving,
    Refused,
    Start,
    ToLeader,
    Welcome,
    WorkerHere,
    WorkerLost,
    WorkerTicket,
)
from tandem.server.processes import Launch, ServerFailure

SECRET = ClusterSecret(b"the secret of one cluster")
PATIENCE_S = 20.0
LIFE = Incarnation("unified:1", "first life")
NEXT = Incarnation("unified:1", "second life")
Other = HostConnection[ToLeader]


@dataclass
class Process:
    """As `subprocess.Popen`: a worker that runs until it is killed, or the test says how it ended."""

    launch: Launch
    peer: tuple[str, int]  # of its channel: this end, as the other one sees it
    num_ends: int  # that it inherits
    code: int | None = None
    was_killed: bool = False
    is_collected: bool = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.code, self.was_killed = -9, True

    def wait(self) -> int:
        assert self.code is not None
        self.is_collected = True
        return self.code


@dataclass
class World:
    """Node rank 0, at `listener`."""

    listener: socket.socket
    running: "asyncio.Task[None]"
    started: list[Process] = field(default_factory=list)
    fails_at: int | None = None  # the start that the machine refuses
    connections: list[Other] = field(default_factory=list)

    async def accept(self) -> tuple[Other, ToLeader]:
        """Who dials next, and its first word."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        connection: Other = HostConnection(sock, SECRET, ToLeader, is_dialler=False)
        self.connections.append(connection)
        await connection.meet()
        await connection.say(Here())
        return connection, await hear(connection)

    async def joined(self) -> Other:
        connection, said = await self.accept()
        assert isinstance(said, Join)
        assert said.node_rank == 1
        await connection.say(Welcome())
        return connection

    async def workers(self, host: Other, start: Start) -> list[tuple[WorkerHere, Other]]:
        """Those that it starts when it is told to."""
        await host.say(start)
        before, found = len(self.started), list[tuple[WorkerHere, Other]]()
        for _ in start.places:
            connection, said = await self.accept()
            assert isinstance(said, WorkerHere)
            found.append((said, connection))
        await until(lambda: len(self.started) == before + len(start.places))
        return found


async def hear(connection: Other) -> ToLeader:
    """The next message that says something."""
    while isinstance(message := await connection.hear(), Beat):
        pass
    return message


async def is_closed(connection: Other) -> bool:
    try:
        while True:
            await connection.hear()
    except ChannelClosed:
        return True


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def failure(running: "asyncio.Task[None]") -> str:
    with pytest.raises(ServerFailure) as found:
        await running
    return str(found.value)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have a story with a follower of a server with `flags`."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(follower, "REDIAL_S", 0.01)
    monkeypatch.setattr(follower, "POLL_S", 0.001)
    monkeypatch.setattr(follower, "EXIT_GRACE_S", PATIENCE_S)
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_INTERVAL", "60")  # nobody is silent, however slow it all is

    def run(story: Callable[[World], Awaitable[None]], **flags: object) -> None:
        async def main() -> None:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            settings = {"model": "m", "tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": place, **flags}
            it = Follower(ServerConfig(**settings), tmp_path, SECRET)  # type: ignore[arg-type]  # flags of any type
            here = World(listener, asyncio.create_task(it.run()))

            def start_child(_name: str, ends: list[socket.socket], launch: Launch, _environment: object) -> Process:
                if here.fails_at == len(here.started):
                    raise OSError("no process is left")
                here.started.append(Process(launch, ends[0].getsockname(), len(ends)))
                return here.started[-1]

            monkeypatch.setattr(follower, "start_child", start_child)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await story(here)
            finally:
                here.running.cancel()
                await asyncio.wait([here.running])
                for connection in here.connections:
                    connection.close()
                listener.close()

        asyncio.run(main())

    return run


def start_of(life: Incarnation = LIFE, *, port: int = 0) -> Start:
    places = tuple(WorkerTicket(shard, bytes([shard]) * 16) for shard in (2, 3))
    return Start(0, life, places, True, "127.0.0.1" if port else "", port)


def test_each_worker_has_its_place_and_its_channel(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        found = await here.workers(host, start_of(port=7))
        assert [said.ticket for said, _ in found] == [bytes([2]) * 16, bytes([3]) * 16]
        assert [process.launch.rank.shard for process in here.started] == [2, 3]
        for process, (said, connection) in zip(here.started, found, strict=True):
            sock, keys = connection.release()
            assert sock.getpeername() == process.peer
            assert process.launch.node_keys == ChannelKeys(keys.opening, keys.sealing)
            assert process.launch.incarnation == LIFE
            assert (process.launch.group_host, process.launch.group_port) == ("127.0.0.1", 7)
            assert (said.meeting_port, process.num_ends) == (0, 1)

    play(story)


@pytest.mark.parametrize(("mode", "secret"), [("null", b""), ("prefill", SECRET.raw)])
def test_a_worker_is_told_the_secret_where_it_has_peers_and_where_it_can_be_reached(
    play: Callable[..., None], mode: str, secret: bytes
) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        for process in here.started:
            assert process.launch.cluster_secret == secret
            assert process.launch.config.host == "127.0.0.1", "and not everywhere"
            assert process.launch.config.api_key is None

    play(story, host="0.0.0.0", disaggregation_mode=mode, api_key="a key of this host's")


def test_the_first_worker_makes_the_place_where_its_group_meets_if_there_is_none(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        start = msgspec.structs.replace(start_of(), places=tuple(WorkerTicket(s, bytes([s]) * 16) for s in (0, 1)))
        (first, _), (second, _) = await here.workers(host, start)
        assert first.meeting_port == second.meeting_port == here.started[0].launch.group_port != 0
        assert [process.num_ends for process in here.started] == [2, 1], "the first one listens there"

    play(story)


def test_a_group_on_one_host_meets_on_loopback_and_nobody_else_is_told(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "GROUP_HOST", "127.0.0.3")

    async def story(here: World) -> None:
        host = await here.joined()
        places = tuple(WorkerTicket(shard, bytes([shard]) * 16) for shard in (0, 1))
        found = await here.workers(host, Start(1, LIFE, places, False))
        assert [said.meeting_port for said, _ in found] == [0, 0]
        assert [process.launch.group_host for process in here.started] == ["127.0.0.3"] * 2
        assert [process.launch.group_own for process in here.started] == [""] * 2
        assert [process.num_ends for process in here.started] == [2, 1]

    play(story, tp_size=2, dp_size=2)


def test_a_worker_that_is_alone_meets_nobody(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, Start(1, LIFE, (WorkerTicket(0, bytes(16)),), False))
        assert [(process.launch.group_port, process.num_ends) for process in here.started] == [(0, 1)]

    play(story, tp_size=1, dp_size=2)


def test_a_worker_that_ends_is_told_once_with_the_life_that_it_belonged_to(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        here.started[1].code = -11
        reason = "the worker TP3 PP0 process was ended by signal SIGSEGV, on node rank 1"
        assert await hear(host) == WorkerLost(LIFE.id, reason)
        await asyncio.sleep(50 * follower.POLL_S)  # it looks again, and has nothing to say
        await here.workers(host, start_of(NEXT))
        assert here.started[0].was_killed, "what is left of the life before ends first"
        here.started[2].code = 3
        assert await hear(host) == WorkerLost(NEXT.id, ""), "it ended with others, and nothing else was told before"

    play(story)


def test_a_start_that_fails_leaves_no_worker_and_is_told(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        here.fails_at = 1
        await host.say(start_of())
        for _ in range(2):
            await here.accept()
        why = "node rank 1 cannot start its workers: no process is left"
        assert await hear(host) == WorkerLost(LIFE.id, why)
        assert [process.was_killed for process in here.started] == [True]
        here.fails_at = None
        await here.workers(host, start_of(NEXT))

    play(story)


def test_what_is_to_end_ends_and_nobody_is_told(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        await host.say(End(1))
        await host.say(End(0))
        await until(lambda: all(process.was_killed and process.is_collected for process in here.started))
        await here.workers(host, start_of(NEXT))
        here.started[2].code = 3
        assert await hear(host) == WorkerLost(NEXT.id, "")

    play(story)


def test_with_node_rank_0_its_workers_are_lost_and_it_is_dialled_again(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        host.close()
        host = await here.joined()
        assert all(process.was_killed for process in here.started)
        await here.workers(host, start_of(NEXT))
        here.started[-1].code = 3
        assert await hear(host) == WorkerLost(NEXT.id, "")
        watching = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_watch"]
        assert len(watching) == 1, "none is left that would tell it to the connection before"

    play(story)


def test_node_rank_0_that_says_nothing_is_lost_and_hears_that_this_host_is_there(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_INTERVAL", "0.1")
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")

    async def story(here: World) -> None:
        host = await here.joined()
        assert await host.hear() == Beat()
        await here.joined()
        assert await is_closed(host)

    play(story)


def test_a_server_that_ends_well_lets_workers_end_by_themselves(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        await host.say(Goodbye())
        here.started[0].code = 0
        assert await is_closed(host)
        assert not here.running.done()
        here.started[1].code = 0
        await here.running
        assert not any(process.was_killed for process in here.started)

    play(story)


def test_a_server_that_ends_for_a_reason_ends_this_host_with_it_and_what_lingers(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "EXIT_GRACE_S", 0.01)

    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        await host.say(Goodbye("DP rank 0: the disk is full"))
        assert await failure(here.running) == "DP rank 0: the disk is full"
        assert all(process.was_killed for process in here.started)

    play(story)


def test_a_host_that_does_not_fit_is_told_why_and_ends(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host, _ = await here.accept()
        await host.say(Refused("--page-size is 32 on node rank 1", is_final=True))
        assert await failure(here.running) == "--page-size is 32 on node rank 1"

    play(story)


def test_a_host_whose_place_is_taken_asks_again(play: Callable[..., None]) -> None:
    """The one before may be gone, and node rank 0 does not know it yet."""

    async def story(here: World) -> None:
        host, _ = await here.accept()
        await host.say(Refused("node rank 1 is there already", is_final=False))
        await here.joined()
        assert await is_closed(host)

    play(story)


def test_a_host_whose_place_stays_taken_ends(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it would wait for hours for node rank 0 itself."""
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_INTERVAL", "0.1")
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")

    async def story(here: World) -> None:
        async def refuse() -> None:
            while True:
                host, _ = await here.accept()
                await host.say(Refused("node rank 1 is there already", is_final=False))

        refusing = asyncio.create_task(refuse())
        assert "has not let node rank 1 in" in await failure(here.running)
        refusing.cancel()

    play(story, dist_timeout=10_000)


def test_who_holds_another_secret_is_no_node_rank_0(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(here.listener)
        non_member: Other = HostConnection(sock, ClusterSecret(b"of another cluster"), ToLeader, is_dialler=False)
        here.connections.append(non_member)
        await non_member.meet()
        await non_member.say(Here())
        assert "does not hold this cluster's secret" in await failure(here.running)

    play(story)


def test_a_host_that_is_told_to_end_asks_the_server_to_drain(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        host = await here.joined()
        await here.workers(host, start_of())
        signal.raise_signal(signal.SIGTERM)
        assert await hear(host) == Leaving()
        assert not any(process.was_killed for process in here.started), "requests go on"
        host.close()
        assert "was lost while the server drained" in await failure(here.running)
        assert all(process.was_killed for process in here.started)

    play(story)


def test_a_host_that_is_told_to_end_while_node_rank_0_is_away_ends_at_once(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nobody who could be asked to drain."""
    codes: list[int] = []
    monkeypatch.setattr(follower.os, "_exit", codes.append)

    async def story(here: World) -> None:
        host = await here.joined()
        host.close()
        await here.accept()
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: bool(codes))
        assert codes == [1]

    play(story)


def test_a_second_signal_ends_a_host_at_once_with_its_workers(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[list[bool]] = []

    async def story(here: World) -> None:
        monkeypatch.setattr(follower.os, "_exit", lambda code: killed.append([one.was_killed for one in here.started]))
        host = await here.joined()
        await here.workers(host, start_of())
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        await until(lambda: bool(killed))
        assert killed == [[True, True]]

    play(story)


def test_node_rank_0_at_what_is_no_name_is_dialled_until_it_is_given_up(play: Callable[..., None]) -> None:
    async def story(here: World) -> None:
        why = await failure(here.running)
        assert why.startswith("node rank 0 at a..b:5000 has not let node rank 1 in until --dist-timeout: ")

    play(story, dist_init_addr="a..b:5000", dist_timeout=0.0)


def test_another_program_at_the_address_of_node_rank_0_is_told_from_a_host(play: Callable[..., None]) -> None:
    """Whatever the length is that its first bytes would be."""

    async def story(here: World) -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(here.listener)
        with contextlib.closing(sock):
            await asyncio.get_running_loop().sock_sendall(sock, b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert "until --dist-timeout: who answers there is no host of this server (" in await failure(here.running)

    play(story, dist_timeout=0.0)
