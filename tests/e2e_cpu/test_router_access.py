"""What of a client's request reaches the workers, by the bytes that it sends to the router."""

import json

import pytest
from router_fakes import Fleet, Seen, eventually, fleet

from raw_http import Reply, ask

TO_OTHER_PAGES = [
    "/v1/models/../../debug/state",
    "/v1/models/../../debug/waits",
    "/v1/models/../../flush_cache",
    "/v1/models/%2e%2e/%2e%2e/debug/state",
    "/v1/models/..%2f..%2fdebug%2fstate",
    "/v1/models/.%2e/%2E./flush_cache",
    "/v1/models/x/..;/../../debug/state",
    "/v1/models/..\\..\\debug\\state",
    "/v1/models/..%5c..%5cdebug%5cstate",
    "/v1/models/%00/../../debug/state",
    "/v1/models/x%00",
    "/v1/models/%13x",
    "/v1/models/.",
    "http://127.0.0.1/v1/models/../../debug/state",
]
NOT_SERVED = [
    "/debug/state",
    "//debug/state",
    "/debug/faults",
    "/debug/state/",
    "/debug/state;x",
    "http://127.0.0.1/debug/state",
    "/register_dp_rank",
    "/route",
]


def port_of(made: Fleet) -> int:
    return int(made.url.rpartition(":")[2])


def asked(made: Fleet) -> list[Seen]:
    return [seen for worker in made.prefills + made.decodes for seen in worker.seen]


def test_no_spelling_of_a_path_reaches_a_page_that_is_not_proxied() -> None:
    with fleet(api_key="user") as made:
        for key in ({}, {"authorization": "Bearer user"}):
            for target in TO_OTHER_PAGES:
                reply = ask(port_of(made), target, headers=key)
                assert (reply.status, b"malformed_request" in reply.body) == (400, True), target
        assert asked(made) == []


def test_a_path_that_is_too_long_once_it_is_quoted_is_refused_and_not_passed_on() -> None:
    with fleet() as made:
        reply = ask(port_of(made), "/v1/models/" + "%FF" * 10_000)
        assert (reply.status, b"malformed_request" in reply.body) == (400, True)
        assert asked(made) == []


@pytest.mark.parametrize("target", NOT_SERVED)
def test_what_is_not_served_is_not_asked_for(target: str) -> None:
    with fleet() as made:
        assert ask(port_of(made), target).status == 404
        assert asked(made) == []


def test_a_models_name_may_hold_slashes_and_odd_characters_and_no_query_goes_with_it() -> None:
    names = {
        "a%2Fb/c": "a/b/c",
        "a//b": "a//b",
        "%C2%B8": "\xb8",
        "a|b": "a|b",
        "a%3Fstream=1": "a?stream=1",
        "a%23b": "a#b",
        "%252e%252e%252fdebug": "%2e%2e%2fdebug",
        "%FF": "\ufffd",
        "...": "...",
        "a:b@c;d=e": "a:b@c;d=e",
    }
    with fleet() as made:
        for name in names:
            assert ask(port_of(made), f"/v1/models/{name}?x=../y").status == 404, name
        assert [seen.path for seen in asked(made)] == [f"/v1/models/{name}" for name in names.values()]
        assert {seen.query for seen in asked(made)} == {""}


FOREIGN = {
    "X-Forwarded-For": "127.0.0.1",
    "Forwarded": "for=127.0.0.1",
    "X-Real-IP": "127.0.0.1",
    "X-Custom": "1",
    "Cookie": "a=b",
    "Proxy-Authorization": "Basic x",
    "TE": "trailers",
    "Upgrade": "websocket",
    "X-Override-Bootstrap-Host": "evil",
    "X-HTTP-Method-Override": "DELETE",
    "Content-Type": "text/plain",
    "Accept-Encoding": "gzip",
}
PASSED = {"authorization": "Bearer theirs", "traceparent": "00-1", "tracestate": "a=1", "x-data-parallel-rank": "0"}
OF_THE_CONNECTION = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-length", "content-type"}


