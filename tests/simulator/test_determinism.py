"""The same seed gives the same log: run by run, under any hash seed, and under every Python that is at hand."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SEEDS = (3, 17)
HASH_SEEDS = ("0", "0", "4711", "random")
SOURCE = Path(__file__).parents[2] / "src"
OLDEST = (3, 11)


def log_hash(python: str, seed: int, hash_seed: str = "0") -> str:
    command = [python, "-m", "tandem.cli.main", "simulate", "--seed", str(seed), "--json"]
    done = subprocess.run(command, env=environment(hash_seed), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["log_hash"]


def environment(hash_seed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCE)}


@cache
def other_pythons() -> tuple[list[str], list[str]]:
    """(those of another minor version that can import what the simulator needs, those that cannot)"""
    able: list[str] = []
    unable: list[str] = []
    for version, python in sorted(candidates().items()):
        if version == sys.version_info[:2] or version < OLDEST:
            continue
        asked = [python, "-c", "import tandem.simulator.hunt"]
        done = subprocess.run(asked, env=environment("0"), capture_output=True, check=False)
        (able if done.returncode == 0 else unable).append(python)
    return able, unable


def candidates() -> dict[tuple[int, int], str]:
    """On PATH, beside this interpreter's installation, and in TANDEM_PYTHONS."""
    installations = Path(sys.base_prefix).parent
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    paths = [path for folder in folders for path in folder.glob("python3.*")]
    paths += installations.glob("*/bin/python3.*")
    paths += [Path(python) for python in os.environ.get("TANDEM_PYTHONS", "").split(os.pathsep) if python]
    found: dict[tuple[int, int], str] = {}
    for path in paths:
        if match := re.fullmatch(r"python(3)\.(\d+)", path.name):
            found[(int(match[1]), int(match[2]))] = str(path)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_log_in_every_run_and_under_every_hash_seed(seed: int) -> None:
    hashes = [log_hash(sys.executable, seed, hash_seed) for hash_seed in HASH_SEEDS]
    assert len(set(hashes)) == 1


def test_a_seed_gives_the_same_log_under_every_python_at_hand() -> None:
    able, unable = other_pythons()
    if not able:
        seen = ", ".join(unable) or "none"
        pytest.skip(f"NOT CHECKED: no other Python here can import the simulator (found: {seen})")
    for seed in SEEDS:
        expected = log_hash(sys.executable, seed)
        assert {python: log_hash(python, seed) for python in able} == dict.fromkeys(able, expected)
