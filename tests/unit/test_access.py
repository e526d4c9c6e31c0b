"""Who may ask for which page, by the bytes that a client or a browser sends."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from api_fakes import says, world
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from raw_http import Reply, ask, exchange, serving
from tandem.config import ServerConfig
from tandem.core.router.worker_registry import RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.server.api.access import PAGES, Access, AccessRules, AuthMiddleware, access_of
from tandem.server.api.http1 import MAX_HEAD_BYTES
from tandem.server.exposure import listens_on_loopback
from tandem.server.router.app import RouterApp
from tandem.server.router.config import RouterConfig

ANSWERS = {"metrics": {}, "flush": {}, "state": {}, "waits": [], "faults": {}, "flow": []}
DEBUG = ("/debug/state", "/debug/waits", "/debug/faults", "/debug/pd/data")
BODY = b'{"prompt": "x"}'
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """Those of this file run until its end: most tests want the same few."""
    with ExitStack() as stack:
        STACKS.append(stack)
        yield
        STACKS.clear()
        port_of.cache_clear()


STACKS: list[ExitStack] = []


@cache
def port_of(settings: tuple[tuple[str, Any], ...]) -> int:
    app = world(says("ok"), answers=ANSWERS, **dict(settings)).app
    return STACKS[0].enter_context(serving(app))


def server(**settings: Any) -> int:
    """The port of a server on loopback; the node is a fake one."""
    named = {"allowed_host": (), "enable_fault_injection": True} | settings
    return port_of(tuple(sorted(named.items())))


def code(reply: Reply) -> str:
    """The error's, out of its body."""
    _, _, rest = reply.body.partition(b'"code":"')
    return rest.partition(b'"')[0].decode()


def test_every_page_is_in_the_table_or_needs_the_key() -> None:
    """A page that is added has to be thought of here, too."""
    rows = [RegisteredWorker(WorkerId(0), Role.PREFILL, "http://127.0.0.1:1", "127.0.0.1", None)]
    router = RouterApp(RouterConfig(workers=tuple(rows)))
    served = {route.path for app in (world().app, router.app) for route in app.routes if isinstance(route, Route)}
    assert set(PAGES) <= served
    assert all(
        access_of(path) is Access.OPERATOR for path in ("/workers", "/workers/7", "/add_worker", "/list_workers")
    )
    assert served - set(PAGES) == {
        "/",
        "/workers/{id}",  # by its folder
        *("/v1/chat/completions", "/v1/completions", "/generate"),
        *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/input_tokens"),
        *("/v1/models", "/v1/models/{id:path}", "/v1/loads", "/get_load", "/load", "/version", "/openapi.json"),
        *("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/health_generate"),
    }
    assert {path for path in served if path.startswith("/debug")} == {*DEBUG, "/debug/pd"}
    assert all(PAGES[path] is Access.LOCAL for path in DEBUG)


# --- form ------------------------------------------------------------------------------------------------------------

MALFORMED_PATHS = [
    "/v1/models/../../debug/state",
    "/v1/models/%2e%2e/%2E%2e/debug/state",
    "/v1/models/..%2f..%2fdebug/state",
    "/v1/models/%2e%2e%2f%2e%2e%2fdebug%2fstate",
    "/v1/models/..;/..;x=1/debug/state",
    "/v1/models/a/./b",
    "/metrics/../v1/models",
    "/health/..",
    "/v1/models/..\\..\\debug\\state",
    "/v1/models/%5c..%5cdebug",
    "/v1/models/x%00",
    "/v1/models/x%0d%0aX-Evil:1",
    "/v1/models/x%7f",
]


@pytest.mark.parametrize("keys", [{}, {"api_key": "user"}])
def test_a_path_that_others_would_tidy_up_is_none(keys: dict[str, str]) -> None:
    port = server(**keys)
    for target in MALFORMED_PATHS:
        reply = ask(port, target)
        assert (reply.status, code(reply)) == (400, "malformed_request"), target


