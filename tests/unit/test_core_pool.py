"""The page pool: one owner at a time, and generations that tell one content from the next."""

import pytest

from tandem.core.kv.pool import NOBODY, PagePool, PageState
from tandem.core.values import RequestId

ME, YOU = RequestId(1), RequestId(2)


def test_pages_are_owned_by_whom_they_were_allocated_to() -> None:
    pool = PagePool.empty(4)
    pages = pool.allocate(3, ME)
    assert len(set(pages)) == 3
    assert [pool.owners[page] for page in pages] == [ME] * 3
    assert pool.num_free == 1
    assert pool.counts == [1, 3, 0, 0, 0]


def test_more_pages_than_are_free_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="admission"):
        PagePool.empty(2).allocate(3, ME)


def test_nobody_cannot_own_a_page() -> None:
    with pytest.raises(AssertionError):
        PagePool.empty(2).allocate(1, NOBODY)


def test_only_the_owner_shares_a_page() -> None:
    pool = PagePool.empty(2)
    (page,) = pool.allocate(1, ME)
    with pytest.raises(AssertionError, match="owner"):
        pool.share(page, YOU)
    pool.share(page, ME)
    assert pool.states[page] is PageState.CACHED
    assert pool.owners[page] == NOBODY


def test_pages_of_others_stay_when_a_request_frees_its_table() -> None:
    pool = PagePool.empty(4)
    mine, yours = pool.allocate(2, ME), pool.allocate(1, YOU)
    pool.share(mine[0], ME)
    pool.free([*mine, *yours], ME)
    assert pool.states[mine[0]] is PageState.CACHED
    assert pool.states[mine[1]] is PageState.FREE
    assert pool.states[yours[0]] is PageState.OWNED


def test_a_page_freed_twice_goes_to_the_free_list_once() -> None:
    pool = PagePool.empty(2)
    pages = pool.allocate(2, ME)
    pool.free(pages, ME)
    pool.free(pages, ME)
    assert pool.num_free == 2
    assert pool.generations == [1, 1]


def test_a_generation_rises_when_a_page_goes_back_to_the_free_list_and_not_before() -> None:
    pool = PagePool.empty(1)
    (page,) = pool.allocate(1, ME)
    pool.share(page, ME)
    assert pool.generations[page] == 0
    pool.evict(page)
    assert pool.generations[page] == 1
    pool.allocate(1, YOU)
    pool.quarantine([page], YOU)
    assert pool.generations[page] == 1
    pool.free([page], YOU)
    assert pool.generations[page] == 2


def test_a_quarantined_page_is_not_free_until_its_owner_frees_it() -> None:
    pool = PagePool.empty(1)
    pages = pool.allocate(1, ME)
    pool.quarantine(pages, ME)
    assert pool.num_free == 0
    assert pool.states[pages[0]] is PageState.QUARANTINED
    pool.free(pages, YOU)
    assert pool.num_free == 0
    pool.free(pages, ME)
    assert pool.num_free == 1


def test_quarantine_leaves_shared_and_foreign_pages_alone() -> None:
    pool = PagePool.empty(3)
    mine, yours = pool.allocate(2, ME), pool.allocate(1, YOU)
    pool.share(mine[0], ME)
    pool.quarantine([*mine, *yours], ME)
    assert [pool.states[page] for page in (*mine, *yours)] == [
        PageState.CACHED,
        PageState.QUARANTINED,
        PageState.OWNED,
    ]


def test_a_page_that_is_not_cached_cannot_be_evicted() -> None:
    pool = PagePool.empty(1)
    (page,) = pool.allocate(1, ME)
    with pytest.raises(AssertionError, match="OWNED"):
        pool.evict(page)
