"""Metrics: what is added up, under which names it is exported, and the log line."""

import asyncio
import errno
import io
import json

import httpx
import pytest
from api_fakes import Script, says, world
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tandem.core.commands import Path
from tandem.core.values import SECOND, Cause
from tandem.metrics.export import Exporter, parse_key
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import SENDING, Histogram, RequestRecord, RequestStats, Throughput
from tandem.server.router.app import RouterApp
from tandem.server.router.config import RouterConfig

SERVER = {"model_name": "toy", "engine_type": "unified"}
REPLICA = {**SERVER, "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


def scrape(text: str) -> dict[str, float]:
    """Samples by name, with the labels that do not say who has counted."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert SERVER.items() <= sample.labels.items(), sample
            extra = {name: value for name, value in sample.labels.items() if name not in REPLICA}
            found[sample.name + "".join(f"|{value}" for value in extra.values())] = sample.value
    return found


def record(**fields: object) -> RequestRecord:
    given = {
        "rid": "r",
        "request_id": "q",
        "endpoint": "/generate",
        "outcome": "stop",
        "is_failed": False,
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "e2e_ns": 2_000_000_000,
        "ttft_ns": 1_000_000_000,
        "path": "remote",
        "cached_tokens": 4,
        "ledger": (("edge_receive", 400_000_000), ("queue", 600_000_000)),
    }
    return RequestRecord(**(given | fields))  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 10), max_size=50))
def test_buckets_count_what_is_not_above_their_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1, 5))
    for value in values:
        histogram.observe(value)
    expected = [sum(value <= bound for value in values) for bound in (0.5, 1, 5)]
    assert [count for _, count in histogram.buckets()] == [*expected, len(values)]
    assert histogram.total == pytest.approx(sum(values))


def test_a_served_request_appears_in_every_family_of_the_usual_board() -> None:
    with world(says("abc", path=Path.REMOTE), answers={"metrics": {}}).http() as http:
        http.post("/v1/completions", json={"prompt": "xy"})
        found = scrape(http.get("/metrics").text)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert found[f"sglang:{name}_count"] == 1
    assert found["sglang:prompt_tokens_total"] == 2
    assert found["sglang:generation_tokens_total"] == 4
    assert found["sglang:inter_token_latency_seconds_count"] == 3
    assert found["sglang:cached_tokens_total|device"] == 3
    assert found["sglang:num_requests_total"] == 1
    assert found["sglang:num_aborted_requests_total"] == 0
    assert found["tandem:requests_path_total|remote"] == 1
    for stage in ("edge_receive", "queue", "forward", "edge_send"):
        assert found[f"sglang:per_stage_req_latency_seconds_count|{stage}"] == 1


def test_token_counters_move_while_a_request_runs_and_the_throughput_is_0_when_it_has_ended() -> None:
    async def story() -> None:
        w = world(lambda request, payload: Script([*b"abc"], is_silent=True), answers={"metrics": {}})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(w.app), base_url="http://test") as http:
            body = {"prompt": "xy", "max_tokens": 9, "timeout": 9}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            while (found := scrape((await http.get("/metrics")).text))["sglang:generation_tokens_total"] < 3:
                assert not asking.done()
            assert found["sglang:prompt_tokens_total"] == 2
            assert found["sglang:cached_tokens_total|device"] == 3
            assert found["sglang:gen_throughput"] > 0
            assert found["sglang:num_requests_total"] == 0
            assert found["sglang:http_requests_active|/v1/completions|POST"] == 1
            w.client.abort_all()
            await asking
            found = scrape((await http.get("/metrics")).text)
        assert (found["sglang:generation_tokens_total"], found["sglang:prompt_tokens_total"]) == (3, 2)
        assert (found["sglang:gen_throughput"], found["sglang:num_requests_total"]) == (0, 1)
        assert found["sglang:http_requests_active|/v1/completions|POST"] == 0

    asyncio.run(story())


@pytest.mark.parametrize(
    ("added", "now", "right"),
    [
        ([(10.0, 4)], 10.0, 4),  # over one second at least
        ([(10.0, 4), (11.5, 4)], 12.0, 4),
        ([(10.0, 4), (14.0, 6)], 14.0, 2.5),
        ([(10.0, 4)], 15.0, 0),
        ([(1.0, 100), (10.0, 4)], 12.0, 2),
        ([], 1.0, 0),
    ],
)
def test_the_throughput_is_that_of_the_last_seconds(added: list[tuple[float, int]], now: float, right: float) -> None:
    throughput = Throughput()
    for at, tokens in added:
        throughput.add(round(at * SECOND), tokens)
    assert throughput.per_second(round(now * SECOND)) == pytest.approx(right)


def test_answers_are_counted_by_endpoint_and_status_and_nothing_that_clients_make_up_is_a_label() -> None:
    with world(says("a")).http() as http:
        http.post("/v1/completions", json={"prompt": "x"})
        http.post("/v1/completions", json={})
        for path in ("/a", "/b"):
            http.get(path)
        found = scrape(http.get("/metrics").text)
    assert found["sglang:http_requests_total|/v1/completions|POST"] == 2
    assert found["sglang:http_responses_total|/v1/completions|POST|200"] == 1
    assert found["sglang:http_responses_total|/v1/completions|POST|400"] == 1
    assert found["sglang:http_responses_total|other|GET|404"] == 2


def test_a_request_that_is_aborted_counts_as_one_and_as_aborted() -> None:
    with world(lambda request, payload: Script(failure=Cause.ABORTED), answers={"metrics": {}}).http() as http:
        http.post("/v1/completions", json={"prompt": "x"})
        found = scrape(http.get("/metrics").text)
    assert (found["sglang:num_requests_total"], found["sglang:num_aborted_requests_total"]) == (1, 1)


def test_kv_that_was_handed_over_is_counted_in_bytes_and_time() -> None:
    stats = RequestStats()
    sent = record(kv_pages=4, kv_bytes=8_000_000, ledger=((SENDING, 2_000_000), ("prefill_waiting", 500_000_000)))
    for one in (sent, record(), record(kv_pages=4, kv_bytes=5, is_failed=True)):
        stats.add(one)
    text = Exporter(stats, model_name="toy", engine_type="prefill").render({}).decode()
    assert "tandem:kv_transfer_bytes_total" in text
    assert (stats.kv_bytes, stats.transfer_ms.total, stats.transfer_speed.total) == (8_000_000, 2.0, 4.0)
    assert stats.queue.total == pytest.approx(0.5)
    alone = Exporter(stats, model_name="toy", engine_type="unified").render({}).decode()
    assert "kv_transfer" not in alone, "nobody hands anything over there"


def test_the_size_of_the_cache_is_told_as_gateways_look_for_it() -> None:
    with world(answers={"metrics": {"page_size": 16, "num_pages": 100}}).http() as http:
        assert scrape(http.get("/metrics").text)["sglang:cache_config_info|100|16"] == 1


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    burst = Script([*b"abcd"], is_burst=True)
    with world(lambda request, payload: burst, answers={"metrics": {}}).http() as http:
        http.post("/v1/completions", json={"prompt": "xy", "max_tokens": 4})
        found = scrape(http.get("/metrics").text)
    assert found["sglang:inter_token_latency_seconds_count"] == 3
    assert found["sglang:inter_token_latency_seconds_sum"] == 0


def test_failures_and_refusals_are_counted_by_cause() -> None:
    with world(lambda request, payload: Script(failure=Cause.PEER_LOST)).http() as http:
        http.post("/v1/completions", json={"prompt": "x"})
        http.post("/v1/completions", json={"prompt": ""})
        found = scrape(http.get("/metrics").text)
    assert found["tandem:requests_failed_total|peer_lost"] == 1
    assert found["tandem:requests_failed_total|invalid_value"] == 1
    assert found["sglang:num_requests_total"] == 1
    assert found["sglang:time_to_first_token_seconds_count"] == 0


def test_the_nodes_numbers_are_exported_whatever_they_are() -> None:
    numbers = {
        "num_running_reqs": 2,
        "num_prefill_retries_total{reason=forced}": 4,
        "num_prefill_retries_total{reason=not_ready}": 1,
        "tandem:open_rooms": 7,
    }
    with world(answers={"metrics": numbers}).http() as http:
        text = http.get("/metrics").text
    found = scrape(text)
    assert found["sglang:num_running_reqs"] == 2
    assert found["sglang:num_prefill_retries_total|forced"] == 4
    assert found["sglang:num_prefill_retries_total|not_ready"] == 1
    assert found["tandem:open_rooms"] == 7
    assert "# TYPE sglang:num_running_reqs gauge" in text
    assert "# TYPE sglang:num_prefill_retries_total counter" in text


def test_a_scrape_works_while_the_node_does_not() -> None:
    with world(is_ready=False).http() as http:
        response = http.get("/metrics")
    assert response.status_code == 200
    assert scrape(response.text)["sglang:num_requests_total"] == 0


def test_servers_and_routers_say_in_which_format_their_numbers_are() -> None:
    routing = TestClient(RouterApp(RouterConfig(workers=(), allowed_host=("testserver",))).app)
    for http in (world().http(), routing):
        kind = http.get("/metrics").headers["content-type"]
        assert kind.startswith("text/plain; version="), kind


def test_the_nodes_histograms_are_exported_as_histograms() -> None:
    node = {"wait_bucket{le=0}": 3, "wait_bucket{le=5}": 4, "wait_bucket{le=+Inf}": 6, "wait_count": 6, "wait_sum": 50}
    text = Exporter(RequestStats(), model_name="toy", engine_type="unified").render({0: {**node, "idle": 1}}).decode()
    assert "# TYPE sglang:wait histogram" in text
    found = {name: value for name, value in scrape(text).items() if "wait" in name or "idle" in name}
    assert found == {
        "sglang:wait_bucket|0": 3,
        "sglang:wait_bucket|5": 4,
        "sglang:wait_bucket|+Inf": 6,
        "sglang:wait_count": 6,
        "sglang:wait_sum": 50,
        "sglang:idle": 1,
    }


def test_what_workers_count_is_exported_under_their_own_ranks_and_nothing_for_one_that_did_not_count() -> None:
    workers = {(0, 0, 0): {"live_rooms": 2, "pinned_pages": 9}, (1, 0, 0): {"live_rooms": 0}}
    text = Exporter(RequestStats(), model_name="toy", engine_type="prefill").render({}, workers).decode()
    found = {
        (sample.name, sample.labels["engine_type"], sample.labels["tp_rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tandem:worker_")
    }
    assert found == {
        ("tandem:worker_live_rooms", "prefill", "0"): 2,
        ("tandem:worker_live_rooms", "prefill", "1"): 0,
        ("tandem:worker_pinned_pages", "prefill", "0"): 9,
    }


def test_what_workers_add_up_is_a_counter_and_what_they_hold_a_gauge() -> None:
    workers = {(0, 0, 0): {"live_rooms": 2, "storage_errors_total": 1}}
    text = Exporter(RequestStats(), model_name="toy", engine_type="prefill").render({}, workers).decode()
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert types["tandem:worker_storage_errors"] == "counter"
    assert types["tandem:worker_live_rooms"] == "gauge"


def test_no_number_is_exported_for_a_rank_that_did_not_count_it() -> None:
    """The API process counts for the server, whose numbers have no rank; a node for its DP rank."""
    nodes = {3: {"num_queue_reqs": 1.0, "page_size": 16, "num_pages": 9, "wait_bucket{le=+Inf}": 1, "wait_sum": 2}}
    stats = RequestStats()
    stats.add(record())
    for family in text_string_to_metric_families(
        Exporter(stats, model_name="toy", engine_type="prefill").render(nodes).decode()
    ):
        is_of_node = family.name.removeprefix("sglang:") in (
            "num_queue_reqs",
            "wait",
            "cache_config_info",
            "page_size",
            "num_pages",
        )
        for sample in family.samples:
            ranks = {name: value for name, value in sample.labels.items() if name.endswith("_rank")}
            assert ranks == ({"tp_rank": "0", "pp_rank": "0", "dp_rank": "3"} if is_of_node else {}), sample


def test_keys_are_names_with_or_without_labels() -> None:
    assert parse_key("a_total") == ("a_total", {})
    assert parse_key('a{x=1,y="two"}') == ("a", {"x": "1", "y": "two"})


def test_a_failed_request_counts_its_first_token_but_no_end_to_end_latency() -> None:
    stats = RequestStats()
    stats.add(record(is_failed=True, outcome="deadline_exceeded"))
    assert sum(stats.ttft.counts) == 1
    assert sum(stats.e2e.counts) == 0
    assert stats.failures == {"deadline_exceeded": 1}


def test_the_time_per_token_leaves_out_the_first() -> None:
    stats = RequestStats()
    stats.add(record())
    assert stats.per_token.total == pytest.approx(0.25)


def test_label_values_with_quotes_survive() -> None:
    page = Exporter(RequestStats(), model_name='a"b\\c', engine_type="unified").render({}).decode()
    families = text_string_to_metric_families(page)
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {'a"b\\c'}


def test_a_finished_request_is_one_json_line_with_its_ledger() -> None:
    stream = io.StringIO()
    RequestLog("json", stream).write(record(room=5))
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["rid"], fields["outcome"], fields["path"], fields["room"]) == ("r", "stop", "remote", 5)
    assert fields["ledger"] == {"edge_receive": 400_000_000, "queue": 600_000_000}
    assert "stage" not in fields


def test_the_line_of_a_failed_request_says_in_which_wait_for_how_long_and_on_whom() -> None:
    failing = world(lambda request, payload: Script(failure=Cause.PEER_LOST))
    with failing.http() as http:
        http.post("/v1/completions", json={"prompt": "x"})
    (line,) = failing.log.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["outcome"], fields["stage"], fields["waited_seconds"]) == ("peer_lost", "transfer", 1.5)
    assert (fields["peer"], fields["detail"]) == ("other", "peer lost: as scripted")


def test_a_finished_request_is_one_line_of_text() -> None:
    stream = io.StringIO()
    lost = record(outcome="peer_lost", is_failed=True, stage="transfer", detail="a\nb", peer="p", waited_seconds=1.5)
    RequestLog("text", stream).write(lost)
    (line,) = stream.getvalue().splitlines()
    assert "request r /generate peer_lost" in line
    for part in ("ttft=1000.0ms", "queue=600.0", "stage=transfer waited=1.500s peer=p", r"'a\nb'"):
        assert part in line


def test_a_closed_log_does_not_stop_serving(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    log = RequestLog("json", stream)
    log.write(record())
    log.write(record())
    assert capsys.readouterr().err == ""


def test_a_log_on_a_full_disk_goes_on_when_there_is_room_again() -> None:
    class Disk(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "no space left on device")
            return super().write(text)

    disk = Disk()
    log = RequestLog("json", disk)
    log.write(record())
    disk.is_full = False
    log.write(record())
    assert len(disk.getvalue().splitlines()) == 1
