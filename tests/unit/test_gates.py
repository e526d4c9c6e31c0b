"""The prefill delayer's decision as a table: upstream's cases, the report's, later repairs; and what always holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.delayer_policy import (
    Decision,
    Estimation,
    Reason,
    agree,
    expected_batch,
    queue_gate_closes,
    remember_batch,
    slot_gate_closes,
    worth_waiting_for,
)
from tandem.core.settings import DelayerSettings
from tandem.core.values import MILLISECOND, Nanos

A, M, N = (True, True, True, True), (True, False, True, False), (False, False, False, False)
HIGH = (0.9, 0.9, 0.9, 0.9)
ONE_LOW = (0.5, 0.9, 0.9, 0.9)


@dataclass(frozen=True)
class Pass:
    """What four ranks see in one pass, and how long they have been delaying by then."""

    prefillable: tuple[bool, ...]
    usage: tuple[float, ...] = HIGH
    running: int = 0
    usual_batch: int = 0
    waiting: int = 0
    max_running: int = 0
    after_ms: int = 0


@dataclass(frozen=True)
class Case:
    passes: Sequence[Pass]
    allows: bool
    reason: str
    max_delay_passes: int = 100
    watermark: float | None = 0.8
    ratio: float | None = None
    max_delay_ms: int = 5000
    prompt_batch_max: int | None = None


FULL = Pass(A, running=100, usual_batch=80, waiting=10, max_running=1024)
NO_SLOTS = Pass(A, running=1000, usual_batch=80, waiting=10, max_running=1024)

CASES: dict[str, Case] = {
    # the field's own twelve
    "all_prefillable": Case([Pass(A)], True, "no_wait"),
    "all_prefillable_with_previous_wait": Case([Pass(M), Pass(A)], True, "wait_success"),
    "none_prefillable": Case([Pass(N)], True, ""),
    "mixed_delay": Case([Pass(M)], False, "delay"),
    "mixed_watermark_force_allow": Case([Pass(M, ONE_LOW)], True, "token_watermark"),
    "mixed_watermark_disabled": Case([Pass(M, ONE_LOW)], False, "delay", watermark=None),
    "mixed_watermark_not_prefillable": Case([Pass((False, False, True, False), ONE_LOW)], False, "delay"),
    "mixed_timeout": Case([Pass(M)] * 3, True, "wait_timeout", max_delay_passes=3),
    "queue_trigger_delay": Case([FULL] * 2, False, "delay", ratio=0.5),
    "queue_trigger_above_threshold": Case(
        [Pass(A, running=100, usual_batch=80, waiting=64, max_running=1024)], True, "no_wait", ratio=0.5
    ),
    "queue_trigger_disabled_when_ratio_unset": Case(
        [Pass(A, running=100, usual_batch=80, waiting=1, max_running=1024)], True, "no_wait"
    ),
    "queue_trigger_wall_clock_timeout": Case(
        [FULL, FULL, Pass(A, HIGH, 100, 80, 10, 1024, after_ms=200)], True, "wait_success", ratio=0.5, max_delay_ms=50
    ),
    # the report's four, as far as they are not among the twelve
    "queue_trigger_immediate": Case(
        [Pass(A, running=100, usual_batch=80, waiting=50, max_running=1024)] * 3, True, "no_wait", ratio=0.5
    ),
    "queue_trigger_no_effect_on_slot_trigger": Case(
        [NO_SLOTS, NO_SLOTS, Pass(A, HIGH, 1000, 80, 10, 1024, after_ms=200)],
        False, "delay", ratio=0.5, max_delay_ms=50,
    ),
    # repairs that came later
    "the first time a gate would close is skipped": Case([FULL], True, "no_wait", ratio=0.5),
    "slot_condition_delays": Case([NO_SLOTS] * 2, False, "delay"),
    "slot_condition_met": Case(
        [Pass(A, running=944, usual_batch=80, waiting=1, max_running=1024)] * 2, True, "no_wait"
    ),
    "all_prefillable_is_bounded_by_passes": Case([NO_SLOTS] * 4, True, "wait_timeout", max_delay_passes=3),
    "queue_trigger_is_bounded_by_passes": Case([FULL] * 4, True, "wait_timeout", ratio=0.5, max_delay_passes=3),
    "watermark_opens_a_closed_gate": Case(
        [FULL, FULL, Pass(A, ONE_LOW, 100, 80, 10, 1024)], True, "token_watermark", ratio=0.5
    ),
    "the cap is the usual batch": Case(
        [Pass(A, running=100, usual_batch=8, waiting=10, max_running=1024)] * 2, True, "no_wait", ratio=0.5
    ),
    "the cap is the limit of a prompt batch where there is one": Case(
        [Pass(A, running=100, usual_batch=8, waiting=10, max_running=1024)] * 2,
        False, "delay", ratio=0.5, prompt_batch_max=16,
    ),
    "the ratio is of those who run, not of the slots": Case(
        [Pass(A, running=10, usual_batch=80, waiting=5, max_running=1024)] * 2, True, "no_wait", ratio=0.5
    ),
    "nobody runs": Case([Pass(A, usual_batch=80, waiting=1, max_running=4)] * 3, True, "no_wait", ratio=0.5),
}  # fmt: skip


def run(case: Case, order: Sequence[int] = (0, 1, 2, 3)) -> list[tuple[Decision, DelayHistory]]:
    settings = DelayerSettings(
        max_delay_passes=case.max_delay_passes,
        low_watermark=case.watermark,
        queue_min_ratio=case.ratio,
        max_delay_ns=Nanos(case.max_delay_ms * MILLISECOND),
        prompt_batch_max=case.prompt_batch_max,
    )
    memory, found = DelayHistory(), []
    for step in case.passes:
        is_timed_out = memory.delayed_passes > 0 and step.after_ms >= case.max_delay_ms
        ranks = [
            RankLoad(
                is_prefillable,
                is_prefillable and case.watermark is not None and usage < case.watermark,
                step.running,
                step.max_running - step.running,
                step.usual_batch,
                step.waiting,
                is_timed_out,
            )
            for is_prefillable, usage in zip(step.prefillable, step.usage, strict=True)
        ]
        decision, memory = agree([ranks[rank] for rank in order], memory, settings)
        found.append((decision, memory))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_last_pass_of(name: str) -> None:
    decision, memory = run(CASES[name])[-1]
    assert (decision.allows, decision.reason) == (CASES[name].allows, CASES[name].reason)
    if decision.allows:
        assert memory.delayed_passes == 0


@pytest.mark.parametrize(
    ("prefillable", "estimation"), [(A, Estimation.ALL), (M, Estimation.MIXED), (N, Estimation.NONE)]
)
def test_the_decision_tells_who_had_prompts(prefillable: tuple[bool, ...], estimation: Estimation) -> None:
    assert run(Case([Pass(prefillable)], True, ""))[-1][0].estimation is estimation


def test_three_allowed_passes_mean_two_denials() -> None:
    found = [decision.allows for decision, _ in run(Case([Pass(M)] * 7, True, "", max_delay_passes=3))]
    assert found == [False, False, True, False, False, True, False]


def test_one_allowed_pass_means_none() -> None:
    decision, _ = run(Case([Pass(M)], True, "", max_delay_passes=1))[-1]
    assert (decision.allows, decision.reason) == (True, Reason.WAIT_TIMEOUT)


def test_the_gathered_flag_decides_and_one_rank_past_the_timeout_is_enough() -> None:
    """Ranks that straddle the timeout must not part ways: each sees the flags of all."""
    settings = DelayerSettings(queue_min_ratio=0.5, max_delay_ns=Nanos(500 * MILLISECOND), prompt_batch_max=4)
    early = RankLoad(True, False, 8, 100, 4, 1, is_timed_out=False)
    late = RankLoad(True, False, 8, 100, 4, 1, is_timed_out=True)
    waiting = DelayHistory(delayed_passes=2, has_skipped_first=True)
    assert agree([early, early], waiting, settings)[0].reason is Reason.DELAY
    for ranks in ([early, late], [late, early], [late, late]):
        assert agree(ranks, waiting, settings)[0].reason is Reason.WAIT_SUCCESS


def test_of_unequal_ranks_the_one_with_most_running_and_the_one_with_most_waiting_count() -> None:
    """With the smallest numbers a rank that happens to be empty would keep all others from beginning."""
    settings = DelayerSettings(queue_min_ratio=0.5, prompt_batch_max=64)
    memory = DelayHistory(has_skipped_first=True)

    def reason(running: tuple[int, int], waiting: tuple[int, int]) -> Reason:
        ranks = [
            RankLoad(True, num_running=rows, num_free_slots=64, num_waiting=prompts)
            for rows, prompts in zip(running, waiting, strict=True)
        ]
        return agree(ranks, memory, settings)[0].reason

    assert reason((2, 40), (10, 10)) is Reason.DELAY
    assert reason((2, 40), (0, 20)) is Reason.NO_WAIT
    assert reason((2, 40), (19, 19)) is Reason.DELAY


def test_of_unequal_ranks_the_one_with_the_largest_usual_batch_counts() -> None:
    ranks = [RankLoad(True, num_running=9, num_free_slots=6, usual_batch=usual) for usual in (2, 8)]
    assert slot_gate_closes(ranks, DelayerSettings())
    assert not slot_gate_closes(ranks[:1], DelayerSettings())


def test_the_watermark_of_a_rank_without_prompts_opens_nothing() -> None:
    ranks = [RankLoad(True, False), RankLoad(False, True)]
    assert not agree(ranks, DelayHistory(), DelayerSettings(low_watermark=0.8))[0].allows


# --- a gate that tunes itself ----------------------------------------------------------------------------------------

AUTO = DelayerSettings(tunes_itself=True)
HELD_ONCE = DelayHistory(delayed_passes=1, has_skipped_first=True)
# Five prompts in all are worth it: one comes every 90 ms, and 10 rows stand still for 60 ms. 4 x 5 x 90 is less than
# 3 x 600, 5 x 6 x 90 is more.
SEES = RankLoad(
    True, num_running=10, num_free_slots=64, num_waiting=1,
    batch_ns=Nanos(60 * MILLISECOND), next_prompt_ns=Nanos(89 * MILLISECOND),
)  # fmt: skip


def is_held(*ranks: RankLoad, settings: DelayerSettings = AUTO) -> bool:
    return not agree(ranks, HELD_ONCE, settings)[0].allows


def seen(**changes: object) -> RankLoad:
    return msgspec.structs.replace(SEES, **changes)


def test_more_prompts_are_waited_for_as_long_as_they_cost_less_than_one_more_stall() -> None:
    assert worth_waiting_for([SEES]) == 5
    assert [is_held(seen(num_waiting=number)) for number in (1, 4, 5, 20)] == [True, True, False, False]
    assert worth_waiting_for([seen(batch_ns=Nanos(6 * MILLISECOND))]) == 2
    assert worth_waiting_for([seen(batch_ns=Nanos(MILLISECOND // 2))]) == 1, "the one that waits is enough"


def test_nobody_waits_before_costs_are_known_or_where_nobody_is_expected() -> None:
    assert not is_held(seen(batch_ns=Nanos(0)))
    assert not is_held(seen(next_prompt_ns=Nanos(0)))
    assert not is_held(seen(num_running=0))


def test_who_has_waited_for_half_of_what_the_stall_costs_waits_no_longer() -> None:
    assert is_held(seen(waited_ns=Nanos(299 * MILLISECOND)))
    assert not is_held(seen(waited_ns=Nanos(300 * MILLISECOND)))


def test_a_batch_that_gets_no_larger_is_not_waited_for() -> None:
    assert not is_held(seen(gets_no_larger=True))


def test_the_deadline_and_the_passes_bound_a_gate_that_tunes_itself_too() -> None:
    assert not is_held(seen(is_timed_out=True))
    assert not is_held(SEES, settings=DelayerSettings(2, tunes_itself=True))


def test_ranks_that_step_together_count_all_whom_a_batch_stalls_and_all_who_come() -> None:
    assert worth_waiting_for([SEES, seen(num_running=0, next_prompt_ns=Nanos(0))]) == 5
    assert worth_waiting_for([SEES, seen(next_prompt_ns=Nanos(0))]) == 6, "twice as many stand still"
    assert worth_waiting_for([SEES, SEES]) == 9, "and twice as many come: their product is four times as large"
    assert is_held(SEES, seen(num_waiting=7))
    assert not is_held(SEES, seen(num_waiting=8))
    assert worth_waiting_for([SEES, seen(batch_ns=Nanos(0))]) == 9, "the dearest batch, which all wait for"
    assert not is_held(SEES, seen(gets_no_larger=True))
    assert not is_held(SEES, seen(is_timed_out=True))


# --- what always holds -----------------------------------------------------------------------------------------------

counts = st.integers(0, 64)
times = st.builds(Nanos, st.integers(0, 10**9))
measured = (times, times, times, st.booleans())
loads = st.builds(RankLoad, st.booleans(), st.booleans(), counts, counts, counts, counts, st.booleans(), *measured)
prompts = st.builds(RankLoad, st.just(True), st.just(False), counts, counts, counts, counts, st.booleans(), *measured)
memories = st.builds(DelayHistory, st.integers(0, 40), st.booleans())
some_settings = st.builds(
    DelayerSettings,
    max_delay_passes=st.integers(1, 40),
    queue_min_ratio=st.none() | st.floats(0, 2),
    tunes_itself=st.booleans(),
    prompt_batch_max=st.none() | st.integers(1, 64),
)


@given(st.lists(loads, min_size=1, max_size=8), memories, some_settings, st.data())
def test_ranks_move_in_lockstep_in_whatever_order_they_see_each_other(
    ranks: list[RankLoad], memory: DelayHistory, settings: DelayerSettings, data: st.DataObject
) -> None:
    assert agree(data.draw(st.permutations(ranks)), memory, settings) == agree(ranks, memory, settings)


@given(st.lists(st.lists(loads, min_size=3, max_size=3), max_size=60), some_settings)
def test_ranks_that_gather_the_same_keep_the_same_memory(
    passes: list[list[RankLoad]], settings: DelayerSettings
) -> None:
    memories = [DelayHistory()] * 3
    for ranks in passes:
        views = [ranks[rank:] + ranks[:rank] for rank in range(3)]
        found = [agree(view, memory, settings) for view, memory in zip(views, memories, strict=True)]
        memories = [memory for _, memory in found]
        assert len(set(memories)) == len({decision for decision, _ in found}) == 1


@given(st.lists(st.lists(loads, min_size=1, max_size=4), max_size=100), some_settings)
def test_nobody_waits_for_more_passes_than_allowed(passes: list[list[RankLoad]], settings: DelayerSettings) -> None:
    memory, in_a_row = DelayHistory(), 0
    for ranks in passes:
        decision, memory = agree(ranks, memory, settings)
        in_a_row = 0 if decision.allows else in_a_row + 1
        assert in_a_row == memory.delayed_passes <= settings.max_delay_passes - 1


@given(st.lists(prompts, min_size=1, max_size=4), memories, some_settings)
def test_where_nobody_runs_nobody_with_prompts_waits(
    ranks: list[RankLoad], memory: DelayHistory, settings: DelayerSettings
) -> None:
    idle = [msgspec.structs.replace(rank, num_running=0) for rank in ranks]
    assert agree(idle, memory, settings)[0].allows


@given(st.lists(prompts, min_size=1, max_size=4), memories, some_settings)
def test_a_veto_needs_a_closed_gate_and_past_the_deadline_only_the_slot_gate_closes(
    ranks: list[RankLoad], memory: DelayHistory, settings: DelayerSettings
) -> None:
    decision, _ = agree(ranks, memory, settings)
    if not decision.allows:
        assert slot_gate_closes(ranks, settings) or queue_gate_closes(ranks, settings)
        if any(rank.is_timed_out for rank in ranks):
            assert slot_gate_closes(ranks, settings)


@given(st.lists(loads, min_size=1, max_size=4), memories, some_settings)
def test_a_watermark_on_a_rank_with_prompts_always_opens(
    ranks: list[RankLoad], memory: DelayHistory, settings: DelayerSettings
) -> None:
    low = RankLoad(True, True, 60, 0, 64, 0, False)
    assert agree([*ranks, low], memory, settings)[0].reason is Reason.TOKEN_WATERMARK


# --- the usual batch -------------------------------------------------------------------------------------------------


def usual(sizes: Sequence[int], *, window: int) -> list[int]:
    """The largest of the last batches, after each."""
    known: tuple[int, ...] = ()
    found = []
    for size in sizes:
        known = remember_batch(known, size, window=window)
        found.append(max(known))
    return found


def test_a_peak_is_usual_for_as_many_batches_as_the_window_has() -> None:
    assert usual([100, 2, 1, 2, 2], window=4) == [100, 100, 100, 100, 2]
    assert usual([2, 1, 1, 2, 1, 1, 2], window=4) == [2] * 7
    for size in (2, 3, 4):
        assert usual([100] + [size] * 16, window=16) == [100] * 16 + [size]


def test_batches_that_were_not_allowed_count_as_what_they_would_have_been() -> None:
    guess = expected_batch(num_waiting=2, num_running=15, max_running=20)
    assert guess == 2
    assert usual([10] + [guess] * 4, window=4) == [10, 10, 10, 10, 2]
    assert expected_batch(num_waiting=0, num_running=30, max_running=20) == 1
    assert expected_batch(num_waiting=90, num_running=15, max_running=20) == 5


def test_a_window_and_a_batch_of_nothing_are_mistakes() -> None:
    with pytest.raises(ValueError, match="window_size must be positive"):
        remember_batch((), 1, window=0)
    with pytest.raises(ValueError, match="non-empty attempt"):
        remember_batch((), 0, window=4)
