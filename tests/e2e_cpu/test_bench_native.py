"""Benches that compare libraries give each of them the weights as it reads them, and count the bytes of all."""

import importlib
from pathlib import Path

import pytest
import torch

from tandem.engine.native import library

BENCH = Path(__file__).parents[2] / "bench"
MINI = Path(__file__).parents[2] / "src/tandem/bundled/mini"


def test_torch_is_measured_with_weights_in_rows_whatever_is_packed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv(library.SWITCH, "")
    native, quantised = importlib.import_module("native"), importlib.import_module("quantised")
    models = {name: native.loaded(MINI, name, "bfloat16") for name in (native.TORCH, native.NARROW)}
    assert not any(model.is_packed for model in models.values())

    best = library.available()[:1]
    models |= {name: native.loaded(MINI, name, "bfloat16") for name in best}
    assert [models[name].is_packed for name in best] == [library.opened(*best).packs(torch.bfloat16) for _ in best]
    assert len({quantised.step_bytes(model) for model in models.values()}) == 1, "all sizes here are whole blocks"
