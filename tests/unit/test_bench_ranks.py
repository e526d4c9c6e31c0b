"""`bench/ranks.py` without its servers: who is chosen by the dispatcher that it times, and how it makes its ratios."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tandem.core.settings import LoadBalanceMethod

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("ranks")


def test_what_is_timed_gives_every_rank_its_share(bench: ModuleType) -> None:
    assert bench.METHODS
    for method in bench.METHODS:
        nanos, shares = bench.dispatched(4, method, 40)
        assert nanos > 0
        assert shares == [10] * 4, method
    nanos, shares = bench.submitted(4, 40)
    assert nanos > 0
    assert shares == [10] * 4


def test_every_method_of_dispatch_has_a_row_for_one_rank_and_for_four(bench: ModuleType) -> None:
    rows = bench.measure_dispatch(2, 20)
    ways = {row["load"] for row in rows}
    assert {*LoadBalanceMethod} - {LoadBalanceMethod.AUTO} < ways
    assert {(row["load"], row["server"]) for row in rows} == {(way, rank) for way in ways for rank in ("dp 1", "dp 4")}
    assert all(row["ratio"] == 1 for row in rows if row["server"] == "dp 1")


def test_steps_are_timed_of_one_two_four_and_eight_workers(bench: ModuleType) -> None:
    assert {tp * pp for tp, pp in bench.SPREAD.values()} == {1, 2, 4, 8}


def test_a_ratio_compares_what_was_measured_together(bench: ModuleType) -> None:
    drifting = [1.0, 10.0, 100.0]
    assert bench.ratios_to_one([2.0, 20.0, 350.0], drifting) == {"ratio": 2.0, "range": [2.0, 3.5]}


def test_a_short_prompt_gains_nothing_from_stages_and_a_long_one_nearly_all(bench: ModuleType) -> None:
    assert bench.ideal_ttft(bench.CHUNK, 1, 4) == 1.0
    assert bench.ideal_ttft(1000 * bench.CHUNK, 1, 4) == pytest.approx(0.25, rel=0.01)
    assert bench.ideal_ttft(bench.CHUNK, 2, 1) == 0.5


def test_tokens_that_come_together_share_the_wait_for_them(bench: ModuleType) -> None:
    assert bench.gaps([1.0, 2.0, 4.0, 4.0]) == [1.0, 1.0, 1.0]
