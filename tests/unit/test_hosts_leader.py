"""Node rank 0 of a server on several hosts; the others are connections in the test's hand."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from msgspec import Struct

from tandem.config import ServerConfig
from tandem.core.values import Incarnation
from tandem.membership import ClusterSecret
from tandem.server.channel import ChannelClosed
from tandem.server.hosts import leader
from tandem.server.hosts.connection import HostConnection
from tandem.server.hosts.leader import Hooks, HostLost, Leader
from tandem.server.hosts.messages import (
    Beat,
    End,
    Goodbye,
    Join,
    Leaving,
    Start,
    ToFollower,
    ToLeader,
    Welcome,
    WorkerHere,
    WorkerLost,
)

SECRET = ClusterSecret(b"the secret of one cluster")
FIELDS = {"--tp-size": "4"}
PATIENCE_S = 20.0


@dataclass
class World:
    """A leader of two hosts, with its workers spread over them."""

    leader: Leader
    listener: socket.socket
    lost: list[tuple[int, str]]
    drains: list[str]
    others: list[HostConnection[ToFollower]] = field(default_factory=list)

    async def dial(self) -> HostConnection[ToFollower]:
        """A member, that has not said yet what it comes for."""
        sock = socket.create_connection(self.listener.getsockname())
        connection: HostConnection[ToFollower] = HostConnection(sock, SECRET, ToFollower, is_dialler=True)
        self.others.append(connection)
        await connection.meet()
        await connection.hear()
        return connection

    async def join(self, node_rank: int) -> HostConnection[ToFollower]:
        connection = await self.dial()
        await connection.say(Join(node_rank, FIELDS))
        assert await hear(connection) == Welcome()
        return connection

    async def worker(self, ticket: bytes, port: int = 0) -> HostConnection[ToFollower]:
        connection = await self.dial()
        await connection.say(WorkerHere(ticket, "127.0.0.1" if port else "", port))
        return connection


async def hear(connection: HostConnection[ToFollower]) -> ToFollower:
    """The next message that says something."""
    while type(message := await connection.hear()).__name__ == "Beat":
        pass
    return message


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def is_closed(connection: HostConnection[ToFollower]) -> bool:
    try:
        while True:
            await connection.hear()
    except ChannelClosed:
        return True


@contextlib.asynccontextmanager
async def world(**flags: object) -> AsyncIterator[World]:
    settings = {"model": "m", "tp_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000", **flags}
    config = ServerConfig(**settings)  # type: ignore[arg-type]  # flags of any type
    listener = socket.create_server(("127.0.0.1", 0))
    lost: list[tuple[int, str]] = []
    drains: list[str] = []
    lives = iter(range(1000))
    it = Leader(
        config,
        listener,
        SECRET,
        FIELDS,
        new_incarnation=lambda dp_rank: Incarnation(f"dp{dp_rank}", f"life {next(lives)}"),
        hooks=Hooks(lambda dp_rank, reason: lost.append((dp_rank, reason)), drains.append),
    )
    it.open()
    here = World(it, listener, lost, drains)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield here
    finally:
        for connection in here.others:
            connection.close()
        await it.close("")
        listener.close()


@pytest.fixture(autouse=True)
def _nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow it all is."""
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_INTERVAL", "60")


async def started(host: HostConnection[ToFollower]) -> Start:
    """What this host is told to start, once it has heard that nothing of before is to be left."""
    assert isinstance(await hear(host), End)
    start = await hear(host)
    assert isinstance(start, Start)
    return start


def test_workers_that_come_in_any_order_are_the_shards_that_they_were_asked_for() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            start = await started(host)
            assert [place.shard for place in start.places] == [2, 3]
            came = {place.shard: await here.worker(place.ticket) for place in reversed(start.places)}
            elsewhere = await bringing
            assert elsewhere is not None
            with contextlib.closing(elsewhere):
                assert elsewhere.incarnation == start.incarnation
                found = {shard: sock.getpeername() for shard, (sock, _) in elsewhere.channels.items()}
                assert found == {shard: worker.sock.getsockname() for shard, worker in came.items()}
                assert {shard: keys.opening for shard, (_, keys) in elsewhere.channels.items()} == {
                    shard: worker.release()[1].sealing for shard, worker in came.items()
                }
                assert start.spans_hosts
                assert elsewhere.group == (start.group_host, start.group_port)
                assert elsewhere.meeting is not None
                assert elsewhere.meeting.getsockname() == elsewhere.group

    asyncio.run(story())


