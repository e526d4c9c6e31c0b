"""What of a request's priority reaches the node, with --enable-priority-scheduling and without."""

from typing import Any

import msgspec
import pytest
from api_fakes import Script, World, ids, world

from tandem.core.request import Request
from tandem.core.values import RequestId
from tandem.sampling import Payload
from tandem.server.api.bounds import MAX_INT, MIN_INT
from tandem.server.api.openapi import bounds

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
}


def asked(**config: Any) -> tuple[World, dict[RequestId, int]]:
    """The priorities that the node hears, by request."""
    heard: dict[RequestId, int] = {}

    def script(request: Request, payload: Payload) -> Script:
        heard[request.id] = request.priority
        return Script(tokens=ids("ok"))

    return world(script, **config), heard


def post(w: World, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    with w.http() as http:
        response = http.post(path, content=msgspec.json.encode(body), headers=headers)
    return response.status_code, response.json()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [-3, 0, 7, MIN_INT, MAX_INT])
def test_the_priority_of_a_body_goes_to_the_node(path: str, priority: int) -> None:
    w, heard = asked(enable_priority_scheduling=True)
    assert post(w, path, BODIES[path] | {"priority": priority})[0] == 200
    assert list(heard.values()) == [priority]


@pytest.mark.parametrize(("low_first", "least"), [(False, MIN_INT), (True, MAX_INT)])
def test_who_says_none_is_the_least_urgent(low_first: bool, least: int) -> None:
    w, heard = asked(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    for body in ({}, {"priority": None}):
        assert post(w, "/v1/completions", {"prompt": "x"} | body)[0] == 200
    assert list(heard.values()) == [least, least]


def test_a_probe_is_as_urgent_as_who_says_nothing() -> None:
    w, heard = asked(enable_priority_scheduling=True)
    with w.http() as http:
        assert http.get("/health_generate").status_code == 200
    assert list(heard.values()) == [MIN_INT]


def test_all_samples_of_a_request_have_its_priority() -> None:
    w, heard = asked(enable_priority_scheduling=True)
    assert post(w, "/v1/completions", {"prompt": ["x", "y"], "n": 2, "priority": 4})[0] == 200
    assert list(heard.values()) == [4] * 4


def test_a_gateway_has_the_last_word() -> None:
    w, heard = asked(enable_priority_scheduling=True)
    for body in ({}, {"priority": 2}):
        assert post(w, "/v1/completions", {"prompt": "x"} | body, **{"x-override-priority": "-7"})[0] == 200
    assert list(heard.values()) == [-7, -7]


@pytest.mark.parametrize("given", ["", "high", "1.5", str(MAX_INT + 1), "9" * 5000])
def test_a_header_that_is_no_priority_is_refused(given: str) -> None:
    w, heard = asked(enable_priority_scheduling=True)
    status, answer = post(w, "/v1/completions", {"prompt": "x"}, **{"x-override-priority": given})
    assert (status, answer["error"]["param"], heard) == (400, "X-Override-Priority", {})


def test_where_nobody_reads_it_a_header_is_refused_as_the_field_is() -> None:
    w, heard = asked()
    status, answer = post(w, "/v1/completions", {"prompt": "x"}, **{"x-override-priority": "1"})
    assert (status, answer["error"]["param"], heard) == (400, "priority", {})
    assert "--enable-priority-scheduling" in answer["error"]["message"]


def test_the_document_of_the_api_says_what_is_accepted() -> None:
    assert bounds(1, 8)["priority"] == {"minimum": 0, "maximum": 0}
    assert "priority" not in bounds(1, 8, has_priorities=True)
