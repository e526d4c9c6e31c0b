"""The bootstrap server over HTTP: who is there, which rank holds a room, and who may write."""

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, Incarnation, Nanos
from tandem.membership import ClusterSecret
from tandem.server import wire
from tandem.server.api import cluster_auth
from tandem.server.api.body_store import MAX_BOOTSTRAP_BODY_BYTES
from tandem.server.api.bootstrap import BootstrapServer
from tandem.server.api.bootstrap_questions import MAX_ROOMS_PER_QUERY, registration
from tandem.server.api.cluster_auth import CHALLENGE_NS, WriteGuard, signed_headers
from tandem.server.documents import read_prefill

SECRET = ClusterSecret(b"a secret of the whole cluster")
ENDS = (wire.DataEndpoint("10.0.0.1", 6), wire.DataEndpoint("10.0.0.1", 7, "/tmp/seven"))
FIELDS = {"page_size": "16"}


def identity(life: int) -> str:
    return f"{life:032x}"


def replica(dp_rank: int = 0, *, of: int = 1, life: int = 3, **changes: Any) -> wire.ReplicaInfo:
    who = Incarnation(f"p{dp_rank}", identity(life))
    made = wire.ReplicaInfo(who, "prefill", "abc", FIELDS, "10.0.0.1", 5, ENDS, 30000, dp_rank, PrefillInfo(of))
    return msgspec.structs.replace(made, **changes)


class Bootstrap:
    """A bootstrap server and a client of it, which signs what it writes. Time stands still unless it is moved."""

    def __init__(self, *replicas: wire.ReplicaInfo, secret: ClusterSecret | None = SECRET) -> None:
        self.registry = BootstrapRegistry()
        self.now_ns = Nanos(1000 * SECOND)
        self.guard = WriteGuard(secret, now=lambda: self.now_ns)
        self.http = TestClient(BootstrapServer(self.registry, self.guard, now=lambda: self.now_ns).app())
        for one in replicas:
            self.registry.register(registration(one))

    def sleep(self, seconds: float) -> None:
        self.now_ns = Nanos(self.now_ns + int(seconds * SECOND))

    def put(self, body: Any) -> Any:
        return self.write("PUT", "/route", body)

    def post(self, path: str, body: Any) -> Any:
        return self.write("POST", path, body)

    def write(self, method: str, path: str, body: Any, headers: dict[str, Any] | None = None) -> Any:
        signed = self.signed(method, path, body) if headers is None else headers
        return self.http.request(method, path, content=content(body), headers=signed)

    def unsigned(self, method: str, path: str, body: Any) -> Any:
        return self.write(method, path, body, headers={})

    def signed(
        self, method: str, target: str, body: Any, *, challenge: str = "", secret: ClusterSecret = SECRET
    ) -> dict[str, Any]:
        challenge = challenge or self.http.get("/challenge").text
        return signed_headers(secret, method=method, target=target, challenge=challenge, body=content(body))


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


def test_an_error_carries_the_id_of_its_request() -> None:
    for path in ("/route", "/nothing"):
        answer = Bootstrap().http.get(path, headers={"x-request-id": "mine"})
        assert answer.json()["error"]["request_id"] == "mine"


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
    assert it.http.get("/route").json()["incarnation"] == {"name": "p0", "id": identity(3)}
    it.registry.unregister(Incarnation("p0", identity(3)))
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


def test_with_the_ranks_of_rooms_decode_is_told_what_the_prefill_is_by_now() -> None:
    it = Bootstrap()
    nobody = it.post("/query_dp_ranks", {"bootstrap_rooms": [7]})
    assert (nobody.json(), nobody.headers.get("x-tandem-prefill")) == ({}, None)
    for life in (replica(0, of=2), replica(0, of=1, life=4)):
        assert it.put(life).status_code == 200
        said = it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).headers["x-tandem-prefill"]
        assert read_prefill(said.encode()) == life.prefill


