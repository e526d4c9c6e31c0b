"""Ranks that step together: whatever each hears when, all take part in the same steps, and every batch runs once."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lockstep import Lockstep


def test_a_rank_goes_along_for_what_others_have_launched_and_it_has_not_run() -> None:
    own = Lockstep(3)
    assert not own.is_awaited
    own.launched(1)
    assert own.is_awaited
    own.ran([1, 2])
    assert not own.is_awaited
    own.launched(2)
    assert not own.is_awaited, "it has run before it was told here"


@given(data=st.data(), num_ranks=st.integers(2, 4), launches=st.lists(st.integers(0, 3), max_size=12))
def test_every_order_of_news_ends_with_every_batch_run_in_steps_of_all(
    data: st.DataObject, num_ranks: int, launches: list[int]
) -> None:
    """A rank stands in a step until all have come to it; news of launches arrive at any time, in any order of ranks."""
    ranks = [Lockstep(num_ranks) for _ in range(num_ranks)]
    queues: list[deque[int]] = [deque() for _ in ranks]  # own batches that are not begun
    told: list[deque[int]] = [deque() for _ in ranks]  # launches of others that are not heard of yet
    inside: dict[int, bool] = {}  # ranks that stand in the step, and whether with a batch
    left, run = deque(rank % num_ranks for rank in launches), 0
    while True:
        choices = ["launch"] * bool(left) + [f"hear {rank}" for rank in range(num_ranks) if told[rank]]
        choices += [
            f"begin {rank}"
            for rank in range(num_ranks)
            if rank not in inside and (queues[rank] or ranks[rank].is_awaited)
        ]
        if not choices:
            break
        what, _, number = data.draw(st.sampled_from(choices)).partition(" ")
        match what:
            case "launch":
                rank = left.popleft()
                queues[rank].append(1)
                for other in range(num_ranks):
                    if other != rank:
                        told[other].append(rank)
            case "hear":
                ranks[int(number)].launched(told[int(number)].popleft())
            case _:
                inside[int(number)] = bool(queues[int(number)] and queues[int(number)].popleft())
        if len(inside) == num_ranks:
            run += sum(inside.values())
            for lockstep in ranks:
                lockstep.ran([rank for rank, has_batch in inside.items() if has_batch])
            inside.clear()
    assert not inside, "nobody waits for others for ever"
    assert run == len(launches)
