"""`bench/delayer.py` in virtual time: where a prompt batch is dear, the queue gate is worth what the report says."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tandem.core.settings import DelayerSettings

BENCH = Path(__file__).parents[2] / "bench"
SEEDS_RULE = DelayerSettings(max_delay_passes=1_000_000, queue_min_ratio=0.2, window=1_000_000)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("delayer")


def served(bench: ModuleType, delayer: DelayerSettings | None, *, least_share: float) -> dict[str, float]:
    load = bench.Load(24, prompt=16, output=100, least_share=least_share, rounds=4, chunk=4096)
    serving = bench.Serving(load, bench.ModelledWorker(bench.PROFILES["190"]), delayer, seed=1)
    bench.run_in_lockstep([serving])
    found: dict[str, float] = serving.numbers()
    return found


@pytest.mark.parametrize("delayer", [SEEDS_RULE, DelayerSettings(queue_min_ratio=0.2)])
def test_varying_outputs_cost_throughput_and_the_queue_gate_brings_some_back(
    bench: ModuleType, delayer: DelayerSettings
) -> None:
    equal = served(bench, None, least_share=1.0)
    off = served(bench, None, least_share=0.5)
    gate = served(bench, delayer, least_share=0.5)
    assert off["tokens_per_second"] < 0.6 * equal["tokens_per_second"]
    assert off["prompts_per_batch"] < equal["prompts_per_batch"] / 4
    assert off["gap_p99_ms"] > 10 * equal["gap_p99_ms"]
    assert gate["tokens_per_second"] > 1.16 * off["tokens_per_second"]
    assert gate["prompts_per_batch"] > 1.5 * off["prompts_per_batch"]


def test_the_gate_changes_nothing_where_outputs_are_equally_long_and_all_prompts_fit_one_batch(
    bench: ModuleType,
) -> None:
    assert served(bench, SEEDS_RULE, least_share=1.0) == served(bench, None, least_share=1.0)


def found(bench: ModuleType, profile: str, *variants: str, least_share: float = 0.8) -> list[dict[str, float]]:
    load = bench.Load(32, prompt=1000, output=600, least_share=least_share, rounds=6, chunk=16_384)
    all_ = [
        bench.Serving(load, bench.ModelledWorker(bench.PROFILES[profile]), bench.VARIANTS[variant], seed=1)
        for variant in variants
    ]
    bench.run_in_lockstep(all_)
    return [serving.numbers() for serving in all_]


@pytest.mark.parametrize(
    ("profile", "least_share"),
    [
        ("190", 0.8),
        pytest.param("20", 0.8, marks=pytest.mark.slow),
        pytest.param("60", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_gate_that_tunes_itself_is_about_as_good_as_the_best_ratio_and_never_worse_than_none(
    bench: ModuleType, profile: str, least_share: float
) -> None:
    numbers = found(bench, profile, "off", "0.2", "0.5", "auto", least_share=least_share)
    off, few, many, auto = (one["tokens_per_second"] for one in numbers)
    assert auto >= 0.97 * max(off, few, many)
    assert auto >= 0.995 * off


@pytest.mark.slow
def test_with_time_as_its_only_bound_a_gate_that_tunes_itself_holds_nobody_for_all_of_it(bench: ModuleType) -> None:
    off, fixed, auto = found(bench, "60", "off", "0.2 no bound", "auto no bound")
    assert auto["ttft_p99_ms"] < fixed["ttft_p99_ms"] / 2
    assert auto["tokens_per_second"] > max(off["tokens_per_second"], fixed["tokens_per_second"])


def test_where_tokens_are_all_that_a_batch_costs_nobody_waits(bench: ModuleType) -> None:
    off, fixed, auto = found(bench, "0", "off", "0.5", "auto")
    assert auto == off != fixed


def test_virtual_time_makes_the_same_numbers_twice(bench: ModuleType) -> None:
    first, second = (served(bench, SEEDS_RULE, least_share=0.5) for _ in range(2))
    assert first == second
