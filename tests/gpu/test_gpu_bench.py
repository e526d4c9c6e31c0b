"""`bench/gpu.sh` runs: all of its steps on a tiny model, and one line where there is nothing to measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_world import HAS_CUDA

ROOT = Path(__file__).parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_its_steps_run_on_a_tiny_model() -> None:
    done = bench("--tiny", "--device", "cuda" if HAS_CUDA else "cpu")

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parity"]["wrong"] == 0
    assert [step["rows"] for step in found["engine"]] == [1, 3]
    assert all(step["cuda_graph"] is HAS_CUDA for step in found["engine"])
    assert {"bytes_per_s", "flop_per_s"} == set(found["limits"])
    assert {"device", "torch", "triton", "commit"} <= set(found["conditions"])


@pytest.mark.skipif(HAS_CUDA, reason="there is a device")
def test_without_a_device_it_says_so_in_one_line() -> None:
    done = bench()

    assert (done.returncode, done.stdout) == (2, "no CUDA device: nothing was measured\n")
