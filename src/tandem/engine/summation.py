"""Products whose terms cancel: what is left of each sum is how it was rounded, so the order of summation shows.

An ordinary product hides it. In bfloat16 a sum in another order is rounded to the same 8 bits in all but one of ten
thousand cases; on terms that cancel one element in ten differs.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tandem.core.values import ceil_div
from tandem.engine.rows import TILE_ROWS

Product = Callable[[Tensor, Tensor], Tensor]  # (x [n, in_features], weight [out_features, in_features]) -> [n, out]

BLOCK_ROWS = 256  # of a weight; the rest repeats them
PARTNER_SHIFT = 7  # terms that cancel do not come back in reversed order, which would unwind every rounding
LOOKED_AT = 5  # a row of the tile


class Products:
    """For weights of some shapes, with the number of rows that the deterministic arrangement has."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, int]],
        *,
        dtype: torch.dtype,
        device: str,
        product: Product,
    ) -> None:
        self._shapes = sorted(set(shapes))
        self._dtype = dtype
        self._device = device
        self._product = product

    @torch.inference_mode()
    def compare(self, thread_counts: list[int]) -> tuple[set[int], bool, str]:
        """Thread counts that give the bits of one thread; whether a row's neighbours change it; a digest of the bits.

        Leaves torch with another number of threads.
        """
        steady, neighbours_show = set(thread_counts), False
        digest = hashlib.sha256()
        for outputs, inputs in self._shapes:
            x, weight = cancelling(outputs, inputs, dtype=self._dtype, device=self._device)
            torch.set_num_threads(1)
            expected = self._product(x, weight)
            digest.update(expected.cpu().view(torch.uint8).numpy().tobytes())
            beside_others = x.flip(0)
            beside_others[LOOKED_AT] = x[LOOKED_AT]
            neighbours_show |= not torch.equal(self._product(beside_others, weight)[LOOKED_AT], expected[LOOKED_AT])
            for threads in thread_counts:
                torch.set_num_threads(threads)
                if not torch.equal(self._product(x, weight), expected):
                    steady.discard(threads)
        return steady, neighbours_show, digest.hexdigest()

    @torch.inference_mode()
    def parts_show(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Whether a sum changes where only `parts` of the outputs are computed: (outputs, inputs), of any of ours."""
        for outputs, inputs in sorted(set(parts)):
            for all_outputs in {whole for whole, width in self._shapes if width == inputs and whole > outputs}:
                x, weight = cancelling(all_outputs, inputs, dtype=self._dtype, device=self._device)
                whole = self._product(x, weight)[:, :outputs]
                if not torch.equal(self._product(x, weight[:outputs]), whole):
                    return True
        return False


def cancelling(outputs: int, inputs: int, *, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """x: [TILE_ROWS, inputs], weight: [outputs, inputs]; every exact sum of x @ weight.T is zero."""
    half = inputs // 2
    x = pattern((TILE_ROWS, inputs), dtype=dtype, device=device)
    block = pattern((min(outputs, BLOCK_ROWS), inputs), dtype=dtype, device=device)
    x[:, half : 2 * half] = x[:, :half].roll(PARTNER_SHIFT, dims=1)
    block[:, half : 2 * half] = -block[:, :half].roll(PARTNER_SHIFT, dims=1)
    block[:, 2 * half :] = 0
    repeats = ceil_div(outputs, block.shape[0])
    return x, block.repeat(repeats, 1)[:outputs]


def pattern(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> Tensor:
    """Numbers between -1 and 1 that look random and are the same on every machine."""
    index = torch.arange(torch.Size(shape).numel(), device=device)
    return ((index * 40503 % 65521).to(torch.float32) / 32768 - 1).to(dtype).view(shape)
