"""Weights of 8 or 4 bits: codes, and for each group of inputs a scale and perhaps an offset.

    weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

Codes are whole numbers, or numbers of 8 bits (e4m3), which have no offsets.

Where codes lie in rows that is rounded once, to the type that is computed with: the weight is made row by row before it
is multiplied, and has the bits of the plain weight it stands for. Where they are packed (`packed.py`) codes are
multiplied, or weights in fp32: these are not rounded, but beside bf16 scales and offsets are, to fp16.

How codes lie in memory is said in `native/quantized.h`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.layers import torch_linear
from tandem.engine.layers.packed import PackedCodes, PackedWeight
from tandem.engine.layers.taking import taken
from tandem.engine.native import library
from tandem.engine.quantization import LEAST_GROUP, SMALL_GROUP

PACKED_INPUTS = 128
FLOAT8 = torch.float8_e4m3fn
GROUPS = {8: 64, 4: 32}  # of weights that are quantised when they are loaded, by bits
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)  # scales that are tried: the largest weight of a group need not be the best one


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    codes: Tensor  # [outputs, bytes of a row] uint8
    scales: Tensor  # [outputs, groups] fp32
    offsets: Tensor | None  # [outputs, groups] fp32
    bits: int  # 8 or 4
    group: int
    inputs: int
    is_float8: bool = False

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, offsets: Tensor | None, *, bits: int, group: int) -> "QuantizedWeight":
        """codes: [outputs, inputs] int8, -8 .. 7 where they have 4 bits; or e4m3, all of them numbers"""
        assert group % LEAST_GROUP == 0 or (bits == 8 and group == SMALL_GROUP), "a group fills whole vectors"
        assert scales.shape[1] * group >= codes.shape[1] > (scales.shape[1] - 1) * group
        packed = codes.contiguous().view(torch.uint8) if bits == 8 else _packed(codes)
        added = None if offsets is None else offsets.float().contiguous()
        is_float8 = codes.dtype == FLOAT8
        assert not is_float8 or (bits == 8 and offsets is None)
        return cls(packed, scales.float().contiguous(), added, bits, group, codes.shape[1], is_float8)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.inputs

    @property
    def is_packed(self) -> bool:
        return False

    @property
    def has_offsets(self) -> bool:
        return self.offsets is not None

    @property
    def unit(self) -> float:
        return 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.codes, self.scales, self.offsets)
        return tuple(each for each in own if each is not None)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    def signed_codes(self, rows: slice = slice(None)) -> Tensor:
        """[rows, inputs] int8 or e4m3"""
        some = self.codes[rows]
        if self.bits == 8:
            return some.view(FLOAT8 if self.is_float8 else torch.int8)
        return _unpacked(some, self.inputs)

    def plain(self, dtype: torch.dtype, *, first: int = 0, count: int | None = None) -> Tensor:
        """Rows [first, first + count), [count, inputs]; by torch"""
        rows = slice(first, None if count is None else first + count)
        codes = self.signed_codes(rows)
        scales, offsets = (
            None if each is None else each[rows].double().repeat_interleave(self.group, dim=1)[:, : self.inputs]
            for each in (self.scales, self.offsets)
        )
        assert scales is not None
        values = codes.double() * scales
        return (values if offsets is None else values + offsets).float().to(dtype)


Table = Tensor | QuantizedWeight  # [rows, features], that are looked up
LinearWeight = Table | PackedWeight | PackedCodes  # [out_features, in_features]


def quantized(weight: Tensor, *, bits: int) -> QuantizedWeight:
    """Symmetric, in groups along the inputs; of some scales that which leaves the least squared error."""
    group, (outputs, inputs) = GROUPS[bits], weight.shape
    num_groups = -(-inputs // group)
    padded = functional.pad(weight.float(), (0, num_groups * group - inputs)).view(outputs, num_groups, group)
    codes, scales = _rounded(padded, bits=bits)
    return QuantizedWeight.of(codes.view(outputs, -1)[:, :inputs], scales, None, bits=bits, group=group)


def _rounded(values: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """values: [outputs, groups, group]; returns codes of this shape, int8, and scales [outputs, groups]"""
    most = (1 << (bits - 1)) - 1
    largest = values.abs().amax(dim=-1)
    best = torch.full_like(largest, torch.inf)
    codes, scales = torch.zeros_like(values, dtype=torch.int8), torch.zeros_like(largest)
    for shrunk in SHRUNK if bits == 4 else SHRUNK[:1]:
        scale = largest * (shrunk / most)
        tried = torch.where(scale[..., None] > 0, values / scale[..., None], 0.0).round_().clamp_(-most - 1, most)
        error = (tried * scale[..., None] - values).square_().sum(dim=-1)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
        codes = torch.where(is_better[..., None], tried.to(torch.int8), codes)
    return codes, scales


def looked_up(weight: Table, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """These rows, [n, in_features]."""
    if isinstance(weight, Tensor):
        return taken(weight, rows)
    offsets = None if weight.offsets is None else weight.offsets[rows]
    found = replace(weight, codes=weight.codes[rows], scales=weight.scales[rows], offsets=offsets)
    return _plain(found, 0, torch.empty(rows.shape[0], weight.inputs, dtype=dtype))


def product(x: Tensor, weight: QuantizedWeight | PackedWeight | PackedCodes, bias: Tensor | None) -> Tensor:
    """x: [n, in_features] of many rows, or where no kernel takes it; returns [n, out_features]."""
    outputs, inputs = weight.shape

    def piece(first: int, count: int) -> Tensor:
        return _plain(weight, first, x.new_empty(count, inputs))

    return torch_linear.linear_by_pieces(x, outputs, bias, piece)


def _plain(weight: QuantizedWeight | PackedWeight | PackedCodes, first: int, out: Tensor) -> Tensor:
    """As many rows from `first` on as `out` has, there if a kernel makes them."""
    kernels = library.fitting(out)
    if kernels is None:
        return weight.plain(out.dtype, first=first, count=out.shape[0])
    return kernels.plain_rows(weight, first, out)


def packed_bytes(inputs: int, bits: int) -> int:
    """Of a row of codes."""
    return inputs if bits == 8 else -(-inputs // PACKED_INPUTS) * PACKED_INPUTS // 2


def _packed(codes: Tensor) -> Tensor:
    """[outputs, inputs] int8 to [outputs, bytes] uint8"""
    blocks = -(-codes.shape[1] // PACKED_INPUTS)
    stored = functional.pad((codes + 8).view(torch.uint8), (0, blocks * PACKED_INPUTS - codes.shape[1]))
    first, second, third, fourth = stored.view(codes.shape[0], blocks, 4, 32).unbind(dim=2)
    return torch.stack((second << 4 | first, fourth << 4 | third), dim=-1).view(codes.shape[0], -1)


def _unpacked(packed: Tensor, inputs: int) -> Tensor:
    """The inverse of `_packed`: [outputs, inputs] int8"""
    low, high = packed.view(packed.shape[0], -1, 32, 2).unbind(dim=-1)
    nibbles = torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=2)
    return nibbles.reshape(packed.shape[0], -1)[:, :inputs].view(torch.int8) - 8
