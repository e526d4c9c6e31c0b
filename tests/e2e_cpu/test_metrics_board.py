"""What dashboards read is there, on servers of every role and the router, and the committed board asks for no more."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # JSON

import pytest
from cluster import Cluster, Server, eventually
from prometheus_client.parser import text_string_to_metric_families

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "tandem.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
EVERYWHERE = (
    *("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "gen_throughput", "num_requests_total"),
    *("time_to_first_token_seconds_count", "time_per_output_token_seconds_sum", "queue_time_seconds_bucket"),
    *("http_requests_total", "http_responses_total", "http_requests_active", "cache_config_info", "token_usage"),
)
OF_PAIRS = ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total", "kv_transfer_total_mb_count")


def page(server: Server) -> str:
    connection = http.client.HTTPConnection(server.host, server.member.port, timeout=30)
    connection.request("GET", "/metrics")
    with connection.getresponse() as reply:
        return reply.read().decode()


def names_in(text: str) -> set[str]:
    families = text_string_to_metric_families(text)
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def labels_in(text: str) -> set[str]:
    return {label for family in text_string_to_metric_families(text) for one in family.samples for label in one.labels}


def value(server: Server, name: str) -> float:
    families = text_string_to_metric_families(page(server))
    return sum(one.value for family in families for one in family.samples if one.name == name)


@pytest.fixture(scope="module")
def pages(common: Cluster) -> dict[str, str]:
    assert common.router is not None
    assert common.unified is not None
    common.router.generate("Tom has 3 apples and buys 4 more.", max_new_tokens=4)
    common.unified.generate("Tom has 3 apples and buys 4 more.", max_new_tokens=4)
    servers = {"router": common.router, "unified": common.unified}
    servers |= {"prefill": common.prefills[0], "decode": common.decodes[0]}
    eventually(lambda: value(common.prefills[0], "sglang:num_requests_total") > 0)
    return {role: page(server) for role, server in servers.items()}


def expressions(board: Any) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (it["definition"] for it in board["templating"]["list"] if "definition" in it)


def test_every_name_in_the_board_is_said_by_some_server(pages: dict[str, str]) -> None:
    said = set().union(*map(names_in, pages.values()))
    asked = {name for expr in expressions(json.loads(BOARD.read_text())) for name in re.findall(r"\w+:\w+", expr)}
    assert len(asked) > 30
    assert asked - said == set()


def test_every_label_in_the_board_is_on_some_sample(pages: dict[str, str]) -> None:
    of_prometheus, of_failures = {"instance"}, {"cause", "status"}
    said = set().union(*map(labels_in, pages.values())) | of_prometheus | of_failures
    by = [group for expr in expressions(json.loads(BOARD.read_text())) for group in re.findall(r"by \(([^)]*)\)", expr)]
    assert {label.strip() for group in by for label in group.split(",")} - said == set()


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_what_dashboards_read_is_there_in_every_role(pages: dict[str, str], role: str) -> None:
    said = names_in(pages[role])
    wanted = EVERYWHERE if role == "unified" else (*EVERYWHERE, *OF_PAIRS)
    assert {f"sglang:{name}" for name in wanted} - said == set()


def test_kv_that_travels_is_counted_on_both_sides_alike(common: Cluster, pages: dict[str, str]) -> None:
    assert common.router is not None
    prefill, decode = common.prefills[0], common.decodes[0]
    before = [value(server, "tandem:kv_transfer_bytes_total") for server in (prefill, decode)]
    requests = value(prefill, "sglang:num_requests_total")
    reply = common.router.generate("How many pears are left when 7 of 19 are eaten by a fox?", max_new_tokens=2)
    eventually(lambda: value(prefill, "sglang:num_requests_total") > requests)
    after = [value(server, "tandem:kv_transfer_bytes_total") for server in (prefill, decode)]
    moved = [now - was for now, was in zip(after, before, strict=True)]
    assert moved == [reply["meta_info"]["kv_bytes"]] * 2
    assert moved[0] > 0
    assert value(prefill, "sglang:kv_transfer_latency_ms_count") > 0
