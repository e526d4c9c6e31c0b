"""Copies of KV pages between a device and host memory: what its data plane sends and receives (decision 036)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.kv_parts import Runs


class DevicePages:
    """`transfer.staged_pages.HostCopies`, on any device.

    A device's own order is all the ordering there is: threads of the transfer and the engine use the same stream, the
    device's default one. So a copy finds what batches have written that were launched before it, and a batch that is
    launched after it finds what it has written. None of them has events of its own.
    """

    def __init__(self, tensor: Tensor, page_bytes: int) -> None:
        """tensor: contiguous, the pages one behind the other. The caller's, as long as this object is."""
        self._bytes = tensor.view(-1).view(torch.uint8)
        self._page_bytes = page_bytes

    def host_memory(self, num_bytes: int) -> memoryview:
        """Pinned where that is what a device copies to and from best."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._bytes.is_cuda).numpy().data

    def read(self, pages: Sequence[int], runs: Runs, into: memoryview) -> None:
        """Gathered there, and copied at once; the copy waits until it is here."""
        found = self._runs(runs)[self._numbers(pages)]
        torch.frombuffer(into, dtype=torch.uint8).view(found.shape).copy_(found)

    def write(self, pages: Sequence[int], runs: Runs, content: memoryview) -> None:
        """Copied at once, which waits until it is there, and then put into its places."""
        came = torch.frombuffer(content, dtype=torch.uint8).to(self._bytes.device)
        self._runs(runs)[self._numbers(pages)] = came.view(len(pages), runs.count, runs.size)

    def _runs(self, runs: Runs) -> Tensor:
        """A view of them, of all pages: [num_pages, runs.count, runs.size] bytes."""
        num_pages = len(self._bytes) // self._page_bytes
        strides = (self._page_bytes, runs.stride, 1)
        return self._bytes.as_strided((num_pages, runs.count, runs.size), strides, runs.first)

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._bytes.device)
