"""The page table of a request: what it finds in the prefix cache, gets of the pool, shares and gives back.

Nobody else takes or gives pages. What leaves the pool for them is copied to host memory first, where there is one.
"""

from collections.abc import Sequence

from tandem.core.commands import (
    AnnounceCleared,
    AnnounceRemoved,
    AnnounceStored,
    FetchPages,
    LoadPages,
    LookUpPages,
    StorePages,
    WritePages,
)
from tandem.core.disagg.sides import DecodeSide
from tandem.core.kv.host_tier import Copy
from tandem.core.kv.storage_tier import Act, Operation
from tandem.core.request import Request
from tandem.core.scheduler.request_state import Progress, WaitingFor
from tandem.core.scheduler.state import NodeState, pages_for
from tandem.core.scheduler.window_claims import claim_parts, give_up_claim, give_up_parts, take_parts
from tandem.core.values import PageHash, PageId


def take_pages(node: NodeState, progress: Progress, *, num_pages: int, match_pages: int, reserve: int) -> bool:
    """Fill the request's page table with `num_pages`: a cached prefix of at most `match_pages`, then own pages.

    What of the prefix is not on the device yet has a page there and is on its way: `is_loading`. False, with nothing
    taken, if fewer than `reserve` pages would stay available, or others have to be copied to host memory first.
    """
    assert not progress.pages
    hashes = progress.hashes[:match_pages]
    matched, below = find_prefix(node, progress, hashes)
    num_matched, num_found = len(matched), len(matched) + len(below)
    deepest = hashes[num_found - 1] if num_found else None
    if deepest is not None:
        node.tree.lock(deepest)
    num_loads = count_loads(node, below)
    wanted = num_pages - num_found + num_loads
    lacks = wanted + reserve > node.pool.num_free + node.tree.num_evictable
    claims = not lacks and claim_parts(node, progress, num_pages, num_found, num_loads)
    if not claims or not make_room_copied(node, wanted):
        if claims:
            give_up_claim(node, progress, num_found)
        if deepest is not None:
            node.tree.unlock(deepest)
        return False
    if not progress.is_counted:
        progress.host_tokens = len(below) * node.settings.page_size
        progress.storage_tokens = min(len(below), progress.fetched_pages) * node.settings.page_size
    node.windows.make_room(node.tree, node.pool, num_loads)
    begin_copy(node, node.host.load(node.tree, node.pool, below, node.now))
    loading = [node.tree.nodes[page_hash].page for page_hash in below]
    progress.pages = matched + loading + node.pool.allocate(num_pages - num_found, progress.id)
    progress.inserted = num_found
    progress.locked = deepest
    if isinstance(progress.side, DecodeSide):  # all of it is going to be written by transfers
        take_parts(node, progress.pages[num_found:])
    progress.synced_pages = 0
    progress.computed = progress.launched = num_found * node.settings.page_size
    use_again(node, hashes[:num_matched])
    return True


def find_prefix(
    node: NodeState, progress: Progress, hashes: Sequence[PageHash]
) -> tuple[list[PageId], Sequence[PageHash]]:
    """How much of `hashes` may be used: pages on the device, and behind them those that have to be loaded, or are."""
    matched = node.tree.match(hashes) if node.settings.prefix_cache else []
    below = worth_loading(node, progress, hashes[len(matched) :])
    below = below[: node.pool.max_parts] if node.windows.are_there else below
    num_found = node.windows.num_usable(node.tree, node.pool, matched, below)
    return matched[:num_found], below[: max(0, num_found - len(matched))]


def count_loads(node: NodeState, below: Sequence[PageHash]) -> int:
    """Those that have no page on the device yet."""
    return sum(not node.tree.nodes[page_hash].is_loading for page_hash in below)


def worth_loading(node: NodeState, progress: Progress, hashes: Sequence[PageHash]) -> Sequence[PageHash]:
    """The leading `hashes` that are in host memory, or on their way from there, as far as it pays to wait for them."""
    if not node.host.is_there or not node.settings.prefix_cache or progress.computes_all:
        return ()
    below, num_pages, token_ns = node.tree.match_below(hashes), node.pool.num_pages, node.chunk_budget.token_ns
    is_new = progress.blocked_on not in (WaitingFor.PAGES, WaitingFor.TIER)  # else it was asked when it lacked these
    num_worth = node.host.worth_loading(
        node.tree, below, node.settings.page_size, num_pages, token_ns, node.now, is_new=is_new
    )
    return below[:num_worth]


