"""A server with the prefill delayer: the same tokens, fewer and larger prompt batches, and metrics that tell of it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Server, cluster

FLAGS = (
    "--enable-prefill-delayer",
    *("--prefill-delayer-queue-min-ratio", "0.5"),
    *("--prefill-delayer-max-delay-ms", "500"),
    *("--prefill-delayer-max-delay-passes", "40"),
    *("--prefill-delayer-forward-passes-buckets", "2", "10", "90"),
    *("--prefill-delayer-wait-seconds-buckets", "0.05", "2.5"),
)
CLIENTS, ROUNDS = 8, 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with cluster(unified=True, flags=FLAGS) as it:
        assert it.unified is not None
        yield it.unified


def ask(server: Server, number: int) -> list[int]:
    prompt = list(range(20 + number, 60 + number))
    asked = {"ignore_eos": True, "min_new_tokens": 1}
    reply = server.generate(prompt, max_new_tokens=8 + 9 * number % 31, sampling_params=asked)
    tokens: list[int] = reply["output_ids"]
    return tokens


def metrics(server: Server) -> dict[str, float]:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_prompts_wait_for_each_other_and_nobody_gets_other_tokens(server: Server) -> None:
    alone = [ask(server, number) for number in range(CLIENTS * ROUNDS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(lambda number: ask(server, number), range(CLIENTS * ROUNDS)))
    assert together == alone
    found = metrics(server)
    outcomes = {key: value for key, value in found.items() if "prefill_delayer_outcomes_total" in key}
    assert sum(value for key, value in outcomes.items() if 'output_reason="delay"' in key) > 0
    count = sum(value for key, value in found.items() if "delayer_wait_seconds_count" in key)
    at_once = sum(value for key, value in found.items() if re.search(r'delayer_wait_seconds_bucket.*le="0\.0"', key))
    assert 0 < at_once < count, "some prompt batches waited, and some did not"
    waited_s = sum(value for key, value in found.items() if "delayer_wait_seconds_sum" in key)
    assert 0 < waited_s < 1.0 * count
    assert sum(value for key, value in found.items() if "inter_token_latency_seconds_count" in key) > 0


def served_together(*flags: str) -> dict[str, float]:
    """Metrics of another server, of which all ask at once."""
    with cluster(
        unified=True, flags=("--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0.5", *flags)
    ) as it:
        server = it.unified
        assert server is not None
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda number: ask(server, number), range(CLIENTS * ROUNDS)))
        return metrics(server)


def test_nobody_waits_for_more_batches_than_the_flag_says() -> None:
    """Two allowed passes are one denial at most."""
    found = served_together("--prefill-delayer-max-delay-passes", "2")
    (count,) = (value for key, value in found.items() if "delayer_wait_forward_passes_count" in key)
    (at_once,) = (value for key, value in found.items() if re.search(r'wait_forward_passes_bucket.*le="0\.0"', key))
    (by_one,) = (value for key, value in found.items() if re.search(r'wait_forward_passes_bucket.*le="1\.0"', key))
    assert at_once < by_one == count


def test_below_the_watermark_nobody_waits() -> None:
    found = served_together("--prefill-delayer-token-usage-low-watermark", "1")
    reasons = {re.search(r'output_reason="(\w*)"', key) for key in found if "delayer_outcomes_total" in key}
    named = {reason.group(1) for reason in reasons if reason is not None}
    assert "token_watermark" in named
    assert "delay" not in named


def test_the_histograms_have_the_bounds_that_the_flags_name(server: Server) -> None:
    """90 batches are more than anybody waits for; 0 and the last pass are there anyway."""
    bounds = re.compile(r'sglang:prefill_delayer_wait_(\w+)_bucket.*le="([^"]*)"')
    found = [match.groups() for match in map(bounds.match, metrics(server)) if match is not None]
    assert [bound for unit, bound in found if unit == "forward_passes"] == ["0.0", "2.0", "10.0", "39.0", "+Inf"]
    assert [bound for unit, bound in found if unit == "seconds"] == ["0.0", "0.05", "2.5", "+Inf"]
