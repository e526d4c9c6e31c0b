"""Weights in the order in which the native kernels read them: plain ones (`native/packed.h`), and codes
(`native/packed_codes.h`).

In rows a weight is the mapped file, which every engine on a machine shares; packed, it is memory of one process.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.native import library


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
    def has_offsets(self) -> bool:
        return False

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
    bits: int  # 8, 6: of eight that need no more, or 4
    group: int
    has_offsets: bool

    @classmethod
    def of(cls, weight: library.Codes, kernels: library.Kernels) -> "PackedCodes":
        """weight: codes in rows, [outputs, inputs]"""
        assert weight.scales is not None
        together, (outputs, inputs) = library.PACKED_MULTIPLE, weight.shape
        bits = 6 if weight.bits == 8 and _fit_six_bits(weight.codes.view(torch.int8)) else weight.bits
        head = (1 + weight.has_offsets) * 4 * together
        size = (-(-outputs // together), -(-inputs // weight.group), head + weight.group * together * weight.bits // 8)
        packed = cls(torch.empty(size, dtype=torch.uint8), weight.shape, bits, weight.group, weight.has_offsets)
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
        head = (1 + self.has_offsets) * 4 * together
        factors = some[..., :head].contiguous().view(torch.float32).view(*some.shape[:2], -1, together)
        values = self._signed(some[..., head:].contiguous()).double() * factors[:, :, 0, :, None]
        if self.has_offsets:
            values += factors[:, :, 1, :, None]
        rows = values.transpose(1, 2).reshape(some.shape[0] * together, -1)
        return rows[first - begin * together : end - begin * together, :inputs].float().to(dtype)

    def _signed(self, codes: Tensor) -> Tensor:
        """[blocks, groups, bytes] uint8 to [blocks, groups, outputs of a block, inputs of a group]"""
        together, (blocks, groups, _) = library.PACKED_MULTIPLE, codes.shape
        if self.bits > 4:
            pairs = codes.view(torch.int8).view(blocks, groups, -1, together, 2)
            return pairs.transpose(2, 3).reshape(blocks, groups, together, self.group)
        words = codes.view(blocks, groups, -1, together, 2).to(torch.int32)  # of four inputs each
        words = words[..., 0] | words[..., 1] << 8
        nibbles = (torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], dim=3) ^ 8) - 8
        # [..., four inputs, (pair, half of the outputs), (output, input of the pair)]
        parts = nibbles.view(blocks, groups, -1, 2, 2, together // 2, 2)
        return parts.permute(0, 1, 4, 5, 2, 3, 6).reshape(blocks, groups, together, self.group)


def _fit_six_bits(codes: Tensor) -> bool:
    least, most = codes.aminmax()
    return bool(least >= -32) and bool(most < 32)
