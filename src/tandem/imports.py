"""Imports without the garbage collector: what a module makes stays, and to look at it again and again takes a tenth of
the time of a large import.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
