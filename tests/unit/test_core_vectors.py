"""Requests that end with their prompt: in the same step, batches and books as those that get tokens."""

import re

import pytest
from msgspec import structs

from core_driver import Replica, World, answer, assert_nothing_is_held, expected_tokens, finished
from tandem.core.batch import BatchKind
from tandem.core.commands import EmitTokens, FinishReason, FinishRequest, StartRequest
from tandem.core.events import BatchFailed, BatchReturned
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.numbers import numbers
from tandem.core.values import Cause
from tandem.server.node.batch_log import BatchLog, load_of
from tandem.server.node.without_tokens import command_without_tokens, event_without_tokens


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("prompt_len", [1, 16, 17, 100, 200])
def test_a_request_that_ends_with_its_prompt_has_a_vector_and_no_token(prompt_len: int, chunk_tokens: int) -> None:
    world = World()
    node = world.unified(chunk_tokens=chunk_tokens)
    request = world.submit(node, prompt_len=prompt_len, wants_vector=True)
    world.run()
    end = finished(node, request)
    assert end.reason is FinishReason.PROMPT
    assert end.vector == answer(prompt_len, seed=1).vector()
    assert end.computed_tokens == prompt_len
    assert dict(end.ledger.stages).keys() == {"prefill_forward"}
    assert node.said(StartRequest) == node.said(EmitTokens) == []
    rows = [row for plan in node.plans() for row in plan.rows]
    assert [row.pools for row in rows] == [False] * (len(rows) - 1) + [True]
    assert not any(row.samples for row in rows)
    assert_nothing_is_held(node)


def test_vectors_and_tokens_share_steps_and_batches() -> None:
    world = World()
    node = world.unified(chunk_tokens=48, mixed_chunk=True)
    talks = [world.submit(node, prompt_len=30 + seed, seed=seed, max_new_tokens=20) for seed in range(3)]
    world.run_until(lambda: all(node.tokens.get(request) for request in talks))
    vectors = [world.submit(node, prompt_len=40 + 9 * seed, seed=seed, wants_vector=True) for seed in range(5)]
    world.run()
    for seed, request in enumerate(talks):
        assert node.tokens[request] == expected_tokens(30 + seed, 20, seed=seed)
    for seed, request in enumerate(vectors):
        assert finished(node, request).vector == answer(40 + 9 * seed, seed=seed).vector()
    assert any(plan.kind is BatchKind.MIXED and any(row.pools for row in plan.rows) for plan in node.plans())
    assert_nothing_is_held(node)


def test_a_cached_prefix_is_used_and_the_last_token_is_computed() -> None:
    world = World()
    node = world.unified()
    first = world.submit(node, prompt_len=64, wants_vector=True)
    world.run()
    second = world.submit(node, prompt_len=64, wants_vector=True)
    world.run()
    assert finished(node, first).cached_tokens == 0
    assert finished(node, second).cached_tokens == 48
    assert finished(node, second).vector == answer(64, seed=1).vector()


def test_what_is_not_finite_fails_by_name_and_nobody_else() -> None:
    world = World()
    node = world.unified()
    bad, good = (world.submit(node, prompt_len=20, seed=seed, wants_vector=True) for seed in (1, 2))
    node.holds.add(BatchReturned)
    world.run()
    outcome = node.end()
    node.release()
    finite = tuple((request, vector) for request, vector in outcome.vectors if request != bad)
    world.send(node, BatchReturned(structs.replace(outcome, vectors=finite)))
    world.run()
    assert node.cause(bad) is Cause.INVALID_LOGITS
    assert finished(node, good).vector == answer(20, seed=2).vector()
    assert_nothing_is_held(node)


