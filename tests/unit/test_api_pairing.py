"""The fields of a disaggregated pair: rooms, peers and seeds that both halves derive alike."""

from collections.abc import Callable

import pytest
from api_fakes import World, ids, world

from tandem.core.events import RequestRefused
from tandem.core.request import Request
from tandem.core.values import Address, Cause

PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 77}
ROOM = 6_148_914_691_236_517_205


def decode(**settings: object) -> World:
    return world(disaggregation_mode="decode", **settings)


def prefill(**settings: object) -> World:
    return world(disaggregation_mode="prefill", **settings)


def requests_of(w: World, body: dict, path: str = "/v1/completions") -> list[Request]:
    with w.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return [submit.request for submit in w.node.submits]


def refusal_of(w: World, body: dict) -> dict:
    with w.http() as http:
        response = http.post("/v1/completions", json={"prompt": "x"} | body)
    assert response.status_code == 400, response.text
    assert w.node.submits == []
    return response.json()["error"]


def test_decode_is_told_the_peer_and_prefill_is_not() -> None:
    body = {"prompt": "x", **PAIR}
    (at_decode,) = requests_of(decode(), body)
    (at_prefill,) = requests_of(prefill(), body)
    assert (at_decode.room, at_decode.peer) == (77, Address("127.0.0.1", 9001))
    assert (at_prefill.room, at_prefill.peer) == (77, None)


def test_a_half_that_the_edge_refuses_is_told_to_the_node_for_the_sake_of_the_other() -> None:
    w = prefill()
    with w.http() as http:
        w.client.drain()
        assert http.post("/v1/completions", json={"prompt": "x", **PAIR}).status_code == 503
    assert w.node.submits == []
    _, refused = w.node.sent
    assert isinstance(refused, RequestRefused)
    assert (refused.request.room, refused.cause) == (77, Cause.DRAINING)


ALONE = [
    pytest.param("/v1/completions", {"prompt": "x" * 30}, Cause.CONTEXT_LENGTH_EXCEEDED, id="a long text"),
    pytest.param("/v1/completions", {"prompt": [5] * 900}, Cause.CONTEXT_LENGTH_EXCEEDED, id="many ids"),
    pytest.param(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 30}]},
        Cause.CONTEXT_LENGTH_EXCEEDED,
        id="a long chat",
    ),
    pytest.param("/generate", {"text": ["x", "x" * 30]}, Cause.CONTEXT_LENGTH_EXCEEDED, id="one of two texts"),
    pytest.param("/v1/completions", {"prompt": "x", "n": 6}, Cause.PEER_ABORTED, id="many samples"),
]


@pytest.mark.parametrize("half", [prefill, decode])
@pytest.mark.parametrize(("path", "body", "cause"), ALONE)
def test_what_is_too_much_for_this_server_alone_is_told_to_the_other_half_which_believes_it(
    path: str, body: dict, cause: Cause, half: Callable[..., World]
) -> None:
    """Another server has the room for it: what the node is told of has the digest that its half has there."""
    secret = b"of the cluster"
    taken = requests_of(half(digest_secret=secret), body | PAIR, path)
    with (w := half(digest_secret=secret, context_length=20, max_queued_requests=5)).http() as http:
        response = http.post(path, json=body | PAIR)
    assert response.status_code == 400
    assert w.node.submits == []
    told = [message for message in w.node.sent if isinstance(message, RequestRefused)]
    assert [(one.request.room, one.request.prompt_digest) for one in told] == [
        (one.room, one.prompt_digest) for one in taken
    ]
    assert {(one.request.peer, one.cause, one.detail) for one in told} == {
        (taken[0].peer, cause, response.json()["error"]["message"])
    }
    assert not any(one.request.page_hashes for one in told), "a node is told whose half it is, however long"


def test_what_no_server_takes_is_told_to_nobody() -> None:
    with (w := decode(context_length=20)).http() as http:
        for more in ({"bootstrap_room": None}, {"priority": 3}):
            assert http.post("/v1/completions", json={"prompt": "x" * 30, **PAIR, **more}).status_code == 400
    assert w.node.sent == []


