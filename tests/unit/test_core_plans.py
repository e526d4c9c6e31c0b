"""What a node launches, and what it makes of results: chunks, overlap, iteration numbers, ends."""

from typing import Any

import pytest
from msgspec import structs

from core_driver import World, assert_nothing_is_held, expected_tokens
from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, TokenFlag
from tandem.core.commands import EmitTokens, FailRequest, FinishReason, FinishRequest, ForgetRequests, StartRequest
from tandem.core.events import BatchFailed, BatchReturned, DrainRequested, FlushRequested, StopMatched
from tandem.core.scheduler.chunk_budget import RIDES_BETWEEN, ChunkBudget
from tandem.core.scheduler.node import learn_cost, learn_hashes
from tandem.core.scheduler.request_state import InflightBatch, State
from tandem.core.settings import PrefillStall
from tandem.core.values import MILLISECOND, SECOND, BatchId, Cause, Nanos, RequestId


def spans(plans: list[BatchPlan], request: RequestId) -> list[tuple[int, int]]:
    return [(row.start, row.stop) for plan in plans for row in plan.rows if row.request == request]


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk_tokens", [16, 40, 64])
def test_chunks_end_at_page_borders_and_cover_the_prompt_once(prompt_len: int, chunk_tokens: int) -> None:
    world = World()
    node = world.unified(chunk_tokens=chunk_tokens)
    request = world.submit(node, prompt_len=prompt_len)
    world.run()
    covered = spans(node.plans(), request)
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
    assert covered[-1][1] == prompt_len
    assert all(stop % 16 == 0 for _, stop in covered[:-1])
    assert all(stop - start <= chunk_tokens for start, stop in covered)


def test_only_the_last_chunk_samples() -> None:
    world = World()
    node = world.unified(chunk_tokens=32)
    world.submit(node, prompt_len=100)
    world.run()
    assert [row.samples for plan in node.plans() for row in plan.rows] == [False, False, False, True]


def test_short_prompts_share_a_batch_within_the_chunk_budget() -> None:
    world = World()
    node = world.unified(chunk_tokens=64)
    requests = [world.submit(node, prompt_len=20, seed=seed) for seed in range(4)]
    world.run()
    first = node.plans()[0]
    assert [row.request for row in first.rows][:3] == requests[:3]
    assert sum(row.stop - row.start for row in first.rows) <= 64


def test_plans_name_a_page_once_and_never_the_running_set() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node, prompt_len=40, max_new_tokens=30)
    world.run()
    named = [page for plan in node.plans() for delta in (*plan.rows, *plan.join, *plan.grow) for page in delta.pages]
    assert len(named) == len(set(named)) == 5
    joins = [join.request for plan in node.plans() for join in plan.join]
    assert joins == [request]


def test_decode_rows_wait_while_prompts_run_unless_chunks_are_mixed() -> None:
    def kinds(*, mixed_chunk: bool) -> set[BatchKind]:
        world = World()
        node = world.unified(chunk_tokens=16, mixed_chunk=mixed_chunk)
        first = world.submit(node, prompt_len=16, max_new_tokens=12)
        world.run_until(lambda: node.state_of(first) is State.RUNNING)
        world.submit(node, prompt_len=96, seed=2)
        world.run()
        assert node.tokens[first] == expected_tokens(16, 12, seed=1)
        return {plan.kind for plan in node.plans()}

    assert kinds(mixed_chunk=False) == {BatchKind.PREFILL, BatchKind.DECODE}
    assert kinds(mixed_chunk=True) == {BatchKind.PREFILL, BatchKind.DECODE, BatchKind.MIXED}


def test_prompts_do_not_starve_decode_rows() -> None:
    world = World()
    node = world.unified(chunk_tokens=16, prefill_streak=2, num_pages=256)
    first = world.submit(node, prompt_len=16, max_new_tokens=90)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    before = len(node.plans())
    for seed in range(2, 8):
        world.submit(node, prompt_len=160, seed=seed)
    world.run()
    kinds = "".join(plan.kind[0] for plan in node.plans()[before:])
    assert "ppp" not in kinds
    assert "pp" in kinds


def between_decodes(plans: list[BatchPlan]) -> list[int]:
    """Prompt tokens that are launched between two batches with decode rows, or with them."""
    sums = [0]
    for plan in plans:
        sums[-1] += sum(row.stop - row.start for row in plan.rows)
        if plan.decodes:
            sums.append(0)
    return sums


