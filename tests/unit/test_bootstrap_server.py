"""The bootstrap server over HTTP: who is there, which rank holds a room, and who may write."""

import secrets
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from tandem.core.fleet.bootstrap_registry import Registry
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, Incarnation, Nanos
from tandem.server import wire
from tandem.server.api.bootstrap import MAX_BODY_BYTES, MAX_ROOMS_PER_QUERY, BootstrapServer, registration
from tandem.server.api.cluster_auth import MAX_SKEW_S, WriteGuard, signed_headers

SECRET = b"a secret of the whole cluster"
ENDS = (wire.DataEndpoint("10.0.0.1", 6), wire.DataEndpoint("10.0.0.1", 7, "/tmp/seven"))
FIELDS = {"page_size": "16"}


def replica(dp_rank: int = 0, *, of: int = 1, life: int = 3, **changes: Any) -> wire.ReplicaInfo:
    who = Incarnation(f"p{dp_rank}", str(life))
    made = wire.ReplicaInfo(who, "prefill", "abc", FIELDS, "10.0.0.1", 5, ENDS, 30000, dp_rank, PrefillInfo(of))
    return msgspec.structs.replace(made, **changes)


class Bootstrap:
    """A bootstrap server and a client of it. Time stands still unless it is moved."""

    def __init__(self, *replicas: wire.ReplicaInfo, secret: bytes | None = None, is_loopback: bool = True) -> None:
        self.registry = Registry()
        self.now_s = 1_000_000.0
        guard = WriteGuard(secret, is_loopback=is_loopback, clock=lambda: self.now_s)
        server = BootstrapServer(self.registry, guard, now=lambda: Nanos(int(self.now_s * SECOND)))
        self.http = TestClient(server.app())
        for one in replicas:
            self.registry.register(registration(one))

    def put(self, body: Any, **headers: Any) -> Any:
        return self.http.put("/route", content=content(body), **headers)

    def post(self, path: str, body: Any, **headers: Any) -> Any:
        return self.http.post(path, content=content(body), **headers)

    def signed(self, method: str, target: str, body: Any, *, nonce: str = "", secret: bytes = SECRET) -> dict[str, str]:
        nonce = nonce or secrets.token_hex(8)
        return signed_headers(secret, method=method, target=target, body=content(body), now_s=self.now_s, nonce=nonce)


def content(body: Any) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def error(response: Any) -> tuple[int, str, str | None]:
    found = response.json()["error"]
    return response.status_code, found["code"], found["param"]


# --- who is there ----------------------------------------------------------------------------------------------------


def test_nobody_is_told_of_a_prefill_before_it_has_registered() -> None:
    it = Bootstrap()
    assert error(it.http.get("/route")) == (503, "not_ready", None)
    assert it.http.get("/health").status_code == 503
    assert it.put(replica()).text == "OK"
    assert msgspec.json.decode(it.http.get("/route").content, type=wire.ReplicaInfo) == replica()
    assert (it.http.get("/health").status_code, it.http.get("/health").text) == (200, "OK")


def test_one_call_brings_all_shards_of_a_rank_and_each_rank_is_told_by_number() -> None:
    it = Bootstrap()
    it.put(replica(1, of=2))
    assert it.http.get("/route").status_code == 503
    it.put(replica(0, of=2))
    for query, expected in (("", 0), ("?prefill_dp_rank=-1", 0), ("?prefill_dp_rank=0", 0), ("?prefill_dp_rank=1", 1)):
        found = msgspec.json.decode(it.http.get("/route" + query).content, type=wire.ReplicaInfo)
        assert (found.dp_rank, found.shards) == (expected, ENDS)
    assert error(it.http.get("/route?prefill_dp_rank=2")) == (404, "not_found", None)


def test_a_registration_may_be_repeated_a_restart_replaces_and_who_was_replaced_is_refused() -> None:
    it = Bootstrap()
    assert it.put(replica(life=3)).status_code == 200
    assert it.put(replica(life=3)).status_code == 200
    assert it.put(replica(life=4, control_port=9)).status_code == 200
    assert it.http.get("/route").json()["control_port"] == 9
    assert error(it.put(replica(life=3))) == (400, "invalid_value", "incarnation.id")
    assert error(it.put(replica(life=4, control_port=10))) == (400, "invalid_value", "incarnation.id")
    assert it.http.get("/route").json()["control_port"] == 9


