"""Keys of real servers: from files, checked at the router and the workers, and nowhere to be seen afterwards."""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import MODEL, START_S, children_of, show_logs

from tandem.cli.fleet import Fleet, Member, start_pd
from tandem.cli.ports import free_ports

USERS = ("first-user-5ecret", "second-user-5ecret")
ADMIN = "admin-5ecret"
WRONG = "wrong-5ecret"
SHOWN = b"5ecret"  # in all of them


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    """A fleet with keys from files and from the environment, and the folder of its flight records."""
    folder = tmp_path_factory.mktemp("keys")
    files = []
    for name, text in (("users", "\n".join(["# who may ask", *USERS])), ("admin", ADMIN)):
        path = folder / name
        path.write_text(text)
        path.chmod(0o600)
        files.append(str(path))
    record = folder / "record"
    keys = ["--api-key-file", files[0], "--admin-api-key-file", files[1]]
    logs = folder / "logs"
    logs.mkdir()
    fleet = Fleet(logs, engines=2)
    os.environ["TANDEM_API_KEY"] = WRONG  # the files win, and no child may see it
    try:
        with fleet:
            start_pd(
                fleet,
                MODEL,
                prefills=1,
                decodes=1,
                router_port=free_ports(1)[0],
                server_flags=[*keys, "--flight-record", str(record), "--host", "127.0.0.1"],
                router_flags=keys,
            )
            try:
                fleet.wait_ready(timeout_s=START_S)
                yield fleet, record
            except BaseException:
                show_logs(fleet)
                raise
    finally:
        del os.environ["TANDEM_API_KEY"]


def call(member: Member, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", member.port, timeout=30)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, data


def test_every_key_of_a_file_opens_through_the_router_and_a_wrong_one_nowhere(pair: tuple[Fleet, Path]) -> None:
    fleet, _ = pair
    *_, router = fleet.members
    body = {"text": "The", "sampling_params": {"max_new_tokens": 2}}
    for key in USERS:
        assert call(router, "POST", "/generate", key, body)[0] == 200
        assert call(router, "POST", "/flush_cache", key)[0] == 401
    assert call(router, "POST", "/flush_cache", ADMIN)[0] == 200
    for member in fleet.members:
        for key in (None, WRONG):
            for path in ("/v1/models", "/server_info", "/health_generate"):
                status, data = call(member, "GET", path, key)
                assert (status, SHOWN in data) == (401, False)
        assert call(member, "GET", "/health", None)[0] == 200
    for member in fleet.members[:2]:
        assert call(member, "GET", "/debug/state", USERS[0])[0] == 401
        assert call(member, "GET", "/debug/state", ADMIN)[0] == 200
    assert call(router, "GET", "/debug/state", ADMIN)[0] == 404
    assert call(router, "GET", "/v1/models/../../debug/state", ADMIN)[0] == 400


def test_no_key_is_in_what_others_can_see(pair: tuple[Fleet, Path]) -> None:
    fleet, record = pair
    for member in fleet.members:
        for path in ("/server_info", "/metrics", "/openapi.json"):
            assert SHOWN not in call(member, "GET", path, USERS[0])[1]
        call(member, "GET", f"/v1/models/{WRONG}", WRONG)
        assert SHOWN not in member.log.read_bytes()
    processes = [member.process.pid for member in fleet.members]
    children = [child for process in processes for child in children_of(process)]
    assert len(children) == 4
    for process in processes + children:
        assert SHOWN not in Path(f"/proc/{process}/cmdline").read_bytes()
    for child in children:
        assert SHOWN not in Path(f"/proc/{child}/environ").read_bytes()
    segments = list(record.glob("flight-*"))
    assert len(segments) == 2
    assert all(SHOWN not in segment.read_bytes() for segment in segments)
