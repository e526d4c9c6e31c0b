"""Layers with a window: their KV is given back where no query sees it any more, and every token is what it would be."""

from itertools import product
from typing import Any

import pytest

from core_driver import (
    ROOT,
    Replica,
    World,
    assert_nothing_is_held,
    assert_who_is_pushed_back_goes_on,
    expected_tokens,
    finished,
    prompt_tokens,
)
from tandem.core.commands import FreeWindows, LaunchBatch, LoadPages, StorePages
from tandem.core.events import PagesLanded
from tandem.core.kv.windows import Windows, most_seen
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State
from tandem.core.settings import WritePolicy
from tandem.core.values import Cause, PageId
from tandem.metrics.node_numbers import named
from tandem.pagehash import hash_of, prompt_links

PAGE = 4
WINDOW = 10


def with_windows(parts: int, *, tokens: int = WINDOW, **settings: Any) -> dict[str, Any]:
    return {"windows": {"tokens": tokens, "max_parts": parts}, "page_size": PAGE, "chunk_tokens": 8, **settings}


def test_what_is_seen_begins_with_the_page_that_the_window_begins_in() -> None:
    for tokens, page_size, position in product((1, 3, 4, 5, 8, 30), (1, 4), range(40)):
        windows = Windows(tokens, page_size)
        seen = {at // page_size for at in range(max(0, position + 1 - tokens), position + 1)}
        assert windows.first_seen(position) == min(seen)
        for num_new in (1, 2, 5, 8):
            touched = {at // page_size for at in range(max(0, position + 1 - tokens), position + num_new)}
            assert len(touched) <= most_seen(tokens, num_new, page_size=page_size)


@pytest.mark.parametrize(("prompt_len", "depth"), list(product((1, 4, 9, 10, 11, 37, 80), (1, 2))))
def test_a_request_of_any_length_runs_in_the_parts_of_one_window(prompt_len: int, depth: int) -> None:
    for tokens in (1, 4, 10, 200):
        world = World()
        parts = most_seen(tokens, 8 * depth, page_size=PAGE)
        node = world.unified(**with_windows(parts, tokens=tokens, window_depth=depth, prefix_cache=False))
        request = world.submit(node, prompt_len=prompt_len, max_new_tokens=70)
        world.run()
        assert node.tokens[request] == expected_tokens(prompt_len, 70, seed=1)
        assert_nothing_is_held(node)
        assert node.state.pool.num_parts == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_runs_in_those_parts_where_its_prompt_is_computed_token_by_token(depth: int) -> None:
    """It needs more while it decodes."""
    world = World()
    parts = most_seen(WINDOW, depth + 1, page_size=1)
    small = {"page_size": 1, "chunk_tokens": 1, "window_depth": depth, "prefix_cache": False}
    node = world.unified(**with_windows(parts) | small)
    request = world.submit(node, prompt_len=40, max_new_tokens=20)
    world.run()
    assert node.tokens[request] == expected_tokens(40, 20, seed=1)
    assert_nothing_is_held(node)
    with pytest.raises(AssertionError, match="more window parts than there are"):
        World().unified(**with_windows(parts - 1) | small)


def test_who_would_need_parts_that_others_may_need_waits_for_them() -> None:
    world = World()
    parts = most_seen(WINDOW, 16, page_size=PAGE)
    node = world.unified(**with_windows(parts + 3))
    ids = [world.submit(node, prompt_len=30, max_new_tokens=20, seed=seed) for seed in (1, 2, 3)]
    world.run_until(lambda: node.state_of(ids[0]) is State.COMPUTING)
    assert [node.state_of(request) for request in ids[1:]] == [State.QUEUED, State.QUEUED]
    assert named(numbers(node.node))["swa_token_usage"] == parts / (parts + 3)
    world.run()
    assert named(numbers(node.node))["swa_token_usage"] == 0
    assert [node.tokens[request] for request in ids] == [expected_tokens(30, 20, seed=seed) for seed in (1, 2, 3)]
    assert_nothing_is_held(node)


def test_a_request_that_decodes_claims_less_than_its_prompt_did() -> None:
    world = World()
    parts = most_seen(WINDOW, 16, page_size=PAGE) + most_seen(WINDOW, 3, page_size=PAGE)
    node = world.unified(**with_windows(parts))
    first = world.submit(node, prompt_len=30, max_new_tokens=60)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    second = world.submit(node, prompt_len=30, max_new_tokens=5, seed=2)
    world.run_until(lambda: second in node.ended)
    assert first not in node.ended
    world.run()
    assert_nothing_is_held(node)


def test_parts_go_back_before_anything_else_of_a_step_is_told() -> None:
    """A page that has lost its part may be somebody else's by a later command of the same step."""
    world = World()
    node = world.unified(**with_windows(8, num_pages=14))
    for seed in range(4):
        world.submit(node, prompt_len=20 + seed, max_new_tokens=12, seed=seed)
    world.run()
    steps = [[type(command) for command in effects.commands] for _, _, effects in node.log]
    freeing = [kinds for kinds in steps if FreeWindows in kinds]
    assert len([kinds for kinds in freeing if LaunchBatch in kinds]) > 3
    assert all(kinds.index(FreeWindows) == 0 for kinds in freeing)


def parts_of(node: Replica, prompt_len: int) -> list[bool]:
    """Of the cached pages of the prompt of seed 1: which have a window part."""
    hashes = map(hash_of, prompt_links(ROOT, prompt_tokens(prompt_len, 1), page_size=PAGE))
    return [node.state.pool.has_part[node.state.tree.nodes[page_hash].page] for page_hash in hashes]


def test_a_cached_prefix_is_used_as_far_as_the_window_before_its_end_is_whole() -> None:
    world = World()
    node = world.unified(**with_windows(12))
    world.submit(node, prompt_len=40, max_new_tokens=1)
    world.run()
    assert parts_of(node, 40) == [True] * 10
    world.submit(node, prompt_len=25, max_new_tokens=1, seed=2)  # takes those that were used least recently
    world.run()
    lost = parts_of(node, 40).index(True)
    assert 0 < lost < 7
    longer = world.submit(node, prompt_len=41, max_new_tokens=3)  # goes on behind a window that is whole
    world.run()
    assert finished(node, longer).cached_tokens == 40
    shorter = world.submit(node, prompt_len=PAGE * lost + 1, max_new_tokens=3)  # and this one in the midst of others
    world.run()
    assert finished(node, shorter).cached_tokens == 0
    assert node.tokens[shorter] == expected_tokens(PAGE * lost + 1, 3, seed=1)
    assert_nothing_is_held(node)
    # What it has computed is cached in place of the pages that had lost their parts.
    assert parts_of(node, PAGE * lost + 1) == [True] * lost
    again = world.submit(node, prompt_len=PAGE * lost + 1, max_new_tokens=3)
    world.run()
    assert finished(node, again).cached_tokens == PAGE * lost


def test_cached_parts_that_somebody_sees_stay() -> None:
    world = World()
    node = world.unified(**with_windows(20))
    world.submit(node, prompt_len=40, max_new_tokens=1)
    world.run()
    reads = world.submit(node, prompt_len=41, max_new_tokens=30)
    world.run_until(lambda: node.state_of(reads) is State.RUNNING)
    for seed in (2, 3, 4):
        world.submit(node, prompt_len=40, max_new_tokens=1, seed=seed)
    world.run()
    assert node.tokens[reads] == expected_tokens(41, 30, seed=1)
    assert_nothing_is_held(node)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pair_hands_over_what_decode_sees_and_decode_trusts_nothing_else(depth: int) -> None:
    world = World()
    prefill, decode = (make(**with_windows(24, window_depth=depth)) for make in (world.prefill, world.decode))
    world.pair(prefill, decode, prompt_len=40, max_new_tokens=1)
    world.run()
    # Others take prefill's parts of the beginning of the prompt, which comes again, longer: it is sent as it is.
    for seed in (2, 3):
        world.pair(prefill, decode, prompt_len=40, max_new_tokens=1, seed=seed)
        world.run()
    decode.state.windows.make_room(decode.state.tree, decode.state.pool, 24)
    _, second = world.pair(prefill, decode, prompt_len=61, max_new_tokens=9)
    world.run()
    assert decode.tokens[second] == expected_tokens(61, 9, seed=1)
    # What decode has of pages behind the window is not taken for whole.
    for prompt_len in (9, 21, 33):
        alone = world.submit(decode, prompt_len=prompt_len, max_new_tokens=3)
        world.run()
        assert decode.tokens[alone] == expected_tokens(prompt_len, 3, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_what_a_peer_reads_keeps_its_parts() -> None:
    """Those of the cached pages that it began with, too, as long as the peer reads."""
    world = World()
    prefill, decode = (make(**with_windows(26)) for make in (world.prefill, world.decode))
    world.submit(prefill, prompt_len=40, max_new_tokens=1)
    world.run()
    decode.holds.add(PagesLanded)
    left, right = world.pair(prefill, decode, prompt_len=60, max_new_tokens=4)
    world.run_until(lambda: prefill.state_of(left) is State.SENDING)
    for seed in (2, 3, 4):
        other = world.submit(prefill, prompt_len=40, max_new_tokens=1, seed=seed)
        world.run_until(lambda other=other: other in prefill.ended)
    assert prefill.state_of(left) is State.SENDING
    decode.release(PagesLanded)
    world.run()
    assert decode.tokens[right] == expected_tokens(60, 4, seed=1)
    assert finished(prefill, left).cached_tokens == 40
    assert finished(decode, right).kv_pages == 15
    assert decode.state.counters.transfer_failed == 0


def test_a_prompt_that_a_pair_has_no_parts_for_is_refused() -> None:
    world = World()
    prefill, decode = (make(**with_windows(12)) for make in (world.prefill, world.decode))
    left, right = world.pair(prefill, decode, prompt_len=49)
    world.run()
    assert prefill.cause(left) is decode.cause(right) is Cause.CONTEXT_LENGTH_EXCEEDED
    alone = world.submit(decode, prompt_len=49, max_new_tokens=3)
    world.run()
    assert decode.tokens[alone] == expected_tokens(49, 3, seed=1)


def test_who_leaves_in_any_state_leaves_no_part_behind() -> None:
    for steps in range(1, 60):
        world = World()
        prefill, decode = (make(**with_windows(24)) for make in (world.prefill, world.decode))
        left, right = world.pair(prefill, decode, prompt_len=60, max_new_tokens=20)
        for _ in range(steps):
            world.turn_all()
        world.abort(prefill, left)
        world.abort(decode, right)
        world.run()
        assert_nothing_is_held([prefill, decode])
        cached = [sum(map(one.state.pool.has_part.__getitem__, tree_pages(one))) for one in (prefill, decode)]
        assert cached == [prefill.state.pool.num_parts, decode.state.pool.num_parts]


def tree_pages(node: Replica) -> list[PageId]:
    return [entry.page for entry in node.state.tree.nodes.values() if entry.is_landed]


@pytest.mark.parametrize(
    ("policy", "parts"),
    [(WritePolicy.WRITE_THROUGH, 14), (WritePolicy.WRITE_THROUGH_SELECTIVE, 24), (WritePolicy.WRITE_BACK, 24)],
)
def test_what_comes_from_host_memory_has_the_parts_that_it_had_when_it_was_copied(
    policy: WritePolicy, parts: int
) -> None:
    world = World()
    tier = {"num_pages": 64, "write_policy": policy}
    node = world.unified(**with_windows(parts, num_pages=26, host_tier=tier))
    for _ in range(2):  # the second time from what is left of the first
        for seed in (1, 1, 2, 2, 3, 3, 4, 4):
            turn = world.submit(node, prompt_len=40, max_new_tokens=8, seed=seed)
            world.run()
            assert node.tokens[turn] == expected_tokens(40, 8, seed=seed)
    again = [world.submit(node, prompt_len=41, max_new_tokens=8, seed=seed) for seed in (1, 2)]
    world.run()
    assert node.said(StorePages)
    assert node.said(LoadPages)
    assert [node.tokens[request] for request in again] == [expected_tokens(41, 8, seed=seed) for seed in (1, 2)]
    assert_nothing_is_held(node)


@pytest.mark.parametrize("shorter_first", [True, False])
def test_a_copy_of_a_page_without_its_part_brings_none(shorter_first: bool) -> None:
    world = World()
    tier = {"num_pages": 64, "write_policy": WritePolicy.WRITE_THROUGH_SELECTIVE, "storage": {"min_pages": 1}}
    node = world.unified(**with_windows(14, num_pages=44, host_tier=tier))
    for prompt_len, seed in ((40, 1), (37, 2), (41, 1)):  # copied when it is used again, and has lost some parts
        world.submit(node, prompt_len=prompt_len, max_new_tokens=1, seed=seed)
        world.run()
    lost = parts_of(node, 40).index(True)
    assert lost > 3
    for seed in (3, 4, 5, 6):
        world.submit(node, prompt_len=50, max_new_tokens=1, seed=seed)
        world.run()
    shorter = PAGE * lost - 3
    for prompt_len in (shorter, 41) if shorter_first else (41, shorter):
        again = world.submit(node, prompt_len=prompt_len, max_new_tokens=3)
        world.run()
        assert (finished(node, again).host_tokens > 0) is (prompt_len == 41)
        assert node.tokens[again] == expected_tokens(prompt_len, 3, seed=1)
    later = world.submit(node, prompt_len=shorter, max_new_tokens=3)
    world.run()
    assert node.tokens[later] == expected_tokens(shorter, 3, seed=1)
    assert_nothing_is_held(node)


def test_who_is_pushed_back_goes_on_with_the_same_tokens() -> None:
    world = World()
    node = world.unified(**with_windows(24, num_pages=26, conservativeness=0.0, window_depth=1))
    assert_who_is_pushed_back_goes_on(world, node)