OTHER_PATHS = ["//debug/state", "/debug//state", "/debug/state/", "/debug/state;x", "/DEBUG/STATE", "/debug%252fstate"]
OPENED_BY_PREFIX = ["/healthz-anything", "/health/x", "/metricsx", "/readyz", "/health;", "/metrics//"]


def test_a_path_is_known_by_the_whole_of_it() -> None:
    port = server(api_key="user")
    for target in OTHER_PATHS + OPENED_BY_PREFIX:
        assert ask(port, target).status == 401, target
        assert ask(port, target, headers={"authorization": "Bearer user"}).status == 404, target
    assert ask(port, "/h%65alth").status == 200, "what is decoded is what is routed"


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "127.0.0.1/metrics", "a b", "a@b", "[::1", "x:y", "ü"])
def test_a_host_that_is_none_opens_nothing(host: str) -> None:
    port = server(api_key="user", admin_api_key="boss")
    for target in ("/v1/models", "/flush_cache", "/debug/state", "/health"):
        reply = ask(port, target, host=host)
        assert (reply.status, code(reply)) == (400, "malformed_request"), target


def test_two_hosts_are_none() -> None:
    port = server()
    reply = ask(port, "/health", headers={"Host": "localhost"})
    assert (reply.status, code(reply)) == (400, "malformed_request")
    assert ask(port, "/health", host=None).status == 200


def test_an_absolute_target_is_judged_by_its_path() -> None:
    port = server(api_key="user")
    assert ask(port, "http://evil/health").status == 200
    assert ask(port, "http://evil/debug/state").status == 401
    assert ask(port, "http://evil/health/../debug/state").status == 400
    assert ask(port, "http://health/v1/models").status == 401


@pytest.mark.parametrize(
    "line",
    [b"OPTIONS *", b"CONNECT a:1", b"GET health", b"BREW /", b"GET /\xff", b"GET /h\x00", b"get /health", b"GET"],
)
def test_what_is_no_request_is_refused_and_the_next_one_answered(line: bytes) -> None:
    port = server()
    reply = exchange(port, line + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert reply.status in (0, 400, 404, 405)
    assert ask(port, "/health").status == 200


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_generated_token_is_not_for_everybody_where_there_is_a_key() -> None:
    port = server(api_key="user")
    assert ask(port, "/health_generate").status == 401
    assert ask(port, "/health_generate", headers={"authorization": "Bearer user"}).status == 200


def test_several_keys_open_alike_and_a_piece_of_the_list_is_none() -> None:
    port = server(api_key="one\ntwo", admin_api_key="boss\nchief")

    def status(key: str, target: str) -> int:
        return ask(port, target, headers={"authorization": f"Bearer {key}"}).status

    assert {status(key, "/v1/models") for key in ("one", "two", "boss", "chief")} == {200}
    assert {status(key, "/v1/models") for key in ("one\ttwo", "onetwo", "", "on")} == {401}
    assert {status(key, "/debug/state") for key in ("boss", "chief")} == {200}
    assert {status(key, "/debug/state") for key in ("one", "two")} == {401}


# --- machine ---------------------------------------------------------------------------------------------------------


def far_away(target: str, headers: dict[str, str], **config: Any) -> int:
    """The status that a client on another machine gets."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": target,
        "raw_path": target.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("10.1.2.3", 9),
    }
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(world(answers=ANSWERS, enable_fault_injection=True, **config).app(scope, receive, send))
    return statuses[0]


PRETENCES = [{}, {"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}, {"x-real-ip": "::1"}]


@pytest.mark.parametrize("pretence", PRETENCES)
@pytest.mark.parametrize("page", DEBUG)
def test_debug_pages_are_for_this_machine_whatever_a_header_says(page: str, pretence: dict[str, str]) -> None:
    assert far_away(page, pretence) == 403


@pytest.mark.parametrize("page", DEBUG)
def test_debug_pages_are_for_a_named_network_too_with_the_key(page: str) -> None:
    with_key = {"authorization": "Bearer boss"}
    near = {"admin_api_key": "boss", "debug_host": ("192.168.0.0/16", "10.1.0.0/16")}
    assert far_away(page, with_key, **near) == 200
    assert far_away(page, {}, **near) == 401
    assert far_away(page, with_key | {"x-forwarded-for": "10.1.2.3"}, **near) == 403
    assert far_away(page, with_key, **near | {"debug_host": ("10.2.0.0/16",)}) == 403
    assert far_away(page, {}, debug_host=("10.1.0.0/16",)) == 403  # as nobody could start it


@pytest.mark.parametrize("page", DEBUG)
def test_a_proxy_on_this_machine_is_not_this_machine(page: str) -> None:
    port = server()
    assert ask(port, page).status == 200
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
        assert ask(port, page, headers={header: "127.0.0.1"}).status == 403


def test_who_a_client_is_is_told_by_its_socket() -> None:
    """uvicorn would put the header's address in its place, and trusts everybody on loopback to say it."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with serving(app) as port:
        ask(port, "/", headers={"X-Forwarded-For": "10.9.8.7", "X-Forwarded-Proto": "https"})
    assert seen == ["127.0.0.1"]


# --- browsers --------------------------------------------------------------------------------------------------------

FORM = {"content-type": "application/x-www-form-urlencoded"}
OF_PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "file://"},
    {"origin": "http://localhost:3000"},  # another program's page on the same machine
    {"origin": "http://[broken"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1"},
]
NOT_OF_PAGES = [
    {},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"},
    {"origin": "http://127.0.0.1"},
]


