"""The pages of one worker in host memory: given back as they were stored, or not at all."""

from tandem.core.commands import LoadPages, StorePages
from tandem.core.events import PagesCopied
from tandem.core.values import PageId, ShardId
from tandem.host_memory import HostMemory, carry_out

A, B, C = (bytes([letter]) * 16 for letter in b"abc")
PAGES = tuple(map(PageId, range(3)))


class Device:
    def __init__(self) -> None:
        self.pages = [bytearray(8 * bytes([number + 1])) for number in range(3)]

    def page(self, page: PageId) -> memoryview:
        return memoryview(self.pages[page])


def stored() -> tuple[HostMemory, Device]:
    host, device = HostMemory(3, 8), Device()
    copied = carry_out(StorePages(1, (A, B, C), PAGES, PAGES), host, device.page, ShardId(0))
    assert copied == PagesCopied(1, ShardId(0), 3)
    return host, device


def load(host: HostMemory, device: Device, *hashes: bytes) -> PagesCopied:
    device.pages = [bytearray(8) for _ in range(3)]
    return carry_out(LoadPages(2, hashes, PAGES, PAGES), host, device.page, ShardId(0))


def test_what_was_stored_comes_back() -> None:
    host, device = stored()
    before = [bytes(page) for page in device.pages]
    assert load(host, device, A, B, C) == PagesCopied(2, ShardId(0), 3)
    assert [bytes(page) for page in device.pages] == before


def test_a_page_comes_back_under_its_own_hash_only() -> None:
    host, device = stored()
    copied = load(host, device, A, A, C)
    assert copied.num_pages == 1
    assert "another page" in copied.detail


def test_bytes_that_have_changed_are_no_page() -> None:
    host, device = stored()
    host.page(PAGES[1])[0] ^= 1
    copied = load(host, device, A, B, C)
    assert copied.num_pages == 1
    assert "changed" in copied.detail


def test_a_page_that_is_half_written_is_none() -> None:
    host, device = stored()

    def torn(page: PageId) -> memoryview:
        if page == 1:
            raise MemoryError("no more")
        return device.page(page)

    copied = carry_out(StorePages(3, (C, A, B), PAGES, PAGES), host, torn, ShardId(0))
    assert copied.num_pages == 1
    assert load(host, device, C, A, B).num_pages == 1