def prompts_beside_one_who_decodes(token_ms: int, **settings: Any) -> list[int]:
    """Four prompts of 200 tokens come while one request decodes, whose own prompt has shown what tokens cost."""
    world = World()
    node = world.unified(num_pages=256, **settings)
    node.cost.prompt_token_ns = token_ms * MILLISECOND
    first = world.submit(node, prompt_len=64, max_new_tokens=150)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    before = len(node.plans())
    others = [world.submit(node, prompt_len=200, max_new_tokens=4, seed=seed) for seed in range(2, 6)]
    world.run()
    assert [node.tokens[one] for one in others] == [expected_tokens(200, 4, seed=seed) for seed in range(2, 6)]
    sums = between_decodes(node.plans()[before:])
    assert sum(sums) == 4 * 200
    return sums


@pytest.mark.parametrize("mixed_chunk", [False, True])
def test_prompts_take_as_long_as_those_who_decode_may_wait(mixed_chunk: bool) -> None:
    stall = {"max_ns": 40 * MILLISECOND, "min_tokens": 1}
    usual = {"mixed_chunk": mixed_chunk, "prefill_streak": 3}
    assert max(prompts_beside_one_who_decodes(1, **usual)) >= 64
    for token_ms, allowed in ((1, 40), (2, 20)):
        most = max(prompts_beside_one_who_decodes(token_ms, **usual, prefill_stall=stall))
        assert allowed // 16 * 16 <= most <= allowed, "whole pages, and the end of a prompt"
    assert max(prompts_beside_one_who_decodes(9, **usual, prefill_stall=stall)) == 16, "a page comes always"
    assert max(prompts_beside_one_who_decodes(9, **usual, prefill_stall={"max_ns": 1, "min_tokens": 48})) == 48


def test_what_batches_take_without_prompts_is_measured_again_now_and_then() -> None:
    """After so many batches of both, and as soon as twice as many decode, or half as many."""
    stall = PrefillStall(Nanos(80 * MILLISECOND), min_tokens=64)
    budget = ChunkBudget()
    budget.launch(0, num_decoding=8, all_had_turn=True)
    assert not budget.is_stale(100), "one with prompts has not been launched since"
    for _ in range(RIDES_BETWEEN):
        assert not budget.is_stale(8)
        assert budget.tokens_while_others_wait(stall, 64, 16, num_decoding=8) == 64
        budget.launch(64, num_decoding=8, all_had_turn=True)
    assert budget.is_stale(8)
    budget.launch(0, num_decoding=8, all_had_turn=True)
    budget.launch(64, num_decoding=8, all_had_turn=True)
    assert [count for count in range(1, 40) if not budget.is_stale(count)] == list(range(4, 17))


@pytest.mark.parametrize(("row_ms", "token_us"), [(3.0, 500), (8.0, 200), (1.2, 500)])
@pytest.mark.parametrize("counts", [(60, 1), (1, 60)])
def test_what_prompts_cost_is_known_when_few_decode_after_many_or_many_after_few(
    row_ms: float, token_us: int, counts: tuple[int, int]
) -> None:
    stall = PrefillStall(Nanos(80 * MILLISECOND), min_tokens=16)
    budget = ChunkBudget()
    for count in counts:
        for _ in range(200):
            num_tokens = budget.tokens_while_others_wait(stall, 512, 16, num_decoding=count)
            budget.launch(num_tokens, num_decoding=count, all_had_turn=True)
            took_us = 5000 + row_ms * 1000 * count + num_tokens * token_us
            budget.learn(num_tokens, Nanos(int(1000 * took_us)), num_decoding=count, is_mixed=True)
    assert budget.token_ns == pytest.approx(1000 * token_us, rel=0.1)


def test_a_node_that_always_has_prompts_measures_batches_without_them() -> None:
    world = World()
    stall = {"max_ns": 40 * MILLISECOND, "min_tokens": 1}
    node = world.unified(num_pages=512, mixed_chunk=True, prefill_stall=stall)
    node.cost.prompt_token_ns = 2 * MILLISECOND
    first = world.submit(node, prompt_len=64, max_new_tokens=200)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    before = len(node.plans())
    world.submit(node, prompt_len=2000, max_new_tokens=1, seed=2)
    world.run()
    has_prompts = [bool(plan.rows) for plan in node.plans()[before:]]
    first_one, last = has_prompts.index(True), len(has_prompts) - has_prompts[::-1].index(True)
    beside = has_prompts[first_one:last]
    assert beside.count(False) == beside.count(True) // RIDES_BETWEEN > 1


