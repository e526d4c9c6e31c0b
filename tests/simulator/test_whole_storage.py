"""Whole clusters with storage below host memory: a folder of pages that all servers share and that outlives them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.page_files import HEADER_BYTES, PageFiles
from tandem.simulator.actors.storage import StorageFaults
from tandem.simulator.whole.disk import SharedFolder
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.world import run_options, run_seed

SEEDS = (336, 190, 248)  # pages are written, and read by whoever needs them again


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often files were read and written from here on."""
    found: Counter[str] = Counter()

    def counts(name: str) -> Callable[..., object]:
        original = getattr(SharedFolder, name)

        def call(folder: SharedFolder, *args: object) -> object:
            done = original(folder, *args)
            found[name] += 1
            return done

        return call

    for name in ("read", "write"):
        monkeypatch.setattr(SharedFolder, name, counts(name))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_of_a_cluster_with_storage_ends_as_promised(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = counted(monkeypatch)
    result = run_seed(seed)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert files["write"] > 0
    assert files["read"] > 0 or seed == SEEDS[-1]


@pytest.mark.slow
@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes() -> None:
    assert run_seed(SEEDS[0]).log_hash == run_seed(SEEDS[0]).log_hash


def test_a_disk_that_spoils_everything_costs_time_only() -> None:
    spoilt = StorageFaults(slow=0.2, full=0.2, short=0.2, stale=0.2, corrupt=0.2, vanished=0.2, broken=0.2)
    result = run_options(replace(draw_options(SEEDS[0]), disk=spoilt))
    assert not result.invariant, f"{result.line}: {result.detail}"


def test_pages_that_are_taken_for_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageFiles, "page_in", lambda files, content, page_hash: content[HEADER_BYTES:])
    options = replace(draw_options(SEEDS[1]), disk=StorageFaults(stale=1.0))
    assert run_options(options).invariant
