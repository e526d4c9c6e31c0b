"""What the router makes of a client's body: its own fields in place of the client's, everything else as it was."""

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tandem.core.router.pairing import PREFILL_RANK, rank_fields
from tandem.server.api.body import Routing, decode_body
from tandem.server.api.bounds import MAX_PROMPTS
from tandem.server.api.errors import Refusal
from tandem.server.api.sample_requests import check_timeout
from tandem.server.router.generate import check_prompts, read_object, timeout_seconds
from tandem.server.router.shell import encode_rest, with_fields


@pytest.mark.parametrize("body", [{}, {"a": 1}, {"bootstrap_room": 7, "timeout": 2}, {"a": [1], "b": {"c": None}}])
def test_own_fields_take_the_place_of_those_that_came(body: dict[str, Any]) -> None:
    own = {"bootstrap_room": 5, "timeout": 1.5}
    content = with_fields(own, encode_rest(body))
    assert msgspec.json.decode(content) == body | own
    assert [content.count(b'"%s"' % name.encode()) for name in own] == [1, 1]  # of two a reader may take either


def test_what_can_be_read_but_not_written_is_refused_before_anything_begins() -> None:
    body: dict[str, object] = {}
    for _ in range(100_000):
        body = {"x": body}
    with pytest.raises(Refusal) as found:
        encode_rest(body)
    assert found.value.failure.code == "invalid_json"


@pytest.mark.parametrize("raw", [b"1" * 400, b"-1", b"0", b"true", b'"1"', b"[]"])
def test_a_timeout_that_is_no_time_is_refused(raw: bytes) -> None:
    body = msgspec.json.decode(b'{"timeout": %s}' % raw)
    with pytest.raises(Refusal) as found:
        timeout_seconds(Request({"type": "http", "headers": []}), body, default=1.0)
    assert (found.value.failure.status, found.value.failure.param) == (400, "timeout")


@pytest.mark.parametrize("text", ["nan", "-1", "0", "soon", ""])
def test_a_timeout_header_that_is_no_time_is_refused(text: str) -> None:
    headers = [(b"x-request-timeout-ms", text.encode())]
    with pytest.raises(Refusal) as found:
        timeout_seconds(Request({"type": "http", "headers": headers}), {}, default=1.0)
    assert (found.value.failure.status, found.value.failure.param) == (400, "X-Request-Timeout-Ms")


@pytest.mark.parametrize("field", ["prompt", "text", "input_ids"])
def test_more_prompts_than_a_worker_takes_get_no_rooms(field: str) -> None:
    path = "/v1/completions" if field == "prompt" else "/generate"
    prompt = [5] if field == "input_ids" else "x"
    check_prompts(path, {field: [prompt] * MAX_PROMPTS})
    check_prompts(path, {field: [5] * (MAX_PROMPTS + 1)})  # one prompt, of ids
    with pytest.raises(Refusal) as found:
        check_prompts(path, {field: [prompt] * (MAX_PROMPTS + 1)})
    assert (found.value.failure.status, found.value.failure.param) == (400, field)


@pytest.mark.parametrize("timeout", [b"0", b"-1", b"true", b'"1"', b"[]", b"604801", b"1e9"])
def test_a_timeout_is_refused_in_the_words_of_a_worker(timeout: bytes) -> None:
    raw = b'{"timeout": %s}' % timeout
    with pytest.raises(Refusal) as here:
        timeout_seconds(Request({"type": "http", "headers": []}), msgspec.json.decode(raw), default=1.0)
    with pytest.raises(Refusal) as there:
        decode_body(raw, Routing)
    assert here.value.failure.code == there.value.failure.code
    assert here.value.failure.message == there.value.failure.message


@pytest.mark.parametrize("text", ["nan", "-1", "0", "soon", "", "604800001", "inf"])
def test_a_timeout_header_is_refused_in_the_words_of_a_worker(text: str) -> None:
    headers = [(b"x-request-timeout-ms", text.encode())]
    with pytest.raises(Refusal) as here:
        timeout_seconds(Request({"type": "http", "headers": headers}), {}, default=1.0)
    with pytest.raises(Refusal) as there:
        check_timeout(None, text, 1.0)
    assert here.value.failure.message == there.value.failure.message


@pytest.mark.parametrize("raw", [b"[1]", b"null", b'"a"', b"7", b"", b"{", b'{"a": 1} x'])
def test_a_body_that_is_no_object_is_refused_in_the_words_of_a_worker(raw: bytes) -> None:
    with pytest.raises(Refusal) as here:
        read_object(raw)
    with pytest.raises(Refusal) as there:
        decode_body(raw, Routing)
    assert here.value.failure.code == there.value.failure.code == "invalid_json"
    assert here.value.failure.message == there.value.failure.message


def test_a_worker_complains_of_the_field_that_the_client_has_sent() -> None:
    body: dict[str, object] = {"data_parallel_rank": "x"}
    sent = with_fields({"bootstrap_room": 5} | rank_fields(body), encode_rest(body))
    with pytest.raises(Refusal) as found:
        decode_body(sent, Routing)
    assert found.value.failure.param == "data_parallel_rank"


@pytest.mark.parametrize(
    ("header", "told"), [("2", {PREFILL_RANK: 2}), ("x", {}), ("-1", {}), ("9" * 5000, {}), (None, {PREFILL_RANK: 1})]
)
def test_decode_is_told_the_rank_of_a_header_before_that_of_a_body(header: str | None, told: dict[str, int]) -> None:
    assert rank_fields({"routed_dp_rank": 1}, header) == told
    assert rank_fields({"routed_dp_rank": 1, PREFILL_RANK: 0}, header) == {}
