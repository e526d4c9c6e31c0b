"""Optimistic prefill: the three policies as tables of verdicts, the forced retry of sglang#26780, result slots."""

import hashlib

import pytest

from tandem.core.disagg.optimistic_prefill import Off, Park, Retry, Verdict, View, bootstrap_policy, should_force_retry
from tandem.core.disagg.transfer_state import ResultSlots
from tandem.core.settings import NodeSettings, OptimisticPolicy, Role
from tandem.core.values import Incarnation, RequestId


def view(
    *,
    ready: bool = False,
    forced: bool = False,
    retries: int = 0,
    yields: int = 0,
    prompt_len: int = 10,
    parked: int = 0,
) -> View:
    return View(ready, forced, retries, yields, prompt_len, parked)


NOT_READY, READY, FORCED = view(), view(ready=True), view(ready=True, forced=True)
AGAIN, SPENT = view(retries=1), view(retries=3)
YIELDED = view(retries=1, yields=1)
FULL = view(prompt_len=10, parked=95)


@pytest.mark.parametrize(
    ("policy", "seen", "may_start", "at_boundary", "at_end"),
    [
        (Off(), NOT_READY, False, Verdict.GO_ON, Verdict.GO_ON),
        (Off(), READY, True, Verdict.GO_ON, Verdict.GO_ON),
        (Off(), FORCED, True, Verdict.GO_ON, Verdict.GO_ON),
        (Retry(3), NOT_READY, True, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
        (Retry(3), AGAIN, True, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
        (Retry(3), SPENT, False, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
        (Retry(3), READY, True, Verdict.GO_ON, Verdict.GO_ON),
        (Retry(3), FORCED, True, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
        (Retry(0), NOT_READY, False, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
        (Park(100, 1), NOT_READY, True, Verdict.GO_ON, Verdict.PARK),
        (Park(100, 0), NOT_READY, False, Verdict.GO_ON, Verdict.PARK),
        (Park(100, 2), YIELDED, True, Verdict.GO_ON, Verdict.PARK),
        (Park(100, 1), YIELDED, False, Verdict.GO_ON, Verdict.PARK),
        (Park(100, 1), FULL, True, Verdict.GO_ON, Verdict.YIELD),
        (Park(100, 1), READY, True, Verdict.GO_ON, Verdict.GO_ON),
        (Park(100, 1), FORCED, True, Verdict.GIVE_BACK, Verdict.GIVE_BACK),
    ],
)
def test_verdicts(
    policy: Off | Retry | Park, seen: View, may_start: bool, at_boundary: Verdict, at_end: Verdict
) -> None:
    assert policy.may_start(seen) == may_start
    assert policy.at_boundary(seen) is at_boundary
    assert policy.at_end(seen) is at_end


def test_settings_choose_the_policy_and_its_numbers() -> None:
    def chosen(policy: OptimisticPolicy) -> object:
        me = Incarnation("p", "1")
        settings = NodeSettings(
            Role.PREFILL, me, num_pages=1, optimistic=policy, optimistic_retries=5, park_max_tokens=77
        )
        return bootstrap_policy(settings)

    assert isinstance(chosen(OptimisticPolicy.OFF), Off)
    assert chosen(OptimisticPolicy.RETRY) == Retry(5)
    assert chosen(OptimisticPolicy.PARK) == Park(77, max_attempts=1)


def test_the_forced_retry_is_the_definition_of_the_report() -> None:
    for rid in ("a", "rid-17", "übung", ""):
        first_8 = int.from_bytes(hashlib.sha256(rid.encode()).digest()[:8], "big")
        for prob in (0.01, 0.3, 0.5, 0.99):
            assert should_force_retry(rid, prob=prob, prefill_retry_count=0) == (first_8 < prob * 2**64)


def test_known_ids_are_chosen_on_every_machine_alike() -> None:
    chosen = [rid for rid in map(str, range(12)) if should_force_retry(rid, prob=0.5, prefill_retry_count=0)]
    assert chosen == ["0", "1", "3", "4", "7", "8", "9", "10", "11"]  # sha256 of these begins below 0x80


def test_nothing_is_forced_twice_nor_after_a_retraction_nor_without_a_probability() -> None:
    assert should_force_retry("x", prob=1.0, prefill_retry_count=0)
    assert not should_force_retry("x", prob=1.0, prefill_retry_count=1)
    assert not should_force_retry("x", prob=1.0, prefill_retry_count=0, is_retracted=True)
    assert not should_force_retry("x", prob=0.0, prefill_retry_count=0)
    assert not should_force_retry("x", prob=-1.0, prefill_retry_count=0)


@pytest.mark.parametrize("prob", [0.1, 0.25, 0.5, 0.9])
def test_the_share_of_forced_requests_is_the_probability(prob: float) -> None:
    chosen = sum(should_force_retry(f"request-{n}", prob=prob, prefill_retry_count=0) for n in range(4_000))
    assert abs(chosen / 4_000 - prob) < 0.03


def test_a_result_slot_is_taken_once_however_often_it_is_asked_for() -> None:
    table = ResultSlots.empty(2)
    assert table.ensure_metadata_buffer(RequestId(1))
    assert table.ensure_metadata_buffer(RequestId(1))
    assert len(table.free_slots) == 1


def test_an_exhausted_table_answers_false_and_takes_nothing() -> None:
    table = ResultSlots.empty(1)
    assert table.ensure_metadata_buffer(RequestId(1))
    assert not table.ensure_metadata_buffer(RequestId(2))
    assert list(table.owners) == [1]
    assert table.ensure_metadata_buffer(RequestId(1))


def test_giving_a_row_back_twice_gives_it_back_once() -> None:
    table = ResultSlots.empty(2)
    table.ensure_metadata_buffer(RequestId(1))
    for _ in range(3):
        table.maybe_release_metadata_buffer(RequestId(1))
    table.maybe_release_metadata_buffer(RequestId(9))
    assert sorted(table.free_slots) == [0, 1]
    assert table.owners == {}
