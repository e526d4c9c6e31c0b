"""Node rank 0 of a server on several hosts: who else is there, and which of its workers run where.

The others dial us and join (`agreement.py` decides). For a replica that starts each of them is told which workers to
start, and dials once more for each; these connections become the channels of the node, which knows nothing of hosts.

A host that is silent, or closes, is lost, and with it the replicas that have a worker there: they are started anew when
it is back. Who has proved nothing costs a socket and a task, for a few seconds, and gives way to newcomers.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.config import ServerConfig
from tandem.core.values import SECOND, Incarnation
from tandem.membership import ClusterSecret
from tandem.ranks import Rank, all_ranks
from tandem.server.channel import ChannelClosed, ChannelKeys
from tandem.server.frames import MalformedFrame
from tandem.server.hosts.agreement import Roster
from tandem.server.hosts.connection import HANDSHAKE_S, HostConnection
from tandem.server.hosts.messages import (
    Beat,
    End,
    Goodbye,
    Here,
    Join,
    Leaving,
    Start,
    ToLeader,
    Welcome,
    WorkerHere,
    WorkerLost,
    WorkerTicket,
    as_reason,
)
from tandem.server.node.settings import heartbeat
from tandem.server.processes import Elsewhere
from tandem.several_hosts import host_of

MAX_UNPROVEN = 64
GOODBYE_S = 2.0  # until the others have heard that the server ends
ACCEPT_PAUSE_S = 0.1  # after an accept that failed, for lack of descriptors
TICKET_BYTES = 16

logger = logging.getLogger("tandem.hosts")


class HostLost(Exception):
    """A host is not there, or not any more, or cannot start a worker. One line."""


class OtherHosts(Protocol):
    """What the API process asks of the other hosts of its server."""

    def open(self) -> None:
        """Let them come. Call from a task of the loop."""
        ...

    async def bring(self, dp_rank: int, *, timeout_s: float | None) -> Elsewhere | None:
        """Another life of this replica, as far as it is on other hosts; None where there are none.

        Returns when all of its hosts are there, within `timeout_s`. Raises HostLost.
        """
        ...

    async def close(self, reason: str) -> None:
        """The server has ended. An empty reason: as it should."""
        ...


class NoOtherHosts:
    def open(self) -> None:
        pass

    async def bring(self, dp_rank: int, *, timeout_s: float | None) -> Elsewhere | None:
        return None

    async def close(self, reason: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom a leader tells."""

    lost: Callable[[int, str], None]  # this replica has lost a worker, with the reason as far as its host knows one
    drain: Callable[[str], None]  # a host was told to end


@dataclass(frozen=True, slots=True)
class Channel:
    """To one worker elsewhere, as it came in."""

    sock: socket.socket
    keys: ChannelKeys
    said: WorkerHere


@dataclass(slots=True)
class Awaited:
    """A worker that was asked for."""

    node_rank: int
    incarnation_id: str
    came: asyncio.Future[Channel]