def test_a_batch_that_took_no_longer_for_its_prompts_tells_nothing() -> None:
    budget = ChunkBudget()
    budget.learn(100, Nanos(100 * MILLISECOND))
    budget.learn(0, Nanos(30 * MILLISECOND), num_decoding=4)
    for _ in range(100):
        budget.learn(512, Nanos(20 * MILLISECOND), num_decoding=1)
    assert budget.token_ns == MILLISECOND


def test_what_waited_for_prompts_of_other_ranks_is_not_what_decoding_takes() -> None:
    world = World()
    node = world.unified(mixed_chunk=True)
    first = world.submit(node, prompt_len=16, max_new_tokens=12)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    known = node.state.chunk_budget.cost.decode_us
    flight = InflightBatch(BatchId(1), 1, (), (first,))
    outcome = BatchOutcome(BatchId(1), 1, b"", b"", duration_ns=Nanos(SECOND), prefill_ranks=1)
    learn_cost(node.state, flight, outcome)
    assert node.state.chunk_budget.cost.decode_us == known
    learn_cost(node.state, flight, structs.replace(outcome, prefill_ranks=0))
    assert node.state.chunk_budget.cost.decode_us == SECOND // 1000


def test_what_prompts_cost_is_learned_while_others_decode() -> None:
    world = World()
    node = world.unified(num_pages=256, mixed_chunk=True, prefill_stall={"max_ns": 40 * MILLISECOND, "min_tokens": 1})
    for seed, token_ms in ((1, 1), (2, 4)):
        node.cost.prompt_token_ns = token_ms * MILLISECOND
        request = world.submit(node, prompt_len=200, max_new_tokens=150 if seed == 1 else 1, seed=seed)
        world.run_until(lambda request=request: request in node.tokens)
    assert 2 * MILLISECOND < node.state.chunk_budget.token_ns < 4 * MILLISECOND
    assert BatchKind.MIXED in {plan.kind for plan in node.plans()}


def test_where_nobody_decodes_chunks_are_whole() -> None:
    world = World()
    node = world.unified(num_pages=256, prefill_stall={"max_ns": 1, "min_tokens": 1})
    node.cost.prompt_token_ns = MILLISECOND
    for seed in (1, 2):
        request = world.submit(node, prompt_len=200, max_new_tokens=1, seed=seed)
        world.run()
        assert spans(node.plans(), request) == [(0, 64), (64, 128), (128, 192), (192, 200)]


def test_what_a_prompt_token_costs_is_known_from_the_last_ones_however_they_came() -> None:
    budget = ChunkBudget()
    budget.learn(512, Nanos(512 * 1000))
    for _ in range(20):
        budget.learn(1, Nanos(10_000))  # a prompt that is cached but for its end
    assert budget.token_ns < 1400
    for _ in range(40):
        budget.learn(512, Nanos(512 * 3000))
    assert budget.token_ns >= 2990, "what has become slower"


def test_beside_those_who_decode_prompts_cost_what_a_batch_takes_longer_for_them() -> None:
    budget = ChunkBudget()
    budget.learn(0, Nanos(30 * MILLISECOND), num_decoding=4)
    assert not budget.token_ns
    for _ in range(4):
        budget.learn(100, Nanos(130 * MILLISECOND), num_decoding=4)
    assert budget.token_ns == MILLISECOND


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "settles_at"),
    [
        (20, 1, 130),  # what is left of the time
        (100, 1, 100),  # more than half of the time is the batch's own: its tokens take as long again
        (190, 0.05, 512),  # and where that is more than all of it, too
        (190, 10, 64),  # few tokens are worth a batch that is dear anyway
    ],
)
def test_a_batch_is_not_made_so_small_that_most_of_its_time_is_its_own(
    fixed_ms: int, token_ms: float, settles_at: int
) -> None:
    stall = PrefillStall(Nanos(150 * MILLISECOND), min_tokens=64)
    budget = ChunkBudget()
    sizes = [512]
    for _ in range(600):
        budget.learn(sizes[-1], Nanos(fixed_ms * MILLISECOND + int(sizes[-1] * token_ms * MILLISECOND)))
        sizes.append(budget.largest_while_others_wait(stall, 512, 16))
    assert sizes[-300:] == pytest.approx([settles_at] * 300, rel=0.05), "and stays there"


