"""What tests of native kernels begin with: memory that shows who did not write it, and inputs nobody has chosen."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.engine.native import library


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that was not written is NaN; and threads and kernels are as before in the end."""
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)  # which fills what `empty` returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
        library.use(library.best())


def fresh_generator() -> torch.Generator:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