def test_a_group_of_other_hosts_meets_where_its_first_worker_says() -> None:
    async def story() -> None:
        async with world(nnodes=4, tp_size=2, dp_size=2) as here:
            hosts = [await here.join(node_rank) for node_rank in (1, 2, 3)]
            bringing = asyncio.create_task(here.leader.bring(1, timeout_s=None))
            first, second = [started(host) for host in hosts[1:]]
            asked = await first
            assert (asked.group_host, asked.group_port) == ("", 0)
            await here.worker(asked.places[0].ticket, port=7)
            asked = await second
            assert (asked.group_host, asked.group_port) == ("127.0.0.1", 7)
            await here.worker(asked.places[0].ticket)
            elsewhere = await bringing
            assert elsewhere is not None
            with contextlib.closing(elsewhere):
                assert (elsewhere.group, elsewhere.meeting) == (("127.0.0.1", 7), None)

    asyncio.run(story())


def test_ranks_that_step_together_are_one_group_that_meets_where_the_first_of_them_is() -> None:
    async def story() -> None:
        async with world(tp_size=4, dp_size=4, enable_dp_attention=True) as here:
            first_brought = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            host = await here.join(1)
            first = await first_brought
            second = await here.leader.bring(1, timeout_s=None)
            bringing = asyncio.create_task(here.leader.bring(2, timeout_s=None))
            start = await started(host)
            await here.worker(start.places[0].ticket)
            third = await bringing
            assert first is not None
            assert second is not None
            assert third is not None
            with contextlib.closing(first), contextlib.closing(second), contextlib.closing(third):
                assert first.meeting is not None
                assert (second.meeting, third.meeting) == (None, None)
                assert first.group == second.group == third.group == first.meeting.getsockname()
                assert (start.spans_hosts, (start.group_host, start.group_port)) == (True, first.group)

    asyncio.run(story())


def test_of_ranks_that_step_together_none_is_brought_before_all_hosts_are_there() -> None:
    async def story() -> None:
        async with world(tp_size=4, dp_size=4, enable_dp_attention=True) as here:
            with pytest.raises(HostLost, match="node rank 1 did not come"):
                await here.leader.bring(0, timeout_s=0.01)

    asyncio.run(story())


def test_of_a_start_that_fails_no_connection_is_left_and_none_is_taken() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            start = await started(host)
            first, second = [place.ticket for place in start.places]
            came = await here.worker(second)
            await until(lambda: any(awaited.came.done() for awaited in here.leader._awaited.values()))
            await host.say(WorkerLost("another life", "of no matter"))
            await host.say(WorkerLost(start.incarnation.id, "it has no memory"))
            with pytest.raises(HostLost, match=r"^it has no memory$"):
                await bringing
            assert await is_closed(came)
            assert await is_closed(await here.worker(first))
            assert await is_closed(await here.worker(second))
            assert not here.leader._awaited

    asyncio.run(story())


def test_of_a_start_that_is_given_up_no_connection_is_left() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            start = await started(host)
            came = await here.worker(start.places[1].ticket)
            await until(lambda: any(awaited.came.done() for awaited in here.leader._awaited.values()))
            bringing.cancel()
            assert await is_closed(came)
            assert not here.leader._awaited

    asyncio.run(story())


def test_of_a_start_that_fails_on_one_host_no_connection_of_another_is_left() -> None:
    async def story() -> None:
        async with world(tp_size=3, nnodes=3) as here:
            hosts = [await here.join(1), await here.join(2)]
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            start = await started(hosts[0])
            came = await here.worker(start.places[0].ticket)
            start = await started(hosts[1])
            await hosts[1].say(WorkerLost(start.incarnation.id, "it has no memory"))
            with pytest.raises(HostLost):
                await bringing
            assert await is_closed(came)

    asyncio.run(story())


