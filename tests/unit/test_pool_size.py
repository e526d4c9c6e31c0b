"""How many pages a server's KV pool has, and how many of them what layers with a window need."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # settings by name

import pytest
import torch

from tandem.cli.failure import CommandFailed
from tandem.cli.serve import for_task, read_facts
from tandem.config import ServerConfig
from tandem.core.settings import WindowSettings
from tandem.engine import machine_memory, weights
from tandem.engine.kv_memory import KvShape
from tandem.server.pool_size import PoolSize, least_parts, pool_pages, pool_size
from tandem.server.processes import ServerFailure
from tandem.server.whole_pages import without_effect_on_windows

MINI = Path(__file__).parents[2] / "src/tandem/bundled/mini"
TOKEN_BYTES = 4 * 4 * 2 * 32 * 4  # KV heads, layers, key and value, head_dim, fp32
WINDOW = 100
CONTEXT = 4096


def mini_pool(*, left: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Pages of a pool for the bundled model where so many bytes are left beside its weights."""
    model = weights.load(MINI)
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: model.weight_bytes + left)
    return pool_pages(ServerConfig(model="tandem/mini", **settings), model)


def test_what_is_told_to_fit_fits_and_one_page_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 100 * 16 * TOKEN_BYTES + 5

    with pytest.raises(ServerFailure, match="at most 1600 tokens fit"):
        mini_pool(left=left, monkeypatch=monkeypatch, max_total_tokens=1601)

    assert mini_pool(left=left, monkeypatch=monkeypatch, max_total_tokens=1600) == 100


def test_a_share_of_the_machine_is_no_more_than_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 100 * 16 * TOKEN_BYTES

    assert mini_pool(left=left, monkeypatch=monkeypatch, mem_fraction_static=0.99) == 100
    with pytest.raises(ServerFailure, match="the KV pool has 0 pages"):
        mini_pool(left=0, monkeypatch=monkeypatch, mem_fraction_static=0.99)


