"""Quantised tensors of a GGUF file, as the codes, scales and offsets that our linear layers are computed from.

How a type packs its bits is asked of the library, which makes numbers of blocks: of blocks whose scales are one these
are the codes, and of blocks whose codes are all the same the scales. So a type is a line that says where scales are:

    8 bits, groups of 32   Q8_0, Q5_0, Q5_1, Q5_K     5 bits are kept as 8
    8 bits, groups of 16   Q6_K
    4 bits, groups of 32   Q4_0, Q4_1, Q4_K
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any  # a tensor of the gguf library

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.layers.quantized import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]

ONE, NOTHING = np.float16(1).tobytes(), bytes(2)
ROWS_AT_ONCE = 1024  # of a tensor: their numbers take many times the memory of their codes
K_SCALES = b"\1\1\1\1" + bytes(4) + b"\1\1\1\1"  # eight scales of one, no minimum


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a block of a type."""

    bits: int  # of the codes that we keep
    group: int
    scales: slice  # bytes of the block; the others are codes
    unit: bytes  # such bytes, of scales that are one, without minima
    minima: slice | None  # within the scales
    same: bytes  # bytes of codes that are all the same, and not zero
    middle: int = 0  # what is taken from the library's codes, so that they are signed


FIVE_SAME = bytes(32) + b"\x11" * 128
LAYOUTS = {
    "Q8_0": Layout(8, 32, slice(0, 2), ONE, None, b"\1" * 32),
    "Q4_0": Layout(4, 32, slice(0, 2), ONE, None, bytes(16)),
    "Q4_1": Layout(4, 32, slice(0, 4), ONE + NOTHING, slice(2, 4), b"\x11" * 16, middle=8),
    "Q5_0": Layout(8, 32, slice(0, 2), ONE, None, bytes(20)),
    "Q5_1": Layout(8, 32, slice(0, 4), ONE + NOTHING, slice(2, 4), bytes(4) + b"\x11" * 16, middle=16),
    "Q4_K": Layout(4, 32, slice(0, 16), ONE + NOTHING + K_SCALES, slice(2, 4), b"\x11" * 128, middle=8),
    "Q5_K": Layout(8, 32, slice(0, 16), ONE + NOTHING + K_SCALES, slice(2, 4), FIVE_SAME, middle=16),
    "Q6_K": Layout(8, 16, slice(192, 210), b"\1" * 16 + ONE, None, bytes(192)),
}


class CodedRows:
    """The rows of all tensors of a file that can be kept as codes, found by the numbers that they stand for.

    Why by their numbers: a checkpoint that transformers makes of the file has other names, and rows in another order.
    """

    def __init__(self, reader: Any) -> None:
        self._tensors = [each for each in reader.tensors if each.tensor_type.name in LAYOUTS and each.data.ndim == 2]
        self._rows: list[dict[bytes, int]] = []
        for tensor in self._tensors:
            digests = (digest for numbers in numbers_of(tensor) for digest in digests_of(numbers.astype(np.float16)))
            self._rows.append({digest: row for row, digest in enumerate(digests)})

    def find(self, weight: torch.Tensor) -> QuantizedWeight | None:
        """weight: [outputs, inputs] float16, as which all is compared. None where its rows are not of one tensor."""
        wanted = digests_of(weight.numpy())
        for tensor, rows in zip(self._tensors, self._rows, strict=True):
            if all(digest in rows for digest in wanted):
                own = np.array([rows[digest] for digest in wanted])
                return joined([coded(tensor, own[at : at + ROWS_AT_ONCE]) for at in range(0, len(own), ROWS_AT_ONCE)])
        return None


def digests_of(rows: npt.NDArray[np.float16]) -> list[bytes]:
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in np.ascontiguousarray(rows)]


def numbers_of(tensor: Any) -> Iterator[Numbers]:
    for first in range(0, tensor.data.shape[0], ROWS_AT_ONCE):
        yield gguf.quants.dequantize(tensor.data[first : first + ROWS_AT_ONCE], tensor.tensor_type)


def joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Rows behind rows."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
    )


def coded(tensor: Any, rows: npt.NDArray[np.int64]) -> QuantizedWeight:
    """These rows of a tensor."""
    kind, layout = tensor.tensor_type, LAYOUTS[tensor.tensor_type.name]
    data: Bytes = tensor.data[rows]

    def of_groups(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers[:, :: layout.group].copy())

    same = made(data, kind, same=layout.same)
    unit = made(data[:1, : gguf.GGML_QUANT_SIZES[kind][1]], kind, unit=True, same=layout.same)[0, 0]
    scales = of_groups(same) / unit
    offsets = None
    if layout.minima is not None:
        offsets = of_groups(made(data, kind, same=bytes(len(layout.same)), minima=True)) + layout.middle * scales
    codes = torch.from_numpy(made(data, kind, unit=True) - layout.middle).to(torch.int8)
    return QuantizedWeight.of(codes, scales, offsets, bits=layout.bits, group=layout.group)


def made(data: Bytes, kind: Any, *, unit: bool = False, same: bytes | None = None, minima: bool = False) -> Numbers:
    """What the library makes of rows with other scales or codes. minima: they stay."""
    layout, size = LAYOUTS[kind.name], gguf.GGML_QUANT_SIZES[kind][1]
    is_scale = np.zeros(size, dtype=bool)
    is_scale[layout.scales] = True
    blocks = data.reshape(-1, size).copy()
    if unit:
        blocks[:, is_scale] = np.frombuffer(layout.unit, np.uint8)
    if same is not None:
        blocks[:, ~is_scale] = np.frombuffer(same, np.uint8)
    if layout.minima is not None and not minima:
        blocks[:, layout.minima] = 0
    return gguf.quants.dequantize(blocks.reshape(data.shape), kind)
