"""The pages of one worker in host memory: their bytes, and beside each of which page they are and a digest.

Executes; which page lies where is the node's business. A page is only given back under the hash that it was stored
under, and only if its bytes are still what they were: another one, a half written or a changed one is no page. The
hash is a chain over all tokens before (`pagehash.py`), and the memory is one worker's own, so they fit it.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from tandem.core.commands import LoadPages, StorePages
from tandem.core.events import PagesCopied
from tandem.core.values import PageHash, PageId, ShardId


@dataclass(frozen=True, slots=True)
class Label:
    """Which page the bytes are, and their digest."""

    page_hash: PageHash
    digest: int


class HostMemory:
    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """Memory is taken when pages are written. Raises OSError where it cannot be had."""
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._bytes = memoryview(mmap.mmap(-1, max(1, num_pages * page_bytes)))
        self._labels: list[Label | None] = [None] * num_pages

    def page(self, host_page: PageId) -> memoryview:
        return self._bytes[host_page * self.page_bytes : (host_page + 1) * self.page_bytes]

    def label(self, host_page: PageId) -> Label | None:
        """None: nothing that is whole lies there."""
        return self._labels[host_page]

    def store(self, host_page: PageId, page_hash: PageHash, content: memoryview) -> None:
        self._labels[host_page] = None  # half written until it is whole
        place = self.page(host_page)
        place[:] = content
        self._labels[host_page] = Label(page_hash, xxh3_64_intdigest(place))

    def load(self, host_page: PageId, page_hash: PageHash, place: memoryview) -> str:
        """Copy into `place`. Returns why that is not the page; empty if it is."""
        label = self._labels[host_page]
        if label is None or label.page_hash != page_hash:
            return "another page lies there"
        place[:] = self.page(host_page)
        return "" if xxh3_64_intdigest(place) == label.digest else "its bytes have changed"


def carry_out(
    command: StorePages | LoadPages, memory: HostMemory, device_page: Callable[[PageId], memoryview], shard: ShardId
) -> PagesCopied:
    """Copy page by page, as far as it goes."""
    pairs: Sequence[tuple[PageHash, PageId, PageId]] = tuple(
        zip(command.hashes, command.pages, command.host_pages, strict=True)
    )
    for index, (page_hash, page, host_page) in enumerate(pairs):
        complaint = ""
        try:
            if isinstance(command, StorePages):
                memory.store(host_page, page_hash, device_page(page))
            else:
                complaint = memory.load(host_page, page_hash, device_page(page))
        except (OSError, MemoryError) as error:
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            return PagesCopied(command.copy, shard, index, f"page {host_page} of host memory: {complaint}")
    return PagesCopied(command.copy, shard, len(pairs))