def test_what_the_server_itself_registers_is_what_decode_is_told() -> None:
    it = Bootstrap(replica())
    assert it.http.get("/route").json()["incarnation"] == {"name": "p0", "id": "3"}
    it.registry.unregister(Incarnation("p0", "3"))
    assert it.http.get("/route").status_code == 503


# --- rooms -----------------------------------------------------------------------------------------------------------


def test_decode_learns_the_ranks_of_many_rooms_at_once_and_unknown_rooms_are_absent() -> None:
    it = Bootstrap(replica(0, of=2), replica(1, of=2))
    large = 2**63 - 1
    for room, rank in ((7, 1), (large, 0), ("8", 1)):
        assert it.post("/register_dp_rank", {"bootstrap_room": room, "dp_rank": rank}).text == "OK"
    answer = it.post("/query_dp_ranks", {"bootstrap_rooms": [7, 6, large, "8"]})
    assert answer.json() == {"7": 1, str(large): 0, "8": 1}
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": []}).json() == {}


def test_rooms_are_forgotten_after_two_minutes() -> None:
    it = Bootstrap(replica())
    it.post("/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 0})
    it.now_s += 119
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {"7": 0}
    it.now_s += 1
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {}


# --- what is wrong ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str, Any, str | None]] = {
    "no JSON": ("PUT", "/route", b"{", None),
    "no object": ("PUT", "/route", b"[]", None),
    "a field missing": ("PUT", "/route", {"role": "prefill"}, None),
    "an id that is no text": (
        "PUT", "/route", msgspec.to_builtins(replica()) | {"incarnation": {"name": "p", "id": 4}},
        "incarnation.id",
    ),
    "another role": ("PUT", "/route", replica(role="decode"), "role"),
    "a rank that cannot be": ("PUT", "/route", replica(2, of=2), "dp_rank"),
    "a room that is no number": ("POST", "/register_dp_rank", {"bootstrap_room": "x", "dp_rank": 0}, "bootstrap_room"),
    "room zero": ("POST", "/register_dp_rank", {"bootstrap_room": 0, "dp_rank": 0}, "bootstrap_room"),
    "no rank": ("POST", "/register_dp_rank", {"bootstrap_room": 1}, None),
    "an unknown rank": ("POST", "/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 1}, "dp_rank"),
    "rooms that are no list": ("POST", "/query_dp_ranks", {"bootstrap_rooms": 7}, "bootstrap_rooms"),
    "too many rooms": (
        "POST", "/query_dp_ranks", {"bootstrap_rooms": list(range(1, MAX_ROOMS_PER_QUERY + 2))}, "bootstrap_rooms",
    ),
    "a rank that is no number": ("GET", "/route?prefill_dp_rank=x", b"", "prefill_dp_rank"),
    "no rank in the query": ("GET", "/route?prefill_dp_rank=", b"", "prefill_dp_rank"),
    "a negative rank": ("GET", "/route?prefill_dp_rank=-2", b"", "prefill_dp_rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_request_is_a_400_that_names_the_field_and_changes_nothing(case: str) -> None:
    method, path, body, param = WRONG[case]
    it = Bootstrap(replica())
    response = it.http.request(method, path, content=content(body))
    status, code, named = error(response)
    assert (status, named) == (400, param)
    assert code in ("invalid_json", "invalid_value")
    assert msgspec.json.decode(it.http.get("/route").content, type=wire.ReplicaInfo) == replica()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/route", {"GET", "HEAD", "PUT"}),
        ("POST", "/route", {"GET", "HEAD", "PUT"}),
        ("GET", "/register_dp_rank", {"POST"}),
        ("PUT", "/query_dp_ranks", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_a_405_that_names_the_right_ones(method: str, path: str, allowed: set[str]) -> None:
    response = Bootstrap(replica()).http.request(method, path)
    assert error(response) == (405, "method_not_allowed", None)
    assert set(response.headers["allow"].split(", ")) == allowed


def test_an_unknown_path_is_a_404_and_a_huge_body_a_413() -> None:
    it = Bootstrap(replica())
    assert error(it.http.get("/elsewhere")) == (404, "not_found", None)
    assert error(it.put(b" " * (MAX_BODY_BYTES + 1))) == (413, "body_too_large", None)


# --- who may write ---------------------------------------------------------------------------------------------------

ROOM = {"bootstrap_room": 7, "dp_rank": 0}


def test_on_loopback_writes_need_no_signature() -> None:
    it = Bootstrap(replica())
    assert it.post("/register_dp_rank", ROOM).status_code == 200


def test_without_a_secret_a_server_that_others_can_reach_takes_no_writes() -> None:
    it = Bootstrap(replica(), is_loopback=False)
    for headers in ({}, it.signed("POST", "/register_dp_rank", ROOM)):
        assert error(it.post("/register_dp_rank", ROOM, headers=headers)) == (401, "unsigned", None)
    assert error(it.put(replica(life=9))) == (401, "unsigned", None)
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {}
    assert it.http.get("/route").status_code == it.http.get("/health").status_code == 200


@pytest.mark.parametrize("is_loopback", [True, False])
def test_with_a_secret_writes_have_to_be_signed_and_reads_do_not(is_loopback: bool) -> None:
    it = Bootstrap(replica(), secret=SECRET, is_loopback=is_loopback)
    assert error(it.post("/register_dp_rank", ROOM)) == (401, "unsigned", None)
    signed = it.signed("POST", "/register_dp_rank", ROOM)
    assert it.post("/register_dp_rank", ROOM, headers=signed).status_code == 200
    assert it.put(replica(life=4), headers=it.signed("PUT", "/route", replica(life=4))).status_code == 200
    assert it.http.get("/route").json()["incarnation"]["id"] == "4"
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).status_code == 200


def forged(it: Bootstrap) -> dict[str, dict[str, str]]:
    good = it.signed("POST", "/register_dp_rank", ROOM)
    old = signed_headers(
        SECRET, method="POST", target="/register_dp_rank", body=content(ROOM), nonce="12345678",
        now_s=it.now_s - MAX_SKEW_S - 1,
    )  # fmt: skip
    early = signed_headers(
        SECRET, method="POST", target="/register_dp_rank", body=content(ROOM), nonce="12345678",
        now_s=it.now_s + MAX_SKEW_S + 1,
    )  # fmt: skip
    return {
        "another secret": it.signed("POST", "/register_dp_rank", ROOM, secret=b"another secret, as long"),
        "another body": it.signed("POST", "/register_dp_rank", {"bootstrap_room": 8, "dp_rank": 0}),
        "another path": it.signed("POST", "/query_dp_ranks", ROOM),
        "another query": it.signed("POST", "/register_dp_rank?x=1", ROOM),
        "another method": it.signed("PUT", "/register_dp_rank", ROOM),
        "another time": good | {"x-tandem-time": str(int(it.now_s) + 1)},
        "another nonce": good | {"x-tandem-nonce": "87654321"},
        "no signature": {name: value for name, value in good.items() if name != "x-tandem-signature"},
        "no nonce": {name: value for name, value in good.items() if name != "x-tandem-nonce"},
        "not ASCII": good | {"x-tandem-signature": "ä" * 64},
        "a time that is none": it.signed("POST", "/register_dp_rank", ROOM) | {"x-tandem-time": "now"},
        "a short nonce": it.signed("POST", "/register_dp_rank", ROOM, nonce="x"),
        "signed long ago": old,
        "signed in the future": early,
    }


@pytest.mark.parametrize("case", list(forged(Bootstrap())))
def test_what_is_not_signed_for_this_very_request_is_refused(case: str) -> None:
    it = Bootstrap(replica(), secret=SECRET)
    headers = {name: value.encode() for name, value in forged(it)[case].items()}
    assert error(it.post("/register_dp_rank", ROOM, headers=headers)) == (401, "unsigned", None)
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {}


def test_a_signed_request_cannot_be_sent_twice_not_even_just_before_it_expires() -> None:
    it = Bootstrap(replica(), secret=SECRET)
    headers = it.signed("POST", "/register_dp_rank", ROOM)
    it.now_s -= MAX_SKEW_S  # a server whose clock is behind
    assert it.post("/register_dp_rank", ROOM, headers=headers).status_code == 200
    for _ in range(2 * MAX_SKEW_S):
        it.now_s += 1
        assert error(it.post("/register_dp_rank", ROOM, headers=headers)) == (401, "unsigned", None)


# --- the secret ------------------------------------------------------------------------------------------------------
