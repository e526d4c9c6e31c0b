"""Memory of the KV pool: whose descriptor it is."""

import gc
import os

import pytest
import torch

from tandem.engine.kv_memory import KvMemory, KvShape


@pytest.mark.parametrize("is_closed", [True, False])
def test_its_descriptor_goes_with_it_at_the_latest(is_closed: bool) -> None:
    memory = KvMemory(KvShape(1, 1, 64), page_size=16, num_pages=2, dtype=torch.float32)
    number = memory.fd
    assert number is not None
    size = os.fstat(number).st_size
    if is_closed:
        memory.close()
        memory.close()
    else:
        del memory
        gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert size >= 2 * 16 * 64 * 4
