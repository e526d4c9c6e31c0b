"""What is not linear: the gate of an MLP, and soft caps."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor
from torch.nn import functional

from tandem.engine.native import library
from tandem.engine.rows import TILE_ROWS, UNDIVIDED_ELEMENTS

VECTORS = 64  # elements: torch takes two vectors of a processor's at a time, of at most 32 each
Activation = Callable[[Tensor, Tensor], Tensor]  # of gate and up, [n, features] each, perhaps in the memory of `gate`


def silu(x: Tensor) -> Tensor:
    """In place. x: [n, features], contiguous.

    torch divides a larger tensor among its threads and computes the last few elements of each share one by one, with
    an exponential that rounds otherwise than the one for whole vectors; where a share ends depends on the number of
    threads, and on what part of the features a worker has. So up to a tile of rows, as the deterministic arrangement
    has them, goes through in pieces that are not divided and are whole vectors.
    """
    if x.shape[0] > TILE_ROWS:
        return functional.silu(x, inplace=True)
    for piece in x.view(-1).split(UNDIVIDED_ELEMENTS):
        in_whole_vectors(functional.silu, piece)
    return x


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the memory of `gate`."""
    kernels = library.fitting(gate)
    if kernels is not None and up.is_contiguous():
        return kernels.silu_and_mul(gate, up)
    return silu(gate).mul_(up)


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu as tanh approximates it, perhaps in the memory of `gate`.

    For the reason that is given at `silu`: row by row where rows are few, or where kernels that take them as they come
    have promised that a row keeps its bits.
    """
    kernels = library.fitting(gate)
    is_by_row = gate.shape[0] <= TILE_ROWS or (kernels is not None and kernels.deterministic)
    gelu = partial(functional.gelu, approximate="tanh")
    if not is_by_row:
        return gelu(gate).mul_(up)
    for piece in _row_pieces(gate):
        in_whole_vectors(gelu, piece)
    return gate.mul_(up)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place. x: [n, features]. Row by row, for the same reason."""
    for piece in _row_pieces(x):
        piece.div_(cap).tanh_().mul_(cap)
    return x


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """In place. Behind what is no whole vectors there are zeros for as long as that takes."""
    count = x.shape[-1]
    missing = -count % VECTORS
    x.copy_(function(functional.pad(x, (0, missing)))[..., :count] if missing else function(x))


def _row_pieces(x: Tensor) -> Iterator[Tensor]:
    return (piece for row in x for piece in row.split(UNDIVIDED_ELEMENTS))
