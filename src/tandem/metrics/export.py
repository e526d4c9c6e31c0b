"""`/metrics`: the sums of `RequestStats` and the node's own numbers, in Prometheus' text format.

Names are `sglang:*` where the meaning is SGLang's, so that existing boards, gateways and benchmarks find them, and
`tandem:*` otherwise. The node's numbers come as a flat mapping whose keys are metric names without prefix, optionally
with labels (`num_prefill_retries_total{reason=forced}`): whatever the node counts is exported, nothing else is. What
has a `_bucket{le=...}` is a histogram, with its `_count` and `_sum`.

Labels say who has counted. The API process counts for the server, whose numbers have no rank. A node counts for its
replica, which is its DP rank and, as with SGLang, goes by the ranks of its first worker. What a worker counts of itself
is `tandem:worker_*` under its own ranks, and not there at all for one that has not counted.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tandem.metrics.http_counts import HttpCounts
from tandem.metrics.request_stats import Histogram, RequestStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
Ranks = tuple[int, int, int]  # TP, PP, DP
Labels = tuple[str, ...]  # values of SERVER_LABELS or of LABELS
SERVER_LABELS = ("model_name", "engine_type")
LABELS = (*SERVER_LABELS, "tp_rank", "pp_rank", "dp_rank")
KEY = re.compile(r"^([A-Za-z_][\w:]*?)(?:\{([^}]*)\})?$")

HELP = {
    "num_running_reqs": "Requests in the running batch.",
    "num_queue_reqs": "Requests that wait to be computed, but for those without READY.",
    "num_used_tokens": "Tokens of KV in use.",
    "max_total_num_tokens": "Tokens of KV that fit the pool.",
    "token_usage": "Share of the KV pool in use, 0 to 1.",
    "swa_token_usage": "Share of the KV of layers with a window that requests may need at one time, 0 to 1.",
    "tandem:swa_max_total_num_tokens": "Tokens of KV of layers with a window that there is memory for.",
    "cache_hit_rate": "Share of prompt tokens found in the prefix cache, without reprocessed tokens.",
    "num_prefill_bootstrap_queue_reqs": "Prefill: requests without READY of their decode, computed or not.",
    "tandem:num_prefill_early_reqs": "Prefill: those of them that are being computed.",
    "num_prefill_inflight_queue_reqs": "Prefill: requests whose pages are being collected.",
    "num_decode_prealloc_queue_reqs": "Decode: requests without pages, because of these, their prompt or their peer.",
    "num_decode_transfer_queue_reqs": "Decode: requests whose pages are arriving.",
    "num_bootstrap_failed_reqs_total": "Requests that failed before the two sides had met.",
    "num_transfer_failed_reqs_total": "Requests whose transfer failed.",
    "num_prefill_retries_total": "Prefills that gave their pages back and ran again.",
    "prefill_delayer_outcomes_total": "Passes of the prefill delayer by what it decided.",
    "prefill_delayer_wait_forward_passes": "Passes that a prompt batch waited for; 0: none.",
    "prefill_delayer_wait_seconds": "Seconds that a prompt batch waited; 0: none.",
    "tandem:prefill_delayer_batch_cost_seconds": "What a prompt batch costs beside its tokens; 0: not known yet.",
    "tandem:prefill_delayer_wanted_reqs": "Prompts that were last worth waiting for, those that waited included.",
    "dp_cooperation_realtime_tokens_total": "DP attention: tokens computed or found cached, by ranks with prompts.",
    "dp_cooperation_forward_execution_seconds_total": "DP attention: time of batches, by ranks with prompts.",
    "num_retracted_reqs": "Requests pushed back from the running batch.",
    "gen_throughput": "Tokens generated per second.",
    "live_rooms": "Rooms with pages that a peer may read, or that are being pulled.",
    "pinned_pages": "Pages that a peer may read, or into which bytes of a peer may land.",
    "open_transfers": "Frames on their way out, and pulls with bytes on their way in.",
}


def is_part_of(key: str, histograms: Collection[str]) -> bool:
    name = parse_key(key)[0]
    return name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") in histograms


def buckets_of(name: str, node: Mapping[str, float]) -> list[tuple[str, float]]:
    """(bound, count) of a histogram among a node's numbers, in their order."""
    found = [(parse_key(key), value) for key, value in node.items()]
    return [(labels["le"], value) for (bucket, labels), value in found if bucket == name + "_bucket"]


