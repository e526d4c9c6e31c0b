"""Tiers below the device: what comes back is what was stored, the books agree, and their faults cost time only."""

from dataclasses import dataclass

from tandem.core.commands import FailRequest
from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.pool import PageState
from tandem.core.kv.storage_tier import Act, StorageTier
from tandem.core.kv.tree import NOWHERE, PrefixTree
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import SECOND, Cause, PageHash, PageId, ShardId
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import End, owner_of, tally, where
from tandem.simulator.oracle import Violation

# Of a request whose prefix is being loaded, what nobody can help.
FROM_ELSEWHERE = frozenset(Cause) - {
    Cause.TRANSFER_FAILED,
    Cause.CORRUPT_PAGES,
    Cause.ENGINE_FAILED,
    Cause.OUT_OF_PAGES,
    Cause.WORKER_LOST,
}


class TierPages:
    """A page that comes back from host memory is the one that its hash names, in a page that waits for it; every page
    of host memory is free, or belongs to one node or one copy."""

    id = "S7"

    def __init__(self) -> None:
        # Of every server: what a page holds follows from its hash, and goes from one to the other by way of storage.
        self.known: dict[tuple[str, ShardId, PageHash], list[int]] = {}

    def page_is_stored(self, life: Life, shard: ShardId, page: PageId, page_hash: PageHash, found: list[int]) -> None:
        pool = life.node.state.pool
        if pool.states[page] != PageState.CACHED:
            raise Violation(self.id, f"{where(life)}: page {page} is stored, and is {owner_of(pool, page)}")
        if pool.has_part and not pool.has_part[page]:
            found = without_window(life, found)
        name = (life.settings.cut.name, shard, page_hash)
        known = self.known.get(name, [])
        if not agree(known, found):
            raise Violation(self.id, f"{where(life)}: page {page} is stored under the hash of another one")
        self.known[name] = max(known, found, key=len)

    def page_is_loaded(self, life: Life, shard: ShardId, page: PageId, page_hash: PageHash, found: list[int]) -> None:
        pool = life.node.state.pool
        if pool.states[page] != PageState.LOADING:
            raise Violation(self.id, f"{where(life)}: a load lands in page {page}, which is {owner_of(pool, page)}")
        if not life.node.state.tree.nodes[page_hash].host_has_part:
            found = without_window(life, found)
        known = self.known.get((life.settings.cut.name, shard, page_hash))
        if known is None or not agree(known, found):
            raise Violation(self.id, f"{where(life)}: what lands in page {page} is not what was stored")

    def page_is_fetched(self, life: Life, shard: ShardId, host_page: PageId, page_hash: PageHash) -> None:
        host = life.node.state.host
        assert life.tier is not None
        if host.pool.states[host_page] != PageState.OWNED:
            raise Violation(
                self.id, f"{where(life)}: a fetch lands in host page {host_page}, which nobody keeps for it"
            )
        found = list(life.tier.hosts[shard].page(host_page).cast("Q"))
        if self.known.get((life.settings.cut.name, shard, page_hash)) != found:
            raise Violation(self.id, f"{where(life)}: what comes from storage is not what was written there")

    def recount(self, life: Life) -> None:
        state = life.node.state
        complaint = disorder(state.tree, state.host, state.storage)
        if complaint:
            raise Violation(self.id, f"{where(life)}: {complaint}")

    def at_idle(self, life: Life) -> None:
        host, storage = life.node.state.host, life.node.state.storage
        if storage.prefetches or storage.operations:
            raise Violation(self.id, f"{where(life)}: {len(storage.operations)} pieces of storage are used at idle")
        if host.copies or host.pool.counts[PageState.OWNED] or life.node.state.pool.counts[PageState.LOADING]:
            raise Violation(self.id, f"{where(life)}: {len(host.copies)} copies are under way at idle")