def is_loading(node: NodeState, progress: Progress) -> bool:
    """Part of the prefix in its page table has not landed."""
    return not node.tree.is_landed(progress.locked)


def begin_copy(node: NodeState, copy: Copy | None) -> None:
    if copy is None:
        return
    if copy.is_load:
        node.out.append(LoadPages(copy.number, copy.hashes, copy.host_pages, copy.pages))
    else:
        node.out.append(StorePages(copy.number, copy.hashes, copy.pages, copy.host_pages))


def use_again(node: NodeState, hashes: Sequence[PageHash]) -> None:
    """One more request has these pages: by policy, now is the time to copy them."""
    if not node.host.is_there:
        return
    for page_hash in hashes:
        node.tree.nodes[page_hash].hits += 1
    begin_copy(node, node.host.store_used(node.tree, hashes, node.pool.num_pages, node.now))
    begin_operation(node, node.storage.write(node.tree, node.host, hashes, node.now))


def begin_operation(node: NodeState, operation: Operation | None) -> None:
    """Of storage."""
    match operation:
        case None:
            pass
        case Operation(act=Act.LOOK_UP):
            node.out.append(LookUpPages(operation.number, operation.hashes))
        case Operation(act=Act.FETCH):
            node.out.append(FetchPages(operation.number, operation.hashes, operation.host_pages))
        case Operation():
            node.out.append(WritePages(operation.number, operation.hashes, operation.host_pages))


def make_room_copied(node: NodeState, num_pages: int) -> bool:
    """As `make_room`, but what has to be copied before it leaves the device is copied first: False until it is."""
    if node.host.writes_back and drop_copied(node, num_pages) > 0:
        copy = node.host.store_coldest(node.tree, num_pages - node.pool.num_free, node.pool.num_pages, node.now)
        if copy is not None:
            copy.makes_room = True
            begin_copy(node, copy)
        if node.host.makes_room and not node.host.is_stuck(node.now):
            return False
    return make_room(node, num_pages)


def drop_copied(node: NodeState, num_pages: int) -> int:
    """Take pages off the device of which a copy stays. Returns how many are lacking still, 0 or less: none."""
    for page in node.tree.evict(num_pages - node.pool.num_free, only_copied=True):
        node.pool.evict(page)
    return num_pages - node.pool.num_free


def make_room(node: NodeState, num_pages: int) -> bool:
    """Evict cached pages until `num_pages` are free, if that is possible."""
    keeps_ahead = node.host.writes_back and num_pages > node.pool.num_free
    if keeps_ahead:
        drop_copied(node, num_pages)
    removed = evict(node, num_pages - node.pool.num_free)
    if removed and node.settings.announces_cache:
        node.out.append(AnnounceRemoved(removed))
    if keeps_ahead:
        begin_copy(node, node.host.store_coldest(node.tree, 0, node.pool.num_pages, node.now))
    return node.pool.num_free >= num_pages


def flush_cache(node: NodeState) -> None:
    """Evict every cached page that nobody holds."""
    removed = evict(node, node.pool.num_pages)
    node.host.flush(node.tree, node.pool)
    if removed and node.settings.announces_cache:
        node.out.append(AnnounceRemoved(removed) if node.tree.nodes else AnnounceCleared())


def evict(node: NodeState, num_pages: int) -> tuple[PageHash, ...]:
    """Up to so many cached pages become free; their hashes."""
    for page in node.tree.evict(num_pages):
        node.pool.evict(page)
    return node.tree.take_dropped()


