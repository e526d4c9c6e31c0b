"""Real halves, and documents that would end them: what decode is answered, and what is written to a prefill.

The hostile server listens once, at every address of loopback; which of them is asked chooses what it answers.
"""

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any  # JSON documents

import pytest
from cluster import HttpError, Server, bootstrap_port, children_of, eventually, halves

from tandem.membership import user_secret
from tandem.server.api.cluster_auth import signed_write

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
FORGED = "p\n[00:00:00 api] ERROR all is lost"
GENUINE: dict[str, Any] = {
    "incarnation": {"name": "p", "id": "e" * 32},
    "role": "prefill",
    "layout": "abc",
    "layout_fields": {"page_size": "16"},
    "control_host": "127.0.0.1",
    "control_port": 5,
    "shards": [{"host": "127.0.0.1", "port": 6, "unix": ""}],
    "http_port": 7,
    "dp_rank": 0,
    "prefill": {"dp_size": 1, "method": "follow_bootstrap_room", "conflict": "resolve"},
}


def changed(**fields: Any) -> bytes:
    return json.dumps(GENUINE | fields).encode()


# Bodies, and what the client of decode is told.
DOCUMENTS: dict[str, tuple[bytes, str]] = {
    "no shards": (changed(shards=[]), "shards: "),
    "a port of 10^30": (changed(control_port=10**30), "control_port: "),
    "a shard's port of 10^30": (changed(shards=[{"host": "127.0.0.1", "port": 10**30}]), "shards[0].port: "),
    "a rank of 10^30": (changed(dp_rank=10**30), "dp_rank: "),
    "ranks of 10^30": (changed(prefill=GENUINE["prefill"] | {"dp_size": 10**30}), "prefill.dp_size: "),
    "text for a number": (changed(control_port="5"), "control_port: "),
    "a number for text": (changed(control_host=5), "control_host: "),
    "a field missing": (json.dumps({"role": "prefill"}).encode(), "incarnation: "),
    "another role": (changed(role="decode"), "role: "),
    "another id": (changed(incarnation={"name": "p", "id": "E"}), "incarnation.id: "),
    "a name of two lines": (changed(incarnation={"name": FORGED, "id": "e" * 32}), "incarnation.name: "),
    "a field's value of two lines": (changed(layout_fields={"page_size": FORGED}), "layout_fields: "),
    "a name for an address": (changed(control_host="prefill.example"), "control_host: "),
    "a huge name": (changed(incarnation={"name": "x" * 100_000, "id": "e" * 32}), "incarnation.name: "),
    "many fields": (changed(layout_fields={str(name): "x" for name in range(1000)}), "layout_fields: "),
    "nested": (b'{"x":' + b"[" * 100_000, "JSON"),
    "no JSON": (b"\xff\xfe{", "JSON"),
    "too long": (changed(x="x" * (2 << 20)), "longer than"),
}
ELSEWHERE = "a peer elsewhere", (changed(control_host="192.0.2.1"), "control_host: ")  # which a prefill may have itself
SILENT = "nothing", (b"", "no answer within")
ANSWERS = dict([*DOCUMENTS.items(), ELSEWHERE, SILENT])


@dataclass
class Hostile:
    """A bootstrap server: the n-th address of a loopback network answers with the n-th of ANSWERS."""

    listener: socket.socket = field(default_factory=lambda: socket.create_server(("0.0.0.0", 0), backlog=64))
    num_questions: int = 0
    held: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def host_of(self, case: str) -> str:
        return f"127.0.7.{1 + list(ANSWERS).index(case)}"

    def serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self.listener.accept()
                self.num_questions += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        number = int(connection.getsockname()[0].rpartition(".")[2]) - 1
        case, (body, _) = list(ANSWERS.items())[number]
        if case == SILENT[0]:
            self.held.append(connection)
            return
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            connection.recv(1)  # until the other side leaves


