"""Python's collector of reference cycles stays off while something runs that makes few of them.

A large import makes what stays, and takes a tenth less of the processor without looking at it again and again. A seed
makes a world of cycles that lives to its end, a search millions of tuples and no cycles.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """What the body leaves behind is collected after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