@pytest.mark.parametrize("headers", OF_PAGES)
def test_a_web_page_does_not_reach_a_server_without_keys(headers: dict[str, str]) -> None:
    port = server()
    for content_type in ("text/plain", "application/json", "multipart/form-data; boundary=x"):
        sent = headers | {"content-type": content_type}
        for target in ("/v1/completions", "/flush_cache", "/abort_request"):
            reply = ask(port, target, method="POST", headers=sent, body=BODY)
            assert (reply.status, code(reply)) == (403, "cross_site"), (target, content_type)
    assert ask(port, "/health_generate", headers=headers).status == 403
    assert ask(port, "/debug/state", headers=headers).status == 403
    assert ask(port, "/debug/faults", method="PUT", headers=headers, body=b"{}").status == 403


@pytest.mark.parametrize("headers", NOT_OF_PAGES)
@pytest.mark.parametrize("content_type", [FORM, JSON, {"content-type": "text/plain"}, {}])
def test_programs_send_what_they_always_sent(headers: dict[str, str], content_type: dict[str, str]) -> None:
    """`curl -d` says that it sends a form."""
    port = server()
    sent = headers | content_type
    assert ask(port, "/v1/completions", method="POST", headers=sent, body=BODY).status == 200
    assert ask(port, "/flush_cache", method="POST", headers=headers).status == 200


def test_a_link_or_an_image_changes_nothing() -> None:
    port = server()
    for method in ("GET", "HEAD"):
        reply = ask(port, "/flush_cache", method=method)
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
    for keys in ({"api_key": "boss"}, {"admin_api_key": "boss"}):
        port = server(**keys)
        assert ask(port, "/flush_cache").status == 401
        assert ask(port, "/flush_cache", headers={"authorization": "Bearer boss"}).status == 200


def test_a_key_is_proof_enough_for_a_page_that_has_one() -> None:
    port = server(api_key="user")
    for headers in OF_PAGES:
        sent = headers | JSON | {"authorization": "Bearer user"}
        assert ask(port, "/v1/completions", method="POST", headers=sent, body=BODY).status == 200
        assert ask(port, "/v1/completions", method="POST", headers=headers | JSON, body=BODY).status == 401


def test_an_admin_key_alone_keeps_pages_from_the_rest() -> None:
    port = server(admin_api_key="boss")
    assert ask(port, "/v1/completions", method="POST", headers=OF_PAGES[0] | JSON, body=BODY).status == 403
    assert ask(port, "/v1/models", host="evil.example").status == 403
    assert ask(port, "/flush_cache", headers=OF_PAGES[0] | {"authorization": "Bearer boss"}).status == 200