@contextmanager
def hostile_server() -> Iterator[Hostile]:
    hostile = Hostile()
    thread = threading.Thread(target=hostile.serve, daemon=True)
    thread.start()
    try:
        yield hostile
    finally:
        hostile.listener.shutdown(socket.SHUT_RDWR)
        hostile.listener.close()
        thread.join(10)
        for connection in hostile.held:
            connection.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    failing = ("--kv-load-failure-policy", "fail")  # else decode computes such a prompt itself, and nobody is told
    with halves(tmp_path_factory.mktemp("halves"), (), failing) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def half_sent(pair: tuple[Server, Server]) -> Iterator[socket.socket]:
    """A write to prefill's bootstrap server that never goes on, while the tests of this file pass."""
    with socket.create_connection(("127.0.0.1", bootstrap_port(pair[0])), timeout=60) as sock:
        sock.sendall(b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        yield sock


def processes(server: Server) -> list[int]:
    process_id = server.member.process.pid
    return sorted([process_id, *children_of(process_id)])


def is_healthy(server: Server) -> bool:
    with server.open("GET", "/health") as reply:
        return reply.status == 200


def refused(decode: Server, **fields: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(HttpError) as error:
        decode.generate(PROMPT, max_new_tokens=4, timeout=600, **fields)
    return error.value.status, error.value.error


@pytest.mark.slow
def test_decode_lives_on_whatever_a_bootstrap_server_answers(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    before, num_lines = processes(decode), len(decode.log.splitlines())
    with hostile_server() as hostile, ThreadPoolExecutor(len(ANSWERS)) as threads:

        def ask(case: str) -> tuple[int, dict[str, Any]]:
            room = 1 + list(ANSWERS).index(case)
            where = {"bootstrap_host": hostile.host_of(case), "bootstrap_port": hostile.port}
            return refused(decode, bootstrap_room=room, **where)

        asked = {case: threads.submit(ask, case) for case in ANSWERS}
        for case, (_, reason) in ANSWERS.items():
            status, error = asked[case].result()
            assert (status, error["code"]) == (502, "peer_unknown"), case
            assert reason in error["message"], case
            assert len(error["message"]) < 500
            assert error["message"].isprintable()
            assert is_healthy(decode)
            assert len(decode.generate(PROMPT, max_new_tokens=3)["output_ids"]) == 3
        assert processes(decode) == before
        # one line per request that ended, and no more than one per question
        lines = decode.log.splitlines()[num_lines:]
        assert len(lines) <= hostile.num_questions + 2 * len(ANSWERS) + len([x for x in lines if " batch" in x])
        assert not any(line.startswith(FORGED.splitlines()[1]) for line in decode.log.splitlines())
    genuine = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 77}
    half = prefill.open_stream(PROMPT, timeout=60, **genuine)
    assert decode.generate(PROMPT, max_new_tokens=4, timeout=60, **genuine)["meta_info"]["path"] == "remote"
    half.close()
    eventually(decode.is_idle, what=decode.state)


def unsigned(port: int, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        with suppress(ConnectionError):  # the answer to a long body may come before all of it is sent
            connection.request("PUT", "/route", body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def signed(port: int, body: bytes) -> tuple[int, bytes]:
    secret = user_secret(os.environ)
    answer = asyncio.run(signed_write(secret, "127.0.0.1", port, method="PUT", target="/route", body=body))
    return answer.status, answer.body


@pytest.mark.parametrize("write", [unsigned, signed])
def test_a_prefill_is_told_nothing_by_hostile_documents(
    pair: tuple[Server, Server], write: Callable[[int, bytes], tuple[int, bytes]]
) -> None:
    prefill, _ = pair
    port, before = bootstrap_port(prefill), processes(prefill)

    def route() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/route")
        with connection.getresponse() as reply:
            assert reply.status == 200
            return reply.read()

    told = route()
    for case, (body, _) in DOCUMENTS.items():
        status, answer = write(port, body)
        expected = {401} if write is unsigned else {400, 413}
        assert status in expected, (case, answer)
        assert json.loads(answer)["error"]["message"].isprintable()
        assert len(answer) < 2000
        assert route() == told
    assert signed(port, changed())[0] == 400, "a document that is well-formed does not replace it either"
    assert route() == told
    assert processes(prefill) == before
    assert is_healthy(prefill)


def test_a_half_sent_write_costs_its_connection_and_nothing_else(
    pair: tuple[Server, Server], half_sent: socket.socket
) -> None:
    assert half_sent.recv(100).startswith(b"HTTP/1.1 503")
    assert is_healthy(pair[0])
