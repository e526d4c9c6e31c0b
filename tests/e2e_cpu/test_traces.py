"""Traces of real servers, told to a collector of the test: one trace through router, prefill and decode, in parts that
add up, with aborts and their reasons; and what a collector that is dead, or a request that is not sampled, costs."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from cluster import Cluster, Server, bootstrap_port, cluster, eventually, generate_body

from collector import CLIENT, ERROR, INTERNAL, SERVER, Collector, SeenSpan, grpc_collector, http_collector
from tandem.cli.ports import free_ports

PROMPT = list(range(100, 180))
CALLER = "b7ad6b7169203331"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def flags_for(endpoint: str) -> list[str]:
    return ["--enable-trace", "--otlp-traces-endpoint", endpoint]


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Cluster, Collector]]:
    with environment(**SOON), http_collector() as collector:
        flags = flags_for(collector.endpoint)
        with cluster(prefills=1, decodes=1, flags=flags, router_flags=flags) as it:
            yield it, collector


def traceparent(trace_id: str, *, is_sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-0{int(is_sampled)}", "tracestate": "vendor=opaque"}


def ask(server: Server, headers: dict[str, str], **fields: Any) -> tuple[dict[str, Any], str]:
    """The answer, and what its head says of the trace."""
    with server.open("POST", "/generate", generate_body(PROMPT, 8, **fields), headers) as reply:
        return json.loads(reply.read()), reply.headers.get("traceresponse", "")


def requests_of(collector: Collector, trace_id: str) -> dict[str, SeenSpan]:
    """The spans of whole requests, by service."""
    return {span.service: span for span in collector.of_trace(trace_id) if span.kind == SERVER}


def whole_trace(collector: Collector, trace_id: str) -> dict[str, SeenSpan]:
    eventually(lambda: len(requests_of(collector, trace_id)) == 3, what=lambda: collector.of_trace(trace_id))
    return requests_of(collector, trace_id)


def test_one_trace_goes_through_router_prefill_and_decode_in_parts_that_add_up(
    traced: tuple[Cluster, Collector],
) -> None:
    it, collector = traced
    assert it.router is not None
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    answer, told = ask(it.router, traceparent(trace_id))
    found = whole_trace(collector, trace_id)
    router, prefill, decode = (found[f"tandem-{role}"] for role in ("router", "prefill", "decode"))
    assert router.parent_id == CALLER
    assert told == f"00-{trace_id}-{router.span_id}-01"
    assert {span.trace_state for span in found.values()} == {"vendor=opaque"}

    calls = {span.name: span for span in collector.children_of(router)}
    assert sorted(calls) == ["decode", "prefill"]
    assert all(call.kind == CLIENT for call in calls.values())
    assert (prefill.parent_id, decode.parent_id) == (calls["prefill"].span_id, calls["decode"].span_id)
    assert calls["decode"].attributes["http.response.status_code"] == 200

    assert parts_up_to_the_first_token(collector, decode) == {
        stage: round(seconds * 1e9) for stage, seconds in answer["meta_info"]["ttft_ledger"].items()
    }
    assert decode.attributes["gen_ai.server.time_to_first_token"] == answer["meta_info"]["ttft"]
    assert decode.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert decode.attributes["tandem.path"] == "remote"
    assert "prefill_forward" in parts_up_to_the_first_token(collector, prefill)
    assert prefill.attributes["bootstrap_room"] == decode.attributes["bootstrap_room"]
    assert {span.status for span in collector.of_trace(trace_id)} == {0}


def parts_up_to_the_first_token(collector: Collector, request: SeenSpan) -> dict[str, int]:
    """Stages in nanoseconds. They follow each other without a gap, and `generation` follows them to the end."""
    parts = collector.children_of(request)
    assert all(part.kind == INTERNAL for part in parts)
    assert parts[0].began_ns == request.began_ns
    assert all(before.ended_ns == after.began_ns for before, after in pairwise(parts))
    assert parts[-1].name == "generation"
    assert parts[-1].ended_ns == request.ended_ns
    stages = {part.name: part.duration_ns for part in parts[:-1]}
    assert sum(stages.values()) == round(request.attributes["gen_ai.server.time_to_first_token"] * 1e9)
    return stages


def test_a_request_that_is_not_sampled_is_told_nowhere(traced: tuple[Cluster, Collector]) -> None:
    it, collector = traced
    assert it.router is not None
    quiet, later = "11111111111111111111111111111111", "22222222222222222222222222222222"
    _, told = ask(it.router, traceparent(quiet, is_sampled=False))
    assert told.startswith(f"00-{quiet}-")
    assert told.endswith("-00")
    ask(it.router, traceparent(later))
    whole_trace(collector, later)  # what each of the three has said before is here by now
    assert collector.of_trace(quiet) == []


def test_a_request_that_comes_without_a_trace_begins_one(traced: tuple[Cluster, Collector]) -> None:
    it, collector = traced
    assert it.router is not None
    for headers in ({}, {"traceparent": "garbage"}, {"traceparent": f"00-{'0' * 32}-{CALLER}-01"}):
        _, told = ask(it.router, headers)
        _, trace_id, span_id, sampled = told.split("-")
        assert int(sampled, 16) & 1
        found = whole_trace(collector, trace_id)
        assert found["tandem-router"].parent_id == ""
        assert found["tandem-router"].span_id == span_id


def test_every_sample_of_a_request_has_a_span_of_its_own(traced: tuple[Cluster, Collector]) -> None:
    it, collector = traced
    assert it.router is not None
    trace_id = "33333333333333333333333333333333"
    answers, _ = ask(it.router, traceparent(trace_id), sampling_params={"n": 2})
    decode = whole_trace(collector, trace_id)["tandem-decode"]
    samples = collector.children_of(decode)
    assert [sample.name for sample in samples] == ["sample", "sample"]
    named = {sample.attributes["gen_ai.response.id"]: sample for sample in samples}
    for answer in answers:
        ledger = answer["meta_info"]["ttft_ledger"]
        stages = parts_up_to_the_first_token(collector, named[answer["meta_info"]["id"]])
        assert stages == {stage: round(seconds * 1e9) for stage, seconds in ledger.items()}


def test_an_abort_is_recorded_with_its_reason_wherever_it_happens(traced: tuple[Cluster, Collector]) -> None:
    it, collector = traced
    assert it.router is not None
    (prefill,) = it.prefills
    lonely, left, wrong = ("4" * 32, "5" * 32, "6" * 32)

    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 99}
    body = generate_body(PROMPT, 8, timeout=0.3, **where)
    prefill.open("POST", "/generate", body, traceparent(lonely)).read()
    eventually(lambda: requests_of(collector, lonely))
    span = requests_of(collector, lonely)["tandem-prefill"]
    assert span.status == ERROR
    assert span.parent_id == CALLER
    assert span.events["abort"]["code"] == "deadline_exceeded"
    assert span.events["abort"]["stage"] == "peer"
    assert "no first token in time" in span.events["abort"]["reason"]
    (wait,) = collector.children_of(span)
    assert wait.name == "peer"
    assert span.began_ns <= wait.began_ns < wait.ended_ns == span.ended_ns

    endless = generate_body(PROMPT, 4000, sampling_params={"ignore_eos": True}) | {"stream": True}
    reply = it.router.open("POST", "/generate", endless, traceparent(left))
    assert reply.read(1)
    reply.close()
    eventually(lambda: {"tandem-router", "tandem-decode"} <= requests_of(collector, left).keys())
    found = requests_of(collector, left)
    assert found["tandem-router"].events["abort"]["reason"] == "the client left"
    assert found["tandem-decode"].events["abort"]["code"] == "aborted"
    assert found["tandem-decode"].status == ERROR
    calls = {span.name: span for span in collector.children_of(found["tandem-router"])}
    assert calls["decode"].events["abort"]["reason"] == "cancelled"

    it.router.open("POST", "/generate", {"text": 7}, traceparent(wrong)).read()
    halves = {"tandem-prefill", "tandem-decode"}  # who refuses first; the other's call is cancelled, perhaps unread
    eventually(lambda: halves & (told := requests_of(collector, wrong).keys()) and "tandem-router" in told)
    found = requests_of(collector, wrong)
    assert {found[half].events["abort"]["status_code"] for half in halves & found.keys()} == {400}
    calls = {span.name: span for span in collector.children_of(found["tandem-router"])}
    assert "answers 400" in {call.events.get("abort", {}).get("reason") for call in calls.values()}


@pytest.mark.slow
def test_a_server_alone_tells_a_collector_that_speaks_grpc() -> None:
    trace_id = "7" * 32
    with environment(**SOON), grpc_collector() as collector:
        with cluster(unified=True, flags=flags_for(collector.endpoint)) as it:
            assert it.unified is not None
            ask(it.unified, traceparent(trace_id))
            it.unified.member.process.terminate()  # what is left is told before it ends
            assert it.unified.member.process.wait(30) == 0
            found = requests_of(collector, trace_id)
        assert found["tandem-unified"].parent_id == CALLER
        assert "prefill_forward" in parts_up_to_the_first_token(collector, found["tandem-unified"])


@pytest.mark.slow
def test_a_dead_collector_costs_a_line_in_the_log_and_no_request() -> None:
    (nobody,) = free_ports(1)
    with environment(**SOON), cluster(unified=True, flags=flags_for(f"http://127.0.0.1:{nobody}/v1/traces")) as it:
        server = it.unified
        assert server is not None
        tokens = [server.generate(PROMPT)["output_ids"] for _ in range(20)]
        assert all(answer == tokens[0] for answer in tokens)
        eventually(lambda: "traces: " in server.log)
        server.generate(PROMPT)
        server.member.process.terminate()
        assert server.member.process.wait(30) == 0
        assert server.log.count("traces: ") == 1
        assert "Traceback" not in server.log
