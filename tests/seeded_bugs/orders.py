"""Seeded bugs of what the edge, an operator or a connection tells a node."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.commands import AnnounceCleared, AnnounceStored
from tandem.core.disagg import decode_side
from tandem.core.events import FlushRequested, HooksChanged, PeerLost, PeerReturned, RequestRefused
from tandem.core.scheduler import node, page_tables


@mutant(7, "S36")
def connection_that_is_back_is_taken_for_a_lost_peer() -> Iterator[None]:
    original = node.handle

    def handle(node_state, event):
        original(node_state, PeerLost(event.peer) if isinstance(event, PeerReturned) else event)

    with replaced(node, "handle", handle):
        yield


@mutant(7, "S36")
def ready_waits_for_its_timer_when_the_connection_is_back() -> Iterator[None]:
    with replaced(decode_side, "on_peer_returned", lambda node_state, peer: None):
        yield


@mutant(1, "S18")
def refusal_of_the_edge_is_not_for_the_other_half() -> Iterator[None]:
    original = node.handle

    def handle(node_state, event):
        if not isinstance(event, RequestRefused):
            original(node_state, event)

    with replaced(node, "handle", handle):
        yield


@mutant(15, "S13", "S2", "S3")
def flush_drops_pages_of_requests_that_live() -> Iterator[None]:
    original = node.handle

    def handle(node_state, event):
        if isinstance(event, FlushRequested):
            tree = node_state.tree
            for page_hash, cached in list(tree.nodes.items()):
                if cached.pins and not cached.num_children:
                    tree.num_pinned -= 1
                    tree._drop(page_hash, cached)
                    node_state.pool.evict(cached.page)
        original(node_state, event)

    with replaced(node, "handle", handle):
        yield


@mutant(1, "S35")
def flush_leaves_every_second_leaf() -> Iterator[None]:
    original = node.handle

    def handle(node_state, event):
        if not isinstance(event, FlushRequested):
            original(node_state, event)
            return
        for page in node_state.tree.evict((node_state.tree.num_evictable + 1) // 2):
            node_state.pool.evict(page)

    with replaced(node, "handle", handle):
        yield


@mutant(1, "S37")
def evicted_pages_are_not_announced() -> Iterator[None]:
    original = page_tables.evict

    def evict(node_state, num_pages):
        original(node_state, num_pages)
        return ()

    with replaced(page_tables, "evict", evict):
        yield


@mutant(15, "S37")
def flush_announces_that_nothing_is_left_although_requests_read_on() -> Iterator[None]:
    def flush_cache(node_state):
        if page_tables.evict(node_state, node_state.pool.num_pages):
            node_state.out.append(AnnounceCleared())

    with replaced(page_tables, "flush_cache", flush_cache):
        yield


@mutant(13, "S37")
def what_a_prefill_gives_back_is_not_announced() -> Iterator[None]:
    original = page_tables.give_back_if_idle

    def give_back_if_idle(node_state, progress):
        out, node_state.out = node_state.out, []
        is_idle = original(node_state, progress)
        node_state.out = out + [command for command in node_state.out if not isinstance(command, AnnounceStored)]
        return is_idle

    with replaced(page_tables, "give_back_if_idle", give_back_if_idle):
        yield


@mutant(5, "S35")
def hooks_stay_as_they_were_at_the_start() -> Iterator[None]:
    original = node.handle

    def handle(node_state, event):
        if not isinstance(event, HooksChanged):
            original(node_state, event)

    with replaced(node, "handle", handle):
        yield
