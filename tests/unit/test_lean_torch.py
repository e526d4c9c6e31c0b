"""A worker reads less of torch, and what it left out is there for whoever asks."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import {module}
import torch
from tandem.engine import lean_torch

def embed():
    ids, table = torch.zeros(3, dtype=torch.int64, device="meta"), torch.empty(5, 4, device="meta")
    return torch.nn.functional.embedding(ids, table).shape

print("torch._decomp" in sys.modules)
try:
    print(tuple(embed()))
except NotImplementedError:  # what torch raises where it has none for such tensors
    print("no rule")
lean_torch.read_rules()
lean_torch.read_rules()
print(tuple(embed()))
"""


def said(module: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, check=True, cwd=Path("/")
    )
    return run.stdout.splitlines()


def test_a_worker_leaves_out_the_rules_until_they_are_asked_for() -> None:
    assert said("tandem.server.worker_process") == ["False", "no rule", "(3, 4)"]


def test_where_torch_was_there_before_nothing_is_left_out() -> None:
    assert said("torch") == ["True", "(3, 4)", "(3, 4)"]


@pytest.mark.slow
def test_code_of_transformers_has_all_of_torch() -> None:
    assert said("tandem.engine.lean_torch, tandem.engine.models.transformers_parts") == ["True", "(3, 4)", "(3, 4)"]