def test_a_worker_comes_once() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            start = await started(host)
            first, second = [place.ticket for place in start.places]
            came = await here.worker(first)
            await until(lambda: any(awaited.came.done() for awaited in here.leader._awaited.values()))
            assert await is_closed(await here.worker(first))
            await here.worker(second)
            elsewhere = await bringing
            assert elsewhere is not None
            with contextlib.closing(elsewhere):
                assert elsewhere.channels[2][0].getpeername() == came.sock.getsockname()

    asyncio.run(story())


def test_a_host_that_is_lost_while_it_starts_workers_is_not_waited_for() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            await started(host)
            host.close()
            with pytest.raises(HostLost, match=r"node rank 1 .* is lost: "):
                await bringing

    asyncio.run(story())


def test_the_replicas_of_a_host_are_lost_with_it_and_it_may_come_back() -> None:
    async def story() -> None:
        async with world(tp_size=1, dp_size=2) as here:
            host = await here.join(1)
            host.close()
            await until(lambda: bool(here.lost))
            ((dp_rank, reason),) = here.lost
            assert dp_rank == 1
            assert reason.startswith("node rank 1 (127.0.0.1) is lost: ")
            again = await here.join(1)
            bringing = asyncio.create_task(here.leader.bring(1, timeout_s=None))
            start = await started(again)
            await here.worker(start.places[0].ticket)
            elsewhere = await bringing
            assert elsewhere is not None
            elsewhere.close()
            assert (start.spans_hosts, elsewhere.group) == (False, None)
            here_only = await here.leader.bring(0, timeout_s=None)
            assert here_only is not None
            assert (here_only.channels, here_only.group, here_only.meeting) == ({}, None, None)

    asyncio.run(story())