def test_a_unified_server_ignores_the_fields() -> None:
    (request,) = requests_of(world(), {"prompt": "x", **PAIR})
    assert (request.room, request.peer) == (None, None)


def test_a_missing_port_means_the_usual_one_and_a_room_may_be_text() -> None:
    body = {"prompt": "x", "bootstrap_host": "[::1]", "bootstrap_port": None, "bootstrap_room": str(ROOM)}
    (request,) = requests_of(decode(disaggregation_bootstrap_port=1234), body)
    assert (request.room, request.peer) == (ROOM, Address("::1", 1234))


def test_lists_name_room_and_peer_of_each_prompt() -> None:
    body = {
        "prompt": ["x", "y"],
        "bootstrap_host": ["localhost", "127.0.0.2"],
        "bootstrap_port": [1, None],
        "bootstrap_room": [5, "6"],
    }
    requests = requests_of(decode(), body)
    assert [(r.room, r.peer) for r in requests] == [(5, Address("localhost", 1)), (6, Address("127.0.0.2", 8998))]


@pytest.mark.parametrize("extra", [{"prompt": "x", "n": 3}, {"prompt": ["x", "y"], "n": 2}])
def test_both_halves_derive_the_same_rooms_and_seeds(extra: dict) -> None:
    worlds = (prefill(), decode())
    rooms, seeds = [], []
    for w in worlds:
        rooms.append([request.room for request in requests_of(w, extra | PAIR)])
        seeds.append([submit.payload.sampling.seed for submit in w.node.submits])
    assert rooms[0] == rooms[1]
    assert seeds[0] == seeds[1]
    assert rooms[0][0] == 77
    assert len(set(rooms[0])) == len(set(seeds[0])) == len(rooms[0])
    assert all(0 < room < 1 << 63 for room in rooms[0])


def test_lists_with_one_entry_per_sample_name_the_room_of_each() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "n": 2,
        "bootstrap_host": ["127.0.0.1", "127.0.0.1"],
        "bootstrap_port": [9001, 9001],
        "bootstrap_room": [5, 6],
    }
    requests = requests_of(decode(), body, "/v1/chat/completions")
    assert [(r.room, r.peer) for r in requests] == [(5, Address("127.0.0.1", 9001)), (6, Address("127.0.0.1", 9001))]


def test_a_seed_of_the_user_wins_and_samples_still_differ() -> None:
    w = decode()
    requests_of(w, {"prompt": "x", "n": 2, "seed": 9, **PAIR})
    first, second = (submit.payload.sampling.seed for submit in w.node.submits)
    assert first == 9
    assert second != 9


def test_without_room_and_seed_every_request_draws_its_own() -> None:
    w = world()
    with w.http() as http:
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": "x"})
    first, second = (submit.payload.sampling.seed for submit in w.node.submits)
    assert first != second


def test_decode_computes_a_request_without_room_itself() -> None:
    (request,) = requests_of(decode(), {"prompt": "x"})
    assert (request.room, request.peer) == (None, None)


def test_prefill_refuses_a_request_without_room_and_says_what_to_do() -> None:
    error = refusal_of(prefill(), {})
    assert error["param"] == "bootstrap_room"
    assert "router" in error["message"]


@pytest.mark.parametrize("room", [0, -1, 1 << 63, "abc", "", "0", "07", "1.5", "-4", 1.5, True, [1, 2], "9" * 30])
@pytest.mark.parametrize("half", [prefill, decode])
def test_a_bad_room_is_refused_by_both_halves(room: object, half) -> None:
    assert refusal_of(half(), PAIR | {"bootstrap_room": room})["param"] == "bootstrap_room"


