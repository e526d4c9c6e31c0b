"""Plain weights in the order in which the native kernels read them (`native/packed.h`).

In rows a weight is the mapped file, which every engine on a machine shares; packed, it is memory of one process.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.native import library


@dataclass(frozen=True, slots=True)
class PackedWeight:
    values: Tensor  # bf16, outputs and inputs filled up to whole blocks
    shape: tuple[int, int]  # outputs, inputs

    @classmethod
    def of(cls, weight: Tensor, kernels: library.Kernels) -> "PackedWeight":
        """weight: [outputs, inputs], of a type that `kernels` packs"""
        return cls(kernels.pack(weight.contiguous()), (weight.shape[0], weight.shape[1]))

    # What `library.Codes` asks for:

    @property
    def codes(self) -> Tensor:
        return self.values

    @property
    def scales(self) -> None:
        return None

    @property
    def offsets(self) -> None:
        return None

    @property
    def bits(self) -> int:
        return 16

    @property
    def group(self) -> int:
        return 0

    def plain(self, dtype: torch.dtype, *, first: int = 0, count: int | None = None) -> Tensor:
        """Rows [first, first + count), [count, inputs]; by torch"""
        together, (outputs, inputs) = library.PACKED_MULTIPLE, self.shape
        end = outputs if count is None else first + count
        begin = first // together
        blocks = self.values.view(-1, self.values.shape[1] // 2, together, 2)[begin : -(-end // together)]
        rows = blocks.transpose(1, 2).reshape(-1, self.values.shape[1])
        return rows[first - begin * together : end - begin * together, :inputs].to(dtype)
