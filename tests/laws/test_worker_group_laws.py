"""Laws of a replica's workers: however their words interleave, a batch has returned when the last of them says so."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.batch import BatchOutcome
from tandem.core.values import BatchId, Nanos, ShardId
from tandem.core.worker_group import WorkerGroup, WorkersParted, combined

TOKENS = b"\x07\x00\x00\x00"


def outcome(number: int, *, tokens: bytes = b"", took: int = 1) -> BatchOutcome:
    return BatchOutcome(BatchId(number), number, tokens, bytes(len(tokens) // 4), duration_ns=Nanos(took))


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Number of workers, number of batches, and who returns his next batch when."""
    num_workers, num_batches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return num_workers, num_batches, draw(st.permutations(sorted(range(num_workers)) * num_batches))


@given(interleavings(), st.data())
def test_batches_return_once_each_in_launch_order_with_the_last_worker(
    turns: tuple[int, int, list[int]], data: st.DataObject
) -> None:
    num_workers, num_batches, order = turns
    sampler = data.draw(st.integers(0, num_workers - 1))
    group, said, returned = WorkerGroup(num_workers), [0] * num_workers, 0

    for shard in order:
        assert group.behind == [ShardId(one) for one, count in enumerate(said) if count == returned]
        said[shard] += 1
        part = outcome(said[shard], tokens=TOKENS if shard == sampler else b"", took=10 * said[shard] + shard)
        whole = group.returned(ShardId(shard), part)
        if whole is None:
            assert min(said) == returned, "nobody is waited for who has said it"
            continue
        returned += 1
        assert min(said) == returned == whole.iteration, "nobody is left out"
        assert (whole.tokens, whole.flags) == (TOKENS, b"\0")
        assert whole.duration_ns == 10 * returned + num_workers - 1

    assert returned == num_batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_workers_changes_nothing(times: list[int], random: object) -> None:
    parts = [outcome(1, tokens=TOKENS if index == 0 else b"", took=took) for index, took in enumerate(times)]
    shuffled = parts[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis draws a random.Random

    assert combined(shuffled) == combined(parts)


def test_one_worker_is_its_own_group() -> None:
    alone = outcome(3, tokens=TOKENS)
    assert combined([alone]) == alone
    assert WorkerGroup(1).returned(ShardId(0), alone) == alone


def test_a_batch_of_which_nothing_is_sampled_returns_too() -> None:
    assert combined([outcome(1), outcome(1, took=5)]) == outcome(1, took=5)


@pytest.mark.parametrize(("first", "second"), list(pairwise(range(1, 4))))
def test_workers_that_run_different_batches_have_parted(first: int, second: int) -> None:
    with pytest.raises(WorkersParted, match=f"the same batch is {first} and {second}"):
        combined([outcome(second), outcome(first)])


def test_two_workers_that_sample_have_parted() -> None:
    with pytest.raises(WorkersParted, match="batch 4 was sampled by 2 workers"):
        combined([outcome(4, tokens=TOKENS), outcome(4, tokens=TOKENS)])