@pytest.mark.parametrize("host", ["8.8.8.8", "169.254.169.254", "example.org", "", "127.0.0.1.example.org", "0.0.0.0"])
@pytest.mark.parametrize("half", [prefill, decode])
def test_a_host_that_is_neither_loopback_nor_this_server_is_refused(host: str, half) -> None:
    error = refusal_of(half(), PAIR | {"bootstrap_host": host})
    assert (error["param"], error["code"]) == ("bootstrap_host", "host_not_allowed")


def test_the_address_this_server_listens_on_is_a_good_host() -> None:
    body = {"prompt": "x", **PAIR, "bootstrap_host": "10.0.0.5"}
    (request,) = requests_of(decode(host="10.0.0.5"), body)
    assert request.peer == Address("10.0.0.5", 9001)


@pytest.mark.parametrize("half", [prefill, decode])
def test_an_allowed_network_is_allowed_on_both_halves(half) -> None:
    w = half(disaggregation_allow=("10.1.0.0/16",))
    requests_of(w, {"prompt": "x", **PAIR, "bootstrap_host": "10.1.2.3"})
    other = half(disaggregation_allow=("10.1.0.0/16",))
    assert refusal_of(other, PAIR | {"bootstrap_host": "10.2.2.3"})["param"] == "bootstrap_host"


def test_the_prefills_dp_rank_reaches_the_node_of_both_halves_per_prompt() -> None:
    body = {"prompt": ["x", "y"], **PAIR, "bootstrap_room": [5, 6], "disagg_prefill_dp_rank": [3, None]}
    for half in (prefill, decode):
        assert [request.dp_rank_hint for request in requests_of(half(), body)] == [3, None]
    assert [request.dp_rank_hint for request in requests_of(world(), body)] == [None, None]


def test_decode_that_is_strictly_remote_refuses_a_request_without_room() -> None:
    error = refusal_of(decode(strict_remote=True), {})
    assert error["param"] == "bootstrap_room"
    assert "--strict-remote" in error["message"]
    (request,) = requests_of(decode(strict_remote=True), {"prompt": "x", **PAIR})
    assert request.room == 77


@pytest.mark.parametrize("port", [0, -1, 65536, "80"])
def test_a_bad_port_is_refused(port: object) -> None:
    assert refusal_of(decode(), PAIR | {"bootstrap_port": port})["param"] == "bootstrap_port"


def test_a_room_without_host_is_refused_by_decode() -> None:
    error = refusal_of(decode(), {"bootstrap_room": 3})
    assert (error["param"], error["code"]) == ("bootstrap_host", "invalid_combination")


def test_two_prompts_may_not_share_a_room() -> None:
    with decode().http() as http:
        body = {"prompt": ["x", "y"], "bootstrap_host": "::1", "bootstrap_room": [3, 3]}
        response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "duplicate_room")


def test_generate_takes_the_same_fields() -> None:
    body = {"input_ids": [ids("a"), ids("b")], "bootstrap_host": "::1", "bootstrap_room": [3, 4]}
    requests = requests_of(decode(), body, "/generate")
    assert [request.room for request in requests] == [3, 4]


def test_every_sample_is_a_request_of_its_own() -> None:
    w = decode()
    requests = requests_of(w, {"prompt": "x", "n": 2, "rid": "mine", **PAIR})
    assert [(request.id, request.rid) for request in requests] == [(1, "mine_0"), (2, "mine_1")]
    assert [submit.payload.request for submit in w.node.submits] == [1, 2]


# as routers of vLLM's say it (`kv_transfer_params.py`)


