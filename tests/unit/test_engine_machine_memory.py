"""What of the machine's memory the KV pool may have."""

import os

from tandem.engine.machine_memory import bytes_left, total_bytes


def test_the_machine_has_what_it_has_or_less() -> None:
    assert 1 << 28 < total_bytes("cpu") <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_weights_take_their_part() -> None:
    assert total_bytes("cpu") - bytes_left("cpu", weight_bytes=1000) == 1000
    assert bytes_left("cpu", weight_bytes=1 << 60) == 0
