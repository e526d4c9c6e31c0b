"""`/debug/faults`: who may change the test hooks, what is refused, and what reaches the node."""

from typing import Any

import pytest
from api_fakes import World, world

from tandem.core.events import HooksChanged
from tandem.server.wire import FailTransfers

NOW = {"force_optimistic_prefill_retry_prob": 0.5, "disagg_failure_prob": 0.25, "seed": 9}


def server(mode: str = "prefill", **settings: Any) -> World:
    enabled = {"enable_fault_injection": True, "disaggregation_mode": mode} | settings
    return world(answers={"faults": NOW}, **enabled)


def put(w: World, body: object) -> tuple[int, str]:
    """Status, and the code of the error if there is one."""
    with w.http() as http:
        answer = http.put("/debug/faults", json=body)
        return answer.status_code, answer.json().get("error", {}).get("code", "")


def test_the_hooks_are_told_as_the_node_has_them() -> None:
    w = server()
    with w.http() as http:
        assert http.get("/debug/faults").json() == NOW
    assert w.node.sent == []


def test_a_change_reaches_the_node_and_the_answer_is_what_the_node_has_then() -> None:
    w = server()
    body = {"force_optimistic_prefill_retry_prob": 0.5, "disagg_failure_prob": 0.25}
    with w.http() as http:
        assert http.put("/debug/faults", json=body).json() == NOW
    assert w.node.sent == [HooksChanged(0.5), FailTransfers(0.25)]


def test_of_several_ranks_each_says_what_it_has() -> None:
    w = server(ranks=2)
    expected = {"dp_ranks": [{"dp_rank": 0, **NOW}, {"dp_rank": 1, **NOW}]}
    with w.http() as http:
        assert http.put("/debug/faults", json={"disagg_failure_prob": 0.25}).json() == expected
        assert http.get("/debug/faults").json() == expected


def test_what_is_left_out_stays_as_it_is() -> None:
    w = server()
    assert put(w, {"disagg_failure_prob": 1}) == (200, "")
    assert put(w, {}) == (200, "")
    assert w.node.sent == [FailTransfers(1.0)]


@pytest.mark.parametrize(
    "body", [{"disagg_failure_prob": 1.01}, {"disagg_failure_prob": -0.1}, {"disagg_failure_prob": "1"}, {"prob": 1}]
)
def test_what_is_no_probability_or_no_hook_is_refused(body: object) -> None:
    w = server()
    assert put(w, body) == (400, "invalid_value")
    assert w.node.sent == []


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("null", "disagg_failure_prob"),
        ("null", "force_optimistic_prefill_retry_prob"),
        ("decode", "force_optimistic_prefill_retry_prob"),
    ],
)
def test_a_hook_that_can_do_nothing_here_can_only_be_switched_off(mode: str, name: str) -> None:
    assert put(server(mode), {name: 0.5}) == (400, "unsupported")
    assert put(server(mode), {name: 0}) == (200, "")


def test_without_the_flag_there_is_nothing_to_read_or_change() -> None:
    w = server(enable_fault_injection=False)
    with w.http() as http:
        answers = [http.get("/debug/faults"), http.put("/debug/faults", json={"disagg_failure_prob": 1})]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert "--enable-fault-injection" in answers[0].json()["error"]["message"]
    assert w.node.sent == []


def test_the_admin_key_is_needed_where_there_is_one() -> None:
    w = server(admin_api_key="boss")
    assert put(w, {"disagg_failure_prob": 1}) == (401, "unauthorized")
    with w.http() as http:
        assert http.get("/debug/faults", headers={"authorization": "Bearer boss"}).status_code == 200
    assert w.node.sent == []


def test_before_the_node_is_ready_nothing_can_be_changed() -> None:
    w = server(is_ready=False)
    assert put(w, {"disagg_failure_prob": 1}) == (503, "not_ready")
    assert w.node.sent == []
