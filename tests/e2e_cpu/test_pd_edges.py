"""The edges of the contract between two halves: where a prefill may be, how long it is waited for, which rank it is.

Nobody stands in front of the halves here: each test sends to both itself, or to one of them only.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cluster import HttpError, Server, bootstrap_port, eventually, halves, secret_flags

from raw_http import Handler, handling

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
LONG = [9 + index % 470 for index in range(3000)]
FABRICS = {"IPv4": (socket.AF_INET, "192.0.2.1"), "IPv6": (socket.AF_INET6, "2001:db8::1")}
rooms = count(1000)


def own_address(fabric: str) -> str:
    """Of this machine, as others see it. Nothing is sent to find it out."""
    family, somewhere = FABRICS[fabric]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((somewhere, 9))
        except OSError:
            pytest.skip(f"this machine has no {fabric} address but loopback")
        return str(sock.getsockname()[0])


def pair_with(prefill: Server, *, host: str = "127.0.0.1", port: int | None = None) -> dict[str, Any]:
    """The fields that make a request one of a pair, in a room of its own."""
    return {
        "bootstrap_host": host,
        "bootstrap_port": bootstrap_port(prefill) if port is None else port,
        "bootstrap_room": next(rooms),
    }


def through_both(prefill: Server, decode: Server, pair: dict[str, Any], **fields: Any) -> dict[str, Any]:
    half = prefill.open_stream(PROMPT, timeout=20, **pair)
    try:
        return decode.generate(PROMPT, max_new_tokens=4, timeout=20, **pair, **fields)
    finally:
        half.close()


def refusal(server: Server, **fields: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(HttpError) as refused:
        server.generate(PROMPT, max_new_tokens=4, timeout=20, **fields)
    return refused.value.status, refused.value.error


@pytest.mark.parametrize("fabric", ["IPv4", pytest.param("IPv6", marks=pytest.mark.slow)])
def test_a_prefill_elsewhere_is_used_if_its_network_is_allowed_and_refused_by_both_halves_if_not(
    tmp_path: Path, fabric: str
) -> None:
    own = own_address(fabric)
    secret = secret_flags(tmp_path)
    of_prefill, of_decode = ("--host", own, *secret), ("--disaggregation-allow", own, *secret)
    with halves(tmp_path, of_prefill, of_decode, prefill_host=own) as (prefill, decode):
        route = route_of(prefill)
        assert {route["control_host"], *(shard["host"] for shard in route["shards"])} == {own}
        for port in (route["control_port"], *(shard["port"] for shard in route["shards"])):
            socket.create_connection((own, port)).close()
        reply = through_both(prefill, decode, pair_with(prefill, host=own))
        assert reply["meta_info"]["path"] == "remote"
        stranger = pair_with(prefill, host="198.51.100.7")
        for half in (prefill, decode):
            status, error = refusal(half, **stranger)
            assert (status, error["code"], error["param"]) == (400, "host_not_allowed", "bootstrap_host")


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill that listens on every address, and a decode that computes up to 20 tokens itself."""
    folder = tmp_path_factory.mktemp("everywhere")
    secret = secret_flags(folder)
    of_decode = ("--disaggregation-allow", f"{own_address('IPv4')}/32", "--disaggregation-local-prefill", "20", *secret)
    with halves(folder, ("--host", "0.0.0.0", *secret), of_decode) as found:
        yield found


def test_a_server_that_listens_everywhere_is_found_at_any_address_of_its_machine(
    everywhere: tuple[Server, Server],
) -> None:
    prefill, decode = everywhere
    reply = through_both(prefill, decode, pair_with(prefill, host=own_address("IPv4")))
    assert reply["meta_info"]["path"] == "remote"


def test_what_is_short_is_computed_by_decode_and_prefill_ends_well_without_a_token(
    everywhere: tuple[Server, Server],
) -> None:
    prefill, decode = everywhere
    pair, short = pair_with(prefill), "Tom has 3"
    with prefill.open("POST", "/generate", {"text": short, "sampling_params": {"temperature": 0}, **pair}) as half:
        assert decode.generate(short, max_new_tokens=4, timeout=20, **pair)["meta_info"]["path"] == "local"
        assert (half.status, json.loads(half.read())["output_ids"]) == (200, [])
    decode.open("POST", "/flush_cache").close()  # of what the test before may have left of the long prompt
    assert through_both(prefill, decode, pair_with(prefill))["meta_info"]["path"] == "remote"


