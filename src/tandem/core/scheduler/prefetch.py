"""Requests whose prefix may be in storage: it is asked for when they come, and waited for as the policy says.

The wait is in the queue, before slot and pages are taken: who waits for storage is passed over. What has come lies in
host memory, and is loaded from there like anything else; so there is one way in which a request becomes ready to run.
"""

from tandem.core.disagg.sides import DecodeSide
from tandem.core.events import PagesCopied, PagesFound
from tandem.core.kv.storage_tier import Act, Prefetch
from tandem.core.scheduler.leaving import release_aborted_request
from tandem.core.scheduler.page_tables import begin_operation, reusable_tokens
from tandem.core.scheduler.request_state import Progress
from tandem.core.scheduler.state import NodeState, is_over, schedule
from tandem.core.settings import PrefetchPolicy, StorageSettings
from tandem.core.values import Nanos

KI_TOKENS = 1024


def begin_prefetch(node: NodeState, progress: Progress) -> None:
    """Of a prompt that is known and not computed."""
    if node.storage.settings is None or not node.settings.prefix_cache:
        return
    matchable = progress.length if isinstance(progress.side, DecodeSide) else reusable_tokens(progress)
    hashes = progress.hashes[: matchable // node.settings.page_size]
    begin_operation(node, node.storage.look_up(node.tree, node.host, progress.id, hashes, node.now))


def on_found(node: NodeState, event: PagesFound) -> None:
    operation = node.storage.record_answer(event.number, event.shard, event.num_pages, node.settings.shards)
    if operation is not None and operation.act is Act.LOOK_UP:
        node.storage.finish_look_up(operation, node.settings.page_size, node.chunk_budget.token_ns)
        go_on(node)


def on_storage_copied(node: NodeState, event: PagesCopied) -> None:
    operation = node.storage.record_answer(event.copy, event.shard, event.num_pages, node.settings.shards)
    if operation is None or operation.act is Act.LOOK_UP:
        return
    if operation.act is Act.WRITE:
        node.storage.finish_write(operation)
        return
    num_new = node.storage.finish_fetch(node.tree, node.host, operation, node.now)
    progress = node.requests.get(operation.request) if operation.request is not None else None
    if progress is not None:
        progress.fetched_pages += num_new
    go_on(node)


def go_on(node: NodeState) -> None:
    """Everybody who hopes for pages asks for the next ones: his own have come, or somebody else's, or there is room."""
    for request in list(node.storage.prefetches):
        begin_operation(node, node.storage.fetch_next(node.tree, node.host, request, node.now))


def awaits_storage(node: NodeState, progress: Progress) -> bool:
    """It is this request's turn. False: it goes on with what has come."""
    prefetch = node.storage.prefetches.get(progress.id)
    if prefetch is None or node.storage.settings is None:
        return False
    if prefetch.until is None:
        prefetch.until = patience(node, prefetch, node.storage.settings)
        schedule(node, progress)
    return not stop_waiting_if_late(node, progress)


def patience(node: NodeState, prefetch: Prefetch, settings: StorageSettings) -> Nanos:
    """Until when it waits. None of the policies waits longer than `io_timeout_ns` for one answer."""
    longest = node.now + settings.io_timeout_ns
    match settings.policy:
        case PrefetchPolicy.BEST_EFFORT:
            return node.now
        case PrefetchPolicy.WAIT_COMPLETE:
            return Nanos(longest)
        case PrefetchPolicy.TIMEOUT:
            num_tokens = len(prefetch.hashes) * node.settings.page_size
            length_ns = settings.timeout_per_ki_token_ns * num_tokens // KI_TOKENS
            if prefetch.waited_until is None:
                prefetch.waited_until = Nanos(node.now + settings.timeout_base_ns + length_ns)
            return Nanos(min(longest, prefetch.waited_until))


def stop_waiting_if_late(node: NodeState, progress: Progress) -> bool:
    """True: it is over, and what has not come is computed."""
    if not is_over(node, node.storage.until(progress.id)):
        return False
    release_aborted_request(node, progress)
    return True
