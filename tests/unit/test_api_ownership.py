"""A request of many samples is submitted whole or not at all, and never runs on without somebody who waits for it."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import REPLICA, Call, Script, World, ids, world

from loop_waits import until
from tandem.core import events
from tandem.core.request import Request
from tandem.core.values import SECOND, Cause, Nanos, RequestId
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.api import app, bounds, generation_request, openai_reply
from tandem.server.api.client import NodeClient
from tandem.server.api.errors import Refusal
from tandem.server.api.node_link import NodeLink
from tandem.server.channel import FrameDecoder, open_channel

TOO_LARGE = 10**30
PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_room": [5, 6]}


def silent(request: Request, payload: Payload) -> Script:
    return Script(is_silent=True)


def posted(w: World, body: dict, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    with w.http(raise_server_exceptions=False) as http:
        return http.post(path, content=msgspec.json.encode(body), headers=headers)


def assert_nothing_is_left(w: World) -> None:
    assert w.node.submits == []
    assert w.client.num_live == 0
    assert w.client._requests._named == {}
    assert w.client._idle.is_set(), "a drain would wait for ever"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_second_of_two_prompts_cannot_be_sent_so_the_first_does_not_run(role: str) -> None:
    w = world(disaggregation_mode=role)
    response = posted(w, {"prompt": ["x", "y"], **PAIR, "disagg_prefill_dp_rank": [0, TOO_LARGE]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "disagg_prefill_dp_rank")
    assert_nothing_is_left(w)


def test_a_priority_is_refused_before_its_rid_is_taken() -> None:
    w = world()
    for priority in (TOO_LARGE, -TOO_LARGE, 3, -1):
        response = posted(w, {"prompt": "x", "rid": "mine", "priority": priority})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    assert_nothing_is_left(w)
    assert "--enable-priority-scheduling" in posted(w, {"prompt": "x", "priority": 1}).json()["error"]["message"]


@pytest.mark.parametrize("priority", [0, None])
def test_no_priority_is_no_mistake(priority: int | None) -> None:
    assert posted(world(), {"prompt": "x", "priority": priority}).status_code == 200


def test_what_no_check_has_found_still_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that slips through all checks is met when the message is encoded: before anything is registered."""
    made = generation_request.submission

    def submission(ask: Any, request: RequestId, *rest: Any) -> wire.Submit:
        submit = made(ask, request, *rest)
        if request < 3:
            return submit
        unfit = msgspec.structs.replace(submit.request, priority=TOO_LARGE)
        return msgspec.structs.replace(submit, request=unfit)

    monkeypatch.setattr(generation_request, "submission", submission)
    w = world()
    assert posted(w, {"prompt": ["x", "y", "z"], "rid": "mine"}).status_code == 500
    assert_nothing_is_left(w)


def test_the_bytes_of_a_request_go_to_the_node_whole_or_not_at_all() -> None:
    async def story() -> None:
        async with linked() as (client, received):
            good, unfit = submit(1), submit(2, priority=TOO_LARGE)
            with pytest.raises(OverflowError), client.running([good, unfit], [("a",), ("b",)]):
                raise AssertionError("nothing runs")
            assert received() == []
            assert (client.num_live, client.abort_named("a")) == (0, 0)
            with client.running([good, submit(2)], [("a",), ("b",)]):
                assert received() == [wire.SubmitAll((good, submit(2)))]
            assert received() == [events.AbortRequested(RequestId(1)), events.AbortRequested(RequestId(2))]

    asyncio.run(story())


def test_a_node_that_does_not_keep_up_gets_nothing_of_a_request() -> None:
    async def story() -> None:
        async with linked(max_pending_bytes=0) as (client, received):
            fill(client)
            with pytest.raises(Refusal) as refused, client.running([submit(1, room=5), submit(2)], [("a",), ("b",)]):
                raise AssertionError("nothing runs")
            assert refused.value.failure.code is Cause.QUEUE_FULL
            assert client.num_live == 0
            heard: list[Any] = []

            def has_been_told() -> bool:
                heard.extend(message for message in received() if not isinstance(message, events.DrainRequested))
                return len(heard) > 0

            await until(has_been_told)
            assert [type(message) for message in heard] == [events.RequestRefused], "the half of room 5 is told"

    asyncio.run(story())


def test_samples_that_would_fill_the_channel_to_the_worker_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with linked() as (client, received):
            with pytest.raises(Refusal) as refused, client.running([submit(1)], [("a",)]):
                raise AssertionError("nothing runs")
            assert refused.value.failure.status == 413
            assert received() == []

    monkeypatch.setattr(wire, "MAX_SUBMIT_BYTES", 10)
    asyncio.run(story())