def checkpoint(node: NodeState, progress: Progress) -> None:
    """Give the full, computed pages to the prefix tree. The request reads on; the tree owns them from here."""
    if not node.settings.prefix_cache:
        return
    full = min(len(progress.hashes), progress.computed // node.settings.page_size)
    if full <= progress.inserted:
        return
    first_new = full
    for index in range(progress.inserted, full):
        page_hash, page = progress.hashes[index], progress.pages[index]
        if node.tree.insert(page_hash, page, parent_of(progress, index)):
            first_new = min(first_new, index)
        elif is_better(node, page_hash, page):
            node.pool.evict(node.tree.replace(page_hash, page))
        else:
            continue
        node.pool.share(page, progress.id)
        if node.windows.are_there and index >= progress.window_from:
            node.windows.pin((page_hash,))
    if first_new < full and node.settings.announces_cache:  # behind a page that was not there none was
        new = tuple(progress.hashes[first_new:full])
        node.out.append(AnnounceStored(progress.id, first_new, parent_of(progress, first_new), new))
    used = progress.hashes[progress.inserted : full]
    lock_up_to(node, progress, full)
    begin_copy(node, node.host.store_used(node.tree, used, node.pool.num_pages, node.now))


def is_better(node: NodeState, page_hash: PageHash, page: PageId) -> bool:
    """Than the cached one, which has lost its window part, and nobody holds it."""
    cached, has_part = node.tree.nodes[page_hash], node.pool.has_part
    return bool(has_part) and has_part[page] and not has_part[cached.page] and not cached.pins


def parent_of(progress: Progress, index: int) -> PageHash | None:
    return progress.hashes[index - 1] if index else None


def adopt_cached(node: NodeState, progress: Progress) -> None:
    """Read what the prefix tree has by now instead of own pages, of which nobody has written or told any yet."""
    found = node.tree.match(progress.hashes) if node.settings.prefix_cache else []
    first, stop = progress.inserted, node.windows.num_usable(node.tree, node.pool, found)
    if stop <= first:
        return
    node.pool.free(progress.pages[first:stop], progress.id)
    progress.pages[first:stop] = found[first:stop]
    lock_up_to(node, progress, stop)
    if node.windows.are_there:
        node.windows.pin(progress.hashes[max(first, progress.window_from) : stop])
        give_up_parts(node, progress, node.windows.first_seen(stop * node.settings.page_size))
    progress.computed = progress.launched = stop * node.settings.page_size
    use_again(node, progress.hashes[first:stop])


def lock_up_to(node: NodeState, progress: Progress, num_pages: int) -> None:
    """So many leading pages are in the prefix tree under its hashes, and stay there."""
    before, progress.locked = progress.locked, progress.hashes[num_pages - 1]
    node.tree.lock(progress.locked)
    if before is not None:
        node.tree.unlock(before)
    progress.inserted = num_pages


def give_back_pages(node: NodeState, progress: Progress) -> None:
    """Empty the page table. What the tree took stays cached; the rest is free at once, so nothing may touch it."""
    assert progress.in_flight == 0, "a launched batch may still write these pages"
    assert not progress.drains, "a transfer may still touch these pages"
    give_up_claim(node, progress, len(progress.pages))
    node.pool.free(progress.pages, progress.id)
    if progress.locked is not None:
        node.tree.unlock(progress.locked)
    progress.pages = []
    progress.prompt_extras = []  # of what is computed again
    progress.locked = progress.load_until = None
    progress.inserted = progress.synced_pages = progress.computed = progress.launched = 0


def give_back_if_idle(node: NodeState, progress: Progress) -> bool:
    """Pages go to the prefix tree as soon as no batch writes them, or else stay: False."""
    if progress.in_flight:
        return False
    checkpoint(node, progress)  # chunks that returned meanwhile
    give_back_pages(node, progress)
    progress.length = progress.request.prompt_len + progress.generated
    return True


def reusable_tokens(progress: Progress) -> int:
    """Known tokens whose KV may be cached where the request is computed here: the last one has to be looked at, and so
    has every one whose log-probabilities are wanted, until they have been told."""
    prompt_logprobs_from = progress.request.prompt_logprobs_from
    if prompt_logprobs_from is None or progress.generated:
        return progress.length - 1
    return min(prompt_logprobs_from, progress.length - 1)


def matchable_pages(node: NodeState, progress: Progress) -> int:
    """Leading pages that may come from the prefix cache. One that arrives from a peer need compute nothing here."""
    matchable = progress.length if isinstance(progress.side, DecodeSide) else reusable_tokens(progress)
    return min(matchable // node.settings.page_size, len(progress.hashes))


def lacks_page(node: NodeState, progress: Progress) -> bool:
    """Of a running request: its next token's input has no page yet."""
    return progress.length + progress.pending > len(progress.pages) * node.settings.page_size


def too_long(node: NodeState, request: Request) -> str | None:
    """Why the prompt and one token more can never fit, or None."""
    if node.settings.whole_prompts and request.prompt_len > node.settings.chunk_tokens:
        return (
            f"{request.prompt_len} prompt tokens do not fit one batch of {node.settings.chunk_tokens}, "
            "and a model that looks both ways computes a prompt in one"
        )
    if pages_for(node, request.prompt_len + 1) > node.pool.num_pages:
        tokens = node.pool.num_pages * node.settings.page_size
        return f"{request.prompt_len} prompt tokens do not fit the KV pool of {tokens} tokens"
    if request.room is not None and pages_for(node, request.prompt_len) > node.pool.max_parts > 0:
        tokens = node.pool.max_parts * node.settings.page_size
        return f"{request.prompt_len} prompt tokens do not fit the {tokens} tokens of layers with a window"
    return None
