"""The processes of one server: this one (HTTP), the node (decides) and the worker (computes, moves KV).

This process is the parent. The children are started as programs, not forked: a fork of a process with threads is a
lottery. What they need they read from stdin as one JSON object (`Launch`); messages go over socket pairs. A child ends
with its parent, whatever ends that: the kernel is asked to kill it then, and its channel closes.
"""

import asyncio
import ctypes
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from tandem.config import ENGINES, ServerConfig, environment_number
from tandem.core.values import Incarnation
from tandem.engine import determinism
from tandem.membership import ClusterSecret, SecretError, read_secret, user_secret

PR_SET_PDEATHSIG = 1

ChildName = Literal["node", "worker"]


class Launch(Struct, frozen=True):
    """What a child is told at birth."""

    config: ServerConfig
    model_dir: str
    incarnation: Incarnation
    http_port: int
    cpu_threads: int
    parent_pid: int
    cluster_secret: bytes = b""  # empty: this server exchanges no KV. Comes over stdin, which nobody else reads


class ServerFailure(Exception):
    """The server cannot start or go on. One line for the user: cause and remedy."""


@dataclass(slots=True)
class Children:
    """The node and the worker, as this process holds them."""

    node: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]
    channel: socket.socket  # to the node

    def kill(self) -> None:
        """End them now and collect them. Safe to call at any time."""
        for child in (self.node, self.worker):
            if child.poll() is None:
                child.kill()
        for child in (self.node, self.worker):
            child.wait()

    def kill_one(self, name: ChildName) -> None:
        """End this one now; `kill` or `wait` collects it."""
        (self.node if name == "node" else self.worker).kill()

    async def wait(self, timeout_s: float) -> None:
        """Give them time to end by themselves, then kill them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline and (self.node.poll() is None or self.worker.poll() is None):
            await asyncio.sleep(0.01)
        self.kill()

    def exit_reason(self) -> str:
        """Who died of what, as far as the exit status tells; empty if nobody did."""
        for name, child in (("worker", self.worker), ("node", self.node)):
            if (code := child.poll()) is not None and code != 0:
                return f"the {name} process {describe_exit(code)}"
        return ""


def describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by signal SIGKILL; if nobody did that, the machine ran out of memory"
    if code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def start_children(launch: Launch) -> Children:
    """Call from the main thread: children die with the *thread* that started them."""
    api_end, node_api_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    node_worker_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with node_api_end, node_worker_end, worker_end:
        environment = worker_environment(launch.cpu_threads, deterministic=launch.config.deterministic)
        worker = _start("worker_process", [worker_end], launch, environment)
        try:
            node = _start("node.process", [node_api_end, node_worker_end], launch, dict(os.environ))
        except OSError:
            worker.kill()
            worker.wait()
            raise
    return Children(node, worker, api_end)


def _start(
    module: str, ends: list[socket.socket], launch: Launch, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    fds = [end.fileno() for end in ends]
    child = subprocess.Popen(
        [sys.executable, "-m", f"tandem.server.{module}", *(str(fd) for fd in fds)],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        pass_fds=fds,
        env=environment,
        start_new_session=True,  # Ctrl+C in a terminal is for the parent, which drains
        preexec_fn=_end_with_parent,  # not when it has imported torch: the parent may be gone by then
    )
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(launch))
        child.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its exit code will say so
    return child


_libc = ctypes.CDLL(None)  # loaded here: between fork and exec little is allowed


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def worker_environment(cpu_threads: int, *, deterministic: bool) -> dict[str, str]:
    """Must be there before torch is imported. Threads that wait give their core away: others compute there."""
    return {
        **os.environ,
        **(determinism.environment() if deterministic else {}),
        "OMP_NUM_THREADS": str(cpu_threads),
        "MKL_NUM_THREADS": str(cpu_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }


def engine_threads(config: ServerConfig) -> int:
    """Cores divided by the engines on this machine, of which `tandem up` and `tandem demo` tell in the environment."""
    if config.cpu_threads > 0:
        return config.cpu_threads
    return max(1, len(os.sched_getaffinity(0)) // int(environment_number(ENGINES)))


def read_launch() -> Launch:
    """In a child, first thing: learn what to do."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    if os.getppid() != launch.parent_pid:
        sys.exit(1)  # the parent died before the kernel knew of our params
    return launch


@dataclass(slots=True)
class Listeners:
    """The ports of this server, bound before anything is started: a port that is taken is noticed at once."""

    http: socket.socket
    bootstrap: socket.socket | None

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
        self.http.close()
        if self.bootstrap is not None:
            self.bootstrap.close()


def bind_listeners(config: ServerConfig) -> Listeners:
    """Raises ServerFailure."""
    http = _bind(config.host, config.port, flag="--port")
    if config.role != "prefill":
        return Listeners(http, None)
    try:
        return Listeners(
            http, _bind(config.host, config.disaggregation_bootstrap_port, flag="--disaggregation-bootstrap-port")
        )
    except ServerFailure:
        http.close()
        raise


def _bind(host: str, port: int, *, flag: str) -> socket.socket:
    """Listens from here on: whoever connects early waits for us, whoever wants the same port fails."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ServerFailure(f"--host {host} is no address of this machine ({error.strerror}); use 127.0.0.1") from error
    try:
        listener = socket.create_server(
            (host, port) if family == socket.AF_INET else address[:2], family=family, backlog=2048
        )
    except OSError as error:
        remedy = (
            f"use another {flag}, or 0 for a free one"
            if error.errno == errno.EADDRINUSE
            else f"check --host and {flag}"
        )
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise ServerFailure(f"cannot listen on {host} port {port} ({cause}); {remedy}") from error
    # Connections inherit it. asyncio sets it only on sockets whose protocol number is given, and without it a reply's
    # body waits until its head is acknowledged: 40 ms per reply on a connection that is kept.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def cluster_secret(config: ServerConfig) -> ClusterSecret | None:
    """What this server proves to its peers, and asks of them; None for one without peers. Raises ServerFailure."""
    if config.role == "unified":
        return None
    try:
        if config.cluster_secret_file is not None:
            return read_secret(Path(config.cluster_secret_file))
        return user_secret(os.environ)
    except SecretError as error:
        raise ServerFailure(str(error)) from error


def new_incarnation(listeners: Listeners) -> Incarnation:
    """Of a server that starts now. Host and port are its name for people; its identity is random."""
    return Incarnation(f"{socket.gethostname()}:{listeners.http_port}", secrets.token_hex(16))
