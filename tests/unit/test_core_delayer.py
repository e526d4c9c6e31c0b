"""The prefill delayer in a running node: prompts wait until they are worth a stall of the others, and no longer."""

from collections import Counter
from typing import Any

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.batch import BatchPlan
from tandem.core.commands import Effects, PromptsLetIn
from tandem.core.events import AbortRequested, BatchReturned, PagesLanded, TransferDrained
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.chunk_budget import ChunkBudget
from tandem.core.scheduler.delayer_policy import agree
from tandem.core.scheduler.numbers import DelayerTuning, numbers
from tandem.core.scheduler.prefill_delayer import Delayer
from tandem.core.scheduler.prompt_costs import BatchCost
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import SECOND, ZERO_NS, Cause, Nanos, RequestId
from tandem.metrics.delayer_waits import DelayerWaits
from tandem.metrics.node_numbers import named

NEVER_NS = 1000 * SECOND
PATIENT = {"max_delay_passes": 10_000, "window": 10_000}
QUEUE_GATE = {"queue_min_ratio": 0.5, "max_delay_ns": NEVER_NS, **PATIENT}


def node_with(delayer: dict[str, Any] | None, **settings: Any) -> tuple[World, Replica]:
    world = World()
    asked = {"num_pages": 400, "max_running": 16, "prefix_cache": False, "chunk_tokens": 512} | settings
    return world, world.unified(delayer=delayer, **asked)


def waits_by_passes(node: Replica) -> Counter[int]:
    return Counter(command.waited_passes for command in node.commands if isinstance(command, PromptsLetIn))


def counted(node: Replica, delays: DelayerWaits) -> dict[str, float]:
    """What is exported of the delayer."""
    delays.after(ZERO_NS, (), Effects(tuple(node.commands), None))
    found = named(numbers(node.node)) | delays.numbers()
    return {name: value for name, value in found.items() if "delayer" in name}


def prompt_batches(node: Replica) -> list[BatchPlan]:
    return [plan for plan in node.plans() if plan.rows]


def keep_busy(world: World, node: Replica, *, clients: int, requests: int) -> list[RequestId]:
    """So many clients, each with one request at a time: who finishes asks again at once. Outputs differ in length."""
    asked: list[RequestId] = []
    while len(node.ended) < requests:
        while len(asked) < requests and len(asked) - len(node.ended) < clients:
            number = len(asked)
            asked.append(world.submit(node, prompt_len=16, max_new_tokens=20 + 7 * number % 23, seed=number))
        if not world.turn(node):  # nothing is under way: time passes until the node wakes up by itself
            assert node.wake_at is not None
            world.now = max(world.now, node.wake_at)
    return asked


def settle(world: World, node: Replica, count: int = 8, *, max_new_tokens: int = 400) -> list[RequestId]:
    found = [world.submit(node, prompt_len=4, max_new_tokens=max_new_tokens, seed=seed) for seed in range(count)]
    world.run_until(lambda: all(node.state_of(request) is State.RUNNING for request in found))
    return found


def settle_in(world: World, node: Replica, count: int = 8, *, max_new_tokens: int = 400) -> list[RequestId]:
    """`count` requests that decode for long, begun in one batch; the first closed gate, which is skipped, is over."""
    found = settle(world, node, count, max_new_tokens=max_new_tokens)
    skipped = world.submit(node, prompt_len=4, max_new_tokens=1, seed=90)
    world.run_until(lambda: skipped in node.ended)
    assert node.state.delayer.memory.has_skipped_first
    return found


def hold(world: World, node: Replica, **asked: Any) -> RequestId:
    """One more request, which the gate does not let begin."""
    request = world.submit(node, **({"prompt_len": 4, "max_new_tokens": 3, "seed": 50} | asked))
    world.run_until(lambda: node.state_of(request) is State.COMPUTING)
    assert node.progress(request).waiting_for is WaitingFor.GATE
    return request


# --- fragmentation ---------------------------------------------------------------------------------------------------