def test_the_prompt_tokens_of_all_samples_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.server.api.sample_requests.MAX_SUBMITTED_TOKENS", 20)
    w = world()
    response = posted(w, {"prompt": ["x" * 4, "y"], "n": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert_nothing_is_left(w)


# after it was submitted


class Broken(openai_reply.CompletionReply):
    """Raises in one of its methods, which is a bug of ours."""

    method = ""

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).method:
            raise ZeroDivisionError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["begin", "delta", "end", "close", "whole"])
def test_a_reply_that_raises_ends_what_it_was_made_for(
    method: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "method", method)
    monkeypatch.setattr(app, "CompletionReply", Broken)

    async def story() -> None:
        w = world(lambda request, _: Script(ids("ab"), is_silent=request.id == 2))
        call = Call(w, {"prompt": ["x", "y"], "stream": stream, "max_tokens": 2})
        await until(lambda: call.task.done() or w.node.running.keys() <= {2})
        call.leave()  # where the method is never come to
        await call.task
        await asyncio.wait_for(w.client.wait_idle(), 5)
        assert w.client._requests._named == {}

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["unified", "prefill"])
def test_wherever_a_request_is_cancelled_nothing_of_it_lives_on(role: str, stream: bool) -> None:
    """The task is cancelled after 0, 1, 2... turns of the event loop, until it ends by itself before."""

    async def story(turns: int) -> bool:
        mode = "null" if role == "unified" else role
        w = world(lambda request, _: Script(ids("abc")), disaggregation_mode=mode)
        call = Call(w, {"prompt": ["x", "y"], "n": 2, "stream": stream, **PAIR})
        for _ in range(turns):
            await asyncio.sleep(0)
        has_ended = call.task.done()
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        assert {submit.request.id for submit in w.node.submits} in (set(), {1, 2, 3, 4})
        await asyncio.wait_for(w.client.wait_idle(), 5)
        assert w.client._requests._named == {}
        return has_ended

    turns = 0
    while not asyncio.run(story(turns)):
        turns += 1
    assert turns > 5


@pytest.mark.parametrize("stream", [False, True])
def test_wherever_the_client_leaves_nothing_of_its_request_lives_on(stream: bool) -> None:
    async def story(turns: int) -> bool:
        w = world(lambda request, _: Script(ids("abc"), is_silent=request.id == 3))
        call = Call(w, {"prompt": ["x", "y"], "n": 2, "stream": stream}, breaks=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        has_answered = len(call.messages) > 0
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)
        await asyncio.wait_for(w.client.wait_idle(), 5)
        assert w.client._requests._named == {}
        return has_answered

    for turns in range(40):
        asyncio.run(story(turns))


def test_a_half_runs_on_for_whom_prefill_has_answered_and_ends_with_who_leaves_before() -> None:
    """Decode comes for it over another connection (`kv_transfer_params`)."""

    async def story(turns: int) -> tuple[bool, bool]:
        """Whether it had its answer when it left, and whether it has been answered."""
        w = world(silent, disaggregation_mode="prefill")
        call = Call(w, {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}})
        for _ in range(turns):
            await asyncio.sleep(0)
        had_answer = len(call.messages) > 0
        call.leave()
        for _ in range(30):
            await asyncio.sleep(0)
        is_answered = len(call.messages) == 2 and not call.messages[1]["more_body"]
        assert w.client.num_live == is_answered, f"it left after {turns} turns"
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        return had_answer, is_answered

    ends = [asyncio.run(story(turns)) for turns in range(40)]
    assert {(False, False), (True, True)} <= set(ends)
    assert ends.count((False, True)) <= 1, "but in the very turn in which it is answered"


def test_a_record_that_cannot_be_written_does_not_keep_requests_alive() -> None:
    async def story() -> None:
        w = world(silent)
        w.log.write = raises  # type: ignore[method-assign]  # which is not an OSError: a bug
        call = Call(w, {"prompt": ["x", "y"]})
        await until(lambda: w.client.num_live == 2)
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)
        await asyncio.wait_for(w.client.wait_idle(), 5)

    asyncio.run(story())


# rids