def test_packed_weights_are_counted_for_each_worker_that_has_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped ones are shared by all, and packed ones by the shards and stages of a replica."""
    packed, mapped = (replace(weights.load(MINI), is_packed=is_packed) for is_packed in (True, False))
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: 2 * packed.weight_bytes + 200 * 16 * TOKEN_BYTES)

    def pages(model: weights.LoadedModel, **settings: Any) -> int:
        return pool_pages(ServerConfig(model="tandem/mini", mem_fraction_static=0.99, **settings), model)

    more = packed.weight_bytes // (2 * 16 * TOKEN_BYTES)
    assert pages(packed, dp_size=2) == pages(packed, attn_cp_size=2) == 100
    assert pages(mapped, dp_size=2) == pages(packed, tp_size=2) == pages(packed, pp_size=2) == 100 + more


# --- layers with a window --------------------------------------------------------------------------------------------


def model_of(*windows: int | None) -> Any:
    """One layer for each; None: without a window. Pages of 16 tokens have 32 KiB of each."""
    windowed = tuple(layer for layer, window in enumerate(windows) if window is not None)
    config = SimpleNamespace(
        attention_layers=range(len(windows)), max_context=CONTEXT, window_of=lambda layer: windows[layer]
    )
    shape = KvShape(len(windows), num_kv_heads=4, head_dim=64, windowed=windowed)
    return SimpleNamespace(
        config=config,
        kv_shape=shape,
        dtype=torch.float32,
        device="cpu",
        weight_bytes=0,
        is_packed=False,
        max_context=CONTEXT,
    )


def size(model: Any, **settings: Any) -> PoolSize:
    return pool_size(ServerConfig(model="some", **settings), model, least=lambda pages: pages)


def why_idle(window: int | None, **settings: Any) -> list[str]:
    return without_effect_on_windows(ServerConfig(model="some", **settings), window)


def flag_of(settings: dict[str, Any]) -> str:
    """Its only one."""
    (name,) = settings
    return "--" + name.replace("_", "-")


def test_pages_of_a_model_without_windows_stay_whole() -> None:
    assert size(model_of(None, None), max_total_tokens=1600) == PoolSize(100)
    assert size(model_of(None, CONTEXT), max_total_tokens=1600) == PoolSize(100)


@pytest.mark.parametrize("settings", [{"swa_full_tokens_ratio": 0.5}, {"disable_hybrid_swa_memory": True}])
def test_a_flag_of_windows_that_does_nothing_is_refused_with_the_reason(settings: dict[str, Any]) -> None:
    assert why_idle(WINDOW, **settings) == []
    for window, more, reason in (
        (None, {}, "no layer of this model has a window shorter than its context"),
        (WINDOW, {"device": "cuda"}, "pages stay whole with --device cuda"),
    ):
        assert why_idle(window, **more) == []
        assert why_idle(window, **settings, **more) == [f"{flag_of(settings)} does nothing: {reason}"]


def test_a_flag_of_windows_is_refused_before_anything_starts() -> None:
    for config in (
        ServerConfig(model="tandem/mini", swa_full_tokens_ratio=0.5),
        ServerConfig(model="tandem/mini", disable_hybrid_swa_memory=True),
    ):
        with pytest.raises(CommandFailed, match="does nothing: no layer of this model has a window") as refused:
            for_task(config, read_facts(MINI, config))
        assert refused.value.is_wrong_usage


@pytest.mark.parametrize(
    ("role", "is_whole"), [("prefill", True), ("decode", False), ("unified", False)]
)  # the one whose pages are read by it
def test_pages_that_nixl_reads_stay_whole(role: str, is_whole: bool) -> None:
    settings: dict[str, Any] = {
        "disaggregation_mode": "null" if role == "unified" else role,
        "disaggregation_transfer_backend": "auto" if role == "unified" else "nixl",
        "max_total_tokens": 16 * 1000,
    }
    found = size(model_of(None, WINDOW), **settings)
    assert found == PoolSize(1000, None if is_whole else WindowSettings(WINDOW, 800))
    refused = why_idle(WINDOW, swa_full_tokens_ratio=0.5, **settings)
    assert [line.startswith("--swa-full-tokens-ratio does nothing: pages stay whole with") for line in refused] == (
        [True] * is_whole
    )


def test_pages_that_are_staged_stay_whole_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_STAGED_KV", "1")
    assert size(model_of(None, WINDOW), max_total_tokens=1600) == PoolSize(100)
    (refused,) = why_idle(WINDOW, swa_full_tokens_ratio=0.5)
    assert "pages stay whole with TANDEM_TEST_STAGED_KV" in refused


def test_windows_get_the_share_that_is_asked_for_if_one_request_runs_in_it() -> None:
    model = model_of(None, WINDOW)
    settings: dict[str, Any] = {"max_total_tokens": 1600, "chunked_prefill_size": 128}
    found = size(model, swa_full_tokens_ratio=0.4, **settings)
    assert found == PoolSize(100, WindowSettings(WINDOW, 40))
    assert size(model, disable_hybrid_swa_memory=True, **settings) == PoolSize(100)
    with pytest.raises(ServerFailure, match="one request may need 384; raise it"):
        size(model, swa_full_tokens_ratio=0.2, **settings)


def test_one_request_has_its_parts_where_decoding_needs_more_than_its_prompt_does() -> None:
    """Two batches of a token each are launched ahead while a third token is waited for."""
    config = ServerConfig(model="some", page_size=1, chunked_prefill_size=1)
    assert config.window_depth == 2
    assert least_parts(config, model_of(None, WINDOW), WINDOW, num_pages=10_000) == WINDOW + 3


def test_where_the_usual_share_would_refuse_a_request_pages_stay_whole() -> None:
    """A prompt that is sent has all its parts at once."""
    model = model_of(None, WINDOW)
    for context, is_whole in ((2000, True), (1200, False)):
        found = size(model, disaggregation_mode="prefill", max_total_tokens=1600, context_length=context)
        assert (found.windows is None) is is_whole


def test_the_memory_that_windows_leave_is_used_for_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: 1000 * 2 * (32 << 10))
    assert size(model_of(None, WINDOW), mem_fraction_static=0.9).num_pages == 999
    assert size(model_of(None, WINDOW), mem_fraction_static=0.9, disable_hybrid_swa_memory=True).num_pages == 900
