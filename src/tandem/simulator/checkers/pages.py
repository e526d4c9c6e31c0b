"""Pages: counted, owned, read and written only by those who may, and of one tenant.

What is cheap is checked after every step or at the very access; the rest is counted anew at each recount.
"""

from collections import Counter, defaultdict

from tandem.core.commands import (
    AnnounceCleared,
    AnnounceRemoved,
    AnnounceStored,
    FetchPages,
    LaunchBatch,
    LoadPages,
    PullPages,
    StorePages,
    WritePages,
)
from tandem.core.disagg.sides import PrefillSide
from tandem.core.kv.pool import NOBODY, PageState
from tandem.core.kv.tree import NOWHERE
from tandem.core.scheduler.request_state import State
from tandem.core.values import Incarnation, PageHash, PageId, RequestId
from tandem.simulator.actors.kv_reader import SimulatedGrant
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import owner_of, tally, where
from tandem.simulator.oracle import Violation

HAS_OWNER = (PageState.OWNED, PageState.QUARANTINED)
IS_OF_THE_TREE = (PageState.CACHED, PageState.LOADING)
EVERY_STATE = tuple(PageState)


class PageAccounting:
    id = "S1"

    def after_step(self, life: Life) -> None:
        pool = life.node.state.pool
        if sum(pool.counts) != pool.num_pages or len(pool.free_pages) != pool.counts[PageState.FREE]:
            raise Violation(self.id, f"{where(life)}: counts {pool.counts}, {len(pool.free_pages)} in the free list")

    def recount(self, life: Life) -> None:
        pool = life.node.state.pool
        states = bytes(pool.states)  # small numbers, which are counted faster in bytes
        for state, shown in zip(EVERY_STATE, pool.counts, strict=True):
            if (counted := states.count(state)) != shown:
                raise Violation(self.id, f"{where(life)}: {counted} pages are {state.name}, not {shown}")
        if not set(map(pool.states.__getitem__, pool.free_pages)) <= {PageState.FREE}:
            raise Violation(self.id, f"{where(life)}: a page in the free list is not free")
        if len(frozenset(pool.free_pages)) != len(pool.free_pages):
            raise Violation(self.id, f"{where(life)}: a page is in the free list twice")


class PageOwnership:
    """A page belongs to one request, or to the prefix tree and then nobody writes it."""

    id = "S2"

    def memory_is_used(
        self, life: Life, request: RequestId, table: list[PageId], first_written: int, num_used: int
    ) -> None:
        pool = life.node.state.pool
        owners, states, cached = pool.owners, pool.states, PageState.CACHED
        for page in [page for page in table[:first_written] if owners[page] != request]:
            if states[page] != cached:
                raise Violation(self.id, f"{where(life, request)} reads page {page}, which is {owner_of(pool, page)}")
        for page in [page for page in table[first_written:num_used] if owners[page] != request]:
            raise Violation(self.id, f"{where(life, request)} writes page {page}, which is {owner_of(pool, page)}")

    def recount(self, life: Life) -> None:
        state = life.node.state
        states, owners = state.pool.states, state.pool.owners
        for owner, page_state in frozenset(zip(owners, states, strict=True)):
            if owner != NOBODY and page_state not in HAS_OWNER:
                state_name = PageState(page_state).name.lower()
                raise Violation(self.id, f"{where(life)}: request {owner} owns a page that is {state_name}")
        owned = len(owners) - owners.count(NOBODY)
        pool_owned = sum(state.pool.counts[has] for has in HAS_OWNER)
        if owned != pool_owned:
            raise Violation(self.id, f"{where(life)}: {pool_owned} pages are owned, {owned} have an owner")
        held: dict[PageId, RequestId] = {}
        for request, progress in state.requests.items():
            for page in progress.pages:
                if states[page] in IS_OF_THE_TREE:
                    continue
                if held.setdefault(page, request) != request or owners[page] != request:
                    raise Violation(self.id, f"{where(life, request)} has page {page}, {owner_of(state.pool, page)}")