OWN_HOSTS = ["127.0.0.1", "127.0.0.1:1234", "localhost", "LOCALHOST:80", "[::1]:30000", "10.1.2.3:9", "a.localhost", ""]
OTHER_HOSTS = [
    "evil.example",
    "evil.example:30000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "2130706433",
    "0x7f.1",
]


def test_a_name_that_was_made_to_resolve_here_is_not_ours() -> None:
    port = server()
    for host in OWN_HOSTS:
        assert ask(port, "/v1/models", host=host).status == 200, host
    for host in OTHER_HOSTS:
        for target in ("/v1/models", "/metrics", "/server_info"):
            reply = ask(port, target, host=host, headers={"sec-fetch-site": "same-origin"})
            assert (reply.status, code(reply)) == (403, "unknown_host"), host


def test_a_host_that_is_named_may_be_asked_for_and_its_pages_may_ask() -> None:
    port = server(allowed_host=("Api.Example",))
    assert ask(port, "/v1/models", host="api.example:8000").status == 200
    page = {"origin": "https://api.example", "sec-fetch-site": "cross-site"} | JSON
    assert ask(port, "/v1/completions", method="POST", headers=page, body=BODY).status == 200
    image = {"sec-fetch-site": "cross-site"}
    assert ask(port, "/v1/models", host="api.example", headers=image).status == 403
    assert ask(port, "/v1/models", host="evil.example").status == 403


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
CHAT = "https://chat.example"


def answers_of(port: int, origin: str, target: str = "/v1/completions", **headers: str) -> tuple[Reply, Reply]:
    """To a browser's question whether the page may, and to what the page then sends."""
    sent = {"origin": origin, "sec-fetch-site": "cross-site"}
    first = ask(port, target, method="OPTIONS", headers=sent | PREFLIGHT)
    return first, ask(port, target, method="POST", headers=sent | JSON | headers, body=BODY)


@pytest.mark.parametrize(("allowed", "said"), [((CHAT,), CHAT), (("*",), "*")])
def test_a_page_of_an_allowed_origin_may_use_the_api_and_is_told_so(allowed: tuple[str, ...], said: str) -> None:
    port = server(allowed_origins=allowed)
    preflight, reply = answers_of(port, CHAT)
    assert (preflight.status, reply.status) == (200, 200)
    assert {answer.headers["access-control-allow-origin"] for answer in (preflight, reply)} == {said}
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "x-tandem-path" in reply.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    body = b'{"prompt": "x", "stream": true}'
    stream = ask(port, "/v1/completions", method="POST", headers={"origin": CHAT} | JSON, body=body)
    assert (stream.headers["access-control-allow-origin"], b"[DONE]" in stream.body) == (said, True)


def test_only_pages_of_these_origins_may_and_no_debug_pages_or_orders() -> None:
    port = server(allowed_origins=(CHAT,))
    preflight, reply = answers_of(port, "https://evil.example")
    assert (preflight.status, reply.status, code(reply)) == (400, 403, "cross_site")
    assert "access-control-allow-origin" not in preflight.headers | reply.headers
    for target in ("/flush_cache", "/abort_request", "/debug/state"):
        reply = ask(port, target, method="POST", headers={"origin": CHAT, "sec-fetch-site": "cross-site"})
        assert (reply.status, code(reply)) == (403, "cross_site"), target
    assert ask(port, "/v1/models", headers={"sec-fetch-site": "cross-site"}).status == 403, "an image says no origin"
    assert ask(port, "/v1/models", host="evil.example", headers={"origin": CHAT}).status == 403


