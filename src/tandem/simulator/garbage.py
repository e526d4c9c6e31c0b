"""Python's collector of reference cycles stays off while something runs that makes few of them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """A seed makes a world of cycles that lives to its end, a search millions of tuples and no cycles: looking for
    garbage meanwhile finds next to none. What the body leaves behind is collected after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
