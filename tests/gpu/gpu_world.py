"""Where tests of NVIDIA devices run: on one, else kernels of Triton are interpreted on the CPU. Import it first."""

import os
from importlib.util import find_spec

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: tandem-llm[cuda]")
