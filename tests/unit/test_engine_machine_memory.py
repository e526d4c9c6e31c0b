"""What of the machine's memory the KV pool may have."""

import os
from pathlib import Path

from tandem.engine import machine_memory
from tandem.engine.machine_memory import bytes_left, cgroup_limits, total_bytes


def test_the_machine_has_what_it_has_or_less() -> None:
    assert 1 << 28 < total_bytes("cpu") <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_weights_take_their_part() -> None:
    assert total_bytes("cpu") - bytes_left("cpu", weight_bytes=1000) == 1000
    assert bytes_left("cpu", weight_bytes=1 << 60) == 0


def test_a_limit_of_the_container_counts(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("123456\n")
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path)

    assert total_bytes("cpu") == 123456


def test_every_limit_on_the_way_to_the_own_group_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/tandem.service\n")
    (tmp_path / "system.slice" / "tandem.service").mkdir(parents=True)
    (tmp_path / "other.slice").mkdir()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "system.slice" / "memory.max").write_text("5000\n")
    (tmp_path / "system.slice" / "tandem.service" / "memory.max").write_text("4000\n")
    (tmp_path / "other.slice" / "memory.max").write_text("1\n")

    assert sorted(cgroup_limits(tmp_path, own)) == [4000, 5000]


def test_the_first_version_has_a_place_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("7:memory:/docker/abc\n6:cpu:/docker/abc\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("7000\n")

    assert set(cgroup_limits(tmp_path, own)) == {7000}


def test_where_nothing_is_told_there_is_no_limit(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "none", tmp_path / "own")) == []
