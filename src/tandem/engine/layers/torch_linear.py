"""Rows times a plain weight by torch, in the type that this processor multiplies fast.

Without instructions for products of bf16 or fp16 torch takes four times as long for them as for fp32, and more
(`bench/native.py`). So from some rows on a weight is widened there, a piece at a time. Sums are fp32 either way.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.native.library import processor_flags

WIDENED_ROWS = 32  # with fewer of them it takes longer to widen the weight than to multiply with it as it is
PIECE_ELEMENTS = 4 << 20  # of a weight, made at a time where there are many rows to multiply
# Of a processor that multiplies them: one of these.
INSTRUCTIONS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [n, in_features], weight: [out_features, in_features]; returns [n, out_features]"""
    if not widens(x):
        return functional.linear(x, weight, bias)
    return linear_by_pieces(x, weight.shape[0], bias, lambda first, count: weight[first : first + count])


def linear_by_pieces(x: Tensor, outputs: int, bias: Tensor | None, piece: Callable[[int, int], Tensor]) -> Tensor:
    """As `linear`, with a weight that `piece(first, count)` makes so many rows of."""
    out, inputs = x.new_empty(x.shape[0], outputs), x.shape[1]
    x = x.float() if widens(x) else x
    step = max(1, PIECE_ELEMENTS // inputs)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        added = None if bias is None else bias[first : first + count].to(x.dtype)
        out[:, first : first + count] = functional.linear(x, piece(first, count).to(x.dtype), added)
    return out


def widens(x: Tensor) -> bool:
    return x.shape[0] >= WIDENED_ROWS and x.device.type == "cpu" and is_widened(x.dtype)


@cache
def is_widened(dtype: torch.dtype) -> bool:
    """Whether fp32 is faster. Where the system does not say what the processor has, nothing is changed."""
    flags, needed = processor_flags(), INSTRUCTIONS.get(dtype)
    return needed is not None and bool(flags) and flags.isdisjoint(needed)