def test_a_duplicate_of_a_live_rid_is_refused_and_the_first_is_not_disturbed() -> None:
    async def story() -> None:
        w = world(lambda request, _: Script(ids("ok"), is_silent=True), disaggregation_mode="prefill")
        first = Call(w, {"prompt": "x", "rid": "r", "bootstrap_host": "::1", "bootstrap_room": 5})
        await until(lambda: w.client.num_live == 1)
        again = Call(w, {"prompt": "x", "rid": "r", "bootstrap_host": "::1", "bootstrap_room": 5})
        await again.task
        assert (again.status, again.error()["code"]) == (409, "duplicate_rid")
        assert len(w.node.submits) == w.client.num_live == 1
        assert not any(isinstance(message, events.AbortRequested) for message in w.node.sent)
        first.leave()
        await first.task

    asyncio.run(story())


@pytest.mark.parametrize(
    ("rid", "n", "taken"),
    [
        ("r", 1, ["r"]),
        ("r", 2, ["r", "r_0", "r_1"]),
        (["a", "b"], 1, ["a", "b"]),
        (["a", "b"], 2, ["a", "a_0", "a_1", "b", "b_0", "b_1"]),
    ],
)
def test_every_name_of_a_live_request_is_taken(rid: str | list[str], n: int, taken: list[str]) -> None:
    async def story() -> None:
        w = world(silent)
        prompts = rid if isinstance(rid, list) else "x"
        first = Call(w, {"prompt": prompts, "rid": rid, "n": n})
        await until(lambda: w.client.num_live > 0)
        live = w.client.num_live
        for name in taken:
            again = Call(w, {"prompt": "x", "rid": name})
            await again.task
            assert again.status == 409, name
        assert w.client.num_live == live
        for near in ("", "R", "r_", "a_", taken[0] + " "):
            assert w.client.abort_named(near) == 0
        first.leave()
        await first.task

    asyncio.run(story())


def test_an_empty_rid_is_no_name() -> None:
    async def story() -> None:
        w = world(silent)
        calls = [Call(w, {"prompt": "x", "rid": ""}) for _ in range(2)]
        await until(lambda: w.client.num_live == 2)
        assert w.client.abort_named("") == 0
        for call in calls:
            call.leave()
            await call.task

    asyncio.run(story())


def test_two_samples_of_one_request_never_get_the_same_rid() -> None:
    body = {"text": ["x", "y"], "rid": ["a", "a_0"], "sampling_params": [{"n": 2}, {"n": 1}]}
    w = world()
    response = posted(w, body, "/generate")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")
    assert_nothing_is_left(w)


@pytest.mark.parametrize("n", [0, -1, bounds.MAX_N + 1, TOO_LARGE])
def test_the_number_of_samples_is_bounded(n: int) -> None:
    bodies = [
        ("/v1/completions", {"prompt": "x", "n": n}, "n"),
        ("/v1/completions", {"prompt": "x", "best_of": n}, "best_of"),
        ("/generate", {"text": "x", "sampling_params": {"n": n}}, "sampling_params.n"),
        ("/generate", {"text": ["x"], "sampling_params": [{"n": n}]}, "sampling_params"),
    ]
    for path, body, param in bodies:
        w = world()
        response = posted(w, body, path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert_nothing_is_left(w)


# helpers


def submit(number: int, *, priority: int = 0, room: int | None = None) -> wire.Submit:
    request = Request(RequestId(number), "rid", 1, (), 1, Nanos(SECOND), room, priority=priority)  # type: ignore[arg-type]
    return wire.Submit.of(request, Payload(number, b"\0\0\0\0", SamplingParams(), b""))


class linked:
    """A client on a real channel, and what the node's end of the socket has received so far."""

    def __init__(self, *, max_pending_bytes: int = 1 << 20) -> None:
        self._max_pending_bytes = max_pending_bytes

    async def __aenter__(self) -> tuple[NodeClient, Callable[[], list[Any]]]:
        own, self._node_end = socket.socketpair()
        self._node_end.setblocking(False)
        link = NodeLink()
        self._client = NodeClient(link, stall_timeout=1.0)
        link.channel = self._channel = await open_channel(
            own,
            wire.NodeToApi,
            receive=self._client.receive,
            closed=lambda reason: None,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._client.receive(wire.NodeReady(REPLICA, num_pages=1, page_bytes=1))
        self._frames: FrameDecoder[Any] = FrameDecoder(wire.ApiToNode)
        return self._client, self._received

    def _received(self) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                found += self._frames.feed(self._node_end.recv(1 << 20))
            except BlockingIOError:
                return found

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        self._channel.close()
        self._node_end.close()


def fill(client: NodeClient) -> None:
    """More than the kernel takes while nobody reads."""
    channel = client.ranks[0].port.channel  # type: ignore[attr-defined]  # a NodeLink
    while not channel._transport.get_write_buffer_size():
        channel.send_always(events.DrainRequested())


def raises(*_: object) -> None:
    raise ZeroDivisionError("told to")