def sent(made: Fleet, method: str, target: str, body: bytes) -> dict[str, str]:
    """The headers of the last thing that decode saw."""
    reply = ask(port_of(made), target, method=method, headers=FOREIGN | PASSED, body=body)
    assert reply.status == 200
    eventually(made.is_idle)
    return made.decodes[0].seen[-1].headers


def test_headers_are_passed_on_by_a_list() -> None:
    with fleet() as made:
        headers = sent(made, "POST", "/generate", b'{"text": "x"}')
        assert {name: headers[name] for name in PASSED} == PASSED
        assert set(headers) == {*PASSED, *OF_THE_CONNECTION, "x-request-id", "x-request-timeout-ms"}
        assert headers["content-type"] == "application/json"
        assert headers["host"] == made.decodes[0].url.removeprefix("http://")
        headers = sent(made, "GET", "/v1/models", b"")
        assert set(headers) == OF_THE_CONNECTION - {"content-length"} | {"authorization", "x-request-id"}
        assert headers["authorization"] == "Bearer theirs"
        assert headers["accept-encoding"] == "identity"


def test_a_clients_key_is_checked_here_and_sent_on() -> None:
    with fleet(api_key="one\ntwo") as made:
        port, body = port_of(made), b'{"text": "x"}'

        def post(key: str) -> Reply:
            return ask(port, "/generate", method="POST", headers={"authorization": f"Bearer {key}"}, body=body)

        assert [post(key).status for key in ("one", "two", "three")] == [200, 200, 401]
        eventually(made.is_idle)
        keys = [seen.headers["authorization"] for seen in made.decodes[0].generations]
        assert keys == ["Bearer one", "Bearer two"]
        assert ask(port, "/health_generate").status == 401


def test_a_web_page_does_not_reach_the_router_either() -> None:
    with fleet() as made:
        page = {"origin": "https://evil.example", "content-type": "text/plain"}
        port = port_of(made)
        for target in ("/generate", "/flush_cache", "/abort_request", "/v1/chat/completions"):
            assert ask(port, target, method="POST", headers=page, body=b'{"text": "x"}').status == 403
        assert ask(port, "/flush_cache").status == 405
        assert ask(port, "/v1/models", host="evil.example").status == 403
        assert ask(port, "/v1/models", host="x/health?").status == 400
        assert asked(made) == []
        assert ask(port, "/flush_cache", method="POST").status == 200


def test_an_error_names_the_router_and_the_request() -> None:
    with fleet(api_key="user") as made:
        reply = ask(port_of(made), "/v1/models", headers={"x-request-id": "mine"})
        assert reply.headers["x-request-id"] == "mine"
        assert b'"stage":"router"' in reply.body
        assert b'"request_id":"mine"' in reply.body


def test_a_page_of_an_allowed_origin_may_use_the_router_streams_too() -> None:
    page = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with fleet(allowed_origins=("https://chat.example",)) as made:
        before = ask(port_of(made), "/v1/completions", method="OPTIONS", headers=page | wish)
        assert (before.status, asked(made)) == (200, [])
        for body in (b'{"prompt": "x"}', b'{"prompt": "x", "stream": true}'):
            reply = ask(port_of(made), "/v1/completions", method="POST", headers=page, body=body)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://chat.example")
            assert "x-tandem-path" in reply.headers["access-control-expose-headers"]
        assert all("origin" not in seen.headers for seen in asked(made)), "what workers are asked is the router's"
        other = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        assert ask(port_of(made), "/v1/completions", method="POST", headers=other, body=b"{}").status == 403


def test_the_router_says_what_it_is_and_what_it_offers() -> None:
    with fleet() as made:
        told = json.loads(ask(port_of(made), "/").body)
        assert (told["name"], told["role"], told["models"]) == ("tandem", "router", ["fake"])
        assert {"POST /v1/chat/completions", "GET /docs", "DELETE /v1/responses/{id}"} <= set(told["endpoints"])
        page = ask(port_of(made), "/docs").body.decode()
        assert "/v1/chat/completions" in page
        assert "/debug/" not in page
        made.decodes[0].kill()
        eventually(lambda: json.loads(ask(port_of(made), "/").body)["models"] == [])
