"""Requests whose prefix comes from host memory: they wait as for the pages of a peer, and go on when it has landed.

Pages on their way belong to the prefix tree, so several requests may wait for one load, and who ends meanwhile gives
nothing back but its own. Where a load fails, or takes too long, who waits for it is queued at the head, and computes.
"""

from tandem.core.events import PagesCopied
from tandem.core.kv.tree import NOWHERE
from tandem.core.scheduler.admission import begin
from tandem.core.scheduler.page_tables import begin_operation, give_back_pages, is_loading
from tandem.core.scheduler.prefetch import on_storage_copied
from tandem.core.scheduler.request_state import Progress, State, Trigger
from tandem.core.scheduler.state import NodeState, enter, is_over


def on_copied(node: NodeState, event: PagesCopied) -> None:
    host = node.host
    if event.copy in node.storage.operations:
        on_storage_copied(node, event)
        return
    copy = host.record_answer(event.copy, event.shard, event.num_pages, node.settings.shards)
    if copy is None:
        return
    host.finish(node.tree, node.pool, copy, node.now)
    begin_operation(node, node.storage.write(node.tree, host, copy.hashes, node.now))
    if copy.is_load:
        node.windows.offer(node.tree, node.pool, copy.hashes)
        for progress in node.live(State.LOADING):
            go_on(node, progress)
    if host.flushes and not host.copies:
        host.flush(node.tree, node.pool)


def go_on(node: NodeState, progress: Progress) -> None:
    """Its prefix has landed, or will not, or something of it is still on its way."""
    found = progress.hashes[: progress.inserted]
    pages = [node.tree.nodes[page_hash].page for page_hash in found]
    has_landed = not is_loading(node, progress)
    if NOWHERE in pages or (has_landed and node.windows.num_usable(node.tree, node.pool, pages) < len(pages)):
        requeue(node, progress)  # in the second case it was computed by others, whose window has passed it
    elif has_landed:
        progress.pages = pages + progress.pages[progress.inserted :]  # some may have been computed by others meanwhile
        progress.load_until = None
        begin(node, progress)


def requeue(node: NodeState, progress: Progress) -> None:
    give_back_pages(node, progress)
    enter(node, progress, Trigger.REQUEUE, first=True)


def stop_if_late(node: NodeState, progress: Progress) -> None:
    """The load takes too long: compute instead."""
    if progress.state is State.LOADING and is_over(node, progress.load_until):
        progress.computes_all = True
        requeue(node, progress)
