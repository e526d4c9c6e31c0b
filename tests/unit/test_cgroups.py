"""What a process may use of the machine where its container or service has a limit."""

import os
from pathlib import Path

import pytest

from tandem import cgroups
from tandem.cgroups import core_limits, memory_limits, num_cores
from tandem.config import ServerConfig
from tandem.engine.machine_memory import total_bytes
from tandem.server.processes import engine_threads, owns_cores


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A root of control groups, of a process that may run on eight cores."""
    monkeypatch.setattr(cgroups, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("TANDEM_ENGINES", raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_containers_memory_counts(limited: Path) -> None:
    write(limited / "memory.max", "123456\n")

    assert total_bytes("cpu") == 123456


def test_a_containers_cores_count(limited: Path) -> None:
    config = ServerConfig(model="m")
    assert engine_threads(config) == 8
    write(limited / "cpu.max", "300000 100000\n")

    assert engine_threads(config) == 3
    assert owns_cores(config, 3)
    assert not owns_cores(config, 4)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)]
)
def test_cores_are_whole_and_at_least_one(limited: Path, text: str, cores: int) -> None:
    write(limited / "cpu.max", text)

    assert num_cores() == cores


def test_every_limit_on_the_way_to_the_own_group_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/tandem.service\n")
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "system.slice" / "memory.max", "5000\n")
    write(tmp_path / "system.slice" / "tandem.service" / "memory.max", "4000\n")
    write(tmp_path / "other.slice" / "memory.max", "1\n")
    write(tmp_path / "system.slice" / "tandem.service" / "cpu.max", "400000 100000\n")

    assert sorted(memory_limits(tmp_path, own)) == [4000, 5000]
    assert list(core_limits(tmp_path, own)) == [4.0]


def test_the_first_version_has_a_tree_for_each_kind(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("7:memory:/tandem/one\n6:cpu,cpuacct:/tandem\n5:pids:/elsewhere\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "memory" / "tandem" / "one" / "memory.limit_in_bytes", "7000\n")
    write(tmp_path / "memory" / "elsewhere" / "memory.limit_in_bytes", "1\n")
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cpu" / "tandem" / "cpu.cfs_quota_us", "150000\n")
    write(tmp_path / "cpu" / "tandem" / "cpu.cfs_period_us", "100000\n")

    assert min(memory_limits(tmp_path, own)) == 7000
    assert list(core_limits(tmp_path, own)) == [1.5]


def test_in_a_container_the_root_of_the_first_version_is_its_own_group(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("7:memory:/docker/abc\n6:cpu:/docker/abc\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "7000\n")

    assert set(memory_limits(tmp_path, own)) == {7000}


def test_where_nothing_is_told_there_is_no_limit(tmp_path: Path) -> None:
    assert list(memory_limits(tmp_path / "none", tmp_path / "own")) == []
    assert list(core_limits(tmp_path / "none", tmp_path / "own")) == []
