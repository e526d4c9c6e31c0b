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


def test_virtual_time_makes_the_same_numbers_twice(bench: ModuleType) -> None:
    first, second = (served(bench, SEEDS_RULE, least_share=0.5) for _ in range(2))
    assert first == second