def test_where_two_batches_would_take_longer_than_the_time_allowed_there_is_one_in_a_turn() -> None:
    """However few tokens it has, and however cheap more of them are: each batch costs as much again."""
    stall = PrefillStall(Nanos(150 * MILLISECOND), min_tokens=64)
    for fixed_ms, second in ((80, 0), (70, 400)):
        budget = ChunkBudget()
        for num_tokens in (512, 128, 256, 512):
            budget.learn(num_tokens, Nanos(fixed_ms * MILLISECOND + num_tokens * MILLISECOND // 100))
        assert budget.tokens_while_others_wait(stall, 400, 16, num_decoding=1) == 400
        budget.launch(16, num_decoding=0, all_had_turn=False)
        assert budget.tokens_while_others_wait(stall, 400, 16, num_decoding=1) == second, fixed_ms
        budget.launch(0, num_decoding=1, all_had_turn=True)
        assert budget.tokens_while_others_wait(stall, 400, 16, num_decoding=1) == 400


# --- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_chunk", [False, True])
def test_normal_and_overlapped_execution_emit_equal_tokens(mixed_chunk: bool) -> None:
    emitted = []
    for depth in (1, 2, 3):
        world = World()
        node = world.unified(window_depth=depth, chunk_tokens=32, mixed_chunk=mixed_chunk)
        asked = [{"prompt_len": 30 + 9 * n, "max_new_tokens": 5 + n, "eos_after": 4 + n, "seed": n} for n in range(6)]
        ids = [world.submit(node, **one) for one in asked]
        world.run()
        assert max(len(flights) for flights in node.windows) == depth
        emitted.append([node.tokens[request] for request in ids])
        assert_nothing_is_held(node)
    assert emitted[0] == [expected_tokens(30 + 9 * n, 4 + n, seed=n, eos_after=4 + n) for n in range(6)]
    assert emitted[1] == emitted[2] == emitted[0]


def joined_before_result(**settings: Any) -> bool:
    """Whether a batch in which it decodes is launched before the result of its prompt is known."""
    world = World()
    node = world.unified(**settings)
    node.holds.add(BatchReturned)
    request = world.submit(node, max_new_tokens=3)
    world.run()
    found = any(request in flight.members for flight in node.state.inflight)
    node.release()
    node.holds.clear()
    world.run()
    assert node.tokens[request] == expected_tokens(40, 3, seed=1)
    assert_nothing_is_held(node)
    return found


def test_the_second_token_does_not_wait_for_the_first_to_be_known() -> None:
    assert joined_before_result(window_depth=2)
    assert not joined_before_result(window_depth=1)
    assert not joined_before_result(window_depth=3, num_micro_batches=2), "the first stage would wait for the last"


def test_a_first_token_that_ends_it_wastes_one_row_and_nothing_is_emitted_after_it() -> None:
    for depth, wasted in ((1, 0), (2, 1)):
        world = World()
        node = world.unified(window_depth=depth)
        request = world.submit(node, max_new_tokens=50, eos_after=1)
        world.run()
        assert node.tokens[request] == expected_tokens(40, 1, seed=1, eos_after=1)
        assert node.rows_run[request] == 1 + wasted
        assert_nothing_is_held(node)


def test_who_waits_for_its_first_token_is_pushed_back_for_nobody() -> None:
    """It would have been computed for nothing. The others wait for a page until that token is there."""
    world = World()
    node = world.unified(num_pages=7, conservativeness=0.0, window_depth=3)
    first = world.submit(node, prompt_len=40, max_new_tokens=60)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    running = node.progress(first)
    world.run_until(lambda: running.length + running.pending == 48)
    second = world.submit(node, prompt_len=50, max_new_tokens=9, seed=2)
    world.run_until(lambda: node.state_of(second) is State.COMPUTING)
    world.run_until(lambda: node.state_of(second) is not State.COMPUTING)
    assert node.progress(second).generated == 1
    world.run()
    assert node.state.counters.retractions > 0, "the other one lacked a page"
    assert node.tokens[first] == expected_tokens(40, 60, seed=1)
    assert node.tokens[second] == expected_tokens(50, 9, seed=2)
    assert_nothing_is_held(node)


def test_for_the_page_of_who_is_ahead_of_its_first_token_nobody_is_pushed_back_who_is_more_urgent() -> None:
    world = World()
    usual = {"conservativeness": 0.0, "prefix_cache": False, "priorities": {}}
    node = world.unified(num_pages=12, mixed_chunk=True, **usual)
    urgent = [world.submit(node, prompt_len=16, max_new_tokens=120, seed=seed, priority=5) for seed in (1, 2)]
    world.run_until(lambda: len(node.tokens.get(urgent[1], [])) >= 50)
    other = world.submit(node, prompt_len=32, max_new_tokens=40, seed=3, priority=0)
    world.run_until(lambda: node.state.counters.retractions > 0)
    assert [node.progress(one).retractions for one in (*urgent, other)] == [0, 0, 1]
    world.run()
    assert [node.tokens[one] for one in urgent] == [expected_tokens(16, 120, seed=seed) for seed in (1, 2)]
    assert node.tokens[other] == expected_tokens(32, 40, seed=3)


def test_a_block_that_fails_with_its_prompt_leaves_those_of_others_as_they_are() -> None:
    world = World()
    node = world.unified(window_depth=2, block_tokens=16)
    first = world.submit(node, prompt_len=40, max_new_tokens=60)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    second = world.submit(node, prompt_len=20, max_new_tokens=30, seed=2)
    world.run_until(lambda: any(row.samples for flight in node.state.inflight[:1] for row in flight.rows))
    world.step(node, [BatchFailed(node.break_off().id, Cause.ENGINE_FAILED, "broken")])
    world.run()
    assert isinstance(node.ended[second], FailRequest)
    assert node.tokens[first] == expected_tokens(40, 60, seed=1)
    assert_nothing_is_held(node)


def test_a_request_that_ends_by_length_costs_no_useless_row() -> None:
    for depth in (1, 2, 3):
        world = World()
        node = world.unified(window_depth=depth)
        request = world.submit(node, max_new_tokens=7)
        world.run()
        assert node.rows_run[request] == 7


def test_an_end_of_sequence_in_flight_wastes_one_row_and_nothing_is_emitted_after_it() -> None:
    for depth, wasted in ((1, 0), (2, 1)):
        world = World()
        node = world.unified(window_depth=depth)
        request = world.submit(node, max_new_tokens=50, eos_after=5)
        other = world.submit(node, max_new_tokens=50, seed=2)
        world.run()
        assert node.tokens[request] == expected_tokens(40, 5, seed=1, eos_after=5)
        assert node.tokens[other] == expected_tokens(40, 50, seed=2)
        assert node.rows_run[request] == 5 + wasted
        end = node.ended[request]
        assert isinstance(end, FinishRequest)
        assert end.reason is FinishReason.STOP


def test_a_request_for_one_token_never_decodes() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node, max_new_tokens=1)
    world.run()
    assert node.tokens[request] == expected_tokens(40, 1, seed=1)
    assert not any(plan.decodes for plan in node.plans())
    end = node.ended[request]
    assert isinstance(end, FinishRequest)
    assert end.reason is FinishReason.LENGTH
    assert_nothing_is_held(node)


def test_a_finished_request_has_left_the_decode_set_before_the_next_batch() -> None:
    world = World()
    node = world.unified(window_depth=1)
    world.submit(node, max_new_tokens=3)
    other = world.submit(node, max_new_tokens=9, seed=2)
    world.run()
    assert node.tokens[other] == expected_tokens(40, 9, seed=2)


def test_all_tokens_of_a_step_leave_in_one_command() -> None:
    world = World()
    node = world.unified()
    for seed in range(5):
        world.submit(node, prompt_len=10, max_new_tokens=6, seed=seed)
    world.run()
    for _, _, effects in node.log:
        assert sum(isinstance(command, EmitTokens) for command in effects.commands) <= 1
    assert max(len(emit.requests) for emit in node.said(EmitTokens)) == 5


def test_start_comes_before_the_first_token_and_forget_after_the_end() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node, max_new_tokens=2)
    world.run()
    mine = [c for c in node.commands if isinstance(c, StartRequest | EmitTokens | FinishRequest | ForgetRequests)]
    assert [type(c) for c in mine] == [StartRequest, EmitTokens, EmitTokens, FinishRequest, ForgetRequests]
    assert mine[-1].requests == (request,)