def disorder(tree: PrefixTree, host: HostTier, storage: StorageTier) -> str:
    """What the books of tree and tiers disagree on; empty: nothing."""
    storing = [page for copy in host.copies.values() if not copy.is_load for page in copy.host_pages]
    storing += [page for one in storage.operations.values() if one.act is Act.FETCH for page in one.host_pages]
    copies = [node.host for node in tree.nodes.values() if node.host != NOWHERE]
    pool = host.pool
    if len(set(copies)) != len(copies) or len(copies) != pool.counts[PageState.CACHED]:
        return f"{len(copies)} nodes have a copy, {pool.counts[PageState.CACHED]} pages of host memory are one"
    if len(storing) != pool.counts[PageState.OWNED] or pool.num_free + len(copies) + len(storing) != pool.num_pages:
        return f"{len(storing)} pages of host memory are being filled, {pool.counts[PageState.OWNED]} are owned"
    if not set(map(pool.states.__getitem__, copies)) <= {PageState.CACHED}:
        return "a node's copy is no copy"
    nodes = tree.nodes
    landed = {page_hash: node.parent for page_hash, node in nodes.items() if node.is_landed}
    if tree.num_landed != len(landed):
        return f"{tree.num_landed} nodes are not what has landed"
    if not landed.keys() | {None} >= set(landed.values()):
        return "a page is on the device without the one before it"
    on_device = tally([node.parent for node in nodes.values() if node.page != NOWHERE])
    if {page_hash: node.num_children for page_hash, node in nodes.items() if node.num_children} != on_device:
        return "a node does not count its children on the device"
    in_host = tally([node.parent for node in nodes.values() if node.host != NOWHERE])
    if {page_hash: node.num_host_children for page_hash, node in nodes.items() if node.num_host_children} != in_host:
        return "a node does not count its children in host memory"
    below = tally([node.parent for node in nodes.values()])
    if {page_hash: node.num_nodes_below for page_hash, node in nodes.items() if node.num_nodes_below} != below:
        return "a node does not count those below it"
    if [
        node for node in nodes.values() if node.page == node.host == NOWHERE and not (node.num_nodes_below or node.pins)
    ]:
        return "a node is nowhere, and nothing is below it"
    return ""


def without_window(life: Life, contents: list[int]) -> list[int]:
    """Of a page: all cells but the last, which is that of the layer with a window."""
    return contents[: -(life.settings.page_size + 1)]


def agree(one: list[int], other: list[int]) -> bool:
    """As far as both are known."""
    return all(left == right for left, right in zip(one, other, strict=False))


@dataclass(frozen=True, slots=True)
class TierWatch:
    """The copies of one life."""

    pages: TierPages
    life: Life

    def page_is_stored(self, shard: ShardId, page: PageId, page_hash: PageHash, contents: list[int]) -> None:
        self.pages.page_is_stored(self.life, shard, page, page_hash, contents)

    def page_is_loaded(self, shard: ShardId, page: PageId, page_hash: PageHash, contents: list[int]) -> None:
        self.pages.page_is_loaded(self.life, shard, page, page_hash, contents)

    def page_is_fetched(self, shard: ShardId, host_page: PageId, page_hash: PageHash) -> None:
        self.pages.page_is_fetched(self.life, shard, host_page, page_hash)


class TierErrors:
    """Whatever a tier does, a request ends with its tokens, or by what has nothing to do with it."""

    id = "L12"

    def ended(self, life: Life, command: End) -> None:
        if not isinstance(command, FailRequest) or command.stage not in (WaitingFor.TIER, WaitingFor.STORAGE):
            return
        if command.cause not in FROM_ELSEWHERE:
            raise Violation(
                self.id, f"{where(life, command.request)} fails while it is loaded: {command.cause} ({command.detail})"
            )

    def recount(self, life: Life) -> None:
        state = life.node.state
        for progress in state.live(State.LOADING):
            until = progress.entered_at + state.host.settings.load_timeout_ns + SECOND
            if state.now > until:
                raise Violation(self.id, f"{where(life, progress.id)} waits for a load for too long")
        for request in state.storage.prefetches:
            progress = state.requests.get(request)
            if progress is None or progress.state not in (State.BOOTSTRAPPING, State.AWAITING, State.QUEUED):
                raise Violation(self.id, f"{where(life, request)} has left the queue, and its prefetch goes on")
            until = state.storage.until(request)
            if until is not None and state.now > until + SECOND:
                raise Violation(self.id, f"{where(life, request)} waits for storage for too long")
