"""Real processes: a decode is killed in the middle of streams, and their clients get what one engine says, to the end.

Every form is streamed twice, so that one of each pair of streams is at the decode that is killed.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any  # JSON documents

import pytest
from cluster import REPLY_S, Cluster, Server, bootstrap_port, cluster, eventually, workers_of

FLAGS = ("--deterministic",)
JSON = {"Content-Type": "application/json"}
TOKENS = 400
QUESTION = "What is 17 plus 25? Explain it slowly."
MESSAGES = [{"role": "user", "content": QUESTION}]
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 77}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}},
    "required": ["numbers"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS, "strict": True}}
LONG = {"max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": NUMBERS}}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, **LONG}),
    "seeded chat with penalties": ("/v1/chat/completions", {"messages": MESSAGES, **SEEDED, **PENALTIES, **LONG}),
    "chat with a schema": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": FORMAT, **SEEDED, "max_tokens": 2000},
    ),
    "a call of a tool": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", **SEEDED, "max_tokens": 2000},
    ),
    "completion with penalties": ("/v1/completions", {"prompt": QUESTION, **SEEDED, **PENALTIES, **LONG}),
    "completion with logprobs": ("/v1/completions", {"prompt": QUESTION, "temperature": 0, "logprobs": 2, **LONG}),
    "generate": (
        "/generate",
        {"text": QUESTION, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}},
    ),
    "messages": ("/v1/messages", {"model": "tandem/mini", "messages": MESSAGES, "max_tokens": 1000, "temperature": 0}),
    "responses": ("/v1/responses", {"model": "tandem/mini", "input": QUESTION, "temperature": 0}),
}
# Drawn without a seed of the client's. Of the prompts the first has its few tokens long before the others.
DRAWN = {"temperature": 0.9, "max_new_tokens": TOKENS, "ignore_eos": True}
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "samples of a chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "temperature": 0.9, **LONG}),
    "samples of a completion": (
        "/v1/completions",
        {"prompt": QUESTION, "n": 3, "temperature": 0.9, "logprobs": 1, **PENALTIES, **LONG},
    ),
    "prompts": (
        "/generate",
        {"text": ["One", "Two", QUESTION], "sampling_params": [DRAWN | {"max_new_tokens": 3}, DRAWN, DRAWN]},
    ),
}
FORMS |= SEVERAL
LONG_ENOUGH = [
    name for name in FORMS if name not in ("messages", "responses", *SEVERAL)
]  # which end when the model wants


@pytest.fixture(scope="module")
def it() -> Iterator[Cluster]:
    # With a breaker a decode that was killed would get nothing for a minute.
    spares_nobody = ("--disable-circuit-breaker",)
    with cluster(prefills=1, decodes=2, unified=True, flags=FLAGS, router_flags=spares_nobody) as made:
        yield made


class Reading:
    """One stream, read in a thread of its own."""

    def __init__(self, server: Server, name: str, **more: Any) -> None:
        self.name = name
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        path, body = FORMS[name]
        self._connection = HTTPConnection(server.host, server.member.port, timeout=REPLY_S)
        self._connection.request("POST", path, json.dumps(body | {"stream": True} | more), JSON)

    def read(self) -> list[dict[str, Any]]:
        """All events, of which the first few are here when `has_begun` is set."""
        found: list[dict[str, Any]] = []
        with self._connection.getresponse() as reply:
            assert reply.status == 200, reply.read()
            for line in reply:
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
                    if len(found) == (12 if self.name in SEVERAL else 4):
                        self.has_begun.set()
                        self.may_go_on.wait(60)
                assert not line.startswith(b"{"), "a frame is shown to the client"
        self.has_begun.set()
        return found


def put_together(name: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, whatever the pieces in which it came."""
    path, _ = FORMS[name]
    if path == "/generate":
        last = events[-1]
        meta = {key: last["meta_info"][key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")}
        return {"text": last["text"], "ids": last["output_ids"], **meta}
    if path == "/v1/messages":
        texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        (end,) = (event for event in events if event["type"] == "message_delta")
        kinds = [event["type"] for event in events if not event["type"].endswith("_delta")]
        return {"text": "".join(texts), "end": end["delta"], "kinds": kinds, "n": end["usage"]["output_tokens"]}
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        assert response["id"] == events[0]["response"]["id"]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == response["output"][0]["content"][0]["text"]
        return {"text": "".join(deltas), "status": response["status"], "n": response["usage"]["output_tokens"]}
    assert len({event["id"] for event in events}) == 1
    assert len({event["created"] for event in events}) == 1
    choices = [event["choices"][0] for event in events if event["choices"]]
    usage = [event["usage"] for event in events if not event["choices"]]
    counts = [(found["prompt_tokens"], found["completion_tokens"]) for found in usage]
    deltas = [choice.get("delta", {}) for choice in choices]
    text = "".join(
        choice.get("text") or delta.get("content") or "" for choice, delta in zip(choices, deltas, strict=True)
    )
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    offsets = [offset for found in scores for offset in found["text_offset"]]
    return {
        "text": text,
        "roles": sum("role" in delta for delta in deltas),
        "calls": ([call["function"].get("name") for call in calls if "id" in call], arguments),
        "scores": [score for found in scores for score in found["token_logprobs"]],
        "offsets": offsets,
        "end": choices[-1]["finish_reason"],
        "counts": counts,
    }


def kill(server: Server) -> None:
    """Everything of it: its children end when their parent has."""
    os.kill(server.member.process.pid, signal.SIGKILL)
    server.member.process.wait()


def resumed(router: Server) -> float:
    return router.metric("tandem:router_resumes_total")


def test_streams_go_on_with_another_decode_when_theirs_is_killed(it: Cluster) -> None:
    assert it.router is not None
    assert it.unified is not None
    names = [name for name in FORMS if name not in SEVERAL]
    alone = {name: put_together(name, all_of(it.unified, name)) for name in names}
    answers = under_a_kill(lambda: kill(it.decodes[0]), [Reading(it.router, name) for name in names])
    for name, events in answers:
        assert put_together(name, events) == alone[name], name
    assert resumed(it.router) >= len(LONG_ENOUGH) // 2  # whatever was over before
    it.fleet.restart(it.decodes[0].member)
    it.fleet.wait_ready(timeout_s=90)
    eventually(it.decodes[1].is_idle, what=it.decodes[1].state)
    eventually(it.prefills[0].is_idle, what=it.prefills[0].state)


def test_streams_of_a_rank_that_is_lost_go_on_with_another_rank_of_the_only_decode(it: Cluster) -> None:
    assert it.unified is not None
    names = ["greedy chat", "seeded chat with penalties", "generate"] * 2
    alone = {name: put_together(name, all_of(it.unified, name)) for name in set(names)}
    with cluster(prefills=1, decodes=1, flags=FLAGS, decode_flags=("--dp", "2")) as other:
        assert other.router is not None
        (decode,) = other.decodes
        lost = workers_of(decode)[1]
        answers = under_a_kill(lambda: os.kill(lost, signal.SIGKILL), [Reading(other.router, n) for n in names])
        assert [put_together(name, events) for name, events in answers] == [alone[name] for name in names]
        assert resumed(other.router) >= 1
        eventually(lambda: "DP rank 1 serves again" in decode.log, within_s=60, what=lambda: decode.log[-2000:])
        for server in other.servers:
            eventually(server.is_idle, what=server.states)


@pytest.mark.slow
def test_every_choice_of_a_stream_goes_on_with_its_own_draws(it: Cluster) -> None:
    """As a pair says it that is asked with the same rooms, without a router and a kill: draws are seeded with them."""
    assert it.router is not None
    eventually(it.is_known, what=it.router.live_workers)  # the one that was killed is back
    before = resumed(it.router)
    wanted = [(name, f"{name.replace(' ', '-')}-{number}") for name in SEVERAL for number in range(2)]
    answers = under_a_kill(lambda: kill(it.decodes[0]), [Reading(it.router, name, rid=rid) for name, rid in wanted])
    assert resumed(it.router) >= before + len(SEVERAL) - 1  # whatever was over before
    for (name, rid), (_, events) in zip(wanted, answers, strict=True):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(it.prefills[0])}
        pair |= {"bootstrap_room": rooms(it.prefills[0], rid), "rid": rid}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(all_of, it.prefills[0], name, **pair)
            whole = all_of(it.decodes[1], name, **pair)
            other.result(60)
        choices = [put_together(name, of_choice(events, choice)) for choice in range(3)]
        assert choices == [put_together(name, of_choice(whole, choice)) for choice in range(3)], rid
        assert len({choice["text"] for choice in choices}) == 3
    eventually(it.decodes[1].is_idle, what=it.decodes[1].state)
    eventually(it.prefills[0].is_idle, what=it.prefills[0].state)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the server", "its worker"])
def test_streams_of_a_decode_that_hangs_go_on_with_another_one(it: Cluster, who: str) -> None:
    """It is not over before the time for a pause of a stream is. A server that does not answer probes says nothing; of
    a worker that stands still its server says it after half of the watchdog's time."""
    assert it.unified is not None
    names = [name for name in FORMS if name not in SEVERAL]
    alone = {name: put_together(name, all_of(it.unified, name)) for name in names}
    with cluster(prefills=1, decodes=2, flags=FLAGS, decode_flags=("--watchdog-timeout", "22")) as other:
        assert other.router is not None
        hanging = [
            server.member.process.pid if who == "the server" else workers_of(server)[0] for server in other.decodes
        ]
        try:
            answers = under_a_kill(
                lambda: os.kill(hanging[0], signal.SIGSTOP), [Reading(other.router, name) for name in names]
            )
        finally:
            os.kill(hanging[0], signal.SIGCONT)
        assert [put_together(name, events) for name, events in answers] == [alone[name] for name in names]
        assert resumed(other.router) >= 1


@pytest.mark.slow
def test_streams_of_a_dp_rank_that_hangs_go_on_with_another_one(it: Cluster) -> None:
    """Its server is well, as its other rank is. It says of the streams of this one that they do not go on with it, once
    half of the watchdog's time is over, all of which is longer than the pause of a stream may be."""
    assert it.unified is not None
    names = [name for name in FORMS if name not in SEVERAL]
    alone = {name: put_together(name, all_of(it.unified, name)) for name in names}
    with cluster(
        prefills=1, decodes=1, flags=FLAGS, decode_flags=("--dp-size", "2", "--watchdog-timeout", "36")
    ) as other:
        assert other.router is not None
        hanging = workers_of(other.decodes[0])[0]
        try:
            answers = under_a_kill(
                lambda: os.kill(hanging, signal.SIGSTOP), [Reading(other.router, name) for name in names]
            )
        finally:
            os.kill(hanging, signal.SIGCONT)
        assert [put_together(name, events) for name, events in answers] == [alone[name] for name in names]
        assert resumed(other.router) >= 1


def under_a_kill(kills: Callable[[], None], readings: list[Reading]) -> list[tuple[str, list[dict[str, Any]]]]:
    """What clients get whose streams have begun when somebody is killed."""
    with ThreadPoolExecutor(len(readings)) as pool:
        reading = [(one, pool.submit(one.read)) for one in readings]
        for one, _ in reading:
            assert one.has_begun.wait(60), one.name
        kills()
        for one, _ in reading:
            one.may_go_on.set()
        return [(one.name, future.result(90)) for one, future in reading]


def rooms(prefill: Server, rid: str) -> list[int]:
    """Of the first attempt, one for each choice."""
    said = re.findall(rf"request {rid}_(\d) .* room=(\d+)", prefill.log)
    first = {int(choice): int(room) for choice, room in reversed(said)}
    return [first[choice] for choice in range(3)]


def of_choice(events: list[dict[str, Any]], choice: int) -> list[dict[str, Any]]:
    """Those of it, and those of none."""
    owners = [event["choices"][0]["index"] if event.get("choices") else event.get("index", choice) for event in events]
    return [event for event, owner in zip(events, owners, strict=True) if owner == choice]


def all_of(server: Server, name: str, **more: Any) -> list[dict[str, Any]]:
    one = Reading(server, name, **more)
    one.may_go_on.set()
    return one.read()