class StaleReads:
    """A page is read only under the generation that it was granted with, and by the peer that it was granted to."""

    id = "S3"

    def page_is_read(self, life: Life, grant: SimulatedGrant, page: PageId, generation: int, *, is_own: bool) -> None:
        if not is_own:
            raise Violation(self.id, f"{where(life, grant.request)}: page {page} is read without the grant's secret")
        if life.node.state.pool.generations[page] != generation:
            raise Violation(self.id, f"{where(life, grant.request)}: page {page} is read under an old generation")


class FreedPages:
    """Nothing is read by a peer from, or lands in, a page that was given back meanwhile."""

    id = "S4"

    def page_is_read(self, life: Life, grant: SimulatedGrant, page: PageId) -> None:
        pool = life.node.state.pool
        if pool.owners[page] != grant.request and pool.states[page] != PageState.CACHED:
            raise Violation(self.id, f"{where(life, grant.request)}: page {page} is read and is {owner_of(pool, page)}")

    def page_is_written(self, life: Life, request: RequestId, page: PageId) -> None:
        pool = life.node.state.pool
        if pool.owners[page] != request:
            raise Violation(
                self.id, f"{where(life, request)}: a pulled page lands in {page}, which is {owner_of(pool, page)}"
            )


class SentPages:
    """What a peer reads is that page of that prompt, computed. Reads by batches are checked by the executor."""

    id = "S5"

    def page_is_read(self, life: Life, grant: SimulatedGrant, page: PageId, index: int, contents: list[int]) -> None:
        half = life.halves.get(grant.request)
        if half is None or not contents:
            return
        script = half.script
        page_size, prompt_len = life.settings.page_size, len(script.prompt)
        length = prompt_len - prompt_len % life.settings.block_tokens  # a block that the prompt ends in is not final
        expected = script.page(index, page_size=page_size, length=length)
        stop = index * page_size + len(expected)
        if expected and (contents[: len(expected)] != expected or contents[page_size] != script.kv_sum(stop)):
            raise Violation(
                self.id, f"{where(life, grant.request)}: page {page} is sent and is not page {index} of the prompt"
            )


class WindowParts:
    """No more pages have window parts than there is memory for, and those that are needed are there: of every request
    what it sees of its pages, and no more of them than it has claimed, and what a peer reads, all that decode sees."""

    id = "S38"

    def page_is_read(self, life: Life, grant: SimulatedGrant, page: PageId, index: int) -> None:
        state, half = life.node.state, life.halves.get(grant.request)
        if half is None or not state.windows.are_there or state.pool.has_part[page]:
            return
        if index >= state.windows.first_seen(len(half.script.prompt)):
            raise Violation(self.id, f"{where(life, grant.request)}: page {page} is read and has lost its window part")

    def recount(self, life: Life) -> None:
        state = life.node.state
        pool, windows = state.pool, state.windows
        if not windows.are_there:
            return
        if pool.num_parts != sum(pool.has_part) or pool.num_parts > pool.max_parts or pool.lost_parts:
            raise Violation(self.id, f"{where(life)}: {sum(pool.has_part)} of {pool.max_parts} window parts")
        if any(pool.has_part[page] for page in pool.free_pages):
            raise Violation(self.id, f"{where(life)}: a free page has a window part")
        pins: Counter[PageHash] = Counter()
        for request, progress in state.requests.items():
            held = 0
            if isinstance(progress.side, PrefillSide) and progress.window_from:
                raise Violation(self.id, f"{where(life, request)} sends, and has given up parts of what it sends")
            for index, page in enumerate(progress.pages):
                is_own = pool.owners[page] == request
                if index >= progress.window_from:
                    held += pool.has_part[page]
                    if not is_own:
                        pins[progress.hashes[index]] += 1
                elif is_own and pool.has_part[page]:
                    raise Violation(self.id, f"{where(life, request)} keeps a part of page {page} that it does not see")
            if held > progress.window_claim:
                raise Violation(self.id, f"{where(life, request)} has {held} parts and claims {progress.window_claim}")
        if pins != windows.pins:
            raise Violation(self.id, f"{where(life)}: other window parts are pinned than are seen")


