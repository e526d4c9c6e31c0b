"""What of this machine the engine would use, in words for a person: memory, processor, torch, kernels.

Importing it fails where torch cannot be imported, which is the first thing to know.
"""

import os
from pathlib import Path

import torch

from tandem.engine.machine_memory import total_bytes
from tandem.engine.native import library
from tandem.logtext import shown

FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def torch_text() -> str:
    devices = "CUDA is there, and untested with tandem" if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__}, {torch.get_num_threads()} threads, {devices}"


def memory_bytes() -> int:
    return total_bytes("cpu")


def features_text() -> str:
    has = library.processor_flags()
    return ", ".join(name for name in FEATURES if name in has) or "no AVX2"


def kernels_complaint() -> str | None:
    """Why the kernels that were compiled, or that TANDEM_NATIVE names, cannot compute here. None: they can.

    Why at all: whoever names kernels measures or compares them, and would believe the numbers of others.
    """
    wanted = os.environ.get(library.SWITCH, "")
    there = (*library.available(), library.OFF)
    if wanted in ("", *there):
        try:
            library.best()
        except library.StaleKernels as error:
            return str(error)
        return None
    reason = "not built, or not for this processor" if wanted in library.NEEDS else "unknown"
    return f"{library.SWITCH}={shown(wanted)} in the environment is {reason}; here there are {', '.join(there)}"


def kernels() -> tuple[str, str]:
    """Which ones compute, and what would make that faster; empty: nothing."""
    if (best := library.best()) is not None:
        return f"native, {best.name}", ""
    if os.environ.get(library.SWITCH) == library.OFF:
        return "torch's, which are slower", f"{library.SWITCH}=off in the environment says so"
    if any(any(Path(library.__file__).parent.glob(f"kernels_{name}.*.so")) for name in library.NEEDS):
        return "torch's, which are slower", "this processor runs none of the native ones"
    return "torch's, which are slower", "install g++, and then tandem again"