def test_rooms_are_forgotten_after_two_minutes() -> None:
    it = Bootstrap(replica())
    it.post("/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 0})
    it.sleep(119)
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {"7": 0}
    it.sleep(1)
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {}


# --- what is wrong ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str, Any, str | None]] = {
    "no JSON": ("PUT", "/route", b"{", None),
    "no object": ("PUT", "/route", b"[]", None),
    "a field missing": ("PUT", "/route", {"role": "prefill"}, "incarnation"),
    "another role": ("PUT", "/route", replica(role="decode"), "role"),
    "a rank that cannot be": ("PUT", "/route", replica(2, of=2), "dp_rank"),
    "a room that is no number": ("POST", "/register_dp_rank", {"bootstrap_room": "x", "dp_rank": 0}, "bootstrap_room"),
    "room zero": ("POST", "/register_dp_rank", {"bootstrap_room": 0, "dp_rank": 0}, "bootstrap_room"),
    "no rank": ("POST", "/register_dp_rank", {"bootstrap_room": 1}, "dp_rank"),
    "an unknown rank": ("POST", "/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 1}, "dp_rank"),
    **{
        f"rank {rank!r} for a room": ("POST", "/register_dp_rank", {"bootstrap_room": 1, "dp_rank": rank}, "dp_rank")
        for rank in (10**30, -1, "0", 0.0, 0.5, True, None, [0])
    },
    **{
        f"room {room!r} for a rank": (
            "POST", "/register_dp_rank", {"bootstrap_room": room, "dp_rank": 0}, "bootstrap_room"
        )
        for room in (10**30, -1, 0, "-1", "0", str(10**30), 1.0, True, None, [1])
    },
    **{
        f"room {room!r} in a query": (
            "POST", "/query_dp_ranks", {"bootstrap_rooms": [room]}, "bootstrap_room"
        )
        for room in (10**30, -1, "-1")
    },
    **{
        f"{room!r} in a query": ("POST", "/query_dp_ranks", {"bootstrap_rooms": [room]}, "bootstrap_rooms[0]")
        for room in (1.0, True, None, "1" * 20)
    },
    "rooms that are no list": ("POST", "/query_dp_ranks", {"bootstrap_rooms": 7}, "bootstrap_rooms"),
    "nested rooms": ("POST", "/query_dp_ranks", b'{"x":' + b"[" * 100_000, None),
    "too many rooms": (
        "POST", "/query_dp_ranks", {"bootstrap_rooms": list(range(1, MAX_ROOMS_PER_QUERY + 2))}, "bootstrap_rooms",
    ),
    "a rank that is no number": ("GET", "/route?prefill_dp_rank=x", b"", "prefill_dp_rank"),
    "a rank with many digits": ("GET", "/route?prefill_dp_rank=" + "9" * 5000, b"", "prefill_dp_rank"),
    "no rank in the query": ("GET", "/route?prefill_dp_rank=", b"", "prefill_dp_rank"),
    "a negative rank": ("GET", "/route?prefill_dp_rank=-2", b"", "prefill_dp_rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_request_is_a_400_that_names_the_field_and_changes_nothing(case: str) -> None:
    method, path, body, param = WRONG[case]
    it = Bootstrap(replica())
    response = it.write(method, path, body)
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
    assert error(it.put(b" " * (MAX_BOOTSTRAP_BODY_BYTES + 1))) == (413, "body_too_large", None)


# --- who may write ---------------------------------------------------------------------------------------------------

ROOM = {"bootstrap_room": 7, "dp_rank": 0}


def test_a_write_without_a_proof_is_refused_with_a_challenge_that_the_next_attempt_proves() -> None:
    it = Bootstrap(replica())
    refused = it.unsigned("PUT", "/route", replica(life=9))
    assert error(refused) == (401, "unsigned", None)
    challenge = refused.headers["x-tandem-challenge"]
    headers = it.signed("PUT", "/route", replica(life=9), challenge=challenge)
    assert it.write("PUT", "/route", replica(life=9), headers).status_code == 200
    assert it.http.get("/route").json()["incarnation"]["id"] == identity(9)


def test_reads_need_no_proof() -> None:
    it = Bootstrap(replica())
    assert it.unsigned("POST", "/query_dp_ranks", {"bootstrap_rooms": [7]}).status_code == 200
    assert it.http.get("/route").status_code == it.http.get("/health").status_code == 200


def test_without_a_secret_nobody_writes() -> None:
    it = Bootstrap(replica(), secret=None)
    assert error(it.unsigned("POST", "/register_dp_rank", ROOM)) == (401, "unsigned", None)
    assert error(it.post("/register_dp_rank", ROOM)) == (401, "unsigned", None)
    assert error(it.put(replica(life=9))) == (401, "unsigned", None)


def forged(it: Bootstrap) -> dict[str, dict[str, Any]]:
    good = it.signed("POST", "/register_dp_rank", ROOM)
    elsewhere = Bootstrap()
    late = it.signed("POST", "/register_dp_rank", ROOM)
    return {
        "another secret": it.signed("POST", "/register_dp_rank", ROOM, secret=ClusterSecret(b"another, as long as it")),
        "another body": it.signed("POST", "/register_dp_rank", {"bootstrap_room": 8, "dp_rank": 0}),
        "another path": it.signed("POST", "/query_dp_ranks", ROOM),
        "another query": it.signed("POST", "/register_dp_rank?x=1", ROOM),
        "another method": it.signed("PUT", "/register_dp_rank", ROOM),
        "a challenge of another server": elsewhere.signed("POST", "/register_dp_rank", ROOM),
        "a challenge that nobody made": it.signed("POST", "/register_dp_rank", ROOM, challenge="ab" * 56),
        "a challenge that is none": it.signed("POST", "/register_dp_rank", ROOM, challenge="now"),
        "the hash of another body": good | {"x-tandem-body-sha256": "0" * 64},
        "another challenge": good | {"x-tandem-challenge": late["x-tandem-challenge"]},
        **{f"no {name}": {other: good[other] for other in good if other != name} for name in good},
        **{f"{name} not ASCII": good | {name: ("\u00e4" * len(good[name])).encode()} for name in good},
        **{f"{name} too long": good | {name: good[name] * 100} for name in good},
    }


@pytest.mark.parametrize("case", list(forged(Bootstrap())))
def test_what_is_not_signed_for_this_very_request_is_refused(case: str) -> None:
    it = Bootstrap(replica())
    assert error(it.write("POST", "/register_dp_rank", ROOM, forged(it)[case])) == (401, "unsigned", None)
    assert it.post("/query_dp_ranks", {"bootstrap_rooms": [7]}).json() == {}


def test_a_challenge_is_accepted_once_and_for_half_a_minute() -> None:
    it = Bootstrap(replica())
    headers, late = (it.signed("POST", "/register_dp_rank", ROOM) for _ in range(2))
    assert it.write("POST", "/register_dp_rank", ROOM, headers).status_code == 200
    for _ in range(CHALLENGE_NS // SECOND + 1):
        assert error(it.write("POST", "/register_dp_rank", ROOM, headers)) == (401, "unsigned", None)
        it.sleep(1)
    assert error(it.write("POST", "/register_dp_rank", ROOM, late)) == (401, "unsigned", None)


def test_a_target_is_what_was_asked_for_and_not_what_the_host_header_makes_of_it() -> None:
    it = Bootstrap(replica())
    headers = it.signed("POST", "/register_dp_rank", ROOM) | {"host": "x/register_dp_rank?y="}
    assert it.write("POST", "/register_dp_rank", ROOM, headers).status_code == 200


def test_only_challenges_of_proved_writes_are_remembered_and_in_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_auth, "MAX_SPENT", 3)
    it = Bootstrap(replica())
    for _ in range(10):
        it.unsigned("POST", "/register_dp_rank", ROOM)
        it.write("POST", "/register_dp_rank", ROOM, forged(it)["another secret"])
    assert len(it.guard._spent) == 0
    answers = [it.post("/register_dp_rank", ROOM).status_code for _ in range(4)]
    assert answers == [200, 200, 200, 401]
    it.sleep(CHALLENGE_NS / SECOND)
    assert it.post("/register_dp_rank", ROOM).status_code == 200
    assert len(it.guard._spent) == 1


def test_of_a_writer_who_proves_nothing_no_body_is_read() -> None:
    it = Bootstrap(replica())

    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/route", "query_string": b"", "headers": [], "client": None}
    asyncio.run(it.http.app(scope, receive, send))  # type: ignore[arg-type]  # the ASGI application
    assert sent[0]["status"] == 401


def test_refused_writes_are_one_log_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    it = Bootstrap(replica())
    for _ in range(10):
        it.write("POST", "/register_dp_rank", ROOM, forged(it)["another secret"])
        it.unsigned("POST", "/register_dp_rank", ROOM)
    it.sleep(10)
    it.write("POST", "/register_dp_rank", ROOM, forged(it)["another secret"])
    lines = [record.getMessage() for record in caplog.records if record.name == "tandem.bootstrap"]
    assert [line.partition(" ")[0] for line in lines] == ["1", "10"]
    assert all(line.isprintable() for line in lines)
