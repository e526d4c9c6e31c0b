"""What the prefill delayer's `auto` goes by: what a prompt batch costs beside its tokens, and how soon one comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.scheduler.prompt_costs import (
    KNOWN_FROM,
    REMEMBERED,
    BatchCost,
    next_prompt_ns,
    remember_arrivals,
)
from tandem.core.values import MILLISECOND, Nanos


def learned(
    *sizes: int, fixed_ms: float = 60, token_us: float = 5, num_decoding: int = 0, is_mixed: bool = False
) -> BatchCost:
    cost = BatchCost()
    for size in sizes:
        took_ns = Nanos(int(fixed_ms * MILLISECOND + size * token_us * 1000))
        cost.learn(size, took_ns, num_decoding=num_decoding, is_mixed=is_mixed)
    return cost


@given(st.lists(st.integers(1, 16_384), min_size=8, max_size=300), st.integers(1, 300), st.integers(0, 100))
def test_what_a_batch_costs_beside_its_tokens_is_found_or_not_known(
    sizes: list[int], fixed_ms: int, token_us: int
) -> None:
    cost = learned(*sizes, fixed_ms=fixed_ms, token_us=token_us)
    assert cost.num_batches < REMEMBERED
    found = cost.fixed_ns
    assert found == 0 or found == pytest.approx(fixed_ms * MILLISECOND, rel=0.05, abs=MILLISECOND // 10)


def test_few_batches_and_batches_of_one_size_say_nothing() -> None:
    sizes = (1000, 2000, 1000, 3000)
    assert learned(*sizes[: KNOWN_FROM[0] - 1]).fixed_ns == 0
    assert learned(*sizes).fixed_ns == pytest.approx(60 * MILLISECOND, rel=0.001)
    assert learned(*[1000] * 50).fixed_ns == 0
    assert learned(*[1000] * 50, 1010).fixed_ns == 0, "through points so near each other goes any line"


def test_where_no_time_is_reported_nothing_is_known() -> None:
    assert learned(1000, 2000, 1000, 3000, fixed_ms=0, token_us=0).fixed_ns == 0


def test_no_batch_is_said_to_cost_more_than_the_cheapest_took() -> None:
    """The first prompt after a start may wait for weights that are on disk: little of it is what batches cost."""
    cost = BatchCost()
    cost.learn(16, Nanos(3000 * MILLISECOND), num_decoding=0, is_mixed=False)
    for size in (130, 512, 40, 130, 512):
        cost.learn(size, Nanos(20 * MILLISECOND + size * MILLISECOND), num_decoding=0, is_mixed=False)
    assert 20 * MILLISECOND <= cost.fixed_ns <= 60 * MILLISECOND


def test_what_batches_cost_long_ago_is_forgotten() -> None:
    cost = learned(*[1000, 3000] * 100, fixed_ms=200)
    for size in [1000, 3000] * 150:
        cost.learn(size, Nanos(20 * MILLISECOND + size * 5000), num_decoding=0, is_mixed=False)
    assert cost.fixed_ns == pytest.approx(20 * MILLISECOND, rel=0.05)


def test_where_decode_rows_ride_along_they_wait_for_what_the_batch_takes_longer_than_without_prompts() -> None:
    cost = BatchCost()
    for size in (1000, 2000, 1000, 3000):
        cost.learn(0, Nanos(10 * MILLISECOND), num_decoding=8, is_mixed=True)
        cost.learn(size, Nanos(70 * MILLISECOND + size * 5000), num_decoding=8, is_mixed=True)
        cost.learn(size, Nanos(500 * MILLISECOND), num_decoding=0, is_mixed=True)  # nobody waited for that one
    assert cost.fixed_ns == pytest.approx(60 * MILLISECOND, rel=0.001)


def every(pause: int, count: int, first: int = 0) -> tuple[Nanos, ...]:
    return tuple(Nanos(first + pause * index) for index in range(count))


def test_prompts_that_come_evenly_are_expected_in_what_is_left_of_a_pause() -> None:
    arrivals = every(100, KNOWN_FROM[1] + 1)
    assert next_prompt_ns(arrivals, arrivals[-1]) == 100
    assert next_prompt_ns(arrivals, Nanos(arrivals[-1] + 70)) == 30
    assert next_prompt_ns(arrivals, Nanos(arrivals[-1] + 100)) == 0, "never was a pause longer"
    assert next_prompt_ns(arrivals[1:], arrivals[-1]) == 0, "too few to tell"


def test_once_a_burst_is_over_the_next_prompt_is_far_away() -> None:
    bursts = tuple(time for first in (0, 10_000, 20_000, 30_000) for time in every(10, 8, first))
    assert next_prompt_ns(bursts, bursts[-1]) < 1500
    assert next_prompt_ns(bursts, Nanos(bursts[-1] + 10)) == 9920, "9930 after the last one of a burst came the next"


def test_each_prompt_is_remembered_once_and_the_last_ones_only() -> None:
    known = remember_arrivals((), [Nanos(5), Nanos(5), Nanos(3)])
    assert known == (3, 5, 5)
    assert remember_arrivals(known, [Nanos(5), Nanos(5), Nanos(9)]) == (3, 5, 5, 9)
    many = remember_arrivals(known, every(1, 500, 10))
    assert len(many) == REMEMBERED + 1
    assert many[-1] == 509
