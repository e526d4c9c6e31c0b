"""`deterministic_cases.py` on this machine, and on those that it can be told to be: fewer instructions, other threads.

A library reads its environment once, so each machine is a process. Where an instruction set is not there anyway, or a
library is another one, a setting says nothing and the cases run again.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import prompt_of
from tiny_models import (
    make_gemma2,
    make_gemma3,
    make_llama,
    make_mistral,
    make_olmo2,
    make_phi3,
    make_qwen3,
    make_qwen3_moe,
    reference_tokens,
)

from tandem.server.processes import worker_environment

CASES = Path(__file__).with_name("deterministic_cases.py")
TIMEOUT_S = 240

# name -> threads that the process starts with, and what its libraries and the cases are told
MACHINES: dict[str, tuple[int, dict[str, str]]] = {
    "this_one": (2, {"TANDEM_TEST_PROMPTS": "8"}),
    "avx2": (
        4,
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "TANDEM_NATIVE": "avx2",
        },
    ),
    "avx512_without_bfloat16": (1, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "TANDEM_NATIVE": "avx512"}),
    "sse": (
        2,
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "TANDEM_NATIVE": "off",
            "TANDEM_TEST_DTYPES": "float32",  # bfloat16 takes minutes there
        },
    ),
}

MARKS = dict.fromkeys(("sse", "avx2", "avx512_without_bfloat16"), pytest.mark.slow)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    make_llama(folder / "llama", hidden_size=72, intermediate_size=200)
    make_llama(folder / "wide", hidden_size=384, intermediate_size=2112)
    make_mistral(folder / "mistral", hidden_size=72, intermediate_size=200, sliding_window=24)
    make_qwen3_moe(folder / "experts", hidden_size=72, num_experts=12)
    make_phi3(folder / "part", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75})
    make_olmo2(folder / "after")
    make_gemma2(folder / "capped", hidden_size=72, intermediate_size=203)
    make_gemma3(folder / "two_windows", hidden_size=72, intermediate_size=203, final_logit_softcapping=8.0)
    qwen3 = make_qwen3(folder / "qwen3")
    (folder / "qwen3.tokens").write_text(str(reference_tokens(qwen3, prompt_of(45), 25)))
    return folder


@pytest.mark.parametrize("machine", [pytest.param(name, marks=MARKS.get(name, ())) for name in MACHINES])
def test_a_row_keeps_its_bits_on(machine: str, checkpoints: Path) -> None:
    threads, told = MACHINES[machine]
    environment = {
        **worker_environment(threads, deterministic=True),
        "TANDEM_TEST_CHECKPOINTS": str(checkpoints),
        **told,
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]

    done = subprocess.run(
        command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