# --- iteration numbers: the five cases of sglang#20845, as far as they are about plans ------------------------------


def test_three_prefills_back_to_back_carry_the_numbers_of_their_launch() -> None:
    world = World()
    node = world.unified(chunk_tokens=32, window_depth=2)
    node.holds.add(BatchReturned)
    for seed in range(3):
        world.submit(node, prompt_len=32, max_new_tokens=1, seed=seed)
    world.run()
    assert [flight.forward_iter for flight in node.state.inflight] == [1, 2]
    node.release()
    world.run()
    assert [plan.iteration for plan in node.plans()] == [1, 2, 3]
    assert [e.outcome.iteration for _, es, _ in node.log for e in es if isinstance(e, BatchReturned)] == [1, 2, 3]


def test_the_last_batch_before_idle_keeps_its_number() -> None:
    world = World()
    node = world.unified(window_depth=2, chunk_tokens=32)
    node.holds.add(BatchReturned)
    world.submit(node, prompt_len=64, max_new_tokens=1)
    world.run()
    assert [flight.forward_iter for flight in node.state.inflight] == [1, 2], "both are under way before one returns"
    node.release()
    world.run()
    assert [plan.iteration for plan in node.plans()] == [1, 2]
    assert [e.outcome.iteration for _, es, _ in node.log for e in es if isinstance(e, BatchReturned)] == [1, 2]


