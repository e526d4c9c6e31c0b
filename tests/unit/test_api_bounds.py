"""Whatever numbers, texts and bytes a request holds: a 400 that names the field, never a 5xx, and nothing reserved."""

import typing
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import httpx
import msgspec
import pytest
from api_fakes import World, load_tokenizer, world
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from starlette.testclient import TestClient

from tandem.server.api import bounds
from tandem.server.api.body import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    NativeBody,
    NativeSampling,
    RerankBody,
    Routing,
    ScoreBody,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 77}
ABOUT = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x"}, "/generate": {"text": "x"}}
BODIES = (
    ("/v1/chat/completions", ChatBody),
    ("/v1/completions", CompletionBody),
    ("/generate", NativeBody),
    ("/v1/completions", Routing),
)
ALL = (ChatBody, CompletionBody, NativeBody, NativeSampling, Routing, StreamOptions, StructuredOutputs)
OTHERS = (TokenizeBody, DetokenizeBody, AbortBody, EmbeddingBody, RerankBody, ScoreBody)
TOO_LARGE = (1 << 63, -(1 << 63) - 1, 1 << 64, 10**30, -(10**30))
ROLES = ("null", "prefill", "decode")


def posted(w: World, body: bytes | dict, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    with w.http(raise_server_exceptions=False) as http:
        return sent(http, body, path, **headers)


def sent(http: TestClient, body: bytes | dict, path: str, **headers: str) -> httpx.Response:
    """Over a client that is entered once for many requests: entering it takes longer than a request."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return http.post(path, content=content, headers={name.replace("_", "-"): text for name, text in headers.items()})


def assert_refused(w: World, response: httpx.Response, param: str | None = None) -> None:
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
    assert w.node.submits == []
    assert (w.client.num_live, w.client._requests._named) == (0, {})


# the table is complete


def kinds_of(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Every type that values of this one may have, itself first."""
    yield kind
    for part in ("item_type", "key_type", "value_type"):
        if (inner := getattr(kind, part, None)) is not None:
            yield from kinds_of(inner)
    if isinstance(kind, inspect.UnionType):
        for choice in kind.types:
            yield from kinds_of(choice)


@pytest.mark.parametrize("body", [*ALL, *OTHERS], ids=lambda body: body.__name__)
def test_every_number_in_every_body_has_a_bound(body: type[msgspec.Struct]) -> None:
    described = inspect.type_info(body)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        for kind in kinds_of(field.type):
            if isinstance(kind, inspect.IntType | inspect.FloatType):
                assert kind.ge is not None or kind.gt is not None, field.name
                assert kind.le is not None or kind.lt is not None, field.name


def numeric(body: type[msgspec.Struct]) -> Iterator[tuple[str, list[object]]]:
    """Fields with integers, and how a value may stand in them: alone, in a list, in a list of lists, as a key."""
    described = inspect.type_info(body)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        shapes: list[object] = []
        for kind in kinds_of(field.type):
            if isinstance(kind, inspect.IntType):
                shapes.append(...)
            if isinstance(kind, inspect.ListType) and any(isinstance(k, inspect.IntType) for k in kinds_of(kind)):
                shapes += [[...], [[...]], [1, ...]]
            if isinstance(kind, inspect.DictType) and isinstance(kind.key_type, inspect.IntType):
                shapes.append({"...": 1})
        if shapes:
            yield field.name, shapes


def filled(shape: object, value: int) -> object:
    if shape is ...:
        return value
    if isinstance(shape, dict):
        return {str(value): 1}
    assert isinstance(shape, list)
    return [filled(item, value) if item is ... or isinstance(item, list) else item for item in shape]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[body.__name__ for _, body in BODIES])
def test_an_integer_beyond_64_bits_is_a_400_in_every_field(path: str, body: type[msgspec.Struct], role: str) -> None:
    """Every value in every field of one role; in those of the others one value: they read bodies by the same code."""
    w = world(disaggregation_mode=role)
    values = TOO_LARGE if role == "null" else TOO_LARGE[:1]
    with w.http(raise_server_exceptions=False) as http:
        for name, shapes in numeric(body):
            for shape, value in product(shapes, values):
                response = sent(http, ABOUT[path] | PAIR | {name: filled(shape, value)}, path)
                assert_refused(w, response)
                assert response.json()["error"]["param"].startswith(name)


