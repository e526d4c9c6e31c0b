"""How many window parts a request may need at one time, and which it has no use for any more (`kv/windows.py`).

A claim is made with the page table and only gets less, and all claims together are no more than there are parts.
"""

from collections.abc import Sequence

from tandem.core.commands import FreeWindows
from tandem.core.disagg.sides import DecodeSide, Local, PrefillSide
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.request_state import Progress, State
from tandem.core.scheduler.state import NodeState, pages_for
from tandem.core.values import PageId


def claim_parts(node: NodeState, progress: Progress, num_pages: int, num_found: int, num_loads: int) -> bool:
    """It gets a page table of so many pages, with a cached prefix, part of which has to be loaded: is there room for
    what it may need at one time? Then that is its claim, and what it sees of the prefix stays.
    """
    claim = claim_of(node, progress, num_pages, num_loads)
    if claim > num_unclaimed(node):
        return False
    windows = node.windows
    if windows.are_there:
        sends = isinstance(progress.side, PrefillSide)
        first = 0 if sends else windows.first_seen(num_found * node.settings.page_size)
        windows.pin(progress.hashes[first:num_found])
        progress.window_from, progress.window_claim = first, claim
    return True


def claim_of(node: NodeState, progress: Progress, num_pages: int, num_loads: int) -> int:
    """How many parts it may need at one time, with a page table of so many pages, of which some have to be loaded."""
    windows = node.windows
    if not windows.are_there:
        return 0
    most = pages_for(node, progress.length + progress.request.max_new_tokens - progress.generated)
    claim = min(most, parts_to_decode(node))
    match progress.side:
        case Local():
            ahead = node.settings.chunk_tokens * node.settings.window_depth
            claim = max(claim, min(most, windows.most_seen(ahead)))
        case DecodeSide():
            claim = max(claim, num_pages)
        case PrefillSide():
            claim = num_pages
    return max(claim, num_loads)


def num_unclaimed(node: NodeState) -> int:
    """Parts that nobody may need."""
    if not node.windows.are_there:
        return 0
    claims = sum(progress.window_claim for progress in node.requests.values())
    return node.pool.max_parts - node.pool.counts[PageState.LOADING] - claims


def parts_to_decode(node: NodeState) -> int:
    """That a request needs which gets one token, or block, after the other."""
    return node.windows.most_seen(node.settings.block_tokens * (node.settings.window_depth + 1))


def give_up_claim(node: NodeState, progress: Progress, num_pages: int) -> None:
    """It has, or would have had, a page table of so many pages, or cached pages of one."""
    give_up_parts(node, progress, num_pages)
    progress.window_from = progress.window_claim = 0


def take_parts(node: NodeState, pages: Sequence[PageId]) -> None:
    """They are about to be written."""
    if node.windows.are_there:
        has_part = node.pool.has_part
        node.windows.make_room(node.tree, node.pool, sum(not has_part[page] for page in pages))
        for page in pages:
            node.pool.take_part(page)


def pass_window(node: NodeState, progress: Progress) -> None:
    """More has been computed, or has landed: parts that no query sees any more go back. Who sends keeps them."""
    if not node.windows.are_there or isinstance(progress.side, PrefillSide):
        return
    if progress.state is State.RUNNING:
        progress.window_claim = min(progress.window_claim, parts_to_decode(node))
    elif progress.state is not State.COMPUTING:
        return
    give_up_parts(node, progress, node.windows.first_seen(progress.computed))


def give_up_parts(node: NodeState, progress: Progress, stop: int) -> None:
    """Of the leading pages: own ones lose them, cached ones when others need room."""
    if not node.windows.are_there:
        return
    pool, sends = node.pool, isinstance(progress.side, PrefillSide)
    for index in range(progress.window_from, stop):
        page = progress.pages[index] if progress.pages else None
        if page is not None and pool.owners[page] == progress.id:
            pool.lose_part(page)
            continue
        node.windows.unpin(node.tree, pool, progress.hashes[index : index + 1])
        if page is not None and sends and not pool.has_part[page]:
            pool.lost_parts.append(page)  # reading has brought zeros there
    progress.window_from = max(progress.window_from, stop)


def free_windows_command(node: NodeState) -> None:
    """The first of its step: what has lost its part may be written again by any of the others."""
    if node.pool.lost_parts:
        node.out.insert(0, FreeWindows(node.pool.take_lost_parts()))
