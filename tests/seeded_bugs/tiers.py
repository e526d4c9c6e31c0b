"""Seeded bugs of host memory: what comes back is not what was stored, is believed too early, or fails a request."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.pool import PagePool
from tandem.core.scheduler import ends, loading
from tandem.core.values import Cause
from tandem.host_memory import HostMemory


@mutant(166, "S7")
def host_memory_gives_back_what_lies_there() -> Iterator[None]:
    def load(memory, host_page, page_hash, place):
        place[:] = memory.page(host_page)
        return ""

    with replaced(HostMemory, "load", load):
        yield


@mutant(2, "S6", "S7", "S13")
def pages_that_are_stored_are_not_pinned() -> Iterator[None]:
    def store(tier, tree, wanted, device_pages, now, original=HostTier._store):
        copy = original(tier, tree, wanted, device_pages, now)
        for page_hash in copy.hashes if copy is not None else ():
            tree.unlock(page_hash)
        return copy

    def finish(tier, tree, device, copy, now, original=HostTier.finish):
        for page_hash in copy.hashes if not copy.is_load else ():
            if page_hash in tree.nodes:
                tree.lock(page_hash)
        original(tier, tree, device, copy, now)

    with replaced(HostTier, "_store", store), replaced(HostTier, "finish", finish):
        yield


@mutant(166, "L12")
def a_load_that_fails_fails_its_request() -> Iterator[None]:
    def requeue(node_state, progress):
        ends.fail(node_state, progress, Cause.TRANSFER_FAILED, "host memory")

    with replaced(loading, "requeue", requeue):
        yield


@mutant(257, "W2", "L12")
def a_load_is_waited_for_without_end() -> Iterator[None]:
    with replaced(loading, "stop_if_late", lambda node_state, progress: None):
        yield


@mutant(2, "S7", "S13")
def a_copy_that_failed_keeps_its_page_of_host_memory() -> Iterator[None]:
    def finish_store(tier, *given, original=HostTier._finish_store):
        with replaced(PagePool, "free", lambda pool, pages, owner: None):
            original(tier, *given)

    with replaced(HostTier, "_finish_store", finish_store):
        yield
