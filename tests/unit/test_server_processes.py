"""What a server says of its processes and ports."""

import asyncio
import contextlib
import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tandem.cli.model_source import find_model
from tandem.cli.serve import read_facts
from tandem.config import ServerConfig
from tandem.core.commands import AnnounceDpRank
from tandem.core.settings import PrefillInfo
from tandem.core.values import Incarnation, Room
from tandem.server import wire
from tandem.server.api.bootstrap import monotonic_now
from tandem.server.api.limits import Task
from tandem.server.api.process import ApiProcess, request_to_copy
from tandem.server.hosts.leader import NoOtherHosts
from tandem.server.node import process as node_process
from tandem.server.node.listener import ControlListener
from tandem.server.node.local_peer import SelectorPoller
from tandem.server.processes import (
    Children,
    Launch,
    Replicas,
    ServerFailure,
    bind_listeners,
    describe_exit,
    end_with_parent,
    engine_threads,
    owns_cores,
    start_child,
    start_children,
    worker_environment,
)
from tandem.server.router.app import listen
from tandem.server.router.config import RouterConfig
from tandem.server.start import serve
from tandem.transfer.link import listen_tcp


def test_an_answer_does_not_wait_until_its_head_is_acknowledged() -> None:
    """With Nagle's algorithm on, the second write of an answer waits 40 ms for the client's delayed acknowledgement."""
    for listener in (bind_listeners(ServerConfig(model="tandem/mini", port=0)).http, listen(RouterConfig((), port=0))):
        with listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_engines_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("TANDEM_ENGINES", raising=False)
    assert engine_threads(ServerConfig(model="m")) == 8
    monkeypatch.setenv("TANDEM_ENGINES", "3")
    assert engine_threads(ServerConfig(model="m")) == 2
    monkeypatch.setenv("TANDEM_ENGINES", "100")
    assert engine_threads(ServerConfig(model="m")) == 1
    assert engine_threads(ServerConfig(model="m", cpu_threads=5)) == 5


def test_threads_of_the_engine_give_their_core_away_while_they_wait() -> None:
    environment = worker_environment(3, deterministic=False, owns_cores=False)
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert environment["KMP_BLOCKTIME"] == "0"
    assert "OMP_WAIT_POLICY" not in worker_environment(3, deterministic=False, owns_cores=True)


def test_threads_have_cores_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("TANDEM_ENGINES", raising=False)
    assert owns_cores(ServerConfig(model="m"), 8)
    assert not owns_cores(ServerConfig(model="m"), 9)
    assert not owns_cores(ServerConfig(model="m", tp_size=2), 5)
    monkeypatch.setenv("TANDEM_ENGINES", "2")
    assert not owns_cores(ServerConfig(model="m"), 5)


def test_only_a_deterministic_engine_is_told_to_sum_in_one_order_and_a_users_own_order_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    assert worker_environment(3, deterministic=True)["MKL_CBWR"] == "AVX2,STRICT"
    assert "MKL_CBWR" not in worker_environment(3, deterministic=False)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert worker_environment(3, deterministic=True)["MKL_CBWR"] == "COMPATIBLE"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "SIGKILL; if nobody did that, the machine ran out of memory"),
        (-11, "SIGSEGV"),
        (-40, "signal 40"),
        (3, "code 3"),
    ],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_a_prefill_registers_with_its_own_bootstrap_server_and_announces_the_ranks_of_rooms_there() -> None:
    config = ServerConfig(model="m", port=0, disaggregation_mode="prefill", disaggregation_bootstrap_port=0)
    listeners = bind_listeners(config)

    async def story() -> dict[Room, int]:
        children = Children(None, (), (), None)  # type: ignore[arg-type]  # none are asked
        process = ApiProcess(config, Replicas(lambda *_: children, 1), listeners, lambda _: NoOtherHosts())
        info = PrefillInfo(dp_size=1)
        replica = wire.ReplicaInfo(Incarnation("p", "1"), "prefill", "abc", {}, "127.0.0.1", 5, (), prefill=info)
        process._receive(0, wire.NodeReady(replica, num_pages=1, page_bytes=1))
        process._receive(0, AnnounceDpRank(Room(7), 0))
        process._receive(0, AnnounceDpRank(Room(8), 1))  # a rank that nobody has: refused, and no harm done
        return process._registry.ranks_of([Room(7), Room(8)], monotonic_now())

    try:
        assert asyncio.run(story()) == {Room(7): 0}
    finally:
        listeners.close()


@pytest.mark.parametrize(
    ("task", "chats", "key", "told"),
    [
        (Task.TOKENS, True, None, "/v1/chat/completions -H "),
        (Task.TOKENS, False, None, "/v1/completions -H "),
        (Task.EMBEDDINGS, True, None, "/v1/embeddings -H "),
        (Task.SCORES, False, None, "/v1/rerank -H "),
        (Task.TOKENS, True, "k3y", '/v1/chat/completions -H "authorization: Bearer $TANDEM_API_KEY" -H '),
    ],
)
def test_the_request_to_copy_is_one_that_the_model_answers(task: Task, chats: bool, key: str | None, told: str) -> None:
    config = ServerConfig(model="m", port=0, api_key=key)
    with contextlib.closing(bind_listeners(config)) as listeners:
        line = request_to_copy(config, listeners, task, chats=chats)
        assert line.startswith(f"curl -s http://127.0.0.1:{listeners.http_port}{told}")
    json.loads(shlex.split(line)[-1])
    assert "k3y" not in line