def test_requests_that_finish_one_by_one_are_replaced_in_groups() -> None:
    """What sglang#23189 reports: without the delayer every end is followed by a prompt batch of one or two.

    There are far more slots than a prompt batch has requests, so that the slot gate alone would never close.
    """
    sizes = {}
    for name, delayer in (("off", None), ("on", QUEUE_GATE)):
        world, node = node_with(delayer, max_running=256)
        asked = keep_busy(world, node, clients=12, requests=72)
        sizes[name] = [len(plan.rows) for plan in prompt_batches(node)]
        assert sum(sizes[name]) == 72
        for number, request in enumerate(asked):
            assert node.tokens[request] == expected_tokens(16, 20 + 7 * number % 23, seed=number)
        assert_nothing_is_held(node)
    assert sorted(sizes["off"])[len(sizes["off"]) // 2] <= 2
    assert sizes["on"][0] == 12
    assert sizes["on"][1] <= 2, "the first time a gate would close is skipped"
    assert min(sizes["on"][2:-2]) >= 3, "at least three wait for seven that run"
    assert len(sizes["on"]) * 2 < len(sizes["off"])


AUTO = {"tunes_itself": True, "max_delay_ns": NEVER_NS, **PATIENT}


def batches_where_one_costs(batch_ns: int, delayer: dict[str, Any] | None = AUTO) -> list[int]:
    world, node = node_with(delayer, max_running=256)
    node.cost.base_ns, node.cost.prompt_token_ns = batch_ns, 10
    asked = keep_busy(world, node, clients=12, requests=120)
    for number, request in enumerate(asked):
        assert node.tokens[request] == expected_tokens(16, 20 + 7 * number % 23, seed=number)
    assert_nothing_is_held(node)
    return [len(plan.rows) for plan in prompt_batches(node)]


def test_a_gate_that_tunes_itself_waits_for_the_more_prompts_the_dearer_a_batch_is() -> None:
    off = batches_where_one_costs(0, None)
    assert batches_where_one_costs(0) == off, "what costs nothing is not waited for"
    numbers = [len(batches_where_one_costs(batch_ns)) for batch_ns in (500, 5_000, 50_000)]
    assert sorted(numbers, reverse=True) == numbers
    assert len(off) > 1.3 * numbers[-1], numbers


def test_without_measurements_a_gate_that_tunes_itself_lets_everybody_begin() -> None:
    world, node = node_with(AUTO, max_running=256)
    node.cost.base_ns = 50_000
    settle(world, node)
    request = world.submit(node, prompt_len=4, max_new_tokens=1, seed=50)
    world.run_until(lambda: request in node.ended)
    assert set(waits_by_passes(node)) == {0}


def costly(**settings: Any) -> tuple[World, Replica]:
    """Eight decode, a batch costs 100 us beside its tokens, and a prompt comes every 220 us: three are worth it."""
    world, node = node_with(AUTO, **settings)
    settle(world, node)
    state = node.state.delayer
    cost = node.state.chunk_budget.cost = BatchCost()
    for size in (16, 64, 16, 64):
        cost.learn(size, Nanos(100_000 + 1000 * size), num_decoding=0, is_mixed=False)
    state.arrivals = tuple(Nanos(world.now + 220_000 * at) for at in range(20))
    state.memory = DelayHistory(has_skipped_first=True)
    world.now = state.arrivals[-1]
    return world, node


def test_prompts_wait_until_as_many_are_there_as_are_worth_it() -> None:
    world, node = costly()
    first = hold(world, node)
    assert numbers(node.node).tuning == DelayerTuning(100_000, num_wanted=3)
    tuned = {name: value for name, value in named(numbers(node.node)).items() if name.startswith("tandem:prefill_del")}
    assert tuned == {"tandem:prefill_delayer_batch_cost_seconds": 1e-4, "tandem:prefill_delayer_wanted_reqs": 3}
    second, third = (world.submit(node, prompt_len=4, max_new_tokens=1, seed=seed) for seed in (60, 61))
    world.run_until(lambda: first in node.started)
    assert [row.request for row in prompt_batches(node)[-1].rows] == [first, second, third]


def test_once_no_more_are_expected_nobody_waits_for_them() -> None:
    world, node = costly()
    first = hold(world, node)
    world.now += 220_000
    world.run_until(lambda: first in node.started)
    assert [row.request for row in prompt_batches(node)[-1].rows] == [first]


def test_a_batch_that_is_full_is_not_waited_for() -> None:
    for chunk_tokens, is_held in ((512, True), (16, False)):
        world, node = costly(chunk_tokens=chunk_tokens)
        request = world.submit(node, prompt_len=16, max_new_tokens=1, seed=50)
        for _ in range(4):
            world.turn(node)
        assert (
            node.progress(request).waiting_for is WaitingFor.GATE if request not in node.ended else False
        ) is is_held


def test_what_is_left_of_a_turn_of_prompts_is_no_batch_that_is_full() -> None:
    """A hundred tokens may be computed between two turns of those who decode, and eighty were launched."""
    world, node = costly(prefill_stall={"max_ns": 100_000, "min_tokens": 16})
    hold(world, node, prompt_len=20)
    for token_ns, is_full in ((1000, False), (5000, True)):
        node.state.chunk_budget = ChunkBudget(num_measured=1, took_ns=Nanos(token_ns), num_launched=80)
        delayer = Delayer(node.state.settings.delayer)
        assert delayer.look(node.state, node.state.live(State.COMPUTING), 8).gets_no_larger is is_full


def test_a_batch_of_as_many_prompts_as_may_be_is_not_waited_for() -> None:
    world, node = costly(prompt_batch_max=2)
    first = hold(world, node)
    second = world.submit(node, prompt_len=4, max_new_tokens=1, seed=60)
    world.run_until(lambda: first in node.started)
    assert [row.request for row in prompt_batches(node)[-1].rows] == [first, second]


def test_a_batch_that_comes_anyway_takes_others_along() -> None:
    """A long prompt is under way, and its next chunk costs what it costs."""
    world, node = costly(chunk_tokens=64)
    long = world.submit(node, prompt_len=63 + 64 * 20, max_new_tokens=1, seed=50)
    world.run_until(lambda: any(row.request == long for plan in prompt_batches(node) for row in plan.rows))
    world.submit(node, prompt_len=4, max_new_tokens=1, seed=60)
    before = waits_by_passes(node)
    world.run_until(lambda: long in node.ended)
    assert set(waits_by_passes(node) - before) <= {0}


def test_a_batch_for_which_another_rank_lacks_slots_is_usual_with_as_many_prompts_as_may_be() -> None:
    """Else the slot gate would wait for the slots of a batch that never comes."""
    world, node = node_with({**PATIENT, "prompt_batch_max": 2}, prompt_batch_max=2)
    settle(world, node)
    delayer, state = Delayer(node.state.settings.delayer), node.state.delayer
    state.load = RankLoad(True, num_running=1, num_free_slots=15, usual_batch=2, num_waiting=9)
    full = RankLoad(True, num_running=16, num_free_slots=0, num_waiting=1)
    state.decision, _ = agree((state.load, full), DelayHistory(has_skipped_first=True), delayer.settings)
    assert not state.decision.allows
    delayer.planned(node.state, 0)
    assert state.batches[-1] == 2


def test_no_more_prompts_than_allowed_share_a_batch() -> None:
    world, node = node_with(None, prompt_batch_max=3)
    asked = [world.submit(node, prompt_len=4, max_new_tokens=2, seed=seed) for seed in range(8)]
    world.run()
    assert [len(plan.rows) for plan in prompt_batches(node)] == [3, 3, 2]
    assert all(node.tokens[request] == expected_tokens(4, 2, seed=seed) for seed, request in enumerate(asked))


def test_a_node_that_is_restored_goes_on_with_what_it_has_measured() -> None:
    world, node = costly()
    hold(world, node)
    before = node.state.delayer, node.state.chunk_budget
    node.node.restore(node.node.snapshot())
    assert (node.state.delayer, node.state.chunk_budget) == before
    assert node.state.chunk_budget.cost.fixed_ns == 100_000


def test_the_slot_gate_waits_until_a_usual_batch_fits() -> None:
    """Many wait, so the queue gate would be open; slots become free one by one."""
    world, node = node_with(PATIENT, max_running=8)
    for number in range(40):
        world.submit(node, prompt_len=4, max_new_tokens=6 + number % 8, seed=number)
    world.run()
    sizes = [len(plan.rows) for plan in prompt_batches(node)]
    assert sizes[0] == 8
    assert sizes[1] < 8, "the first time a gate would close is skipped"
    assert min(sizes[2:-1]) >= 6, "nobody decodes any more; the last tokens of one or two are still being sampled"
    assert sum(sizes) == 40
    assert_nothing_is_held(node)


def test_requests_that_are_not_admitted_yet_count_as_waiting() -> None:
    world, node = node_with(QUEUE_GATE, chunk_tokens=16, window_depth=1)
    settle_in(world, node)  # in batches of four: four is what has to wait
    waiting = [world.submit(node, prompt_len=16, max_new_tokens=1, seed=seed) for seed in range(60, 64)]
    world.turn(node)
    assert node.state_of(waiting[-1]) is State.QUEUED, "the chunk budget admits one at a time"
    world.run_until(lambda: waiting[0] in node.started)
    assert waits_by_passes(node) == {0: len(prompt_batches(node))}


# --- nobody waits for ever -------------------------------------------------------------------------------------------


def test_the_queue_gate_gives_up_at_its_deadline() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_ns": 40_000})
    settle_in(world, node)
    request = hold(world, node)
    since = node.state.delayer.since
    assert since is not None
    world.run_until(lambda: request in node.started)
    began = next(now for now, _, effects in node.log if any(request in rows_of(c) for c in effects.commands))
    assert since + 40_000 <= began <= since + 43_000, "one step later at most"


def rows_of(command: Any) -> list[RequestId]:
    return [row.request for row in command.plan.rows] if hasattr(command, "plan") else []


def test_the_time_at_which_the_gate_opens_is_a_wake_up_and_only_one() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_ns": 5 * SECOND})
    settle_in(world, node)
    node.holds.add(BatchReturned)
    request = world.submit(node, prompt_len=4, max_new_tokens=3, seed=50)
    world.run()
    assert node.wake_at is not None
    assert node.state.delayer.since is None, "the window is full: it was not asked yet"
    node.holds.clear()
    world.turn(node)
    node.holds.add(BatchReturned)
    opens_at = node.state.delayer.since + 5 * SECOND
    assert node.wake_at == opens_at
    steps = node.state.steps
    world.advance(6 * SECOND)
    assert node.state.steps == steps + 1
    assert node.wake_at is None or node.wake_at > world.now
    node.release()
    world.run_until(lambda: request in node.ended)
    assert node.tokens[request] == expected_tokens(4, 3, seed=50)


def test_the_passes_are_a_bound_for_both_gates() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_passes": 5})
    settle_in(world, node)
    num_plans = len(node.plans())
    request = hold(world, node)
    world.run_until(lambda: request in node.ended)
    later = node.plans()[num_plans:]
    before = next(index for index, plan in enumerate(later) if request in [row.request for row in plan.rows])
    asked_at = next(index for index, plan in enumerate(later) if plan.iteration >= later[0].iteration)
    assert before - asked_at <= 4 + node.state.settings.window_depth, "four denials, behind what was launched already"


def test_past_its_deadline_the_queue_gate_does_not_open_the_slot_gate() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_ns": 10_000}, max_running=9)
    settle_in(world, node)  # one slot is free, and eight are usual
    request = hold(world, node)
    world.now += 20_000
    for _ in range(50):
        world.turn(node)
    assert node.state_of(request) is State.COMPUTING
    assert node.progress(request).waiting_for is WaitingFor.GATE


def test_a_pool_that_is_hardly_used_lets_everybody_begin() -> None:
    """Eight of 400 pages are used."""
    for watermark, is_held in ((0.019, True), (0.021, False)):
        world, node = node_with({**QUEUE_GATE, "low_watermark": watermark})
        running = [world.submit(node, prompt_len=4, max_new_tokens=400, seed=seed) for seed in range(8)]
        world.run_until(lambda node=node, running=running: len(node.tokens.get(running[-1], [])) == 3)
        for seed in (50, 51):  # the first one may be let in because it is the first
            last = world.submit(node, prompt_len=4, max_new_tokens=1, seed=seed)
            for _ in range(3):
                world.turn(node)
        assert (last in node.started) is not is_held


def test_what_waiting_prompts_hold_is_not_used() -> None:
    """They have pages already; counted as used, they would keep themselves from beginning."""
    world, node = node_with({**QUEUE_GATE, "low_watermark": 0.3}, chunk_tokens=8192)
    for seed in range(8):
        world.submit(node, prompt_len=4, max_new_tokens=400, seed=seed)
    world.run_until(lambda: len(node.state.queues[State.RUNNING]) == 8)
    for seed in (50, 51):  # the first one may be let in because it is the first
        last = world.submit(node, prompt_len=300 * 16 - 1, max_new_tokens=1, seed=seed)
        world.run_until(lambda last=last: node.state_of(last) is State.COMPUTING)
        world.run_until(lambda last=last: last in node.ended)
    assert waits_by_passes(node) == {0: len(prompt_batches(node))}


def test_the_slot_gate_forgets_a_peak_that_would_not_come_again() -> None:
    """It does not delay for ever; the window is counted in prompt batches, begun or without slots."""
    world, node = node_with({**PATIENT, "window": 4})
    settle_in(world, node, count=10)
    request = hold(world, node)
    world.run_until(lambda: request in node.ended)
    assert waits_by_passes(node)[3] == 1


def test_the_queue_gate_does_not_get_used_to_the_few_whom_it_holds() -> None:
    world, node = node_with({**QUEUE_GATE, "window": 4})
    settle_in(world, node)
    request = hold(world, node)
    for _ in range(50):
        world.turn(node)
    assert node.progress(request).waiting_for is WaitingFor.GATE


def test_where_nobody_decodes_nobody_waits() -> None:
    world, node = node_with(QUEUE_GATE)
    first = world.submit(node, prompt_len=4, max_new_tokens=1)
    world.run()
    second = world.submit(node, prompt_len=4, max_new_tokens=5)
    world.run()
    assert {first, second} <= set(node.ended)
    assert set(waits_by_passes(node)) == {0}


def test_where_those_who_decode_cannot_go_on_nobody_waits_for_them() -> None:
    """The one running row needs a page, all pages are held, and some of them by a transfer that takes its time."""
    world = World()
    prefill = world.prefill()
    delayer = {"queue_min_ratio": 10.0, "prompt_batch_max": 8, "max_delay_ns": NEVER_NS, **PATIENT}
    decode = world.decode(delayer=delayer, num_pages=16, conservativeness=0.0, prefix_cache=False, window_depth=1)
    decode.holds |= {PagesLanded, TransferDrained}
    _, draining = world.pair(prefill, decode, prompt_len=100, seed=1)
    world.run()
    world.abort(decode, draining)
    world.run()
    assert decode.state_of(draining) is State.DRAINING
    running = world.submit(decode, prompt_len=4, max_new_tokens=40, seed=2)
    world.run_until(lambda: running in decode.started)
    first = world.submit(decode, prompt_len=4, max_new_tokens=1, seed=3)
    world.run_until(lambda: first in decode.ended)
    request = hold(world, decode, prompt_len=8 * 16 - 1, max_new_tokens=1, seed=4)
    assert decode.state.pool.num_free == 0
    world.run_until(lambda: request in decode.ended)
    assert decode.state_of(draining) is State.DRAINING
    assert len(decode.tokens[running]) < 40
    decode.release()
    world.run()
    assert decode.tokens[running] == expected_tokens(4, 40, seed=2)
    assert_nothing_is_held(decode)


def test_a_prompt_that_has_begun_goes_on_and_does_not_let_others_in() -> None:
    world, node = node_with(QUEUE_GATE, chunk_tokens=16)
    running = world.submit(node, prompt_len=4, max_new_tokens=400, seed=1)
    world.run_until(lambda: node.state_of(running) is State.RUNNING)
    settle_in(world, node)
    long = world.submit(node, prompt_len=160, max_new_tokens=2, seed=60)
    node.state.delayer.memory = type(node.state.delayer.memory)(0, False)  # as if no gate had ever been closed
    world.run_until(lambda: node.state_of(long) is State.COMPUTING and node.progress(long).launched > 0)
    other = world.submit(node, prompt_len=4, max_new_tokens=2, seed=61)
    world.run_until(lambda: long in node.started)
    assert other not in node.started
    assert node.progress(other).waiting_for is WaitingFor.GATE
    assert all(len(plan.rows) == 1 for plan in prompt_batches(node)[-9:])


# --- what is held ends like everything else --------------------------------------------------------------------------


def test_an_abort_of_the_held_request_ends_the_delay() -> None:
    world, node = node_with(QUEUE_GATE)
    settle_in(world, node)
    request = hold(world, node)
    world.send(node, AbortRequested(request))
    world.run_until(lambda: request in node.ended)
    assert node.ended[request].stage == "gate"
    for _ in range(3):
        world.turn(node)
    assert node.state.delayer.since is None
    assert node.state.delayer.memory.delayed_passes == 0


def test_a_missed_deadline_names_the_gate() -> None:
    world, node = node_with(QUEUE_GATE)
    settle_in(world, node)
    request = hold(world, node, timeout_ns=SECOND)
    world.now += SECOND
    world.run_until(lambda: request in node.ended)
    assert node.cause(request) is Cause.DEADLINE_EXCEEDED
    assert node.ended[request].stage == "gate"


def test_the_wait_is_on_the_ledger_as_waiting() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_ns": 40_000})
    settle_in(world, node)
    request = hold(world, node)
    world.run_until(lambda: request in node.ended)
    stages = dict(node.ended[request].ledger.stages)
    assert stages["prefill_waiting"] >= 40_000
    assert stages["prefill_forward"] < 10_000
    assert sum(stages.values()) == node.started_at[request] - node.arrived_at[request]


# --- what is counted -------------------------------------------------------------------------------------------------


def test_without_the_delayer_nothing_of_it_is_counted() -> None:
    world, node = node_with(None)
    keep_busy(world, node, clients=4, requests=8)
    assert not [name for name in named(numbers(node.node)) if "delayer" in name]
    assert not waits_by_passes(node)
    assert node.state.delayer.outcomes == {}


def test_outcomes_and_waits_are_counted_once_per_pass() -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_passes": 7})
    settle_in(world, node)
    request = hold(world, node)
    world.run_until(lambda: request in node.ended)
    gauges = counted(node, DelayerWaits(7))
    labels = "input_estimation={},output_allow={},output_reason={},actual_execution={}"
    outcome = f"prefill_delayer_outcomes_total{{{{{labels}}}}}"
    assert gauges[outcome.format("all", "false", "delay", "false")] == 6
    assert gauges[outcome.format("all", "true", "wait_timeout", "true")] == 1
    assert gauges[outcome.format("none", "true", "", "false")] > 0
    executed = sum(value for name, value in gauges.items() if name.endswith("actual_execution=true}"))
    assert executed == len(prompt_batches(node)) == gauges["prefill_delayer_wait_forward_passes_count"]
    assert gauges["prefill_delayer_wait_forward_passes_sum"] == 6
    assert gauges["prefill_delayer_wait_forward_passes_bucket{le=5.0}"] == executed - 1
    assert gauges["prefill_delayer_wait_forward_passes_bucket{le=6.0}"] == executed
    assert gauges["prefill_delayer_wait_seconds_count"] == executed
    assert 0 < gauges["prefill_delayer_wait_seconds_sum"] < 1e-3
    assert gauges["prefill_delayer_wait_seconds_bucket{le=0.0}"] == executed - 1
    assert gauges["prefill_delayer_wait_seconds_bucket{le=1.0}"] == executed


def test_waits_are_counted_in_the_buckets_that_were_asked_for() -> None:
    """One prompt waits for six passes of a microsecond each, and whoever came before it for none."""
    world, node = node_with({**QUEUE_GATE, "max_delay_passes": 7})
    settle_in(world, node)
    request = hold(world, node)
    world.run_until(lambda: request in node.ended)
    rest = len(prompt_batches(node)) - 1
    gauges = counted(node, DelayerWaits(7, passes_bounds=(2.0, 5.5, 9.0), seconds_bounds=(1e-6, 1e-3)))
    assert buckets(gauges, "forward_passes") == {
        "0.0": rest,
        "2.0": rest,
        "5.5": rest,
        "6.0": rest + 1,
        "+Inf": rest + 1,
    }
    assert buckets(gauges, "seconds") == {"0.0": rest, "1e-06": rest, "0.001": rest + 1, "+Inf": rest + 1}


def buckets(gauges: dict[str, float], unit: str) -> dict[str, float]:
    """Observations up to each bound, as they are exported."""
    start = f"prefill_delayer_wait_{unit}_bucket{{le="
    return {name.removeprefix(start).rstrip("}"): gauges[name] for name in gauges if name.startswith(start)}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_delay_survives_a_snapshot(depth: int) -> None:
    world, node = node_with({**QUEUE_GATE, "max_delay_passes": 7}, window_depth=depth)
    settle_in(world, node)
    hold(world, node)
    before = node.state
    node.node.restore(node.node.snapshot())
    assert node.state is not before
    assert node.state == before
    assert node.state.delayer.since is not None
