"""Many pieces of memory, copied in one call.

Compiled where there is a compiler when the package is installed: then Python's lock is free while bytes move. The lock
is given and taken once per call and not once per piece, because who takes it back may have to wait for a thread that
computes in Python. Elsewhere a loop in Python does the same, and holds the lock.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

Copy = Callable[[int, int, int, int, int, int], None]


def copy_pieces(
    target: memoryview, to_at: Sequence[int], source: memoryview, from_at: Sequence[int], *, size: int
) -> None:
    """Piece i is the `size` bytes from `from_at[i]` on, and comes to `to_at[i]`. All of them lie within the two views
    of bytes, which do not overlap; that is for the caller to see to."""
    assert len(to_at) == len(from_at)
    copy = native_copy()
    if copy is None:
        for to, start in zip(to_at, from_at, strict=True):
            target[to : to + size] = source[start : start + size]
        return
    places, starts = array("q", to_at), array("q", from_at)
    copy(address(target), address(source), places.buffer_info()[0], starts.buffer_info()[0], len(places), size)


def address(view: memoryview) -> int:
    """Where a view of bytes begins, for as long as it is held."""
    return np.frombuffer(view, np.uint8).ctypes.data


@cache
def native_copy() -> Copy | None:
    """None: it was not built."""
    path = next(iter(sorted(Path(__file__).parent.glob("native_copy.*.so"))), None)
    if path is None:
        return None
    copy = ctypes.CDLL(str(path)).tandem_copy_pieces
    copy.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64]
    copy.restype = None
    return copy
