"""The native kernels, once for each instruction set: see `src/tandem/engine/native/library.py`. And the copying of
pages between processes: see `src/tandem/transfer/copying.py`.

Each is optional: where there is no compiler, or it does not know the processor, the package installs without it and
the engine computes with torch, or copies in Python. Everything else about the package is in pyproject.toml.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/tandem/engine/native")
SOURCES: int = runpy.run_path(str(FOLDER / "sources.py"))["digest"]()
COMMON = [
    "-std=c++20",
    "-O3",
    "-g1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-wrapv",  # Python's own flags say otherwise: with checks that takes the compiler four times as long
    "-pthread",
    "-fvisibility=hidden",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    f"-DTANDEM_SOURCES={SOURCES}ull",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
VARIANTS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx_bf16": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}
# For `make sanitize`: checks, and less of what takes the compiler long; these hold all the code there is. AMX is
# tried where it can run.
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
IS_SANITIZED = bool(os.environ.get("SANITIZE"))
CHOSEN = VARIANTS
if IS_SANITIZED:
    has_amx = " amx_bf16" in Path("/proc/cpuinfo").read_text()
    CHOSEN = {name: VARIANTS[name] for name in ("avx2", "avx512_bf16", *(["amx_bf16"] if has_amx else []))}
CHECKS = SANITIZERS if IS_SANITIZED else []

COPYING = Extension(
    "tandem.transfer.native_copy",
    ["src/tandem/transfer/native_copy.c"],
    extra_compile_args=["-O3", "-g1", *CHECKS],
    extra_link_args=CHECKS,
    optional=True,
)

setup(
    ext_modules=[
        COPYING,
        *(
            Extension(
                f"tandem.engine.native.kernels_{name}",
                [str(FOLDER / "kernels.cpp")],
                depends=[str(header) for header in sorted(FOLDER.glob("*.h"))],
                extra_compile_args=[*COMMON, *flags, *CHECKS],
                extra_link_args=["-pthread", *CHECKS],
                language="c++",
                optional=True,
            )
            for name, flags in CHOSEN.items()
        ),
    ]
)
