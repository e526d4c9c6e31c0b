"""Seeded bugs of pages: freed too early, twice, never, or shown to the wrong one."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.disagg import decode_side, prefill_side
from tandem.core.events import TransferDrained
from tandem.core.kv.pool import PagePool
from tandem.core.kv.tree import PrefixTree
from tandem.core.scheduler import leaving, node, page_tables
from tandem.transfer import lender
from tandem.transfer.puller import Puller


@mutant(0, "S2", "S4", "S5", "S13", "S14")
def pages_freed_with_a_batch_in_flight() -> Iterator[None]:
    original = leaving.end

    def end(node_state, gone, verdict):
        original(node_state, gone, verdict)
        if gone.in_flight:
            node_state.pool.free(gone.pages, gone.id)

    with replaced(leaving, "end", end):
        yield


@mutant(1, "S22", "S3", "S4")
def source_pages_freed_without_waiting_for_readers() -> Iterator[None]:
    original = prefill_side.revoke

    def revoke(node_state, gone, side):
        original(node_state, gone, side)
        gone.drains = {}

    with replaced(prefill_side, "revoke", revoke):
        yield


@mutant(18, "S3")
def owner_ignores_the_secret_of_a_grant() -> Iterator[None]:
    with replaced(lender, "opens", lambda secret, granted: True):
        yield


@mutant(44, "S3")
def end_revokes_nothing() -> Iterator[None]:
    with replaced(prefill_side, "revoke", lambda node_state, gone, side: None):
        yield


@mutant(3, "S22", "S4", "S5")
def destination_pages_freed_without_waiting_for_the_transfer() -> Iterator[None]:
    original = decode_side.abandon_transfer

    def abandon_transfer(node_state, gone, side, cause, detail):
        original(node_state, gone, side, cause, detail)
        gone.drains = {}

    with replaced(decode_side, "abandon_transfer", abandon_transfer):
        yield


@mutant(6, "S4")
def cancelled_pull_is_drained_while_a_page_may_still_land() -> Iterator[None]:
    original = Puller.cancel

    def cancel(puller, command):
        original(puller, command)
        if puller.can_land(command.request):
            puller._report(TransferDrained(command.request, command.attempt, puller._kv.shard))

    with replaced(Puller, "cancel", cancel):
        yield


@mutant(6, "S22", "S3", "S4", "S5")
def one_drained_shard_is_taken_for_all() -> Iterator[None]:
    original = node.drained

    def drained(node_state, request, shard):
        gone = node_state.requests.get(request)
        if gone is not None:
            gone.drains = {}
        original(node_state, request, shard)

    with replaced(node, "drained", drained):
        yield


@mutant(2, "L11", "S1", "S2", "S17", "L4")
def last_page_leaks() -> Iterator[None]:
    original = PagePool.free

    def free(pool, pages, owner):
        original(pool, pages[:-1] if len(pages) > 1 else pages, owner)

    with replaced(PagePool, "free", free):
        yield


@mutant(3, "S1", "S13")
def page_freed_twice() -> Iterator[None]:
    original = PagePool.evict

    def evict(pool, page):
        original(pool, page)
        pool.free_pages.append(page)

    with replaced(PagePool, "evict", evict):
        yield


@mutant(3, "S5")
def cached_pages_come_in_the_wrong_order() -> Iterator[None]:
    original = PrefixTree.match

    def match(tree, hashes):
        return list(reversed(original(tree, hashes)))

    with replaced(PrefixTree, "match", match):
        yield


@mutant(3, "S5", "S19", "S26")
def prefix_hit_counts_one_token_too_many() -> Iterator[None]:
    original = page_tables.take_pages

    def take_pages(node_state, one, **sizes):
        taken = original(node_state, one, **sizes)
        if taken and one.computed:
            one.computed = one.launched = min(one.computed + 1, one.length - 1)
        return taken

    with replaced(page_tables, "take_pages", take_pages):
        yield


@mutant(1, "S6", "S2", "S5", "S13")
def cached_pages_are_evicted_while_read() -> Iterator[None]:
    def lock(tree, page_hash):
        return None

    with replaced(PrefixTree, "lock", lock), replaced(PrefixTree, "unlock", lock):
        yield


@mutant(0, "S2")
def page_is_cached_before_it_is_computed() -> Iterator[None]:
    original = page_tables.checkpoint

    def checkpoint(node_state, progress):
        computed, progress.computed = progress.computed, progress.launched
        original(node_state, progress)
        progress.computed = computed

    with replaced(page_tables, "checkpoint", checkpoint):
        yield
