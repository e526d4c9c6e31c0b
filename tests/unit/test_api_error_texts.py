"""Whatever a client or a peer puts into a text: what is said of it is one printable line of at most 1 kB."""

import json

import httpx
import msgspec
import pytest
from api_fakes import World, load_tokenizer, world
from hypothesis import given
from hypothesis import strategies as st

from tandem.core import commands
from tandem.core.commands import FailRequest
from tandem.core.values import Cause, RequestId
from tandem.logtext import MAX_VALUE_CHARS, visible
from tandem.server.api.errors import Failure, Problem, error_json, failure_of

MAX_CHARS = MAX_VALUE_CHARS + 32  # and how much was left out
FORGED = "a\nb\r\x1b[31m\0\x7f\u2028\u202e"
LONG = "ä" * (1 << 20)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PAIR = {"prompt": "x", "bootstrap_room": 5}


@given(text=st.text() | st.text(alphabet="\n\0ä😀\ud800x", min_size=900, max_size=1100))
def test_a_line_is_printable_bounded_and_otherwise_the_text(text: str) -> None:
    line = visible(text)
    assert line.isprintable()
    assert len(line) <= MAX_CHARS
    if text.isprintable() and len(text) <= MAX_VALUE_CHARS:
        assert line == text


@pytest.mark.parametrize("text", [FORGED, LONG, FORGED * 1000])
def test_a_failure_is_clean_whoever_makes_it(text: str) -> None:
    made = [
        Failure(Problem.INVALID_VALUE, text, text, text, text),
        failure_of(FailRequest(RequestId(1), Cause.PEER_ABORTED, text, text, text)),
    ]
    for failure in made:
        for said in (failure.message, failure.param, failure.stage, failure.peer):
            assert said is None or (said.isprintable() and len(said) <= MAX_CHARS)
        assert len(error_json(failure, "id")) < 8192


BODIES = [
    ("/v1/completions", {"prompt": "x", "model": ...}),
    ("/v1/completions", {"prompt": "x", "rid": ...}),
    ("/v1/completions", {"prompt": "x", "rid": [..., "b"]}),
    ("/v1/completions", {"prompt": "x", "stop": [...] * 17}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"...": 1}}),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": ...}}),
    ("/v1/completions", {"prompt": ...}),
    ("/v1/completions", PAIR | {"bootstrap_host": ...}),
    ("/v1/completions", PAIR | {"bootstrap_host": "::1", "bootstrap_room": ...}),
    ("/v1/completions", PAIR | {"bootstrap_host": ["::1", ...]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": ...}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ...}]}),
    ("/v1/chat/completions", {"messages": [{"role": ..., "content": "x"}]}),
    ("/v1/chat/completions", CHAT | {"tool_choice": ...}),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"...": ...}}),
    ("/generate", {"text": "x", "sampling_params": {"regex": ...}}),
    ("/abort_request", {"rid": 1, "...": 1}),
]


def filled(shape: object, text: str) -> object:
    match shape:
        case dict():
            return {name.replace("...", text): filled(value, text) for name, value in shape.items()}
        case list():
            return [filled(value, text) for value in shape]
        case _:
            return text if shape is ... else shape


def assert_clean(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    assert len(response.content) < 8192
    error = response.json()["error"]
    for said in (error["message"], error["param"], error["stage"], error["peer"] or ""):
        assert said is None or (said.isprintable() and len(said) <= MAX_CHARS)


@pytest.mark.parametrize("text", [FORGED, LONG], ids=["forged", "long"])
@pytest.mark.parametrize(("path", "shape"), BODIES)
def test_what_a_client_sends_is_repeated_in_one_short_line(path: str, shape: dict, text: str) -> None:
    template = "{{ raise_exception(messages[0].content ~ messages[0].role) }}"
    for role in ("null", "decode"):
        w = world(tokenizer=load_tokenizer(template), disaggregation_mode=role, context_length=64)
        with w.http() as http:
            response = http.post(path, content=msgspec.json.encode(filled(shape, text)))
        assert_clean(response)
        assert_lines_are_ours(w)


@pytest.mark.parametrize(
    "path", ["/x%0aforged%1b", "/v1/models/a%0d%0ab", "/v1/models/" + "x" * 5000, "/" + "y" * 5000]
)
def test_a_path_is_repeated_in_one_short_line(path: str) -> None:
    with world().http() as http:
        response = http.get(path)
    assert response.status_code in (400, 404)
    assert_clean(response)


def test_a_header_is_repeated_in_one_short_line() -> None:
    with world().http() as http:
        headers = {b"x-request-timeout-ms": b"a\x85b\xa0" + b"x" * 5000, b"x-request-id": b"a\x85b"}
        response = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 400
    assert_clean(response)
    assert response.headers["x-request-id"].isalnum()


def test_what_a_peer_says_is_one_line_of_the_request_log() -> None:
    w = world()
    tell = w.node.tell

    def forge(message: object) -> None:
        if isinstance(message, commands.FinishRequest):
            message = FailRequest(message.request, Cause.PEER_ABORTED, "sending", FORGED + LONG, FORGED)
        tell(message)  # type: ignore[arg-type]

    w.node.tell = forge  # type: ignore[method-assign]
    with w.http() as http:
        response = http.post("/v1/completions", json={"prompt": "x", "rid": "mine"})
    assert response.status_code == 502
    assert_clean(response)
    assert_lines_are_ours(w)


def assert_lines_are_ours(w: World) -> None:
    """One JSON object per request."""
    text = w.log.getvalue()
    assert text.count("\n") == len(w.node.submits)
    for line in text.split("\n")[:-1]:
        assert len(line) < 8192
        assert json.loads(line)["event"] == "request"
