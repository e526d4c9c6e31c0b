"""What several files of unit tests begin with."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that was not written is NaN."""
    from kernel_inputs import poisoned_memory  # torch is for those who ask for it

    with poisoned_memory():
        yield


@pytest.fixture
def draw() -> "torch.Generator":
    """Of a seed that nobody has chosen, which the output tells."""
    from kernel_inputs import fresh_generator

    return fresh_generator()