def test_an_abort_and_a_failed_batch_leave_nothing() -> None:
    world = World()
    node = world.unified(chunk_tokens=16, window_depth=2)
    one = world.submit(node, prompt_len=60, wants_vector=True)
    world.run_until(lambda: len(node.plans()) == 2)
    world.abort(node, one)
    world.run()
    assert node.cause(one) is Cause.ABORTED

    other = world.submit(node, prompt_len=10, seed=2, wants_vector=True)
    node.holds.add(BatchReturned)
    world.run()
    plan = node.break_off()
    assert plan is not None
    world.send(node, BatchFailed(plan.id, Cause.ENGINE_FAILED, "broken"))
    world.run()
    assert node.cause(other) is Cause.ENGINE_FAILED
    node.release()
    assert_nothing_is_held(node)


def test_a_request_waits_for_its_deadline_and_no_longer() -> None:
    world = World()
    node = world.unified()
    node.holds.add(BatchReturned)
    request = world.submit(node, prompt_len=10, timeout_ns=1_000_000, wants_vector=True)
    world.run()
    world.advance(2_000_000)
    assert node.cause(request) is Cause.DEADLINE_EXCEEDED


def test_no_vector_is_on_record() -> None:
    world = World()
    node = world.unified()
    world.submit(node, prompt_len=20, wants_vector=True)
    world.run()
    happened = [event_without_tokens(event) for _, events, _ in node.log for event in events]
    wanted = [command_without_tokens(command) for command in node.commands]
    said = [vector for it in happened if isinstance(it, BatchReturned) for _, vector in it.outcome.vectors]
    said += [it.vector for it in wanted if isinstance(it, FinishRequest)]
    assert said == [bytes(8)] * 2


# --- whole prompts ---------------------------------------------------------------------------------------------------


def encoder(world: World, chunk_tokens: int = 64) -> Replica:
    return world.unified(chunk_tokens=chunk_tokens, whole_prompts=True, prefix_cache=False)


def test_prompts_of_an_encoder_are_never_cut() -> None:
    world = World()
    node = encoder(world)
    lengths = [40, 40, 10, 64, 1, 63, 17, 30]
    requests = [world.submit(node, prompt_len=n, seed=n, wants_vector=True) for n in lengths]
    world.run()
    rows = [row for plan in node.plans() for row in plan.rows]
    assert [(row.request, row.start, row.stop) for row in rows] == [
        (request, 0, length) for request, length in zip(requests, lengths, strict=True)
    ]
    assert all(sum(row.stop for row in plan.rows) <= 64 for plan in node.plans())
    assert max(len(plan.rows) for plan in node.plans()) > 1
    for request, length in zip(requests, lengths, strict=True):
        assert finished(node, request).vector == answer(length, seed=length).vector()
        assert finished(node, request).cached_tokens == 0
    assert_nothing_is_held(node)


def test_a_prompt_that_no_batch_holds_is_refused_by_name() -> None:
    world = World()
    node = encoder(world)
    request = world.submit(node, prompt_len=65, wants_vector=True)
    world.run()
    assert node.cause(request) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert "one batch of 64" in node.ended[request].detail  # type: ignore[union-attr]


# --- lines -----------------------------------------------------------------------------------------------------------


def test_batches_with_vectors_carry_the_numbers_of_their_launch() -> None:
    """Overlap: a batch is launched before the one before it has returned, and no batch comes after the last."""
    world = World()
    node = encoder(world)
    for seed in range(6):
        world.submit(node, prompt_len=50, seed=seed, wants_vector=True)
    world.run()
    lines: list[str] = []
    idle = EngineNode(node.node.state.settings)
    log = BatchLog(lines.append, lambda: load_of(numbers(idle)), shows_numbers=True)
    for now, happened, effects in node.log:
        log.after(now, happened, effects)
    found = [re.fullmatch(r"Prefill batch \[(\d+)\], #new-seq: 1, #new-token: 50, .*", line) for line in lines]
    assert [int(match[1]) for match in found if match] == [1, 2, 3, 4, 5, 6]
    assert max(len(window) for window in node.windows) == 2