def worker_numbers(server: Server) -> dict[str, float]:
    with server.open("GET", "/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith("tandem:worker_")]
    assert all('tp_rank="0"' in line and 'pp_rank="0"' in line and 'dp_rank="0"' in line for line in lines)
    return {line.partition("{")[0].removeprefix("tandem:worker_"): float(line.rpartition(" ")[2]) for line in lines}


IDLE = {"live_rooms": 0, "pinned_pages": 0, "open_transfers": 0}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill and a strictly remote decode that wait a second for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "1")
        patch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "1")
        flags = ("--strict-remote", "--enable-fault-injection")
        with halves(tmp_path_factory.mktemp("impatient"), (), flags) as found:
            yield found


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "impatient" in request.fixturenames:
        for server in request.getfixturevalue("impatient"):
            eventually(lambda server=server: server.is_idle() and worker_numbers(server) == IDLE, what=server.state)


def failed_bootstraps(server: Server) -> float:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("sglang:num_bootstrap_failed_reqs_total{")]
    return float(line.rpartition(" ")[2])


def test_a_decode_that_never_says_ready_ends_the_prefills_half_in_time(impatient: tuple[Server, Server]) -> None:
    prefill, _ = impatient
    before = failed_bootstraps(prefill)
    pair = pair_with(prefill)
    half = prefill.open_stream(PROMPT, timeout=20, **pair)
    told = half.getresponse().read()
    half.close()
    assert b"bootstrap_timeout" in told
    assert failed_bootstraps(prefill) == before + 1
    line = re.compile(rf"request .* bootstrap_timeout .* room={pair['bootstrap_room']} stage=\w+ .* detail=")
    eventually(lambda: line.search(prefill.log), what=lambda: prefill.log)


def test_a_prefill_that_never_sends_ends_decodes_half_in_time_and_strictly_remote_means_no_fallback(
    impatient: tuple[Server, Server],
) -> None:
    prefill, decode = impatient
    status, error = refusal(decode, **pair_with(prefill))
    assert (status, error["code"]) == (504, "waiting_timeout")


def test_strictly_remote_a_failed_transfer_is_an_error_and_never_a_fallback(impatient: tuple[Server, Server]) -> None:
    prefill, decode = impatient
    decode.call("PUT", "/debug/faults", {"disagg_failure_prob": 1})
    try:
        with pytest.raises(HttpError) as failed:
            through_both(prefill, decode, pair_with(prefill))
    finally:
        decode.call("PUT", "/debug/faults", {"disagg_failure_prob": 0})
    assert (failed.value.status, failed.value.error["code"]) == (502, "transfer_failed")
    assert through_both(prefill, decode, pair_with(prefill))["meta_info"]["path"] == "remote"


def test_strictly_remote_a_request_without_a_room_is_refused(impatient: tuple[Server, Server]) -> None:
    status, error = refusal(impatient[1])
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "bootstrap_room")


def test_while_pages_wait_for_their_reader_the_prefills_worker_counts_them(impatient: tuple[Server, Server]) -> None:
    prefill, decode = impatient
    pair = pair_with(prefill)
    half = prefill.open_stream(LONG, timeout=20, **pair)
    collecting = decode.open_stream(LONG, timeout=20, **pair)
    try:
        eventually(lambda: worker_numbers(prefill)["pinned_pages"] > 0, what=lambda: worker_numbers(prefill))
    finally:
        for connection in (half, collecting):
            connection.close()


# --- DP ranks --------------------------------------------------------------------------------------------------------