SECRET = b"of the cluster"
WANTED = {"kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}


def told_by_prefill(body: dict, path: str = "/v1/completions") -> tuple[dict, Request]:
    w = prefill(digest_secret=SECRET)
    with w.http(base_url="http://127.0.0.1:8000") as http:
        answer = http.post(path, json=body | WANTED).json()
    (submit,) = w.node.submits
    return answer["kv_transfer_params"], submit.request


def test_prefill_answers_with_a_room_where_decode_finds_the_same_request() -> None:
    streamed = {"stream_options": {"include_usage": True}}  # which not every router takes out
    told, at_prefill = told_by_prefill({"prompt": "x", "max_tokens": 1, "min_tokens": 1, **streamed})
    (at_decode,) = requests_of(
        decode(digest_secret=SECRET), {"prompt": "x", "max_tokens": 5, "kv_transfer_params": told}
    )

    assert at_decode.room == at_prefill.room == int(told["remote_room"])
    assert at_decode.peer == Address(told["remote_host"], told["remote_port"])
    assert at_decode.prompt_digest == at_prefill.prompt_digest
    assert at_decode.max_new_tokens == 5
    assert at_prefill.max_new_tokens > 1, "one token is the router's word, not the client's"


def test_where_the_first_token_may_differ_decode_ends_that_half_and_computes_the_prompt() -> None:
    told, at_prefill = told_by_prefill({"prompt": "x", "max_tokens": 1, "min_tokens": 1})
    w = decode(digest_secret=SECRET)
    (at_decode,) = requests_of(w, {"prompt": "x", "min_tokens": 2, "kv_transfer_params": told})

    assert (at_decode.room, at_decode.peer) == (None, None)
    (refused,) = (message for message in w.node.sent if isinstance(message, RequestRefused))
    assert (refused.request.room, refused.request.prompt_digest) == (at_prefill.room, at_prefill.prompt_digest)
    honest, at_prefill = told_by_prefill({"prompt": "x", "max_tokens": 1, "min_tokens": 2})
    (at_decode,) = requests_of(decode(), {"prompt": "x", "min_tokens": 2, "kv_transfer_params": honest})
    assert at_decode.room == at_prefill.room, "prefill was told the client's"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"max_tokens": 3, "min_tokens": 9},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_what_prefill_could_not_refuse_decode_refuses_for_both(fields: dict) -> None:
    told, at_prefill = told_by_prefill(fields | {"prompt": "x", "max_tokens": 1, "min_tokens": 1, "stream": False})
    w = decode(digest_secret=SECRET)

    refusal_of(w, fields | {"kv_transfer_params": told})

    (refused,) = (message for message in w.node.sent if isinstance(message, RequestRefused))
    assert (refused.request.room, refused.request.prompt_digest) == (at_prefill.room, at_prefill.prompt_digest)


def test_a_decode_that_computes_no_prompt_says_what_differs() -> None:
    told, _ = told_by_prefill({"prompt": "x", "min_tokens": 1})
    error = refusal_of(decode(strict_remote=True), {"min_tokens": 2, "kv_transfer_params": told})
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(("name", "value"), [("remote_room", 0), ("remote_room", "x"), ("remote_port", 65536)])
def test_what_is_wrong_with_the_other_half_is_named_as_it_was_said(name: str, value: int | str) -> None:
    other = {"do_remote_prefill": True, "remote_host": "127.0.0.2", "remote_port": 5, "remote_room": "8"}
    error = refusal_of(decode(), {"kv_transfer_params": other | {name: value}})
    assert error["param"] == f"kv_transfer_params.{name}"
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("name", ["remote_room", "remote_host"])
def test_who_does_not_say_where_prefill_has_answered_from_is_refused(name: str) -> None:
    other = {"do_remote_prefill": True, "remote_host": "127.0.0.2", "remote_room": "8"}
    error = refusal_of(decode(), {"kv_transfer_params": other | {name: None}})
    assert error["param"] == "kv_transfer_params"


def test_a_room_that_a_router_names_itself_comes_first() -> None:
    body = {"prompt": "x", **PAIR}
    (at_prefill,) = requests_of(prefill(), body | WANTED)
    other = {"do_remote_prefill": True, "remote_host": "127.0.0.2", "remote_port": 5, "remote_room": "8"}
    (at_decode,) = requests_of(decode(), body | {"kv_transfer_params": other})
    (alone,) = requests_of(world(), {"prompt": "x", "kv_transfer_params": "whatever it is"})
    assert at_prefill.room == at_decode.room == PAIR["bootstrap_room"]
    assert alone.room is None
