"""The control plane of real servers among those who do not belong to it: nobody but the one who asked is disturbed."""

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cluster import MODEL, START_S, HttpError, Server, bootstrap_port, eventually, halves, show_logs

from attackers import OTHER_SECRET, dialled, framed, nested
from raw_http import Handler, handling
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.values import Incarnation

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
HOSTS = tuple(f"127.0.0.{number}" for number in range(2, 6))  # of prefills with the same ports, and so the same name
rooms = count(5000)


@contextmanager
def prefills_and_decode(folder: Path) -> Iterator[tuple[list[Server], Server]]:
    http, bootstrap, right = free_ports(3)
    with Fleet(folder, engines=len(HOSTS) + 1) as fleet:
        found = []
        for host in HOSTS:
            words = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
            member = fleet.start(f"prefill-{host}", serve_words(MODEL, http, *words, "--host", host), port=http)
            found.append(Server(member, host))
        decode = Server(fleet.start("decode", serve_words(MODEL, right, "--disaggregation-mode", "decode"), port=right))
        try:
            for server in (*found, decode):
                eventually(server.is_ready, within_s=START_S, what=lambda: [member.name for member in fleet.members])
            yield found, decode
        except BaseException:
            show_logs(fleet)
            raise


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], Server]]:
    """All tests share them. Which prefills decode has not met yet matters: a test that needs such a one says so."""
    with prefills_and_decode(tmp_path_factory.mktemp("control")) as found:
        yield found


def route_of(prefill: Server) -> dict[str, Any]:
    with urlopen(f"http://{prefill.host}:{bootstrap_port(prefill)}/route") as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def path_of(prefill: Server, decode: Server, *, at: tuple[str, int] | None = None) -> str:
    """Send both halves; decode looks for its prefill at `at`. Where the prompt's KV came from."""
    host, port = at or (prefill.host, bootstrap_port(prefill))
    pair = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(rooms), "timeout": 20}
    prompt = f"{pair['bootstrap_room']}: {PROMPT}"  # new pages each time: they have to travel
    half = prefill.open_stream(prompt, **pair)
    try:
        return str(decode.generate(prompt, max_new_tokens=2, **pair)["meta_info"]["path"])
    finally:
        half.close()


@contextmanager
def telling(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """A bootstrap server that answers everything with this document."""

    class Telling(Handler):
        def do_GET(self) -> None:
            self.say(json.dumps(document).encode())

    with handling(Telling) as port:
        yield "127.0.0.1", port


FORGERIES = {
    "data": {"shards": True, "control_port": False},
    "control": {"shards": False, "control_port": True},
    "both": {"shards": True, "control_port": True},
}


@pytest.mark.parametrize("name", list(FORGERIES))
def test_a_bootstrap_server_that_repeats_a_genuine_prefill_with_other_endpoints_disturbs_only_its_own_requests(
    servers: tuple[list[Server], Server], name: str
) -> None:
    """Whether decode meets it before the genuine one or after. Where it sends decode somebody listens and is silent."""
    prefills, decode = servers
    prefill = prefills[list(FORGERIES).index(name)]  # nobody before has led decode to it
    genuine = route_of(prefill)
    assert f"{prefill.host}:{bootstrap_port(prefill)}/0" not in decode.state()["peers"]
    with socket.create_server((prefill.host, 0)) as silent:
        port = silent.getsockname()[1]
        forged = dict(genuine)
        if FORGERIES[name]["shards"]:
            forged["shards"] = [{"host": prefill.host, "port": port, "unix": ""}]
        if FORGERIES[name]["control_port"]:
            forged["control_port"] = port
        with telling(forged) as first, telling(forged) as second:
            before = decode.open_stream(PROMPT, **asked_at(first))
            eventually(lambda: f"{first[0]}:{first[1]}/0" in decode.state()["peers"], what=decode.state)
            began = time.monotonic()
            assert [path_of(prefill, decode) for _ in range(5)] == ["remote"] * 5
            assert time.monotonic() - began < 5, "somebody waited for the silent one"
            after = decode.open_stream(PROMPT, **asked_at(second))
            assert [path_of(prefill, decode) for _ in range(10)] == ["remote"] * 10
            before.close()
            after.close()
        for server in (prefill, decode):
            eventually(server.is_idle, what=server.state)
        assert path_of(prefill, decode) == "remote"


def asked_at(address: tuple[str, int]) -> dict[str, Any]:
    host, port = address
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(rooms), "timeout": 20}