def test_a_page_may_ask_before_it_sends_its_key_and_reads_why_it_is_refused() -> None:
    port = server(api_key="user", allowed_origins=(CHAT,), allow_credentials=True, allowed_methods=("POST",))
    preflight, reply = answers_of(port, CHAT)
    assert (preflight.status, preflight.headers["access-control-allow-methods"]) == (200, "POST")
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, CHAT)
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert answers_of(port, CHAT, authorization="Bearer user")[1].status == 200


def test_without_allowed_origins_no_page_is_told_anything() -> None:
    port = server()
    preflight, reply = answers_of(port, CHAT)
    assert (preflight.status, reply.status) == (403, 403)
    assert not [name for name in preflight.headers | reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("settings", "is_checked"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),  # known by any name in its network
        ({"host": "::"}, False),
        ({"host": "10.1.2.3"}, False),
        ({"host": "0.0.0.0", "allowed_host": ("a.example",)}, True),
        ({"api_key": "user"}, False),
        ({"api_key": "user", "allowed_host": ("a.example",)}, False),
        ({"admin_api_key": "boss"}, True),
    ],
)
def test_names_are_checked_where_only_browsers_of_this_machine_get_to(
    settings: dict[str, Any], is_checked: bool
) -> None:
    assert (AccessRules.of(ServerConfig(model="m", **settings)).names is not None) is is_checked


def test_an_address_that_cannot_be_looked_up_is_not_loopback() -> None:
    assert listens_on_loopback("127.8.8.8")
    assert not listens_on_loopback("")
    assert not listens_on_loopback("no.such.name.invalid")


# --- size of a head --------------------------------------------------------------------------------------------------


def heads_too_large() -> Iterator[tuple[str, bytes]]:
    megabyte = b"a" * (1 << 20)
    yield "one header", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + megabyte * 10
    yield "many headers", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * (1 << 18)
    yield "a name", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + megabyte
    yield "a target", b"GET /" + megabyte
    yield "empty lines", b"\r\n" * (1 << 20)
    yield "a method", megabyte


@pytest.mark.parametrize(
    ("what", "data"), list(heads_too_large()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_head_is_read_up_to_a_bound(what: str, data: bytes) -> None:
    port = server()
    reply = exchange(port, data)
    assert reply.status in (0, 400, 431)  # 0: closed while it still sent
    assert ask(port, "/health").status == 200


def test_a_head_that_is_too_large_is_told_so() -> None:
    port = server()
    reply = exchange(port, b"GET /health HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES)
    assert (reply.status, code(reply)) == (431, "head_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"FOO /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX(: a\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nx\r\n",
        b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{"prompt": "x"}',
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"x" * (3 * MAX_HEAD_BYTES),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["a method", "a header", "two lengths", "a piece", "a body longer than it says", "HTTP/2", "TLS"],
)
def test_what_is_no_http_is_told_so_once_and_in_the_form_of_other_errors(data: bytes) -> None:
    reply = exchange(server(), data)
    assert (reply.status, code(reply), reply.body.count(b"malformed_request")) == (400, "malformed_request", 1)


def test_a_trailer_is_read_up_to_a_bound() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: "
    port = server()
    reply = exchange(port, head + b"a" * (4 << 20))
    assert reply.status in (0, 400, 431)
    assert ask(port, "/health").status == 200


def test_what_is_within_the_bound_is_read_whole_in_any_pieces() -> None:
    text = b"x" * (1 << 20)
    long_head = {"x-long": "a" * (MAX_HEAD_BYTES - 500)} | JSON
    port = server()
    body = b'{"tokens": [5], "pad": "' + text + b'"}'
    assert ask(port, "/detokenize", method="POST", headers=long_head, body=body).status == 200


def test_what_the_end_of_a_drain_cuts_off_is_told_so() -> None:
    async def cut_off(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"127.0.0.1")]}
    rules = AccessRules.of(ServerConfig(model="m"))
    asyncio.run(AuthMiddleware(cut_off, rules=rules, stage="edge")(scope | {"raw_path": b"/v1/models"}, receive, send))
    assert sent[0]["status"] == 503
    assert b'"code":"draining"' in sent[1]["body"]