class Leader:
    """An `OtherHosts`. Owns `listener` from `open` on."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        secret: ClusterSecret,
        fields: dict[str, str],
        *,
        new_incarnation: Callable[[int], Incarnation],
        hooks: Hooks,
    ) -> None:
        self._config = config
        self._listener = listener
        self._secret = secret
        self._new_incarnation = new_incarnation
        self._hooks = hooks
        self._roster = Roster(config.nnodes, fields)
        self._hosts: dict[int, HostConnection[ToLeader]] = {}  # by node rank
        self._lives: dict[str, int] = {}  # DP ranks, by the incarnations that were started last
        self._meeting_of_all: tuple[str, int] | None = None  # with DP attention, once DP rank 0 has made it
        self._awaited: dict[bytes, Awaited] = {}  # by ticket
        self._came = asyncio.Event()  # a host has joined
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
        self._proven: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._is_over = False
        beats = heartbeat()
        self._beat_s = beats.interval_ns / SECOND
        self._silence_s = beats.silence_ns(beats.interval_ns) / SECOND

    def open(self) -> None:
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self, reason: str) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        self._is_over = True
        for connection in list(self._hosts.values()):
            with contextlib.suppress(ChannelClosed, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await connection.say(Goodbye(as_reason(reason)))
        if self._proven:
            await asyncio.wait(self._proven, timeout=GOODBYE_S)  # they close when they have heard it
        tasks = [*self._unproven, *self._proven]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- a replica that starts ---------------------------------------------------------------------------------------

    async def bring(self, dp_rank: int, *, timeout_s: float | None) -> Elsewhere | None:
        by_host, are_one_group = self._ranks_by_host(dp_rank), self._config.enable_dp_attention
        await self._tell_end(dp_rank, set(by_host))
        await self._all_there(set(range(self._config.nnodes)) if are_one_group else set(by_host), timeout_s)
        incarnation = self._new_incarnation(dp_rank)
        self._lives = {id: rank for id, rank in self._lives.items() if rank != dp_rank}
        self._lives[incarnation.id] = dp_rank
        spans_hosts = len(by_host) > 1 or are_one_group
        meeting, group = None, self._meeting_of_all
        own = str(self._listener.getsockname()[0])
        channels: dict[int, tuple[socket.socket, ChannelKeys]] = {}
        with contextlib.ExitStack() as undo:  # unless all goes well
            for node_rank, ranks in by_host.items():  # the host of the first worker comes first
                if node_rank == 0:
                    if spans_hosts and group is None:
                        meeting = undo.enter_context(socket.create_server((own, 0), family=self._listener.family))
                        group = (own, int(meeting.getsockname()[1]))
                    continue
                host, port = group or ("", 0)
                places = tuple(WorkerTicket(rank.shard, secrets.token_bytes(TICKET_BYTES)) for rank in ranks)
                start = Start(dp_rank, incarnation, places, spans_hosts, host, port)
                for place, channel in zip(places, await self._start(node_rank, start), strict=True):
                    undo.enter_context(channel.sock)
                    channels[place.shard] = (channel.sock, channel.keys)
                    if group is None and channel.said.meeting_port:
                        group = (channel.said.meeting_host, channel.said.meeting_port)
            undo.pop_all()
        self._meeting_of_all = group if are_one_group else None
        return Elsewhere(incarnation, channels, group, own, meeting)

    def _ranks_by_host(self, dp_rank: int) -> dict[int, list[Rank]]:
        """Those of one replica, in order of their shards."""
        config, found = self._config, dict[int, list[Rank]]()
        ranks = all_ranks(*config.cut.sizes)
        for rank in ranks:
            number = dp_rank * len(ranks) + rank.shard
            host = host_of(number, num_workers=config.num_workers, nnodes=config.nnodes)
            found.setdefault(host, []).append(rank)
        return found

    async def _tell_end(self, dp_rank: int, node_ranks: set[int]) -> None:
        for connection in [self._hosts[node_rank] for node_rank in node_ranks & self._hosts.keys()]:
            with contextlib.suppress(ChannelClosed):  # its own task notices
                await connection.say(End(dp_rank))

    async def _all_there(self, node_ranks: set[int], timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while missing := self._roster.missing(node_ranks):
                    logger.info("waits for node rank %s", ", ".join(map(str, missing)))
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            names = ", ".join(map(str, self._roster.missing(node_ranks)))
            raise HostLost(
                f"node rank {names} did not come to {self._config.dist_init_addr} within {timeout_s:g} s; start it, "
                "or raise --dist-timeout"
            ) from None

    async def _start(self, node_rank: int, start: Start) -> list[Channel]:
        """In the order of its places. Raises HostLost; then there are none."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in start.places]
        for place, future in zip(start.places, futures, strict=True):
            self._awaited[place.ticket] = Awaited(node_rank, start.incarnation.id, future)
        try:
            if node_rank not in self._hosts:
                raise HostLost(f"node rank {node_rank} is gone")
            await self._hosts[node_rank].say(start)
            async with asyncio.timeout(2 * HANDSHAKE_S):
                return list(await asyncio.gather(*futures))
        except BaseException as error:
            for future in futures:
                if not future.cancel() and not future.cancelled() and future.exception() is None:
                    future.result().sock.close()
            if isinstance(error, ChannelClosed | TimeoutError):
                raise HostLost(f"node rank {node_rank} does not start its workers") from error
            raise
        finally:
            for place in start.places:
                del self._awaited[place.ticket]

    # -- who comes ---------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                next(iter(self._unproven)).cancel()
            task = loop.create_task(self._meet(sock, str(address[0])))
            self._unproven[task] = None
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # so that who came before is heard, however many wait in the kernel

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._proven.pop(task, None)

    async def _meet(self, sock: socket.socket, address: str) -> None:
        connection: HostConnection[ToLeader] = HostConnection(sock, self._secret, ToLeader, is_dialler=False)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await connection.meet()
                await connection.say(Here())
                first = await connection.hear()
        except (ChannelClosed, MalformedFrame, TimeoutError) as error:
            why = str(error) or f"no word within {HANDSHAKE_S:g} s"
            logger.warning("who came from %s has not joined: %s", address, why)
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        self._proven[task] = None
        if isinstance(first, WorkerHere):
            self._take_worker(connection, first)
        elif isinstance(first, Join):
            try:
                await self._host(connection, first, address)
            finally:
                connection.close()
        else:
            connection.close()

    def _take_worker(self, connection: HostConnection[ToLeader], said: WorkerHere) -> None:
        awaited = self._awaited.get(said.ticket)
        if awaited is None or awaited.came.done():
            connection.close()  # of a start that was given up
        else:
            awaited.came.set_result(Channel(*connection.release(), said))

    async def _host(self, connection: HostConnection[ToLeader], join: Join, address: str) -> None:
        """From its welcome to its loss."""
        node_rank = join.node_rank
        answer = self._roster.admit(join, address)
        with contextlib.suppress(ChannelClosed):  # the next line that hears notices
            await connection.say(answer)
        if not isinstance(answer, Welcome):
            logger.warning("a host at %s is refused: %s", address, answer.reason)
            return
        logger.info("node rank %d is there, at %s", node_rank, address)
        self._hosts[node_rank] = connection
        self._came.set()
        beating = asyncio.get_running_loop().create_task(connection.beat(self._beat_s))
        reason = "this server ends"
        try:
            reason = await self._listen(connection, node_rank)
        finally:
            beating.cancel()
            del self._hosts[node_rank]
            self._roster.leave(node_rank)
            if not self._is_over:
                self._lose(node_rank, f"node rank {node_rank} ({address}) is lost: {reason}")

    async def _listen(self, connection: HostConnection[ToLeader], node_rank: int) -> str:
        """Why it is lost."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await connection.hear()
                match message:
                    case WorkerLost(incarnation_id, reason):
                        self._worker_lost(incarnation_id, reason)
                    case Leaving():
                        self._hooks.drain(f"node rank {node_rank} was told to end")
                    case Beat() | Join() | WorkerHere():
                        pass
        except TimeoutError:
            return f"silent for {self._silence_s:g} s"
        except (ChannelClosed, MalformedFrame) as error:
            return str(error)

    def _worker_lost(self, incarnation_id: str, reason: str) -> None:
        self._fail_awaited(lambda awaited: awaited.incarnation_id == incarnation_id, reason)
        if incarnation_id in self._lives:
            self._hooks.lost(self._lives[incarnation_id], reason)

    def _lose(self, node_rank: int, reason: str) -> None:
        logger.warning("%s", reason)
        self._fail_awaited(lambda awaited: awaited.node_rank == node_rank, reason)
        for dp_rank in range(self._config.dp_size):
            if node_rank in self._ranks_by_host(dp_rank):
                self._hooks.lost(dp_rank, reason)

    def _fail_awaited(self, is_meant: Callable[[Awaited], bool], reason: str) -> None:
        for awaited in self._awaited.values():
            if is_meant(awaited) and not awaited.came.done():
                awaited.came.set_exception(HostLost(reason))