def noise() -> Iterator[bytes]:
    yield nested(1200)
    yield nested(450)
    drawn = random.Random(8)
    for size in (0, 1, 4, 5, 16, 200, 511, 512):
        yield framed(drawn.randbytes(size))
        yield drawn.randbytes(size)
    yield b"\xff" * 70_000
    yield b"GET /route HTTP/1.1\r\n\r\n"


def test_no_bytes_on_the_control_port_end_a_prefill_or_disturb_its_peers(servers: tuple[list[Server], Server]) -> None:
    (prefill, *_), decode = servers
    assert path_of(prefill, decode) == "remote"
    where = (prefill.host, int(route_of(prefill)["control_port"]))
    for words in noise():
        with socket.create_connection(where, timeout=10) as sock:
            try:
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except OSError:
                pass  # the server has closed it, at whichever of these
        assert path_of(prefill, decode) == "remote"
    assert prefill.member.process.poll() is None


def test_connections_without_end_that_say_nothing_shut_no_decode_out(servers: tuple[list[Server], Server]) -> None:
    """1,100 of them, more than any table holds, are there before decode comes for the first time."""
    (*_, prefill), decode = servers
    assert f"{prefill.host}:{bootstrap_port(prefill)}/0" not in decode.state()["peers"]
    with ExitStack() as flood:
        where = (prefill.host, int(route_of(prefill)["control_port"]))
        for number in range(1100):
            try:
                sock = flood.enter_context(socket.create_connection(where, timeout=10))
                if number % 2:
                    sock.sendall(b"\0")  # a hello that never goes on
            except ConnectionError:
                pass  # a newer one has taken its place
        assert path_of(prefill, decode) == "remote"


def test_two_prefills_of_one_name_and_port_on_two_hosts_both_serve(servers: tuple[list[Server], Server]) -> None:
    (left, right, *_), decode = servers
    first, second = (route_of(prefill)["incarnation"] for prefill in (left, right))
    assert first["name"] == second["name"]
    paths = [path_of(prefill, decode) for _ in range(20) for prefill in (left, right)]
    assert paths == ["remote"] * 40


def test_decodes_name_without_the_secret_gets_no_offer_and_takes_nothing_from_decode(
    servers: tuple[list[Server], Server],
) -> None:
    (prefill, *_), decode = servers
    assert path_of(prefill, decode) == "remote"
    port = int(route_of(prefill)["control_port"])
    state = decode.state()
    with dialled(port, OTHER_SECRET, Incarnation(state["name"], state["incarnation"]), host=prefill.host) as end:
        eventually(lambda: end.read() or end.is_closed)
        end.greet()  # at once: who does not prove anything is not waited for
        eventually(lambda: (end.read(), end.is_closed)[1])
        assert path_of(prefill, decode) == "remote"
        assert end.heard == []


def test_two_servers_with_different_secrets_say_so_and_no_request_waits_for_its_deadline(tmp_path: Path) -> None:
    flags = []
    for name in ("one", "other"):
        path = tmp_path / name
        path.write_bytes(name.encode() * 16)
        path.chmod(0o600)
        flags.append(("--cluster-secret-file", str(path)))
    with halves(tmp_path, flags[0], (*flags[1], "--strict-remote")) as (prefill, decode):
        began = time.monotonic()
        with pytest.raises(HttpError) as failed:
            path_of(prefill, decode)
        assert time.monotonic() - began < 10
        assert (failed.value.status, failed.value.error["code"]) == (502, "peer_lost")
        assert "does not hold this cluster's secret" in failed.value.error["message"]
        eventually(decode.is_idle, what=decode.state)
