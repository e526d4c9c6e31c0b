"""The prefix tree: longest match, pins, and who is evicted first."""

import pytest

from tandem.core.kv.tree import PrefixTree
from tandem.core.values import PageId

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def tree_of(*chains: tuple[bytes, ...]) -> PrefixTree:
    """Page ids count up in the order of insertion; each chain is inserted in a step of its own."""
    tree = PrefixTree()
    for chain in chains:
        tree.step += 1
        for index, page_hash in enumerate(chain):
            if page_hash not in tree.nodes:
                tree.insert(page_hash, PageId(len(tree.nodes)), chain[index - 1] if index else None)
    return tree


def test_the_longest_cached_prefix_is_found() -> None:
    tree = tree_of((A, B))
    assert tree.match([A, B, C]) == [0, 1]
    assert tree.match([A, C, B]) == [0]
    assert tree.match([C]) == []


def test_a_page_whose_hash_is_known_is_not_taken_over() -> None:
    tree = tree_of((A,))
    assert not tree.insert(A, PageId(7), None)
    assert tree.match([A]) == [0]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = tree_of((A,), (B,), (C,))
    tree.step += 1
    tree.match([A])
    assert tree.evict(2) == [1, 2]


def test_a_parent_is_evicted_after_its_children_only() -> None:
    tree = tree_of((A, B, C))
    assert tree.evict(1) == [2]
    assert tree.evict(5) == [1, 0]
    assert tree.nodes == {}


def test_what_leaves_next_is_known_before_it_does() -> None:
    for count in range(6):
        tree = tree_of((A, B, C), (A, D))
        coldest = [tree.nodes[page_hash].page for page_hash in tree.coldest_without_copy(count)]
        assert coldest == tree.evict(count)


def test_a_pinned_page_and_all_above_it_are_never_evicted() -> None:
    tree = tree_of((A, B, C), (A, D))
    tree.lock(B)
    assert tree.num_pinned == 2
    assert sorted(tree.evict(9)) == [2, 3]
    assert tree.num_evictable == 0
    tree.unlock(B)
    assert tree.evict(9) == [1, 0]


def test_two_locks_need_two_unlocks() -> None:
    tree = tree_of((A, B))
    tree.lock(B)
    tree.lock(B)
    tree.unlock(B)
    assert tree.evict(1) == []
    tree.unlock(B)
    assert tree.evict(1) == [1]


def test_unlock_without_lock_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="unlock"):
        tree_of((A,)).unlock(A)


def test_nothing_is_evicted_when_nothing_is_asked() -> None:
    tree = tree_of((A,))
    assert tree.evict(0) == []
    assert tree.evict(-3) == []


def test_the_list_of_candidates_is_bounded_by_the_tree_however_often_pages_are_pinned() -> None:
    tree = tree_of((A, B), (C,))
    for _ in range(10_000):
        tree.lock(B)
        tree.unlock(B)
    assert len(tree.candidates) <= 2 * len(tree.nodes) + 64
    assert len(tree.evict(9)) == 3
