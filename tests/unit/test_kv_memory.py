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
    found = os.fstat(number)
    assert found.st_size >= 2 * 16 * 64 * 4
    if is_closed:
        memory.close()
        memory.close()
    else:
        del memory
        gc.collect()
    try:
        is_open = os.path.samestat(os.fstat(number), found)  # it may be somebody else's by now
    except OSError:
        is_open = False
    assert not is_open
