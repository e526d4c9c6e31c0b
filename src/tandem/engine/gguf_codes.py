"""Quantised tensors of a GGUF file, as the codes, scales and offsets that our linear layers are computed from.

How a type packs its bits is asked of the library, which makes numbers of blocks: of blocks whose scales are one these
are the codes, and of blocks whose codes are all the same the scales. So a type is a line that says where scales are:

    8 bits, groups of 32   Q8_0, IQ4_NL, IQ4_XS   those of IQ4 stand for uneven numbers
                           Q5_0, Q5_1, Q5_K       until they are packed
    8 bits, groups of 16   Q6_K, Q3_K             the same
    4 bits, groups of 32   Q4_0, Q4_1, Q4_K
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
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
BLOCKS_AT_ONCE = 64  # in a row of the library's, at most
K_SCALES = b"\1\1\1\1" + bytes(4) + b"\1\1\1\1"  # eight scales of one, no minimum
# Scales of six bits that count from 32: the lower four of each, and the other two.
LOWER, HIGHER = b"\x11", b"\xaa"


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
    "Q3_K": Layout(8, 16, slice(96, 110), LOWER * 8 + HIGHER * 4 + ONE, None, bytes(96)),
    "IQ4_NL": Layout(8, 32, slice(0, 2), ONE, None, bytes(16)),
    "IQ4_XS": Layout(8, 32, slice(0, 8), ONE + HIGHER * 2 + LOWER * 4, None, bytes(128)),
}


def numbers_of(tensor: Any) -> Iterator[Numbers]:
    """Of so many of its rows after the other."""
    for first in range(0, tensor.data.shape[0], ROWS_AT_ONCE):
        yield dequantized(tensor.data[first : first + ROWS_AT_ONCE], tensor.tensor_type)


def coded(data: Bytes, kind: Any) -> QuantizedWeight:
    """Rows of a tensor, whose type has a layout."""
    return _joined([_coded(data[at : at + ROWS_AT_ONCE], kind) for at in range(0, len(data), ROWS_AT_ONCE)])


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Rows behind rows."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
    )


def _coded(data: Bytes, kind: Any) -> QuantizedWeight:
    layout = LAYOUTS[kind.name]

    def of_groups(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers[:, :: layout.group].copy())

    same = _made(data, kind, same=layout.same)
    unit = _made(data[:1, : gguf.GGML_QUANT_SIZES[kind][1]], kind, unit=True, same=layout.same)[0, 0]
    scales = of_groups(same) / unit
    offsets = None
    if layout.minima is not None:
        offsets = of_groups(_made(data, kind, same=bytes(len(layout.same)), minima=True)) + layout.middle * scales
    codes = torch.from_numpy(_made(data, kind, unit=True) - layout.middle).to(torch.int8)
    return QuantizedWeight.of(codes, scales, offsets, bits=layout.bits, group=layout.group)


def _made(data: Bytes, kind: Any, *, unit: bool = False, same: bytes | None = None, minima: bool = False) -> Numbers:
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
    return dequantized(blocks.reshape(data.shape), kind)


def dequantized(data: Bytes | npt.NDArray[np.floating[Any]], kind: Any) -> Numbers:
    """The numbers of these blocks: [..., bytes] becomes [..., numbers]. What is no blocks are numbers already.

    The library goes through 16 rows at a time, so rows of many blocks take it a fraction of the time.
    """
    if data.dtype != np.uint8:
        return data.astype(np.float32)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    width = gcd(data.size // size, BLOCKS_AT_ONCE) * size
    shape = gguf.quant_shape_from_byte_shape(data.shape, kind)
    return gguf.quants.dequantize(data.reshape(-1, width), kind).reshape(shape)