def test_an_integer_beyond_64_bits_is_a_400_in_every_sampling_parameter() -> None:
    w = world()
    with w.http(raise_server_exceptions=False) as http:
        for (name, shapes), value in product(numeric(NativeSampling), TOO_LARGE):
            for params in ({name: filled(shapes[0], value)}, [{name: filled(shapes[0], value)}]):
                assert_refused(w, sent(http, {"text": ["x"], "sampling_params": params}, "/generate"))


@pytest.mark.parametrize("value", TOO_LARGE)
def test_an_integer_beyond_64_bits_is_a_400_where_nothing_is_generated(value: int) -> None:
    w = world()
    for tokens in ([value], [[value]], [1, value]):
        assert_refused(w, posted(w, {"tokens": tokens}, "/detokenize"), "tokens")


# numbers, texts and bytes that are hardly any

DEEP = 100_000
STRANGE = {
    "infinite": b'{"prompt": "x", "temperature": 1e400}',
    "infinite time": b'{"prompt": "x", "timeout": 1e400}',
    "not a number": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "400 digits": b'{"prompt": "x", "temperature": %s}' % (b"1" * 400),
    "400 digits of time": b'{"prompt": "x", "timeout": %s}' % (b"1" * 400),
    "5,000 digits": b'{"prompt": "x", "seed": %s}' % (b"1" * 5000),
    "5,000 digits of a room": b'{"prompt": "x", "bootstrap_room": %s}' % (b"1" * 5000),
    "5,000 digits as a key": b'{"prompt": "x", "logit_bias": {"%s": 1}}' % (b"1" * 5000),
    "5,000 digits in a template": b'{"messages": [{"role": "u"}], "chat_template_kwargs": {"a": %s}}' % (b"1" * 5000),
    "half a pair": b'{"prompt": "\\ud800"}',
    "the other half": b'{"prompt": "\\udc00"}',
    "half a pair in a name": b'{"prompt": "x", "rid": "\\ud800"}',
    "half a pair as a field": b'{"prompt": "x", "\\ud800": 1}',
    "half a pair in a salt": b'{"prompt": "x", "cache_salt": "\\udfff"}',
    "NUL in a name": b'{"prompt": "x", "rid": "a\\u0000b"}',
    "lists": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "lists nobody reads": b'{"prompt": "x", "more": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "objects nobody reads": b'{"prompt": "x", "more": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "lists for the template": b'{"messages": [{"role": "u", "a": ' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "lists to be refused": b'{"prompt": "x", "prompt_embeds": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "not closed": b"[" * DEEP,
    "not UTF-8": b'{"prompt": "\xff"}',
    "not UTF-8 in a name": b'{"prompt": "x", "rid": "\xff"}',
    "cut UTF-8": b'{"prompt": "\xe6\x97',
    "a mark within it": b'{\xef\xbb\xbf"prompt": "x"}',
    "two marks before it": b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "too long a salt": msgspec.json.encode({"prompt": "x", "cache_salt": "s" * (bounds.MAX_SALT_CHARS + 1)}),
    "true for a number": b'{"prompt": "x", "max_tokens": true}',
    "a fraction for a number": b'{"prompt": "x", "max_tokens": 1.5}',
    "a text for a number": b'{"prompt": "x", "max_tokens": "1"}',
}


@pytest.mark.parametrize("raw", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("path", ABOUT)
def test_strange_bytes_are_a_400(path: str, raw: bytes) -> None:
    w = world()
    response = posted(w, raw, path)
    assert_refused(w, response)
    assert len(response.content) < 4096


@pytest.mark.parametrize("path", ABOUT)
def test_the_mark_that_some_editors_put_before_utf_8_is_no_part_of_a_body(path: str) -> None:
    w = world()
    assert posted(w, b"\xef\xbb\xbf" + msgspec.json.encode(ABOUT[path]), path).status_code == 200


def test_of_a_field_that_comes_twice_the_last_one_counts() -> None:
    w = world()
    assert posted(w, b'{"prompt": "x", "rid": "a", "max_tokens": 1, "rid": "b", "max_tokens": 2}').status_code == 200
    (submit,) = w.node.submits
    assert (submit.request.rid, submit.request.max_new_tokens) == ("b", 2)
    w = world()
    assert_refused(w, posted(w, b'{"prompt": "x", "seed": %d, "seed": 1}' % 10**30), "seed")


def test_nul_is_text() -> None:
    w = world()
    body = {"prompt": "a\0b", "stop": ["\0"], "cache_salt": "\0"}
    assert posted(w, body).status_code == 200


@pytest.mark.parametrize("text", ["1e400", "inf", "nan", "-1", "0", "-0", "", "1" * 5000, "1e5000", "soon", "１e9"])
def test_a_timeout_header_that_is_no_time_is_a_400(text: str) -> None:
    w = world()
    with w.http() as http:
        headers = {b"x-request-timeout-ms": text.encode()}
        response = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert_refused(w, response, "X-Request-Timeout-Ms")


@pytest.mark.parametrize("path", [f"/v1/loads?dp_rank={10**30}", "/v1/loads?dp_rank=-1", "/v1/loads?dp_rank=%00"])
def test_a_number_in_a_query_is_bounded(path: str) -> None:
    with world().http() as http:
        assert http.get(path).status_code == 400


@pytest.mark.parametrize("expression", ["range(n)", "n // 0", "'a' * x", "[x] | tojson", "messages[0].a | tojson"])
def test_what_a_template_makes_of_a_body_is_the_users_mistake(expression: str) -> None:
    """Whatever it raises: OverflowError, ZeroDivisionError, TypeError, RecursionError."""
    w = world(tokenizer=load_tokenizer("{{ " + expression + " }}"))
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "x", "a": deep}], "chat_template_kwargs": {"n": 10**30}}
    assert posted(w, body, "/v1/chat/completions").status_code in (200, 400)


