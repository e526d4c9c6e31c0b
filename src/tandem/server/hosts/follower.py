"""A host of a server that is not node rank 0: starts the workers it is told to, and ends them with the server.

It dials node rank 0 and joins. When that is lost, its workers end, and it dials again, as long as `--dist-timeout`: the
server begins a new life when all hosts are there. It ends when the server does, with what that ended for.

SIGTERM     the server is asked to drain, all of it: it cannot do without this host. A second one ends it at once
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from tandem.config import ServerConfig
from tandem.core.values import SECOND
from tandem.membership import ClusterSecret
from tandem.ranks import all_ranks
from tandem.server.channel import ChannelClosed, ChannelKeys
from tandem.server.frames import MalformedFrame
from tandem.server.hosts.connection import HANDSHAKE_S, HostConnection
from tandem.server.hosts.fields import fields_of
from tandem.server.hosts.messages import (
    End,
    Goodbye,
    Join,
    Leaving,
    Refused,
    Start,
    ToFollower,
    Welcome,
    WorkerHere,
    WorkerLost,
    as_reason,
)
from tandem.server.node.session import NotAMember
from tandem.server.node.settings import heartbeat
from tandem.server.processes import (
    EXIT_GRACE_S,
    GROUP_HOST,
    STOP_SIGNALS,
    Launch,
    ServerFailure,
    engine_threads,
    environment_of_workers,
    exit_reason,
    meeting_place,
    start_child,
    worker_ends,
)
from tandem.server.wire import EVERY_HOST

REDIAL_S = 0.5
POLL_S = 0.05  # how often it looks whether its workers are there

logger = logging.getLogger("tandem.hosts")


@dataclass(slots=True)
class HostWorkers:
    """Of one life of a replica, those on this host."""

    incarnation_id: str
    named: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list[tuple[str, subprocess.Popen[bytes]]])
    is_told: bool = False  # node rank 0, that one of them is gone

    @property
    def is_whole(self) -> bool:
        return all(process.poll() is None for _, process in self.named)

    @property
    def is_there(self) -> bool:
        return any(process.poll() is None for _, process in self.named)

    def kill(self) -> None:
        for _, process in self.named:
            process.kill()
        for _, process in self.named:
            process.wait()


class Follower:
    """One life of this host. Its methods run on the main thread: workers end with the thread that started them."""

    def __init__(self, config: ServerConfig, model_dir: Path, secret: ClusterSecret) -> None:
        """Raises OSError."""
        self._config = config
        self._model_dir = model_dir
        self._secret = secret
        self._fields = fields_of(config, model_dir)
        self._replicas: dict[int, HostWorkers] = {}  # by DP rank
        self._connection: HostConnection[ToFollower] | None = None  # once it is welcome
        self._is_leaving = False
        beats = heartbeat()
        self._beat_s = beats.interval_ns / SECOND
        self._silence_s = beats.silence_ns(beats.interval_ns) / SECOND
        self._name = f"node rank {config.node_rank}"
        self._leader = f"node rank 0 at {config.dist_init_addr}"

    async def run(self) -> None:
        """Until the server ends, as it should. Raises ServerFailure."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled)
        try:
            while True:
                connection = await self._join()
                self._connection = connection
                logger.info("%s is welcome to %s", self._name, self._leader)
                try:
                    said = await self._follow(connection)
                finally:
                    self._connection = None
                    connection.close()
                if isinstance(said, Goodbye):
                    return await self._part(said.reason)
                self._kill()
                if self._is_leaving:
                    raise ServerFailure(f"{self._leader} was lost while the server drained: {said}")
                logger.warning(
                    "%s is lost: %s; the workers here have ended, and it is dialled again", self._leader, said
                )
        finally:
            self._kill()

    async def _join(self) -> HostConnection[ToFollower]:
        """Raises ServerFailure."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.dist_timeout
        while True:
            connection = None
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    connection = await self._dial()
                    await connection.say(Join(self._config.node_rank, self._fields))
                    answer = await connection.hear()
                why = answer.reason if isinstance(answer, Refused) else "no answer that is one"
            except NotAMember as error:
                raise ServerFailure(f"{self._leader} {error}") from None
            except TimeoutError:
                answer, why = None, "no answer"
            except MalformedFrame as error:
                answer, why = None, f"who answers there is no host of this server ({error})"
            except (OSError, UnicodeError, ChannelClosed) as error:  # UnicodeError: of what is no name
                answer, why = None, str(error)
            if isinstance(answer, Welcome) and connection is not None:
                return connection
            if connection is not None:
                connection.close()
            if isinstance(answer, Refused):
                if answer.is_final:
                    raise ServerFailure(why)
                deadline = min(deadline, loop.time() + 2 * self._silence_s)  # by then who is gone is known to be
            if loop.time() >= deadline:
                raise ServerFailure(f"{self._leader} has not let {self._name} in until --dist-timeout: {why}")
            await asyncio.sleep(REDIAL_S)

    async def _dial(self) -> HostConnection[ToFollower]:
        """Raises OSError, ChannelClosed, MalformedFrame, NotAMember."""
        loop = asyncio.get_running_loop()
        host, port = meeting_place(self._config)
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            connection: HostConnection[ToFollower] = HostConnection(sock, self._secret, ToFollower, is_dialler=True)
            await connection.meet()
            await connection.hear()  # `Here`: it is a member
        except BaseException:
            sock.close()
            raise
        return connection

    async def _follow(self, connection: HostConnection[ToFollower]) -> Goodbye | str:
        """The last word of node rank 0, or why it is lost."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(connection.beat(self._beat_s)), loop.create_task(self._watch(connection))]
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await connection.hear()
                match message:
                    case Start():
                        await self._start(connection, message)
                    case End(dp_rank):
                        self._end(dp_rank)
                    case Goodbye():
                        return message
                    case _:
                        pass
        except TimeoutError:
            return f"silent for {self._silence_s:g} s"
        except (ChannelClosed, MalformedFrame) as error:
            return str(error)
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self, connection: HostConnection[ToFollower]) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                await asyncio.sleep(POLL_S)
                for workers in list(self._replicas.values()):
                    if not workers.is_told and not workers.is_whole:
                        workers.is_told = True
                        reason = exit_reason(workers.named)
                        where = f"{reason}, on {self._name}" if reason else ""
                        await connection.say(WorkerLost(workers.incarnation_id, where))

    async def _start(self, connection: HostConnection[ToFollower], start: Start) -> None:
        """What does not go well is said to node rank 0."""
        self._end(start.dp_rank)
        try:
            await self._start_workers(connection.own_address, start)
        except (OSError, ChannelClosed, MalformedFrame, TimeoutError) as error:
            self._end(start.dp_rank)
            why = f"{self._name} cannot start its workers: {error or type(error).__name__}"
            await connection.say(WorkerLost(start.incarnation.id, as_reason(why)))

    async def _start_workers(self, own: str, start: Start) -> None:
        """own: the address of this host by which the others reach it. Raises OSError, ChannelClosed, MalformedFrame,
        TimeoutError."""
        ranks = all_ranks(*self._config.cut.sizes)
        with contextlib.ExitStack() as ours:  # ends that the children have
            meeting, group = None, (start.group_host, start.group_port)
            if len(ranks) > 1 and not start.group_port:
                host = own if start.spans_hosts else GROUP_HOST
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                meeting = ours.enter_context(socket.create_server((host, 0), family=family))
                group = (host, int(meeting.getsockname()[1]))
            launch = self._launch(start, group, own)
            workers = self._replicas[start.dp_rank] = HostWorkers(start.incarnation.id)
            for place in start.places:
                rank = ranks[place.shard]
                made = group if meeting is not None and start.spans_hosts else ("", 0)
                sock, keys = await self._channel(WorkerHere(place.ticket, *made))
                ours.enter_context(sock)
                told = structs.replace(launch, rank=rank, node_keys=keys)
                ends = worker_ends(rank, sock, meeting)
                process = start_child("worker_process", ends, told, environment_of_workers(told))
                workers.named.append((rank.name, process))

    def _launch(self, start: Start, group: tuple[str, int], own: str) -> Launch:
        """Of the workers of one start, with the flags of this host: where it matters they are those of all."""
        config = dataclasses.replace(self._config, api_key=None, admin_api_key=None)
        if config.host in EVERY_HOST:  # nobody would know which
            config = dataclasses.replace(config, host=own)
        return Launch(
            config=config,
            model_dir=str(self._model_dir.resolve()),
            incarnation=start.incarnation,
            http_port=0,
            cpu_threads=engine_threads(config),
            parent_pid=os.getpid(),
            cluster_secret=b"" if config.role == "unified" else self._secret.raw,
            dp_rank=start.dp_rank,
            group_host=group[0],
            group_port=group[1],
            group_own=own if start.spans_hosts else "",
        )

    async def _channel(self, said: WorkerHere) -> tuple[socket.socket, ChannelKeys]:
        """A connection for one worker. Raises OSError, ChannelClosed, MalformedFrame, TimeoutError."""
        async with asyncio.timeout(HANDSHAKE_S):
            connection = await self._dial()
            await connection.say(said)
        return connection.release()

    def _end(self, dp_rank: int) -> None:
        workers = self._replicas.pop(dp_rank, None)
        if workers is not None:
            workers.kill()

    def _kill(self) -> None:
        for dp_rank in list(self._replicas):
            self._end(dp_rank)

    async def _part(self, reason: str) -> None:
        """Let workers end that were told to. Raises ServerFailure where the server ended for a reason."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EXIT_GRACE_S
        while loop.time() < deadline and any(workers.is_there for workers in self._replicas.values()):
            await asyncio.sleep(POLL_S)
        if reason:
            raise ServerFailure(reason)
        logger.info("the server has ended")

    def _signalled(self) -> None:
        if self._connection is None or self._is_leaving:
            logger.warning("ending at once")
            self._kill()
            os._exit(1)
        logger.info("the server is asked to drain; a second signal ends this host at once")
        self._is_leaving = True
        task = asyncio.get_running_loop().create_task(self._connection.say(Leaving()))
        task.add_done_callback(lambda said: said.cancelled() or said.exception())  # a lost connection is noticed


def follow(config: ServerConfig, model_dir: Path, secret: ClusterSecret) -> None:
    """Until the server ends. Raises ServerFailure. Nothing is left running afterwards."""
    try:
        follower = Follower(config, model_dir, secret)
    except OSError as error:
        raise ServerFailure(f"cannot read the model: {error}") from error
    asyncio.run(follower.run())
