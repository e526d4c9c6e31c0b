"""Laws of the page pool and the prefix tree, for any course of events."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.kv.pool import NOBODY, PagePool, PageState
from tandem.core.kv.tree import PrefixTree
from tandem.core.values import PageId, RequestId

NUM_PAGES = 12
owners = st.integers(1, 3).map(RequestId)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list that says who holds each page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool.empty(NUM_PAGES)
        self.holders: dict[PageId, tuple[PageState, RequestId]] = {}
        self.returns = [0] * NUM_PAGES

    def pages_of(self, owner: RequestId) -> list[PageId]:
        return [page for page, (_, holder) in self.holders.items() if holder == owner]

    @rule(owner=owners, num_pages=st.integers(0, NUM_PAGES))
    def allocate(self, owner: RequestId, num_pages: int) -> None:
        if num_pages > self.pool.num_free:
            return
        for page in self.pool.allocate(num_pages, owner):
            assert page not in self.holders, "a page that somebody holds was given out"
            self.holders[page] = (PageState.OWNED, owner)

    @rule(owner=owners, data=st.data())
    def share(self, owner: RequestId, data: st.DataObject) -> None:
        pages = [page for page in self.pages_of(owner) if self.holders[page][0] is PageState.OWNED]
        if pages:
            page = data.draw(st.sampled_from(pages))
            self.pool.share(page, owner)
            self.holders[page] = (PageState.CACHED, NOBODY)

    @rule(owner=owners)
    def quarantine(self, owner: RequestId) -> None:
        self.pool.quarantine([PageId(page) for page in range(NUM_PAGES)], owner)
        for page in self.pages_of(owner):
            self.holders[page] = (PageState.QUARANTINED, owner)

    @rule(owner=owners)
    def free_everything_in_sight(self, owner: RequestId) -> None:
        self.pool.free([PageId(page) for page in range(NUM_PAGES)], owner)
        for page in self.pages_of(owner):
            self.give_back(page)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        cached = self.pages_of(NOBODY)
        if cached:
            page = data.draw(st.sampled_from(cached))
            self.pool.evict(page)
            self.give_back(page)

    def give_back(self, page: PageId) -> None:
        del self.holders[page]
        self.returns[page] += 1

    @invariant()
    def every_page_is_in_exactly_one_place(self) -> None:
        pool = self.pool
        for page in map(PageId, range(NUM_PAGES)):
            state, owner = self.holders.get(page, (PageState.FREE, NOBODY))
            assert pool.states[page] is state
            assert pool.owners[page] == owner
        assert sorted(pool.free_pages) == [page for page in range(NUM_PAGES) if page not in self.holders]
        assert sum(pool.counts) == NUM_PAGES
        assert all(pool.counts[state] == pool.states.count(state) for state in PageState)

    @invariant()
    def generations_count_returns_to_the_free_list(self) -> None:
        assert self.pool.generations == self.returns


@dataclass
class Kept:
    """What the naive model knows of one cached page."""

    page: PageId
    parent: bytes | None
    locks: int = 0
    used_at: int = 0


class TreeMachine(RuleBasedStateMachine):
    """The tree against a dictionary that is searched from end to end."""

    chains = st.lists(st.sampled_from(b"abc"), min_size=1, max_size=5).map(bytes)

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.model: dict[bytes, Kept] = {}
        self.next_page = 0

    def known_prefix(self, chain: bytes) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < len(chain) and chain[: len(found) + 1] in self.model:
            found.append(chain[: len(found) + 1])
        return found

    def is_pinned(self, name: bytes) -> bool:
        return any(kept.locks and other.startswith(name) for other, kept in self.model.items())

    def evictable_leaves(self) -> list[bytes]:
        parents = {kept.parent for kept in self.model.values()}
        return [name for name in self.model if name not in parents and not self.is_pinned(name)]

    @rule()
    def next_step(self) -> None:
        self.tree.step += 1

    @rule(chain=chains)
    def match(self, chain: bytes) -> None:
        names = self.known_prefix(chain)
        assert self.tree.match([chain[: end + 1] for end in range(len(chain))]) == [self.model[n].page for n in names]
        for name in names:
            self.model[name].used_at = self.tree.step

    @rule(chain=chains)
    def insert(self, chain: bytes) -> None:
        for end in range(1, len(chain) + 1):
            name, parent = chain[:end], chain[: end - 1] or None
            page, self.next_page = PageId(self.next_page), self.next_page + 1
            assert self.tree.insert(name, page, parent) == (name not in self.model)
            self.model.setdefault(name, Kept(page, parent)).used_at = self.tree.step

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.tree.lock(name)
        self.model[name].locks += 1

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        locked = sorted(name for name, kept in self.model.items() if kept.locks)
        if locked:
            name = data.draw(st.sampled_from(locked))
            self.tree.unlock(name)
            self.model[name].locks -= 1

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        names = {kept.page: name for name, kept in self.model.items()}
        evicted = self.tree.evict(num_pages)
        for page in evicted:
            leaves = self.evictable_leaves()
            assert names[page] in leaves, "a page that is pinned or has children was evicted"
            assert self.model[names[page]].used_at == min(self.model[leaf].used_at for leaf in leaves)
            del self.model[names[page]]
        assert len(evicted) == num_pages or not self.evictable_leaves()

    @invariant()
    def counts_equal_a_recount(self) -> None:
        pinned = sum(map(self.is_pinned, self.model))
        assert self.tree.num_pinned == pinned
        assert self.tree.num_evictable == len(self.model) - pinned
        assert {name: node.page for name, node in self.tree.nodes.items()} == {n: k.page for n, k in self.model.items()}

    @invariant()
    def candidates_are_bounded(self) -> None:
        assert len(self.tree.candidates) <= 2 * len(self.tree.nodes) + 64


TestPool = PoolMachine.TestCase
TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=120)
