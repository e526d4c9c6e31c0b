"""Routers that ask prefill first and decode then, with what prefill has answered (`kv_transfer_params`), as vLLM's do.

Nobody stands in front of the halves: the test says what such a router says.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, HttpError, Server, cluster, eventually

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHATTED = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "temperature": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, CHATTED),
    (CHAT, CHATTED | {"max_tokens": 1}),
    (CHAT, CHATTED | {"n": 3, "temperature": 0.9, "seed": 4}),
    (CHAT, CHATTED | {"logprobs": True, "top_logprobs": 2, "stop": ["7"]}),
    (COMPLETIONS, {"prompt": [QUESTION, "2 + 2 ="], "max_tokens": 12, "temperature": 0, "logprobs": 1}),
]
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
WANTED |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@pytest.fixture(scope="module", params=["off", "park"])
def servers(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    flags = ("--optimistic-prefill-policy", request.param)
    with cluster(prefills=1, decodes=1, unified=True, prefill_flags=flags) as found:
        yield found


def at_prefill(prefill: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What it answers to the body as a router changes it."""
    asked = body | {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
    answer = prefill.call("POST", path, asked)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    return dict(answer["kv_transfer_params"])


def in_turn(servers: Cluster, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer, and where its prompt was computed."""
    told = at_prefill(servers.prefills[0], path, body)
    with servers.decodes[0].open("POST", path, body | {"kv_transfer_params": told}) as reply:
        where = reply.headers["x-tandem-path"]
        return dict(json.load(reply)), where


def alone(servers: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    assert servers.unified is not None
    return dict(servers.unified.call("POST", path, body))


def all_idle(servers: Cluster) -> None:
    eventually(lambda: all(server.is_idle() for server in servers.servers))


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_answer_is_that_of_one_engine_and_prefill_computes_its_prompt(
    servers: Cluster, path: str, body: dict[str, Any]
) -> None:
    answer, where = in_turn(servers, path, body)

    assert where == "remote"
    assert answer["choices"] == alone(servers, path, body)["choices"]
    all_idle(servers)


def test_what_prefill_was_not_told_of_the_first_token_decode_computes_itself(servers: Cluster) -> None:
    """At once, and the other half ends: it waits for nobody."""
    body = CHATTED | {"min_tokens": 4}

    answer, where = in_turn(servers, CHAT, body)

    assert where == "local"
    assert answer["choices"] == alone(servers, CHAT, body)["choices"]
    all_idle(servers)
    eventually(lambda: "for another min_tokens" in servers.prefills[0].log)


def test_a_half_that_nobody_comes_for_ends_at_its_deadline(servers: Cluster) -> None:
    prefill, began = servers.prefills[0], time.monotonic()

    at_prefill(prefill, CHAT, CHATTED | {"timeout": 2.0})

    assert time.monotonic() - began < 2.0, "it is answered before anybody comes"
    all_idle(servers)
    assert "deadline_exceeded" in prefill.log


def test_what_names_no_pair_is_refused_or_computed_alone(servers: Cluster) -> None:
    prefill, decode = servers.prefills[0], servers.decodes[0]
    for server, extra, param in (
        (decode, {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        (prefill, {"kv_transfer_params": WANTED, "stream": True}, "stream"),
        (prefill, {"kv_transfer_params": {}}, "bootstrap_room"),
    ):
        with pytest.raises(HttpError) as refused:
            server.call("POST", CHAT, CHATTED | extra)
        assert (refused.value.status, refused.value.error["param"]) == (400, param)
    expected = alone(servers, CHAT, CHATTED)["choices"]
    for params in (None, {}, WANTED):
        assert decode.call("POST", CHAT, CHATTED | {"kv_transfer_params": params})["choices"] == expected