def test_numbers_are_frozen_at_launch_in_plan_and_window_alike_and_rise_strictly() -> None:
    world = World()
    node = world.unified(chunk_tokens=32)
    for seed in range(4):
        world.submit(node, prompt_len=60, max_new_tokens=9, seed=seed)
    world.run()
    numbers = [plan.iteration for plan in node.plans()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {plan.kind for plan in node.plans()} == {BatchKind.PREFILL, BatchKind.DECODE}
    in_windows = {flight.batch: flight.forward_iter for flights in node.windows for flight in flights}
    assert in_windows == {plan.id: plan.iteration for plan in node.plans()}


def test_a_result_booked_after_the_next_launch_is_booked_under_its_own_number() -> None:
    world = World()
    node = world.unified(window_depth=2)
    request = world.submit(node, max_new_tokens=8)
    world.run_until(lambda: node.state_of(request) is State.RUNNING and len(node.state.inflight) == 2)
    oldest, newest = node.state.inflight
    assert newest.forward_iter == oldest.forward_iter + 1 == node.state.forward_ct
    world.run_until(lambda: node.state.inflight[:1] != [oldest])
    returned = [e.outcome for _, es, _ in node.log for e in es if isinstance(e, BatchReturned)]
    assert (returned[-1].batch, returned[-1].iteration) == (oldest.batch, oldest.forward_iter)


# --- results that are odd --------------------------------------------------------------------------------------------


def test_a_duplicate_result_changes_nothing() -> None:
    world = World()
    node = world.unified(window_depth=1)
    request = world.submit(node, max_new_tokens=6)
    returned: list[BatchReturned] = []
    for _ in range(100):
        if not world.turn(node):
            break
        returned += [event for event in node.log[-1][1] if isinstance(event, BatchReturned)]
        for event in returned[-2:]:
            before = node.node.snapshot()
            effects = world.step(node, [event])
            assert effects.commands == ()
            world.assert_same_but_for_the_step_number(before, node)
    assert node.tokens[request] == expected_tokens(40, 6, seed=1)


def test_a_failed_batch_ends_its_requests_and_the_others_go_on() -> None:
    world = World()
    node = world.unified(window_depth=1, chunk_tokens=48)
    lost = world.submit(node, prompt_len=48)
    kept = world.submit(node, prompt_len=48, seed=2)
    node.holds.add(BatchReturned)
    world.run()
    (flight,) = node.state.inflight
    assert [row.request for row in flight.rows] == [lost]
    node.break_off()
    world.send(node, BatchFailed(flight.batch, Cause.WORKER_LOST, "out of memory"))
    node.release()
    world.run()
    assert node.cause(lost) is Cause.WORKER_LOST
    assert node.tokens[kept] == expected_tokens(48, 4, seed=2)
    assert_nothing_is_held(node)


def test_a_failure_of_a_batch_that_is_not_the_oldest_is_ignored() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node)
    node.holds.add(BatchReturned)
    world.run()
    world.send(node, BatchFailed(node.state.inflight[0].batch + 5, Cause.WORKER_LOST, ""))
    world.run()
    node.release()
    world.run()
    assert node.tokens[request] == expected_tokens(40, 4, seed=1)