class PrefixTreePins:
    id = "S6"

    def recount(self, life: Life) -> None:
        state = life.node.state
        tree = state.tree
        pinned = {page_hash: node for page_hash, node in tree.nodes.items() if node.pins}
        locks = [progress.locked for progress in state.requests.values()]
        copied = [page_hash for copy in state.host.copies.values() for page_hash in copy.hashes]
        expected = tally([*locks, *copied, *(node.parent for node in pinned.values())])
        if expected != {page_hash: node.pins for page_hash, node in pinned.items()}:
            for page_hash, node in tree.nodes.items():
                if node.pins != (right := expected.get(page_hash, 0)):
                    raise Violation(self.id, f"{where(life)}: page {node.page} has {node.pins} pins, not {right}")
            raise Violation(self.id, f"{where(life)}: a page is pinned that is not in the tree")
        states, cached = state.pool.states, PageState.CACHED
        landed = {node.page for node in tree.nodes.values() if not node.is_loading} - {NOWHERE}
        for page in [page for page in landed if states[page] != cached]:
            raise Violation(self.id, f"{where(life)}: cached page {page} is {owner_of(state.pool, page)}")
        if tree.num_pinned != sum(node.is_landed for node in pinned.values()):
            raise Violation(self.id, f"{where(life)}: {tree.num_pinned} nodes are not what is pinned")
        if tree.num_landed != state.pool.counts[PageState.CACHED]:
            raise Violation(self.id, f"{where(life)}: {tree.num_landed} nodes, {state.pool.counts} pages")


class AnnouncedPages:
    """Who replays what a node announces of its cache holds what its prefix tree holds: after every step, no more and
    no less, each page once and behind its parent."""

    id = "S37"

    def __init__(self) -> None:
        self.held: defaultdict[Incarnation, set[PageHash]] = defaultdict(set)

    def stored(self, life: Life, command: AnnounceStored) -> None:
        held, parent = self.held[life.incarnation], command.parent
        for index, page_hash in enumerate(command.hashes, command.first_page):
            if page_hash in held:
                raise Violation(self.id, f"{where(life, command.request)}: page {index} is announced a second time")
            if parent is not None and parent not in held:
                raise Violation(self.id, f"{where(life, command.request)}: page {index} is announced before its parent")
            held.add(page_hash)
            parent = page_hash

    def removed(self, life: Life, command: AnnounceRemoved) -> None:
        held = self.held[life.incarnation]
        for page_hash in command.hashes:
            if page_hash not in held:
                raise Violation(self.id, f"{where(life)}: a page is announced as removed that was not there")
            held.discard(page_hash)

    def cleared(self, life: Life, _command: AnnounceCleared) -> None:
        self.held[life.incarnation].clear()

    def after_step(self, life: Life) -> None:
        if not life.settings.announces_cache:
            return
        held, tree = self.held[life.incarnation], life.node.state.tree
        if held != tree.nodes.keys():
            raise Violation(self.id, f"{where(life)} has announced {len(held)} cached pages, of {len(tree.nodes)}")