def test_who_waits_for_a_host_that_was_there_before_waits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so the loop has time for the host that comes."""
    notes: list[str] = []

    def note(text: str, *args: object) -> None:
        notes.append(text % args)
        assert len(notes) < 10

    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            host.close()
            await until(lambda: bool(here.lost))
            monkeypatch.setattr(leader.logger, "info", note)
            bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
            await until(lambda: bool(notes))
            again = await here.join(1)
            assert isinstance(await hear(again), Start)
            assert notes == ["waits for node rank 1", "node rank 1 is there, at 127.0.0.1"]
            bringing.cancel()

    asyncio.run(story())


def test_a_worker_that_ends_is_told_of_the_life_that_it_belonged_to() -> None:
    async def story() -> None:
        async with world(tp_size=2) as here:
            host = await here.join(1)
            lives: list[str] = []
            for _ in range(2):
                bringing = asyncio.create_task(here.leader.bring(0, timeout_s=None))
                start = await started(host)
                await here.worker(start.places[0].ticket)
                elsewhere = await bringing
                assert elsewhere is not None
                elsewhere.close()
                lives.append(start.incarnation.id)
            await host.say(WorkerLost(lives[0], "the one before"))
            await host.say(WorkerLost(lives[1], "this one"))
            await until(lambda: bool(here.lost))
            assert here.lost == [(0, "this one")]

    asyncio.run(story())


def test_a_host_that_is_told_to_end_has_the_server_drain() -> None:
    async def story() -> None:
        async with world() as here:
            await (await here.join(1)).say(Leaving())
            await until(lambda: bool(here.drains))
            assert here.drains == ["node rank 1 was told to end"]

    asyncio.run(story())


def test_the_end_of_the_server_is_told_and_is_nobodys_loss() -> None:
    async def story() -> None:
        async with world(tp_size=3, nnodes=3) as here:
            hosts = [await here.join(1), await here.join(2)]
            ending = asyncio.create_task(here.leader.close("the disk is full"))
            assert [await hear(host) for host in hosts] == [Goodbye("the disk is full")] * 2
            hosts[0].close()
            await until(lambda: list(here.leader._hosts) == [2])
            assert not ending.done(), "the other one has not heard it yet, for all that is known"
            hosts[1].close()
            await ending
            assert here.lost == []

    asyncio.run(story())


def test_a_host_that_says_nothing_is_lost_and_hears_meanwhile_that_the_leader_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_INTERVAL", "0.1")
    monkeypatch.setenv("TANDEM_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")

    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            assert await host.hear() == Beat()
            await until(lambda: bool(here.lost))
            assert here.lost == [(0, "node rank 1 (127.0.0.1) is lost: silent for 0.2 s")]
            assert await is_closed(host)

    asyncio.run(story())


def test_of_too_many_who_prove_nothing_the_first_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(leader, "HANDSHAKE_S", 3600.0)

    async def story() -> None:
        async with world() as here:
            silent: list[socket.socket] = []
            for number in range(1, 3):
                silent.append(socket.create_connection(here.listener.getsockname()))
                await until(lambda number=number: len(here.leader._unproven) == number)
            await here.join(1)
            for sock in silent:
                sock.setblocking(False)
            loop = asyncio.get_running_loop()
            while await loop.sock_recv(silent[0], 1000):
                pass
            assert silent[1].recv(1000), "the hello of the leader, and not its end"
            with pytest.raises(BlockingIOError):
                silent[1].recv(1000)
            for sock in silent:
                sock.close()

    asyncio.run(story())


def test_of_who_says_nothing_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(leader, "HANDSHAKE_S", 0.01)

    async def story() -> None:
        async with world() as here:
            monkeypatch.setattr(leader.logger, "warning", lambda line, *words: lines.append(line % words))
            with contextlib.closing(socket.create_connection(here.listener.getsockname())):
                await until(lambda: bool(lines))
        assert lines == ["who came from 127.0.0.1 has not joined: no word within 0.01 s"]

    asyncio.run(story())


def test_who_is_no_member_is_closed_and_who_has_gone_is_forgotten() -> None:
    async def story() -> None:
        async with world() as here:
            host = await here.join(1)
            sock = socket.create_connection(here.listener.getsockname())
            non_member: HostConnection[ToFollower] = HostConnection(
                sock, ClusterSecret(b"of another cluster"), ToFollower, is_dialler=True
            )
            await non_member.meet()
            await non_member.say(Join(1, FIELDS))
            while await asyncio.get_running_loop().sock_recv(sock, 1000):
                pass
            non_member.close()
            assert await is_closed(await here.worker(bytes(16)))
            (await here.dial()).close()
            await until(lambda: not here.leader._unproven and len(here.leader._proven) == 1)
            host.close()
            await until(lambda: not here.leader._proven)

    asyncio.run(story())


def test_where_no_descriptor_is_left_hosts_come_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "ACCEPT_PAUSE_S", 0.001)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")] * 3

        async def sock_accept(sock: socket.socket) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        async with world() as here:
            await here.join(1)
        assert not failures

    asyncio.run(story())


class Leaver(HostConnection[Struct]):
    """While it is spoken to, another host is lost."""

    def __init__(self, hosts: dict[int, HostConnection[ToLeader]], other: int) -> None:
        self.hosts, self.other, self.told = hosts, other, list[Struct]()

    async def say(self, message: Struct) -> None:
        self.told.append(message)
        self.hosts.pop(self.other, None)


def test_a_host_that_is_lost_while_another_is_told_of_an_end_is_waited_for() -> None:
    """It is back later; a server that starts a replica anew does not end by it."""

    async def story() -> None:
        async with world(tp_size=3, nnodes=3) as here:
            hosts = here.leader._hosts
            first, second = Leaver(hosts, 2), Leaver(hosts, 1)
            hosts.update({1: first, 2: second})  # type: ignore[dict-item]  # they have what is asked of a connection
            with pytest.raises(HostLost, match="node rank 1, 2 did not come"):
                await here.leader.bring(0, timeout_s=0.01)
            assert [first.told, second.told] == [[End(0)], [End(0)]]

    asyncio.run(story())
