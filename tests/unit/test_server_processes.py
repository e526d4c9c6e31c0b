"""What a server says of its processes and ports."""

import os
import socket

import pytest

from tandem.config import ServerConfig
from tandem.server.processes import (
    ServerFailure,
    bind_listeners,
    describe_exit,
    engine_threads,
    worker_environment,
)


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
    environment = worker_environment(3)
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert environment["KMP_BLOCKTIME"] == "0"


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "SIGKILL; if nobody did that, the machine ran out of memory"), (-11, "SIGSEGV"), (3, "code 3")],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_port_0_is_a_free_port_and_an_address_that_can_be_dialled() -> None:
    listeners = bind_listeners(ServerConfig(model="m", host="0.0.0.0", port=0))
    try:
        assert listeners.http_port > 0
        assert listeners.address == f"127.0.0.1:{listeners.http_port}"
        assert listeners.bootstrap is None
        socket.create_connection(("127.0.0.1", listeners.http_port)).close()
    finally:
        listeners.close()


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
        ("127.0.0.1", 70000, "no port 70000"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int, words: str) -> None:
    with pytest.raises(ServerFailure, match=words):
        bind_listeners(ServerConfig(model="m", host=host, port=port))
