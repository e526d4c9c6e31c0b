"""The processes of one server: this one (HTTP), the node (decides) and its workers (compute, move KV).

This process is the parent. The children are started as programs, not forked: a fork of a process with threads is a
lottery. What they need they read from stdin as one JSON object (`Launch`); messages go over socket pairs. A child ends
with its parent, whatever ends that: the kernel is asked to kill it then, and its channel closes.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from tandem import cgroups, several_hosts
from tandem.config import ServerConfig
from tandem.core.disagg.dp_rank import DpTopology
from tandem.core.values import Incarnation
from tandem.engine import determinism
from tandem.environment import ENGINES, environment_number
from tandem.membership import ClusterSecret, SecretError, read_secret, user_secret
from tandem.programs import module_command, working_folder
from tandem.ranks import Rank, all_ranks
from tandem.server.channel import ChannelKeys
from tandem.server.exposure import takes_ipv4

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: its terminal is closed
# How OpenMP's threads wait: in GNU's words and in Intel's. Spins are about a hundred microseconds.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
SPINNING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
EXIT_WITH_OTHERS = 3  # of a node or worker that ends because another process is gone
EXIT_GRACE_S = 5.0  # for children that were told to end
GROUP_HOST = "127.0.0.1"  # the workers of a replica are on one machine

ChildName = Literal["node", "worker"]
NO_CHANNELS: Mapping[int, tuple[socket.socket, ChannelKeys]] = {}


class Launch(Struct, frozen=True):
    """What a child is told at birth."""

    config: ServerConfig
    model_dir: str
    incarnation: Incarnation
    http_port: int
    cpu_threads: int
    parent_pid: int
    cluster_secret: bytes = b""  # empty: this server exchanges no KV. Comes over stdin, which nobody else reads
    began_ns: int = 0  # when its server was started, on the clock of the machine
    dp_rank: int = 0  # of the replica
    rank: Rank = Rank()  # of a worker, in its replica
    group_host: str = ""  # where the workers of a replica meet, or with DP attention those of all, if there are several
    group_port: int = 0
    group_own: str = ""  # the address of this host there, for workers of several; else they talk on loopback
    node_keys: ChannelKeys | None = None  # of a worker whose node is on another host
    worker_keys: dict[int, ChannelKeys] = {}  # of a node whose workers are: by their shards

    @property
    def worker(self) -> int:
        """Its number among those of all replicas."""
        return self.dp_rank * self.config.cut.num_shards + self.rank.shard

    @property
    def topology(self) -> DpTopology:
        """Of this replica among those of its server."""
        return topology_of(self.config, self.dp_rank)


def topology_of(config: ServerConfig, dp_rank: int) -> DpTopology:
    if config.enable_dp_attention:
        return DpTopology(attn_dp_size=config.dp_size, attn_dp_rank=dp_rank)
    return DpTopology(system_dp_size=config.dp_size, system_dp_rank=dp_rank)


class ServerFailure(Exception):
    """The server cannot start or go on. One line for the user: cause and remedy."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a replica that starts has on other hosts, and what was agreed with them. Owns its sockets."""

    incarnation: Incarnation
    channels: Mapping[int, tuple[socket.socket, ChannelKeys]]  # to its workers there, by their shards
    group: tuple[str, int] | None = None  # where its workers meet, if they are on several hosts
    group_own: str = ""
    meeting: socket.socket | None = None  # which listens there, for the first worker if that is here

    def close(self) -> None:
        for channel, _ in self.channels.values():
            channel.close()
        if self.meeting is not None:
            self.meeting.close()


