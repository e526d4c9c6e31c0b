"""The router over real sockets, in front of fake workers."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import (
    Answer,
    BeginAnew,
    Die,
    FallSilent,
    Fleet,
    Hang,
    Refuse,
    Reject,
    TellAndDie,
    eventually,
    fleet,
)

from raw_http import exchange
from seen_spans import SeenTracing
from tandem.core.values import Cause
from tandem.server.api.bounds import MAX_PROMPTS
from tandem.server.api.errors import RULES, Code
from tandem.server.api.resume import PROOF_BYTES, Opening, Piece, PieceKind, ResumeFrame, encode_frame
from tandem.server.fault_records import FaultRecords
from tandem.server.router import app

CLIENT = httpx.Client(timeout=20)  # making one takes longer than a request
CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.7, "unknown": {"kept": 1}}


def post(
    made: Fleet, body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", **more: Any
) -> httpx.Response:
    return CLIENT.post(made.url + path, json=CHAT if body is None else body, timeout=20, **more)


@contextmanager
def asking(made: Fleet, path: str = "/v1/chat/completions", body: dict[str, Any] | None = None) -> Iterator[None]:
    """A client that has asked, with a body by POST, and leaves at the end without an answer."""
    connection = http.client.HTTPConnection(made.url.removeprefix("http://"), timeout=20)
    text = None if body is None else json.dumps(body)
    try:
        connection.request("GET" if text is None else "POST", path, text, {"content-type": "application/json"})
        yield
    finally:
        connection.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


def test_both_halves_get_the_same_body_with_the_prefills_address_and_one_room() -> None:
    with fleet() as made:
        response = post(made, headers={"x-request-id": "abc", "traceparent": "00-1"})
        eventually(made.is_idle)
        (sent,) = made.prefills[0].generations
        (received,) = made.decodes[0].generations
        assert sent.body == received.body
        own = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rendered_at")
        assert {key: value for key, value in sent.body.items() if key not in own} == CHAT
        assert (sent.body["bootstrap_host"], sent.body["bootstrap_port"]) == ("127.0.0.1", 9000)
        assert 0 < sent.body["bootstrap_room"] < 1 << 63
        assert (received.headers["x-request-id"], received.headers["traceparent"]) == ("abc", "00-1")
        assert 599_000 < int(received.headers["x-request-timeout-ms"]) <= 600_000
        assert response.json() == {"text": "from decode"}
        assert response.headers["x-tandem-path"] == "remote"
        assert response.headers["x-request-id"] == "abc"


def test_one_time_is_stamped_into_both_bodies_and_kept_for_another_attempt() -> None:
    """The clock of the workers does not matter, and a template that shows seconds renders the same prompt again."""
    with fleet(decodes=2) as made:
        began = int(time.time())
        rejecting = made.decodes[0]
        rejecting.behaves(Reject(503, once=lambda: time.time() >= rejecting.generations[0].body["rendered_at"] + 1))
        for _ in made.decodes:
            assert post(made).status_code == 200
        eventually(made.is_idle)
        rejected = rejecting.generations[0].headers["x-request-id"]
        bodies = [seen.body for seen in made.seen() if seen.headers["x-request-id"] == rejected]
        assert len(bodies) == 4, "two halves of two attempts"
        assert len({body["bootstrap_room"] for body in bodies}) == 2
        assert len({body["rendered_at"] for body in bodies}) == 1
        assert bodies[0]["rendered_at"] >= began


@pytest.mark.parametrize("given", [1, 1_700_000_000, "soon"])
def test_a_time_that_came_with_the_request_is_passed_on(given: object) -> None:
    """To be refused by both halves, if it is none."""
    with fleet() as made:
        post(made, CHAT | {"rendered_at": given})
        eventually(made.is_idle)
        assert [seen.body["rendered_at"] for seen in made.seen()] == [given, given]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"routed_dp_rank": 1}, 1),
        ({"data_parallel_rank": 1}, 1),
        ({"routed_dp_rank": [1, None], "text": ["a", "b"]}, [1, None]),
        ({"routed_dp_rank": 1, "disagg_prefill_dp_rank": None}, 1),
        ({"routed_dp_rank": 1, "disagg_prefill_dp_rank": 0}, 0),
        ({"routed_dp_rank": None}, None),
        ({}, None),
    ],
)
def test_decode_is_told_the_rank_that_a_body_has_chosen_for_its_prefill(fields: dict[str, Any], told: object) -> None:
    """And so is prefill, which then has nothing to announce, or to refuse."""
    with fleet() as made:
        assert post(made, {"text": "a"} | fields, path="/generate").status_code == 200
        (prefill,), (decode,) = made.prefills[0].generations, made.decodes[0].generations
        assert [half.body.get("disagg_prefill_dp_rank") for half in (prefill, decode)] == [told, told]
        assert prefill.body.get("routed_dp_rank") == decode.body.get("routed_dp_rank") == fields.get("routed_dp_rank")


def test_decode_is_told_the_rank_that_a_header_has_chosen_for_its_prefill() -> None:
    with fleet() as made:
        answer = CLIENT.post(made.url + "/generate", json={"text": "a"}, headers={"X-Data-Parallel-Rank": "1"})
        assert answer.status_code == 200
        (prefill,), (decode,) = made.prefills[0].generations, made.decodes[0].generations
        assert [half.body["disagg_prefill_dp_rank"] for half in (prefill, decode)] == [1, 1]


def test_rooms_are_the_routers_own_and_differ_between_requests() -> None:
    with fleet() as made:
        for _ in range(5):
            post(made, CHAT | {"bootstrap_room": 7, "bootstrap_host": "evil", "bootstrap_port": 1})
        eventually(made.is_idle)
        rooms = made.decodes[0].rooms
        assert rooms == made.prefills[0].rooms
        assert len(set(rooms)) == 5
        assert 7 not in rooms
        assert {seen.body["bootstrap_host"] for seen in made.seen()} == {"127.0.0.1"}
        assert {seen.body["bootstrap_port"] for seen in made.seen()} == {9000}


def test_a_list_of_prompts_gets_lists_of_hosts_ports_and_rooms() -> None:
    with fleet() as made:
        post(made, {"prompt": ["a", "b"], "n": 3}, "/v1/completions")
        eventually(made.is_idle)
        body = made.decodes[0].generations[0].body
        assert body["bootstrap_host"] == ["127.0.0.1"] * 2
        assert body["bootstrap_port"] == [9000] * 2
        assert len(set(body["bootstrap_room"])) == 2
        assert body == made.prefills[0].generations[0].body


def test_a_stream_passes_byte_for_byte() -> None:
    chunks = (
        b'data: {"a": "\xc3\xa4"}\n\n',
        b": comment\r\n\r\n",
        b"data: half of an",
        b" event\n\n",
        b"data: [DONE]\n\n",
    )
    with fleet() as made:
        made.decodes[0].behaves(Answer(chunks=chunks))
        response = post(made, CHAT | {"stream": True})
        assert response.content == b"".join(chunks)
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-tandem-path"] == "remote"


def test_the_first_byte_of_a_stream_does_not_wait_for_the_last() -> None:
    with (
        fleet() as made,
        httpx.Client(timeout=20) as client,
    ):
        made.decodes[0].behaves(Die((b"data: 1\n\n",)))
        with client.stream("POST", made.url + "/generate", json={"text": "x", "stream": True}) as response:
            assert next(response.iter_raw()) == b"data: 1\n\n"


@pytest.mark.parametrize("bad", ["prefills", "decodes"])
def test_a_5xx_of_one_half_closes_the_other_and_is_retried_with_a_new_room_on_another_pair(bad: str) -> None:
    good = "decodes" if bad == "prefills" else "prefills"
    with fleet(2, 2) as made:
        failing, waiting = getattr(made, bad)[0], getattr(made, good)[0]
        failing.behaves(Reject(500, once=lambda: waiting.generations))
        waiting.behaves(Hang())
        response = post(made)
        assert response.status_code == 200
        (stuck,) = waiting.generations
        eventually(lambda: stuck.is_closed, "the other half closed")
        first, second = made.decodes[0].rooms, made.decodes[1].rooms
        assert (len(first), len(second)) == (1, 1)
        assert first != second


def test_after_all_retries_the_client_gets_the_workers_own_error() -> None:
    with fleet(retries=2) as made:
        made.decodes[0].behaves(Reject(503, "queue_full"))
        response = post(made)
        assert (response.status_code, error_of(response)["code"]) == (503, "queue_full")
        assert len(set(made.decodes[0].rooms)) == 3


@pytest.mark.parametrize("code", RULES, ids=lambda code: code.value)
@pytest.mark.parametrize("bad", ["prefills", "decodes"])
def test_an_error_is_tried_again_exactly_when_it_says_that_it_may_be(bad: str, code: Code, rejecting: Fleet) -> None:
    worker = getattr(rejecting, bad)[0]
    other = getattr(rejecting, "decodes" if bad == "prefills" else "prefills")[0]
    before, others = len(worker.generations), len(other.generations)
    worker.behaves(Refuse(code, once=lambda: len(other.generations) > others), Answer())
    other.behaves(Hang(), Answer())  # a decode that answers first would need no prefill
    response = post(rejecting)
    expected = RULES[code]
    assert len(worker.generations) - before == (2 if expected.retryable else 1), response.text
    assert response.status_code == (200 if expected.retryable else expected.status)
    if not expected.retryable:
        assert (error_of(response)["code"], error_of(response)["retryable"]) == (code.value, False)


@pytest.fixture(scope="module")
def rejecting() -> Iterator[Fleet]:
    with fleet(health_check_interval=5.0) as made:  # workers in this process may miss a probe when it is busy
        yield made


@pytest.mark.parametrize("bad", ["prefills", "decodes"])
def test_a_4xx_of_either_half_is_forwarded_and_not_retried(bad: str) -> None:
    with fleet(2, 2) as made:
        for worker in made.prefills + made.decodes:
            worker.behaves(Hang())
        getattr(made, bad)[0].behaves(Reject(400, "bad_input", once=lambda: len(made.seen()) == 2))
        response = post(made)
        assert (response.status_code, error_of(response)["code"]) == (400, "bad_input")
        assert len(made.seen()) == 2
        eventually(lambda: any(seen.is_closed for seen in made.seen()), "the other half closed")


def test_a_worker_that_refuses_connections_is_skipped_and_comes_back_by_itself() -> None:
    with fleet(1, 2, health_check_interval=0.2) as made:
        made.decodes[0].kill()
        assert [post(made).status_code for _ in range(4)] == [200] * 4
        assert len(made.decodes[1].generations) == 4
        made.decodes[0].start()
        eventually(lambda: made.router.router.load(made.router.router.registry.workers()[1].id) == 0)
        eventually(lambda: post(made).status_code == 200 and made.decodes[0].generations, "decode 0 in use again")


def test_without_a_live_pair_there_is_a_503_at_once_until_the_worker_is_back() -> None:
    with fleet() as made:
        made.prefills[0].kill()
        response = eventually(lambda: next((r for r in [post(made)] if r.status_code == 503), None))
        assert error_of(response)["code"] == "no_live_pair"
        assert response.headers["retry-after"]
        assert CLIENT.get(made.url + "/ready").status_code == 503
        assert CLIENT.get(made.url + "/health").status_code == 200
        made.prefills[0].start()
        eventually(lambda: CLIENT.get(made.url + "/ready").status_code == 200, "ready again")
        assert post(made).status_code == 200


def test_a_worker_that_drains_gets_no_more_requests() -> None:
    with fleet(1, 2) as made:
        made.decodes[0].is_healthy = False
        eventually(lambda: not made.router.router.is_live(made.router.router.registry.workers()[1].id))
        for _ in range(3):
            post(made)
        assert made.decodes[0].generations == []


@pytest.mark.parametrize(("bad", "stage"), [("prefills", "prefill_head"), ("decodes", "decode_head")])
def test_a_hung_half_ends_with_504_at_the_deadline_and_both_are_closed(bad: str, stage: str) -> None:
    with fleet() as made:
        for worker in made.prefills + made.decodes:
            worker.behaves(Hang(has_head=worker in made.prefills and bad != "prefills"))
        began = time.monotonic()
        response = post(made, CHAT | {"timeout": 0.5})
        took = time.monotonic() - began
        assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
        assert error_of(response)["stage"] == stage
        assert error_of(response)["waited_seconds"] >= 0.5 or bad == "decodes"  # whose wait begins with prefill's head
        assert error_of(response)["request_id"] == response.headers["x-request-id"]
        assert 0.5 <= took < 10
        eventually(lambda: all(seen.is_closed for seen in made.seen()), "both halves closed")


def test_the_time_that_is_left_travels_with_each_attempt() -> None:
    with fleet() as made:
        made.decodes[0].behaves(Reject(500), Answer())
        post(made, CHAT | {"timeout": 5}, headers={"x-request-timeout-ms": "3000"})
        first, second = (seen for seen in made.decodes[0].generations)
        assert int(second.headers["x-request-timeout-ms"]) < int(first.headers["x-request-timeout-ms"]) <= 3000
        assert second.body["timeout"] < first.body["timeout"] <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_both_halves(stream: bool) -> None:
    with fleet() as made:
        made.prefills[0].behaves(Hang(has_head=True))
        made.decodes[0].behaves(Hang())
        with asking(made, body=CHAT | {"stream": stream}):
            eventually(lambda: len(made.seen()) == 2, "both halves asked")
            assert not any(seen.is_closed for seen in made.seen())
        eventually(lambda: all(seen.is_closed for seen in made.seen()), "both halves closed")


def test_a_page_that_its_client_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CONTROL_SECONDS", 3600.0)
    with fleet() as made:
        made.decodes[0].hangs_at = "/v1/loads"
        with asking(made, "/v1/loads"):
            (asked,) = eventually(lambda: [seen for seen in made.decodes[0].seen if seen.path == "/v1/loads"], "a call")
        eventually(lambda: asked.is_closed, "the call closed")


@pytest.mark.parametrize(("method", "page"), [("GET", "/model_info"), ("POST", "/tokenize")])
def test_an_answer_of_a_worker_that_does_not_end_is_none(
    method: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "WHOLE_CONTROL_SECONDS", 0.2)
    with fleet() as made:
        made.decodes[0].drips_at = page
        response = CLIENT.request(method, made.url + page)
        assert (response.status_code, error_of(response)["code"]) == (502, "connection_lost")


def test_a_cookie_that_a_worker_sets_goes_to_nobody() -> None:
    with fleet() as made:
        made.decodes[0].behaves(Answer(headers={"set-cookie": "mine=1; Path=/"}))
        assert [post(made).headers.get("set-cookie") for _ in range(2)] == [None, None]
        assert [seen.headers.get("cookie") for seen in made.seen()] == [None] * 4


OPENING = Opening("nonce", 1, (1,))


def frame_of(data: bytes, opening: Opening | None) -> bytes:
    said = Piece(0, PieceKind.SAYS, [1]).encode()
    return encode_frame(ResumeFrame(len(data), said, b"p" * PROOF_BYTES, opening), data)


@pytest.mark.parametrize(
    ("opening", "others"),
    [(OPENING, BeginAnew()), (OPENING, Answer()), (None, Answer())],
    ids=["another decode gives a document", "another decode begins a stream", "nobody knows how it began"],
)
def test_a_lost_stream_that_nobody_goes_on_with_ends_with_its_cause(opening: Opening | None, others: Any) -> None:
    with fleet(1, 2) as made:
        first, second = made.decodes  # in this order
        first.behaves(TellAndDie((frame_of(b"data: 1\n\n", opening),)), others)
        second.behaves(others)
        text = post(made, CHAT | {"stream": True}).text
        assert text.startswith("data: 1\n\n")
        assert "connection_lost" in text
        eventually(made.is_idle)


def last_frame(code: str, gives_up: str = "") -> bytes:
    data = b'data: {"error": {"code": "%s"}}\n\n' % code.encode()
    return encode_frame(ResumeFrame(len(data), is_last=True, gives_up=gives_up, code=code), data)


FIRST = frame_of(b"data: 1\n\n", OPENING)


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (TellAndDie((FIRST, last_frame(Cause.WORKER_LOST, "it has ended"))), ["request 1 has ended with worker_lost"]),
        (TellAndDie((FIRST, last_frame(Cause.ENGINE_FAILED))), ["request 1 has ended with engine_failed"]),
        (TellAndDie((FIRST, last_frame(Cause.DRAINING, "it ends"))), []),
        (Refuse(Cause.WORKER_LOST), ["request 1 has ended with worker_lost"]),
        (Refuse(Cause.DRAINING), []),
    ],
    ids=["a stream that gives up", "a stream", "a stream that others end", "an answer", "an answer that others end"],
)
def test_who_hears_of_a_cause_of_ours_leaves_a_record_whatever_its_status(
    behaviour: Any, why: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(FaultRecords, "write_soon", lambda _, why: written.append(why))
    with fleet(fault_records=str(tmp_path), retries=0) as made:
        made.decodes[0].behaves(behaviour)
        assert '"code"' in post(made, CHAT | {"stream": True}).text
        eventually(made.is_idle)
    assert written == why


def test_a_decode_that_dies_before_its_first_byte_is_retried() -> None:
    with fleet(1, 2) as made:
        made.decodes[0].behaves(Die(once=lambda: made.prefills[0].generations))
        assert post(made, CHAT | {"stream": True}).text.endswith("data: [DONE]\n\n")
        eventually(made.is_idle)
        assert len(made.prefills[0].generations) == 2


def test_a_trace_shows_every_attempt_and_why_one_failed() -> None:
    tracing = SeenTracing()
    with fleet(2, 2, tracing=tracing) as made:
        failing, waiting = made.decodes[0], made.prefills[0]
        failing.behaves(Reject(500, once=lambda: waiting.generations))
        waiting.behaves(Hang())
        assert post(made).status_code == 200
        (request,) = tracing.spans
        spans = [request, *request.children]
        eventually(lambda: all(span.ended_ns is not None for span in spans), "all spans ended")
        assert [span.name for span in request.children] == ["prefill", "decode"] * 2
        first_prefill, first, _, second = request.children
        assert (first_prefill.aborted, first.aborted) == ({"reason": "cancelled"}, {"reason": "answers 500"})
        assert (second.aborted, request.aborted) == ({}, {})
        assert [span.attributes["tandem.attempt"] for span in request.children] == [1, 1, 2, 2]
        assert first.attributes["url.full"] == failing.url + "/v1/chat/completions"
        (told,) = (seen.headers["traceparent"] for seen in made.decodes[1].generations)
        assert told == second.headers["traceparent"]


def test_a_document_that_breaks_off_is_retried() -> None:
    with fleet(1, 2) as made:
        made.decodes[0].behaves(Die((b'{"text": "ha',), is_stream=False))
        assert post(made).json() == {"text": "from decode"}


def test_a_decode_that_dies_in_the_middle_ends_the_stream_with_an_error_event() -> None:
    with fleet(1, 2) as made:
        made.decodes[0].behaves(Die((b'data: {"text": "a"}\n\n', b'data: {"te')))
        response = post(made, CHAT | {"stream": True})
        *_, last = [line for line in response.text.split("\n\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["stage"]) == ("connection_lost", "stream")
        assert made.decodes[1].generations == []


def test_a_stream_that_falls_silent_ends_with_an_error_event() -> None:
    with fleet(stall_timeout=0.3) as made:
        made.decodes[0].behaves(FallSilent())
        response = post(made, CHAT | {"stream": True})
        assert json.loads(response.text.split("data: ")[-1])["error"]["code"] == "deadline_exceeded"


def test_a_prefill_that_ends_with_an_error_after_its_head_leaves_the_word_to_decode() -> None:
    with fleet() as made:
        made.prefills[0].behaves(Answer(body={"error": {"code": "transfer_failed"}}))
        made.decodes[0].behaves(Answer(body={"text": "computed it myself"}, headers={"x-tandem-path": "fallback"}))
        response = post(made)
        assert response.json() == {"text": "computed it myself"}
        assert response.headers["x-tandem-path"] == "fallback"


def test_a_prefill_whose_server_ends_after_its_head_is_replaced_because_it_has_told_decode_nothing() -> None:
    with fleet(2, 2) as made:
        made.prefills[0].behaves(Answer(body={"error": {"code": "worker_lost", "message": "gone"}}))
        made.decodes[0].behaves(Hang())
        assert post(made).status_code == 200
        assert len(made.prefills[1].rooms) == 1


def test_a_prefill_that_breaks_after_its_head_is_replaced() -> None:
    with fleet(2, 2) as made:
        made.prefills[0].behaves(Die(is_stream=False, once=lambda: made.decodes[0].generations))
        made.decodes[0].behaves(Hang())
        assert post(made).status_code == 200
        assert made.decodes[0].generations[0].is_closed


def test_prompt_logprobs_of_prefill_come_before_those_of_decode() -> None:
    def answer(*logprobs: float) -> Answer:
        return Answer(body={"text": "x", "meta_info": {"input_token_logprobs": [[p, 1, None] for p in logprobs]}})

    with fleet() as made:
        made.prefills[0].behaves(answer(-1.0, -2.0))
        made.decodes[0].behaves(answer(-3.0))
        merged = post(made, {"text": "x", "return_logprob": True}, "/generate").json()
        assert [entry[0] for entry in merged["meta_info"]["input_token_logprobs"]] == [-1.0, -2.0, -3.0]
        plain = post(made, {"text": "x"}, "/generate").json()
        assert [entry[0] for entry in plain["meta_info"]["input_token_logprobs"]] == [-3.0]


def test_prompt_logprobs_of_a_batch_are_merged_item_by_item() -> None:
    def answer(*logprobs: float) -> Answer:
        return Answer(body=[{"meta_info": {"input_token_logprobs": [p]}} for p in logprobs])

    with fleet() as made:
        made.prefills[0].behaves(answer(-1.0, -2.0))
        made.decodes[0].behaves(answer(-3.0, -4.0))
        merged = post(made, {"text": ["x", "y"], "return_logprob": True}, "/generate").json()
        assert [item["meta_info"]["input_token_logprobs"] for item in merged] == [[-1.0, -3.0], [-2.0, -4.0]]


def test_least_load_picks_the_idle_worker() -> None:
    with fleet(1, 2, policy="least_load") as made:
        busy, idle = made.decodes
        busy.behaves(Hang())
        with asking(made, body=CHAT | {"stream": True}):
            eventually(lambda: busy.generations)
            for _ in range(3):
                assert post(made).status_code == 200
            assert (len(busy.generations), len(idle.generations)) == (1, 3)


def test_bad_json_bad_timeouts_and_too_many_prompts_are_refused_by_the_router() -> None:
    with fleet() as made:
        response = CLIENT.post(made.url + "/generate", content=b"{nope")
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")
        response = CLIENT.post(made.url + "/generate", content=b"[1]")
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")
        for timeout in (0, -1, "soon", "5", True):
            response = post(made, CHAT | {"timeout": timeout})
            assert (response.status_code, error_of(response)["param"]) == (400, "timeout")
        response = CLIENT.post(made.url + "/generate", json={"text": ["x"] * (MAX_PROMPTS + 1)})
        assert response.status_code == 400
        assert error_of(response)["param"] == "text"
        assert made.seen() == []


def test_too_many_requests_at_once_are_refused() -> None:
    with fleet(max_active_requests=1) as made:
        made.decodes[0].behaves(Hang())
        with asking(made, body=CHAT | {"stream": True}):
            eventually(lambda: made.router.router.num_active() == 1)
            response = post(made)
            assert (response.status_code, error_of(response)["code"]) == (503, "queue_full")


@pytest.mark.parametrize(
    "order", [{"rid": "mine"}, {"abort_all": True}, {"abort_all": True, "rid": "another"}], ids=str
)
def test_a_request_that_was_aborted_is_not_tried_at_another_pair(order: dict[str, Any]) -> None:
    with fleet(2, 2) as made:
        has_been_told = threading.Event()
        for decode in made.decodes:
            decode.behaves(Reject(502, once=has_been_told.is_set))
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(post(made, CHAT | {"rid": "mine"})))
        asking.start()
        eventually(lambda: any(decode.generations for decode in made.decodes))
        CLIENT.post(made.url + "/abort_request", json=order)
        has_been_told.set()
        asking.join()
        assert (answers[0].status_code, error_of(answers[0])["code"]) == (499, "aborted")
        assert len([seen for decode in made.decodes for seen in decode.generations]) == 1


def test_the_other_endpoints_are_proxied_fanned_out_or_answered() -> None:
    with fleet(2, 1) as made:
        assert CLIENT.get(made.url + "/ready").status_code == 200
        assert CLIENT.get(made.url + "/health").headers["x-tandem-role"] == "router"
        assert CLIENT.get(made.url + "/version").json()["version"]
        assert CLIENT.get(made.url + "/v1/models").json()["data"][0]["id"] == "fake"
        for path in ("/tokenize", "/v1/tokenize"):
            assert CLIENT.post(made.url + path, json={"prompt": "x"}).json() == {"tokens": [1, 2]}
        assert CLIENT.get(made.url + "/health_generate").status_code == 200
        for name in ("/server_info", "/get_server_info"):
            info = CLIENT.get(made.url + name).json()
            assert (len(info["prefill"]), len(info["decode"])) == (2, 1)
            assert info["internal_states"] == [{"role": "decode"}]
            assert [worker["health"] for worker in info["workers"]] == ["live"] * 3
        loads = CLIENT.get(made.url + "/v1/loads").json()
        assert len(loads["loads"]) == 3
        assert loads["aggregate"]["num_running_reqs"] == 6
        assert len(CLIENT.get(made.url + "/v1/loads?dp_rank=0").json()["loads"]) == 3
        for asked in ("dp_rank=1", "format=prometheus"):
            refused = CLIENT.get(f"{made.url}/v1/loads?{asked}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, asked.partition("=")[0])
        assert len(CLIENT.get(made.url + "/get_load").json()) == 3
        assert CLIENT.get(made.url + "/load").json() == {"server_load": 0}
        assert [CLIENT.request(method, made.url + "/ping").status_code for method in ("GET", "POST")] == [200, 200]
        assert CLIENT.post(made.url + "/flush_cache").status_code == 200
        assert CLIENT.post(made.url + "/abort_request", json={"rid": "x"}).json() == {"aborted": 1}
        asked = [seen.path for worker in made.prefills + made.decodes for seen in worker.seen]
        assert asked.count("/flush_cache") == asked.count("/abort_request") == 3
        for method, path, code in (("GET", "/nope", "not_found"), ("GET", "/generate", "method_not_allowed")):
            assert error_of(CLIENT.request(method, made.url + path))["code"] == code


def test_headers_travel_as_they_came_except_those_that_say_nothing() -> None:
    """By a client that sends what httpx would not."""
    with fleet() as made:
        for method, path in (("POST", "/generate"), ("GET", "/v1/models")):
            connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(made.url).port, timeout=20)
            headers = {"Authorization": "Bearer ", "traceparent": "caf\xe9", "x-request-id": "caf\xe9"}
            connection.request(method, path, "{}", headers)
            assert connection.getresponse().status == 200
            connection.close()
        generation, asked = made.decodes[0].seen
        assert (generation.headers["authorization"], asked.headers["authorization"]) == ("Bearer", "Bearer")
        assert generation.headers["traceparent"] == "caf\xe9"
        assert generation.headers["x-request-id"].isascii(), "it goes into headers and logs"


def test_a_body_that_is_nested_too_deeply_is_a_400() -> None:
    with fleet() as made:
        for depth, status in ((100, 200), (100_000, 400)):
            content = b'{"text": "x", "deep": %s1%s}' % (b"[" * depth, b"]" * depth)
            assert CLIENT.post(made.url + "/generate", content=content).status_code == status


def test_a_body_that_is_too_large_is_refused_by_what_its_head_announces() -> None:
    with fleet() as made:
        head = (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1099511627776\r\nConnection: close\r\n\r\n"
        )
        reply = exchange(int(made.url.rpartition(":")[2]), head)
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (413, "body_too_large")
        assert made.seen() == []


def test_what_one_decode_answers_is_a_503_where_there_is_none() -> None:
    with fleet() as made:
        made.decodes[0].kill()
        eventually(lambda: CLIENT.get(made.url + "/ready").status_code == 503, "it counts as dead")
        for method, path in (("GET", "/v1/models"), ("GET", "/model_info"), ("POST", "/tokenize")):
            response = CLIENT.request(method, made.url + path)
            assert response.status_code == 503
            assert error_of(response)["code"] == "no_live_pair"


def test_the_schema_is_that_of_a_decode_without_its_debug_pages() -> None:
    with fleet() as made:
        assert CLIENT.get(made.url + "/openapi.json").json() == {"paths": {"/generate": {}}}


def test_a_wrong_method_is_answered_with_the_right_ones() -> None:
    with fleet() as made:
        assert set(CLIENT.get(made.url + "/generate").headers["allow"].split(", ")) == {"POST"}
        assert set(CLIENT.put(made.url + "/flush_cache").headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


def test_metrics_count_requests_retries_failures_and_workers() -> None:
    with fleet() as made:
        made.decodes[0].behaves(Reject(500), Answer())
        post(made)
        made.decodes[0].behaves(Reject(400))
        post(made)
        assert CLIENT.post(made.url + "/v1/completions", content=b"{").status_code == 400
        eventually(made.is_idle)
        text = CLIENT.get(made.url + "/metrics").text
        assert 'tandem:router_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
        for name in ("request_seconds", "first_byte_seconds"):
            assert f'tandem:router_{name}_count{{path="/v1/chat/completions"}} 2.0' in text
        assert "tandem:router_retries_total 1.0" in text
        assert 'tandem:router_client_errors_total{status="400"} 2.0' in text
        assert 'tandem:router_requests_total{path="/v1/completions",status="400"} 1.0' in text
        assert "tandem:router_failures_total{" not in text, "what a client has sent is no failure of ours"
        assert "tandem:router_active_requests 0.0" in text
        assert f'tandem:router_worker_live{{role="decode",worker="{made.decodes[0].url}"}} 1.0' in text
        assert f'tandem:router_worker_seconds_count{{role="decode",worker="{made.decodes[0].url}"}} 3.0' in text


def test_a_refusal_of_what_a_worker_could_not_do_is_a_failure() -> None:
    with fleet(retries=0) as made:
        made.decodes[0].behaves(Reject(501))
        post(made)
        eventually(made.is_idle)
        text = CLIENT.get(made.url + "/metrics").text
        assert 'tandem:router_failures_total{cause="decode_rejected"} 1.0' in text
        assert "tandem:router_client_errors_total{" not in text


def test_an_abort_by_name_is_one_cause_whoever_says_it_and_no_mistake_of_the_client() -> None:
    """A worker, whose answer is passed on, or the router, between two attempts."""
    with fleet() as made:
        made.decodes[0].behaves(Refuse(Cause.ABORTED))
        assert post(made).status_code == 499
        eventually(made.is_idle)
        text = CLIENT.get(made.url + "/metrics").text
        assert 'tandem:router_failures_total{cause="aborted"} 1.0' in text
        assert "tandem:router_client_errors_total{" not in text


def test_a_request_that_the_router_itself_ends_before_it_asks_anybody_is_counted() -> None:
    with fleet() as made:
        fields = (b"host: localhost", b"connection: close", b"content-length: 9", b"x-request-timeout-ms: 50")
        head = b"\r\n".join((b"POST /generate HTTP/1.1", *fields, b"", b""))
        assert exchange(int(made.url.rpartition(":")[2]), head).status == 504
        text = CLIENT.get(made.url + "/metrics").text
        assert 'tandem:router_requests_total{path="/generate",status="504"} 1.0' in text
        assert 'tandem:router_failures_total{cause="deadline_exceeded"} 1.0' in text


def test_a_key_is_asked_for_and_given_to_the_workers() -> None:
    with fleet(api_key="secret", admin_api_key="root") as made:
        assert post(made).status_code == 401
        assert CLIENT.get(made.url + "/ready").status_code == 200
        key = {"authorization": "Bearer secret"}
        assert post(made, headers=key).status_code == 200
        assert made.decodes[0].generations[0].headers["authorization"] == "Bearer secret"
        assert CLIENT.post(made.url + "/flush_cache", headers=key).status_code == 401
        assert CLIENT.post(made.url + "/flush_cache", headers={"authorization": "Bearer root"}).status_code == 200


@pytest.mark.parametrize("side", ["prefills", "decodes"])
def test_a_key_that_a_worker_misses_is_asked_for_and_no_server_is_waited_for(side: str) -> None:
    with fleet() as made:
        getattr(made, side)[0].asks_for_a_key_at = "/flush_cache"
        refused = CLIENT.post(made.url + "/flush_cache")
        assert (refused.status_code, error_of(refused)["code"]) == (401, "unauthorized")
