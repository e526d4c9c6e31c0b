"""What the flags of storage mean, and which of them are refused."""

from pathlib import Path

import pytest

from tandem import storage_config
from tandem.config import ServerConfig, violations
from tandem.core.settings import PrefetchPolicy
from tandem.flag_roles import without_effect
from tandem.server.api.model_facts import page_secret
from tandem.server.node.settings import tier_settings

BELOW = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "hicache_storage_dir": "/somewhere"}


def config(**fields: object) -> ServerConfig:
    return ServerConfig(model="tandem/mini", **fields)  # type: ignore[arg-type]  # flags of any type


def test_flags_become_settings() -> None:
    extra = '{"prefetch_threshold":40,"prefetch_timeout_base":2,"prefetch_timeout_per_ki_token":0.5}'
    asked = config(**BELOW, hicache_storage_prefetch_policy="best_effort", hicache_storage_backend_extra_config=extra)
    assert violations(asked) == []
    storage = tier_settings(asked, 10).storage
    assert storage is not None
    assert storage.policy is PrefetchPolicy.BEST_EFFORT
    assert storage.min_pages == 3
    assert (storage.timeout_base_ns, storage.timeout_per_ki_token_ns) == (2_000_000_000, 500_000_000)
    assert tier_settings(config(enable_hierarchical_cache=True), 10).storage is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hicache_storage_backend": "mooncake"}, "is file or nixl"),
        ({"hicache_storage_dir": None}, "needs --hicache-storage-dir"),
        ({"hicache_storage_size": 0.0}, "must be positive"),
        ({"hicache_storage_backend_extra_config": '{"prefetch_treshold":1}'}, "takes JSON such as"),
        ({"hicache_storage_backend_extra_config": '{"prefetch_threshold":0}'}, "takes JSON such as"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changed: dict[str, object], reason: str) -> None:
    (found,) = violations(config(**{**BELOW, **changed}))
    assert reason in found


def test_nixl_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, reasons in ((True, []), (False, [storage_config.MISSING])):
        monkeypatch.setattr(storage_config, "is_nixl_installed", lambda is_there=is_there: is_there)
        assert violations(config(**{**BELOW, "hicache_storage_backend": "nixl"})) == reasons


def test_a_data_plane_by_nixl_needs_its_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(disaggregation_mode="decode", disaggregation_transfer_backend="nixl")
    for is_there in (True, False):
        monkeypatch.setattr(storage_config, "is_nixl_installed", lambda is_there=is_there: is_there)
        said = " ".join(violations(asked))
        assert ("--disaggregation-transfer-backend nixl needs NIXL: pip install" in said) is not is_there


def test_a_flag_that_would_do_nothing_is_refused() -> None:
    assert without_effect(config(**BELOW)) == []
    assert any("--hicache-storage-backend" in one for one in without_effect(config(hicache_storage_backend="file")))
    alone = config(enable_hierarchical_cache=True, hicache_storage_dir="/somewhere")
    assert any("--hicache-storage-dir" in one for one in without_effect(alone))


def test_servers_that_share_a_folder_key_their_page_hashes_alike(tmp_path: Path) -> None:
    shared = config(**{**BELOW, "hicache_storage_dir": str(tmp_path)})
    assert page_secret(shared) == page_secret(shared)
    assert page_secret(config()) != page_secret(config())
