"""The bundled model answers as many questions in few bits: a sample of what `bench/quantised.py accuracy` measures."""

import importlib
from pathlib import Path

import pytest
import torch

from tandem.cli.eval import read_problems
from tandem.cli.model_source import find_model
from tandem.engine.weights import load

BENCH = Path(__file__).parents[2] / "bench"
SAMPLE = 50


@pytest.mark.parametrize(
    ("kind", "kv_is_int8", "most_lost"),
    [pytest.param("int8", False, 1, marks=pytest.mark.slow), ("int4", False, 3), (None, True, 1)],
)
def test_few_answers_are_lost(
    kind: str | None, kv_is_int8: bool, most_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("quantised")
    folder = find_model("tandem/mini")
    plain, found = (
        bench.share_of_right_answers(load(folder, dtype="float32", **settings), folder, read_problems(None)[:SAMPLE])
        for settings in ({}, {"quantization": kind, "kv_is_int8": kv_is_int8})
    )

    assert plain > 0.9
    assert found >= plain - most_lost / SAMPLE - 1e-9
