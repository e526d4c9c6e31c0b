"""Weights in the order in which the native kernels read them: plain ones (`native/packed.h`), and codes
(`native/packed_codes.h`).

In rows a weight is the mapped file, which every engine on a machine shares; packed, it is memory of one process.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.native import library

TOGETHER = 8  # inputs, whose codes are whole lines of the cache
HALF_EXPONENT, LEAST_EXPONENT = 15, -126  # of the largest fp16, and the least fp32


class Packed:
    """What `library.Codes` asks for of either."""

    __slots__ = ()

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def scales(self) -> None:
        return None

    @property
    def offsets(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PackedWeight(Packed):
    values: Tensor  # bf16, outputs and inputs filled up to whole blocks
    shape: tuple[int, int]  # outputs, inputs

    @classmethod
    def of(cls, weight: Tensor, kernels: library.Kernels) -> "PackedWeight":
        """weight: [outputs, inputs], of a type that `kernels` packs"""
        return cls(kernels.pack(weight.contiguous()), (weight.shape[0], weight.shape[1]))

    @property
    def codes(self) -> Tensor:
        return self.values

    @property
    def bits(self) -> int:
        return 0

    @property
    def group(self) -> int:
        return 0

    @property
    def is_float8(self) -> bool:
        return False

    @property
    def has_offsets(self) -> bool:
        return False

    @property
    def unit(self) -> float:
        return 0.0

    def plain(self, dtype: torch.dtype, *, first: int = 0, count: int | None = None) -> Tensor:
        """Rows [first, first + count), [count, inputs]; by torch"""
        together, (outputs, inputs) = library.PACKED_MULTIPLE, self.shape
        end = outputs if count is None else first + count
        begin = first // together
        blocks = self.values.view(-1, self.values.shape[1] // 2, together, 2)[begin : -(-end // together)]
        rows = blocks.transpose(1, 2).reshape(-1, self.values.shape[1])
        return rows[first - begin * together : end - begin * together, :inputs].to(dtype)


@dataclass(frozen=True, slots=True)
class PackedCodes(Packed):
    values: Tensor  # [blocks of outputs, groups, bytes] uint8: scales, offsets and codes of a group
    shape: tuple[int, int]  # outputs, inputs
    bits: int  # 8, 6 where eight need no more, or 4
    group: int
    is_float8: bool
    has_offsets: bool
    unit: float  # whose multiples scales and offsets are, as fp16; 0: they are fp32

    @classmethod
    def of(cls, weight: library.Codes, kernels: library.Kernels, dtype: torch.dtype) -> "PackedCodes":
        """weight: codes in rows, [outputs, inputs]; dtype: that is computed with"""
        assert weight.scales is not None
        together, (outputs, inputs) = library.PACKED_MULTIPLE, weight.shape
        bits = 6 if _fit_six_bits(weight) else weight.bits
        unit = unit_of(weight.scales, weight.offsets) if dtype == torch.bfloat16 else 0.0
        head = (1 + weight.has_offsets) * (2 if unit else 4) * together
        size = (-(-outputs // together), -(-inputs // weight.group), head + weight.group * together * bits // 8)
        kind = (bits, weight.group, weight.is_float8, weight.has_offsets, unit)
        packed = cls(torch.empty(size, dtype=torch.uint8), weight.shape, *kind)
        kernels.pack_codes(weight, packed)
        return packed

    @property
    def codes(self) -> Tensor:
        return self.values

    def plain(self, dtype: torch.dtype, *, first: int = 0, count: int | None = None) -> Tensor:
        """Rows [first, first + count), [count, inputs]; by torch"""
        together, (outputs, inputs) = library.PACKED_MULTIPLE, self.shape
        end = outputs if count is None else first + count
        begin = first // together
        some = self.values[begin : -(-end // together)]
        head = (1 + self.has_offsets) * (2 if self.unit else 4) * together
        stored = some[..., :head].contiguous().view(torch.float16 if self.unit else torch.float32)
        factors = stored.view(*some.shape[:2], -1, together).double() * (self.unit or 1.0)
        values = self._signed(some[..., head:].contiguous()).double() * factors[:, :, 0, :, None]
        if self.has_offsets:
            values += factors[:, :, 1, :, None]
        rows = values.transpose(1, 2).reshape(some.shape[0] * together, -1)
        return rows[first - begin * together : end - begin * together, :inputs].float().to(dtype)

    def _signed(self, codes: Tensor) -> Tensor:
        """[blocks, groups, bytes] uint8 to [blocks, groups, outputs of a block, inputs of a group]"""
        together, (blocks, groups, _) = library.PACKED_MULTIPLE, codes.shape
        if self.bits == 8:
            kind = torch.float8_e4m3fn if self.is_float8 else torch.int8
            pairs = codes.view(kind).view(blocks, groups, -1, together, 2)
            return pairs.transpose(2, 3).reshape(blocks, groups, together, self.group)
        lines = codes.view(blocks, groups, self.group // TOGETHER, -1, together, 2).to(torch.int32)
        words = lines[..., 0] | lines[..., 1] << 8
        found = torch.stack([words[..., :2, :] >> shift & 15 for shift in range(0, 16, 4)], dim=-2).flatten(3, 4)
        if self.bits == 6:
            found |= torch.stack([words[..., 2, :] >> shift & 3 for shift in range(0, 16, 2)], dim=-2) << 4
        sign = 1 << (self.bits - 1)
        # [..., inputs together, (pair, half of the outputs), (output, input of the pair)]
        parts = ((found ^ sign) - sign).view(blocks, groups, -1, TOGETHER // 2, 2, together // 2, 2)
        return parts.permute(0, 1, 4, 5, 2, 3, 6).reshape(blocks, groups, together, self.group)


def unit_of(*factors: Tensor | None) -> float:
    """The power of two whose multiples these are in fp16, where the largest one that is a number just fits."""
    largest = max(float(each.abs().nan_to_num(0.0, 0.0).max()) for each in factors if each is not None)
    return math.ldexp(1.0, max(math.frexp(largest)[1] - HALF_EXPONENT, LEAST_EXPONENT))


def _fit_six_bits(weight: library.Codes) -> bool:
    """Of codes in rows of 8 bits"""
    if weight.bits != 8 or weight.is_float8:
        return False
    least, most = weight.codes.view(torch.int8).aminmax()
    return bool(least >= -32) and bool(most < 32)