class Ranks:
    """A hand-made bootstrap server of two DP ranks. Rank 1 is a real prefill, rank 0 listens and never says a word."""

    def __init__(self, real: dict[str, Any], silent: socket.socket) -> None:
        told = {"prefill": {"dp_size": 2, "method": "round_robin", "conflict": "resolve"}}
        where = {"control_host": "127.0.0.1", "control_port": silent.getsockname()[1]}
        phantom = where | {"incarnation": {"name": "phantom", "id": "1" * 32}, "dp_rank": 0}
        self.routes = {"1": real | told | {"dp_rank": 1}, "0": real | told | phantom}
        self.asked: list[str] = []
        self.queries: list[list[int]] = []
        self.known: dict[str, int] = {}
        self.thinks_s = 0.0

    def get(self, path: str) -> object:
        self.asked.append(path)
        time.sleep(self.thinks_s)
        return self.routes[path.partition("prefill_dp_rank=")[2] or "0"]

    def post(self, body: dict[str, Any]) -> object:
        self.queries.append(body["bootstrap_rooms"])
        known, self.known = self.known, {str(room): 1 for room in body["bootstrap_rooms"]}
        return known


@contextmanager
def two_ranks(prefill: Server) -> Iterator[tuple[Ranks, int]]:
    """And the port where their bootstrap server listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ranks = Ranks(route_of(prefill), silent)
        with serving(ranks) as port:
            yield ranks, port


@contextmanager
def serving(ranks: Ranks) -> Iterator[int]:
    class RanksHandler(Handler):
        def do_GET(self) -> None:
            self.say(json.dumps(ranks.get(self.path)).encode())

        def do_POST(self) -> None:
            self.say(json.dumps(ranks.post(json.loads(self.read_body()))).encode())

    with handling(RanksHandler) as port:
        yield port


def route_of(prefill: Server) -> dict[str, Any]:
    host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
    with urlopen(f"http://{host}:{bootstrap_port(prefill)}/route") as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def test_decode_asks_which_dp_rank_has_the_room_and_reaches_that_one(impatient: tuple[Server, Server]) -> None:
    prefill, decode = impatient
    with two_ranks(prefill) as (ranks, port):
        pair = pair_with(prefill, port=port)
        assert through_both(prefill, decode, pair)["meta_info"]["path"] == "remote"
    assert ranks.asked == ["/route", "/route?prefill_dp_rank=1"]
    assert ranks.queries == [[pair["bootstrap_room"]]] * 2, "once more, as the first answer did not know the room"


def test_a_dp_rank_that_the_body_names_is_believed_without_a_question(impatient: tuple[Server, Server]) -> None:
    prefill, decode = impatient
    with two_ranks(prefill) as (ranks, port):
        pair = pair_with(prefill, port=port)
        half = prefill.open_stream(PROMPT, timeout=20, **pair)
        reply = decode.generate(PROMPT, max_new_tokens=4, timeout=20, disagg_prefill_dp_rank=1, **pair)
        half.close()
    assert (reply["meta_info"]["path"], ranks.queries) == ("remote", [])


def test_a_bootstrap_server_is_asked_once_for_many_requests_and_what_it_said_is_remembered(
    impatient: tuple[Server, Server],
) -> None:
    prefill, decode = impatient
    with two_ranks(prefill) as (ranks, port), ThreadPoolExecutor(8) as clients:
        ranks.thinks_s = 0.3  # all of them wait for the answer

        def through_rank_1(_: int) -> str:
            pair = pair_with(prefill, port=port)
            found: str = through_both(prefill, decode, pair, disagg_prefill_dp_rank=1)["meta_info"]["path"]
            return found

        for _ in range(2):
            assert list(clients.map(through_rank_1, range(8))) == ["remote"] * 8
    assert ranks.asked == ["/route", "/route?prefill_dp_rank=1"], "of the server, and of the rank"


def test_a_dp_rank_that_does_not_exist_is_refused_by_both_halves(impatient: tuple[Server, Server]) -> None:
    prefill, decode = impatient
    pair = pair_with(prefill) | {"disagg_prefill_dp_rank": 5}
    status, error = refusal(decode, **pair)
    text = "disagg_prefill_dp_rank 5 does not exist: prefill has 1 DP ranks"
    assert (status, error["code"], error["retryable"]) == (400, "route_conflict", False)
    assert text in error["message"]
    half = prefill.open_stream(PROMPT, timeout=20, **pair)
    told = half.getresponse().read().decode()
    half.close()
    assert "route_conflict" in told
    assert text in told
    for server in impatient:
        status, error = refusal(server, **(pair_with(prefill) | {"routed_dp_rank": 1}))
        assert (status, error["param"]) == (400, "routed_dp_rank")