@pytest.mark.parametrize("invalid_row", [1, 3])
def test_logits_that_are_not_finite_end_the_request_and_no_other(invalid_row: int) -> None:
    ends_alone(invalid_row, TokenFlag.INVALID, Cause.INVALID_LOGITS)


@pytest.mark.parametrize("invalid_row", [1, 3])
def test_a_grammar_that_has_grown_too_large_has_a_cause_of_its_own(invalid_row: int) -> None:
    ends_alone(invalid_row, TokenFlag.INVALID | TokenFlag.OUTGROWN, Cause.GRAMMAR_TOO_COMPLEX)


def ends_alone(invalid_row: int, no_token: int, cause: Cause) -> None:
    """Whose row gets no token; who is in the same batches gets all of them."""
    world = World()
    node = world.unified()
    node.no_token = no_token
    bad = world.submit(node, invalid_row=invalid_row)
    good = world.submit(node, seed=2)
    world.run()
    assert node.cause(bad) is cause
    assert node.tokens.get(bad, []) == expected_tokens(40, invalid_row - 1, seed=1)
    assert node.tokens[good] == expected_tokens(40, 4, seed=2)
    assert_nothing_is_held(node)


def test_decode_tries_no_grammar_that_has_grown_too_large_on_prefill() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    prefill.no_token = TokenFlag.INVALID | TokenFlag.OUTGROWN
    room = world.room()
    left = world.submit(prefill, room=room, invalid_row=1)
    right = world.submit(decode, room=room, peer=prefill.address)
    world.run()
    assert prefill.cause(left) is decode.cause(right) is Cause.GRAMMAR_TOO_COMPLEX
    assert_nothing_is_held([prefill, decode])


def test_a_stop_string_ends_the_request_as_finished_with_what_was_emitted() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node, max_new_tokens=50)
    world.run_until(lambda: len(node.tokens.get(request, [])) == 4)
    world.send(node, StopMatched(request))
    world.run()
    end = node.ended[request]
    assert isinstance(end, FinishRequest)
    assert end.reason is FinishReason.STOP
    assert_nothing_is_held(node)


def test_a_stop_string_before_any_token_is_ignored() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node)
    world.send(node, StopMatched(request))
    world.send(node, StopMatched(RequestId(99)))
    world.run()
    assert node.tokens[request] == expected_tokens(40, 4, seed=1)


# --- intake ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_its_cause_and_keeps_nothing() -> None:
    world = World()
    node = world.unified(max_queued=2, max_running=1)
    node.holds.add(BatchReturned)
    running = world.submit(node)
    world.run()
    waiting = [world.submit(node, seed=seed) for seed in (2, 3)]
    refused = world.submit(node, seed=4)
    world.run()
    assert node.cause(refused) is Cause.QUEUE_FULL
    node.release()
    world.run()
    assert set(node.tokens) == {running, *waiting}
    assert_nothing_is_held(node)


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_one_that_just_fits_is_not() -> None:
    world = World()
    node = world.unified(num_pages=4)
    refused = world.submit(node, prompt_len=64)
    accepted = world.submit(node, prompt_len=63, max_new_tokens=1)
    world.run()
    assert node.cause(refused) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert node.tokens[accepted] == expected_tokens(63, 1, seed=1)


def test_a_draining_node_finishes_what_runs_and_refuses_what_comes() -> None:
    world = World()
    node = world.unified()
    first = world.submit(node, max_new_tokens=20)
    world.run_until(lambda: node.state_of(first) is State.RUNNING)
    world.send(node, DrainRequested())
    world.run_until(lambda: node.state.draining)
    late = world.submit(node)
    world.run()
    assert node.cause(late) is Cause.DRAINING
    assert len(node.tokens[first]) == 20
    assert_nothing_is_held(node)