def test_port_0_is_a_free_port_and_an_address_that_can_be_dialled() -> None:
    listeners = bind_listeners(ServerConfig(model="m", host="0.0.0.0", port=0))
    try:
        assert listeners.http_port > 0
        assert listeners.address == f"127.0.0.1:{listeners.http_port}"
        assert listeners.bootstrap is None
        socket.create_connection(("127.0.0.1", listeners.http_port)).close()
    finally:
        listeners.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_who_listens_at_two_colons_is_reached_by_ipv4_too() -> None:
    """As other servers are, and on all ports that a pair needs."""
    listeners = bind_listeners(
        ServerConfig(model="m", host="::", port=0, disaggregation_mode="prefill", disaggregation_bootstrap_port=0)
    )
    assert listeners.bootstrap is not None
    control = ControlListener.open("::", SelectorPoller(), monotonic_now, socket.socket.close, lambda: True)
    others = (listen(RouterConfig((), host="::", port=0)), listen_tcp("::"))
    for listener in (listeners.http, listeners.bootstrap, control.sock, *others):
        with listener:
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, listener.getsockname()[1])).close()


def test_a_taken_bootstrap_port_gives_the_http_port_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
        found.close()
        config = ServerConfig(
            model="m",
            port=port,
            disaggregation_mode="prefill",
            disaggregation_bootstrap_port=taken.getsockname()[1],
        )
        with pytest.raises(ServerFailure, match="use another --disaggregation-bootstrap-port"):
            bind_listeners(config)
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("256.1.1.1", 0, "no address of this machine"),
        ("192.0.2.1", 0, "check --host"),
        ("a..b", 0, "no host has such a name"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int, words: str) -> None:
    with pytest.raises(ServerFailure, match=words):
        bind_listeners(ServerConfig(model="m", host=host, port=port))


def test_a_node_without_a_descriptor_left_says_that_it_cannot_listen() -> None:
    class NoDescriptors:
        def listen(self, host: str) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(ServerFailure, match=r"cannot listen for decode servers: .* Too many open files"):
        node_process._listen(NoDescriptors(), "127.0.0.1")  # type: ignore[arg-type]  # of peers only this


def test_children_that_cannot_be_started_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    socketpair = socket.socketpair

    def noted(*arguments: int) -> tuple[socket.socket, socket.socket]:
        opened.extend(socketpair(*arguments))
        return opened[-2], opened[-1]

    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(socket, "socketpair", noted)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(BlockingIOError):
        start_children(Launch(ServerConfig(model="tandem/mini"), "", Incarnation("here", "1"), 1, 1, os.getpid()))
    assert len(opened) == 4
    assert [sock.fileno() for sock in opened] == [-1] * 4


def test_a_server_whose_processes_cannot_be_started_says_which_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    config = ServerConfig(model="tandem/mini", port=0)
    facts = read_facts(find_model(config.model), config)
    listeners = bind_listeners(config)
    with contextlib.closing(listeners), pytest.raises(ServerFailure, match=r"temporarily unavailable.*ulimit -u"):
        serve(config, listeners, facts)


@pytest.fixture
def child_of() -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """Starts a process of a server in the current folder. There is nobody to talk to, so it ends by itself."""
    children: list[subprocess.Popen[bytes]] = []

    def start(module: str) -> "subprocess.Popen[bytes]":
        config = ServerConfig(model="tandem/mini")
        launch = Launch(config, "", Incarnation("here", "1"), 1, 1, os.getpid())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            children.append(start_child(module, [theirs, theirs], launch, dict(os.environ)))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_a_file_of_the_current_folder_is_no_module_of_a_server(
    child_of: Callable[[str], "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "random.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    child_of("node.process").wait(60)
    assert not (tmp_path / "imported").exists()


def test_a_child_of_a_server_whose_folder_is_gone_is_somewhere(
    child_of: Callable[[str], "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert os.readlink(f"/proc/{child_of('node.process').pid}/cwd") == "/"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_whose_parent_ended_before_the_kernel_knew_ends_too(number: signal.Signals) -> None:
    no_parent = os.getpid() + 1
    child = subprocess.Popen(["sleep", "60"], preexec_fn=partial(end_with_parent, no_parent, number))
    assert child.wait(30) == 1


HEARD_WHERE_EXCEPTIONS_ARE_SWALLOWED = """
import os, signal, tandem.cli.serve as serve
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
def find_model(name):
    Finalized()
    print("goes on")
serve.find_model = find_model
from tandem.cli.main import main
main(["serve", "any"])
"""


def test_a_signal_that_comes_while_a_server_starts_ends_it_wherever_it_is_heard() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEARD_WHERE_EXCEPTIONS_ARE_SWALLOWED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "tandem: interrupted\n")