@dataclass(slots=True)
class Children:
    """The node and the workers of one replica, as this process holds them: those on this host."""

    node: subprocess.Popen[bytes]
    workers: tuple[subprocess.Popen[bytes], ...]  # in order of their shards
    ranks: tuple[Rank, ...]  # of the workers
    channel: socket.socket  # to the node
    told_loss: str = ""  # of a worker on another host, as that host tells it

    @property
    def all(self) -> tuple[subprocess.Popen[bytes], ...]:
        return (self.node, *self.workers)

    def kill(self) -> None:
        """End them now and collect them. Safe to call at any time."""
        for child in self.all:
            if child.poll() is None:
                child.kill()
        for child in self.all:
            child.wait()

    def ask_for_record(self) -> None:
        """A node that hangs writes what it did last, and ends, if it still can."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self.node.send_signal(number)

    def kill_some(self, name: ChildName) -> None:
        """End the node, or the workers, now; `kill` or `wait` collects them."""
        for child in (self.node,) if name == "node" else self.workers:
            child.kill()

    async def wait(self, timeout_s: float) -> None:
        """Give them time to end by themselves, then kill them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline and any(child.poll() is None for child in self.all):
            await asyncio.sleep(0.01)
        self.kill()

    async def node_ends(self, timeout_s: float) -> None:
        """It may have something to write."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline and self.node.poll() is None:
            await asyncio.sleep(0.01)

    @property
    def was_killed(self) -> bool:
        """Whether one of them was ended by a signal."""
        return any((code := child.poll()) is not None and code < 0 for child in self.all)

    def exit_reason(self) -> str:
        """Who died of what, as far as the exit status tells; empty if nobody did."""
        named = [(rank.name, child) for rank, child in zip(self.ranks, self.workers, strict=True)]
        return exit_reason([*named, ("node", self.node)]) or self.told_loss


def exit_reason(named: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> str:
    """Who of these died of what, as far as the exit status tells; empty if nobody did."""
    for name, child in named:
        if (code := child.poll()) not in (None, 0, EXIT_WITH_OTHERS):
            return f"the {name} process {describe_exit(code)}"
    return ""


def describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by signal SIGKILL; if nobody did that, the machine ran out of memory"
    if code < 0:
        names = {int(number): number.name for number in signal.Signals}  # not of all those that are for real time
        return f"was ended by signal {names.get(-code, -code)}"
    return f"ended with exit code {code}"


def start_children(
    launch: Launch,
    meeting: socket.socket | None = None,
    channels: Mapping[int, tuple[socket.socket, ChannelKeys]] = NO_CHANNELS,
) -> Children:
    """Call from the main thread: children die with the *thread* that started them.

    meeting: for the first worker, of a group that `launch` names already.
    channels: to the workers that run on other hosts, by their shards
    """
    ranks = all_ranks(*launch.config.cut.sizes)
    here = [rank for rank in ranks if rank.shard not in channels]
    environment = environment_of_workers(launch)
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as ours:  # ends that the children have now
        api_end, node_api_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        kept = ours.enter_context(contextlib.ExitStack())  # the one end that stays, once all of them run
        kept.enter_context(api_end)
        ours.enter_context(node_api_end)
        pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        for rank in here:
            pairs[rank.shard] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for end in pairs[rank.shard]:
                ours.enter_context(end)
        if len(ranks) > 1 and not launch.group_host:
            meeting = ours.enter_context(socket.create_server((GROUP_HOST, 0)))
            launch = meeting_at(launch, meeting)
        try:
            for rank in here:
                ends = worker_ends(rank, pairs[rank.shard][1], meeting)
                started.append(start_child("worker_process", ends, structs.replace(launch, rank=rank), environment))
            node_ends = [channels[r.shard][0] if r.shard in channels else pairs[r.shard][0] for r in ranks]
            keys = {shard: keys for shard, (_, keys) in channels.items()}
            node_launch = structs.replace(launch, worker_keys=keys)
            node = start_child("node.process", [node_api_end, *node_ends], node_launch, dict(os.environ))
        except OSError:
            for worker in started:
                worker.kill()
                worker.wait()
            raise
        kept.pop_all()
    return Children(node, tuple(started), tuple(here), api_end)


def worker_ends(rank: Rank, channel: socket.socket, meeting: socket.socket | None) -> list[socket.socket]:
    return [channel, meeting] if meeting is not None and rank.shard == 0 else [channel]


def meeting_at(launch: Launch, meeting: socket.socket) -> Launch:
    return structs.replace(launch, group_host=GROUP_HOST, group_port=meeting.getsockname()[1])


def start_child(
    module: str, ends: list[socket.socket], launch: Launch, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    fds = [end.fileno() for end in ends]
    child = subprocess.Popen(
        module_command(f"tandem.server.{module}", *(str(fd) for fd in fds)),
        cwd=working_folder(),
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        pass_fds=fds,
        env=environment,
        start_new_session=True,  # Ctrl+C in a terminal is for the parent, which drains
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL),
    )
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(launch))
        child.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its exit code will say so
    return child


def environment_of_workers(launch: Launch) -> dict[str, str]:
    return worker_environment(
        launch.cpu_threads,
        deterministic=launch.config.deterministic,
        owns_cores=owns_cores(launch.config, launch.cpu_threads),
    )


_libc = ctypes.CDLL(None)  # loaded here: between fork and exec little is allowed


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """In a child between fork and exec: have the kernel send it this signal when its parent ends, whenever that is."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # a handler of the parent's would take it, and exec would forget it
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the kernel knew


