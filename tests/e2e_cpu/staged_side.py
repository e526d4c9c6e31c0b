"""For a `Side` whose memory is a device's: a tensor over it, with copies by torch as on any device."""

from collections.abc import Callable

import torch
from torch import Tensor
from transfer_world import DEADLINE_S

from tandem.engine.device_pages import DevicePages
from tandem.transfer.pages import PageAccess
from tandem.transfer.sock import MOST_FRAMES
from tandem.transfer.staged_pages import StagedPages

Stage = Callable[[memoryview, int], PageAccess]


def stage_on(open_device: Callable[[Tensor, int], DevicePages]) -> Stage:
    """open_device: with all bytes, and how many a page has"""

    def stage(memory: memoryview, page_bytes: int) -> PageAccess:
        device = open_device(torch.frombuffer(memory, dtype=torch.uint8), page_bytes)
        num_pages = len(memory) // page_bytes
        return StagedPages(
            device, num_pages=num_pages, page_bytes=page_bytes, max_slots=MOST_FRAMES, timeout_s=DEADLINE_S
        )

    return stage


STAGED = stage_on(DevicePages)