class Exporter:
    """Renders one server's metrics with its labels."""

    def __init__(
        self, stats: RequestStats, *, model_name: str, engine_type: str, counts: HttpCounts | None = None
    ) -> None:
        self._stats = stats
        self._counts = counts or HttpCounts()
        self._is_paired = engine_type in ("prefill", "decode")
        self._server: Labels = (model_name, engine_type)

    def render(
        self,
        nodes: Mapping[int, Mapping[str, float]],
        workers: Mapping[Ranks, Mapping[str, float]] | None = None,
    ) -> bytes:
        """The whole page. `nodes` are the mappings of the nodes at this moment, by DP rank; `workers` by all ranks.
        Of both those who could be asked."""
        registry = CollectorRegistry(auto_describe=False)
        edge = [*self._edge(), *(self._transfers() if self._is_paired else ()), *self._http()]
        registry.register(FamiliesCollector([*edge, *self._nodes(nodes), *self._workers(workers or {})]))
        return generate_latest(registry)

    def _of_replica(self, dp_rank: int) -> Labels:
        return (*self._server, "0", "0", str(dp_rank))

    def gen_throughput(self) -> float:
        return self._stats.gen_throughput(time.monotonic_ns())

    def _edge(self) -> Iterable[Metric]:
        stats = self._stats
        yield self._histogram("sglang:time_to_first_token_seconds", "Arrival to first token.", stats.ttft)
        yield self._histogram("sglang:inter_token_latency_seconds", "Gap between two tokens.", stats.gap)
        yield self._histogram("sglang:e2e_request_latency_seconds", "Arrival to last token.", stats.e2e)
        yield self._histogram(
            "sglang:request_time_per_output_token_seconds", "Mean gap between tokens of a request.", stats.per_token
        )
        yield self._histogram(
            "sglang:time_per_output_token_seconds",
            "The same under the name that load generators read.",
            stats.per_token,
        )
        yield self._histogram("sglang:queue_time_seconds", "Waits in queues before the first token.", stats.queue)
        yield self._stages()
        yield self._counter("sglang:prompt_tokens", "Prompt tokens of requests that have begun.", stats.prompt_tokens)
        yield self._counter("sglang:generation_tokens", "Tokens generated so far.", stats.generation_tokens)
        yield self._gauge("sglang:gen_throughput", HELP["gen_throughput"], self.gen_throughput())
        cached = {
            "device": stats.cached_tokens - stats.host_tokens,
            "host": stats.host_tokens - stats.storage_tokens,
            "storage": stats.storage_tokens,
        }
        yield self._counters(
            "sglang:cached_tokens", "Prompt tokens found in the prefix cache, by tier.", "cache_source", cached
        )
        yield self._counter("sglang:num_requests", "Requests that ended, one per sample.", stats.requests)
        yield self._counter(
            "sglang:num_aborted_requests", "Requests that the client or an operator ended.", stats.aborted
        )
        yield self._counters(
            "tandem:requests_failed", "Requests that ended without their tokens.", "cause", stats.failures
        )
        yield self._counters(
            "tandem:requests_path", "Requests by where their prompt's KV came from.", "path", stats.paths
        )

    def _transfers(self) -> Iterable[Metric]:
        """Of KV between servers, under SGLang's names and in its units."""
        stats = self._stats
        yield self._counter("tandem:kv_transfer_bytes", "KV that was handed over.", stats.kv_bytes)
        yield self._histogram("sglang:kv_transfer_total_mb", "KV of a request, in MB.", stats.transfer_mb)
        if self._server[1] == "prefill":
            text = "Prefill: until decode had collected the KV, from when both were ready, in ms."
            yield self._histogram("sglang:kv_transfer_latency_ms", text, stats.transfer_ms)
            yield self._histogram("sglang:kv_transfer_speed_gb_s", "Prefill: bytes by that time.", stats.transfer_speed)

    def _http(self) -> Iterable[Metric]:
        counts, asked, answered = self._counts, ("endpoint", "method"), ("endpoint", "method", "status_code")
        yield self._labelled(CounterMetricFamily, "sglang:http_requests", "HTTP requests.", asked, counts.requests)
        yield self._labelled(CounterMetricFamily, "sglang:http_responses", "HTTP answers.", answered, counts.responses)
        active = "HTTP requests under way."
        yield self._labelled(GaugeMetricFamily, "sglang:http_requests_active", active, asked, counts.active)

    def _nodes(self, nodes: Mapping[int, Mapping[str, float]]) -> Iterable[Metric]:
        histograms: dict[str, HistogramMetricFamily] = {}
        numbers: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for dp_rank, node in nodes.items():
            own = self._of_replica(dp_rank)
            self._node_histograms(histograms, own, node)
            self._node_numbers(numbers, own, {key: node[key] for key in node if not is_part_of(key, histograms)})
        yield from (*histograms.values(), *numbers.values())
        yield self._cache_config(nodes)

    def _cache_config(self, nodes: Mapping[int, Mapping[str, float]]) -> Metric:
        """What gateways look for to learn how large the cache is."""
        sizes = ("page_size", "num_pages")
        family = GaugeMetricFamily("sglang:cache_config_info", "The KV pool, in labels.", labels=(*LABELS, *sizes))
        for dp_rank, node in nodes.items():
            if all(size in node for size in sizes):
                family.add_metric((*self._of_replica(dp_rank), *(f"{node[size]:g}" for size in sizes)), 1)
        return family

    def _node_histograms(
        self, families: dict[str, HistogramMetricFamily], own: Labels, node: Mapping[str, float]
    ) -> None:
        """Add those of one node. own: the values of `LABELS` for it."""
        for name in dict.fromkeys(key.partition("_bucket{")[0] for key in node if "_bucket{" in key):
            if name not in families:
                text = HELP.get(name, name.replace("_", " ") + ".")
                families[name] = HistogramMetricFamily("sglang:" + name, text, labels=LABELS)
            families[name].add_metric(own, buckets_of(name, node), node[name + "_sum"])

    def _node_numbers(
        self, families: dict[str, CounterMetricFamily | GaugeMetricFamily], own: Labels, node: Mapping[str, float]
    ) -> None:
        """Add what else one node counts."""
        for key, value in node.items():
            name, labels = parse_key(key)
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                full = name if ":" in name else "sglang:" + name
                text = HELP.get(name, name.replace("_", " ") + ".")
                families[name] = kind(full.removesuffix("_total"), text, labels=(*LABELS, *labels))
            families[name].add_metric((*own, *labels.values()), value)

    def _workers(self, workers: Mapping[Ranks, Mapping[str, float]]) -> Iterable[Metric]:
        for name in dict.fromkeys(name for numbers in workers.values() for name in numbers):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind("tandem:worker_" + name.removesuffix("_total"), HELP.get(name, name), labels=LABELS)
            for ranks, numbers in workers.items():
                if name in numbers:
                    family.add_metric((*self._server, *map(str, ranks)), numbers[name])
            yield family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=SERVER_LABELS)
        family.add_metric(self._server, histogram.buckets(), histogram.total)
        return family

    def _stages(self) -> Metric:
        text = "Parts of the time to the first token."
        family = HistogramMetricFamily("sglang:per_stage_req_latency_seconds", text, labels=(*SERVER_LABELS, "stage"))
        for stage, histogram in self._stats.stages.items():
            family.add_metric((*self._server, stage), histogram.buckets(), histogram.total)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily, name, text, (), {(): value})

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, text, (), {(): value})

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._labelled(CounterMetricFamily, name, text, (label,), {(key,): values[key] for key in values})

    def _labelled(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        values: Mapping[tuple[str, ...], float],
    ) -> Metric:
        """values: by what these labels say."""
        family = kind(name, text, labels=(*SERVER_LABELS, *labels))
        for key, value in values.items():
            family.add_metric((*self._server, *key), value)
        return family


class FamiliesCollector(Collector):
    """Hands ready families to a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def parse_key(key: str) -> tuple[str, dict[str, str]]:
    """`name{label=value,...}` in its parts. The node is ours, so a malformed key is a bug."""
    found = KEY.match(key)
    assert found is not None, f"malformed metric key {key!r}"
    pairs = [pair.split("=", 1) for pair in (found.group(2) or "").split(",") if pair]
    return found.group(1), {label.strip(): value.strip().strip('"') for label, value in pairs}
