"""How failures reach the client: before the head as a status, after it as the last event, and never as silence."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import Call, Script, World, ids, sse, world

from loop_waits import until
from tandem.core import commands, events
from tandem.core.commands import FinishReason
from tandem.core.request import Request
from tandem.core.values import Cause
from tandem.server.api.errors import RULES, Problem

STREAMS = [False, True]


def fails(cause: Cause, *, after: str = "") -> Callable[[Any, Any], Script]:
    return lambda request, payload: Script(ids(after), failure=cause)


def log_lines(w: World) -> list[dict]:
    return [json.loads(line) for line in w.log.getvalue().splitlines()]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_before_the_first_token_is_a_status_of_its_own(cause: Cause, stream: bool) -> None:
    with (w := world(fails(cause))).http() as http:
        response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    error = response.json()["error"]
    assert response.status_code == RULES[cause].status
    assert (error["code"], error["stage"], error["retryable"]) == (cause.value, "transfer", RULES[cause].retryable)
    assert "as scripted" in error["message"]
    assert error["request_id"] == response.headers["x-request-id"]
    (line,) = log_lines(w)
    assert (line["outcome"], line["stage"]) == (cause.value, "transfer")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failure_is_told_with_its_dp_rank_where_there_are_several(ranks: int) -> None:
    with (w := world(fails(Cause.TRANSFER_FAILED), ranks=ranks)).http() as http:
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": "x"})
    found = [line.get("dp_rank") for line in log_lines(w)]
    assert found == ([None, None] if ranks == 1 else [0, 1])


def test_users_mistakes_are_never_5xx_and_passing_trouble_is_never_4xx() -> None:
    for code, rule in RULES.items():
        passes = rule.status >= 500 and code is not Cause.INVALID_LOGITS  # the same weights, the same numbers
        assert rule.retryable is passes, code


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_failure_after_the_head_is_the_last_event_of_the_stream(path: str) -> None:
    body = {"prompt": "x", "text": "x", "stream": True}
    with world(fails(Cause.DEADLINE_EXCEEDED, after="ab")).http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    *tokens, last = sse(response.text)
    assert len(tokens) >= 1
    assert last["error"]["code"] == "deadline_exceeded"


def test_a_failure_after_tokens_is_a_status_when_nothing_was_streamed() -> None:
    with world(fails(Cause.DEADLINE_EXCEEDED, after="ab")).http() as http:
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 504


def test_a_failing_sample_ends_the_others() -> None:
    def script(request, payload) -> Script:
        return Script(failure=Cause.PEER_LOST) if request.id == 2 else Script(ids("a"), is_silent=True)

    with (w := world(script)).http() as http:
        assert http.post("/v1/completions", json={"prompt": "x", "n": 3}).status_code == 502
    assert w.node.sent == [events.AbortRequested(1), events.AbortRequested(3)]
    assert [line["outcome"] for line in log_lines(w)] == ["aborted", "peer_lost", "aborted"]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_failing_sample_of_a_prefill_leaves_the_others_to_their_decode_halves(stream: bool) -> None:
    """Each has one of its own, which computes the prompt of the failed one itself and waits for the KV of these."""

    def script(request: Request, payload: object) -> Script:
        return Script(failure=Cause.PEER_ABORTED) if request.id == 2 else Script(ids("a"), FinishReason.LENGTH)

    with (w := world(script, disaggregation_mode="prefill")).http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "n": 3, "stream": stream, "bootstrap_room": 7})
    assert w.node.sent == [], "nobody is told to end"
    last = sse(answer.text)[-1] if stream else answer.json()
    assert last["error"]["code"] == "peer_aborted"
    assert Counter(line["outcome"] for line in log_lines(w)) == {"length": 2, "peer_aborted": 1}


def test_overload_and_draining_tell_when_to_come_back() -> None:
    with (w := world(fails(Cause.QUEUE_FULL))).http() as http:
        response = http.post("/v1/completions", json={"prompt": "x"})
        w.client.drain()
        drained = http.post("/v1/completions", json={"prompt": "x"})
    for answer, code in ((response, "queue_full"), (drained, "draining")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.headers["retry-after"] == "1"
    assert w.node.sent == [events.DrainRequested()]


def test_before_the_node_is_ready_everything_is_a_503() -> None:
    with world(is_ready=False).http() as http:
        response = http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        assert http.get("/health_generate").status_code == 503


def test_a_live_rid_is_refused_and_free_again_afterwards() -> None:
    async def story(w: World, http: httpx.AsyncClient) -> None:
        first = asyncio.create_task(http.post("/generate", json={"text": "x", "rid": "r"}))
        await until(lambda: w.client.num_live == 1)
        second = await http.post("/generate", json={"text": "x", "rid": "r"})
        assert (second.status_code, second.json()["error"]["code"]) == (409, "duplicate_rid")
        aborted = await http.post("/abort_request", json={"rid": "r"})
        assert aborted.json() == {"aborted": 1}
        assert (await first).status_code == RULES[Cause.ABORTED].status
        assert w.client.abort_named("r") == 0
        assert len(w.node.submits) == 1

    run(story, world(silent()))


def test_abort_is_by_exact_rid_or_all() -> None:
    async def story(w: World, http: httpx.AsyncClient) -> None:
        rids = ("job", "job-2", "group")
        bodies = [{"text": "x", "rid": rid, "sampling_params": {"n": 2 if rid == "group" else 1}} for rid in rids]
        posts = [asyncio.create_task(http.post("/generate", json=body)) for body in bodies]
        await until(lambda: w.client.num_live == 4)
        for rid, count in (("jo", 0), ("job", 1), ("group", 2)):
            assert (await http.post("/abort_request", json={"rid": rid})).json() == {"aborted": count}
        assert (await http.post("/abort_request", json={})).status_code == 400
        assert (await http.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 1}
        assert [(await post).status_code for post in posts] == [RULES[Cause.ABORTED].status] * 3

    run(story, world(silent()))


def test_a_node_that_keeps_silent_is_answered_for_after_the_deadline() -> None:
    async def story(w: World, http: httpx.AsyncClient) -> None:
        response = await http.post("/v1/completions", json={"prompt": "x", "timeout": 0.05})
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["code"], error["stage"]) == ("deadline_exceeded", "node")
        assert error["waited_seconds"] >= 0.05
        assert response.elapsed.total_seconds() < 1.05
        assert w.client.num_live == 0

    run(story, world(silent()))


def test_a_node_that_falls_silent_between_tokens_is_answered_for() -> None:
    async def story(w: World, http: httpx.AsyncClient) -> None:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert sse(response.text)[-1]["error"]["code"] == "deadline_exceeded"

    run(story, world(lambda request, payload: Script(ids("ab"), is_silent=True), stall_timeout=0.05))


def test_when_the_node_is_lost_every_request_ends_and_new_ones_are_refused() -> None:
    async def story(w: World, http: httpx.AsyncClient) -> None:
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: w.client.num_live == 1)
        w.client.lose("worker: out of memory")
        response = await running
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
        assert "out of memory" in response.json()["error"]["message"]
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert (await http.get("/health")).status_code == 503

    run(story, world(silent()))


# heads and disconnects, on the bare ASGI interface


@pytest.mark.parametrize("stream", STREAMS)
def test_prefill_sends_its_head_before_any_news_of_the_node(stream: bool) -> None:
    async def story() -> None:
        w = world(silent(), disaggregation_mode="prefill")
        call = Call(w, {"prompt": "x", "stream": stream, "bootstrap_room": 5, "bootstrap_host": "::1"})
        await until(lambda: call.messages)
        assert call.messages[0]["status"] == 200
        assert dict(call.messages[0]["headers"])[b"x-tandem-path"] == b"local"
        assert w.client.num_live == 1
        request = w.node.submits[0].request.id
        w.client.receive(commands.FailRequest(request, Cause.PEER_ABORTED, "sending", "gone"))
        await call.task
        body = call.body().removeprefix(b"data: ")
        assert msgspec.json.decode(body)["error"]["code"] == "peer_aborted"

    asyncio.run(story())


@pytest.mark.parametrize("path", commands.Path)
def test_the_head_names_the_path_that_says_most_about_trouble(path: commands.Path) -> None:
    async def story() -> None:
        w = world(silent(), disaggregation_mode="decode")
        call = Call(w, {"prompt": "x", "stream": True, "n": 2})
        await until(lambda: w.client.num_live == 2)
        first, second = (submit.request.id for submit in w.node.submits)
        for request, way in ((first, path), (second, commands.Path.UNIFIED)):
            w.client.receive(commands.StartRequest(request, way, 0, commands.StageTimings()))
        w.client.receive(commands.EmitTokens((first, second), 2 * ids("a")[0].to_bytes(4, "little")))
        await until(lambda: call.messages)
        assert dict(call.messages[0]["headers"])[b"x-tandem-path"] == path.encode()
        call.leave()
        await call.task

    asyncio.run(story())


@pytest.mark.parametrize("stream", STREAMS)
def test_a_prefill_that_is_not_needed_ends_with_200_and_no_tokens(stream: bool) -> None:
    w = world(lambda request, payload: Script(), disaggregation_mode="prefill")
    body = {"prompt": "x", "stream": stream, "bootstrap_room": 5, "bootstrap_host": "::1"}
    with w.http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200
    answer = sse(response.text)[-1] if stream else response.json()
    assert answer["choices"][0]["text"] == ""


@pytest.mark.parametrize("stream", STREAMS)
def test_others_keep_their_head_until_the_first_token(stream: bool) -> None:
    async def story() -> None:
        w = world(silent(), disaggregation_mode="decode")
        call = Call(w, {"prompt": "x", "stream": stream})
        await until(lambda: w.client.num_live == 1)
        request = w.node.submits[0].request.id
        w.client.receive(commands.StartRequest(request, commands.Path.REMOTE, 0, commands.StageTimings()))
        await asyncio.sleep(0)
        assert call.messages == []
        w.client.receive(commands.EmitTokens((request,), ids("a")[0].to_bytes(4, "little")))
        if stream:
            await until(lambda: call.messages)
            assert dict(call.messages[0]["headers"])[b"x-tandem-path"] == b"remote"
        else:
            await asyncio.sleep(0)
            assert call.messages == []
        call.leave()
        await call.task

    asyncio.run(story())


@pytest.mark.parametrize("stream", STREAMS)
def test_a_client_that_leaves_aborts_its_requests_at_once(stream: bool) -> None:
    async def story() -> None:
        w = world(silent())
        call = Call(w, {"prompt": "x", "n": 2, "stream": stream})
        await until(lambda: w.client.num_live == 2)
        call.leave()
        await call.task
        assert w.node.sent == [events.AbortRequested(1), events.AbortRequested(2)]
        await asyncio.wait_for(w.client.wait_idle(), 2)
        assert [line["outcome"] for line in log_lines(w)] == ["aborted", "aborted"]
        assert {line["detail"] for line in log_lines(w)} == {"the client left"}

    asyncio.run(story())


def test_a_bug_of_ours_is_a_500_in_the_same_shape_and_ends_the_request() -> None:
    broken = world(lambda request, payload: Script([-5]))  # not a token id: a node never sends that
    with broken.http(raise_server_exceptions=False) as http:
        response = http.post("/v1/completions", json={"prompt": "x", "logprobs": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (500, Problem.INTERNAL.value)


# helpers


def silent() -> Callable[[Any, Any], Script]:
    return lambda request, payload: Script(is_silent=True)


def run(story: Callable[[World, httpx.AsyncClient], Any], w: World) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(w.app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await story(w, http)
        await w.client.close()

    asyncio.run(main())