def test_the_same_arrival_twice_is_one_request() -> None:
    world = World()
    node = world.unified()
    request = world.submit(node)
    node.parcels *= 2
    world.run()
    assert node.tokens[request] == expected_tokens(40, 4, seed=1)


def test_a_request_that_starts_no_token_in_time_ends_and_names_its_wait() -> None:
    world = World()
    node = world.unified()
    node.holds.add(BatchReturned)
    request = world.submit(node, timeout_ns=5 * SECOND)
    world.advance(4 * SECOND)
    assert request not in node.ended
    world.advance(2 * SECOND)
    assert node.cause(request) is Cause.DEADLINE_EXCEEDED
    assert node.ended[request].stage == "window"


def test_after_the_first_token_the_stall_timeout_bounds_the_gap() -> None:
    world = World()
    node = world.unified(stall_timeout_ns=3 * SECOND)
    request = world.submit(node, max_new_tokens=50)
    for _ in range(4):
        world.run_until(lambda: len(node.tokens.get(request, [])) % 7 == 6)
        node.holds.add(BatchReturned)
        world.advance(2 * SECOND)
        assert request not in node.ended
        node.release()
        world.turn(node)
    node.holds.add(BatchReturned)
    world.advance(4 * SECOND)
    assert node.cause(request) is Cause.DEADLINE_EXCEEDED
    node.release()
    world.run()
    assert_nothing_is_held(node)


def test_timers_of_those_who_have_ended_do_not_add_up_while_somebody_waits() -> None:
    """Many have a deadline that is days away, and one that ends sooner is always there."""
    world = World()
    node = world.unified(max_running=1)
    node.holds.add(BatchReturned)
    world.submit(node)
    for _ in range(200):
        late = world.submit(node, timeout_ns=7 * 24 * 3600 * SECOND)
        world.abort(node, late)
        world.run()
    assert len(node.state.requests) == 1
    assert len(node.state.timers) < 70
    assert node.wake_at == node.progress(RequestId(1)).deadline
    node.release()
    world.run()
    assert_nothing_is_held(node)


def test_a_flush_drops_what_nobody_holds() -> None:
    world = World()
    node = world.unified()
    done = world.submit(node, prompt_len=64, max_new_tokens=1)
    world.run()
    holder = world.submit(node, prompt_len=33, max_new_tokens=30)
    world.run_until(lambda: node.state_of(holder) is State.RUNNING)
    world.send(node, FlushRequested())
    world.turn(node)
    assert len(node.state.tree.nodes) == 2
    world.run()
    world.send(node, FlushRequested())
    world.run()
    assert node.state.tree.nodes == {}
    assert node.state.pool.num_free == node.state.pool.num_pages
    assert done in node.ended


def test_outcomes_of_another_iteration_are_our_own_bug() -> None:
    world = World()
    node = world.unified()
    world.submit(node)
    node.holds.add(BatchReturned)
    world.run()
    outcome = node.end()
    wrong = BatchOutcome(outcome.batch, outcome.iteration + 1, outcome.tokens, outcome.flags)
    with pytest.raises(AssertionError):
        node.node.step([BatchReturned(wrong)], world.now)


# --- hashes ----------------------------------------------------------------------------------------------------------


def test_a_chain_of_hashes_with_a_gap_is_not_continued() -> None:
    """A page whose hash nobody has told must not be found under the hash of the next one."""
    world = World()
    node = world.unified()
    request = world.submit(node, prompt_len=31, max_new_tokens=40)
    world.run_until(lambda: request in node.state.requests and node.progress(request).generated == 12)
    progress = node.progress(request)
    flight = node.state.inflight[0]
    outcome = BatchOutcome(flight.batch, flight.forward_iter, b"", b"", ((request, b"of the third page"),))
    known = list(progress.hashes)
    assert len(known) == 2
    progress.length = 48  # the input of this batch, the last of them, fills the third page
    progress.hashes = known[:1]
    learn_hashes(node.state, flight, outcome)
    assert progress.hashes == known[:1], "the second one is missing"
    progress.hashes = list(known)
    learn_hashes(node.state, flight, outcome)
    assert progress.hashes == [*known, b"of the third page"]
