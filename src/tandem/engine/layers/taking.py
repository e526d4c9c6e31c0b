"""Some rows of a table: by the native kernels where there are some, else by torch.

torch divides it among its threads from 32,768 numbers on. They have slept since the last step, and would take the
cores from the kernels' threads, which are at work behind it and before it.
"""

from torch import Tensor

from tandem.engine.native import library


def taken(table: Tensor, rows: Tensor) -> Tensor:
    """table: [m, features], rows: [n] int64; returns [n, features]. Raises IndexError."""
    kernels = library.fitting(table)
    return table.index_select(0, rows) if kernels is None else kernels.taken(table, rows)
