"""The gate of an MLP."""

from torch import Tensor
from torch.nn import functional

from tandem.engine.native import library
from tandem.engine.rows import TILE_ROWS

UNDIVIDED_ELEMENTS = 1 << 15  # torch computes so many elements of a tensor in one thread


def silu(x: Tensor) -> Tensor:
    """In place. x: [n, features], contiguous.

    torch divides a larger tensor among its threads and computes the last few elements of each share one by one, with
    an exponential that rounds otherwise than the one for whole vectors; where a share ends depends on the number of
    threads. So up to a tile of rows, as the deterministic arrangement has them, goes through in pieces not divided.
    """
    pieces = x.view(-1).split(UNDIVIDED_ELEMENTS) if x.shape[0] <= TILE_ROWS else (x,)
    for piece in pieces:
        functional.silu(piece, inplace=True)
    return x


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the memory of `gate`."""
    kernels = library.fitting(gate)
    if kernels is not None and up.is_contiguous():
        return kernels.silu_and_mul(gate, up)
    return silu(gate).mul_(up)