# anything


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({field for body in ALL for field in typing.get_type_hints(body)})


@pytest.fixture(scope="module")
def of_roles() -> Iterator[dict[str, tuple[World, TestClient]]]:
    """A world per role, and a client that is entered."""
    with ExitStack() as stack:
        worlds = {role: world(disaggregation_mode=role) for role in ROLES}
        yield {role: (w, stack.enter_context(w.http(raise_server_exceptions=False))) for role, w in worlds.items()}


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(
    path=st.sampled_from(sorted(ABOUT)),
    fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
    sampling=st.none() | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    role=st.sampled_from(ROLES),
)
def test_no_value_in_any_field_is_a_mistake_of_the_server(
    of_roles: dict[str, tuple[World, TestClient]], path: str, fields: dict, sampling: dict, role: str
) -> None:
    w, http = of_roles[role]
    body = ABOUT[path] | PAIR | fields | ({} if sampling is None else {"sampling_params": sampling})
    response = sent(http, body, path)
    assert response.status_code in (200, 400, 404, 409, 413), response.text
    assert w.client._requests._named == {}


# counts and sizes of what is only tokenized


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ["x"] * (bounds.MAX_PROMPTS + 1)}, "prompt"),
        ("/tokenize", {"text": ["x"] * (bounds.MAX_PROMPTS + 1)}, "text"),
        ("/tokenize", {"prompt": "xxxx" * 30}, "prompt"),
        ("/tokenize", {"prompt": ["x" * 60, "x" * 60]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * (bounds.MAX_MESSAGES + 1)}, "messages"),
        ("/detokenize", {"tokens": [5] * 101}, "tokens"),
        ("/detokenize", {"tokens": [[5] * 60, [5] * 60]}, "tokens"),
        ("/detokenize", {"tokens": [[5]] * (bounds.MAX_PROMPTS + 1)}, "tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * (bounds.MAX_MESSAGES + 1)}, "messages"),
        ("/v1/completions", {"prompt": ["x"] * (bounds.MAX_PROMPTS + 1)}, "prompt"),
        ("/generate", {"text": ["x"] * (bounds.MAX_PROMPTS + 1)}, "text"),
        ("/generate", {"input_ids": [[5]] * (bounds.MAX_PROMPTS + 1)}, "input_ids"),
    ],
)
def test_more_than_a_request_may_hold_is_a_400(
    path: str, body: dict, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.server.api.tokenization.MAX_TEXT_CHARS", 100)
    monkeypatch.setattr("tandem.server.api.tokenization.MAX_DETOKENIZED", 100)
    w = world()
    assert_refused(w, posted(w, body, path), param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 100}),
        ("/tokenize", {"prompt": ["x" * 50, "x" * 50]}),
        ("/tokenize", {"prompt": ["x"] * 100}),
        ("/tokenize", {"prompt": []}),
        ("/detokenize", {"tokens": [5] * 100}),
        ("/detokenize", {"tokens": [[5] * 50, [5] * 50]}),
        ("/detokenize", {"tokens": []}),
        ("/detokenize", {"tokens": [[]]}),
    ],
)
def test_as_much_as_a_request_may_hold_is_answered(path: str, body: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.server.api.tokenization.MAX_TEXT_CHARS", 100)
    monkeypatch.setattr("tandem.server.api.tokenization.MAX_DETOKENIZED", 100)
    assert posted(world(), body, path).status_code == 200