class TenantsApart:
    """A page that one tenant's request has written is never read for another tenant, whatever the prompts say.

    The fake model gives equal prompts equal KV, so no other checker would see it.
    """

    id = "S32"

    def __init__(self) -> None:
        self.writers: defaultdict[Incarnation, dict[PageId, str]] = defaultdict(dict)
        self.stored: defaultdict[Incarnation, dict[PageId, str]] = defaultdict(dict)  # by page of host memory
        self.filed: dict[PageHash, str] = {}  # in storage, of whichever server

    def copied(self, life: Life, command: StorePages | LoadPages) -> None:
        device, host = self.writers[life.incarnation], self.stored[life.incarnation]
        for page, host_page in zip(command.pages, command.host_pages, strict=True):
            if isinstance(command, StorePages) and page in device:
                host[host_page] = device[page]
            elif isinstance(command, LoadPages) and host_page in host:
                device[page] = host[host_page]

    def filed_or_fetched(self, life: Life, command: WritePages | FetchPages) -> None:
        host = self.stored[life.incarnation]
        for page_hash, host_page in zip(command.hashes, command.host_pages, strict=True):
            if isinstance(command, WritePages) and host_page in host:
                self.filed.setdefault(page_hash, host[host_page])
            elif isinstance(command, FetchPages) and page_hash in self.filed:
                host[host_page] = self.filed[page_hash]
            elif isinstance(command, FetchPages):
                host.pop(host_page, None)

    def pulled(self, life: Life, command: PullPages) -> None:
        half = life.halves.get(command.request)
        if half is not None:
            self.writers[life.incarnation].update(dict.fromkeys(command.destinations, half.ask.tenant))

    def launched(self, life: Life, command: LaunchBatch) -> None:
        """What a batch writes is its request's; what it finds there must be its tenant's."""
        plan, page_size = command.plan, life.settings.page_size
        for row in plan.rows:
            self._told(life, row.request, row.first_page, row.pages, num_found=row.start // page_size)
        for join in plan.join:
            self._told(life, join.request, join.first_page, join.pages, num_found=None)
        for grow in plan.grow:
            self._told(life, grow.request, grow.first_page, grow.pages, num_found=0)

    def _told(
        self, life: Life, request: RequestId, first: int, pages: tuple[PageId, ...], *, num_found: int | None
    ) -> None:
        """`num_found`: so many leading pages were cached; None: those that do not belong to the request now."""
        half = life.halves.get(request)
        if half is None or not pages:
            return
        tenant, writers = half.ask.tenant, self.writers[life.incarnation]
        owners = life.node.state.pool.owners
        for index, page in enumerate(pages, start=first):
            is_own = owners[page] == request if num_found is None else index >= num_found
            if is_own:
                writers[page] = tenant
            elif writers.get(page, tenant) != tenant:
                found = writers[page]
                raise Violation(
                    self.id, f"{where(life, request)} of tenant {tenant!r} reads page {page} of tenant {found!r}"
                )

    def recount(self, life: Life) -> None:
        """Whoever owns a page that the workers know is the one who is noted as its writer."""
        state, writers = life.node.state, self.writers[life.incarnation]
        joining = state.micro_batches.joining
        owners = state.pool.owners
        for request, progress in state.requests.items():
            half = life.halves.get(request)
            if half is None or request in joining:
                continue
            tenant = half.ask.tenant
            for page in progress.pages[: progress.synced_pages]:
                if owners[page] == request and writers.get(page) != tenant:
                    raise Violation(self.id, f"recount: {where(life, request)} owns page {page} and is not its writer")


class Quarantine:
    """A quarantined page belongs to somebody who has ended and whom a batch or a transfer still holds."""

    id = "L11"

    def recount(self, life: Life) -> None:
        state = life.node.state
        if not state.pool.counts[PageState.QUARANTINED]:
            return
        quarantined = PageState.QUARANTINED
        for page, page_state in enumerate(state.pool.states):
            if page_state != quarantined:
                continue
            progress = state.requests.get(state.pool.owners[page])
            if progress is None or progress.state is not State.DRAINING:
                raise Violation(self.id, f"{where(life)}: nobody waits for quarantined page {page}")
            if not progress.in_flight and not progress.drains:
                raise Violation(self.id, f"{where(life, progress.id)}: nothing holds quarantined page {page} any more")
