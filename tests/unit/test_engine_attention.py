"""What every attention backend of the table has to do that runs on a CPU: compared with attention written out in fp64,
row by row. What needs a device, or is interpreted, is in `tests/gpu`.
"""

import pytest
import torch

from attention_world import HEAD_DIM, World
from tandem.config import flags
from tandem.engine.attention import torch_sdpa
from tandem.engine.attention.base import AttentionRules, attention_backend
from tandem.engine.attention.table import ATTENTION_BACKENDS, DEFAULT_ATTENTION_BACKEND
from tandem.engine.model_config import ModelError

ON_CPU = [name for name in ATTENTION_BACKENDS if name != "triton"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize(("heads", "page_size"), [((6, 2), 4), ((3, 3), 16), ((5, 1), 1)], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_query_sees_its_keys_and_no_others(
    backend: str, heads: tuple[int, int], page_size: int, window: int | None, deterministic: bool
) -> None:
    world = World(backend, heads, page_size, window, deterministic)

    for out, expected in world.play():
        assert out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("windows", [(5, None), (None, 30), (3, 17)], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_layer_has_its_own_window(
    backend: str, windows: tuple[int | None, int | None], deterministic: bool
) -> None:
    rules = AttentionRules(windows, HEAD_DIM**-0.5)
    world = World(backend, (6, 2), 4, deterministic=deterministic, rules=rules)

    for out, expected in world.play():
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "rules",
    [
        AttentionRules((None, None), 0.7),
        AttentionRules((5, None), HEAD_DIM**-0.5, soft_cap=0.8),
        AttentionRules((None, 30), 0.2, soft_cap=3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "page_size"), [((6, 2), 4), ((3, 3), 16), ((5, 1), 1)], ids=str)
@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "native"])
def test_scores_are_scaled_and_capped(
    backend: str, heads: tuple[int, int], page_size: int, rules: AttentionRules, deterministic: bool
) -> None:
    world = World(backend, heads, page_size, deterministic=deterministic, rules=rules)

    for out, expected in world.play():
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_capped_scores_of_many_queries_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "SCORE_ELEMENTS", 1000)
    rules = AttentionRules((7, None), HEAD_DIM**-0.5, soft_cap=0.8)

    for out, expected in World("torch_native", (6, 2), 4, rules=rules).play():
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", [AttentionRules((None,), 0.7), AttentionRules((None,), HEAD_DIM**-0.5, 50.0)])
def test_native_kernels_refuse_scores_that_they_do_not_compute(rules: AttentionRules) -> None:
    with pytest.raises(ModelError, match=r"a soft cap, or a divisor .* use --attention-backend torch_native"):
        World("native", (6, 2), 4, rules=rules)


def test_float16_is_torchs() -> None:
    with pytest.raises(ModelError, match=r"it needs .* float32 or bfloat16 on the CPU"):
        World("native", (6, 2), 4, dtype=torch.float16)

    for out, expected in World("auto", (6, 2), 4, dtype=torch.float16).play():
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ON_CPU)
def test_what_was_returned_is_not_touched_again(backend: str) -> None:
    world = World(backend, (6, 2), 4)
    (first, _), *_ = world.step((1, 0, 40))
    copy = first.clone()

    world.step((3, 0, 33))

    assert torch.equal(first, copy)


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=f"'fastest' is not known; known are {', '.join(ATTENTION_BACKENDS)}"):
        attention_backend("fastest")


def test_the_flag_offers_what_the_table_has() -> None:
    (found,) = [field for name, field in flags() if name == "--attention-backend"]

    assert found.metadata["choices"] == tuple(ATTENTION_BACKENDS)
    assert found.default == DEFAULT_ATTENTION_BACKEND == "auto"