def worker_environment(cpu_threads: int, *, deterministic: bool, owns_cores: bool = False) -> dict[str, str]:
    """Must be there before torch is imported.

    Threads that wait for the next operation give their core away at once where others compute there, and keep it for a
    bounded time where nobody else needs it: to wake one up takes longer than a small operation.
    """
    return {
        **os.environ,
        **(determinism.environment() if deterministic else {}),
        "OMP_NUM_THREADS": str(cpu_threads),
        "MKL_NUM_THREADS": str(cpu_threads),
        **(SPINNING if owns_cores else PASSIVE),
    }


def owns_cores(config: ServerConfig, cpu_threads: int) -> bool:
    """Whether there is a core for every thread of all the engines that are known of."""
    return cpu_threads * engines_here(config) <= cgroups.num_cores()


def engine_threads(config: ServerConfig) -> int:
    """Of each worker: cores divided by the workers of this server, and by the engines on this machine, of which
    `tandem up` and `tandem demo` tell in the environment."""
    if config.cpu_threads > 0:
        return config.cpu_threads
    return max(1, cgroups.num_cores() // engines_here(config))


def engines_here(config: ServerConfig) -> int:
    """Workers on this machine that are known of."""
    return config.num_workers_here * int(environment_number(ENGINES))


def process_name(launch: Launch, name: str) -> str:
    """For log lines: with the DP rank where there are several."""
    return name if launch.config.dp_size == 1 else f"{name} DP{launch.dp_rank}"


def read_launch() -> Launch:
    """In a child, first thing: learn what to do."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    if os.getppid() != launch.parent_pid:
        sys.exit(1)  # the parent has died, and the kernel was asked too late to tell us
    return launch


@dataclass(slots=True)
class Listeners:
    """The ports of this server, bound before anything is started: a port that is taken is noticed at once."""

    http: socket.socket
    bootstrap: socket.socket | None
    hosts: socket.socket | None = None  # where the other hosts of this server find it

    @property
    def http_port(self) -> int:
        return int(self.http.getsockname()[1])

    @property
    def bootstrap_port(self) -> int:
        return int(self.bootstrap.getsockname()[1]) if self.bootstrap is not None else 0

    @property
    def address(self) -> str:
        """host:port for a URL; the host one can connect to."""
        host = str(self.http.getsockname()[0])
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"[{host}]:{self.http_port}" if ":" in host else f"{host}:{self.http_port}"

    def close(self) -> None:
        for listener in (self.http, self.bootstrap, self.hosts):
            if listener is not None:
                listener.close()


def bind_listeners(config: ServerConfig) -> Listeners:
    """Raises ServerFailure."""
    found = Listeners(_bind(config.host, config.port, flag="--port"), None)
    try:
        if config.role == "prefill":
            port = config.disaggregation_bootstrap_port
            found.bootstrap = _bind(config.host, port, flag="--disaggregation-bootstrap-port")
        if config.dist_init_addr is not None:
            found.hosts = _bind(*meeting_place(config), flag="--dist-init-addr", host_flag="--dist-init-addr")
    except ServerFailure:
        found.close()
        raise
    return found


def meeting_place(config: ServerConfig) -> tuple[str, int]:
    """Where the hosts of this server meet."""
    found = None if config.dist_init_addr is None else several_hosts.address(config.dist_init_addr)
    assert found is not None, "violations() has refused it"
    return found


def _bind(host: str, port: int, *, flag: str, host_flag: str = "--host") -> socket.socket:
    """Listens from here on: whoever connects early waits for us, whoever wants the same port fails."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # the latter of what no name can be
        why = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise ServerFailure(f"{host_flag} {host} is no address of this machine ({why}); use 127.0.0.1") from error
    try:
        listener = socket.create_server(
            (host, port) if family == socket.AF_INET else address[:2],
            family=family,
            backlog=2048,
            dualstack_ipv6=takes_ipv4(host),
        )
    except OSError as error:
        names_port = host_flag != flag  # else an address that other hosts are told, whose port they have to know
        remedy = (
            f"use another {flag}{', or 0 for a free one' if names_port else ''}"
            if error.errno == errno.EADDRINUSE
            else f"check {' and '.join(dict.fromkeys((host_flag, flag)))}"
        )
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise ServerFailure(f"cannot listen on {host} port {port} ({cause}); {remedy}") from error
    # Connections inherit it. asyncio sets it only on sockets whose protocol number is given, and without it a reply's
    # body waits until its head is acknowledged: 40 ms per reply on a connection that is kept.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def cluster_secret(config: ServerConfig) -> ClusterSecret | None:
    """What this server proves to its peers, and asks of them; None for one without peers. Raises ServerFailure."""
    if config.role == "unified" and config.nnodes == 1:
        return None
    try:
        if config.cluster_secret_file is not None:
            return read_secret(Path(config.cluster_secret_file))
        return user_secret(os.environ)
    except SecretError as error:
        raise ServerFailure(str(error)) from error


def new_incarnation(listeners: Listeners, dp_rank: int = 0) -> Incarnation:
    """Of a replica that starts now. Host, port and rank are its name for people; its identity is random."""
    rank = f"/dp{dp_rank}" if dp_rank else ""
    return Incarnation(f"{socket.gethostname()}:{listeners.http_port}{rank}", secrets.token_hex(16))


class Replicas:
    """The replicas of this server, one for each DP rank. Each start of one is another life, with its own identity."""

    def __init__(self, start: Callable[[int, Elsewhere | None], Children], dp_size: int) -> None:
        """Starts so many of them; `start` gets a DP rank. Call from the main thread, as `start_children`."""
        self._start = start
        self.children: dict[int, Children] = {}  # by DP rank
        try:
            for dp_rank in range(dp_size):
                self.restart(dp_rank)
        except OSError:
            self.kill()
            raise

    def restart(self, dp_rank: int, elsewhere: Elsewhere | None = None) -> None:
        """End this replica, whatever is left of it, and start it anew. Call from the main thread.

        elsewhere: of a server on several hosts. Its sockets belong to the children then.
        """
        self.end(dp_rank)
        self.children[dp_rank] = self._start(dp_rank, elsewhere)

    def end(self, dp_rank: int) -> None:
        """What is left of this replica on this host."""
        if dp_rank in self.children:
            self.children[dp_rank].kill()

    def kill(self) -> None:
        """End them all now and collect them. Safe to call at any time."""
        for children in self.children.values():
            children.kill()

    async def wait(self, timeout_s: float) -> None:
        """Give all of them time to end by themselves, then kill them."""
        await asyncio.gather(*(children.wait(timeout_s) for children in self.children.values()))


def start_replicas(launch: Launch, listeners: Listeners) -> Replicas:
    """With DP attention their workers are one group: none of them is ever started anew.

    On several hosts none is started yet: the other hosts have to come first.
    """

    def start(dp_rank: int, elsewhere: Elsewhere | None) -> Children:
        own = structs.replace(launch, dp_rank=dp_rank)
        if elsewhere is not None:
            with contextlib.closing(elsewhere):
                return start_children(spread(own, elsewhere), elsewhere.meeting, elsewhere.channels)
        own = structs.replace(own, incarnation=new_incarnation(listeners, dp_rank))
        if meeting is None:
            return start_children(own)
        return start_children(meeting_at(own, meeting), meeting if dp_rank == 0 else None)

    with contextlib.ExitStack() as ours:
        meeting = None
        if launch.config.enable_dp_attention:
            meeting = ours.enter_context(socket.create_server((GROUP_HOST, 0)))
        return Replicas(start, launch.config.dp_size if launch.config.nnodes == 1 else 0)


def spread(launch: Launch, elsewhere: Elsewhere) -> Launch:
    """Of a replica that has workers on other hosts, or may have."""
    launch = structs.replace(launch, incarnation=elsewhere.incarnation)
    if elsewhere.group is None:
        return launch
    host, port = elsewhere.group
    return structs.replace(launch, group_host=host, group_port=port, group_own=elsewhere.group_own)
