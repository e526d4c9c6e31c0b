"""What the router reads in the bodies of workers."""

import asyncio
import json

import httpx
import pytest

from deep import DEEP
from tandem.core.router.messages import Fail, RouteCause
from tandem.core.values import RequestId
from tandem.server.api.errors import RULES, Code, Failure, error_json
from tandem.server.router.answer import Pipe, error_at_end, merge_input_logprobs, passed_headers, retryable_of
from tandem.server.router.worker_documents import LoadsDocument, read_document, sum_of_loads


@pytest.mark.parametrize("code", RULES, ids=lambda code: code.value)
def test_what_an_error_of_ours_says_of_a_retry_is_what_the_table_says(code: Code) -> None:
    assert retryable_of(error_json(Failure(code, "x"), "id")) is RULES[code].retryable


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"error": null}',
        b'{"error": "busy"}',
        b'{"error": {"retryable": "yes"}}',
        b'{"error": {"retryable": 1}}',
        b'{"error": {"code": "x"}}',
        b'{"error": {"retryable": true}',
        b'{"error": ' + b"[" * 100_000,
        b'{"error": {"message": "\xff", "retryable": true}',
    ],
    ids=len,
)
def test_an_error_of_another_shape_says_nothing_of_a_retry(body: bytes) -> None:
    assert retryable_of(body) is None


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"error": {"code": "x"}}', True),
        (b'data: {"text": ""}\n\ndata: {"error": {"code": "x"}}\n\n', True),
        (b'data: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n', True),
        (b'{"text": "error", "error": null}', False),
        (b'data: {"text": "x"}\n\ndata: [DONE]\n\n', False),
        (b'of a body", "error": {}}', False),
        (b"", False),
        (b'[{"error": 1}]', False),
    ],
)
def test_an_error_at_the_end_of_a_body_is_seen(tail: bytes, expected: bool) -> None:
    assert (error_at_end(tail) is not None) is expected


@pytest.mark.parametrize(
    "prefill", [b"", b"{}", b"[]", b'{"meta_info": {"input_token_logprobs": []}}', b'{"error": {}}']
)
def test_without_logprobs_of_prefill_the_bytes_of_decode_are_unchanged(prefill: bytes) -> None:
    decode = b'{"meta_info":  {"input_token_logprobs": [1]}}'
    assert merge_input_logprobs(prefill=prefill, decode=decode) == decode


def test_a_decode_that_left_its_logprobs_out_gets_those_of_prefill() -> None:
    prefill = b'{"meta_info": {"input_token_logprobs": [[-0.5, 1, null]]}}'
    for decode in (b'{"meta_info": {}}', b'{"meta_info": {"input_token_logprobs": null}}'):
        merged = json.loads(merge_input_logprobs(prefill=prefill, decode=decode))
        assert merged["meta_info"]["input_token_logprobs"] == [[-0.5, 1, None]]


@pytest.mark.parametrize("foreign", ["[" * DEEP + "]" * DEEP, "[" * 20_000, '"\\ud800"'])
def test_an_answer_that_cannot_be_read_or_written_again_passes_as_it_is(foreign: str) -> None:
    prefill = b'{"meta_info": {"input_token_logprobs": [[-0.5, 1, null]]}}'
    decode = b'{"meta_info": {}, "foreign": %s}' % foreign.encode()
    assert merge_input_logprobs(prefill=prefill, decode=decode) == decode
    assert merge_input_logprobs(prefill=decode, decode=prefill) == prefill
    assert error_at_end(b'{"error": {"code": "x"}, "foreign": %s}' % foreign.encode()) in (None, {"code": "x"})


def test_a_header_that_could_not_be_sent_on_is_left_out() -> None:
    given = [("x-tandem-path", "remote"), ("x-tandem-odd", "a\x01b"), ("retry-after", "1"), ("server", "x")]
    assert passed_headers(httpx.Headers(given)) == {"x-tandem-path": "remote", "retry-after": "1"}


@pytest.mark.parametrize("failure", [None, Fail(RequestId(1), RouteCause.CONNECTION_LOST, "router")])
def test_what_a_worker_says_as_it_gives_up_comes_last_unless_the_router_has_an_error_of_its_own(
    failure: Fail | None,
) -> None:
    async def story() -> list[bytes]:
        pipe = Pipe()
        await pipe.put(b"text")
        pipe.end(failure, b"error")
        return [chunk async for chunk in pipe.chunks()]

    assert asyncio.run(story()) == ([b"text", b"error"] if failure is None else [b"text"])


@pytest.mark.parametrize("says", [b"1" * 400, b"-" + b"1" * 400, b'"7"', b"null", b"[]", b"1e999"])
def test_a_load_that_is_no_number_that_counts_adds_nothing_to_the_sum(says: bytes) -> None:
    bodies = (b'{"loads": [{"num_running_reqs": %s}]}' % each for each in (says, b"0.5"))
    read = [document for body in bodies if (document := read_document(body, LoadsDocument)) is not None]
    assert sum_of_loads([load for document in read for load in document.loads])["num_running_reqs"] == 0.5
