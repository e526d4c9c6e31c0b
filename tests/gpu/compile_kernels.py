"""Compiles every kernel to machine code for devices that need not be there, and says how many."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.engine.attention import triton as kernels

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # that a program may have there


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, int | bool], arch: int) -> None:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_stages": 2})
    assert made.metadata.shared <= SHARED_BYTES[arch], f"{kernel} does not fit: {made.metadata.shared} bytes"


def main() -> None:
    count = 0
    for arch, kind in ((80, "fp32"), (90, "bf16")):
        layout = {"KV_HEADS": 2, "HEAD_DIM": 96, "DIM": 128, "PAGE_SIZE": 16, "HEAD_STRIDE": 6144}
        numbers = {"layer_at": "i32", "num_tokens": "i32", "scale": "fp32", "cap": "fp32"}
        values = dict.fromkeys(("q", "k", "v", "memory", "out"), f"*{kind}")
        tables = {"slots": "*i64", "tiles": "*i64", "pages": "*i32", "parts": "*fp32", "logs": "*fp32"}
        kinds = numbers | values | tables
        for parts, rows, window, is_capped in ((1, 64, 0, False), (16, 16, 7, True), (4, 16, 0, False)):
            how = {"GROUP": 3, "WINDOW": window, "IS_CAPPED": is_capped, "PARTS": parts, "ROWS": rows, "KEYS": 32}
            compiled(kernels.tile_kernel, kinds, layout | how | {"IS_WIDENED": False}, arch)
        compiled(kernels.write_kernel, kinds, layout | {"ROWS": 16}, arch)
        compiled(kernels.join_kernel, kinds, {"HEAD_DIM": 96, "DIM": 128, "PARTS": 16}, arch)
        count += 5
    print(f"compiled {count} kernels")


if __name__ == "__main__":
    main()
