"""Rows that sample a block of tokens at once (`block_tokens`): the same tokens as one by one, in fewer batches."""

from itertools import product

import pytest

from core_driver import World, assert_nothing_is_held, assert_who_is_pushed_back_goes_on, expected_tokens, finished
from tandem.core.batch import BatchOutcome, TokenFlag
from tandem.core.commands import EmitTokens, FinishReason, LaunchBatch
from tandem.core.disagg.messages import Offer
from tandem.core.settings import OptimisticPolicy
from tandem.core.values import BatchId, Cause

BLOCK = 4


@pytest.mark.parametrize(("prompt_len", "depth"), list(product((1, 3, 4, 15, 16, 17, 40), (1, 2, 3))))
def test_tokens_are_the_same_for_blocks_of_any_size(prompt_len: int, depth: int) -> None:
    for block_tokens in (1, 2, 4, 16):
        world = World()
        node = world.unified(block_tokens=block_tokens, window_depth=depth)
        lengths = (1, 2, 5, 16, 33)
        ids = [world.submit(node, prompt_len=prompt_len, max_new_tokens=n, seed=n) for n in lengths]
        world.run()
        for request, num_tokens in zip(ids, lengths, strict=True):
            assert node.tokens[request] == expected_tokens(prompt_len, num_tokens, seed=num_tokens)
            assert finished(node, request).reason is FinishReason.LENGTH
        assert_nothing_is_held(node)


def test_a_batch_brings_a_block_of_each_row_and_no_row_more_than_it_takes() -> None:
    world = World()
    node = world.unified(block_tokens=BLOCK)
    request = world.submit(node, prompt_len=21, max_new_tokens=12)
    world.run()
    assert [len(command.requests) for command in node.commands if isinstance(command, EmitTokens)] == [3, 4, 4, 1]
    assert node.rows_run[request] == 4


def test_an_answer_ends_inside_a_block_and_what_follows_in_it_is_not_said() -> None:
    for depth, eos_after in product((1, 2), range(1, 10)):
        world = World()
        node = world.unified(block_tokens=BLOCK, window_depth=depth)
        request = world.submit(node, prompt_len=18, max_new_tokens=50, eos_after=eos_after)
        other = world.submit(node, prompt_len=18, max_new_tokens=20, seed=2)
        world.run()
        assert node.tokens[request] == expected_tokens(18, eos_after, seed=1, eos_after=eos_after)
        assert finished(node, request).reason is FinishReason.STOP
        assert node.tokens[other] == expected_tokens(18, 20, seed=2)
        assert_nothing_is_held(node)


def test_an_end_of_sequence_behind_the_last_token_that_was_asked_for_is_none() -> None:
    world = World()
    node = world.unified(block_tokens=BLOCK)
    request = world.submit(node, prompt_len=20, max_new_tokens=2, eos_after=3)
    world.run()
    assert node.tokens[request] == expected_tokens(20, 2, seed=1)
    assert finished(node, request).reason is FinishReason.LENGTH


def test_pages_that_blocks_fill_are_found_by_the_next_turn_of_the_conversation() -> None:
    world = World()
    node = world.unified(block_tokens=BLOCK, page_size=8)
    first = world.submit(node, prompt_len=21, max_new_tokens=30)
    world.run()
    assert len(node.tokens[first]) == 30
    # Written, and so cached: everything but the last block, in whole pages.
    assert len(node.state.tree.nodes) == (21 + 30) // BLOCK * BLOCK // 8
    again = world.submit(node, prompt_len=21, max_new_tokens=30)
    world.run()
    assert node.tokens[again] == node.tokens[first]
    assert finished(node, again).cached_tokens == 16


def test_who_is_pushed_back_goes_on_with_the_same_tokens() -> None:
    for block_tokens in (2, 8):
        world = World()
        node = world.unified(block_tokens=block_tokens, page_size=8, num_pages=12, conservativeness=0.0)
        assert_who_is_pushed_back_goes_on(world, node)


@pytest.mark.parametrize("policy", list(OptimisticPolicy))
@pytest.mark.parametrize("prompt_len", [1, 3, 16, 30, 40])
def test_a_pair_hands_over_the_first_block(policy: OptimisticPolicy, prompt_len: int) -> None:
    world = World()
    prefill = world.prefill(block_tokens=BLOCK, optimistic=policy)
    decode = world.decode(block_tokens=BLOCK)
    sender, receiver = world.pair(prefill, decode, prompt_len=prompt_len, max_new_tokens=11)
    world.run()
    assert decode.tokens[receiver] == expected_tokens(prompt_len, 11, seed=1)
    first = BLOCK - prompt_len % BLOCK
    (result,) = {offer.result for offer in prefill.said(Offer) if offer.result is not None}
    assert len(result.token) == 4 * first
    assert prefill.tokens[sender] == expected_tokens(prompt_len, first, seed=1)
    assert decode.rows_run[receiver] == -(-(11 - first) // BLOCK)
    assert_nothing_is_held([prefill, decode])


def test_decode_takes_no_result_that_is_no_whole_block() -> None:
    world = World()
    prefill, decode = world.prefill(block_tokens=2), world.decode(block_tokens=BLOCK)
    _, receiver = world.pair(prefill, decode, prompt_len=32, max_new_tokens=8)
    world.run()
    assert decode.cause(receiver) is Cause.PROTOCOL
    assert_nothing_is_held([prefill, decode])


def test_a_batch_that_fails_or_is_no_number_ends_its_requests() -> None:
    world = World()
    node = world.unified(block_tokens=BLOCK)
    wrong = world.submit(node, prompt_len=18, max_new_tokens=20, invalid_row=3)
    right = world.submit(node, prompt_len=18, max_new_tokens=20, seed=2)
    world.run()
    assert node.cause(wrong) is Cause.INVALID_LOGITS
    assert node.tokens[wrong] == expected_tokens(18, 6, seed=1), "of a block that is no number nothing is said"
    assert node.tokens[right] == expected_tokens(18, 20, seed=2)
    assert_nothing_is_held(node)


def test_the_iteration_of_a_batch_of_blocks_is_frozen_at_its_launch() -> None:
    world = World()
    node = world.unified(block_tokens=BLOCK, window_depth=2)
    world.submit(node, prompt_len=18, max_new_tokens=20)
    world.run()
    plans = [command.plan for command in node.commands if isinstance(command, LaunchBatch)]
    assert [plan.iteration for plan in plans] == list(range(1, len(plans) + 1))


def test_tokens_of_an_outcome_are_told_apart_by_its_counts() -> None:
    tokens = b"".join(number.to_bytes(4, "little") for number in range(6))
    outcome = BatchOutcome(BatchId(1), 1, tokens, bytes([0, TokenFlag.EOS, 0]), counts=(3, 1, 2))
    assert outcome.tokens_by_row() == [tokens[:12], tokens[12:16], tokens[16:]]
    one_each = BatchOutcome(BatchId(1), 1, tokens, bytes(6))
    assert one_each.tokens_by_row() == [tokens[at : at + 4] for at in range(0, 24, 4)]
